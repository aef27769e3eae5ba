// select_heavy_hitters: select the highest scores with a radix select, then gather keys, values, scores
// and positions into the slots in one pass, without sorting.
//
// A task is one KV head of one sequence.
#include "groups.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int BINS = 2048;

// Map floats to integers with the same order. +0 and -0 map to one integer.
inline uint32_t ordered(float x) {
    const uint32_t bits = bits_of<uint32_t>(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The largest key that at least `count_left` keys reach, and the surplus of keys equal to it. The search
// goes digit by digit from the top, with a histogram of the keys that match so far.
struct Threshold {
    uint32_t key;
    int64_t surplus;
};

Threshold threshold(const uint32_t* keys, int64_t count, int64_t count_left, uint32_t* bins) {
    uint32_t prefix = 0, known = 0;  // known digits, and their bit mask
    const int shifts[] = {21, 10, 0};
    for (const int shift : shifts) {
        const uint32_t digit = shift == 0 ? 0x3ff : BINS - 1;
        std::memset(bins, 0, BINS * sizeof *bins);
        for (int64_t i = 0; i < count; i++)
            if ((keys[i] & known) == prefix) bins[keys[i] >> shift & digit]++;
        uint32_t bin = digit;
        while (bins[bin] < count_left) count_left -= bins[bin--];
        prefix |= bin << shift;
        known |= digit << shift;
        if (shift == 0) return {prefix, bins[bin] - count_left};
    }
    return {prefix, 0};
}

struct Prompt {
    int64_t first, length, heavy, recent;  // first: row
};

template <class T>
struct Gather {
    const SelectHeavyHitters& a;
    const Prompt& prompt;
    int64_t sequence, head;
    uint8_t* quantized;
    int64_t slot = 0;

    // Keep token `i` of the prompt.
    INLINE void take(int64_t i) {
        const int64_t row = prompt.first + i;
        const int64_t at = (sequence * a.kv_heads + head) * a.num_slots + slot;
        write_slot(a, a.key_layout, slot_start(a, 0, sequence, head, slot),
                   static_cast<const T*>(a.k) + row * a.k_row + head * a.k_head, quantized);
        write_slot(a, a.value_layout, slot_start(a, 1, sequence, head, slot),
                   static_cast<const T*>(a.v) + row * a.v_row + head * a.v_head, quantized);
        a.kept_scores[at] = a.scores ? a.scores[head * a.scores_head + row] : 0.0f;
        a.positions[at] = static_cast<int32_t>(i);
        if (a.ranks) a.ranks[at] = static_cast<int32_t>(slot);
        slot++;
    }

    void finish() {
        const int64_t at = (sequence * a.kv_heads + head) * a.num_slots;
        for (int64_t i = slot; i < a.num_slots; i++) {
            a.kept_scores[at + i] = 0;
            a.positions[at + i] = EMPTY;
            if (a.ranks) a.ranks[at + i] = 0;
        }
    }
};

template <class T>
void cut(const SelectHeavyHitters& a, const Prompt& prompt, int64_t sequence, int64_t head,
         uint32_t* keys, uint8_t* quantized) {
    Gather<T> gather{a, prompt, sequence, head, quantized};
    const int64_t tokens = prompt.length, first = a.sinks, last = tokens - prompt.recent;
    if (tokens <= first + prompt.heavy + prompt.recent) {
        for (int64_t i = 0; i < tokens; i++) gather.take(i);
        gather.finish();
        return;
    }
    for (int64_t i = 0; i < first; i++) gather.take(i);
    if (prompt.heavy > 0 && !a.scores) {  // all scores are equal, so keep the newest
        for (int64_t i = last - prompt.heavy; i < last; i++) gather.take(i);
    } else if (prompt.heavy > 0) {
        const float* scores = a.scores + head * a.scores_head + prompt.first;
        const int64_t count = last - first;
        for (int64_t i = first; i < last; i++)
            keys[i - first] =
                ordered(a.mean ? scores[i] / static_cast<float>(tokens - i) : scores[i]);
        uint32_t* bins = keys + count;
        Threshold limit = threshold(keys, count, prompt.heavy, bins);
        for (int64_t i = 0; i < count; i++) {
            if (keys[i] < limit.key) continue;
            // Of equal scores, drop the oldest first.
            if (keys[i] == limit.key && limit.surplus > 0)
                limit.surplus--;
            else
                gather.take(first + i);
        }
    }
    for (int64_t i = last; i < tokens; i++) gather.take(i);
    gather.finish();
}

template <class T>
int select(const SelectHeavyHitters& a) {
    const Memory<Prompt> prompts = memory<Prompt>(a.sequences);
    if (!prompts) return NO_MEMORY;
    int64_t rows = 0, longest = 0;
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t* one = a.cuts + 3 * s;
        prompts[s] = {rows, one[0], one[1], one[2]};
        rows += one[0];
        if (one[0] > longest) longest = one[0];
    }
    const int64_t scratch_size = longest + BINS;
    const Memory<uint32_t> keys = memory<uint32_t>(a.threads * scratch_size);
    const Memory<uint8_t> quantized = memory<uint8_t>(a.threads * a.head_dim);
    if (!keys || !quantized) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        const int64_t sequence = task / a.kv_heads, thread = thread_number();
        cut<T>(a, prompts[sequence], sequence, task % a.kv_heads, keys.get() + thread * scratch_size,
               quantized.get() + thread * a.head_dim);
    }
    return DONE;
}

}  // namespace

int select_heavy_hitters(const SelectHeavyHitters& a) { BY_DTYPE(select) }

}  // namespace ISA
