/* The squared distance of two tensors and the squared norm of the first, in one pass.

   Sums over BLOCK elements are in float32, sums of these in float64.

   distance_cpu.py compiles this file and calls it. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define BLOCK 4096

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Masks __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

/* Sums, and whether a term of them is not 0: squares may be too small for float32. */
typedef struct {
    double moved, norm;
    int64_t any_moved, any_norm;
} Sums;

/* LANES elements, of which only `count` exist; the others are 0. */
static inline Floats loaded(const void *from, int64_t at, int64_t count, int bf16)
{
    if (bf16) {
        Halves bits = { 0 };
        memcpy(&bits, (const uint16_t *)from + at, 2 * count);
        return (Floats)(__builtin_convertvector(bits, Words) << 16);
    }
    Floats values = { 0 };
    memcpy(&values, (const float *)from + at, 4 * count);
    return values;
}

static inline double added(Floats values)
{
    double total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += values[lane];
    return total;
}

/* The compiler makes one loop of each pair of kinds. */
static inline __attribute__((always_inline)) void sum_as(
    const void *before, const void *after, int64_t size, Sums *sums, int bf16, int bf16_after)
{
    Masks any_moved = { 0 }, any_norm = { 0 };
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t end = begin + BLOCK < size ? begin + BLOCK : size;
        Floats moved[2] = { { 0 } }, norm[2] = { { 0 } };
        int64_t i = begin;
        for (; i + 2 * LANES <= end; i += 2 * LANES)
            for (int part = 0; part < 2; part++) {
                const Floats b = loaded(before, i + part * LANES, LANES, bf16);
                const Floats d = loaded(after, i + part * LANES, LANES, bf16_after) - b;
                moved[part] += d * d;
                norm[part] += b * b;
                any_moved |= d != 0;
                any_norm |= b != 0;
            }
        for (; i < end; i += LANES) {
            const int64_t count = end - i < LANES ? end - i : LANES;
            const Floats b = loaded(before, i, count, bf16);
            const Floats d = loaded(after, i, count, bf16_after) - b;
            moved[0] += d * d;
            norm[0] += b * b;
            any_moved |= d != 0;
            any_norm |= b != 0;
        }
        sums->moved += added(moved[0] + moved[1]);
        sums->norm += added(norm[0] + norm[1]);
    }
    for (int lane = 0; lane < LANES; lane++) {
        sums->any_moved |= any_moved[lane] != 0;
        sums->any_norm |= any_norm[lane] != 0;
    }
}

void square_sums(
    const void *before, const void *after, int64_t size, int bf16, int bf16_after, Sums *sums)
{
    if (bf16 && bf16_after)
        sum_as(before, after, size, sums, 1, 1);
    else if (bf16)
        sum_as(before, after, size, sums, 1, 0);
    else if (bf16_after)
        sum_as(before, after, size, sums, 0, 1);
    else
        sum_as(before, after, size, sums, 0, 0);
}
