// assign_slots: look up the hot-set slots of the selected tokens, and assign slots to the misses.
//
// A task is one KV head of one sequence.
#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace ISA {
namespace {

// Key of a slot whose token is selected. Keys of other slots are non-negative and smaller.
constexpr int32_t SELECTED = INT32_MAX;

// The slots with the `count` lowest keys: all below `limit`, and the first `equal` slots with a key of
// `limit`.
struct Lowest {
    int32_t limit = 0;
    int64_t equal;
};

// `stride` is a multiple of WIDTH.
Lowest lowest(const int32_t* keys, int64_t stride, int64_t count) {
    Lowest best{0, count};
    for (int bit = 30; bit >= 0 && best.equal; bit--) {
        const int32_t limit = best.limit | 1 << bit;
        const int64_t below = count_below(keys, stride, limit);
        if (below <= count) best = {limit, count - below};
    }
    return best;
}

// Return the number of misses of a head and store their indices in `misses` [top_k]. Add the number
// of hits to `hits`. `keys` has capacity for `stride` slots, a multiple of WIDTH.
int64_t assign(const AssignSlots& args, int64_t head, int32_t* misses, int32_t* keys, int64_t stride,
               int64_t& hits) {
    const int32_t first = args.first_recent[head / args.kv_heads];
    const int32_t* selected = args.selected + head * args.top_k;
    const int32_t* log_weights = args.log_weights + head * args.tokens;
    int32_t *slots = args.slots + head * args.top_k, *slot_of = args.slot_of + head * args.tokens;
    int32_t* token_of = args.token_of + head * args.num_slots;
    int64_t count = 0;
    for (int64_t i = 0; i < args.top_k; i++) {
        const int32_t token = selected[i];
        if (token < 0) {
            slots[i] = -1;
        } else if (token >= first) {
            slots[i] = static_cast<int32_t>(args.num_slots + token % args.newest);
        } else if ((slots[i] = slot_of[token]) < 0) {
            misses[count++] = static_cast<int32_t>(i);
        } else {
            hits++;
        }
    }
    if (!count) return 0;
    for (int64_t slot = 0; slot < args.num_slots; slot++)
        keys[slot] = token_of[slot] < 0 ? 0 : log_weights[token_of[slot]];
    for (int64_t slot = args.num_slots; slot < stride; slot++) keys[slot] = SELECTED;
    for (int64_t i = 0; i < args.top_k; i++)
        if (slots[i] >= 0 && slots[i] < args.num_slots) keys[slots[i]] = SELECTED;
    auto [limit, equal] = lowest(keys, stride, count);
    int64_t assigned = 0;
    for (int32_t slot = 0; assigned < count; slot++) {
        if (keys[slot] > limit || (keys[slot] == limit && equal-- <= 0)) continue;
        const int32_t token = selected[misses[assigned]];
        if (token_of[slot] >= 0) slot_of[token_of[slot]] = -1;
        slots[misses[assigned++]] = slot;
        slot_of[token] = slot;
        token_of[slot] = token;
    }
    return count;
}

// Return whether all selected tokens of a head are in the cache, and the slots suffice.
bool valid(const AssignSlots& args, int64_t head) {
    const int32_t* selected = args.selected + head * args.top_k;
    int64_t others = 0;
    for (int64_t i = 0; i < args.top_k; i++) {
        if (selected[i] >= args.tokens) return false;
        others += selected[i] >= 0 && selected[i] < args.first_recent[head / args.kv_heads];
    }
    return others <= args.num_slots;
}

}  // namespace

int assign_slots(const AssignSlots& args) {
    const int64_t heads = args.sequences * args.kv_heads;
    const Buffer<int32_t> misses = allocate<int32_t>(heads * args.top_k);
    const Buffer<int64_t> counts = allocate<int64_t>(2 * heads);
    const int64_t stride = round_up(args.num_slots, WIDTH);
    const Buffer<int32_t> keys = allocate<int32_t>(args.threads * stride);
    if (!misses || !counts || !keys) return NO_MEMORY;
    int64_t invalid = 0;
#pragma omp parallel for reduction(+ : invalid) num_threads(args.threads)
    for (int64_t head = 0; head < heads; head++) invalid += !valid(args, head);
    if (invalid) return INVALID;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t head = 0; head < heads; head++) {
        counts[2 * head + 1] = 0;
        counts[2 * head] = assign(args, head, misses.get() + head * args.top_k,
                                  keys.get() + thread_index() * stride, stride, counts[2 * head + 1]);
    }
    args.counts[0] = args.counts[1] = 0;
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < counts[2 * head]; i++) {
            const int64_t at = head * args.top_k + misses[head * args.top_k + i], to = args.counts[0]++;
            args.missing[to] = head;
            args.missing[heads * args.top_k + to] = args.selected[at];
            args.missing[2 * heads * args.top_k + to] = args.slots[at];
        }
        args.counts[1] += counts[2 * head + 1];
    }
    return DONE;
}

}  // namespace ISA
