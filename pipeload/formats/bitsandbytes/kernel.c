/* Dequantises 4-bit weights, 16 values at a time: see kernel.py, which compiles this file. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

#define TARGET __attribute__((target("avx2,f16c")))
#define LEAST_VALUES 65536 /* that are worth waking other threads for */

/* Older compilers do not know "f16c" by name. */
static inline int has_f16c(void)
{
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

int supported(void) { return __builtin_cpu_supports("avx2") && has_f16c(); }

/* Eight codes, by the numbers in the first eight bytes, times `scale`. */
TARGET static inline __m256 eight(__m128i numbers, __m256 low, __m256 high, __m256 scale)
{
    const __m256i index = _mm256_cvtepu8_epi32(numbers); /* its lowest three bits choose */
    const __m256 below_8 = _mm256_permutevar8x32_ps(low, index);
    const __m256 from_8 = _mm256_permutevar8x32_ps(high, index);
    const __m256 fourth_bit = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_mul_ps(_mm256_blendv_ps(below_8, from_8, fourth_bit), scale);
}

/* bf16 in the lower half of each lane: to nearest, ties to even. */
TARGET static inline __m256i rounded(__m256 values)
{
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd);
    return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}

TARGET static void fill_block(const uint8_t *packed, __m256 scale, __m256 low, __m256 high,
                              char *out, int64_t blocksize, int kind)
{
    const __m128i mask = _mm_set1_epi8(15);
    for (int64_t i = 0; i < blocksize; i += 16, packed += 8) {
        const __m128i bytes = _mm_loadl_epi64((const __m128i *)packed);
        const __m128i firsts = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        const __m128i numbers = _mm_unpacklo_epi8(firsts, _mm_and_si128(bytes, mask));
        const __m256 a = eight(numbers, low, high, scale);
        const __m256 b = eight(_mm_srli_si128(numbers, 8), low, high, scale);
        if (kind == FLOAT32) {
            _mm256_storeu_ps((float *)out, a);
            _mm256_storeu_ps((float *)out + 8, b);
            out += 64;
        } else if (kind == FLOAT16) {
            _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
            _mm_storeu_si128((__m128i *)out + 1, _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT));
            out += 32;
        } else {
            const __m256i lanes = _mm256_packus_epi32(rounded(a), rounded(b));
            _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(lanes, 0xD8));
            out += 32;
        }
    }
}

/* packed: two values in a byte, the first in its high half; absmax: one of a block; codes: 16.
   blocksize: a multiple of 16. */
TARGET void fill(const uint8_t *packed, const float *absmax, const float *codes, char *out,
                 int64_t blocks, int64_t blocksize, int kind)
{
    const __m256 low = _mm256_loadu_ps(codes), high = _mm256_loadu_ps(codes + 8);
    const int64_t out_bytes = blocksize * (kind == FLOAT32 ? 4 : 2);
#pragma omp parallel for schedule(static) if (blocks * blocksize >= LEAST_VALUES)
    for (int64_t block = 0; block < blocks; block++)
        fill_block(packed + block * blocksize / 2, _mm256_set1_ps(absmax[block]), low, high,
                   out + block * out_bytes, blocksize, kind);
}
#endif
