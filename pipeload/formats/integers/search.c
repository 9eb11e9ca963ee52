/* Searches scales and zeros of integer weights, eight rows side by side: see search.py, which
   compiles this file, says what is computed, and does the same with torch, operation by operation:
   whoever changes one changes the other. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { LANES = 8, FITS_OF_A_RANGE = 3 };

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define LEAST_VALUES 4096 /* that are worth waking other threads for */

/* Older compilers do not know "f16c" by name. */
static inline int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int supported(void) { return __builtin_cpu_supports("avx2") && has_f16c(); }

struct grid {
    __m256 least, most; /* codes */
    __m256 tiny;        /* the least scale */
    int symmetric;      /* without a zero */
    int kind;           /* that scales and zeros are stored in */
};

struct fit {
    __m256 scale, zero;
};

struct sums {
    __m256 error, code, square, product;
};

/* What is left of values when they are stored. */
INLINE __m256 stored(__m256 values, int kind)
{
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(_mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    if (kind == FLOAT32)
        return values;
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i whole = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    return _mm256_castsi256_ps(_mm256_slli_epi32(whole, 16));
}

INLINE __m256 stored_scale(__m256 scale, const struct grid *grid)
{
    const __m256 made = stored(scale, grid->kind);
    const __m256 none = _mm256_cmp_ps(made, _mm256_setzero_ps(), _CMP_EQ_OQ);
    return _mm256_blendv_ps(made, grid->tiny, none);
}

INLINE __m256 code_of(__m256 value, struct fit fit, __m256 inverse, const struct grid *grid)
{
    const __m256 steps = _mm256_mul_ps(_mm256_sub_ps(value, fit.zero), inverse);
    const __m256 inside = _mm256_min_ps(_mm256_max_ps(steps, grid->least), grid->most);
    return _mm256_round_ps(inside, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE struct sums measure(const float *tile, const float *weights, int64_t count, int64_t block,
                           struct fit fit, const struct grid *grid)
{
    const __m256 nothing = _mm256_setzero_ps();
    const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1), fit.scale);
    struct sums all = {nothing, nothing, nothing, nothing};
    for (int64_t start = 0; start < count; start += block) {
        struct sums part = {nothing, nothing, nothing, nothing};
        for (int64_t i = start; i < start + block; i++) {
            const __m256 value = _mm256_loadu_ps(tile + LANES * i);
            const __m256 weight = _mm256_broadcast_ss(weights + i);
            const __m256 code = code_of(value, fit, inverse, grid);
            const __m256 made = _mm256_add_ps(_mm256_mul_ps(code, fit.scale), fit.zero);
            const __m256 gap = _mm256_sub_ps(made, value);
            const __m256 cost = _mm256_mul_ps(_mm256_mul_ps(gap, gap), weight);
            const __m256 weighed = _mm256_mul_ps(code, weight);
            part.error = _mm256_add_ps(part.error, cost);
            part.code = _mm256_add_ps(part.code, weighed);
            part.square = _mm256_add_ps(part.square, _mm256_mul_ps(weighed, code));
            part.product = _mm256_add_ps(part.product, _mm256_mul_ps(weighed, value));
        }
        all.error = _mm256_add_ps(all.error, part.error);
        all.code = _mm256_add_ps(all.code, part.code);
        all.square = _mm256_add_ps(all.square, part.square);
        all.product = _mm256_add_ps(all.product, part.product);
    }
    return all;
}

/* The least squares for the codes that `fit` gives; `fit` itself where they do not tell. */
INLINE struct fit refit(struct fit fit, struct sums sums, __m256 weight, __m256 value,
                        const struct grid *grid)
{
    const __m256 nothing = _mm256_setzero_ps();
    __m256 scale, zero = nothing, told;
    if (grid->symmetric) {
        scale = _mm256_div_ps(sums.product, sums.square);
        told = _mm256_cmp_ps(sums.square, nothing, _CMP_GT_OQ);
    } else {
        const __m256 whole = _mm256_mul_ps(weight, sums.square);
        const __m256 spread = _mm256_sub_ps(whole, _mm256_mul_ps(sums.code, sums.code));
        told = _mm256_cmp_ps(spread, _mm256_mul_ps(whole, _mm256_set1_ps(1e-5f)), _CMP_GT_OQ);
        scale = _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(weight, sums.product),
                                            _mm256_mul_ps(sums.code, value)),
                              spread);
        zero = _mm256_div_ps(_mm256_sub_ps(_mm256_mul_ps(sums.square, value),
                                           _mm256_mul_ps(sums.code, sums.product)),
                             spread);
    }
    scale = stored(scale, grid->kind);
    zero = stored(zero, grid->kind);
    told = _mm256_and_ps(told, _mm256_cmp_ps(scale, nothing, _CMP_GT_OQ));
    return (struct fit){_mm256_blendv_ps(fit.scale, scale, told),
                        _mm256_blendv_ps(fit.zero, zero, told)};
}

