/* One block of one population of tokens, in one pass: what analysis/sums.py does in some forty, for the common case.
 *
 * Compiled once for each level of the processor (see hatch_build.py), with BLOCK as the name of the function. Only vector types
 * and builtins that gcc and clang share are used. Tokens whose log-ratio is beyond HOT or not finite, and log-probs beyond
 * LARGEST, are not handled: the function then returns 1, having changed nothing but the columns and the checksums, and the
 * caller takes the long way.
 */
#include <float.h>

#include "block.h"
#include "vectors.h"

enum { TILE = 256, BINS = 4096 };

static const double HOT = 300.0;

/* At most TILE tokens of the block, of as many pieces as they belong to. The last one is repeated up to a whole number of vectors. */
struct tile {
    double train[TILE + LANES] __attribute__((aligned(64)));
    double rollout[TILE + LANES] __attribute__((aligned(64)));
    double d[TILE + LANES] __attribute__((aligned(64)));
    double e[TILE + LANES] __attribute__((aligned(64)));
    double w[TILE + LANES] __attribute__((aligned(64)));
    double mult[TILE + LANES] __attribute__((aligned(64)));
    double gap[TILE + LANES] __attribute__((aligned(64)));
    uint32_t bits[TILE + LANES] __attribute__((aligned(64)));
    uint32_t bin[TILE + LANES] __attribute__((aligned(64)));
    double farthest; /* largest |d| */
};

/* The sums of a piece. */
struct piece {
    double value[ROWS];
    uint32_t bits;
};

static const struct piece NOTHING = {.value = {[LOWEST] = DBL_MAX, [HIGHEST] = -DBL_MAX}};

/* Where the next token stands. */
struct cursor {
    int64_t run, at;
};

/* What is kept of all tokens of the block together. */
struct whole {
    ivec zeros, negative_zeros;
    vec train_low, train_high, rollout_low, rollout_high, largest;
    double p, p2, q, q2, cross;
    struct side train, rollout;
    int64_t both_zero;
    uint32_t bins[BINS];
};

