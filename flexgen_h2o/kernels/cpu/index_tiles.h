// Tiles of the quantized key index. See config/cache_layout.py.
#pragma once

#include <cstdint>

#include "abi.h"

namespace ISA {

struct TileShape {
    int64_t dim, bits, groups, group, per_byte, code_rows, bytes;

    TileShape(int64_t dim, int64_t bits, int64_t groups)
        : dim(dim), bits(bits), groups(groups), group(dim / groups), per_byte(8 / bits),
          code_rows(dim / per_byte), bytes(INDEX_TILE * (code_rows + 4 * groups)) {}

    int64_t rows_of_group() const { return group / per_byte; }
};

}  // namespace ISA
