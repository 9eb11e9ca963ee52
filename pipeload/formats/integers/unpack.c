/* Makes floats of some rows of an int4 weight: see unpack.py, which compiles this file. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

#define TARGET __attribute__((target("avx2,f16c")))
#if defined(__clang__) || __GNUC__ >= 10
#define TARGET_BF16 __attribute__((target("avx512f,avx512bf16")))
#else /* a compiler that does not know these instructions */
#define TARGET_BF16 TARGET
#define WITHOUT_BF16
#endif
#define LEAST_VALUES 65536 /* that are worth waking other threads for */
#define MOST_TILE 64

/* Older compilers do not know "f16c" by name. */
static inline int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int supported(void) { return __builtin_cpu_supports("avx2") && has_f16c(); }

/* A scale or zero. */
TARGET static inline float stored(const void *at, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return ((const float *)at)[i];
    const uint16_t half = ((const uint16_t *)at)[i];
    if (kind == FLOAT16)
        return _cvtsh_ss(half);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* 16 codes as floats, each times its scale and then plus its shift. */
TARGET static inline void put_float32(__m128i codes, const float *scales, const float *shifts,
                                      char *out)
{
    const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    const __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
    const __m256 c = _mm256_mul_ps(a, _mm256_loadu_ps(scales));
    const __m256 d = _mm256_mul_ps(b, _mm256_loadu_ps(scales + 8));
    _mm256_storeu_ps((float *)out, _mm256_add_ps(c, _mm256_loadu_ps(shifts)));
    _mm256_storeu_ps((float *)out + 8, _mm256_add_ps(d, _mm256_loadu_ps(shifts + 8)));
}

TARGET_BF16 static inline void put_bfloat16(__m128i codes, const float *scales,
                                            const float *shifts, char *out)
{
#ifdef WITHOUT_BF16
    uint32_t bits[16];
    put_float32(codes, scales, shifts, (char *)bits);
    for (int i = 0; i < 16; i++) { /* to nearest, ties to even; what is no number stays none */
        const uint32_t whole = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
        const int none = (bits[i] & 0x7fffffff) > 0x7f800000;
        ((uint16_t *)out)[i] = (uint16_t)(none ? 0x7fc0 : whole);
    }
#else
    const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    const __m512 b = _mm512_mul_ps(a, _mm512_loadu_ps(scales));
    const __m256bh made = _mm512_cvtneps_pbh(_mm512_add_ps(b, _mm512_loadu_ps(shifts)));
    memcpy(out, &made, 32);
#endif
}

/* Some columns of a tile that share scales: `rows` values of each column, one column after the
   other. `halves`: a byte holds rows r and r + rows / 2; otherwise 2 r and 2 r + 1. */
#define FILL_TILE(NAME, FOR, PUT, ITEM)                                                            \
    FOR static void NAME(const uint8_t *packed, int rows, int halves, int64_t columns,             \
                         const float *scales, const float *shifts, char *out, int64_t out_bytes)   \
    {                                                                                              \
        const __m128i mask = _mm_set1_epi8(15);                                                    \
        for (int64_t k = 0; k < columns; k++, packed += rows / 2, out += out_bytes) {              \
            for (int r = 0; halves && r < rows / 2; r += 16) {                                     \
                const int far = r + rows / 2;                                                      \
                const __m128i bytes = _mm_loadu_si128((const __m128i *)(packed + r));              \
                const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);                \
                PUT(_mm_and_si128(bytes, mask), scales + r, shifts + r, out + r * ITEM);           \
                PUT(high, scales + far, shifts + far, out + far * ITEM);                           \
            }                                                                                      \
            for (int r = 0; !halves && r < rows; r += 16) {                                        \
                const __m128i bytes = _mm_loadl_epi64((const __m128i *)(packed + r / 2));          \
                const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);                \
                const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), high);         \
                PUT(codes, scales + r, shifts + r, out + r * ITEM);                                \
            }                                                                                      \
        }                                                                                          \
    }
