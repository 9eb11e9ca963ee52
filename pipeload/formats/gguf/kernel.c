/* Makes floats of GGUF's blocks, bit for bit as the package gguf does: see kernel.py, which compiles
   this file. The order of products and sums is the package's. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL = 20 };

#define TARGET __attribute__((target("avx2,f16c")))
#define LEAST_VALUES 65536 /* that are worth waking other threads for */
#define ROWS_AT_ONCE 8

/* Older compilers do not know "f16c" by name. */
static inline int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int supported(void) { return __builtin_cpu_supports("avx2") && has_f16c(); }

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

static const float iq4_levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};

TARGET static void iq4_nl(const uint8_t *restrict block, float *restrict out)
{
    const float d = half(block);
    const uint8_t *q = block + 2;
    for (int i = 0; i < 16; i++) {
        out[i] = d * iq4_levels[q[i] & 15];
        out[i + 16] = d * iq4_levels[q[i] >> 4];
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

/* Six bits of the scale of one of sixteen parts, out of twelve bytes. */
static inline int third_scale(const uint8_t *at, int part)
{
    return ((at[part % 8] >> part / 8 * 4 & 15) | (at[8 + part % 4] >> part / 4 * 2 & 3) << 4) - 32;
}

TARGET static void q3_k(const uint8_t *restrict block, float *restrict out)
{
    const uint8_t *third = block, *q = block + 32, *scales = block + 96;
    const float d = half(block + 108);
    for (int part = 0; part < 16; part++) {
        const float scale = d * (float)third_scale(scales, part);
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

/* 16 values of two bytes each. */
TARGET static inline __m256i two_bytes(__m256 a, __m256 b, int kind)
{
    if (kind == FLOAT16)
        return _mm256_set_m128i(_mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT),
                                _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(a), rounded(b)), 0xD8);
}

/* count: a multiple of 16. */
TARGET static void put(const float *values, int count, char *out, int kind)
{
    for (int i = 0; i < count; i += 16)
        _mm256_storeu_si256(
            (__m256i *)(out + 2 * i),
            two_bytes(_mm256_loadu_ps(values + i), _mm256_loadu_ps(values + i + 8), kind));
}

/* [Note: tables] Values that share a scale are of 4 to 32 kinds, fewer than there are of them: for
   two-byte floats those are computed and rounded once, and looked up by bytes, 32 at a time. A half
   of a register has a table of its own. */

typedef struct {
    __m256 first, last;
} Levels;

typedef struct {
    __m256i low, high; /* bytes of 16 floats, for each half */
} Table;

/* scale * number, with a `least` value added: it is taken away where the package does so, which is
   the same as to add what is its opposite. */
TARGET static inline Levels levels_from(float scale, float number, float least)
{
    const __m256 ramp = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), times = _mm256_set1_ps(scale);
    const __m256 first = _mm256_add_ps(ramp, _mm256_set1_ps(number));
    const __m256 last = _mm256_add_ps(first, _mm256_set1_ps(8)), more = _mm256_set1_ps(least);
    return (Levels){_mm256_add_ps(_mm256_mul_ps(times, first), more),
                    _mm256_add_ps(_mm256_mul_ps(times, last), more)};
}

/* The same without a least value: a zero keeps its sign. */
TARGET static inline Levels levels_of(float scale, float number)
{
    const __m256 ramp = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), times = _mm256_set1_ps(scale);
    const __m256 first = _mm256_add_ps(ramp, _mm256_set1_ps(number));
    const __m256 last = _mm256_add_ps(first, _mm256_set1_ps(8));
    return (Levels){_mm256_mul_ps(times, first), _mm256_mul_ps(times, last)};
}

TARGET static inline Table tables_of(Levels one, Levels other, int kind)
{
    const __m256i byte = _mm256_set1_epi16(0xff);
    const __m256i a = two_bytes(one.first, one.last, kind);
    const __m256i b = two_bytes(other.first, other.last, kind);
    const __m256i lows = _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
    const __m256i highs = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
    return (Table){_mm256_permute4x64_epi64(lows, 0xD8), _mm256_permute4x64_epi64(highs, 0xD8)};
}

