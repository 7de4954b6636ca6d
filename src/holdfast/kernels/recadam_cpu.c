/* RecAdam's step on a CPU: reads every weight, gradient, moment and anchor once.

   m <- m + (1-beta1) (g - m)        v <- beta2 v + (1-beta2) g^2
   p <- p keep - step m / (sqrt(v) / root + eps)
   p <- p + min(1, c F) (anchor - p)

   with keep = 1 - lr wd, step = lr lam / (1 - beta1^t), root = sqrt(1 - beta2^t) and
   c = lr (1-lam) gamma. Every rounding is that of torch's fused AdamW and torch.lerp in vector
   instructions. torch's results for elements that do not fill a vector may differ in the last bit
   of v.

   recadam_cpu.py compiles this file and calls it. The tensors are float32, except for anchors. */

#include <math.h>
#include <omp.h>
#include <stdint.h>

#if !defined(__FMA__) && !defined(__ARM_FEATURE_FMA) && !defined(__FP_FAST_FMAF)
#error "fmaf is slow without an instruction for it"
#endif

/* One parameter. The addresses are of its first elements. */
typedef struct {
    float *p;
    const float *g;
    float *m, *v;
    float *t;              /* its count of updates */
    const void *anchor;    /* float32 or bfloat16 */
    const float *weight;   /* F, the importance of each coordinate, or NULL: 1 */
    int64_t size;
    int64_t half;          /* whether the anchor is bfloat16 */
} Row;

typedef struct {
    double lr, lam, gamma, weight_decay, beta1, beta2, eps;
    int64_t maximize;
} Settings;

static inline float widened(uint16_t bfloat16)
{
    union { uint32_t bits; float value; } wide = { (uint32_t)bfloat16 << 16 };
    return wide.value;
}

/* A share of the way from one number to another, from the nearer end: 1 is exact. */
static inline float toward(float from, float to, float share)
{
    const int near = share < 0.5f;
    return fmaf(near ? share : share - 1.0f, to - from, near ? from : to);
}

/* Elements [begin, end) of a parameter. The compiler makes one loop of each kind of row. */
static inline __attribute__((always_inline)) void update_as(
    const Row *row, const Settings *s, int64_t begin, int64_t end, int half, int weighted)
{
    float *restrict p = row->p, *restrict m = row->m, *restrict v = row->v;
    const float *restrict g = row->g, *restrict weight = row->weight;
    const float *restrict anchor = row->anchor;
    const uint16_t *restrict half_anchor = row->anchor;
    const double t = *row->t;
    const float sign = s->maximize ? -1.0f : 1.0f;
    const float keep = (float)(1 - s->lr * s->weight_decay);
    const float new1 = (float)(1 - s->beta1), beta2 = (float)s->beta2;
    const float new2 = (float)(1 - s->beta2), eps = (float)s->eps;
    const float step = (float)(-s->lr * s->lam / (1 - pow(s->beta1, t)));
    const float root = (float)sqrt(1 - pow(s->beta2, t));
    const float c = (float)(s->lr * (1 - s->lam) * s->gamma), share = c > 1 ? 1 : c;

#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        const float gradient = g[i] * sign;
        const float first = toward(m[i], gradient, new1);
        const float second = fmaf(new2 * gradient, gradient, v[i] * beta2);
        const float learned = p[i] * keep + step * first / (sqrtf(second) / root + eps);
        const float to = half ? widened(half_anchor[i]) : anchor[i];
        const float own = weighted ? c * weight[i] : share;
        m[i] = first;
        v[i] = second;
        p[i] = toward(learned, to, own > 1 ? 1 : own);
    }
}

static void update(const Row *row, const Settings *s, int64_t begin, int64_t end)
{
    if (row->half && row->weight) update_as(row, s, begin, end, 1, 1);
    else if (row->half)           update_as(row, s, begin, end, 1, 0);
    else if (row->weight)         update_as(row, s, begin, end, 0, 1);
    else                          update_as(row, s, begin, end, 0, 0);
}

/* Every thread updates an equal share of all elements, in one piece: long streams are fastest. */
void recadam_step(const Row *rows, int64_t count, const Settings *s, int threads)
{
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) {
        *rows[i].t += 1;
        total += rows[i].size;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t share = total / omp_get_num_threads() + 1;
        const int64_t first = share * omp_get_thread_num(), last = first + share;
        int64_t before = 0; /* the elements of the rows before this one */
        for (int64_t i = 0; i < count && before < last; before += rows[i++].size) {
            const int64_t begin = first - before, end = last - before, size = rows[i].size;
            if (begin < size) update(rows + i, s, begin > 0 ? begin : 0, end < size ? end : size);
        }
    }
}
