// The part of GCC's OpenMP library that the kernels call, with threads that ThreadSanitizer sees:
// `make test-tsan`. It is linked into the kernels' library in place of libgomp.
//
// Only the start, the end and the barriers of a team order its threads, as OpenMP promises. The
// counters of dynamic loops are atomic, and this file is compiled without the sanitizer: they order
// nothing, so that no race is hidden behind a chunk that one thread took after another.

#include <omp.h>
#include <pthread.h>

#include <atomic>
#include <thread>
#include <vector>

namespace {

constexpr int CONSTRUCTS = 4096;  // of one parallel region: loops with dynamic chunks, and singles

struct Team {
    int size;
    pthread_barrier_t barrier;
    std::vector<std::atomic<long>> taken;  // chunks of a loop; threads at a single
    explicit Team(int threads) : size(threads), taken(CONSTRUCTS) {
        pthread_barrier_init(&barrier, nullptr, threads);
    }
    ~Team() { pthread_barrier_destroy(&barrier); }
};

struct Loop {
    long start, end, step, chunk;
};

struct Member {
    Team *team = nullptr;
    int number = 0;
    int constructs = 0;  // that this thread has reached
    Loop loop{};
};

thread_local Member member;

std::atomic<long> &construct(int number) { return member.team->taken.at(number); }

void run(void (*function)(void *), void *data, Team *team, int number) {
    Member before = member;
    member = {team, number, 0, {}};
    function(data);
    member = before;
}

bool next(long *begin, long *end) {
    const Loop &loop = member.loop;
    long first = loop.start +
                 construct(member.constructs - 1).fetch_add(1) * loop.chunk * loop.step;
    if (loop.step > 0 ? first >= loop.end : first <= loop.end) return false;
    long last = first + loop.chunk * loop.step;
    *begin = first;
    *end = (loop.step > 0 ? last > loop.end : last < loop.end) ? loop.end : last;
    return true;
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*function)(void *), void *data, unsigned threads, unsigned) {
    Team team(threads ? threads : 1);
    std::vector<std::thread> others;
    for (int number = 1; number < team.size; ++number)
        others.emplace_back(run, function, data, &team, number);
    run(function, data, &team, 0);
    for (auto &other : others) other.join();
}

void GOMP_barrier() {
    if (member.team) pthread_barrier_wait(&member.team->barrier);
}

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long *first,
                                          long *last) {
    member.loop = {start, end, step, chunk};
    ++member.constructs;
    return next(first, last);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long *first, long *last) { return next(first, last); }

void GOMP_loop_end() { GOMP_barrier(); }

void GOMP_loop_end_nowait() {}

bool GOMP_single_start() {
    return !member.team || construct(member.constructs++).fetch_add(1) == 0;
}

int omp_get_num_threads() { return member.team ? member.team->size : 1; }

int omp_get_thread_num() { return member.number; }
}
