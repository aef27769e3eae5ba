// gated_delta_net: the causal convolution and the gated delta rule of a recurrent layer.
//
// A task is a key head of a sequence with its value heads. Tokens come one after the other, as the
// rule is defined: no bit depends on how prompts are split, or on the number of threads. The columns
// of a head's state are independent of one another, and a block of them stays in the L1 cache for a
// tile of tokens.
#include <math.h>

#include "kernels.h"
#include "memory.h"
#include "vector_math.h"

namespace ISA {
namespace {

constexpr int BLOCK_VECTORS = 4;  // of a row of a block of columns
constexpr int64_t BLOCK_COLUMNS = BLOCK_VECTORS * WIDTH;
constexpr int64_t TILE_TOKENS = 32;  // tokens
constexpr float EPSILON = 1e-6f;  // of the norm of queries and keys

// Consecutive channels of a task: where they are in the model, and in scratch memory.
struct Segment {
    int64_t from, to, count;
};

// The scratch memory of a thread, zeroed once. Rows have the channels of a key head: query, key, and
// the values of its value heads. No task writes past them, so that their padding stays 0.
struct Scratch {
    int64_t shared, values, width, tile;
    float *weights;  // [kernel, width]
    float *inputs;   // [kernel - 1 + tile, width], before the convolution
    float *outputs;  // [tile, width], after it
    float *decay, *beta;  // [shared, tile]
    float* block;         // [key_dim, BLOCK_COLUMNS]

    Scratch(const GatedDeltaNet& args, int64_t tile)
        : shared(args.value_heads / args.key_heads), values(shared * args.value_dim),
          width(round_up(2 * args.key_dim + values, WIDTH)), tile(tile) {}

    int64_t floats(const GatedDeltaNet& args) const {
        const int64_t rows = args.kernel + (args.kernel - 1 + tile) + tile;
        // The last vectors of values may be read past the end of their row.
        const int64_t all =
            rows * width + BLOCK_COLUMNS + 2 * shared * tile + args.key_dim * BLOCK_COLUMNS;
        return round_up(all, 16);
    }
    void assign_buffers(const GatedDeltaNet& args, float* memory) {
        weights = memory;
        inputs = weights + args.kernel * width;
        outputs = inputs + (args.kernel - 1 + tile) * width;
        decay = outputs + tile * width + BLOCK_COLUMNS;
        beta = decay + shared * tile;
        block = beta + shared * tile;
    }
};

// Convolve `tokens` rows of inputs, which follow the last kernel - 1 ones.
void convolve(const Scratch& s, int64_t kernel, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < s.width; c += WIDTH) {
            Floats sum{};
            for (int64_t i = 0; i < kernel; i++)
                sum = fma(load(s.weights + i * s.width + c),
                          load(s.inputs + (t + i) * s.width + c), sum);
            store(s.outputs + t * s.width + c, Silu::of(sum));
        }
}

// Scale a vector to the length `length`.
void scale(float* x, int64_t count, float length) {
    Floats squares{};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Floats part = load_partial(x + i, count - i);
        squares = fma(part, part, squares);
    }
    const float factor = length / sqrtf(sum(squares) + EPSILON);
    for (int64_t i = 0; i < count; i += WIDTH)
        store_partial(x + i, load_partial(x + i, count - i) * factor, count - i);
}

INLINE void add_scaled_row(float x, const float* row, Floats* sums) {
    for (int n = 0; n < BLOCK_VECTORS; n++) sums[n] = fma(broadcast(x), load(row + n * WIDTH), sums[n]);
}

