// linear_quantized and unpack_rows: what is done with a quantized matrix.
//
// A block of the matrix is taken apart once, into codes that stay in L1, and meets all rows of a
// panel there. Outputs are the lanes of vectors, so that blocks are read as they lie, in one
// stream, and nothing is summed across lanes. Sums of codes by x are scaled group by group.
#include "matrix.h"
#include "memory.h"

namespace ISA {

namespace {

constexpr int64_t PANEL = PRODUCT_ROWS;
constexpr int64_t COLUMNS = PRODUCT_OUTPUTS;
constexpr int64_t AHEAD = 8;             // blocks of a tile that are asked for beforehand
constexpr int VECTORS = 2;               // of outputs, in registers together
#if defined(__AVX512F__)
constexpr int ROWS = 8;                  // of x, in registers together
#else
constexpr int ROWS = 4;
#endif

INLINE Words load_words(const void* from) {
    Words to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

INLINE void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }

// Products of floats: an element of x by a code, each step one input.
struct Single {
    static constexpr int64_t inputs = 1;  // of a step

    // Codes of WIDTH outputs, step by step, COLUMNS apart.
    template <int bits>
    static INLINE void take_apart(Words word, uint32_t* to) {
        for (int side = 0; side < 2; side++)
            for (int t = 0; t < 16 / bits; t++) {
                const Ints field = Ints(word >> (16 * side + bits * t));
                Floats x;
#if defined(__AVX512F__)
                if (bits == 4)
                    x = code<LOW>(field);  // looks at four bits alone
                else
#endif
                    x = __builtin_convertvector(field & ((1 << bits) - 1), Floats);
                store_words(to + (2 * t + side) * COLUMNS, bits_of<Words>(x));
            }
    }

    static INLINE Floats broadcast_x(uint32_t x) { return broadcast(bits_of<float>(x)); }
    static INLINE Floats add_product(Floats sum, Words codes, Floats x) {
        return fma(bits_of<Floats>(codes), x, sum);
    }

    // What the codes are too large by.
    static constexpr float shift(int) { return 0.0f; }

    template <class T>
    static uint32_t pack(const T* x, int64_t) {
        return bits_of<uint32_t>(one(x));
    }
};

#if defined(__AVX512BF16__)
// Products of pairs of bfloat16: two inputs each step, whose sum AVX512_BF16 takes at once.
struct Pairs {
    static constexpr int64_t inputs = 2;

    template <int bits>
    static INLINE void take_apart(Words word, uint32_t* to) {
        for (int t = 0; t < 16 / bits; t++) {
            const Words field = word >> (bits * t);
            if (bits == 4) {
                // 128 + code is the bfloat16 whose low bits are the code.
                store_words(to + t * COLUMNS, (field & 0x000f000f) | 0x43004300);
                continue;
            }
            // A bfloat16 holds 8 bits exactly, and is the upper half of a float.
            const Words first = bits_of<Words>(__builtin_convertvector(Ints(field & 0xff), Floats));
            const Words second =
                bits_of<Words>(__builtin_convertvector(Ints(field >> 16 & 0xff), Floats));
            store_words(to + t * COLUMNS, first >> 16 | second);
        }
    }

    static INLINE __m512bh broadcast_x(uint32_t x) {
        return bits_of<__m512bh>(_mm512_set1_epi32(static_cast<int>(x)));
    }
    static INLINE Floats add_product(Floats sum, Words codes, __m512bh x) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), bits_of<__m512bh>(codes), x));
    }

    static constexpr float shift(int bits) { return bits == 4 ? 128.0f : 0.0f; }

    static uint32_t pack(const bf16* x, int64_t left) {
        return x[0].bits | static_cast<uint32_t>(left > 1 ? x[1].bits : 0) << 16;
    }
};
#endif

// What one thread works in.
struct Workspace {
    uint32_t* x;       // [groups, rows of the panel, steps]
    float* sums;       // [groups, rows of the panel]: of x
    float* totals;     // [rows of the panel, COLUMNS]
    uint32_t* codes;   // [steps, COLUMNS]
    float* scales;     // [COLUMNS]
    float* zeros;      // [COLUMNS]: what a sum of x is to be multiplied with
};

