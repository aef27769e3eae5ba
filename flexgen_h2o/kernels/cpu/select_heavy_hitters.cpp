// select_heavy_hitters: select the highest scores with a radix select, then gather keys, values,
// scores and positions into the slots in one pass, without sorting.
//
// A task is one KV head of one sequence.
#include "groups.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int BINS = 2048;

// Map floats to integers with the same order. +0 and -0 map to one integer.
inline uint32_t ordered(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The largest key that at least `count_left` keys reach, and the surplus of keys equal to it. The
// search goes digit by digit from the top, with a histogram of the keys that match so far.
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
    const SelectHeavyHitters& args;
    const Prompt& prompt;
    int64_t sequence, head;
    uint8_t* quantized;
    int64_t slot = 0;

    // Keep token `i` of the prompt.
    INLINE void keep(int64_t i) {
        const int64_t row = prompt.first + i;
        const int64_t at = (sequence * args.kv_heads + head) * args.num_slots + slot;
        write_slot(args, args.key_layout, slot_start(args, 0, sequence, head, slot),
                   static_cast<const T*>(args.k) + row * args.k_row + head * args.k_head, quantized);
        write_slot(args, args.value_layout, slot_start(args, 1, sequence, head, slot),
                   static_cast<const T*>(args.v) + row * args.v_row + head * args.v_head, quantized);
        args.kept_scores[at] = args.scores ? args.scores[head * args.scores_head + row] : 0.0f;
        args.positions[at] = static_cast<int32_t>(i);
        if (args.ranks) args.ranks[at] = static_cast<int32_t>(slot);
        slot++;
    }

    void finish() {
        const int64_t at = (sequence * args.kv_heads + head) * args.num_slots;
        for (int64_t i = slot; i < args.num_slots; i++) {
            args.kept_scores[at + i] = 0;
            args.positions[at + i] = EMPTY;
            if (args.ranks) args.ranks[at + i] = 0;
        }
    }
};

template <class T>
void cut(const SelectHeavyHitters& args, const Prompt& prompt, int64_t sequence, int64_t head,
         uint32_t* keys, uint8_t* quantized) {
    Gather<T> gather{args, prompt, sequence, head, quantized};
    const int64_t tokens = prompt.length, first = args.sinks, last = tokens - prompt.recent;
    if (tokens <= first + prompt.heavy + prompt.recent) {
        for (int64_t i = 0; i < tokens; i++) gather.keep(i);
        gather.finish();
        return;
    }
    for (int64_t i = 0; i < first; i++) gather.keep(i);
    if (prompt.heavy > 0 && !args.scores) {  // all scores are equal, so keep the newest
        for (int64_t i = last - prompt.heavy; i < last; i++) gather.keep(i);
    } else if (prompt.heavy > 0) {
        const float* scores = args.scores + head * args.scores_head + prompt.first;
        const int64_t count = last - first;
        for (int64_t i = first; i < last; i++)
            keys[i - first] =
                ordered(args.mean ? scores[i] / static_cast<float>(tokens - i) : scores[i]);
        uint32_t* bins = keys + count;
        Threshold limit = threshold(keys, count, prompt.heavy, bins);
        for (int64_t i = 0; i < count; i++) {
            if (keys[i] < limit.key) continue;
            // Of equal scores, drop the oldest first.
            if (keys[i] == limit.key && limit.surplus > 0)
                limit.surplus--;
            else
                gather.keep(first + i);
        }
    }
    for (int64_t i = last; i < tokens; i++) gather.keep(i);
    gather.finish();
}

template <class T>
int select(const SelectHeavyHitters& args) {
    const Buffer<Prompt> prompts = allocate<Prompt>(args.sequences);
    if (!prompts) return NO_MEMORY;
    int64_t rows = 0, longest = 0;
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t* one = args.cuts + 3 * s;
        prompts[s] = {rows, one[0], one[1], one[2]};
        rows += one[0];
        if (one[0] > longest) longest = one[0];
    }
    const int64_t scratch_size = longest + BINS;
    const Buffer<uint32_t> keys = allocate<uint32_t>(args.threads * scratch_size);
    const Buffer<uint8_t> quantized = allocate<uint8_t>(args.threads * args.head_dim);
    if (!keys || !quantized) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t task = 0; task < args.sequences * args.kv_heads; task++) {
        const int64_t sequence = task / args.kv_heads, thread = thread_index();
        cut<T>(args, prompts[sequence], sequence, task % args.kv_heads,
               keys.get() + thread * scratch_size, quantized.get() + thread * args.head_dim);
    }
    return DONE;
}

}  // namespace

int select_heavy_hitters(const SelectHeavyHitters& args) { BY_DTYPE(select) }

}  // namespace ISA
