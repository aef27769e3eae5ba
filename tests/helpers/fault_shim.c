// Faults of the operating system, for a process that loads this library first (LD_PRELOAD).
//
// Calls on files below a watched folder are counted by kind, and so are allocations. The Nth call of
// a kind fails with an error, or transfers half of its bytes. With a log, changes of the watched files
// are written to it, so that a test can replay a power loss. helpers/faults.py binds the functions.
#define _GNU_SOURCE
#undef _FORTIFY_SOURCE  // its wrappers are functions that are defined here
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind { OPEN, READ, WRITE, SYNC, CHANGE, MAP, ALLOCATE, KINDS };
enum { HALF = -1 };  // in place of an error: transfer half of the bytes

#define DESCRIPTORS 4096
#define LARGE (512 << 10)  // bytes from which calls of malloc count: more than a buffer of a socket
// Bytes of the stack of Python's frames in a new thread. Python waits forever for a thread that does
// not get it.
#define FRAMES (16 << 10)

static char folder[PATH_MAX];
static size_t folder_length;
static unsigned char watched[DESCRIPTORS];
static long counts[KINDS];
static int armed_kind = -1, armed_error, armed_stays;
static long armed_number;
static long faults;
static int counting;
static int log_file = -1;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static long (*next_syscall)(long, ...);

// The C library's `syscall`, which this library also replaces.
static long (*system_call(void))(long, ...) {
    if (!next_syscall) next_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return next_syscall;
}
#define CALL(...) (system_call()(__VA_ARGS__))

// Begin with no watched folder's calls counted; an empty path ends counting.
void faults_watch(const char* path) {
    folder_length = strlen(path);
    memcpy(folder, path, folder_length + 1);
    memset(counts, 0, sizeof counts);
    faults = 0;
    armed_kind = -1;
    __atomic_store_n(&counting, folder_length > 0, __ATOMIC_SEQ_CST);
}

// Let call number `number` of a kind fail, counted from `faults_watch` on, and if it `stays` all later
// ones of that kind.
void faults_arm(int kind, long number, int error, int stays) {
    armed_number = number;
    armed_error = error;
    armed_stays = stays;
    __atomic_store_n(&armed_kind, kind, __ATOMIC_SEQ_CST);
}

void faults_disarm(void) { __atomic_store_n(&armed_kind, -1, __ATOMIC_SEQ_CST); }

long faults_count(int kind) { return __atomic_load_n(&counts[kind], __ATOMIC_SEQ_CST); }

long faults_made(void) { return __atomic_load_n(&faults, __ATOMIC_SEQ_CST); }

// Log changes into an open file from now on; -1 ends that.
void faults_log(int file) { log_file = file; }

// Count a call. Return 0, or the error of this call.
static int fault(int kind) {
    if (!counting) return 0;
    const long number = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != armed_kind || number < armed_number || (number > armed_number && !armed_stays))
        return 0;
    __atomic_add_fetch(&faults, 1, __ATOMIC_SEQ_CST);
    return armed_error;
}

static int is_watched(int file) {
    return counting && file >= 0 && file < DESCRIPTORS && watched[file];
}

static int below(const char* path) {
    return counting && path && !strncmp(path, folder, folder_length) &&
           (path[folder_length] == '/' || !path[folder_length]);
}

static int at_watched(int directory, const char* path) {
    return path && (path[0] == '/' ? below(path) : is_watched(directory));
}

// The absolute path of what `path` names. Only for the log.
static void absolute(int directory, const char* path, char* result) {
    if (path[0] == '/') {
        snprintf(result, PATH_MAX, "%s", path);
        return;
    }
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    const ssize_t length = readlink(link, result, PATH_MAX - 1);
    snprintf(result + (length > 0 ? length : 0), PATH_MAX - (length > 0 ? length : 0), "/%s", path);
}

// A record of the log: a line of operation, path, other path, offset and length, then the bytes.
static void put(const char* operation, const char* path, const char* other, long offset,
                const void* bytes, size_t length) {
    pthread_mutex_lock(&log_lock);
    char line[2 * PATH_MAX + 128];
    const int size = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", operation, path, other,
                              offset, bytes ? length : 0);
    CALL(SYS_write, log_file, line, size);
    if (bytes) CALL(SYS_write, log_file, bytes, length);
    pthread_mutex_unlock(&log_lock);
}

static void put_file(const char* operation, int file, long offset, size_t length) {
    if (log_file < 0) return;
    const int error = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    const ssize_t end = readlink(link, path, sizeof path - 1);
    path[end > 0 ? end : 0] = 0;
    char* bytes = NULL;
    if (!strcmp(operation, "write")) {
        const int again = CALL(SYS_openat, AT_FDCWD, link, O_RDONLY);
        bytes = malloc(length ? length : 1);
        for (size_t done = 0; done < length;) {
            const ssize_t got = CALL(SYS_pread64, again, bytes + done, length - done, offset + done);
            if (got <= 0) abort();
            done += got;
        }
        CALL(SYS_close, again);
    }
    put(operation, path, "", bytes ? offset : (long)length, bytes, length);
    free(bytes);
    errno = error;
}

