// fetch_tokens: read KV entries of missing tokens from a file into their slots.
//
// Nearby file blocks are merged into one request. With direct I/O, the calling thread keeps up to
// QUEUE_DEPTH requests in flight with Linux AIO (io_submit(2)) and copies the tokens of each request
// on completion. Otherwise several threads read.
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

// A range of `blocks` file blocks from `block` on, read to `buffer_offset` in the read buffer, and the
// missing tokens `first` to `end` that it contains.
struct Run {
    int64_t block, blocks, buffer_offset, first, end;
};

struct Token {
    int64_t head, token, slot;
};

Token missing(const FetchTokens& args, int64_t i) {
    return {args.missing[i], args.missing[args.missing_row + i], args.missing[2 * args.missing_row + i]};
}

int64_t block_of(const FetchTokens& args, const Token& at) {
    return at.head * args.head_pages + at.token / args.page_tokens;
}

// Plan runs of missing tokens from `first` on, as many as fit in the read buffer.
int64_t plan(const FetchTokens& args, int64_t first, Run* runs) {
    const int64_t capacity = args.read_buffer_bytes / args.page_bytes;
    int64_t count = 0, filled = 0;
    for (int64_t i = first; i < args.count; i++) {
        const int64_t block = block_of(args, missing(args, i));
        if (count) {
            Run& last = runs[count - 1];
            const int64_t blocks = block - last.block + 1, more = blocks - last.blocks;
            if (blocks > 0 && more <= args.gap + 1 && blocks <= args.max_read_pages &&
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
        runs[count++] = {block, 1, filled++ * args.page_bytes, i, i + 1};
    }
    return count;
}

void copy_tokens(const FetchTokens& args, const Run& run) {
    for (int64_t i = run.first; i < run.end; i++) {
        const Token at = missing(args, i);
        const char* block = static_cast<const char*>(args.read_buffer) + run.buffer_offset +
                            (block_of(args, at) - run.block) * args.page_bytes;
        std::memcpy(
            static_cast<char*>(args.slots) + (at.head * args.num_slots + at.slot) * args.token_bytes,
            block + at.token % args.page_tokens * args.token_bytes,
            static_cast<size_t>(args.token_bytes));
    }
}

char* target(const FetchTokens& args, const Run& run) {
    return static_cast<char*>(args.read_buffer) + run.buffer_offset;
}

int64_t offset(const FetchTokens& args, const Run& run) {
    return args.offset + run.block * args.page_bytes;
}

int64_t size(const FetchTokens& args, const Run& run) { return run.blocks * args.page_bytes; }

bool read_run(const FetchTokens& args, const Run& run) {
    for (int64_t done = 0; done < size(args, run);) {
        const ssize_t received =
            pread(static_cast<int>(args.file), target(args, run) + done,
                  static_cast<size_t>(size(args, run) - done), offset(args, run) + done);
        if (received <= 0 && !(received < 0 && errno == EINTR)) return false;
        if (received > 0) done += received;
    }
    return true;
}

bool read_with_threads(const FetchTokens& args, const Run* runs, int64_t count) {
    int64_t failed = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : failed) num_threads(args.threads)
    for (int64_t i = 0; i < count; i++) {
        if (read_run(args, runs[i])) {
            copy_tokens(args, runs[i]);
        } else {
            failed++;
        }
    }
    return !failed;
}

#if defined(__linux__)
// Queue depth. A measurement on a virtual disk, in 4 KB reads per second: 88,000 with a depth of 64,
// 99,000 with 256, 97,000 with 1,024.
constexpr int64_t QUEUE_DEPTH = 256;

// The AIO context of a thread, destroyed with the thread. It is 0 if unsupported.
struct Context {
    Context() {
        if (syscall(SYS_io_setup, QUEUE_DEPTH, &number)) number = 0;
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
bool read_async(const FetchTokens& args, const Run* runs, int64_t count) {
    const Buffer<iocb> requests = allocate<iocb>(count);
    const Buffer<iocb*> pointers = allocate<iocb*>(count);
    if (!requests || !pointers) return false;
    for (int64_t i = 0; i < count; i++) {
        iocb& request = *(pointers[i] = &requests[i]);
        request = {};
        request.aio_data = static_cast<uint64_t>(i);
        request.aio_lio_opcode = IOCB_CMD_PREAD;
        request.aio_fildes = static_cast<uint32_t>(args.file);
        request.aio_buf = reinterpret_cast<uint64_t>(target(args, runs[i]));
        request.aio_nbytes = static_cast<uint64_t>(size(args, runs[i]));
        request.aio_offset = offset(args, runs[i]);
    }
    io_event events[QUEUE_DEPTH];
    int64_t submitted = 0, ended = 0, stop = count;
    bool whole = true;
    while (ended < submitted || submitted < stop) {
        const int64_t capacity = QUEUE_DEPTH - (submitted - ended), left = stop - submitted;
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
        const int64_t in_flight = submitted - ended;
        const int64_t completed =
            syscall(SYS_io_getevents, context(), submitted == stop ? in_flight : (in_flight + 1) / 2,
                    QUEUE_DEPTH, events, nullptr);
        for (int64_t i = 0; i < completed; i++) {
            const Run& run = runs[events[i].data];
            if (events[i].res == size(args, run)) {
                copy_tokens(args, run);
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

bool read_async(const FetchTokens&, const Run*, int64_t) { return false; }
#endif

// Return whether every missing token is in the file and has a slot.
bool valid(const FetchTokens& args) {
    for (int64_t i = 0; i < args.count; i++) {
        const Token at = missing(args, i);
        if (at.head < 0 || at.head >= args.heads || at.token < 0 ||
            at.token >= args.head_pages * args.page_tokens || at.slot < 0 || at.slot >= args.num_slots)
            return false;
    }
    return true;
}

}  // namespace

int fetch_tokens(const FetchTokens& args) {
    if (!valid(args)) return INVALID;
    const int64_t capacity = args.read_buffer_bytes / args.page_bytes;
    const int64_t max_runs = capacity < args.count ? capacity : args.count;
    const Buffer<Run> runs = allocate<Run>(max_runs);
    if (!runs) return NO_MEMORY;
    const bool async = args.direct && context();
    int64_t &done = args.counts[0] = 0, &nbytes = args.counts[1] = 0;
    while (done < args.count) {
        const int64_t count = plan(args, done, runs.get());
        // Fall back to threads if AIO fails.
        if (!(async && read_async(args, runs.get(), count)) &&
            !read_with_threads(args, runs.get(), count))
            break;
        for (int64_t i = 0; i < count; i++) nbytes += size(args, runs[i]);
        done = runs[count - 1].end;
    }
    return DONE;
}

}  // namespace ISA