TARGET static inline Table table_of(Levels levels, int kind)
{
    return tables_of(levels, levels, kind);
}

/* The table of one half, for both. */
TARGET static inline Table half_of(Table table, int half)
{
    if (half)
        return (Table){_mm256_permute4x64_epi64(table.low, 0xEE),
                       _mm256_permute4x64_epi64(table.high, 0xEE)};
    return (Table){_mm256_permute4x64_epi64(table.low, 0x44),
                   _mm256_permute4x64_epi64(table.high, 0x44)};
}

TARGET static inline void join(__m256i low, __m256i high, char *out)
{
    const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
    _mm256_storeu_si256((__m256i *)out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)out + 1, _mm256_permute2x128_si256(a, b, 0x31));
}

/* which: below 16. */
TARGET static inline void look_up(Table table, __m256i which, char *out)
{
    join(_mm256_shuffle_epi8(table.low, which), _mm256_shuffle_epi8(table.high, which), out);
}

/* upper: bytes of ones where the value is one of the second table. */
TARGET static inline void look_up_two(Table first, Table second, __m256i which, __m256i upper,
                                      char *out)
{
    const __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(first.low, which),
                                           _mm256_shuffle_epi8(second.low, which), upper);
    const __m256i high = _mm256_blendv_epi8(_mm256_shuffle_epi8(first.high, which),
                                            _mm256_shuffle_epi8(second.high, which), upper);
    join(low, high, out);
}

/* Some bits of each of 32 bytes, from `shift` on. */
TARGET static inline __m256i bits_of(const uint8_t *bytes, int shift, char mask)
{
    const __m256i all = _mm256_loadu_si256((const __m256i *)bytes);
    return _mm256_and_si256(_mm256_srl_epi16(all, _mm_cvtsi32_si128(shift)),
                            _mm256_set1_epi8(mask));
}

/* The lower halves of 16 bytes, then the upper ones. */
TARGET static inline __m256i halves_of(const uint8_t *bytes)
{
    const __m128i all = _mm_loadu_si128((const __m128i *)bytes);
    const __m256i both = _mm256_set_m128i(_mm_srli_epi16(all, 4), all);
    return _mm256_and_si256(both, _mm256_set1_epi8(15));
}

/* Bytes of ones where a bit is set. */
TARGET static inline __m256i spread_bits(uint32_t bits)
{
    const __m256i bytes = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)bits),
        _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                         3, 3, 3, 3, 3, 3, 3));
    const __m256i each = _mm256_set1_epi64x((int64_t)0x8040201008040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
}

TARGET static void two_bytes_by_32(const uint8_t *block, char *out, int type, int kind)
{
    const float d = half(block), m = half(block + 2);
    const __m256 times = _mm256_set1_ps(d);
    Levels levels;
    switch (type) {
    case Q4_0: look_up(table_of(levels_of(d, -8), kind), halves_of(block + 2), out); break;
    case Q4_1: look_up(table_of(levels_from(d, 0, m), kind), halves_of(block + 4), out); break;
    case IQ4_NL:
        levels.first = _mm256_mul_ps(times, _mm256_loadu_ps(iq4_levels));
        levels.last = _mm256_mul_ps(times, _mm256_loadu_ps(iq4_levels + 8));
        look_up(table_of(levels, kind), halves_of(block + 2), out);
        break;
    case Q5_0:
        look_up_two(table_of(levels_of(d, -16), kind), table_of(levels_of(d, 0), kind),
                    halves_of(block + 6), spread_bits(word(block + 2)), out);
        break;
    default: /* Q5_1 */
        look_up_two(table_of(levels_from(d, 0, m), kind), table_of(levels_from(d, 16, m), kind),
                    halves_of(block + 8), spread_bits(word(block + 4)), out);
    }
}

