/* Rounds columns one by one, sixteen rows side by side: see compensation.py, which compiles this
   file, says what is computed, and does the same with torch, operation by operation: whoever changes
   one changes the other. Here a column takes the errors of all that were before it at once, in the
   order in which they came. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <immintrin.h>
#include <stdint.h>

enum { LANES = 8, STRIP = 2 * LANES, TILE = 4, MOST = 512 };

#define TARGET __attribute__((target("avx2")))
#define INLINE TARGET static inline __attribute__((always_inline))

int supported(void) { return __builtin_cpu_supports("avx2"); }

/* What is shared by all rows of one block of columns. */
struct block {
    const int64_t *order; /* [count]: which column comes when */
    const float *lower;   /* [count, count]: row i is what columns before i do to it, in order */
    int64_t start, count; /* of its columns */
    int64_t group;
};

/* Some rows of a block, in its order. */
struct strip {
    float values[MOST][STRIP]; /* what is left of each, then its error */
    float scale[MOST][STRIP];  /* by group */
    float zero[MOST][STRIP];
    int8_t codes[MOST][STRIP];
};

INLINE __m256 less(__m256 value, float factor, __m256 error)
{
    return _mm256_sub_ps(value, _mm256_mul_ps(_mm256_set1_ps(factor), error));
}

/* Rounds eight rows of column `at`; returns the error that the others make up for. */
INLINE __m256 round_one(struct strip *strip, const struct block *block, int64_t at, int half,
                        __m256 value)
{
    const int64_t place = (block->start + block->order[at]) / block->group
                          - block->start / block->group;
    const __m256 scale = _mm256_loadu_ps(strip->scale[place] + half * LANES);
    const __m256 zero = _mm256_loadu_ps(strip->zero[place] + half * LANES);
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(value, zero),
                                       _mm256_div_ps(_mm256_set1_ps(1), scale));
    const __m256 inside = _mm256_min_ps(_mm256_max_ps(steps, _mm256_set1_ps(-8)),
                                        _mm256_set1_ps(7));
    const __m256 code = _mm256_round_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 made = _mm256_add_ps(_mm256_mul_ps(code, scale), zero);
    const __m256i wide = _mm256_cvtps_epi32(code);
    const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                           _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i *)(strip->codes[at] + half * LANES), _mm_packs_epi16(halves, halves));
    return _mm256_div_ps(_mm256_sub_ps(value, made),
                         _mm256_set1_ps(block->lower[at * block->count + at]));
}

/* Rounds `wide` columns from `at` on; all before are rounded. */
INLINE void round_tile(struct strip *strip, const struct block *block, int64_t at, int wide)
{
    const float *lower = block->lower + at * block->count;
    __m256 left[TILE][2];
    for (int i = 0; i < wide; i++)
        for (int half = 0; half < 2; half++)
            left[i][half] = _mm256_loadu_ps(strip->values[at + i] + half * LANES);
    for (int64_t before = 0; before < at; before++)
        for (int half = 0; half < 2; half++) {
            const __m256 error = _mm256_loadu_ps(strip->values[before] + half * LANES);
            for (int i = 0; i < wide; i++)
                left[i][half] = less(left[i][half], lower[i * block->count + before], error);
        }
    for (int i = 0; i < wide; i++)
        for (int half = 0; half < 2; half++) {
            const __m256 error = round_one(strip, block, at + i, half, left[i][half]);
            _mm256_storeu_ps(strip->values[at + i] + half * LANES, error);
            for (int j = i + 1; j < wide; j++)
                left[j][half] = less(left[j][half], lower[j * block->count + at + i], error);
        }
}

TARGET static void round_strip(struct strip *strip, const struct block *block)
{
    int64_t at = 0;
    for (; at + TILE <= block->count; at += TILE)
        round_tile(strip, block, at, TILE);
    for (; at < block->count; at++)
        round_tile(strip, block, at, 1);
}

/* weight: [rows, columns]; scale and zero: [rows, columns / group]; order: [count]; lower:
   [count, count]. Writes codes, [rows, columns], of the block's columns, at most 512. */
TARGET void compensate(const float *weight, const float *scale, const float *zero,
                       const int64_t *order, const float *lower, int8_t *codes, int64_t rows,
                       int64_t columns, int64_t start, int64_t count, int64_t group)
{
    const struct block block = {order, lower, start, count, group};
    const int64_t groups = columns / group, first = start / group;
    const int64_t its = (start + count - 1) / group - first + 1;
#pragma omp parallel for schedule(static) if (rows > STRIP)
    for (int64_t top = 0; top < rows; top += STRIP) {
        struct strip strip;
        /* Rows that are not there are the last one again. */
        for (int lane = 0; lane < STRIP; lane++) {
            const int64_t row = top + lane < rows ? top + lane : rows - 1;
            for (int64_t i = 0; i < count; i++)
                strip.values[i][lane] = weight[row * columns + start + order[i]];
            for (int64_t i = 0; i < its; i++) {
                strip.scale[i][lane] = scale[row * groups + first + i];
                strip.zero[i][lane] = zero[row * groups + first + i];
            }
        }
        round_strip(&strip, &block);
        for (int lane = 0; lane < STRIP && top + lane < rows; lane++)
            for (int64_t i = 0; i < count; i++)
                codes[(top + lane) * columns + start + order[i]] = strip.codes[i][lane];
    }
}
#endif
