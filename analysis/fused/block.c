/* One block of one population of tokens, in one pass: what analysis/sums.py does in some forty, for the common case.
 *
 * Compiled once for each level of the processor (see hatch_build.py), with BLOCK as the name of the function. Only vector types
 * and builtins that gcc and clang share are used. Tokens whose log-ratio is beyond HOT or not finite, and log-probs beyond
 * LARGEST, are not handled: the function then returns 1, having changed nothing but the columns and the checksums, and the
 * caller takes the long way.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#include "block.h"

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

enum { TILE = 256, BINS = 4096 };

typedef double vec __attribute__((vector_size(8 * LANES)));
typedef int64_t ivec __attribute__((vector_size(8 * LANES)));
typedef float fvec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

static const double HOT = 300.0, LARGEST = 700.0, SMALLEST = -708.0;

/* Tokens of a piece, at most TILE of them, as float64; the last one is repeated up to a whole number of vectors. */
struct tile {
    double train[TILE + LANES] __attribute__((aligned(64)));
    double rollout[TILE + LANES] __attribute__((aligned(64)));
    double e[TILE + LANES] __attribute__((aligned(64)));
    double w[TILE + LANES] __attribute__((aligned(64)));
};

/* Where the next token stands. */
struct cursor {
    int64_t run, at;
};

struct sums {
    vec d, abs, d2, train, e, e2, w, w2, mult, low, high;
    ivec above, below, extreme, veto, identical;
};

struct pooled {
    vec p, p2, q, q2, cross, largest;
};

INLINE vec select_(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
INLINE vec smaller(vec a, vec b) { return select_(a < b, a, b); }
INLINE vec larger(vec a, vec b) { return select_(a > b, a, b); }
INLINE vec magnitude(vec x) { return (vec)((ivec)x & INT64_MAX); }
INLINE vec only(vec x, ivec live) { return (vec)((ivec)x & live); }
INLINE vec all(double x) { return (vec){0} + x; }

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
    vec f = x - k * 0x1.62e42feep-1;/* the head of ln 2: its product with k is exact */
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
    vec scale = (vec)(((ivec)shifted << 52) + ((int64_t)1023 << 52));
    *w = scale * p + scale;
    *e = scale * p + (scale - 1.0);
}

INLINE vec probability(vec x) {
    vec w, e;
    exponential(larger(x, all(SMALLEST)), &w, &e);
    return select_(x < SMALLEST, all(0.0), w);
}

/* The 12 leading bits of each value as a half, rounded to nearest even as a conversion does; beyond its range, infinity. */
INLINE uvec half_bins(vec x) {
    fvec f = __builtin_convertvector(x, fvec);
    uvec bits = (uvec)f, sign = bits >> 31, size = bits & 0x7fffffffu;
    uvec normal = (size + 0xfffu + ((size >> 13) & 1u)) >> 13;
    normal -= 112u << 10;
    fvec small = (fvec)size + 0.5f; /* the spacing at 0.5 is that of the halves below 2^-14 */
    uvec subnormal = (uvec)small - 0x3f000000u;
    uvec tiny = (uvec)(size < 0x38800000u), far = (uvec)(size >= 0x477ff000u);
    uvec half = (subnormal & tiny) | (normal & ~tiny);
    half = (0x7c00u & far) | (half & ~far);
    return (half >> 4) | (sign << 11);
}

INLINE double of_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE double of_half(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x7fffu) << 13, sign = (uint32_t)(x & 0x8000u) << 16;
    float f;
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
    memcpy(&bits, &f, 4);
    bits = (x & 0x7c00u) == 0x7c00u ? bits | 0x7f800000u : bits;
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

/* n stored values from ``first`` on, as float64; the sum of their bits. */
INLINE uint32_t load(const void *stored, int32_t type, int64_t first, int64_t n, double *out) {
    uint32_t bits = 0;
    if (type == FLOAT32) {
        const float *x = (const float *)stored + first;
        const uint32_t *raw = (const uint32_t *)stored + first;
        for (int64_t i = 0; i < n; i++) out[i] = x[i];
        for (int64_t i = 0; i < n; i++) bits += raw[i];
    } else if (type == FLOAT64) {
        const uint64_t *raw = (const uint64_t *)stored + first;
        memcpy(out, (const double *)stored + first, n * sizeof(double));
        for (int64_t i = 0; i < n; i++) bits += (uint32_t)(raw[i] ^ (raw[i] >> 32));
    } else {
        const uint16_t *raw = (const uint16_t *)stored + first;
        for (int64_t i = 0; i < n; i++) bits += (uint32_t)(int32_t)(int16_t)raw[i];
        if (type == BFLOAT16)
            for (int64_t i = 0; i < n; i++) out[i] = of_bfloat16(raw[i]);
        else
            for (int64_t i = 0; i < n; i++) out[i] = of_half(raw[i]);
    }
    return bits;
}

