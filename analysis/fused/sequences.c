/* What follows from the sums of a unit's sequences, in one pass: what analysis/rows.py does in some two hundred, for the common case.
 *
 * Compiled like block.c, with SEQUENCES as the name of the function. It returns 1 where a sum is not finite; the caller then
 * takes the long way.
 */
#include <float.h>
#include <math.h>

#include "sequences.h"
#include "vectors.h"

enum { TILE = 256, STEP = 4 * LANES, BIN_SHIFT = 17 };

/* The figures of a sequence in the order of rows.SEQUENCE_ERRORS. */
enum figure { X, X_PRODUCT, X_GEOMETRIC, TRAIN_NLL, ROLLOUT_NLL, TRAIN_PPL, ROLLOUT_PPL, DRIFT, ABS_DRIFT, PPL_RATIO };

static const int WEIGHT[LEVELS] = {X, X_PRODUCT, X_GEOMETRIC, TRAIN_PPL, ROLLOUT_PPL, PPL_RATIO};
/* Columns with an error, D2 being taken about 0 by then. */
static const int SUMMED[TOKEN_ERRORS] = {D, D2, K3, ABS, DP, MULT, W, W2, HIGH, LOW, EXTREME, VETO, IDENTICAL};

typedef double row[TILE] __attribute__((aligned(64)));

/* The n sequences with tokens among TILE of the unit; behind them the last one repeated, later 0, up to a multiple of STEP. */
struct tile {
    int64_t n, padded, at[TILE]; /* at: their places in the table */
    row raw[COLUMNS], low, high, d2, one;
    row figure[SEQUENCE_ERRORS], log[LEVELS], e[LEVELS];
    double total[COLUMNS], figures[SEQUENCE_ERRORS]; /* sums of the raw columns and of the figures */
};

