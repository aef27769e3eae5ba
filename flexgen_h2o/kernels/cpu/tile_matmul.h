// Matmuls of many rows of bfloat16 in AMX tiles.
//
// Rows of x are left operands in place. Weights are converted to right operands in L2 panels of outputs
// by inputs, once for all rows. Sums stay in tiles for all inputs of a panel. Meanwhile the
// next rows of x and the output lines are prefetched.
//
// A matmul is a struct that converts its weights to operands: PlainPanels or QuantizedPanels.
#pragma once

#include "amx.h"
#include "count.h"
#include "kernels.h"
#include "memory.h"
#include "outputs.h"
#include "prefetch.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t SIDE = TILE_ROWS;               // rows of a tile, and its columns in words
constexpr int64_t STEP_INPUTS = 2 * TILE_PAIRS;   // reduction depth of one tile matmul
constexpr int64_t TILE_COLUMNS = 2 * SIDE;        // outputs of the register block
constexpr int64_t MIN_ROWS = 4 * TILE_COLUMNS;  // minimum of a share, which converts weights again
static_assert(TILED_OUTPUTS % TILE_COLUMNS == 0 && TILED_ROWS % (2 * SIDE) == 0 &&
                  TILED_INPUTS % STEP_INPUTS == 0,
              "whole tiles");

INLINE int64_t up_to(int64_t multiple, int64_t x) {
    return (x + multiple - 1) / multiple * multiple;
}

// Return the shapes of whole tiles for all registers.
INLINE TileShapes whole_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE_ROWS, TILE_BYTES);
    return shapes;
}

// Call f(Count<H>, first) for H x 16 rows at a time.
template <class F>
INLINE void by_tiles(int64_t rows, const F& f) {
    int64_t row = 0;
    for (; row + SIDE < rows; row += 2 * SIDE) f(Count<2>{}, row);
    if (row < rows) f(Count<1>{}, row);
}

enum { C0, C1, C2, C3, A0, A1, B0, B1 };

// 16 rows of a left operand.
struct LeftRows {
    const void* from;
    int64_t bytes;  // row stride

    const char* step(int64_t k) const { return static_cast<const char*>(from) + k * TILE_BYTES; }
};

// C0 to C3, H x 2 tiles, += A0, A1 by B0, B1, over `steps` steps. Rows of B [pairs, TILE_COLUMNS] are
// contiguous. meanwhile(step, tile) is called before each load of B.
template <int H, class F>
INLINE void add_products(Tiles& tiles, const LeftRows (&a)[H], const uint32_t* b, int64_t steps,
                         const F& meanwhile) {
    constexpr int64_t ROW = TILE_COLUMNS * sizeof *b;
    for (int64_t k = 0; k < steps; k++, b += TILE_PAIRS * TILE_COLUMNS) {
        meanwhile(k, 0);
        tiles.load<A0>(a[0].step(k), a[0].bytes);
        tiles.load<B0>(b, ROW);
        tiles.add_product<C0, A0, B0>();
        meanwhile(k, 1);
        tiles.load<B1>(b + SIDE, ROW);
        tiles.add_product<C1, A0, B1>();
        if constexpr (H == 2) {
            tiles.load<A1>(a[1].step(k), a[1].bytes);
            tiles.add_product<C2, A1, B0>();
            tiles.add_product<C3, A1, B1>();
        }
    }
}

// Sums [16 H, TILE_COLUMNS] float32.
template <int H>
INLINE void zero_sums(Tiles& tiles) {
    tiles.zero<C0>();
    tiles.zero<C1>();
    if constexpr (H == 2) {
        tiles.zero<C2>();
        tiles.zero<C3>();
    }
}

template <int H>
INLINE void load_sums(Tiles& tiles, const float* c) {
    constexpr int64_t ROW = TILE_COLUMNS * sizeof *c;
    tiles.load<C0>(c, ROW);
    tiles.load<C1>(c + SIDE, ROW);
    if constexpr (H == 2) {
        tiles.load<C2>(c + SIDE * TILE_COLUMNS, ROW);
        tiles.load<C3>(c + SIDE * TILE_COLUMNS + SIDE, ROW);
    }
}

