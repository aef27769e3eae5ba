// take_slots: the slots of chosen tokens in fast memory, and new ones for those that have none.
//
// A task is one KV head of one sequence.
#include <cstring>

#include "kernels.h"
#include "memory.h"

namespace ISA {
namespace {

// The `rank`-th smallest (from 1) of the times [count] that are before `step`; the times that are
// smaller are taken off `rank`. Times are counted in 256 bins, and again in those of one bin, until
// a bin is one time.
int32_t oldest(const int32_t* times, int64_t count, int32_t step, int64_t& rank) {
    constexpr int BITS = 8, BINS = 1 << BITS;
    int32_t low = step, shift = 0;
    for (int64_t i = 0; i < count; i++) low = times[i] < low ? times[i] : low;
    while ((step - low) >> shift >= BINS) shift++;
    for (int64_t above = step;; shift = shift > BITS ? shift - BITS : 0) {
        int32_t bins[BINS] = {}, bin = 0;
        for (int64_t i = 0; i < count; i++)
            if (times[i] >= low && times[i] < above) bins[(times[i] - low) >> shift]++;
        for (; bins[bin] < rank; bin++) rank -= bins[bin];
        low += bin << shift;
        if (!shift) return low;
        const int64_t end = low + (int64_t{1} << shift);
        above = end < above ? end : above;
    }
}

// How many of a head's tokens have to come, [most] places of which are left in `away`; those that
// are there are added to `held`.
int64_t take(const TakeSlots& a, int64_t head, int32_t* away, int64_t& held) {
    const int32_t step = static_cast<int32_t>(a.step), first = a.firsts[head / a.kv_heads];
    const int32_t* chosen = a.chosen + head * a.most;
    int32_t *slots = a.slots + head * a.most, *slot_of = a.slot_of + head * a.tokens;
    int32_t *token_of = a.token_of + head * a.num_slots, *wanted = a.wanted + head * a.num_slots;
    int64_t count = 0;
    for (int64_t i = 0; i < a.most; i++) {
        const int32_t token = chosen[i];
        if (token < 0) {
            slots[i] = -1;
        } else if (token >= first) {
            slots[i] = static_cast<int32_t>(a.num_slots + token % a.newest);
        } else if ((slots[i] = slot_of[token]) >= 0) {
            wanted[slots[i]] = step;
            held++;
        } else {
            away[count++] = static_cast<int32_t>(i);
        }
    }
    if (!count) return 0;
    int64_t equal = count;
    const int32_t last = oldest(wanted, a.num_slots, step, equal);
    int64_t given = 0;
    for (int32_t slot = 0; given < count; slot++) {
        if (wanted[slot] > last || (wanted[slot] == last && equal-- <= 0)) continue;
        const int32_t token = chosen[away[given]];
        if (token_of[slot] >= 0) slot_of[token_of[slot]] = -1;
        slots[away[given++]] = slot;
        slot_of[token] = slot;
        token_of[slot] = token;
        wanted[slot] = step;
    }
    return count;
}

// Whether every token of a head is one of the cache, and there are slots enough for them.
bool valid(const TakeSlots& a, int64_t head) {
    const int32_t* chosen = a.chosen + head * a.most;
    int64_t others = 0;
    for (int64_t i = 0; i < a.most; i++) {
        if (chosen[i] >= a.tokens) return false;
        others += chosen[i] >= 0 && chosen[i] < a.firsts[head / a.kv_heads];
    }
    return others <= a.num_slots;
}

}  // namespace

int take_slots(const TakeSlots& a) {
    const int64_t heads = a.sequences * a.kv_heads;
    const Memory<int32_t> away = memory<int32_t>(heads * a.most);
    const Memory<int64_t> counts = memory<int64_t>(2 * heads);
    if (!away || !counts) return NO_MEMORY;
    int64_t invalid = 0;
#pragma omp parallel for reduction(+ : invalid) num_threads(a.threads)
    for (int64_t head = 0; head < heads; head++) invalid += !valid(a, head);
    if (invalid) return INVALID;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t head = 0; head < heads; head++) {
        counts[2 * head + 1] = 0;
        counts[2 * head] = take(a, head, away.get() + head * a.most, counts[2 * head + 1]);
    }
    a.counts[0] = a.counts[1] = 0;
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < counts[2 * head]; i++) {
            const int64_t at = head * a.most + away[head * a.most + i], to = a.counts[0]++;
            a.missing[to] = head;
            a.missing[heads * a.most + to] = a.chosen[at];
            a.missing[2 * heads * a.most + to] = a.slots[at];
        }
        a.counts[1] += counts[2 * head + 1];
    }
    return DONE;
}

}  // namespace ISA
