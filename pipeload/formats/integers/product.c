/* Products with int4 weights, of inputs rounded to int16: see product.py, which compiles this file.

   A row of the weight lies in one piece, two columns in a byte: 2 i in the low half, 2 i + 1 in the
   high one. Columns are taken in blocks of 64, as 16 words of four, and two blocks at a time; inputs
   of those lie in four times 32, every fourth of a block side by side and those of the other block
   behind, so that what is cut out of the words needs no moving. Sums of integers are exact, and of
   floats each number has eight, which are added to block after block: in which company rows are
   multiplied, by how many threads, and how wide the processor's vectors are, changes no bit. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include "rounded_inputs.h"

#define BLOCK 64           /* columns */
#define PAIR 128           /* columns that are taken at once: of the largest group */
#define MOST_GROUPS 4      /* of those */
#define INPUTS 4           /* rows of input that are multiplied at once */
#define TASKS 32           /* times four rows of the weight a thread takes at once, of experts */
#define AHEAD 16           /* rows whose scales and zeros are fetched: a line of memory */

static inline int has_vnni(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
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
        int16_t *const pair = codes + (column + i) / PAIR * PAIR;
        const int64_t word = (column + i) % PAIR / 4;
        for (int j = 0; j < 8; j++) {
            pair[j % 4 * 32 + word + j / 4] = (int16_t)made[j];
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
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR, groups = columns / group;
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_PRODUCTS)
    for (int64_t row = 0; row < rows; row++) {
        int16_t *const made = codes + row * padded;
        memset(made + padded - PAIR, 0, PAIR * sizeof(int16_t));
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

struct inputs {
    const int16_t *codes;
    const float *scales, *sums;
    int64_t codes_of_row, groups;
};

/* A row of input, the expert that it was sent to, and the row of the result. */
struct sent {
    int64_t input, expert, made;
};

/* Two blocks. */
struct words {
    __m256i low, high;
};

/* `bytes`: of a row, that are left: those of a block and a half, of one or of a half, too. */
TARGET static INLINE __m256i some_words(const uint8_t *at, int64_t bytes)
{
    const __m128i *const from = (const __m128i *)at;
    const __m256i none = _mm256_setzero_si256();
    return bytes >= 32   ? _mm256_loadu_si256((const __m256i *)at)
           : bytes >= 16 ? _mm256_inserti128_si256(none, _mm_loadu_si128(from), 0)
                         : none;
}

TARGET static INLINE struct words words_avx2(const uint8_t *at, int64_t bytes)
{
    return (struct words){some_words(at, bytes), some_words(at + 32, bytes - 32)};
}

TARGET static INLINE struct words none_avx2(void)
{
    return (struct words){_mm256_setzero_si256(), _mm256_setzero_si256()};
}

TARGET static INLINE __m256i cut(__m256i words, int fourth)
{
    const __m256i moved = _mm256_srli_epi16(words, 4 * fourth);
    return fourth == 3 ? moved : _mm256_and_si256(moved, _mm256_set1_epi16(15));
}

TARGET static INLINE struct words cut_avx2(struct words of, int fourth)
{
    return (struct words){cut(of.low, fourth), cut(of.high, fourth)};
}

TARGET static INLINE struct words added_avx2(struct words sum, struct words q, const int16_t *codes)
{
    const __m256i low = _mm256_loadu_si256((const __m256i *)codes);
    const __m256i high = _mm256_loadu_si256((const __m256i *)codes + 1);
    return (struct words){_mm256_add_epi32(sum.low, _mm256_madd_epi16(q.low, low)),
                          _mm256_add_epi32(sum.high, _mm256_madd_epi16(q.high, high))};
}

TARGET static INLINE __m256i half_avx2(struct words sum, int high) { return high ? sum.high : sum.low; }

#define FOR TARGET
#define NAME(WHAT) WHAT##_avx2
#define WORDS struct words
#include "product_rows.h"
#undef FOR
#undef NAME
#undef WORDS

#include "many_rows.h"

#define TARGET_VNNI __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

TARGET_VNNI static INLINE __m512i words_vnni(const uint8_t *at, int64_t bytes)
{
    if (bytes >= 64)
        return _mm512_loadu_si512(at);
    return _mm512_inserti64x4(_mm512_castsi256_si512(some_words(at, bytes)),
                              some_words(at + 32, bytes - 32), 1);
}

TARGET_VNNI static INLINE __m512i none_vnni(void) { return _mm512_setzero_si512(); }

TARGET_VNNI static INLINE __m512i cut_vnni(__m512i words, int fourth)
{
    const __m512i moved = _mm512_srli_epi16(words, 4 * fourth);
    return fourth == 3 ? moved : _mm512_and_si512(moved, _mm512_set1_epi16(15));
}

TARGET_VNNI static INLINE __m512i added_vnni(__m512i sum, __m512i q, const int16_t *codes)
{
    return _mm512_dpwssd_epi32(sum, q, _mm512_loadu_si512(codes));
}

TARGET_VNNI static INLINE __m256i half_vnni(__m512i sum, int high)
{
    return high ? _mm512_extracti64x4_epi64(sum, 1) : _mm512_castsi512_si256(sum);
}

#define FOR TARGET_VNNI
#define NAME(WHAT) WHAT##_vnni
#define WORDS __m512i
#include "product_rows.h"

/* input: [rows, columns] in `kind`, columns a multiple of the group; weight: [out, columns / 2];
   statistics: [groups, out, 2] in `told_in`; made: [rows, out] in `kind`; out: 4 at least.
   memory: for every row int16 of [pairs, 128], as many as hold the columns, and fp32 of [2, groups].
   vnni: whether to use it where it is; bits are the same. */
void product(const void *input, const uint8_t *weight, const void *statistics, void *memory,
             void *made, int64_t rows, int64_t out, int64_t columns, int64_t group, int told_in,
             int kind, int vnni)
{
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR;
    int16_t *const codes = memory;
    float *const scales = (float *)(codes + rows * padded);
    float *const sums = scales + rows * (columns / group);
    vnni = vnni && has_vnni();
    round_rows(input, codes, scales, sums, rows, columns, group, kind);
    (vnni           ? multiply_vnni
     : rows >= MANY ? multiply_many
                    : multiply_avx2)(weight, statistics, codes, scales, sums, made, rows, out,
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
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR;
    int16_t *const codes = memory;
    float *const scales = (float *)(codes + rows * padded);
    float *const sums = scales + rows * (columns / group);
    vnni = vnni && has_vnni();
    round_rows(input, codes, scales, sums, rows, columns, group, kind);
    (vnni ? multiply_sent_vnni : multiply_sent_avx2)(codes_of, told_of, expert_bytes, sent, count,
                                                     codes, scales, sums, made, out, columns, group,
                                                     told_in, kind);
}
#endif