// A panel of x, its rows filled up with zeros to whole groups.
template <class A, class T>
void pack_panel(const Product& a, const Blocks& m, int64_t first, int64_t rows,
                const Workspace& w) {
    const int64_t steps = m.group / A::inputs;
    for (int64_t row = 0; row < rows; row++) {
        const T* from = static_cast<const T*>(a.x) + (first + row) * a.x_row;
        for (int64_t g = 0; g < m.groups; g++) {
            uint32_t* to = w.x + (g * rows + row) * steps;
            const int64_t left = a.matrix.inputs - g * m.group;
            const int64_t size = left < m.group ? left : m.group;
            const T* mine = from + g * m.group;
            float sum = 0.0f;
            for (int64_t i = 0; i < size; i++) sum += one(mine + i);
            w.sums[g * rows + row] = sum;
            int64_t step = 0;
            for (; step * A::inputs < size; step++)
                to[step] = A::pack(mine + step * A::inputs, size - step * A::inputs);
            for (; step < steps; step++) to[step] = 0;
        }
    }
}

// The codes, scales and zero points of a group of `tiles` tiles, the others' all 0.
template <class A, int bits>
INLINE void unpack(const Blocks& m, int64_t tile, int64_t tiles, int64_t g, const Workspace& w) {
    constexpr int64_t STEPS = 32 / bits / A::inputs;  // of a word
    for (int64_t t = 0; t < COLUMNS / MATRIX_TILE; t++) {
        const int64_t column = t * MATRIX_TILE;
        if (t >= tiles) {
            for (int64_t step = 0; step < m.group / A::inputs; step++)
                std::memset(w.codes + step * COLUMNS + column, 0, 4 * MATRIX_TILE);
            for (int64_t i = column; i < column + MATRIX_TILE; i++) w.scales[i] = w.zeros[i] = 0.0f;
            continue;
        }
        const uint8_t* block = m.at(tile + t, g);
        // Behind the end of a tile its neighbour in the next chunk goes on.
        const int64_t ahead = g + AHEAD;
        const uint8_t* later =
            ahead < m.groups ? m.at(tile + t, ahead)
                             : m.at(tile + t + COLUMNS / MATRIX_TILE, ahead - m.groups);
        for (int64_t line = 0; line < m.block_bytes; line += 64)
            __builtin_prefetch(later + line, 0, 3);
        for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
            const Floats scale = load(reinterpret_cast<const fp16*>(scales_of(block)) + i);
            const Floats zero = load(reinterpret_cast<const fp16*>(zeros_of(block)) + i);
            store(w.scales + column + i, scale);
            store(w.zeros + column + i, fma(scale, broadcast(-A::shift(bits)), zero));
        }
        const uint8_t* words = words_of(block);
        for (int64_t n = 0; n < m.words; n++)
            for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH)
                A::template take_apart<bits>(load_words(words + 4 * (n * MATRIX_TILE + i)),
                                             w.codes + n * STEPS * COLUMNS + column + i);
    }
}

