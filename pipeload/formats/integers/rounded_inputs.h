/* What our kernels for int4 and int8 have in common: floats of any kind, and how a group of inputs
   is rounded to int16. See product.c and byte_product.c, which include this file. */

#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE __attribute__((always_inline)) inline /* where a constant makes the loops short */
#define ROWS 4               /* of the weight, that are multiplied at once */
#define FETCHED 16384        /* bytes ahead: less comes too late, by half where nobody else reads */
#define MOST 32767.0f        /* of a code: sums of 128 columns are whole numbers in fp32, too */
#define LEAST_PRODUCTS 65536 /* that are worth waking other threads for */
#define LEAST_INPUT 1e-33f   /* what is smaller is zero: its reciprocal must be a number */

/* Many rows of input, see many_rows.h: of the weight, as many columns as the first cache holds, for
   as many rows of input as the second one does, in the way of Goto and van de Geijn, Anatomy of
   high-performance matrix multiplication. */
#define MANY 16            /* rows of input: fewer gain little or nothing by it */
#define DEEP 1024          /* columns */
#define CODES_BYTES 262144 /* of rows of input at once */
#define MOST_ROWS 32       /* of those, however short they are */
#define WIDE 32            /* rows of the weight that a thread takes at once */

static inline int64_t rows_at_once(int64_t codes_of_row)
{
    const int64_t fit = CODES_BYTES / (int64_t)sizeof(int16_t) / codes_of_row / 2 * 2;
    return fit < MANY ? MANY : fit > MOST_ROWS ? MOST_ROWS : fit;
}

/* Older compilers do not know "f16c" by name. */
static inline int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
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