INLINE double sum_of(const double *x, int64_t n) {
    vec sum[4] = {0};
    for (int64_t i = 0; i < n; i += STEP)
        for (int k = 0; k < 4; k++) {
            vec own;
            memcpy(&own, x + i + k * LANES, sizeof own);
            sum[k] += own;
        }
    return total((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* Sums of r^2 and of r * size, r being x - centre * size. */
INLINE void residuals(const double *x, const double *size, double centre, int64_t n, double *squares, double *cross) {
    vec square[2] = {0}, product[2] = {0};
    for (int64_t i = 0; i < n; i += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            vec own, by;
            memcpy(&own, x + i + k * LANES, sizeof own);
            memcpy(&by, size + i + k * LANES, sizeof by);
            own -= by * centre;
            square[k] += own * own;
            product[k] += own * by;
        }
    *squares = total(square[0] + square[1]);
    *cross = total(product[0] + product[1]);
}

INLINE void gather(const double *from, int64_t first, int64_t last, const struct tile *t, double *into) {
    if (t->n == last - first)
        memcpy(into, from + first, t->n * sizeof(double));
    else
        for (int64_t j = 0; j < t->n; j++) into[j] = from[t->at[j]];
    for (int64_t j = t->n; j < t->padded; j++) into[j] = into[t->n - 1];
}

/* Fill the tile from sequences [first, last) of the table. */
static void take(const struct sequences *s, int64_t first, int64_t last, struct tile *t) {
    t->n = 0;
    for (int64_t k = first; k < last; k++) {
        t->at[t->n] = k;
        t->n += s->sums[N * s->stride + k] > 0;
    }
    t->padded = (t->n + STEP - 1) / STEP * STEP;
    for (int i = 0; i < COLUMNS; i++) gather(s->sums + i * s->stride, first, last, t, t->raw[i]);
    gather(s->low, first, last, t, t->low);
    gather(s->high, first, last, t, t->high);
}

/* exp and exp - 1 of a log; far below 0 they are 0 and -1, above LARGEST infinite. */
INLINE void weight(vec log, double *w, double *e) {
    vec own, less;
    exponential(smaller(larger(log, splat(SMALLEST)), splat(LARGEST)), &own, &less);
    ivec large = log > LARGEST;
    own = either(large, splat(INFINITY), own), less = either(large, splat(INFINITY), less);
    memcpy(w, &own, sizeof own);
    memcpy(e, &less, sizeof less);
}

/* Every sequence by itself. 0 where a sum is not finite. */
INLINE int each(const struct sequences *s, int mismatch, struct tile *t) {
    const double shift = s->shift, square = shift * shift;
    ivec fine = (ivec){0} - 1;
    for (int64_t i = 0; i < t->padded; i += LANES) {
        vec n, d, d2, train, w, e;
        memcpy(&n, t->raw[N] + i, sizeof n), memcpy(&d, t->raw[D] + i, sizeof d), memcpy(&d2, t->raw[D2] + i, sizeof d2);
        memcpy(&train, t->raw[T] + i, sizeof train), memcpy(&w, t->raw[W] + i, sizeof w), memcpy(&e, t->raw[E] + i, sizeof e);
        d2 = d2 + 2.0 * shift * (d - n * shift) + n * square;
        memcpy(t->d2 + i, &d2, sizeof d2);
        /* Near 1 the sum of w - 1 has the digits that 1 + (w - 1) lost; far below 1 it is the other way round. */
        ivec near = w > 0.5 * n;
        vec direct = w / n, less = either(near, e / n + s->e_shift, direct - 1.0), x = either(near, less + 1.0, direct);
        vec geometric = d / n, nll = -train / n, rollout_nll = (d - train) / n, drift = -geometric, size = magnitude(drift);
        memcpy(t->figure[X] + i, &x, sizeof x), memcpy(t->e[MEAN] + i, &less, sizeof less);
        memcpy(t->log[PRODUCT] + i, &d, sizeof d), memcpy(t->log[GEOMETRIC] + i, &geometric, sizeof geometric);
        memcpy(t->figure[TRAIN_NLL] + i, &nll, sizeof nll), memcpy(t->figure[ROLLOUT_NLL] + i, &rollout_nll, sizeof nll);
        memcpy(t->figure[DRIFT] + i, &drift, sizeof drift), memcpy(t->figure[ABS_DRIFT] + i, &size, sizeof size);
        weight(d, t->figure[X_PRODUCT] + i, t->e[PRODUCT] + i);
        weight(geometric, t->figure[X_GEOMETRIC] + i, t->e[GEOMETRIC] + i);
        fine &= (magnitude(x) <= DBL_MAX) & (magnitude(d) <= DBL_MAX) & (magnitude(train) <= DBL_MAX);
        if (mismatch) {
            memcpy(t->log[TRAIN] + i, &nll, sizeof nll), memcpy(t->log[ROLLOUT] + i, &rollout_nll, sizeof nll);
            memcpy(t->log[RATIO] + i, &drift, sizeof drift);
            weight(nll, t->figure[TRAIN_PPL] + i, t->e[TRAIN] + i);
            weight(rollout_nll, t->figure[ROLLOUT_PPL] + i, t->e[ROLLOUT] + i);
            weight(drift, t->figure[PPL_RATIO] + i, t->e[RATIO] + i);
        } else { /* the sums of what is not asked for are read by nobody */
            memcpy(t->figure[TRAIN_PPL] + i, &nll, sizeof nll), memcpy(t->figure[ROLLOUT_PPL] + i, &rollout_nll, sizeof nll);
            memcpy(t->figure[PPL_RATIO] + i, &drift, sizeof drift);
        }
    }
    for (int i = 0; i < LANES; i++)
        if (!fine[i]) return 0;
    return 1;
}

/* From here on the places behind the last sequence add nothing. */
INLINE void clear(struct tile *t, int mismatch) {
    int64_t size = (t->padded - t->n) * sizeof(double);
    for (int i = 0; i < COLUMNS; i++) memset(t->raw[i] + t->n, 0, size);
    for (int i = 0; i < SEQUENCE_ERRORS; i++) memset(t->figure[i] + t->n, 0, size);
    for (int i = 0; i < (mismatch ? LEVELS : TRAIN); i++) memset(t->e[i] + t->n, 0, size);
    memset(t->d2 + t->n, 0, size);
    for (int64_t j = 0; j < t->n; j++) t->one[j] = 1.0;
    memset(t->one + t->n, 0, size);
}

/* Extremes, and counts beyond the bounds, of the first n of some values. */
INLINE void range(const double *x, int64_t n, double lower, double upper, struct weights *out) {
    static const ivec lanes = PLACES;
    vec low = splat(out->low), high = splat(out->high);
    ivec above = {0}, below = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        ivec live = lanes < n - i;
        vec own;
        memcpy(&own, x + i, sizeof own);
        low = either(live & (own < low), own, low), high = either(live & (own > high), own, high);
        above += live & (own > upper), below += live & (own < lower);
    }
    out->low = least(low), out->high = most(high);
    out->above += (int64_t)count(above), out->below += (int64_t)count(below);
}

/* Extremes of the log-ratio, and how many sequences a vetoed token has. */
INLINE void extremes(struct sequences *s, const struct tile *t) {
    vec low = splat(s->lowest), high = splat(s->highest);
    for (int64_t i = 0; i < t->padded; i += LANES) {
        vec own_low, own_high;
        memcpy(&own_low, t->low + i, sizeof own_low), memcpy(&own_high, t->high + i, sizeof own_high);
        low = smaller(own_low, low), high = larger(own_high, high);
    }
    s->lowest = least(low), s->highest = most(high);
    for (int64_t j = 0; j < t->n; j++) s->vetoed += t->raw[VETO][j] > 0;
}

/* Add the tile's weights of one level to those before them, ``before`` in number. */
INLINE void add_weights(const struct tile *t, int level, int64_t before, struct weights *into) {
    const double *w = t->figure[WEIGHT[level]], n = (double)t->n;
    double square, unused, m2, rest, first = sum_of(t->e[level], t->padded), mean = first / n;
    into->sum += sum_of(w, t->padded);
    residuals(w, t->one, 0.0, t->padded, &square, &unused);
    into->square += square;
    residuals(t->e[level], t->one, mean, t->padded, &m2, &rest);
    m2 -= rest * rest / n; /* the rounding of the mean does not enter */
    double gap = mean - into->mean, all = (double)before + n;
    into->m2 += m2 + gap * gap * ((double)before * n / all);
    into->mean += gap * (n / all);
}

/* Add the tile's residual sums of one quantity about its own mean, moved to the first tile's. */
INLINE void add_cluster(struct sequences *s, const struct tile *t, int q, const double *x, double sum, const double *size, double sizes,
                        double squares) {
    double centre = sum / sizes, square, cross;
    residuals(x, size, centre, t->padded, &square, &cross);
    if (!s->measured) s->centre[q] = centre;
    double moved = centre - s->centre[q];
    s->squares[q] += square + moved * (2.0 * cross + moved * squares);
    s->cross[q] += cross + moved * squares;
}

static void add_clusters(struct sequences *s, const struct tile *t) {
    double squares, unused, n = (double)t->n;
    residuals(t->raw[N], t->one, 0.0, t->padded, &squares, &unused);
    s->sizes += squares;
    for (int q = 0; q < TOKEN_ERRORS; q++) {
        const double *x = SUMMED[q] == D2 ? t->d2 : t->raw[SUMMED[q]];
        double sum = SUMMED[q] == D2 ? sum_of(x, t->padded) : t->total[SUMMED[q]];
        if (SUMMED[q] >= HIGH && sum == 0 && s->centre[q] == 0) continue; /* counts of what has not happened */
        add_cluster(s, t, q, x, sum, t->raw[N], t->total[N], squares);
    }
    for (int q = 0; q < SEQUENCE_ERRORS; q++) add_cluster(s, t, TOKEN_ERRORS + q, t->figure[q], t->figures[q], t->one, n, n);
}

/* Sums of the columns and of the figures, in the tile and so far. */
static void add_totals(struct sequences *s, struct tile *t) {
    for (int i = 0; i < COLUMNS; i++) s->totals[i] += t->total[i] = sum_of(t->raw[i], t->padded);
    for (int i = 0; i < SEQUENCE_ERRORS; i++) s->figures[i] += t->figures[i] = sum_of(t->figure[i], t->padded);
}

static void add_groups(struct sequences *s, const struct tile *t) {
    for (int64_t j = 0; j < t->n; j++) {
        double *into = s->by_group + s->group[t->at[j]] * (2 + ERRORS);
        *into++ += t->raw[N][j], *into++ += 1.0;
        for (int q = 0; q < TOKEN_ERRORS; q++) *into++ += SUMMED[q] == D2 ? t->d2[j] : t->raw[SUMMED[q]][j];
        for (int q = 0; q < SEQUENCE_ERRORS; q++) *into++ += t->figure[q][j];
    }
}

INLINE void count_bins(const double *x, int64_t n, int64_t *bins) {
    for (int64_t j = 0; j < n; j++) {
        float narrow = (float)x[j];
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof bits);
        bins[bits >> BIN_SHIFT]++;
    }
}

INLINE int run(struct sequences *s, int mismatch) {
    struct tile t;
    int levels = mismatch ? LEVELS : TRAIN;
    s->lowest = DBL_MAX, s->highest = -DBL_MAX;
    struct weights less = {.low = DBL_MAX, .high = -DBL_MAX};
    for (int level = 0; level < LEVELS; level++) s->level[level] = less;
    for (int64_t first = 0; first < s->count; first += TILE) {
        take(s, first, s->count - first < TILE ? s->count : first + TILE, &t);
        if (!t.n) continue;
        if (!each(s, mismatch, &t)) return 1;
        extremes(s, &t);
        range(t.e[MEAN], t.n, -DBL_MAX, DBL_MAX, &less);
        range(t.figure[X], t.n, s->lower, s->upper, &s->level[MEAN]);
        for (int level = PRODUCT; level < levels; level++) range(t.log[level], t.n, s->log_lower, s->log_upper, &s->level[level]);
        memcpy(s->product + s->measured, t.log[PRODUCT], t.n * sizeof(double));
        memcpy(s->geometric + s->measured, t.log[GEOMETRIC], t.n * sizeof(double));
        if (s->product_bins) {
            count_bins(t.log[PRODUCT], t.n, s->product_bins);
            count_bins(t.log[GEOMETRIC], t.n, s->geometric_bins);
        }
        clear(&t, mismatch);
        add_totals(s, &t);
        for (int level = 0; level < levels; level++) add_weights(&t, level, s->measured, &s->level[level]);
        if (s->group)
            add_groups(s, &t);
        else
            add_clusters(s, &t);
        s->measured += t.n;
    }
    s->less_low = less.low, s->less_high = less.high;
    return 0;
}

int SEQUENCES(struct sequences *s) { return s->mismatch ? run(s, 1) : run(s, 0); }