template <int H>
INLINE void store_sums(Tiles& tiles, float* c) {
    constexpr int64_t ROW = TILE_COLUMNS * sizeof *c;
    tiles.store<C0>(c, ROW);
    tiles.store<C1>(c + SIDE, ROW);
    if constexpr (H == 2) {
        tiles.store<C2>(c + SIDE * TILE_COLUMNS, ROW);
        tiles.store<C3>(c + SIDE * TILE_COLUMNS + SIDE, ROW);
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
          steps((inputs + STEP_INPUTS - 1) / STEP_INPUTS) {}

    bool make() {
        const int64_t left = rows % SIDE, whole = rows - left, width = steps * STEP_INPUTS;
        last_rows = memory<bf16>(left ? SIDE * width : 0);
        last_step = memory<bf16>(ragged() ? whole * STEP_INPUTS : 0);
        if (!last_rows || !last_step) return false;
        if (left) {
            std::memset(last_rows.get(), 0, static_cast<size_t>(SIDE * width) * sizeof *x);
            for (int64_t row = 0; row < left; row++)
                std::memcpy(last_rows.get() + row * width, x + (whole + row) * x_row,
                            static_cast<size_t>(inputs) * sizeof *x);
        }
        if (!ragged()) return true;
        const int64_t first = width - STEP_INPUTS;
        std::memset(last_step.get(), 0, static_cast<size_t>(whole * STEP_INPUTS) * sizeof *x);
        for (int64_t row = 0; row < whole; row++)
            std::memcpy(last_step.get() + row * STEP_INPUTS, x + row * x_row + first,
                        static_cast<size_t>(inputs - first) * sizeof *x);
        return true;
    }

    // Return whether the last step is partial.
    bool ragged() const { return inputs % STEP_INPUTS != 0; }

    // Return 16 rows from `row` on, starting at `step`. A partial last step is accessed alone.
    LeftRows at(int64_t row, int64_t step) const {
        constexpr int64_t SIZE = sizeof *x;
        if (row + SIDE > rows)
            return {last_rows.get() + step * STEP_INPUTS, steps * STEP_INPUTS * SIZE};
        if (step == steps - 1 && ragged())
            return {last_step.get() + row * STEP_INPUTS, STEP_INPUTS * SIZE};
        return {x + row * x_row + step * STEP_INPUTS, x_row * SIZE};
    }

private:
    Memory<bf16> last_rows, last_step;  // [SIDE, inputs], [rows, STEP_INPUTS]
};

// An L2 panel of weights. `padded_inputs` is the number of inputs rounded up to whole steps and to
// whole unpacking units.
struct WeightPanel {
    int64_t output, outputs, input, inputs, padded_inputs;

    int64_t steps() const { return (inputs + STEP_INPUTS - 1) / STEP_INPUTS; }
    int64_t pairs() const { return (outputs + TILE_COLUMNS - 1) / TILE_COLUMNS; }
    // Return the words of right operands [pairs, padded_inputs / 2, TILE_COLUMNS] for a pair of tiles.
    int64_t pair_words() const { return padded_inputs / 2 * TILE_COLUMNS; }
};

// Results of some rows and at most TILE_COLUMNS outputs. They are written while the tiles compute the
// next ones.
template <class A>
class Results {
public:
    explicit Results(const A& a) : a(a) {}
    ~Results() { put(2 * SIDE); }
    Results(const Results&) = delete;
    Results& operator=(const Results&) = delete;

    // Write the remaining earlier results, then return the buffer of the next sums [rows, TILE_COLUMNS].
    float* begin(int64_t first_row, int64_t count, int64_t output, int64_t outputs) {
        put(2 * SIDE);
        turn = !turn, row = 0, rows = count, columns = outputs;
        out = static_cast<bf16*>(a.out) + first_row * a.out_row + output;
        bias = a.bias ? static_cast<const bf16*>(a.bias) + output : nullptr;
        return sums[turn];
    }

    // Write up to `count` of the remaining rows.
    INLINE void put(int64_t count) {
        for (; count > 0 && row < rows; count--, row++) {
            const float* from = sums[turn] + row * TILE_COLUMNS;
            bf16* to = out + row * a.out_row;
            columns < TILE_COLUMNS ? put_outputs(from, bias, to, columns, a.add) : put_row(from, to);
        }
    }

private:
    INLINE void put_row(const float* from, bf16* to) const {
        for (int64_t i = 0; i < TILE_COLUMNS; i += 2 * WIDTH) {
            Floats low = load(from + i), high = load(from + i + WIDTH);
            if (bias) low += load(bias + i), high += load(bias + i + WIDTH);
            if (a.add) low += load(to + i), high += load(to + i + WIDTH);
            narrow(to + i, low, high);
        }
    }

    alignas(64) float sums[2][2 * SIDE * TILE_COLUMNS];
    const A& a;
    int turn = 0;
    int64_t row = 0, rows = 0, columns = 0;
    bf16* out = nullptr;
    const bf16* bias = nullptr;
};

// Multiply H x 16 rows by an L2 panel of right operands. Sums go to `sums`, and for the last panel to
// `results`.
template <int H, class A>
void multiply_rows(Tiles& tiles, const A& a, const LeftOperand& x, const WeightPanel& panel, int64_t row,
                   const uint32_t* right, float* sums, Results<A>& results) {
    const int64_t first = panel.input / STEP_INPUTS, steps = panel.steps(), pairs = panel.pairs();
    const bool last = first + steps == x.steps, rest = last && x.ragged();
    const int64_t left = x.rows - row, rows = left < H * SIDE ? left : H * SIDE;
    const int64_t later = left - rows < H * SIDE ? left - rows : H * SIDE;  // of the next block
    const int64_t rows_per_step = (2 * SIDE + steps - 1) / steps;
    LeftRows whole[H], end[H];
    for (int h = 0; h < H; h++) {
        whole[h] = x.at(row + h * SIDE, first);
        end[h] = x.at(row + h * SIDE, x.steps - 1);
    }
    for (int64_t pair = 0; pair < pairs; pair++, right += panel.pair_words()) {
        const int64_t column = pair * TILE_COLUMNS, output = panel.output + column;
        const bf16* out = static_cast<const bf16*>(a.out) + row * a.out_row + output;
        const bf16* next = x.x + (row + rows) * x.x_row + first * STEP_INPUTS;
        float* to = sums + column * H * SIDE;
        const int64_t begin = later * pair / pairs, stop = later * (pair + 1) / pairs;
        panel.input > 0 ? load_sums<H>(tiles, to) : zero_sums<H>(tiles);
        const auto ahead = [&](int64_t k, int64_t tile) ALWAYS_INLINE {
            if (tile > 0) return;
            for (int64_t i = begin; i < stop; i++)
                prefetch(next + i * x.x_row + k * STEP_INPUTS, L2);
            if (last && k < rows) prefetch_to_write(out + k * a.out_row);
            results.put(rows_per_step);
        };
        add_products<H>(tiles, whole, right, steps - rest, ahead);
        if (rest)
            add_products<H>(tiles, end, right + (steps - 1) * TILE_PAIRS * TILE_COLUMNS, 1,
                            [](int64_t, int64_t) {});
        if (last) {
            const int64_t behind = panel.outputs - column;
            to = results.begin(row, rows, output, behind < TILE_COLUMNS ? behind : TILE_COLUMNS);
        }
        store_sums<H>(tiles, to);
    }
}

// Work split of a matmul: by outputs, and also by rows if there are too few outputs. Shares differ by
// at most a tile or two.
struct Shares {
    int64_t rows, outputs, by_rows = 1, by_outputs;

    // `max_outputs` is the maximum number of outputs of an L2 panel.
    Shares(int64_t rows, int64_t outputs, int64_t max_outputs, int64_t threads)
        : rows(rows), outputs(outputs), by_outputs((outputs + max_outputs - 1) / max_outputs) {
        if (by_outputs < threads) {
            const int64_t parts = (rows + MIN_ROWS - 1) / MIN_ROWS;
            by_rows = (threads + by_outputs - 1) / by_outputs;
            if (by_rows > parts) by_rows = parts;
        } else {
            by_outputs = up_to(threads, by_outputs);
        }
    }

    int64_t count() const { return by_rows * by_outputs; }
    int64_t first_row(int64_t part) const { return bound(rows, 2 * SIDE, part, by_rows); }
    int64_t first_output(int64_t part) const {
        return bound(outputs, TILE_COLUMNS, part, by_outputs);
    }

private:
    // Return the start of part `part` of `all`, aligned to whole tiles.
    static int64_t bound(int64_t all, int64_t tile, int64_t part, int64_t parts) {
        const int64_t first = (all + tile - 1) / tile * part / parts * tile;
        return first < all ? first : all;
    }
};

// Round inputs up to whole unpacking units of `multiple` inputs, then to whole steps.
INLINE int64_t padded_to_units(int64_t inputs, int64_t multiple) {
    return up_to(STEP_INPUTS, up_to(multiple, inputs));
}

// Multiply rows `first` to `end` by the outputs of `panel`, in L2 panels of at most `deep` inputs.
template <class Weights, class A>
void multiply_share(Tiles& tiles, const A& a, const Weights& weights, const LeftOperand& x,
                    WeightPanel panel, int64_t first, int64_t end, int64_t deep, int64_t multiple,
                    uint32_t* right, float* sums) {
    const int64_t together = x.inputs <= deep ? end - first : TILED_ROWS;
    Results<A> results(a);
    for (int64_t begin = first; begin < end; begin += together)
        for (panel.input = 0; panel.input < x.inputs; panel.input += deep) {
            const int64_t left = x.inputs - panel.input, rows = end - begin;
            panel.inputs = left < deep ? left : deep;
            panel.padded_inputs = padded_to_units(panel.inputs, multiple);
            weights.unpack(panel, right);
            by_tiles(rows < together ? rows : together, [&](auto height, int64_t row) {
                multiply_rows<decltype(height)::value>(
                    tiles, a, x, panel, begin + row, right,
                    sums + row * panel.pairs() * TILE_COLUMNS, results);
            });
        }
}

// Compute all matmuls of a chain that share x of `inputs` inputs. Weights(a) wraps the weights of one
// matmul. An L2 panel ends at a multiple of `multiple` inputs.
template <class Weights, class A>
int tile_matmul(const A& a, int64_t inputs, int64_t multiple) {
    int64_t least = multiple;
    while (least % STEP_INPUTS) least += multiple;
    const int64_t deep = least < TILED_INPUTS ? TILED_INPUTS / least * least : least;
    const bool whole = inputs <= deep;
    const int64_t width = whole ? padded_to_units(inputs, multiple) : deep, all = TILED_OUTPUTS * deep;
    const int64_t outputs = all / width / TILE_COLUMNS * TILE_COLUMNS;  // of an L2 panel
    // Per thread: right operands, and sums if there are several L2 panels.
    const int64_t words = outputs * width / 2;
    const int64_t size = words + (whole ? 0 : TILED_ROWS * TILED_OUTPUTS);
    LeftOperand x(a.x, a.rows, inputs, a.x_row);
    const Memory<float> workspace = memory<float>(a.threads * size);
    if (!x.make() || !workspace) return NO_MEMORY;
#pragma omp parallel num_threads(a.threads)
    {
        float* const sums = workspace.get() + thread_number() * size + words;
        auto* const right = reinterpret_cast<uint32_t*>(sums - words);
        const TileShapes shapes = whole_tiles();
        Tiles tiles(shapes);
        for (const A* matmul = &a; matmul; matmul = matmul->next) {
            const Weights weights(*matmul);
            const Shares shares(a.rows, weights.outputs(), outputs, a.threads);
#pragma omp for schedule(static) nowait
            for (int64_t share = 0; share < shares.count(); share++) {
                const int64_t part = share / shares.by_outputs, of = share % shares.by_outputs;
                const int64_t output = shares.first_output(of), first = shares.first_row(part);
                const WeightPanel panel{output, shares.first_output(of + 1) - output, 0, 0, 0};
                const int64_t end = shares.first_row(part + 1);
                multiply_share(tiles, *matmul, weights, x, panel, first, end, deep, multiple, right,
                               sums);
            }
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