/* A grid over so much of the range of the values, about its middle. */
INLINE struct fit over(__m256 low, __m256 high, __m256 share, const struct grid *grid)
{
    const __m256 half = _mm256_set1_ps(0.5f);
    if (grid->symmetric) {
        const __m256 scale = _mm256_div_ps(_mm256_mul_ps(high, share), grid->most);
        return (struct fit){stored_scale(scale, grid), _mm256_setzero_ps()};
    }
    const __m256 range = _mm256_mul_ps(_mm256_sub_ps(high, low), share);
    const __m256 levels = _mm256_sub_ps(grid->most, grid->least);
    const __m256 scale = stored_scale(_mm256_div_ps(range, levels), grid);
    const __m256 middle = _mm256_mul_ps(_mm256_add_ps(low, high), half);
    const __m256 zero = _mm256_add_ps(middle, _mm256_mul_ps(half, scale));
    return (struct fit){scale, stored(zero, grid->kind)};
}

/* The grid that has the least and the largest value on it: rounding to nearest. */
INLINE struct fit nearest(__m256 low, __m256 high, const struct grid *grid)
{
    struct fit fit = over(low, high, _mm256_set1_ps(1), grid);
    if (!grid->symmetric)
        fit.zero = stored(_mm256_sub_ps(low, _mm256_mul_ps(grid->least, fit.scale)), grid->kind);
    return fit;
}

INLINE struct fit search_tile(const float *tile, const float *weights, int64_t count,
                              int64_t block, const float *shares, int64_t ranges,
                              const struct grid *grid)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 low = _mm256_loadu_ps(tile), high = low;
    if (grid->symmetric)
        high = _mm256_andnot_ps(sign, high);
    __m256 weight = _mm256_setzero_ps(), value = weight;
    for (int64_t start = 0; start < count; start += block) {
        __m256 weight_part = _mm256_setzero_ps(), value_part = weight_part;
        for (int64_t i = start; i < start + block; i++) {
            __m256 one = _mm256_loadu_ps(tile + LANES * i);
            const __m256 its = _mm256_broadcast_ss(weights + i);
            weight_part = _mm256_add_ps(weight_part, its);
            value_part = _mm256_add_ps(value_part, _mm256_mul_ps(its, one));
            if (grid->symmetric)
                one = _mm256_andnot_ps(sign, one);
            low = _mm256_min_ps(low, one);
            high = _mm256_max_ps(high, one);
        }
        weight = _mm256_add_ps(weight, weight_part);
        value = _mm256_add_ps(value, value_part);
    }
    struct fit best = nearest(low, high, grid);
    __m256 least = measure(tile, weights, count, block, best, grid).error;
    for (int64_t range = 0; range < ranges; range++) {
        struct fit fit = over(low, high, _mm256_set1_ps(shares[range]), grid);
        for (int turn = 0; turn < FITS_OF_A_RANGE; turn++) {
            const struct sums sums = measure(tile, weights, count, block, fit, grid);
            const __m256 better = _mm256_cmp_ps(sums.error, least, _CMP_LT_OQ);
            least = _mm256_blendv_ps(least, sums.error, better);
            best.scale = _mm256_blendv_ps(best.scale, fit.scale, better);
            best.zero = _mm256_blendv_ps(best.zero, fit.zero, better);
            fit = refit(fit, sums, weight, value, grid);
        }
    }
    return best;
}

INLINE void write_codes(const float *tile, int64_t count, struct fit fit,
                        const struct grid *grid, int8_t *codes)
{
    const __m256 inverse = _mm256_div_ps(_mm256_set1_ps(1), fit.scale);
    for (int64_t i = 0; i < count; i++) {
        const __m256 code = code_of(_mm256_loadu_ps(tile + LANES * i), fit, inverse, grid);
        const __m256i wide = _mm256_cvtps_epi32(code);
        const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide),
                                               _mm256_extracti128_si256(wide, 1));
        _mm_storel_epi64((__m128i *)(codes + LANES * i), _mm_packs_epi16(halves, halves));
    }
}

TARGET static void search_all(const float *tiles, const float *weights, const float *shares,
                              int64_t ranges, float *fits, int8_t *codes, int64_t count,
                              int64_t groups, int64_t size, int64_t block,
                              const struct grid *grid)
{
#pragma omp parallel for schedule(static) if (count * size * LANES >= LEAST_VALUES)
    for (int64_t i = 0; i < count; i++) {
        const float *tile = tiles + i * size * LANES;
        const float *its = weights + i % groups * size;
        const struct fit fit = search_tile(tile, its, size, block, shares, ranges, grid);
        _mm256_storeu_ps(fits + 2 * LANES * i, fit.scale);
        _mm256_storeu_ps(fits + 2 * LANES * i + LANES, fit.zero);
        write_codes(tile, size, fit, grid, codes + i * size * LANES);
    }
}

/* tiles: [count, size, 8]; weights: [groups, size], each tile's is that of its number modulo
   groups; shares: [ranges]; most: the largest code. Writes fits, [count, 2, 8], and codes, [count, size, 8]. Sums are made
   of blocks, which divide the size. */
TARGET void search(const float *tiles, const float *weights, const float *shares, float *fits,
                   int8_t *codes, int64_t count, int64_t groups, int64_t size, int64_t block,
                   int64_t ranges, int most, int symmetric, int kind, float tiny)
{
    const struct grid grid = {
        _mm256_set1_ps(symmetric ? -most : -most - 1), _mm256_set1_ps(most),
        _mm256_set1_ps(tiny), symmetric, kind};
    search_all(tiles, weights, shares, ranges, fits, codes, count, groups, size, block, &grid);
}
#endif
