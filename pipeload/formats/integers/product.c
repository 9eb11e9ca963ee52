/* Products with int4 weights, of inputs rounded to int8: see product.py, which compiles this file.

   A row of the weight lies in one piece, two columns in a byte: 2 i in the low half, 2 i + 1 in the
   high one. Columns are taken 64 at a time; inputs come in the same order, so that halves of bytes
   need not be put side by side. Sums of integers are exact, and each number of the result is one
   thread's: in which company rows are multiplied, and by how many threads, changes no bit. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE __attribute__((always_inline)) inline /* where a constant makes the loops short */
#define BLOCK 64             /* columns */
#define INPUTS 32            /* that share a scale */
#define ROWS 4               /* of the weight, that are multiplied at once */
#define AHEAD 16             /* rows whose scales and zeros are fetched: a line of memory */
#define LEAST_PRODUCTS 65536 /* that are worth waking other threads for */
#define LEAST_INPUT 1e-35f   /* what is smaller is zero: its reciprocal must be a number */

int supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
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

TARGET static inline int sum_of_bytes(__m256i v)
{
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), v);
    const __m256i lanes = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

/* Rounds 32 inputs to int8, in order; returns their scale. What is no number makes the scale none. */
TARGET static float round_inputs(const void *input, int64_t first, int kind, __m256i *out)
{
    __m256 x[4];
    __m256i most = _mm256_setzero_si256();
    const __m256i sign = _mm256_set1_epi32(0x7fffffff);
    for (int i = 0; i < 4; i++) {
        x[i] = eight(input, first + 8 * i, kind);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(x[i]), sign));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
    const float largest = _mm_cvtss_f32(_mm_castsi128_ps(four));
    const int none = largest < LEAST_INPUT;
    const __m256 by = _mm256_set1_ps(none ? 0 : 127 / largest);
    __m256i whole[4];
    for (int i = 0; i < 4; i++)
        whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], by));
    const __m256i low = _mm256_packs_epi32(whole[0], whole[1]);
    const __m256i high = _mm256_packs_epi32(whole[2], whole[3]);
    *out = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high),
                                       _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return none ? 0 : largest / 127;
}

/* One row of input: int8 by blocks, even columns before odd ones; its scales, each four times; and
   of every group of the weight the sum of what they stand for. */
TARGET static void round_row(const void *input, int64_t first, int64_t columns, int64_t group,
                             int kind, int8_t *codes, float *scales, float *sums)
{
    const __m256i low_bytes = _mm256_set1_epi16(255);
    memset(sums, 0, columns / group * sizeof(float));
    for (int64_t start = 0; start < columns; start += BLOCK) {
        __m256i x[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        for (int i = 0; i < 2; i++) {
            const int64_t column = start + i * INPUTS;
            const int there = column < columns;
            const float scale = there ? round_inputs(input, first + column, kind, x + i) : 0;
            if (there)
                sums[column / group] += scale * (float)sum_of_bytes(x[i]);
            _mm_storeu_ps(scales + start / BLOCK * 8 + i * 4, _mm_set1_ps(scale));
        }
        const __m256i even = _mm256_packus_epi16(_mm256_and_si256(x[0], low_bytes),
                                                 _mm256_and_si256(x[1], low_bytes));
        const __m256i odd =
            _mm256_packus_epi16(_mm256_srli_epi16(x[0], 8), _mm256_srli_epi16(x[1], 8));
        __m256i *const made = (__m256i *)(codes + start);
        _mm256_storeu_si256(made, _mm256_permute4x64_epi64(even, 0xD8));
        _mm256_storeu_si256(made + 1, _mm256_permute4x64_epi64(odd, 0xD8));
    }
}

/* input: [rows, columns] in `kind`; columns a multiple of 32, blocks as many as hold them.
   codes: [rows, blocks, 64]; scales: [rows, blocks, 8]; sums: [rows, columns / group]. */
void round_rows(const void *input, int8_t *codes, float *scales, float *sums, int64_t rows,
                int64_t columns, int64_t group, int kind)
{
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_PRODUCTS)
    for (int64_t row = 0; row < rows; row++)
        round_row(input, row * columns, columns, group, kind, codes + row * blocks * BLOCK,
                  scales + row * blocks * 8, sums + row * (columns / group));
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

TARGET static INLINE __m256 of_block(const uint8_t *weight, const int8_t *codes, int whole)
{
    const __m256i mask = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    const __m256i bytes =
        whole ? _mm256_loadu_si256((const __m256i *)weight)
              : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)weight));
    const __m256i even = _mm256_loadu_si256((const __m256i *)codes);
    const __m256i odd = _mm256_loadu_si256((const __m256i *)codes + 1);
    const __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(bytes, mask), even);
    const __m256i high =
        _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask), odd);
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(low, high), one));
}