// Apply the delta rule to a block of columns of a state [key_dim, BLOCK_COLUMNS]. `v` is the values of
// the first token; values and outputs have `columns` columns.
template <class T>
void advance(float* state, int64_t stride, int64_t key_dim, const Scratch& s, const float* v,
             const float* decay, const float* beta, int64_t tokens, T* out, int64_t out_row,
             int64_t columns) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *q = s.outputs + t * s.width, *k = q + key_dim;
        Floats even[BLOCK_VECTORS] = {}, odd[BLOCK_VECTORS] = {};
        int64_t i = 0;
        for (; i + 2 <= key_dim; i += 2) {
            add_scaled_row(k[i], state + i * stride, even);
            add_scaled_row(k[i + 1], state + (i + 1) * stride, odd);
        }
        if (i < key_dim) add_scaled_row(k[i], state + i * stride, even);
        const Floats kept = broadcast(decay[t]);
        Floats written[BLOCK_VECTORS], sums[BLOCK_VECTORS] = {};
        for (int n = 0; n < BLOCK_VECTORS; n++)
            written[n] = (load(v + t * s.width + n * WIDTH) - kept * (even[n] + odd[n])) * beta[t];
        for (i = 0; i < key_dim; i++) {
            const Floats key = broadcast(k[i]), query = broadcast(q[i]);
            for (int n = 0; n < BLOCK_VECTORS; n++) {
                float* element = state + i * stride + n * WIDTH;
                const Floats x = fma(key, written[n], kept * load(element));
                store(element, x);
                sums[n] = fma(query, x, sums[n]);
            }
        }
        for (int n = 0; n < BLOCK_VECTORS; n++)
            store_partial(out + t * out_row + n * WIDTH, sums[n], columns - n * WIDTH);
    }
}

// Apply the delta rule to a value head, block by block.
template <class T>
void advance_head(const GatedDeltaNet& args, const Scratch& s, float* state, int64_t shared,
                  int64_t tokens, T* out) {
    const float *decay = s.decay + shared * s.tile, *beta = s.beta + shared * s.tile;
    const float* v = s.outputs + 2 * args.key_dim + shared * args.value_dim;
    const int64_t out_row = args.value_heads * args.value_dim;
    for (int64_t first = 0; first < args.value_dim; first += BLOCK_COLUMNS) {
        const int64_t columns =
            args.value_dim - first < BLOCK_COLUMNS ? args.value_dim - first : BLOCK_COLUMNS;
        const size_t bytes = static_cast<size_t>(columns) * sizeof(float);
        float* block = state + first;
        if (columns == BLOCK_COLUMNS) {
            advance(block, args.value_dim, args.key_dim, s, v + first, decay, beta, tokens, out + first,
                    out_row, columns);
            continue;
        }
        for (int64_t i = 0; i < args.key_dim; i++)
            std::memcpy(s.block + i * BLOCK_COLUMNS, block + i * args.value_dim, bytes);
        advance(s.block, BLOCK_COLUMNS, args.key_dim, s, v + first, decay, beta, tokens, out + first,
                out_row, columns);
        for (int64_t i = 0; i < args.key_dim; i++)
            std::memcpy(block + i * args.value_dim, s.block + i * BLOCK_COLUMNS, bytes);
    }
}

// Compute the decay and beta of the tokens of a tile for each value head of a key head.
template <class T>
void compute_gates(const GatedDeltaNet& args, const Scratch& s, int64_t head, int64_t row,
                   int64_t tokens) {
    for (int64_t shared = 0; shared < s.shared; shared++) {
        const int64_t number = head * s.shared + shared;
        const float rate = expf(load_one(static_cast<const T*>(args.log_decay) + number));
        const float bias = load_one(static_cast<const T*>(args.step_bias) + number);
        for (int64_t t = 0; t < tokens; t++) {
            const float x =
                load_one(static_cast<const T*>(args.step) + (row + t) * args.step_row + number) + bias;
            const float y =
                load_one(static_cast<const T*>(args.beta) + (row + t) * args.beta_row + number);
            const float softplus = x > 20 ? x : log1pf(expf(x));
            s.decay[shared * s.tile + t] = expf(-rate * softplus);
            s.beta[shared * s.tile + t] = 1 / (1 + expf(-y));
        }
    }
}

