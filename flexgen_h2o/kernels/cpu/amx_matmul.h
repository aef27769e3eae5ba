// Matmuls of many rows of bfloat16 in AMX tiles.
//
// Rows of x are left operands in place. Weights are converted to right operands in L2 panels of
// outputs by inputs, once for all rows. Sums stay in tiles for all inputs of a panel. Meanwhile the
// next rows of x and the output lines are prefetched.
//
// A matmul is a struct that converts its weights to operands: PlainPanels or QuantizedPanels.
#pragma once

#include "amx.h"
#include "kernels.h"
#include "memory.h"
#include "prefetch.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

constexpr int64_t MIN_SHARE_ROWS = 4 * AMX_BLOCK;  // each share converts the weights again
static_assert(TILED_OUTPUTS % AMX_BLOCK == 0 && TILED_ROWS % AMX_BLOCK == 0 &&
                  TILED_INPUTS % AMX_DEPTH == 0,
              "whole tiles");

// Call f(Constant<H>, first) for H x 16 rows at a time.
template <class F>
INLINE void for_row_blocks(int64_t rows, const F& f) {
    int64_t row = 0;
    for (; row + AMX_ROWS < rows; row += AMX_BLOCK) f(Constant<2>{}, row);
    if (row < rows) f(Constant<1>{}, row);
}

// 16 rows of a left operand.
struct LeftRows {
    const void* from;
    int64_t bytes;  // row stride

    const char* step(int64_t k) const { return static_cast<const char*>(from) + k * AMX_ROW_BYTES; }
};

// C0 to C3, H x 2 tiles, += A0, A1 by B0, B1, over `steps` steps. Rows of B [pairs, AMX_BLOCK] are
// contiguous. before_load(step, tile) is called before each load of B.
template <int H, class F>
INLINE void add_tile_matmuls(AmxTiles& tiles, const LeftRows (&a)[H], const uint32_t* b, int64_t steps,
                             const F& before_load) {
    constexpr int64_t ROW = AMX_BLOCK * sizeof *b;
    for (int64_t k = 0; k < steps; k++, b += AMX_PAIRS * AMX_BLOCK) {
        before_load(k, 0);
        tiles.load<A0>(a[0].step(k), a[0].bytes);
        tiles.load<B0>(b, ROW);
        tiles.add_matmul<C0, A0, B0>();
        before_load(k, 1);
        tiles.load<B1>(b + AMX_ROWS, ROW);
        tiles.add_matmul<C1, A0, B1>();
        if constexpr (H == 2) {
            tiles.load<A1>(a[1].step(k), a[1].bytes);
            tiles.add_matmul<C2, A1, B0>();
            tiles.add_matmul<C3, A1, B1>();
        }
    }
}

// x [rows, inputs] in tiles of rows and steps of inputs. Partial tiles are copied and padded with
// zeros.
class LeftOperand {
public:
    const bf16* const x;
    const int64_t rows, inputs, x_row, steps;

    LeftOperand(const void* x, int64_t rows, int64_t inputs, int64_t x_row)
        : x(static_cast<const bf16*>(x)), rows(rows), inputs(inputs), x_row(x_row),
          steps((inputs + AMX_DEPTH - 1) / AMX_DEPTH) {}

    bool pad() {
        const int64_t left = rows % AMX_ROWS, whole = rows - left, width = steps * AMX_DEPTH;
        last_rows = allocate<bf16>(left ? AMX_ROWS * width : 0);
        last_step = allocate<bf16>(has_partial_step() ? whole * AMX_DEPTH : 0);
        if (!last_rows || !last_step) return false;
        if (left) {
            std::memset(last_rows.get(), 0, static_cast<size_t>(AMX_ROWS * width) * sizeof *x);
            for (int64_t row = 0; row < left; row++)
                std::memcpy(last_rows.get() + row * width, x + (whole + row) * x_row,
                            static_cast<size_t>(inputs) * sizeof *x);
        }
        if (!has_partial_step()) return true;
        const int64_t first = width - AMX_DEPTH;
        std::memset(last_step.get(), 0, static_cast<size_t>(whole * AMX_DEPTH) * sizeof *x);
        for (int64_t row = 0; row < whole; row++)
            std::memcpy(last_step.get() + row * AMX_DEPTH, x + row * x_row + first,
                        static_cast<size_t>(inputs - first) * sizeof *x);
        return true;
    }

