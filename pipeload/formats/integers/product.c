/* Products with int4 weights, of inputs rounded to int16: see product.py, which compiles this file.

   A row of the weight lies in one piece, two columns in a byte: 2 i in the low half, 2 i + 1 in the
   high one. Columns are taken 64 at a time, as 16 words of four; inputs lie in four times 16, every
   fourth side by side, so that what is cut out of the words needs no moving. Sums of integers are
   exact, and each number of the result is one thread's: in which company rows are multiplied, and by
   how many threads, changes no bit. */

#include "rounded_inputs.h"

#define BLOCK 64 /* columns */
#define INPUTS 2 /* rows of input that are multiplied at once */
#define AHEAD 16 /* rows whose scales and zeros are fetched: a line of memory */

/* One group of one row of input: int16 in the order of blocks. Returns its scale; what is no number
   makes that none. `sum`: of what the codes stand for. */
TARGET static float round_group(const void *input, int64_t first, int64_t group, int kind,
                                int16_t *codes, int64_t column, float *sum)
{
    const float largest = largest_of(input, first + column, group, kind);
    const int none = largest < LEAST_INPUT;
    const __m256 by = _mm256_set1_ps(none ? 0 : MOST / largest);
    int32_t total = 0;
    for (int64_t i = 0; i < group; i += 8) {
        int32_t made[8];
        const __m256 x = _mm256_mul_ps(eight(input, first + column + i, kind), by);
        _mm256_storeu_si256((__m256i *)made, _mm256_cvtps_epi32(x));
        int16_t *const block = codes + (column + i) / BLOCK * BLOCK;
        const int64_t word = (column + i) % BLOCK / 4;
        for (int j = 0; j < 8; j++) {
            block[j % 4 * 16 + word + j / 4] = (int16_t)made[j];
            total += (int16_t)made[j];
        }
    }
    const float scale = none ? 0 : largest / MOST;
    *sum = scale * (float)total;
    return scale;
}

static void round_rows(const void *input, int16_t *codes, float *scales, float *sums,
                       int64_t rows, int64_t columns, int64_t group, int kind)
{
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK, groups = columns / group;
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_PRODUCTS)
    for (int64_t row = 0; row < rows; row++) {
        int16_t *const made = codes + row * blocks * BLOCK;
        memset(made + (blocks - 1) * BLOCK, 0, BLOCK * sizeof(int16_t));
        for (int64_t g = 0; g < groups; g++)
            scales[row * groups + g] = round_group(input, row * columns, group, kind, made,
                                                   g * group, sums + row * groups + g);
    }
}

/* Scales and shifts (zero - 8 scale) of four rows of the weight. */
TARGET static INLINE void told(const void *statistics, int64_t first, int kind, __m128 *scales,
                               __m128 *shifts)
{
    const __m256 both = eight(statistics, first, kind);
    const __m128 low = _mm256_castps256_ps128(both), high = _mm256_extractf128_ps(both, 1);
    *scales = _mm_shuffle_ps(low, high, 0x88);
    *shifts = _mm_fnmadd_ps(*scales, _mm_set1_ps(8), _mm_shuffle_ps(low, high, 0xDD));
}

/* What is told of a group is the same in all lanes; of two that share a block, in halves. */
TARGET static INLINE __m256 lanes(__m128 low, __m128 high, int i)
{
    const __m128i index = _mm_set1_epi32(i);
    return _mm256_set_m128(_mm_permutevar_ps(high, index), _mm_permutevar_ps(low, index));
}

struct inputs {
    const int16_t *codes;
    const float *scales, *sums;
    int64_t codes_of_row, groups;
};

#define FOR TARGET
#define NAME(WHAT) WHAT##_avx2
#define ADD_PRODUCTS(SUM, A, B) _mm256_add_epi32(SUM, _mm256_madd_epi16(A, B))
#include "product_rows.h"
#undef FOR
#undef NAME
#undef ADD_PRODUCTS

#define FOR __attribute__((target("avx2,fma,f16c,avx512f,avx512vl,avx512vnni")))
#define NAME(WHAT) WHAT##_vnni
#define ADD_PRODUCTS(SUM, A, B) _mm256_dpwssd_epi32(SUM, A, B)
#include "product_rows.h"

/* input: [rows, columns] in `kind`, columns a multiple of the group; weight: [out, columns / 2];
   statistics: [groups, out, 2] in `told_in`; made: [rows, out] in `kind`; out: 4 at least.
   memory: for every row int16 of [blocks, 64], as many as hold the columns, and fp32 of [2, groups].
   vnni: whether to use it where it is; bits are the same. */
void product(const void *input, const uint8_t *weight, const void *statistics, void *memory,
             void *made, int64_t rows, int64_t out, int64_t columns, int64_t group, int told_in,
             int kind, int vnni)
{
    const int64_t padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
    int16_t *const codes = memory;
    float *const scales = (float *)(codes + rows * padded);
    float *const sums = scales + rows * (columns / group);
    vnni = vnni && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    round_rows(input, codes, scales, sums, rows, columns, group, kind);
    (vnni ? multiply_vnni : multiply_avx2)(weight, statistics, codes, scales, sums, made, rows, out,
                                           columns, group, told_in, kind);
}