static void put_path(const char* operation, int directory, const char* path, int other_directory,
                     const char* other) {
    if (log_file < 0) return;
    const int error = errno;
    char first[PATH_MAX], second[PATH_MAX] = "";
    absolute(directory, path, first);
    if (other) absolute(other_directory, other, second);
    put(operation, first, second, 0, NULL, 0);
    errno = error;
}

// A mark in the log: what was acknowledged by then.
void faults_mark(const char* text) {
    if (log_file >= 0) put("mark", text, "", 0, NULL, 0);
}

#define FAIL(error, result)  \
    do {                     \
        errno = (error);     \
        return (result);     \
    } while (0)

// Files

static int open_file(int directory, const char* path, int flags, mode_t mode) {
    const int mine = at_watched(directory, path);
    if (mine) {
        const int error = fault(OPEN);
        if (error) FAIL(error == HALF ? EIO : error, -1);
    }
    const int logs = mine && log_file >= 0;
    const int is_new = logs && CALL(SYS_faccessat, directory, path, F_OK) != 0;
    const int file = CALL(SYS_openat, directory, path, flags | O_LARGEFILE, mode);
    if (file >= 0 && file < DESCRIPTORS) watched[file] = mine;
    if (logs && file >= 0) {
        if (is_new) put_path("create", directory, path, 0, NULL);
        else if (flags & O_TRUNC) put_file("truncate", file, 0, 0);
    }
    return file;
}

#define MODE(flags)                                  \
    mode_t mode = 0;                                 \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {         \
        va_list arguments;                           \
        va_start(arguments, flags);                  \
        mode = va_arg(arguments, mode_t);            \
        va_end(arguments);                           \
    }

int open(const char* path, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char* path, int flags, ...) {
    MODE(flags)
    return open_file(directory, path, flags, mode);
}
int openat64(int directory, const char* path, int flags, ...) {
    MODE(flags)
    return open_file(directory, path, flags, mode);
}

int close(int file) {
    if (file >= 0 && file < DESCRIPTORS) watched[file] = 0;
    return CALL(SYS_close, file);
}

static ssize_t half(size_t length) { return length > 1 ? length / 2 : length; }

ssize_t read(int file, void* buffer, size_t length) {
    const int error = is_watched(file) ? fault(READ) : 0;
    if (error > 0) FAIL(error, -1);
    return CALL(SYS_read, file, buffer, error ? half(length) : length);
}

ssize_t pread64(int file, void* buffer, size_t length, off64_t offset) {
    const int error = is_watched(file) ? fault(READ) : 0;
    if (error > 0) FAIL(error, -1);
    return CALL(SYS_pread64, file, buffer, error ? half(length) : length, offset);
}
ssize_t pread(int file, void* buffer, size_t length, off_t offset) {
    return pread64(file, buffer, length, offset);
}

// The vectors that this package reads and writes have one part.
ssize_t preadv64(int file, const struct iovec* parts, int count, off64_t offset) {
    const int error = is_watched(file) ? fault(READ) : 0;
    if (error > 0) FAIL(error, -1);
    if (error == HALF && count == 1)
        return CALL(SYS_pread64, file, parts->iov_base, half(parts->iov_len), offset);
    return CALL(SYS_preadv, file, parts, count, (long)offset, (long)((uint64_t)offset >> 32));
}
ssize_t preadv(int file, const struct iovec* parts, int count, off_t offset) {
    return preadv64(file, parts, count, offset);
}

static ssize_t written(int file, ssize_t length, off64_t offset) {
    if (length > 0 && is_watched(file)) put_file("write", file, offset, length);
    return length;
}

ssize_t write(int file, const void* buffer, size_t length) {
    const int error = is_watched(file) ? fault(WRITE) : 0;
    if (error > 0) FAIL(error, -1);
    const ssize_t done = CALL(SYS_write, file, buffer, error ? half(length) : length);
    return done > 0 && log_file >= 0 && is_watched(file)
               ? written(file, done, CALL(SYS_lseek, file, 0, SEEK_CUR) - done) : done;
}

ssize_t pwrite64(int file, const void* buffer, size_t length, off64_t offset) {
    const int error = is_watched(file) ? fault(WRITE) : 0;
    if (error > 0) FAIL(error, -1);
    return written(file, CALL(SYS_pwrite64, file, buffer, error ? half(length) : length, offset),
                   offset);
}
ssize_t pwrite(int file, const void* buffer, size_t length, off_t offset) {
    return pwrite64(file, buffer, length, offset);
}

ssize_t pwritev64(int file, const struct iovec* parts, int count, off64_t offset) {
    if (count == 1) return pwrite64(file, parts->iov_base, parts->iov_len, offset);
    const int error = is_watched(file) ? fault(WRITE) : 0;
    if (error > 0) FAIL(error, -1);
    return written(file, CALL(SYS_pwritev, file, parts, count, (long)offset,
                                 (long)((uint64_t)offset >> 32)), offset);
}
ssize_t pwritev(int file, const struct iovec* parts, int count, off_t offset) {
    return pwritev64(file, parts, count, offset);
}