    // Return whether the last step is partial.
    bool has_partial_step() const { return inputs % AMX_DEPTH != 0; }

    // Return 16 rows from `row` on, starting at `step`. A partial last step is accessed alone.
    LeftRows at(int64_t row, int64_t step) const {
        constexpr int64_t SIZE = sizeof *x;
        if (row + AMX_ROWS > rows) return {last_rows.get() + step * AMX_DEPTH, steps * AMX_DEPTH * SIZE};
        if (step == steps - 1 && has_partial_step())
            return {last_step.get() + row * AMX_DEPTH, AMX_DEPTH * SIZE};
        return {x + row * x_row + step * AMX_DEPTH, x_row * SIZE};
    }

private:
    Buffer<bf16> last_rows, last_step;  // [AMX_ROWS, inputs], [rows, AMX_DEPTH]
};

// An L2 panel of weights. `padded_inputs` is the number of inputs rounded up to whole steps and to
// whole unpacking units.
struct WeightPanel {
    int64_t output, outputs, input, inputs, padded_inputs;

    int64_t steps() const { return (inputs + AMX_DEPTH - 1) / AMX_DEPTH; }
    int64_t pairs() const { return (outputs + AMX_BLOCK - 1) / AMX_BLOCK; }
    // Return the words of right operands [pairs, padded_inputs / 2, AMX_BLOCK] for a pair of tiles.
    int64_t pair_words() const { return padded_inputs / 2 * AMX_BLOCK; }
};

// Results of some rows and at most AMX_BLOCK outputs. They are written while the tiles compute the
// next ones.
template <class Args>
class PendingOutputs {
public:
    explicit PendingOutputs(const Args& args) : args(args) {}
    ~PendingOutputs() { put(AMX_BLOCK); }
    PendingOutputs(const PendingOutputs&) = delete;
    PendingOutputs& operator=(const PendingOutputs&) = delete;

    // Write the remaining earlier results, then return the buffer of the next sums [rows, AMX_BLOCK].
    float* begin(int64_t first_row, int64_t count, int64_t output, int64_t outputs) {
        put(AMX_BLOCK);
        current = !current, row = 0, rows = count, columns = outputs;
        out = static_cast<bf16*>(args.out) + first_row * args.out_row + output;
        bias = args.bias ? static_cast<const bf16*>(args.bias) + output : nullptr;
        return sums[current];
    }

    // Write up to `count` of the remaining rows.
    INLINE void put(int64_t count) {
        for (; count > 0 && row < rows; count--, row++) {
            const float* from = sums[current] + row * AMX_BLOCK;
            bf16* to = out + row * args.out_row;
            columns < AMX_BLOCK ? store_outputs(from, bias, to, columns, args.add) : put_row(from, to);
        }
    }

private:
    INLINE void put_row(const float* from, bf16* to) const {
        for (int64_t i = 0; i < AMX_BLOCK; i += 2 * WIDTH) {
            Floats low = load(from + i), high = load(from + i + WIDTH);
            if (bias) low += load(bias + i), high += load(bias + i + WIDTH);
            if (args.add) low += load(to + i), high += load(to + i + WIDTH);
            narrow(to + i, low, high);
        }
    }

    alignas(64) float sums[2][AMX_BLOCK * AMX_BLOCK];
    const Args& args;
    int current = 0;
    int64_t row = 0, rows = 0, columns = 0;
    bf16* out = nullptr;
    const bf16* bias = nullptr;
};