TARGET static inline __m128 lane(__m128 four, int i)
{
    return _mm_permutevar_ps(four, _mm_set1_epi32(i));
}

/* Four rows of the weight times one row of input. Their bytes lie far apart for the processor, which
   would not see that the next ones are wanted. */
TARGET static INLINE void multiply_rows(const uint8_t *weight, const void *statistics,
                                        int64_t first, int64_t stride, const int8_t *codes,
                                        const float *scales, const float *sums, int64_t columns,
                                        int64_t group, int kind, float *out)
{
    __m256 made[ROWS] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                         _mm256_setzero_ps()};
    __m128 shifted = _mm_setzero_ps(), scale[2], shift[2];
    for (int64_t start = 0, next; start < columns; start = next) {
        const int64_t g = start / group, at = g * stride + first;
        _mm_prefetch((const char *)statistics + (at + 2 * AHEAD) * item(kind), _MM_HINT_T0);
        told(statistics, at, kind, scale, shift);
        shifted = _mm_fmadd_ps(shift[0], _mm_set1_ps(sums[g]), shifted);
        scale[1] = scale[0];
        next = start + group;
        if (group < BLOCK) {
            next = start + BLOCK;
            if (next <= columns) {
                told(statistics, at + stride, kind, scale + 1, shift + 1);
                shifted = _mm_fmadd_ps(shift[1], _mm_set1_ps(sums[g + 1]), shifted);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            __m256 part = _mm256_setzero_ps();
            for (int64_t i = start; i < next; i += BLOCK) {
                const uint8_t *const bytes = weight + (r * columns + i) / 2;
                _mm_prefetch((const char *)bytes + ROWS * columns / 2, _MM_HINT_T0);
                part = _mm256_fmadd_ps(of_block(bytes, codes + i, i + BLOCK <= columns),
                                       _mm256_loadu_ps(scales + i / 8), part);
            }
            const __m256 both = _mm256_set_m128(lane(scale[1], r), lane(scale[0], r));
            made[r] = _mm256_fmadd_ps(part, both, made[r]);
        }
    }
    float shifts[ROWS];
    _mm_storeu_ps(shifts, shifted);
    for (int r = 0; r < ROWS; r++)
        out[r] = sum_of(made[r]) + shifts[r];
}

/* weight: [out, columns / 2]; statistics: [groups, out, 2] in `told_in`, `stride` items from group
   to group; codes, scales and sums: as `round_rows` makes them; made: [rows, out] in `kind`.
   out: 4 at least. */
TARGET void multiply(const uint8_t *weight, const void *statistics, const int8_t *codes,
                     const float *scales, const float *sums, void *made, int64_t rows, int64_t out,
                     int64_t columns, int64_t group, int64_t stride, int told_in, int kind)
{
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK, groups = columns / group;
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t n = 0; n < (out + ROWS - 1) / ROWS; n++) {
        /* The last ones overlap those before, which get the same numbers twice. */
        const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
        for (int64_t row = 0; row < rows; row++) {
            float products[ROWS];
#define MULTIPLY(GROUP, KIND)                                                                      \
    multiply_rows(weight + first * columns / 2, statistics, 2 * first, stride,                     \
                  codes + row * blocks * BLOCK, scales + row * blocks * 8, sums + row * groups,    \
                  columns, GROUP, KIND, products)
            if (told_in != BFLOAT16)
                MULTIPLY(group, told_in);
            else if (group == 32)
                MULTIPLY(32, BFLOAT16);
            else if (group == 64)
                MULTIPLY(64, BFLOAT16);
            else
                MULTIPLY(128, BFLOAT16);
            for (int r = 0; r < ROWS; r++)
                store(products[r], made, row * out + first + r, kind);
        }
    }
}
