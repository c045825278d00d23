/* What a block is given and gives back. analysis/fused/library.py describes the same structure to ctypes, field by field. */
#ifndef ROLLOUT_IS_BLOCK_H
#define ROLLOUT_IS_BLOCK_H

#include <stdint.h>

enum type { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

/* The rows of a column, in the order of analysis/populations.py. */
enum row { N, D, ABS, E, E2, W, W2, T, D2, MULT, DP, K3, HIGH, LOW, EXTREME, VETO, IDENTICAL, TAIL, LOWEST, HIGHEST, ROWS };

/* Log-probs of one side that are not below 0. */
struct side {
    int64_t positive, zeros, disagreeing;
};

struct block {
    /* Given: stored columns of a chunk, and the runs of positions of it that the population's tokens stand at. */
    const void *train, *rollout;
    const int64_t *run_start, *run_stop;
    int64_t runs;
    int64_t skip, tokens; /* of those runs: tokens before the block, and in it */
    const int64_t *starts; /* first token of each piece, counted from the block */
    int64_t pieces;
    int32_t train_type, rollout_type;
    int32_t mismatch, moments; /* the probability family; sums of train log-probs and of d^2 */
    double shift, e_shift, shift_p, shift_q;
    double log_lower, log_upper, extreme, veto_lower, veto_upper;
    double nearest; /* no |d| up to it is beyond any of these bounds */
    double cold; /* mean weight of a piece below which its weights are summed as they are */

    /* Filled. */
    double *columns; /* row i of piece k at i * stride + k */
    int64_t stride;
    uint32_t *checksum; /* a piece; null where none is wanted */
    int64_t *bins; /* 4096, added to */
    int64_t keep; /* how many of the first tokens are laid out one after another, for whoever looks at them: */
    double *keep_train, *keep_rollout, *keep_d, *keep_e;

    /* Given back. */
    struct side train_side, rollout_side;
    int64_t both_zero, zeros, negative_zeros;
    double train_low, train_high, rollout_low, rollout_high;
    double p, p2, q, q2, cross, largest_difference;
};

#endif
