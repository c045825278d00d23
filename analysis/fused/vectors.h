/* Vectors as wide as a register of the level that is compiled for, and what is done with them. */
#ifndef ROLLOUT_IS_VECTORS_H
#define ROLLOUT_IS_VECTORS_H

#include <stdint.h>
#include <string.h>

/* As many float64 as a register of the level holds. */
#if defined(__AVX512F__)
#define LANES 8
#define PLACES {0, 1, 2, 3, 4, 5, 6, 7}
#elif defined(__AVX2__)
#define LANES 4
#define PLACES {0, 1, 2, 3}
#else
#define LANES 2
#define PLACES {0, 1}
#endif

typedef double vec __attribute__((vector_size(8 * LANES)));
typedef int64_t ivec __attribute__((vector_size(8 * LANES)));
typedef uint64_t wvec __attribute__((vector_size(8 * LANES)));
typedef float fvec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

static const double LARGEST = 700.0, SMALLEST = -708.0; /* between them exponential() is exact */

INLINE vec either(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec smaller(vec a, vec b) { return either(a < b, a, b); }
INLINE vec larger(vec a, vec b) { return either(a > b, a, b); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & INT64_MAX); }
INLINE vec only(vec x, ivec live) { return (vec)((ivec)x & live); }
INLINE vec splat(double x) { return (vec){0} + x; }

INLINE double total(vec x) {
    double sum[LANES];
    memcpy(sum, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

INLINE double count(ivec x) {
    int64_t sum = 0;
    for (int i = 0; i < LANES; i++) sum -= x[i];
    return (double)sum;
}

INLINE double least(vec x) {
    double out = x[0];
    for (int i = 1; i < LANES; i++) out = x[i] < out ? x[i] : out;
    return out;
}

INLINE double most(vec x) {
    double out = x[0];
    for (int i = 1; i < LANES; i++) out = x[i] > out ? x[i] : out;
    return out;
}

/* exp(x) and exp(x) - 1, each to a unit in its own last place, for SMALLEST <= x <= LARGEST: x = k ln 2 + f, a Taylor polynomial
 * for exp(f) - 1 with |f| <= ln(2) / 2 (the first term left out is 4e-18), and 2^k put back without losing what is near 1. */
INLINE void exponential(vec x, vec *w, vec *e) {
    const double shifter = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to a whole number and leaves that in the low bits */
    vec shifted = x * 0x1.71547652b82fep0 + shifter;
    vec k = shifted - shifter;
    vec f = x - k * 0x1.62e42feep-1; /* the head of ln 2: its product with k is exact */
    f = f - k * 0x1.a39ef35793c76p-33;
    vec f2 = f * f, f4 = f2 * f2;
    vec a = f * (1.0 / 6) + 0.5;
    vec b = f * (1.0 / 120) + (1.0 / 24);
    vec c = f * (1.0 / 5040) + (1.0 / 720);
    vec d = f * (1.0 / 362880) + (1.0 / 40320);
    vec g = f * (1.0 / 39916800) + (1.0 / 3628800);
    vec h = f * (1.0 / 6227020800.0) + (1.0 / 479001600);
    a = b * f2 + a;
    c = d * f2 + c;
    g = h * f2 + g;
    a = (g * f4 + c) * f4 + a;
    vec p = a * f2 + f;
    vec scale = (vec)(((wvec)shifted << 52) + ((uint64_t)1023 << 52));
    *w = scale * p + scale;
    *e = scale * p + (scale - 1.0);
}

#endif
