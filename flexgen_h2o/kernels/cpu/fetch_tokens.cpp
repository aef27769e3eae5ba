// fetch_tokens: read KV entries of missing tokens from a file into their slots.
//
// Nearby file blocks are merged into one request. With direct I/O, the calling thread keeps up to DEPTH
// requests in flight with Linux AIO (io_submit(2)) and copies the tokens of each request on completion.
// Otherwise several threads read.
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels.h"
#include "memory.h"

#if defined(__linux__)
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#endif

namespace ISA {
namespace {

// A range of `blocks` file blocks from `block` on, read to `place` in the read buffer, and the
// missing tokens `first` to `end` that it contains.
struct Run {
    int64_t block, blocks, place, first, end;
};

struct Token {
    int64_t head, token, slot;
};

Token missing(const FetchTokens& a, int64_t i) {
    return {a.missing[i], a.missing[a.missing_row + i], a.missing[2 * a.missing_row + i]};
}

int64_t block_of(const FetchTokens& a, const Token& at) {
    return at.head * a.head_pages + at.token / a.page_tokens;
}

// Plan runs of missing tokens from `first` on, as many as fit in the read buffer.
int64_t plan(const FetchTokens& a, int64_t first, Run* runs) {
    const int64_t capacity = a.read_buffer_bytes / a.page_bytes;
    int64_t count = 0, filled = 0;
    for (int64_t i = first; i < a.count; i++) {
        const int64_t block = block_of(a, missing(a, i));
        if (count) {
            Run& last = runs[count - 1];
            const int64_t blocks = block - last.block + 1, more = blocks - last.blocks;
            if (blocks > 0 && more <= a.gap + 1 && blocks <= a.max_read_pages &&
                filled + more <= capacity) {
                if (more > 0) {
                    last.blocks = blocks;
                    filled += more;
                }
                last.end = i + 1;
                continue;
            }
        }
        if (filled == capacity) break;
        runs[count++] = {block, 1, filled++ * a.page_bytes, i, i + 1};
    }
    return count;
}

void put(const FetchTokens& a, const Run& run) {
    for (int64_t i = run.first; i < run.end; i++) {
        const Token at = missing(a, i);
        const char* block = static_cast<const char*>(a.read_buffer) + run.place +
                             (block_of(a, at) - run.block) * a.page_bytes;
        std::memcpy(static_cast<char*>(a.slots) +
                        (at.head * a.num_slots + at.slot) * a.token_bytes,
                    block + at.token % a.page_tokens * a.token_bytes,
                    static_cast<size_t>(a.token_bytes));
    }
}

char* target(const FetchTokens& a, const Run& run) {
    return static_cast<char*>(a.read_buffer) + run.place;
}

int64_t offset(const FetchTokens& a, const Run& run) {
    return a.offset + run.block * a.page_bytes;
}

int64_t size(const FetchTokens& a, const Run& run) { return run.blocks * a.page_bytes; }

bool read_run(const FetchTokens& a, const Run& run) {
    for (int64_t done = 0; done < size(a, run);) {
        const ssize_t received =
            pread(static_cast<int>(a.file), target(a, run) + done,
                  static_cast<size_t>(size(a, run) - done), offset(a, run) + done);
        if (received <= 0 && !(received < 0 && errno == EINTR)) return false;
        if (received > 0) done += received;
    }
    return true;
}

bool read_by_threads(const FetchTokens& a, const Run* runs, int64_t count) {
    int64_t lost = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : lost) num_threads(a.threads)
    for (int64_t i = 0; i < count; i++) {
        if (read_run(a, runs[i])) {
            put(a, runs[i]);
        } else {
            lost++;
        }
    }
    return !lost;
}

#if defined(__linux__)
// Queue depth. A measurement on a virtual disk, in 4 KB reads per second: 88,000 with a depth of 64,
// 99,000 with 256, 97,000 with 1,024.
constexpr int64_t DEPTH = 256;

// The AIO context of a thread, destroyed with the thread. It is 0 if unsupported.
struct Context {
    Context() {
        if (syscall(SYS_io_setup, DEPTH, &number)) number = 0;
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context() {
        if (number) syscall(SYS_io_destroy, number);
    }
    aio_context_t number = 0;
};

aio_context_t context() {
    thread_local const Context instance;
    return instance.number;
}

// Read all runs with AIO. Return only when no request is in flight, even after an error.
bool read_at_once(const FetchTokens& a, const Run* runs, int64_t count) {
    const Memory<iocb> requests = memory<iocb>(count);
    const Memory<iocb*> pointers = memory<iocb*>(count);
    if (!requests || !pointers) return false;
    for (int64_t i = 0; i < count; i++) {
        iocb& request = *(pointers[i] = &requests[i]);
        request = {};
        request.aio_data = static_cast<uint64_t>(i);
        request.aio_lio_opcode = IOCB_CMD_PREAD;
        request.aio_fildes = static_cast<uint32_t>(a.file);
        request.aio_buf = reinterpret_cast<uint64_t>(target(a, runs[i]));
        request.aio_nbytes = static_cast<uint64_t>(size(a, runs[i]));
        request.aio_offset = offset(a, runs[i]);
    }
    io_event events[DEPTH];
    int64_t submitted = 0, ended = 0, stop = count;
    bool whole = true;
    while (ended < submitted || submitted < stop) {
        const int64_t capacity = DEPTH - (submitted - ended), left = stop - submitted;
        if (capacity && left) {
            const int64_t accepted =
                syscall(SYS_io_submit, context(), capacity < left ? capacity : left,
                        pointers.get() + submitted);
            if (accepted > 0) {
                submitted += accepted;
            } else if (errno != EAGAIN || submitted == ended) {
                stop = submitted;  // after an error, requests in flight still have to end
                whole = false;
                continue;
            }
        }
        // At the end wait for all requests, before that for half of them, because each wakeup costs
        // time.
        const int64_t under_way = submitted - ended;
        const int64_t completed = syscall(SYS_io_getevents, context(),
                                          submitted == stop ? under_way : (under_way + 1) / 2, DEPTH,
                                          events, nullptr);
        for (int64_t i = 0; i < completed; i++) {
            const Run& run = runs[events[i].data];
            if (events[i].res == size(a, run)) {
                put(a, run);
            } else {
                whole = false;
            }
        }
        if (completed > 0) ended += completed;  // negative if interrupted by a signal
    }
    return whole;
}
#else
int64_t context() { return 0; }

bool read_at_once(const FetchTokens&, const Run*, int64_t) { return false; }
#endif

// Return whether every missing token is in the file and has a slot.
bool valid(const FetchTokens& a) {
    for (int64_t i = 0; i < a.count; i++) {
        const Token at = missing(a, i);
        if (at.head < 0 || at.head >= a.heads || at.token < 0 ||
            at.token >= a.head_pages * a.page_tokens || at.slot < 0 || at.slot >= a.num_slots)
            return false;
    }
    return true;
}

}  // namespace

int fetch_tokens(const FetchTokens& a) {
    if (!valid(a)) return INVALID;
    const int64_t capacity = a.read_buffer_bytes / a.page_bytes;
    const int64_t max_runs = capacity < a.count ? capacity : a.count;
    const Memory<Run> runs = memory<Run>(max_runs);
    if (!runs) return NO_MEMORY;
    const bool at_once = a.direct && context();
    int64_t &done = a.counts[0] = 0, &nbytes = a.counts[1] = 0;
    while (done < a.count) {
        const int64_t count = plan(a, done, runs.get());
        // Fall back to threads if AIO fails.
        if (!(at_once && read_at_once(a, runs.get(), count)) &&
            !read_by_threads(a, runs.get(), count))
            break;
        for (int64_t i = 0; i < count; i++) nbytes += size(a, runs[i]);
        done = runs[count - 1].end;
    }
    return DONE;
}

}  // namespace ISA