INLINE vec probability(vec x) {
    vec w, e;
    exponential(larger(x, splat(SMALLEST)), &w, &e);
    return either(x < SMALLEST, splat(0.0), w);
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

/* n stored values from ``first`` on, as float64. */
INLINE void load(const void *stored, int32_t type, int64_t first, int64_t n, double *out) {
    if (type == FLOAT32) {
        const float *x = (const float *)stored + first;
        for (int64_t i = 0; i < n; i++) out[i] = x[i];
    } else if (type == FLOAT64) {
        memcpy(out, (const double *)stored + first, n * sizeof(double));
    } else {
        const uint16_t *raw = (const uint16_t *)stored + first;
        if (type == BFLOAT16)
            for (int64_t i = 0; i < n; i++) out[i] = of_bfloat16(raw[i]);
        else
            for (int64_t i = 0; i < n; i++) out[i] = of_half(raw[i]);
    }
}

/* Their bits, times a factor, added up. */
INLINE void add_bits(const void *stored, int32_t type, int64_t first, int64_t n, uint32_t factor, uint32_t *out) {
    if (type == FLOAT32) {
        const uint32_t *raw = (const uint32_t *)stored + first;
        for (int64_t i = 0; i < n; i++) out[i] += raw[i] * factor;
    } else if (type == FLOAT64) {
        const uint64_t *raw = (const uint64_t *)stored + first;
        for (int64_t i = 0; i < n; i++) out[i] += (uint32_t)(raw[i] ^ (raw[i] >> 32)) * factor;
    } else {
        const uint16_t *raw = (const uint16_t *)stored + first;
        for (int64_t i = 0; i < n; i++) out[i] += (uint32_t)(int32_t)(int16_t)raw[i] * factor;
    }
}

/* Fill the tile with the next n tokens, over as many runs as they lie in. */
static void fill(const struct block *b, struct cursor *from, int64_t n, struct tile *tile) {
    if (b->checksum) memset(tile->bits, 0, sizeof tile->bits);
    for (int64_t done = 0; done < n;) {
        int64_t left = b->run_stop[from->run] - from->at;
        int64_t some = left < n - done ? left : n - done;
        load(b->train, b->train_type, from->at, some, tile->train + done);
        load(b->rollout, b->rollout_type, from->at, some, tile->rollout + done);
        if (b->checksum) {
            add_bits(b->train, b->train_type, from->at, some, 2654435769u, tile->bits + done);
            add_bits(b->rollout, b->rollout_type, from->at, some, 1u, tile->bits + done);
        }
        done += some;
        from->at += some;
        if (some == left && ++from->run < b->runs) from->at = b->run_start[from->run];
    }
    for (int i = 0; i < LANES; i++) {
        tile->train[n + i] = tile->train[n - 1];
        tile->rollout[n + i] = tile->rollout[n - 1];
    }
}

/* Log-probs of one side that are not below 0, counted. */
static void not_negative(const double *own, const double *other, int64_t n, struct side *side) {
    for (int64_t i = 0; i < n; i++) {
        side->positive += own[i] > 0;
        side->zeros += own[i] == 0;
        side->disagreeing += own[i] == 0 && (other[i] > 1e-2 || other[i] < -1e-2);
    }
}

/* What is said of log-probs that are not below 0: rare, so token by token. */
static __attribute__((noinline)) void not_below_zero(const struct tile *tile, int64_t n, struct whole *whole) {
    not_negative(tile->train, tile->rollout, n, &whole->train);
    not_negative(tile->rollout, tile->train, n, &whole->rollout);
    for (int64_t i = 0; i < n; i++) whole->both_zero += tile->train[i] == 0 && tile->rollout[i] == 0;
}

/* Every token by itself: its weight, its probabilities, its bin. 0 where one of them is not handled. */
INLINE int each(const struct block *b, int64_t n, int mismatch, struct tile *tile, struct whole *whole) {
    static const ivec lanes = PLACES;
    vec p_sum = {0}, p2_sum = {0}, q_sum = {0}, q2_sum = {0}, cross_sum = {0};
    vec train_high = splat(-DBL_MAX), rollout_high = splat(-DBL_MAX);
    vec farthest = {0}, train_low = whole->train_low, rollout_low = whole->rollout_low, largest = whole->largest;
    ivec fine = (ivec){0} - 1, zeros = whole->zeros, negative_zeros = whole->negative_zeros;
    for (int64_t i = 0; i < n; i += LANES) {
        ivec live = lanes < n - i;
        vec t, r, w, e;
        memcpy(&t, tile->train + i, sizeof t);
        memcpy(&r, tile->rollout + i, sizeof r);
        vec d = t - r;
        vec size = magnitude(d);
        fine &= size <= HOT, farthest = larger(size, farthest);
        train_low = smaller(t, train_low), train_high = larger(t, train_high);
        rollout_low = smaller(r, rollout_low), rollout_high = larger(r, rollout_high);
        zeros += (d == 0.0) & live;
        negative_zeros += ((ivec)d == INT64_MIN) & live;
        exponential(d, &w, &e);
        memcpy(tile->d + i, &d, sizeof d);
        memcpy(tile->e + i, &e, sizeof e);
        memcpy(tile->w + i, &w, sizeof w);
        uvec bin = half_bins(d);
        memcpy(tile->bin + i, &bin, sizeof bin);
        if (mismatch) {
            vec mult = larger(w, 1.0 / w), q = probability(r);
            vec gap = magnitude(q * e); /* p - q = q (w - 1): exact where p is close to q */
            vec p = only(q * w - b->shift_p, live);
            q = only(q - b->shift_q, live);
            memcpy(tile->mult + i, &mult, sizeof mult);
            memcpy(tile->gap + i, &gap, sizeof gap);
            largest = larger(gap, largest);
            p_sum += p, p2_sum += p * p, q_sum += q, q2_sum += q * q, cross_sum += p * q;
        }
    }
    /* Apart from the loop above: neighbours fall into the same bin, and what waits for them would hold everything up. */
    for (int64_t i = 0; i < n; i++) whole->bins[tile->bin[i]]++;
    tile->farthest = most(farthest);
    whole->zeros = zeros, whole->negative_zeros = negative_zeros;
    whole->train_low = train_low, whole->rollout_low = rollout_low, whole->largest = largest;
    whole->train_high = larger(train_high, whole->train_high);
    whole->rollout_high = larger(rollout_high, whole->rollout_high);
    if (mismatch) {
        whole->p += total(p_sum), whole->p2 += total(p2_sum), whole->q += total(q_sum), whole->q2 += total(q2_sum);
        whole->cross += total(cross_sum);
    }
    double train_top = most(train_high), rollout_top = most(rollout_high);
    if (b->checksum && (train_top >= 0 || rollout_top >= 0)) not_below_zero(tile, n, whole);
    int handled = train_top <= LARGEST && rollout_top <= LARGEST;
    for (int i = 0; i < LANES; i++) handled &= fine[i] != 0;
    return handled;
}

/* Add tokens [first, last) of the tile to the sums of their piece: whole vectors of them. */
INLINE int64_t add_vectors(const struct block *b, const struct tile *tile, int64_t first, int64_t last, int mismatch, int near, double *value) {
    vec d_sum = {0}, abs_sum = {0}, d2_sum = {0}, train_sum = {0}, e_sum = {0}, e2_sum = {0}, w_sum = {0}, w2_sum = {0};
    vec mult_sum = {0}, gap_sum = {0}, low = splat(value[LOWEST]), high = splat(value[HIGHEST]);
    ivec above = {0}, below = {0}, extreme = {0}, veto = {0}, identical = {0};
    int64_t i = first;
    for (; i + LANES <= last; i += LANES) {
        vec d, e, w;
        memcpy(&d, tile->d + i, sizeof d);
        memcpy(&e, tile->e + i, sizeof e);
        memcpy(&w, tile->w + i, sizeof w);
        vec size = magnitude(d), plain = e - b->e_shift;
        low = smaller(d, low), high = larger(d, high);
        d_sum += d, abs_sum += size, e_sum += plain, e2_sum += plain * plain, w_sum += w, w2_sum += w * w;
        identical += d == 0.0;
        if (!near) {
            above += d > b->log_upper, below += d < b->log_lower, extreme += size > b->extreme;
            veto += (d < b->veto_lower) | (d > b->veto_upper);
        }
        if (b->moments) {
            vec t, centred = d - b->shift;
            memcpy(&t, tile->train + i, sizeof t);
            d2_sum += centred * centred, train_sum += t;
        }
        if (mismatch) {
            vec mult, gap;
            memcpy(&mult, tile->mult + i, sizeof mult);
            memcpy(&gap, tile->gap + i, sizeof gap);
            mult_sum += mult, gap_sum += gap;
        }
    }
    value[D] += total(d_sum), value[ABS] += total(abs_sum), value[E] += total(e_sum), value[E2] += total(e2_sum);
    value[W] += total(w_sum), value[W2] += total(w2_sum);
    value[IDENTICAL] += count(identical);
    if (!near) {
        value[HIGH] += count(above), value[LOW] += count(below), value[EXTREME] += count(extreme);
        value[VETO] += count(veto);
    }
    if (b->moments) value[D2] += total(d2_sum), value[T] += total(train_sum);
    if (mismatch) value[MULT] += total(mult_sum), value[DP] += total(gap_sum);
    value[LOWEST] = least(low), value[HIGHEST] = most(high);
    return i;
}

/* The same one by one: what is left over, and pieces of a few tokens. */
INLINE void add_one_by_one(const struct block *b, const struct tile *tile, int64_t first, int64_t last, int mismatch, int near, double *value) {
    double d_sum = 0, abs_sum = 0, d2_sum = 0, train_sum = 0, e_sum = 0, e2_sum = 0, w_sum = 0, w2_sum = 0, mult_sum = 0, gap_sum = 0;
    double low = value[LOWEST], high = value[HIGHEST];
    int64_t above = 0, below = 0, extreme = 0, veto = 0, identical = 0;
    for (int64_t i = first; i < last; i++) {
        double d = tile->d[i], size = __builtin_fabs(d), plain = tile->e[i] - b->e_shift, w = tile->w[i], centred = d - b->shift;
        low = d < low ? d : low, high = d > high ? d : high;
        d_sum += d, abs_sum += size, e_sum += plain, e2_sum += plain * plain, w_sum += w, w2_sum += w * w;
        d2_sum += centred * centred, train_sum += tile->train[i];
        identical += d == 0.0;
        if (!near) {
            above += d > b->log_upper, below += d < b->log_lower, extreme += size > b->extreme;
            veto += (d < b->veto_lower) | (d > b->veto_upper);
        }
        if (mismatch) mult_sum += tile->mult[i], gap_sum += tile->gap[i];
    }
    value[D] += d_sum, value[ABS] += abs_sum, value[E] += e_sum, value[E2] += e2_sum, value[W] += w_sum, value[W2] += w2_sum;
    value[IDENTICAL] += identical;
    if (!near) value[HIGH] += above, value[LOW] += below, value[EXTREME] += extreme, value[VETO] += veto;
    if (b->moments) value[D2] += d2_sum, value[T] += train_sum;
    if (mismatch) value[MULT] += mult_sum, value[DP] += gap_sum;
    value[LOWEST] = low, value[HIGHEST] = high;
}

/* Add tokens [first, last) of the tile; ``near``: none of them is beyond a bound. */
INLINE void add(const struct block *b, const struct tile *tile, int64_t first, int64_t last, int mismatch, int near, struct piece *piece) {
    piece->value[N] += (double)(last - first);
    if (b->checksum)
        for (int64_t i = first; i < last; i++) piece->bits += tile->bits[i];
    if (last - first >= LANES) first = add_vectors(b, tile, first, last, mismatch, near, piece->value);
    if (first < last) add_one_by_one(b, tile, first, last, mismatch, near, piece->value);
}

/* What follows from the sums of a piece, as sums.py has it: W and W2 from w - 1, which keeps the digits of weights near 1, but
 * not where they are so small that it would cancel. */
INLINE void complete(const struct block *b, int mismatch, double *value) {
    double one = 1 + b->e_shift, w = one * value[N] + value[E];
    if (w >= b->cold * value[N]) value[W] = w, value[W2] = one * one * value[N] + 2 * one * value[E] + value[E2];
    if (mismatch) {
        double k3 = value[E] - value[D] + value[N] * b->e_shift;
        value[K3] = k3 > 0 ? k3 : 0;
    }
}

/* Row by row as it stands here: a loop over them would keep the sums from staying in registers. */
INLINE void put(const struct block *b, const struct piece *own, int64_t piece) {
    double *column = b->columns + piece;
#define PUT(row) column[row * b->stride] = own->value[row]
    PUT(N), PUT(D), PUT(ABS), PUT(E), PUT(E2), PUT(W), PUT(W2), PUT(T), PUT(D2), PUT(MULT), PUT(DP), PUT(K3), PUT(HIGH), PUT(LOW);
    PUT(EXTREME), PUT(VETO), PUT(IDENTICAL), PUT(TAIL), PUT(LOWEST), PUT(HIGHEST);
#undef PUT
    if (b->checksum) b->checksum[piece] = own->bits;
}

INLINE int run(struct block *b, int mismatch) {
    struct tile tile;
    struct whole whole = {
        .largest = splat(-DBL_MAX),
        .train_low = splat(DBL_MAX), .train_high = splat(-DBL_MAX), .rollout_low = splat(DBL_MAX), .rollout_high = splat(-DBL_MAX),
    };
    struct cursor from = {0, 0};
    for (int64_t skip = b->skip;; from.run++) { /* to the first token */
        int64_t length = b->run_stop[from.run] - b->run_start[from.run];
        from.at = b->run_start[from.run] + skip;
        if (skip < length) break;
        skip -= length;
    }
    struct piece carried = NOTHING;
    int64_t piece = 0;
    int begun = 0;
    for (int64_t start = 0; start < b->tokens; start += TILE) {
        int64_t n = b->tokens - start < TILE ? b->tokens - start : TILE;
        fill(b, &from, n, &tile);
        if (!each(b, n, mismatch, &tile, &whole)) return 1;
        if (start < b->keep) {
            int64_t size = (b->keep - start < n ? b->keep - start : n) * sizeof(double);
            memcpy(b->keep_train + start, tile.train, size);
            memcpy(b->keep_rollout + start, tile.rollout, size);
            memcpy(b->keep_d + start, tile.d, size);
            memcpy(b->keep_e + start, tile.e, size);
        }
        int near = tile.farthest <= b->nearest;
        for (int64_t at = 0; at < n;) {
            int64_t stop = (piece + 1 < b->pieces ? b->starts[piece + 1] : b->tokens) - start, last = stop < n ? stop : n;
            struct piece own = NOTHING;
            if (begun) own = carried;
            if (near)
                add(b, &tile, at, last, mismatch, 1, &own);
            else
                add(b, &tile, at, last, mismatch, 0, &own);
            at = last;
            begun = stop > n;
            if (begun) { /* it goes on in the next tile */
                carried = own;
                break;
            }
            complete(b, mismatch, own.value);
            put(b, &own, piece++);
        }
    }
    for (int i = 0; i < BINS; i++) b->bins[i] += whole.bins[i];
    b->zeros = (int64_t)count(whole.zeros), b->negative_zeros = (int64_t)count(whole.negative_zeros);
    b->train_side = whole.train, b->rollout_side = whole.rollout, b->both_zero = whole.both_zero;
    b->train_low = least(whole.train_low), b->train_high = most(whole.train_high);
    b->rollout_low = least(whole.rollout_low), b->rollout_high = most(whole.rollout_high);
    b->p = whole.p, b->p2 = whole.p2, b->q = whole.q, b->q2 = whole.q2, b->cross = whole.cross;
    b->largest_difference = most(whole.largest);
    return 0;
}

int BLOCK(struct block *b) { return b->mismatch ? run(b, 1) : run(b, 0); }