// Multiply H x 16 rows by an L2 panel of right operands. Sums go to `sums`, and for the last panel to
// `pending`.
template <int H, class Args>
void multiply_rows(AmxTiles& tiles, const Args& args, const LeftOperand& x, const WeightPanel& panel,
                   int64_t row, const uint32_t* right, float* sums, PendingOutputs<Args>& pending) {
    const int64_t first = panel.input / AMX_DEPTH, steps = panel.steps(), pairs = panel.pairs();
    const bool last = first + steps == x.steps, partial_step = last && x.has_partial_step();
    const int64_t left = x.rows - row, rows = left < H * AMX_ROWS ? left : H * AMX_ROWS;
    const int64_t next_rows = left - rows < H * AMX_ROWS ? left - rows : H * AMX_ROWS;
    const int64_t rows_per_step = (AMX_BLOCK + steps - 1) / steps;
    LeftRows whole[H], end[H];
    for (int h = 0; h < H; h++) {
        whole[h] = x.at(row + h * AMX_ROWS, first);
        end[h] = x.at(row + h * AMX_ROWS, x.steps - 1);
    }
    for (int64_t pair = 0; pair < pairs; pair++, right += panel.pair_words()) {
        const int64_t column = pair * AMX_BLOCK, output = panel.output + column;
        const bf16* out = static_cast<const bf16*>(args.out) + row * args.out_row + output;
        const bf16* next = x.x + (row + rows) * x.x_row + first * AMX_DEPTH;
        float* to = sums + column * H * AMX_ROWS;
        const int64_t begin = next_rows * pair / pairs, stop = next_rows * (pair + 1) / pairs;
        panel.input > 0 ? load_block<H>(tiles, to, AMX_BLOCK) : zero_block<H>(tiles);
        const auto ahead = [&](int64_t k, int64_t tile) ALWAYS_INLINE {
            if (tile > 0) return;
            for (int64_t i = begin; i < stop; i++) prefetch(next + i * x.x_row + k * AMX_DEPTH, L2);
            if (last && k < rows) prefetch_to_write(out + k * args.out_row);
            pending.put(rows_per_step);
        };
        add_tile_matmuls<H>(tiles, whole, right, steps - partial_step, ahead);
        if (partial_step)
            add_tile_matmuls<H>(tiles, end, right + (steps - 1) * AMX_PAIRS * AMX_BLOCK, 1,
                                [](int64_t, int64_t) {});
        if (last) {
            const int64_t outputs_left = panel.outputs - column;
            to = pending.begin(row, rows, output, outputs_left < AMX_BLOCK ? outputs_left : AMX_BLOCK);
        }
        store_block<H>(tiles, to, AMX_BLOCK);
    }
}

// Work split of a matmul: by outputs, and also by rows if there are too few outputs. Shares differ by
// at most a tile or two.
struct WorkSplit {
    int64_t rows, outputs, by_rows = 1, by_outputs;

    // `max_outputs` is the maximum number of outputs of an L2 panel.
    WorkSplit(int64_t rows, int64_t outputs, int64_t max_outputs, int64_t threads)
        : rows(rows), outputs(outputs), by_outputs((outputs + max_outputs - 1) / max_outputs) {
        if (by_outputs < threads) {
            const int64_t parts = (rows + MIN_SHARE_ROWS - 1) / MIN_SHARE_ROWS;
            by_rows = (threads + by_outputs - 1) / by_outputs;
            if (by_rows > parts) by_rows = parts;
        } else {
            by_outputs = round_up(by_outputs, threads);
        }
    }

    int64_t count() const { return by_rows * by_outputs; }
    int64_t first_row(int64_t part) const { return bound(rows, AMX_BLOCK, part, by_rows); }
    int64_t first_output(int64_t part) const { return bound(outputs, AMX_BLOCK, part, by_outputs); }

private:
    // Return the start of part `part` of `all`, aligned to whole tiles.
    static int64_t bound(int64_t all, int64_t tile, int64_t part, int64_t parts) {
        const int64_t first = (all + tile - 1) / tile * part / parts * tile;
        return first < all ? first : all;
    }
};

