// route, experts: a mixture of experts with few tokens per expert.
//
// If several experts have tokens, each thread computes whole experts. Their weights are read once, and
// matmuls of so few rows are too short to synchronize threads. The outputs of a round are kept until
// all its experts are done, then added in the order of experts. So results do not depend on the number
// of threads.
#include "kernels.h"
#include "memory.h"
#include "vector_math.h"

namespace ISA {
namespace {

constexpr int64_t SPAN = 256;     // elements of an output in one task
constexpr int64_t MIN_PARALLEL_MULTIPLICATIONS = 1 << 17;  // that pay for waking other threads

// The tokens routed to one expert: a range of the choices, which are sorted by expert.
struct ExpertTokens {
    const Expert* expert;
    int64_t begin, end;  // choices
};

// Scratch memory of a round of experts, with one row per choice.
struct RoundBuffers {
    bf16 *x, *gate, *up, *out;
};

// One matmul: the matrix, its bias or null, and the output.
struct Projection {
    const Matrix& matrix;
    const void* bias;
    bf16* out;
};

// Multiply x by one matrix, and by a second one of the same shape if it is not null.
int matmul(int isa, const Projection& first, const Projection* second, const bf16* x, int64_t rows,
           int64_t threads) {
    const Matrix& m = first.matrix;
    const Projection& other = second ? *second : first;
    const int64_t n = m.outputs;
    if (m.bits == 16) {
        const Linear next{x, other.matrix.data, other.bias, other.out, nullptr, BFLOAT16, rows, m.inputs,
                          n, m.inputs,          m.inputs,   n,         0,       threads};
        const Linear both{x,        m.data, first.bias, first.out, second ? &next : nullptr,
                          BFLOAT16, rows,   m.inputs,   n,         m.inputs,
                          m.inputs, n,      0,          threads};
        return h2o_linear_skinny(isa, &both);
    }
    const QuantizedLinear next{x, other.bias, other.out, other.matrix, nullptr, BFLOAT16, rows, m.inputs,
                               n, 0,          0,         threads};
    const QuantizedLinear both{x,        first.bias, first.out, m, second ? &next : nullptr,
                               BFLOAT16, rows,       m.inputs,  n, 0,
                               0,        threads};
    return h2o_linear_quantized(isa, &both);
}

// gate = (up + 1) * gate * sigmoid(slope * gate). Gates are clamped to at most `limit`, and ups to
// [-limit, limit].
void clamp_and_gate(bf16* gate, const bf16* up, int64_t count, float slope, float limit) {
    const Floats max_value = broadcast(limit);
    for (int64_t i = 0; i < count; i += WIDTH) {
        Floats x = load_partial(gate + i, count - i), y = load_partial(up + i, count - i);
        x = x > max_value ? max_value : x;  // NaN propagates
        y = y > max_value ? max_value : y;
        y = y < -max_value ? -max_value : y;
        store_partial(gate + i, (y + 1.0f) * x * sigmoid(slope * x), count - i);
    }
}

void activate_rows(int64_t function, bf16* x, const bf16* factor, int64_t count) {
    switch (function) {
        case RELU: return activate_span<bf16, Relu>(x, factor, count);
        case SILU: return activate_span<bf16, Silu>(x, factor, count);
        case GELU: return activate_span<bf16, Gelu>(x, factor, count);
        default: return activate_span<bf16, GeluTanh>(x, factor, count);
    }
}

// Compute out = down(act(gate(x)) * up(x)) for the choices of an expert, or use `clamp_and_gate` if
// there is a limit. `first` is the first choice of the round.
int compute(int isa, const Experts& args, const ExpertTokens& c, int64_t first, const int64_t* tokens,
            const RoundBuffers& all, int64_t threads) {
    const Expert& e = *c.expert;
    const int64_t at = c.begin - first, rows = c.end - c.begin, hidden = e.gate.inputs,
                  intermediate = e.gate.outputs;
    bf16 *x = all.x + at * hidden, *gate = all.gate + at * intermediate;
    bf16* up = all.up + at * intermediate;
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(x + i * hidden, static_cast<const bf16*>(args.x) + tokens[c.begin + i] * args.x_row,
                    static_cast<size_t>(hidden) * sizeof *x);
    const Projection second{e.up, e.up_bias, up};
    const int status = matmul(isa, {e.gate, e.gate_bias, gate}, &second, x, rows, threads);
    if (status != DONE) return status;
    if (args.limit > 0)
        clamp_and_gate(gate, up, rows * intermediate, static_cast<float>(args.slope),
                       static_cast<float>(args.limit));
    else
        activate_rows(args.function, gate, up, rows * intermediate);
    return matmul(isa, {e.down, e.down_bias, all.out + at * hidden}, nullptr, gate, rows, threads);
}

// Add the outputs `out` of choices `first` to `last` to the sums of their tokens.
void add(const Experts& args, int64_t hidden, int64_t first, int64_t last, const int64_t* tokens,
         const float* routing_weights, const bf16* out) {
    const int64_t spans = (hidden + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(static) \
    num_threads(args.threads) if ((last - first) * hidden > MIN_PARALLEL_MULTIPLICATIONS)
    for (int64_t span = 0; span < spans; span++) {
        const int64_t begin = span * SPAN, end = begin + SPAN < hidden ? begin + SPAN : hidden;
        for (int64_t i = first; i < last; i++) {
            float* sums = args.sums + tokens[i] * args.sums_row;
            const bf16* from = out + (i - first) * hidden;
            const Floats weight = broadcast(routing_weights[i]);
            for (int64_t k = begin; k < end; k += WIDTH)
                store_partial(sums + k,
                              fma(load_partial(from + k, end - k), weight,
                                  load_partial(sums + k, end - k)),
                              end - k);
        }
    }
}

// Sort the choices by expert. Return the number of experts to compute, or -1 if an expert id is out of
// range.
int64_t sort(const Experts& args, int64_t* starts, ExpertTokens* selected, int64_t* tokens,
             float* routing_weights) {
    for (int64_t e = 0; e <= args.num_experts; e++) starts[e] = 0;
    for (int64_t i = 0; i < args.rows * args.per_token; i++) {
        if (args.ids[i] < 0 || args.ids[i] >= args.num_experts) return -1;
        starts[args.ids[i]]++;
    }
    int64_t all = 0, num_selected = 0;
    for (int64_t e = 0; e < args.num_experts; e++) {
        const int64_t choices = starts[e];
        const bool computed = choices && choices <= args.max_rows && args.experts[e].gate.data;
        starts[e] = computed ? all : -1;
        if (computed) selected[num_selected++] = {args.experts + e, all, all + choices}, all += choices;
    }
    for (int64_t i = 0; i < args.rows * args.per_token; i++) {
        int64_t& at = starts[args.ids[i]];
        if (at >= 0) tokens[at] = i / args.per_token, routing_weights[at++] = args.routing_weights[i];
    }
    return num_selected;
}

// Return the end of a round: as many experts as fit, and at least one.
int64_t round_end(const ExpertTokens* selected, int64_t count, int64_t from) {
    int64_t to = from + 1;
    while (to < count && selected[to].end - selected[from].begin <= EXPERT_ROUND) to++;
    return to;
}

}  // namespace

int experts(int isa, const Experts& args) {
    const Buffer<int64_t> starts = allocate<int64_t>(args.num_experts + 1);
    const Buffer<int64_t> tokens = allocate<int64_t>(args.rows * args.per_token);
    const Buffer<ExpertTokens> selected = allocate<ExpertTokens>(args.num_experts);
    const Buffer<float> routing_weights = allocate<float>(args.rows * args.per_token);
    if (!starts || !tokens || !selected || !routing_weights) return NO_MEMORY;
    const int64_t count = sort(args, starts.get(), selected.get(), tokens.get(), routing_weights.get());
    if (count < 0) return INVALID;
    if (count == 0) return DONE;
    int64_t max_round = 0;
    for (int64_t from = 0, to; from < count; from = to) {
        to = round_end(selected.get(), count, from);
        const int64_t size = selected[to - 1].end - selected[from].begin;
        max_round = size > max_round ? size : max_round;
    }
    const Matrix& gate = selected[0].expert->gate;
    const int64_t hidden = gate.inputs, intermediate = gate.outputs;
    const Buffer<bf16> buffer = allocate<bf16>(2 * max_round * (hidden + intermediate));
    if (!buffer) return NO_MEMORY;
    bf16* const first = buffer.get();
    const RoundBuffers buffers{first, first + 2 * max_round * hidden,
                               first + max_round * (2 * hidden + intermediate),
                               first + max_round * hidden};
    for (int64_t from = 0, to; from < count; from = to) {
        to = round_end(selected.get(), count, from);
        const int64_t begin = selected[from].begin, round_experts = to - from;
        int failed = DONE;
        if (args.threads > 1 &&
            (round_experts % args.threads == 0 || round_experts >= 3 * args.threads)) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(args.threads) reduction(max : failed)
            for (int64_t e = from; e < to; e++) {
                const int status = compute(isa, args, selected[e], begin, tokens.get(), buffers, 1);
                failed = status > failed ? status : failed;
            }
        } else {
            for (int64_t e = from; e < to && failed == DONE; e++)
                failed = compute(isa, args, selected[e], begin, tokens.get(), buffers, args.threads);
        }
        if (failed != DONE) return failed;
        add(args, hidden, begin, selected[to - 1].end, tokens.get(), routing_weights.get(), buffers.out);
    }
    return DONE;
}

namespace {

// Compute the router logits of a row.
void logits_of(const Route& args, const bf16* x, float* logits) {
    for (int64_t e = 0; e < args.num_experts; e++) {
        const bf16* router = static_cast<const bf16*>(args.router) + e * args.router_row;
        Floats sums[4] = {};
        int64_t k = 0;
        for (; k + 4 * WIDTH <= args.hidden; k += 4 * WIDTH)
            for (int i = 0; i < 4; i++)
                sums[i] = fma(load(x + k + i * WIDTH), load(router + k + i * WIDTH), sums[i]);
        for (; k < args.hidden; k += WIDTH)
            sums[0] = fma(load_partial(x + k, args.hidden - k),
                          load_partial(router + k, args.hidden - k), sums[0]);
        logits[e] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (args.bias) logits[e] += load_one(static_cast<const bf16*>(args.bias) + e);
    }
}

// Select the largest logits. Ties go to the lower index. Their weights are normalized over all
// exponentials or over the selected ones.
void select_experts(const Route& args, float* logits, int64_t* ids, float* routing_weights) {
    float largest = logits[0], total = 0;
    for (int64_t e = 1; e < args.num_experts; e++) largest = logits[e] > largest ? logits[e] : largest;
    if (!args.normalize)
        for (int64_t e = 0; e < args.num_experts; e++) total += exp(broadcast(logits[e] - largest))[0];
    for (int64_t i = 0; i < args.per_token; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < args.num_experts; e++)
            if (logits[e] != MASKED && (best < 0 || logits[e] > logits[best])) best = e;
        if (best < 0) best = i;  // all remaining logits are -inf
        ids[i] = best;
        routing_weights[i] = exp(broadcast(logits[best] - largest))[0];
        if (args.normalize) total += routing_weights[i];
        logits[best] = MASKED;
    }
    for (int64_t i = 0; i < args.per_token; i++) routing_weights[i] /= total;
}

}  // namespace

int route(const Route& args) {
    const Buffer<float> logits = allocate<float>(args.rows * args.num_experts);
    if (!logits) return NO_MEMORY;
#pragma omp parallel for schedule(static)                                                       \
    num_threads(args.threads) if (args.rows > 1 && args.rows * args.num_experts * args.hidden > \
                                                           MIN_PARALLEL_MULTIPLICATIONS)
    for (int64_t row = 0; row < args.rows; row++) {
        float* row_logits = logits.get() + row * args.num_experts;
        logits_of(args, static_cast<const bf16*>(args.x) + row * args.x_row, row_logits);
        select_experts(args, row_logits, args.ids + row * args.per_token,
                       args.routing_weights + row * args.per_token);
    }
    return DONE;
}

}  // namespace ISA
