/* Products with int8 weights, of inputs rounded to int16: see byte_product.py, which compiles this
   file.

   A row of the weight lies in one piece, a column in a byte. Columns are taken 32 at a time. Of each
   group, 16 sums are kept: the i-th one is of columns 2 i and 2 i + 1 of every 32. Sums of integers
   are exact; floats are multiplied and added in one order, group after group, in each of the 16 by
   itself, and those are added up at the end. So neither what is multiplied beside it, nor by how
   many threads, nor how wide the processor's vectors are, changes a bit of a number: but where
   torch.set_flush_denormal(True) was called, which holds for the calling thread alone. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include "rounded_inputs.h"
#include "statistics.h"

#define GROUP 128 /* columns of input that share a scale */
#define STEP 32   /* columns that are taken at once; the last ones may be half as many */
#define INPUTS 4  /* rows of input that are multiplied at once */

/* One group of a row of input. Returns its scale; what is no number makes that none. */
TARGET static float round_group(const void *input, int64_t first, int64_t count, int kind,
                                int16_t *codes)
{
    const float largest = largest_of(input, first, count, kind);
    const int none = largest < LEAST_INPUT;
    const __m256 by = _mm256_set1_ps(none ? 0 : MOST / largest);
    for (int64_t i = 0; i < count; i += 16) {
        const __m256 low = _mm256_mul_ps(eight(input, first + i, kind), by);
        const __m256 high = _mm256_mul_ps(eight(input, first + i + 8, kind), by);
        const __m256i made = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
        _mm256_storeu_si256((__m256i *)(codes + i), _mm256_permute4x64_epi64(made, 0xD8));
    }
    return none ? 0 : largest / MOST;
}

static void round_rows(const void *input, int16_t *codes, float *scales, int64_t rows,
                       int64_t columns, int64_t padded, int64_t groups, int kind)
{
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_PRODUCTS)
    for (int64_t row = 0; row < rows; row++) {
        int16_t *const made = codes + row * padded;
        memset(made + columns, 0, (padded - columns) * sizeof(int16_t));
        for (int64_t g = 0, start = 0; g < groups; g++, start += GROUP) {
            const int64_t count = columns - start < GROUP ? columns - start : GROUP;
            scales[row * groups + g] =
                round_group(input, row * columns + start, count, kind, made + start);
        }
    }
}

struct inputs {
    const int16_t *codes;
    const float *scales;
    int64_t codes_of_row, groups;
};

/* Sixteen lanes in two halves. */
struct integers {
    __m256i low, high;
};
struct floats {
    __m256 low, high;
};

TARGET static INLINE struct integers none_avx2(void)
{
    return (struct integers){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

TARGET static INLINE struct floats zero_avx2(void)
{
    return (struct floats){_mm256_setzero_ps(), _mm256_setzero_ps()};
}

TARGET static INLINE struct integers widened_avx2(const int8_t *at, int whole)
{
    const __m128i *const bytes = (const __m128i *)at;
    return (struct integers){_mm256_cvtepi8_epi16(_mm_loadu_si128(bytes)),
                             whole ? _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes + 1))
                                   : _mm256_setzero_si256()};
}

TARGET static INLINE struct integers added_avx2(struct integers sum, struct integers weight,
                                                const int16_t *codes)
{
    const __m256i low = _mm256_loadu_si256((const __m256i *)codes);
    const __m256i high = _mm256_loadu_si256((const __m256i *)codes + 1);
    return (struct integers){_mm256_add_epi32(sum.low, _mm256_madd_epi16(weight.low, low)),
                             _mm256_add_epi32(sum.high, _mm256_madd_epi16(weight.high, high))};
}

TARGET static INLINE struct floats scaled_avx2(struct floats made, struct integers sum, float scale)
{
    const __m256 by = _mm256_set1_ps(scale);
    const __m256 low = _mm256_mul_ps(_mm256_cvtepi32_ps(sum.low), by);
    const __m256 high = _mm256_mul_ps(_mm256_cvtepi32_ps(sum.high), by);
    return (struct floats){_mm256_add_ps(made.low, low), _mm256_add_ps(made.high, high)};
}

TARGET static INLINE float total_avx2(struct floats made)
{
    return sum_of(_mm256_add_ps(made.low, made.high));
}

#define FOR TARGET
#define NAME(WHAT) WHAT##_avx2
#define INTEGERS struct integers
#define FLOATS struct floats
#include "byte_rows.h"
#undef FOR
#undef NAME
#undef INTEGERS
#undef FLOATS

#include "many_byte_rows.h"

#define TARGET_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

TARGET_VNNI static INLINE __m512i none_vnni(void) { return _mm512_setzero_si512(); }

TARGET_VNNI static INLINE __m512 zero_vnni(void) { return _mm512_setzero_ps(); }

TARGET_VNNI static INLINE __m512i widened_vnni(const int8_t *at, int whole)
{
    const __m128i *const half = (const __m128i *)at;
    const __m256i none = _mm256_setzero_si256();
    return _mm512_cvtepi8_epi16(whole
                                    ? _mm256_loadu_si256((const __m256i *)at)
                                    : _mm256_inserti128_si256(none, _mm_loadu_si128(half), 0));
}

TARGET_VNNI static INLINE __m512i added_vnni(__m512i sum, __m512i weight, const int16_t *codes)
{
    return _mm512_dpwssd_epi32(sum, weight, _mm512_loadu_si512(codes));
}

TARGET_VNNI static INLINE __m512 scaled_vnni(__m512 made, __m512i sum, float scale)
{
    return _mm512_add_ps(made, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale)));
}

TARGET_VNNI static INLINE float total_vnni(__m512 made)
{
    const __m256d high = _mm512_extractf64x4_pd(_mm512_castps_pd(made), 1);
    return sum_of(_mm256_add_ps(_mm512_castps512_ps256(made), _mm256_castpd_ps(high)));
}

#define FOR TARGET_VNNI
#define NAME(WHAT) WHAT##_vnni
#define INTEGERS __m512i
#define FLOATS __m512
#include "byte_rows.h"

/* input: [rows, columns] in `kind`, columns a multiple of 16; weight: [out, columns]; statistics:
   [out] in `told_in`; made: [rows, out] in `kind`. memory: for every row int16 of [steps, 32], as
   many as hold the columns, and fp32 of [groups]. vnni: whether to use it where it is; bits are the
   same. */
void product(const void *input, const int8_t *weight, const void *statistics, void *memory,
             void *made, int64_t rows, int64_t out, int64_t columns, int told_in, int kind, int vnni)
{
    const int64_t padded = (columns + STEP - 1) / STEP * STEP;
    const int64_t groups = (columns + GROUP - 1) / GROUP;
    int16_t *const codes = memory;
    float *const scales = (float *)(codes + rows * padded);
    const struct inputs x = {codes, scales, padded, groups};
    vnni = vnni && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
    round_rows(input, codes, scales, rows, columns, padded, groups, kind);
    (vnni           ? multiply_vnni
     : rows >= MANY ? multiply_many
                    : multiply_avx2)(weight, statistics, x, made, rows, out, columns, told_in, kind);
}
#endif
