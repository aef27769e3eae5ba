// route, experts: a mixture of experts with few tokens per expert.
//
// If several experts have tokens, each thread computes whole experts. Their weights are read once, and
// matmuls of so few rows are too short to synchronize threads. The outputs of a round are kept until
// all its experts are done, then added in the order of experts. So results do not depend on the number
// of threads.
#include "activations.h"
#include "kernels.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int64_t SPAN = 256;     // elements of an output in one task
constexpr int64_t MIN_PARALLEL_WORK = 1 << 17;  // multiplications that pay for waking other threads

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
struct Term {
    const Matrix& matrix;
    const void* bias;
    bf16* out;
};

// Multiply x by one matrix, and by a second one of the same shape if it is not null.
int matmul(int isa, const Term& a, const Term* also, const bf16* x, int64_t rows,
           int64_t threads) {
    const Matrix& m = a.matrix;
    const Term& b = also ? *also : a;
    const int64_t n = m.outputs;
    if (m.bits == 16) {
        const Linear second{x, b.matrix.data, b.bias, b.out, nullptr, BFLOAT16, rows,
                            m.inputs, n, m.inputs, m.inputs, n, 0, threads};
        const Linear all{x, m.data, a.bias, a.out, also ? &second : nullptr, BFLOAT16, rows,
                         m.inputs, n, m.inputs, m.inputs, n, 0, threads};
        return h2o_linear_skinny(isa, &all);
    }
    const QuantizedLinear second{x, b.bias, b.out, b.matrix, nullptr, BFLOAT16, rows, m.inputs, n, 0,
                                 0, threads};
    const QuantizedLinear all{x, a.bias, a.out, m, also ? &second : nullptr, BFLOAT16, rows,
                              m.inputs, n, 0, 0, threads};
    return h2o_linear_quantized(isa, &all);
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
int compute(int isa, const Experts& a, const ExpertTokens& c, int64_t first, const int64_t* tokens,
            const RoundBuffers& all, int64_t threads) {
    const Expert& e = *c.expert;
    const int64_t at = c.begin - first, rows = c.end - c.begin, hidden = e.gate.inputs,
                  intermediate = e.gate.outputs;
    bf16 *x = all.x + at * hidden, *gate = all.gate + at * intermediate;
    bf16* up = all.up + at * intermediate;
    for (int64_t i = 0; i < rows; i++)
        std::memcpy(x + i * hidden, static_cast<const bf16*>(a.x) + tokens[c.begin + i] * a.x_row,
                    static_cast<size_t>(hidden) * sizeof *x);
    const Term second{e.up, e.up_bias, up};
    const int status = matmul(isa, {e.gate, e.gate_bias, gate}, &second, x, rows, threads);
    if (status != DONE) return status;
    if (a.limit > 0)
        clamp_and_gate(gate, up, rows * intermediate, static_cast<float>(a.slope),
                       static_cast<float>(a.limit));
    else
        activate_rows(a.function, gate, up, rows * intermediate);
    return matmul(isa, {e.down, e.down_bias, all.out + at * hidden}, nullptr, gate, rows, threads);
}

// Add the outputs `out` of choices `first` to `last` to the sums of their tokens.
void add(const Experts& a, int64_t hidden, int64_t first, int64_t last, const int64_t* tokens,
         const float* routing_weights, const bf16* out) {
    const int64_t spans = (hidden + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if ((last - first) * hidden > MIN_PARALLEL_WORK)
    for (int64_t span = 0; span < spans; span++) {
        const int64_t begin = span * SPAN, end = begin + SPAN < hidden ? begin + SPAN : hidden;
        for (int64_t i = first; i < last; i++) {
            float* sums = a.sums + tokens[i] * a.sums_row;
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
int64_t sort(const Experts& a, int64_t* starts, ExpertTokens* selected, int64_t* tokens,
             float* routing_weights) {
    for (int64_t e = 0; e <= a.count; e++) starts[e] = 0;
    for (int64_t i = 0; i < a.rows * a.per_token; i++) {
        if (a.ids[i] < 0 || a.ids[i] >= a.count) return -1;
        starts[a.ids[i]]++;
    }
    int64_t all = 0, num_selected = 0;
    for (int64_t e = 0; e < a.count; e++) {
        const int64_t choices = starts[e];
        const bool computed = choices && choices <= a.max_rows && a.experts[e].gate.data;
        starts[e] = computed ? all : -1;
        if (computed) selected[num_selected++] = {a.experts + e, all, all + choices}, all += choices;
    }
    for (int64_t i = 0; i < a.rows * a.per_token; i++) {
        int64_t& place = starts[a.ids[i]];
        if (place >= 0) tokens[place] = i / a.per_token, routing_weights[place++] = a.routing_weights[i];
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

int experts(int isa, const Experts& a) {
    const Memory<int64_t> starts = memory<int64_t>(a.count + 1);
    const Memory<int64_t> tokens = memory<int64_t>(a.rows * a.per_token);
    const Memory<ExpertTokens> selected = memory<ExpertTokens>(a.count);
    const Memory<float> routing_weights = memory<float>(a.rows * a.per_token);
    if (!starts || !tokens || !selected || !routing_weights) return NO_MEMORY;
    const int64_t count =
        sort(a, starts.get(), selected.get(), tokens.get(), routing_weights.get());
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
    const Memory<bf16> memories = memory<bf16>(2 * max_round * (hidden + intermediate));
    if (!memories) return NO_MEMORY;
    bf16* const first = memories.get();
    const RoundBuffers buffers{first, first + 2 * max_round * hidden,
                               first + max_round * (2 * hidden + intermediate),
                               first + max_round * hidden};
    for (int64_t from = 0, to; from < count; from = to) {
        to = round_end(selected.get(), count, from);
        const int64_t begin = selected[from].begin, round_experts = to - from;
        int failed = DONE;
        if (a.threads > 1 && (round_experts % a.threads == 0 || round_experts >= 3 * a.threads)) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(a.threads) reduction(max : failed)
            for (int64_t e = from; e < to; e++) {
                const int status = compute(isa, a, selected[e], begin, tokens.get(), buffers, 1);
                failed = status > failed ? status : failed;
            }
        } else {
            for (int64_t e = from; e < to && failed == DONE; e++)
                failed = compute(isa, a, selected[e], begin, tokens.get(), buffers, a.threads);
        }
        if (failed != DONE) return failed;
        add(a, hidden, begin, selected[to - 1].end, tokens.get(), routing_weights.get(), buffers.out);
    }
    return DONE;
}

namespace {

// Compute the router logits of a row.
void logits_of(const Route& a, const bf16* x, float* logits) {
    for (int64_t e = 0; e < a.count; e++) {
        const bf16* router = static_cast<const bf16*>(a.router) + e * a.router_row;
        Floats sums[4] = {};
        int64_t k = 0;
        for (; k + 4 * WIDTH <= a.hidden; k += 4 * WIDTH)
            for (int i = 0; i < 4; i++)
                sums[i] = fma(load(x + k + i * WIDTH), load(router + k + i * WIDTH), sums[i]);
        for (; k < a.hidden; k += WIDTH)
            sums[0] = fma(load_partial(x + k, a.hidden - k), load_partial(router + k, a.hidden - k),
                          sums[0]);
        logits[e] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
        if (a.bias) logits[e] += load_one(static_cast<const bf16*>(a.bias) + e);
    }
}

// Select the largest logits. Ties go to the lower index. Their weights are normalized over all
// exponentials or over the selected ones.
void select_experts(const Route& a, float* logits, int64_t* ids, float* routing_weights) {
    float largest = logits[0], total = 0;
    for (int64_t e = 1; e < a.count; e++) largest = logits[e] > largest ? logits[e] : largest;
    if (!a.normalize)
        for (int64_t e = 0; e < a.count; e++) total += exp(broadcast(logits[e] - largest))[0];
    for (int64_t i = 0; i < a.per_token; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < a.count; e++)
            if (logits[e] != MASKED && (best < 0 || logits[e] > logits[best])) best = e;
        if (best < 0) best = i;  // all remaining logits are -inf
        ids[i] = best;
        routing_weights[i] = exp(broadcast(logits[best] - largest))[0];
        if (a.normalize) total += routing_weights[i];
        logits[best] = MASKED;
    }
    for (int64_t i = 0; i < a.per_token; i++) routing_weights[i] /= total;
}

}  // namespace

int route(const Route& a) {
    const Memory<float> logits = memory<float>(a.rows * a.count);
    if (!logits) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows > 1 && a.rows * a.count * a.hidden > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < a.rows; row++) {
        float* row_logits = logits.get() + row * a.count;
        logits_of(a, static_cast<const bf16*>(a.x) + row * a.x_row, row_logits);
        select_experts(a, row_logits, a.ids + row * a.per_token, a.routing_weights + row * a.per_token);
    }
    return DONE;
}

}  // namespace ISA
