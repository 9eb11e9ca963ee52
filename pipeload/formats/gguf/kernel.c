/* Makes floats of GGUF's blocks, bit for bit as the package gguf does: see kernel.py, which compiles
   this file. The order of products and sums is the package's. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20 };

#define TARGET __attribute__((target("avx2,f16c")))
#define LEAST_VALUES 65536 /* that are worth waking other threads for */
#define ROWS_AT_ONCE 8

int supported(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

TARGET static inline float half(const uint8_t *at)
{
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
}

static inline uint32_t word(const uint8_t *at)
{
    uint32_t bits;
    memcpy(&bits, at, 4);
    return bits;
}

/* Blocks of 32: a scale d, perhaps a least value m, perhaps 32 fifth bits, and the lower four bits
   of value i and value i + 16 in byte i. */

TARGET static void q4_0(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block);
    const uint8_t *q = block + 2;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((q[i] & 15) - 8);
        out[i + 16] = d * (float)((q[i] >> 4) - 8);
    }
}

TARGET static void q4_1(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block), m = half(block + 2);
    const uint8_t *q = block + 4;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(q[i] & 15) + m;
        out[i + 16] = d * (float)(q[i] >> 4) + m;
    }
}

TARGET static void q5_0(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block);
    const uint32_t fifth = word(block + 2);
    const uint8_t *q = block + 6;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((int)((q[i] & 15) | (fifth >> i & 1) << 4) - 16);
        out[i + 16] = d * (float)((int)((q[i] >> 4) | (fifth >> (i + 16) & 1) << 4) - 16);
    }
}

TARGET static void q5_1(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block), m = half(block + 2);
    const uint32_t fifth = word(block + 4);
    const uint8_t *q = block + 8;
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)(int)((q[i] & 15) | (fifth >> i & 1) << 4) + m;
        out[i + 16] = d * (float)(int)((q[i] >> 4) | (fifth >> (i + 16) & 1) << 4) + m;
    }
}

TARGET static void q8_0(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block);
    for (int i = 0; i < 32; i++)
        out[i] = (float)(int8_t)block[2 + i] * d;
}

TARGET static void iq4_nl(const uint8_t *restrict block, float *restrict out)
{
    static const float levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
    const float d = half(block);
    const uint8_t *q = block + 2;
    for (int i = 0; i < 16; i++) {
        out[i] = d * levels[q[i] & 15];
        out[i + 16] = d * levels[q[i] >> 4];
    }
}

/* Blocks of 256, in parts of 16 or 32 whose scales and least values are small integers times d and
   dmin. A byte holds bits of values that are 32 apart, or 64. */

TARGET static void q2_k(const uint8_t *restrict block, float *restrict out)
{
    const uint8_t *scales = block, *q = block + 16;
    const float d = half(block + 80), dmin = half(block + 82);
    for (int part = 0; part < 16; part++) {
        const float scale = d * (float)(scales[part] & 15);
        const float least = dmin * (float)(scales[part] >> 4);
        const uint8_t *bytes = q + part / 8 * 32 + part % 2 * 16;
        const int shift = part / 2 % 4 * 2;
        for (int i = 0; i < 16; i++)
            out[16 * part + i] = scale * (float)(bytes[i] >> shift & 3) - least;
    }
}

TARGET static void q3_k(const uint8_t *restrict block, float *restrict out)
{
    const uint8_t *third = block, *q = block + 32, *scales = block + 96;
    const float d = half(block + 108);
    for (int part = 0; part < 16; part++) {
        const int low = scales[part % 8] >> part / 8 * 4 & 15;
        const int high = scales[8 + part % 4] >> part / 4 * 2 & 3;
        const float scale = d * (float)((low | high << 4) - 32);
        const uint8_t *bytes = q + part / 8 * 32 + part % 2 * 16;
        const uint8_t *bits = third + part % 2 * 16;
        const int shift = part / 2 % 4 * 2, bit = part / 2;
        for (int i = 0; i < 16; i++) { /* a bit that is not set stands for -4 */
            const int value = (bytes[i] >> shift & 3) - ((bits[i] >> bit & 1) ^ 1) * 4;
            out[16 * part + i] = scale * (float)value;
        }
    }
}

/* Six bits each of the scale and the least value of one of eight parts, out of twelve bytes. */
static inline void six_bits(const uint8_t *at, int part, int *scale, int *least)
{
    if (part < 4) {
        *scale = at[part] & 63;
        *least = at[part + 4] & 63;
    } else {
        *scale = (at[part + 4] & 15) | at[part - 4] >> 6 << 4;
        *least = at[part + 4] >> 4 | at[part] >> 6 << 4;
    }
}

