/* What the sequences of a unit are given and give back. analysis/fused/figures.py describes the same structure to ctypes. */
#ifndef ROLLOUT_IS_SEQUENCES_H
#define ROLLOUT_IS_SEQUENCES_H

#include <stdint.h>

#include "block.h"

enum { COLUMNS = TAIL }; /* rows of a table */

/* Sets of sequence weights, each with its log: the mean token weight, exp of the summed and of the mean log-ratio, both perplexities
 * and their ratio. */
enum level { MEAN, PRODUCT, GEOMETRIC, TRAIN, ROLLOUT, RATIO, LEVELS };

/* What has a clustered standard error: rows.TOKEN_ERRORS, then rows.SEQUENCE_ERRORS. */
enum { TOKEN_ERRORS = 13, SEQUENCE_ERRORS = 10, ERRORS = TOKEN_ERRORS + SEQUENCE_ERRORS };

/* Of the weights of one level: sums of w and of w^2; mean of w - 1, and squares about it; extremes of log w (of w for MEAN). */
struct weights {
    double sum, square, mean, m2, low, high;
    int64_t above, below;
};

struct sequences {
    /* Given. */
    const double *sums; /* row i of sequence k at i * stride + k */
    int64_t stride;
    const double *low, *high; /* extremes of d */
    int64_t count;
    const int64_t *group; /* number of the group of each; null: every sequence is a cluster of its own */
    int32_t mismatch;
    double shift, e_shift, log_lower, log_upper, lower, upper;

    /* Filled. */
    double *product, *geometric; /* these log weights of the sequences that have tokens, one after another */
    int64_t *product_bins, *geometric_bins; /* by the 15 leading bits of the log as float32, added to; null: not wanted */
    double *by_group; /* [groups, 2 + ERRORS], added to: tokens, sequences, and the sums of what has an error; null without groups */

    /* Given back. */
    int64_t measured, vetoed; /* sequences with tokens; of them, with a vetoed one */
    double totals[COLUMNS], lowest, highest;
    struct weights level[LEVELS];
    double figures[SEQUENCE_ERRORS]; /* their sums */
    double less_low, less_high; /* extremes of the mean token weight less 1 */
    double sizes; /* sum of squared tokens a sequence */
    double centre[ERRORS], squares[ERRORS], cross[ERRORS]; /* residual sums about the centre, see clusters.ClusterRow */
};

#endif