// Advance a key head of a sequence by its tokens, rows `row` to `row + tokens`.
template <class T>
void advance_sequence(const GatedDeltaNet& args, const Scratch& s, float* state, int64_t head,
                      int64_t row, int64_t tokens) {
    const int64_t keys = args.key_heads * args.key_dim, history = args.kernel - 1;
    const int64_t channels = 2 * keys + args.value_heads * args.value_dim;
    const Segment segments[] = {{head * args.key_dim, 0, args.key_dim},
                                {keys + head * args.key_dim, args.key_dim, args.key_dim},
                                {2 * keys + head * s.values, 2 * args.key_dim, s.values}};
    const T* conv = static_cast<const T*>(args.conv);
    for (const Segment& part : segments) {
        for (int64_t c = 0; c < part.count; c++)
            for (int64_t i = 0; i < args.kernel; i++)
                s.weights[i * s.width + part.to + c] =
                    load_one(conv + (part.from + c) * args.kernel + i);
        for (int64_t i = 0; i < history; i++)
            std::memcpy(s.inputs + i * s.width + part.to, state + i * channels + part.from,
                        static_cast<size_t>(part.count) * sizeof(float));
    }
    float* heads = state + channels * history + head * s.values * args.key_dim;
    T* out = static_cast<T*>(args.out) + row * args.value_heads * args.value_dim + head * s.values;
    for (int64_t first = 0; first < tokens; first += s.tile) {
        const int64_t count = tokens - first < s.tile ? tokens - first : s.tile;
        for (int64_t t = 0; t < count; t++)
            for (const Segment& part : segments)
                to_floats(
                    static_cast<const T*>(args.mixed) + (row + first + t) * args.mixed_row + part.from,
                    part.count, s.inputs + (history + t) * s.width + part.to);
        convolve(s, args.kernel, count);
        for (int64_t t = 0; t < count; t++) {
            scale(s.outputs + t * s.width, args.key_dim, 1 / sqrtf(static_cast<float>(args.key_dim)));
            scale(s.outputs + t * s.width + args.key_dim, args.key_dim, 1);
        }
        compute_gates<T>(args, s, head, row + first, count);
        for (int64_t shared = 0; shared < s.shared; shared++)
            advance_head(args, s, heads + shared * args.value_dim * args.key_dim, shared, count,
                         out + first * args.value_heads * args.value_dim + shared * args.value_dim);
        std::memmove(s.inputs, s.inputs + count * s.width,
                     static_cast<size_t>(history * s.width) * sizeof(float));
    }
    for (const Segment& part : segments)
        for (int64_t i = 0; i < history; i++)
            std::memcpy(state + i * channels + part.from, s.inputs + i * s.width + part.to,
                        static_cast<size_t>(part.count) * sizeof(float));
}

template <class T>
int advance_sequences(const GatedDeltaNet& args) {
    const Buffer<int64_t> rows = allocate<int64_t>(args.count + 1);
    if (!rows) return NO_MEMORY;
    int64_t longest = 1;
    rows[0] = 0;
    for (int64_t i = 0; i < args.count; i++) {
        rows[i + 1] = rows[i] + args.lengths[i];
        if (args.lengths[i] > longest) longest = args.lengths[i];
    }
    const Scratch shape(args, longest < TILE_TOKENS ? longest : TILE_TOKENS);
    const int64_t floats = shape.floats(args);
    const Buffer<float> scratch = allocate<float>(args.threads * floats);
    if (!scratch) return NO_MEMORY;
    std::memset(scratch.get(), 0, static_cast<size_t>(args.threads * floats) * sizeof(float));
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t task = 0; task < args.count * args.key_heads; task++) {
        const int64_t sequence = task / args.key_heads;
        Scratch thread_scratch = shape;
        thread_scratch.assign_buffers(args, scratch.get() + thread_index() * floats);
        advance_sequence<T>(args, thread_scratch,
                            args.states + args.sequences[sequence] * args.states_row,
                            task % args.key_heads, rows[sequence], args.lengths[sequence]);
    }
    return DONE;
}

}  // namespace

int gated_delta_net(const GatedDeltaNet& args) { BY_DTYPE(advance_sequences) }

}  // namespace ISA