// Round inputs up to whole unpacking units of `multiple` inputs, then to whole steps.
INLINE int64_t padded_to_units(int64_t inputs, int64_t multiple) {
    return round_up(round_up(inputs, multiple), AMX_DEPTH);
}

// Multiply rows `first` to `end` by the outputs of `panel`, in L2 panels of at most `max_inputs`
// inputs.
template <class Weights, class Args>
void multiply_share(AmxTiles& tiles, const Args& args, const Weights& weights, const LeftOperand& x,
                    WeightPanel panel, int64_t first, int64_t end, int64_t max_inputs, int64_t multiple,
                    uint32_t* right, float* sums) {
    const int64_t rows_per_pass = x.inputs <= max_inputs ? end - first : TILED_ROWS;
    PendingOutputs<Args> pending(args);
    for (int64_t begin = first; begin < end; begin += rows_per_pass)
        for (panel.input = 0; panel.input < x.inputs; panel.input += max_inputs) {
            const int64_t left = x.inputs - panel.input, rows = end - begin;
            panel.inputs = left < max_inputs ? left : max_inputs;
            panel.padded_inputs = padded_to_units(panel.inputs, multiple);
            weights.unpack(panel, right);
            for_row_blocks(rows < rows_per_pass ? rows : rows_per_pass, [&](auto height, int64_t row) {
                multiply_rows<decltype(height)::value>(tiles, args, x, panel, begin + row, right,
                                                       sums + row * panel.pairs() * AMX_BLOCK, pending);
            });
        }
}

// Compute all matmuls of a chain that share x of `inputs` inputs. Weights(a) wraps the weights of one
// matmul. An L2 panel ends at a multiple of `multiple` inputs.
template <class Weights, class Args>
int tile_matmul(const Args& args, int64_t inputs, int64_t multiple) {
    int64_t panel_unit = multiple;
    while (panel_unit % AMX_DEPTH) panel_unit += multiple;
    const int64_t max_inputs =
        panel_unit < TILED_INPUTS ? TILED_INPUTS / panel_unit * panel_unit : panel_unit;
    const bool whole = inputs <= max_inputs;
    const int64_t width = whole ? padded_to_units(inputs, multiple) : max_inputs,
                  all = TILED_OUTPUTS * max_inputs;
    const int64_t outputs = all / width / AMX_BLOCK * AMX_BLOCK;  // of an L2 panel
    // Per thread: right operands, and sums if there are several L2 panels.
    const int64_t words = outputs * width / 2;
    const int64_t size = words + (whole ? 0 : TILED_ROWS * TILED_OUTPUTS);
    LeftOperand x(args.x, args.rows, inputs, args.x_row);
    const Buffer<float> workspace = allocate<float>(args.threads * size);
    if (!x.pad() || !workspace) return NO_MEMORY;
#pragma omp parallel num_threads(args.threads)
    {
        float* const sums = workspace.get() + thread_index() * size + words;
        auto* const right = reinterpret_cast<uint32_t*>(sums - words);
        const AmxTileShapes shapes = whole_tiles();
        AmxTiles tiles(shapes);
        for (const Args* matmul = &args; matmul; matmul = matmul->next) {
            const Weights weights(*matmul);
            const WorkSplit split(args.rows, weights.outputs(), outputs, args.threads);
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < split.count(); share++) {
                const int64_t part = share / split.by_outputs, of = share % split.by_outputs;
                const int64_t output = split.first_output(of), first = split.first_row(part);
                const WeightPanel panel{output, split.first_output(of + 1) - output, 0, 0, 0};
                const int64_t end = split.first_row(part + 1);
                multiply_share(tiles, *matmul, weights, x, panel, first, end, max_inputs, multiple,
                               right, sums);
            }
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