/* Of 256 values, parts `part` and `part + 1`, which are the halves of the same 32 bytes. */
TARGET static inline void two_parts(const uint8_t *block, int part, float *scale, float *least)
{
    const float d = half(block), dmin = half(block + 2);
    for (int i = 0; i < 2; i++) {
        int times, minus;
        six_bits(block + 4, part + i, &times, &minus);
        scale[i] = d * (float)times;
        least[i] = -(dmin * (float)minus);
    }
}

TARGET static void two_bytes_q4_k(const uint8_t *block, char *out, int kind)
{
    for (int part = 0; part < 8; part += 2) {
        float scale[2], least[2];
        two_parts(block, part, scale, least);
        const Table both = tables_of(levels_from(scale[0], 0, least[0]),
                                     levels_from(scale[1], 0, least[1]), kind);
        for (int i = 0; i < 2; i++)
            look_up(half_of(both, i), bits_of(block + 16 + part / 2 * 32, 4 * i, 15),
                    out + 64 * (part + i));
    }
}

TARGET static void two_bytes_q5_k(const uint8_t *block, char *out, int kind)
{
    for (int part = 0; part < 8; part += 2) {
        float scale[2], least[2];
        two_parts(block, part, scale, least);
        const Table first = tables_of(levels_from(scale[0], 0, least[0]),
                                      levels_from(scale[1], 0, least[1]), kind);
        const Table second = tables_of(levels_from(scale[0], 16, least[0]),
                                       levels_from(scale[1], 16, least[1]), kind);
        for (int i = 0; i < 2; i++) {
            const __m256i one = _mm256_set1_epi8(1);
            const __m256i upper = _mm256_cmpeq_epi8(bits_of(block + 16, part + i, 1), one);
            const __m256i which = bits_of(block + 48 + part / 2 * 32, 4 * i, 15);
            look_up_two(half_of(first, i), half_of(second, i), which, upper, out + 64 * (part + i));
        }
    }
}

TARGET static void two_bytes_q2_k(const uint8_t *block, char *out, int kind)
{
    const float d = half(block + 80), dmin = half(block + 82);
    for (int part = 0; part < 16; part += 2) {
        Levels levels[2];
        for (int i = 0; i < 2; i++) {
            const uint8_t scales = block[part + i];
            levels[i] = levels_from(d * (float)(scales & 15), 0, -(dmin * (float)(scales >> 4)));
        }
        const __m256i which = bits_of(block + 16 + part / 8 * 32, part / 2 % 4 * 2, 3);
        look_up(tables_of(levels[0], levels[1], kind), which, out + 32 * part);
    }
}

TARGET static void two_bytes_q3_k(const uint8_t *block, char *out, int kind)
{
    const float d = half(block + 108);
    for (int part = 0; part < 16; part += 2) {
        const Levels first = levels_of(d * (float)third_scale(block + 96, part), -4);
        const Levels second = levels_of(d * (float)third_scale(block + 96, part + 1), -4);
        const __m256i low = bits_of(block + 32 + part / 8 * 32, part / 2 % 4 * 2, 3);
        const __m256i third = _mm256_slli_epi16(bits_of(block, part / 2, 1), 2);
        look_up(tables_of(first, second, kind), _mm256_or_si256(low, third), out + 32 * part);
    }
}

/* Values of two bytes; 0 where there are as many levels as values. */
TARGET static int by_table(const uint8_t *block, char *out, int type, int kind)
{
    switch (type) {
    case Q4_0:
    case Q4_1:
    case Q5_0:
    case Q5_1:
    case IQ4_NL: two_bytes_by_32(block, out, type, kind); return 1;
    case Q2_K: two_bytes_q2_k(block, out, kind); return 1;
    case Q3_K: two_bytes_q3_k(block, out, kind); return 1;
    case Q4_K: two_bytes_q4_k(block, out, kind); return 1;
    case Q5_K: two_bytes_q5_k(block, out, kind); return 1;
    default: return 0;
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
            } else if (!by_table(in, to, type, kind)) {
                unpack(in, made);
                put(made, (int)values, to, kind);
            }
            in += block_bytes;
            to += values * item;
        }
    }
    return 1;
}
#endif