// Rows from `row` on of the panel: what a group adds to their totals.
template <class A, int R>
INLINE void add_group(const Workspace& w, int64_t steps, int64_t rows, int64_t g, int64_t row) {
    constexpr int CHAINS = R * VECTORS < 8 ? 2 : 1;  // a sum has to wait for the last one
    const uint32_t* x = w.x + (g * rows + row) * steps;
    const float* sums = w.sums + g * rows + row;
    for (int64_t column = 0; column < COLUMNS; column += VECTORS * WIDTH) {
        Floats mine[CHAINS][R][VECTORS];
        for (int c = 0; c < CHAINS; c++)
            for (int r = 0; r < R; r++)
                for (int v = 0; v < VECTORS; v++) mine[c][r][v] = Floats{};
        for (int64_t step = 0; step < steps; step += CHAINS)
            for (int c = 0; c < CHAINS; c++) {
                Words codes[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    codes[v] = load_words(w.codes + (step + c) * COLUMNS + column + v * WIDTH);
                for (int r = 0; r < R; r++) {
                    const auto element = A::broadcast_x(x[r * steps + step + c]);
                    for (int v = 0; v < VECTORS; v++)
                        mine[c][r][v] = A::add_product(mine[c][r][v], codes[v], element);
                }
            }
        for (int r = 0; r < R; r++)
            for (int v = 0; v < VECTORS; v++) {
                const int64_t at = column + v * WIDTH;
                float* total = w.totals + (row + r) * COLUMNS + at;
                Floats all = mine[0][r][v];
                if (CHAINS == 2) all += mine[CHAINS - 1][r][v];
                all = fma(all, load(w.scales + at), load(total));
                store(total, fma(load(w.zeros + at), broadcast(sums[r]), all));
            }
    }
}

template <class A>
INLINE void add_rest(const Workspace& w, int64_t steps, int64_t rows, int64_t g, int64_t row) {
    switch (rows - row) {
#if defined(__AVX512F__)
        case 7: return add_group<A, 7>(w, steps, rows, g, row);
        case 6: return add_group<A, 6>(w, steps, rows, g, row);
        case 5: return add_group<A, 5>(w, steps, rows, g, row);
        case 4: return add_group<A, 4>(w, steps, rows, g, row);
#endif
        case 3: return add_group<A, 3>(w, steps, rows, g, row);
        case 2: return add_group<A, 2>(w, steps, rows, g, row);
        case 1: return add_group<A, 1>(w, steps, rows, g, row);
    }
}

// Outputs of up to two tiles, for a panel of rows.
template <class A, class T, int bits>
void chunk_of_outputs(const Product& a, const Blocks& m, int64_t tile, int64_t first,
                      int64_t rows, const Workspace& w) {
    const int64_t all = tiles_of(a.matrix), steps = m.group / A::inputs;
    const int64_t tiles = all - tile < COLUMNS / MATRIX_TILE ? all - tile : COLUMNS / MATRIX_TILE;
    std::memset(w.totals, 0, static_cast<size_t>(rows * COLUMNS) * sizeof(float));
    for (int64_t g = 0; g < m.groups; g++) {
        unpack<A, bits>(m, tile, tiles, g, w);
        int64_t row = 0;
        for (; row + ROWS <= rows; row += ROWS) add_group<A, ROWS>(w, steps, rows, g, row);
        add_rest<A>(w, steps, rows, g, row);
    }
    const int64_t begin = tile * MATRIX_TILE;
    const int64_t end = begin + COLUMNS < a.matrix.outputs ? begin + COLUMNS : a.matrix.outputs;
    const T* bias = static_cast<const T*>(a.bias);
    for (int64_t row = 0; row < rows; row++) {
        const float* total = w.totals + row * COLUMNS - begin;
        T* out = static_cast<T*>(a.out) + (first + row) * a.out_row;
        for (int64_t i = begin; i < end; i++) {
            const float x = total[i] + (bias ? one(bias + i) : 0.0f);
            put(out + i, a.add ? x + one(out + i) : x);
        }
    }
}

template <class A, class T, int bits>
int product(const Product& a) {
    const Blocks m(a.matrix);
    const int64_t most = a.rows < PANEL ? a.rows : PANEL, steps = m.group / A::inputs;
    const int64_t x_size = m.groups * most * steps, sums_size = m.groups * most;
    const int64_t size = (x_size + sums_size + most * COLUMNS + steps * COLUMNS + 2 * COLUMNS + 15)
                         / 16 * 16;
    const Memory<uint32_t> everyone = memory<uint32_t>(a.threads * size);
    if (!everyone) return NO_MEMORY;
    const int64_t panels = (a.rows + PANEL - 1) / PANEL;
    const int64_t chunks = (tiles_of(a.matrix) * MATRIX_TILE + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(a.threads)
    {
        Workspace w;
        w.codes = everyone.get() + thread_number() * size;
        w.totals = reinterpret_cast<float*>(w.codes + steps * COLUMNS);
        w.scales = w.totals + most * COLUMNS;
        w.zeros = w.scales + COLUMNS;
        w.x = reinterpret_cast<uint32_t*>(w.zeros + COLUMNS);
        w.sums = reinterpret_cast<float*>(w.x + x_size);
        int64_t packed = -1;
#pragma omp for collapse(2) schedule(static)
        for (int64_t panel = 0; panel < panels; panel++)
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                const int64_t first = panel * PANEL, left = a.rows - first;
                const int64_t rows = left < PANEL ? left : PANEL;
                if (panel != packed) pack_panel<A, T>(a, m, first, rows, w);
                packed = panel;
                chunk_of_outputs<A, T, bits>(a, m, chunk * (COLUMNS / MATRIX_TILE), first, rows, w);
            }
    }
    return DONE;
}

template <class A, class T>
int product_of(const Product& a) {
    return a.matrix.bits == 4 ? product<A, T, 4>(a) : product<A, T, 8>(a);
}

// Row `row` of the matrix to floats.
INLINE void unpack_row(const Matrix& matrix, const Blocks& m, int64_t row, float* to) {
    const int64_t lane = row % MATRIX_TILE, levels = (1 << m.bits) - 1, half = 16 / m.bits;
    for (int64_t g = 0; g < m.groups; g++) {
        const uint8_t* block = m.at(row / MATRIX_TILE, g);
        const float scale = half_at(scales_of(block) + 2 * lane);
        const float zero = half_at(zeros_of(block) + 2 * lane);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        for (int64_t i = 0; i < size; i++) {
            const int64_t n = i / (2 * half), t = i % (2 * half);
            uint32_t word;
            std::memcpy(&word, words_of(block) + 4 * (n * MATRIX_TILE + lane), 4);
            const uint32_t code = word >> (16 * (t % 2) + m.bits * (t / 2)) & levels;
            to[g * m.group + i] = zero + scale * static_cast<float>(code);
        }
    }
}

// A block to floats [group, TILE].
template <int bits>
INLINE void unpack_block(const Blocks& m, const uint8_t* block, float* to) {
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = load(reinterpret_cast<const fp16*>(scales_of(block)) + i);
        const Floats zero = load(reinterpret_cast<const fp16*>(zeros_of(block)) + i);
        for (int64_t n = 0; n < m.words; n++) {
            const Words word = load_words(words_of(block) + 4 * (n * MATRIX_TILE + i));
            for (int t = 0; t < 32 / bits; t++) {
                const Ints code = Ints(word >> (16 * (t % 2) + bits * (t / 2)));
                const Floats x = __builtin_convertvector(code & ((1 << bits) - 1), Floats);
                store(to + (n * (32 / bits) + t) * MATRIX_TILE + i, zero + scale * x);
            }
        }
    }
}