/* Fill the tile with the next n tokens, over as many runs as they lie in. */
INLINE uint32_t fill(const struct block *b, struct cursor *from, int64_t n, struct tile *tile) {
    uint32_t train = 0, rollout = 0;
    for (int64_t done = 0; done < n;) {
        int64_t left = b->run_stop[from->run] - from->at;
        int64_t some = left < n - done ? left : n - done;
        train += load(b->train, b->train_type, from->at, some, tile->train + done);
        rollout += load(b->rollout, b->rollout_type, from->at, some, tile->rollout + done);
        done += some;
        from->at += some;
        if (some == left && ++from->run < b->runs) from->at = b->run_start[from->run];
    }
    for (int i = 0; i < LANES; i++) {
        tile->train[n + i] = tile->train[n - 1];
        tile->rollout[n + i] = tile->rollout[n - 1];
    }
    return train * 2654435769u + rollout; /* times -1640531527, wrapping */
}

/* What is said of log-probs that are not below 0: rare, so token by token. */
static void not_negative(const double *own, const double *other, int64_t n, struct side *side) {
    for (int64_t i = 0; i < n; i++) {
        side->positive += own[i] > 0;
        side->zeros += own[i] == 0;
        side->disagreeing += own[i] == 0 && (other[i] > 1e-2 || other[i] < -1e-2);
    }
}

INLINE void weigh(const struct block *b, struct tile *tile, int64_t i, ivec live, int mismatch, struct sums *s, uint32_t *bins, int n,
                  ivec *fine) {
    vec t, r, w, e;
    memcpy(&t, tile->train + i, sizeof t);
    memcpy(&r, tile->rollout + i, sizeof r);
    vec d = t - r, size = magnitude(d);
    *fine &= (size <= HOT) & (t <= LARGEST) & (r <= LARGEST);
    exponential(d, &w, &e);
    memcpy(tile->e + i, &e, sizeof e);
    memcpy(tile->w + i, &w, sizeof w);
    s->low = smaller(d, s->low);
    s->high = larger(d, s->high);
    vec centred = d - b->shift, plain = e - b->e_shift;
    s->d += only(d, live);
    s->abs += only(size, live);
    s->e += only(plain, live);
    plain = only(plain, live);
    s->e2 += plain * plain;
    s->w += only(w, live);
    s->w2 += only(w * w, live);
    s->above += (d > b->log_upper) & live;
    s->below += (d < b->log_lower) & live;
    s->extreme += (size > b->extreme) & live;
    s->veto += ((d < b->veto_lower) | (d > b->veto_upper)) & live;
    s->identical += (d == 0.0) & live;
    if (b->moments) {
        centred = only(centred, live);
        s->d2 += centred * centred;
        s->train += only(t, live);
    }
    if (mismatch) s->mult += only(larger(w, 1.0 / w), live);
    uvec bin = half_bins(d);
    for (int j = 0; j < n; j++) bins[(j & 1) * BINS + bin[j]]++;
}

INLINE void compare(const struct block *b, const struct tile *tile, int64_t i, ivec live, struct pooled *all_, vec *difference) {
    vec r, e, w;
    memcpy(&r, tile->rollout + i, sizeof r);
    memcpy(&e, tile->e + i, sizeof e);
    memcpy(&w, tile->w + i, sizeof w);
    vec q = probability(r);
    vec gap = only(magnitude(q * e), live); /* p - q = q (w - 1): exact where p is close to q */
    vec p = only(q * w - b->shift_p, live);
    q = only(q - b->shift_q, live);
    *difference += gap;
    all_->largest = larger(gap, all_->largest);
    all_->p += p;
    all_->p2 += p * p;
    all_->q += q;
    all_->q2 += q * q;
    all_->cross += p * q;
}