FILL_TILE(fill_float32, TARGET, put_float32, 4)
FILL_TILE(fill_bfloat16, TARGET_BF16, put_bfloat16, 2)

/* packed: rows of a weight from a whole tile on, in tiles of `tile` rows, a last one of fewer in
   pairs. statistics: scale and zero of the first of those rows and the first group, in `stored_as`;
   `stride` bytes further are the next group's. out: [groups * group, rows] in `kind`, fp32 or bf16.
   rows: a multiple of 16; tile: of 32 where halves are told, else of 16, at most 64. */
TARGET void fill(const uint8_t *packed, const uint8_t *statistics, char *out, int64_t rows,
                 int64_t groups, int64_t group, int64_t stride, int64_t tile, int halves,
                 int stored_as, int kind)
{
    const int64_t tiles = (rows + tile - 1) / tile, columns = groups * group;
    const int64_t item = kind == FLOAT32 ? 4 : 2, pair = stored_as == FLOAT32 ? 8 : 4;
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_VALUES)
    for (int64_t i = 0; i < tiles * groups; i++) {
        const int64_t first = i % tiles * tile, start = i / tiles * group;
        const int count = (int)(rows - first < tile ? rows - first : tile);
        const int by_halves = halves && count == tile;
        const uint8_t *const bytes = packed + first * columns / 2 + start * count / 2;
        const uint8_t *const told = statistics + i / tiles * stride + first * pair;
        char *const made = out + (start * rows + first) * item;
        float scales[MOST_TILE], shifts[MOST_TILE];
        for (int r = 0; r < count; r++) {
            scales[r] = stored(told, 2 * r, stored_as);
            shifts[r] = stored(told, 2 * r + 1, stored_as) - 8 * scales[r];
        }
        (kind == FLOAT32 ? fill_float32 : fill_bfloat16)(bytes, count, by_halves, group, scales,
                                                         shifts, made, rows * item);
    }
}

/* The same of a weight whose rows lie one after the other, two columns in a byte, the first in its
   low half. out: [rows, groups * group]. */
TARGET static inline __m128i codes_of(const uint8_t *packed)
{
    const __m128i mask = _mm_set1_epi8(15), bytes = _mm_loadl_epi64((const __m128i *)packed);
    return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask),
                             _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
}

#define FILL_GROUP(NAME, FOR, PUT, ITEM)                                                           \
    FOR static void NAME(const uint8_t *packed, int64_t group, float scale, float shift, char *out) \
    {                                                                                              \
        float scales[16], shifts[16];                                                              \
        for (int i = 0; i < 16; i++) {                                                             \
            scales[i] = scale;                                                                     \
            shifts[i] = shift;                                                                     \
        }                                                                                          \
        for (int64_t i = 0; i < group; i += 16)                                                    \
            PUT(codes_of(packed + i / 2), scales, shifts, out + i * ITEM);                         \
    }
FILL_GROUP(group_float32, TARGET, put_float32, 4)
FILL_GROUP(group_bfloat16, TARGET_BF16, put_bfloat16, 2)

TARGET void fill_rows(const uint8_t *packed, const uint8_t *statistics, char *out, int64_t rows,
                      int64_t groups, int64_t group, int64_t stride, int stored_as, int kind)
{
    const int64_t columns = groups * group, item = kind == FLOAT32 ? 4 : 2;
    const int64_t pair = stored_as == FLOAT32 ? 8 : 4;
#pragma omp parallel for schedule(static) if (rows * columns >= LEAST_VALUES)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *const told = statistics + g * stride + row * pair;
            const float scale = stored(told, 0, stored_as);
            const float shift = stored(told, 1, stored_as) - 8 * scale;
            const int64_t first = row * columns + g * group;
            (kind == FLOAT32 ? group_float32 : group_bfloat16)(packed + first / 2, group, scale,
                                                               shift, out + first * item);
        }
}
#endif