TARGET static void q4_k(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block), dmin = half(block + 2);
    for (int part = 0; part < 8; part++) {
        int scale, least;
        six_bits(block + 4, part, &scale, &least);
        const float times = d * (float)scale, minus = dmin * (float)least;
        const uint8_t *bytes = block + 16 + part / 2 * 32;
        const int shift = part % 2 * 4;
        for (int i = 0; i < 32; i++)
            out[32 * part + i] = times * (float)(bytes[i] >> shift & 15) - minus;
    }
}

TARGET static void q5_k(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block), dmin = half(block + 2);
    const uint8_t *fifth = block + 16;
    for (int part = 0; part < 8; part++) {
        int scale, least;
        six_bits(block + 4, part, &scale, &least);
        const float times = d * (float)scale, minus = dmin * (float)least;
        const uint8_t *bytes = block + 48 + part / 2 * 32;
        const int shift = part % 2 * 4;
        for (int i = 0; i < 32; i++) {
            const int value = (bytes[i] >> shift & 15) | (fifth[i] >> part & 1) << 4;
            out[32 * part + i] = times * (float)value - minus;
        }
    }
}

TARGET static void q6_k(const uint8_t *restrict block, float *restrict out)
{
    const int8_t *scales = (const int8_t *)block + 192;
    const float d = half(block + 208);
    for (int part = 0; part < 16; part++) {
        const float scale = d * (float)scales[part];
        const int quarter = part % 8 / 2; /* of a half of the block: 128 values */
        const uint8_t *low = block + part / 8 * 64 + quarter % 2 * 32 + part % 2 * 16;
        const uint8_t *high = block + 128 + part / 8 * 32 + part % 2 * 16;
        const int shift = quarter / 2 * 4, pair = quarter * 2;
        for (int i = 0; i < 16; i++) {
            const int value = (low[i] >> shift & 15) | (high[i] >> pair & 3) << 4;
            out[16 * part + i] = scale * (float)(value - 32);
        }
    }
}

/* bf16 in the lower half of each lane: to nearest, ties to even; NaN stays one. */
TARGET static inline __m256i rounded(__m256 values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half_up = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    const __m256i sums = _mm256_srli_epi32(_mm256_add_epi32(bits, half_up), 16);
    const __m256i no_number = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sums, _mm256_set1_epi32(0x7fc0), no_number);
}

/* count: a multiple of 16. */
TARGET static void put(const float *values, int count, char *out, int kind)
{
    for (int i = 0; i < count; i += 16) {
        const __m256 a = _mm256_loadu_ps(values + i), b = _mm256_loadu_ps(values + i + 8);
        __m128i *at = (__m128i *)(out + 2 * i);
        if (kind == FLOAT16) {
            _mm_storeu_si128(at, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
            _mm_storeu_si128(at + 1, _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
        } else {
            const __m256i lanes = _mm256_packus_epi32(rounded(a), rounded(b));
            _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(lanes, 0xD8));
        }
    }
}

typedef void (*Unpack)(const uint8_t *, float *);

static Unpack unpack_of(int type)
{
    switch (type) {
    case Q4_0: return q4_0;
    case Q4_1: return q4_1;
    case Q5_0: return q5_0;
    case Q5_1: return q5_1;
    case Q8_0: return q8_0;
    case Q2_K: return q2_k;
    case Q3_K: return q3_k;
    case Q4_K: return q4_k;
    case Q5_K: return q5_k;
    case Q6_K: return q6_k;
    case IQ4_NL: return iq4_nl;
    default: return 0;
    }
}

/* rows: of out, row i of which is made of the row order[i] of stored, or i where order is null;
   blocks: of a row, each of block_bytes bytes and of values values. Returns 0 for unknown types. */
TARGET int fill(const uint8_t *stored, char *out, const int64_t *order, int64_t rows,
                int64_t blocks, int64_t block_bytes, int64_t values, int type, int kind)
{
    const Unpack unpack = unpack_of(type);
    const int64_t item = kind == FLOAT32 ? 4 : 2;
    if (!unpack)
        return 0;
#pragma omp parallel for schedule(dynamic, ROWS_AT_ONCE) if (rows * blocks * values >= LEAST_VALUES)
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *in = stored + (order ? order[row] : row) * blocks * block_bytes;
        char *to = out + row * blocks * values * item;
        float made[256];
        for (int64_t block = 0; block < blocks; block++) {
            if (kind == FLOAT32) {
                unpack(in, (float *)to);
            } else {
                unpack(in, made);
                put(made, (int)values, to, kind);
            }
            in += block_bytes;
            to += values * item;
        }
    }
    return 1;
}