// The rows of a whole tile. Blocks are transposed on the way, in vectors where a tile is one.
template <class T, int bits>
void unpack_tile(const Matrix& matrix, const Blocks& m, int64_t tile, T* out, float* block) {
    for (int64_t g = 0; g < m.groups; g++) {
        unpack_block<bits>(m, m.at(tile, g), block);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        int64_t i = 0;
#if defined(__AVX512F__)
        for (; i + MATRIX_TILE <= size; i += MATRIX_TILE) {
            Floats some[MATRIX_TILE];
            for (int k = 0; k < MATRIX_TILE; k++) some[k] = load(block + (i + k) * MATRIX_TILE);
            transpose(some);
            for (int lane = 0; lane < MATRIX_TILE; lane++)
                put_all(out + lane * matrix.inputs + g * m.group + i, some[lane]);
        }
#endif
        for (int64_t lane = 0; lane < MATRIX_TILE; lane++)
            for (int64_t k = i; k < size; k++)
                put(out + lane * matrix.inputs + g * m.group + k, block[k * MATRIX_TILE + lane]);
    }
}

INLINE bool whole_tile(const Rows& a, int64_t i) {
    if (i + MATRIX_TILE > a.count || a.rows[i] % MATRIX_TILE) return false;
    for (int64_t k = 1; k < MATRIX_TILE; k++)
        if (a.rows[i + k] != a.rows[i] + k) return false;
    return true;
}

template <class T>
int rows_of(const Rows& a) {
    for (int64_t i = 0; i < a.count; i++)
        if (a.rows[i] < 0 || a.rows[i] >= a.matrix.outputs) return INVALID;
    const Blocks m(a.matrix);
    const int64_t inputs = a.matrix.inputs, size = inputs + MATRIX_TILE * m.group;
    const Memory<float> floats = memory<float>(a.threads * size);
    if (!floats) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t i = 0; i < (a.count + MATRIX_TILE - 1) / MATRIX_TILE; i++) {
        float* mine = floats.get() + thread_number() * size;
        const int64_t first = i * MATRIX_TILE, left = a.count - first;
        T* out = static_cast<T*>(a.out) + first * inputs;
        if (whole_tile(a, first)) {
            const int64_t tile = a.rows[first] / MATRIX_TILE;
            a.matrix.bits == 4 ? unpack_tile<T, 4>(a.matrix, m, tile, out, mine)
                               : unpack_tile<T, 8>(a.matrix, m, tile, out, mine);
            continue;
        }
        for (int64_t row = 0; row < (left < MATRIX_TILE ? left : MATRIX_TILE); row++, out += inputs) {
            unpack_row(a.matrix, m, a.rows[first + row], mine);
            for (int64_t k = 0; k < inputs; k++) put(out + k, mine[k]);
        }
    }
    return DONE;
}

}  // namespace

int linear_quantized(const Product& a) {
    switch (a.dtype) {
        case BFLOAT16:
#if defined(__AVX512BF16__)
            return product_of<Pairs, bf16>(a);
#else
            return product_of<Single, bf16>(a);
#endif
        case FLOAT16: return product_of<Single, fp16>(a);
        default: return product_of<Single, float>(a);
    }
}

int unpack_rows(const Rows& a) {
    switch (a.dtype) {
        case BFLOAT16: return rows_of<bf16>(a);
        case FLOAT16: return rows_of<fp16>(a);
        default: return rows_of<float>(a);
    }
}

}  // namespace ISA
