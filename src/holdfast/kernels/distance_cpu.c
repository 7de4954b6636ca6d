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

/* Sums of the lanes of a block. */
typedef struct {
    Floats moved, norm;
    Masks any_moved, any_norm;
} Lanes;

static inline __attribute__((always_inline)) void add(Lanes *lanes, Floats before, Floats after)
{
    const Floats d = after - before;
    lanes->moved += d * d;
    lanes->norm += before * before;
    lanes->any_moved |= d != 0;
    lanes->any_norm |= before != 0;
}

/* The compiler makes one loop of each pair of kinds. */
static inline __attribute__((always_inline)) void sum_as(
    const void *before, const void *after, int64_t size, Sums *sums, int bf16, int bf16_after)
{
    for (int64_t begin = 0; begin < size; begin += BLOCK) {
        const int64_t end = begin + BLOCK < size ? begin + BLOCK : size;
        Lanes lanes = { { 0 } };
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES)
            add(&lanes, loaded(before, i, LANES, bf16), loaded(after, i, LANES, bf16_after));
        if (i < end)
            add(&lanes, loaded(before, i, end - i, bf16), loaded(after, i, end - i, bf16_after));
        sums->moved += added(lanes.moved);
        sums->norm += added(lanes.norm);
        for (int lane = 0; lane < LANES; lane++) {
            sums->any_moved |= lanes.any_moved[lane] != 0;
            sums->any_norm |= lanes.any_norm[lane] != 0;
        }
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
