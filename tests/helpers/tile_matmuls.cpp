// One matmul of tiles of bfloat16, as amx.h computes it: reads A, B and C (rows, pairs and columns
// first, as bytes on the standard input), writes what C is then.
#include <cstdio>
#include <initializer_list>

#include "amx.h"
#if !defined(H2O_EMULATE)
#include <sys/syscall.h>
#include <unistd.h>
#endif

int main() {
    unsigned char size[3];
    uint32_t a[16][16] = {}, b[16][16] = {}, c[16][16] = {};
#if !defined(H2O_EMULATE)
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;
#endif
    while (fread(size, 1, 3, stdin) == 3) {
        for (auto matrix : {a, b, c})
            if (fread(matrix, sizeof a, 1, stdin) != 1) return 1;
        ISA::AmxTileShapes shapes;
        shapes.set(0, size[0], 4 * size[2]);
        shapes.set(3, size[0], 4 * size[1]);
        shapes.set(7, size[1], 4 * size[2]);
        {
            ISA::AmxTiles tiles(shapes);
            tiles.load<0>(c, 64);
            tiles.load<3>(a, 64);
            tiles.load<7>(b, 64);
            tiles.add_matmul<0, 3, 7>();
            tiles.store<0>(c, 64);
        }
        fwrite(c, sizeof c, 1, stdout);
    }
}
