/* Products with int4 weights, of inputs rounded to int16: see product.py, which compiles this file.

   A row of the weight lies in one piece, two columns in a byte: 2 i in the low half, 2 i + 1 in the
   high one. Columns are taken 64 at a time, as 16 words of four; inputs lie in four times 16, every
   fourth side by side, so that what is cut out of the words needs no moving. Sums of integers are
   exact, and each number of the result is one thread's: in which company rows are multiplied, and by
   how many threads, changes no bit. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE __attribute__((always_inline)) inline /* where a constant makes the loops short */
#define BLOCK 64             /* columns */
#define ROWS 4               /* of the weight, that are multiplied at once */
#define INPUTS 2             /* rows of input, the same */
#define AHEAD 16             /* rows whose scales and zeros are fetched: a line of memory */
#define MOST 32767.0f        /* of a code: sums of 128 columns are whole numbers in fp32, too */
#define TASKS 32             /* times so many rows of the weight a thread takes at once */
#define LEAST_PRODUCTS 65536 /* that are worth waking other threads for */
#define LEAST_INPUT 1e-33f   /* what is smaller is zero: its reciprocal must be a number */

int supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static inline int has_vnni(void)
{
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

static inline int64_t item(int kind) { return kind == FLOAT32 ? 4 : 2; }

/* Eight numbers of any kind. */
TARGET static inline __m256 eight(const void *at, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps((const float *)at + i);
    const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)at + i));
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

TARGET static inline void store(float value, void *at, int64_t i, int kind)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (kind == FLOAT32)
        ((float *)at)[i] = value;
    else if (kind == FLOAT16)
        ((uint16_t *)at)[i] = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
    else /* to nearest, ties to even; what is no number stays none */
        ((uint16_t *)at)[i] =
            value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

TARGET static inline float sum_of(__m256 v)
{
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The largest magnitude, of which what is no number is the largest of all. */
TARGET static inline float largest_of(const void *input, int64_t first, int64_t count, int kind)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (int64_t i = 0; i < count; i += 8) {
        const __m256i bits = _mm256_castps_si256(eight(input, first + i, kind));
        most = _mm256_max_epi32(most, _mm256_and_si256(bits, magnitude));
    }
    int32_t eight_bits[8], largest = 0;
    float made;
    _mm256_storeu_si256((__m256i *)eight_bits, most);
    for (int i = 0; i < 8; i++)
        largest = eight_bits[i] > largest ? eight_bits[i] : largest;
    memcpy(&made, &largest, 4);
    return made;
}

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

/* A row of input, the expert that it was sent to, and the row of the result. */
struct sent {
    int64_t input, expert, made;
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
    vnni = vnni && has_vnni();
    round_rows(input, codes, scales, sums, rows, columns, group, kind);
    (vnni ? multiply_vnni : multiply_avx2)(weight, statistics, codes, scales, sums, made, rows, out,
                                           columns, group, told_in, kind);
}

/* Products of `count` pairs of a row of input and an expert, which are rows of `made`. input: [rows,
   columns]; codes_of, told_of: where weight and statistics of expert 0 begin, those of each further
   one expert_bytes behind; memory, and all else, as above. */
void product_of_experts(const void *input, const uint8_t *codes_of, const uint8_t *told_of,
                        const void *sent, void *memory, void *made, int64_t expert_bytes,
                        int64_t count, int64_t rows, int64_t out, int64_t columns, int64_t group,
                        int told_in, int kind, int vnni)
{
    const int64_t padded = (columns + BLOCK - 1) / BLOCK * BLOCK;
    int16_t *const codes = memory;
    float *const scales = (float *)(codes + rows * padded);
    float *const sums = scales + rows * (columns / group);
    vnni = vnni && has_vnni();
    round_rows(input, codes, scales, sums, rows, columns, group, kind);
    (vnni ? multiply_sent_vnni : multiply_sent_avx2)(codes_of, told_of, expert_bytes, sent, count,
                                                     codes, scales, sums, made, out, columns, group,
                                                     told_in, kind);
}
