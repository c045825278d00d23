/* How large the structures are that were compiled for, and the best of the levels that this processor runs: 1 plain, 2, 3. */
#include "sequences.h"

/* SOURCES: a digest of the files that this was compiled from (hatch_build.py). */
const char *rollout_is_sources(void) { return SOURCES; }

int rollout_is_layout(void) { return sizeof(struct block) + sizeof(struct sequences); }

int rollout_is_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return 3;
    if (avx2) return 2;
#endif
    return 1;
}