int BLOCK(struct block *b) {
    static const ivec lanes = PLACES;
    const ivec every = (ivec){0} - 1;
    uint32_t bins[2 * BINS];
    struct tile tile;
    struct pooled pooled = {.largest = all(-DBL_MAX)};
    double sum_p = 0, sum_p2 = 0, sum_q = 0, sum_q2 = 0, sum_cross = 0;
    vec train_low = all(DBL_MAX), train_high = all(-DBL_MAX), rollout_low = all(DBL_MAX), rollout_high = all(-DBL_MAX);
    struct cursor from = {0, 0};
    struct side train = {0}, rollout = {0};
    int64_t both = 0, zeros = 0, negative = 0;
    double lowest = DBL_MAX;
    memset(bins, 0, sizeof bins);
    for (int64_t skip = b->skip;;) { /* to the first token */
        int64_t length = b->run_stop[from.run] - b->run_start[from.run];
        if (skip < length) {
            from.at = b->run_start[from.run] + skip;
            break;
        }
        skip -= length;
        from.run++;
    }
    for (int64_t piece = 0; piece < b->pieces; piece++) {
        int64_t stop = piece + 1 < b->pieces ? b->starts[piece + 1] : b->tokens;
        double *column = b->columns + piece;
        double value[ROWS] = {0};
        uint32_t bits = 0;
        vec low = all(DBL_MAX), high = all(-DBL_MAX);
        ivec fine = every;
        for (int64_t at = b->starts[piece]; at < stop; at += TILE) {
            int64_t n = stop - at < TILE ? stop - at : TILE, whole = n / LANES * LANES;
            struct sums s = {.low = low, .high = high};
            ivec live = lanes < n - whole;
            vec gap = all(0.0);
            bits += fill(b, &from, n, &tile);
            if (b->mismatch) {
                for (int64_t i = 0; i < whole; i += LANES) weigh(b, &tile, i, every, 1, &s, bins, LANES, &fine);
                if (whole < n) weigh(b, &tile, whole, live, 1, &s, bins, n - whole, &fine);
                for (int64_t i = 0; i < whole; i += LANES) compare(b, &tile, i, every, &pooled, &gap);
                if (whole < n) compare(b, &tile, whole, live, &pooled, &gap);
                value[DP] += total(gap);
                value[MULT] += total(s.mult);
                sum_p += total(pooled.p), sum_p2 += total(pooled.p2), sum_q += total(pooled.q);
                sum_q2 += total(pooled.q2), sum_cross += total(pooled.cross);
                pooled = (struct pooled){.largest = pooled.largest};
            } else {
                for (int64_t i = 0; i < whole; i += LANES) weigh(b, &tile, i, every, 0, &s, bins, LANES, &fine);
                if (whole < n) weigh(b, &tile, whole, live, 0, &s, bins, n - whole, &fine);
            }
            low = s.low, high = s.high;
            value[N] += n;
            value[D] += total(s.d), value[ABS] += total(s.abs);
            value[E] += total(s.e), value[E2] += total(s.e2), value[W] += total(s.w), value[W2] += total(s.w2);
            if (b->moments) value[T] += total(s.train), value[D2] += total(s.d2);
            value[HIGH] += count(s.above), value[LOW] += count(s.below), value[EXTREME] += count(s.extreme);
            value[VETO] += count(s.veto);
            double identical = count(s.identical);
            value[IDENTICAL] += identical, zeros += (int64_t)identical;
            vec top_train = all(-DBL_MAX), top_rollout = all(-DBL_MAX);
            for (int64_t i = 0; i < n; i += LANES) {
                vec t, r;
                memcpy(&t, tile.train + i, sizeof t);
                memcpy(&r, tile.rollout + i, sizeof r);
                train_low = smaller(t, train_low), top_train = larger(t, top_train);
                rollout_low = smaller(r, rollout_low), top_rollout = larger(r, top_rollout);
            }
            train_high = larger(top_train, train_high), rollout_high = larger(top_rollout, rollout_high);
            int zero_train = most(top_train) >= 0, zero_rollout = most(top_rollout) >= 0;
            if (zero_train) not_negative(tile.train, tile.rollout, n, &train);
            if (zero_rollout) not_negative(tile.rollout, tile.train, n, &rollout);
            if (zero_train && zero_rollout)
                for (int64_t i = 0; i < n; i++) both += tile.train[i] == 0 && tile.rollout[i] == 0;
            if (identical > 0)
                for (int64_t i = 0; i < n; i++) {
                    double d = tile.train[i] - tile.rollout[i];
                    negative += d == 0 && __builtin_signbit(d);
                }
        }
        for (int i = 0; i < LANES; i++)
            if (!fine[i]) return 1;
        value[LOWEST] = least(low), value[HIGHEST] = most(high);
        lowest = value[LOWEST] < lowest ? value[LOWEST] : lowest;
        for (int row = 0; row < ROWS; row++) column[row * b->stride] = value[row];
        b->checksum[piece] = bits;
    }
    for (int i = 0; i < BINS; i++) b->bins[i] += bins[i] + bins[BINS + i];
    b->zeros = zeros, b->negative_zeros = negative, b->lowest = lowest;
    b->train_side = train, b->rollout_side = rollout, b->both_zero = both;
    b->train_low = least(train_low), b->train_high = most(train_high);
    b->rollout_low = least(rollout_low), b->rollout_high = most(rollout_high);
    b->p = sum_p, b->p2 = sum_p2, b->q = sum_q, b->q2 = sum_q2, b->cross = sum_cross;
    b->largest_difference = most(pooled.largest);
    return 0;
}