ssize_t sendfile64(int to, int from, off64_t* offset, size_t length) {
    const int error = is_watched(to) ? fault(WRITE) : is_watched(from) ? fault(READ) : 0;
    if (error > 0) FAIL(error, -1);
    const ssize_t done = CALL(SYS_sendfile, to, from, offset, error ? half(length) : length);
    return done > 0 && log_file >= 0 && is_watched(to)
               ? written(to, done, CALL(SYS_lseek, to, 0, SEEK_CUR) - done) : done;
}
ssize_t sendfile(int to, int from, off_t* offset, size_t length) {
    return sendfile64(to, from, offset, length);
}

static int sync_file(long number, int file) {
    const int error = is_watched(file) ? fault(SYNC) : 0;
    if (error) FAIL(error == HALF ? EIO : error, -1);
    const int result = CALL(number, file);
    if (!result && is_watched(file)) put_file("sync", file, 0, 0);
    return result;
}
int fsync(int file) { return sync_file(SYS_fsync, file); }
int fdatasync(int file) { return sync_file(SYS_fdatasync, file); }

// Folders and sizes

static int change(int mine) {
    const int error = mine ? fault(CHANGE) : 0;
    return error == HALF ? EIO : error;
}

int ftruncate64(int file, off64_t length) {
    const int error = change(is_watched(file));
    if (error) FAIL(error, -1);
    const int result = CALL(SYS_ftruncate, file, length);
    if (!result && is_watched(file)) put_file("truncate", file, 0, length);
    return result;
}
int ftruncate(int file, off_t length) { return ftruncate64(file, length); }

int posix_fallocate64(int file, off64_t offset, off64_t length) {
    const int error = change(is_watched(file));
    if (error) return error;
    return ((__typeof__(&posix_fallocate64))dlsym(RTLD_NEXT, "posix_fallocate64"))(file, offset,
                                                                                  length);
}
int posix_fallocate(int file, off_t offset, off_t length) {
    return posix_fallocate64(file, offset, length);
}

int renameat(int from_directory, const char* from, int to_directory, const char* to) {
    const int mine = at_watched(from_directory, from) || at_watched(to_directory, to);
    const int error = change(mine);
    if (error) FAIL(error, -1);
    const int result = CALL(SYS_renameat2, from_directory, from, to_directory, to, 0);
    if (!result && mine) put_path("rename", from_directory, from, to_directory, to);
    return result;
}
int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int directory, const char* path, int flags) {
    const int mine = at_watched(directory, path), error = change(mine);
    if (error) FAIL(error, -1);
    const int result = CALL(SYS_unlinkat, directory, path, flags);
    if (!result && mine) put_path("unlink", directory, path, 0, NULL);
    return result;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int directory, const char* path, mode_t mode) {
    const int mine = at_watched(directory, path), error = change(mine);
    if (error) FAIL(error, -1);
    const int result = CALL(SYS_mkdirat, directory, path, mode);
    if (!result && mine) put_path("mkdir", directory, path, 0, NULL);
    return result;
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

// Memory

void* mmap64(void* address, size_t length, int protection, int flags, int file, off64_t offset) {
    const int error = flags & MAP_ANONYMOUS ? length != FRAMES && fault(ALLOCATE)
                                            : is_watched(file) && fault(MAP);
    if (error) FAIL(ENOMEM, MAP_FAILED);
    return (void*)CALL(SYS_mmap, address, length, protection, flags, file, offset);
}
void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) {
    return mmap64(address, length, protection, flags, file, offset);
}

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

void* malloc(size_t length) {
    if (length >= LARGE && fault(ALLOCATE)) FAIL(ENOMEM, NULL);
    return __libc_malloc(length);
}

void* calloc(size_t count, size_t length) {
    if (count * length >= LARGE && fault(ALLOCATE)) FAIL(ENOMEM, NULL);
    return __libc_calloc(count, length);
}

void* realloc(void* before, size_t length) {
    if (length >= LARGE && fault(ALLOCATE)) FAIL(ENOMEM, NULL);
    return __libc_realloc(before, length);
}

// Tensors and the workspaces of kernels: all of them count.
int posix_memalign(void** result, size_t alignment, size_t length) {
    if (fault(ALLOCATE)) return ENOMEM;
    return (*result = __libc_memalign(alignment, length)) ? 0 : ENOMEM;
}

void* aligned_alloc(size_t alignment, size_t length) {
    if (fault(ALLOCATE)) FAIL(ENOMEM, NULL);
    return __libc_memalign(alignment, length);
}

// Asynchronous reads of the kernels: one call of io_submit is one read.
long syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    if (number == SYS_io_submit && a[1] > 0 &&
        is_watched((*(struct iocb**)a[2])->aio_fildes)) {
        const int error = fault(READ);
        if (error) FAIL(error == HALF ? EIO : error, -1);
    }
    return CALL(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
