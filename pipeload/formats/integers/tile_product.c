/* Products with int8 and int4 weights by AMX: see tile_product.py, which compiles this file.

   Rows of input are tiles as they lie. Of the weight, 16 rows and 32 columns at a time are made
   bf16 and turned over, as the instruction wants them: pairs of columns, those of all rows side by
   side. A number of the result is the sum of its columns in their order, whatever is beside it, by
   however many threads, so it has the same bits in any company. */

#if !defined(__x86_64__)
int supported(void) { return 0; }
#else
#include <cpuid.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { FLOAT32, BFLOAT16, FLOAT16 };

#include "statistics.h"

#define INLINE __attribute__((always_inline)) inline
#define TARGET                                                                                     \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,f16c,amx-tile,amx-bf16")))
#define SIDE 16              /* rows of any tile; rows of the weight in one */
#define DEPTH 32             /* columns of a tile */
#define TILE (SIDE * DEPTH)  /* numbers of one, in bf16 */
#define SUMS (SIDE * SIDE)   /* the same of sums */
#define COLUMNS 2048         /* made bf16 at once */
#define MOST_ROWS 512        /* of input that a piece of the weight is made bf16 for */
#define LEAST_PRODUCTS 65536 /* that are worth waking other threads for */

/* Linux lends the registers of tiles to who asks, once for all threads of the process. */
int supported(void)
{
#if defined(__linux__) && defined(SYS_arch_prctl)
    const int permit = 0x1023, tiles = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1))
        return 0;
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, permit, tiles) == 0;
#else
    return 0;
#endif
}

/* Turns 16 rows of 16 pairs over. */
TARGET static INLINE void put_tile(__m512i *r, uint16_t *tile)
{
    __m512i t[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_store_si512(tile + DEPTH * i, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_store_si512(tile + DEPTH * (i + 8), _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD));
    }
}

/* A weight, and where its rows end. */
struct weight {
    const uint8_t *codes;
    const void *statistics;
    int64_t out, columns, group;
    int told_in;
};

/* Columns `start` to `stop` of 16 rows, made floats in fp32 and rounded once. A group has 16 of
   them at most, so they are looked up: a pair of columns lies in one byte. */
TARGET static void fill4(struct weight w, int64_t first, int64_t start, int64_t stop,
                         uint16_t *tiles)
{
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t begin = start; begin < stop; begin += w.group) {
        __m512i values[SIDE];
        for (int r = 0; r < SIDE; r++) {
            const int64_t at = 2 * (begin / w.group * w.out + first + r);
            const float scale = told(w.statistics, at, w.told_in);
            const float shift = told(w.statistics, at + 1, w.told_in) - 8 * scale;
            const __m512 scaled = _mm512_mul_ps(codes, _mm512_set1_ps(scale));
            const __m512 made = _mm512_add_ps(scaled, _mm512_set1_ps(shift));
            values[r] = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(made));
        }
        for (int64_t k = begin; k < begin + w.group; k += DEPTH, tiles += TILE) {
            __m512i rows[SIDE];
            for (int r = 0; r < SIDE; r++) {
                const uint8_t *const at = w.codes + ((first + r) * w.columns + k) / 2;
                const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
                const __m512i both = _mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12));
                rows[r] = _mm512_permutexvar_epi16(both, values[r]);
            }
            put_tile(rows, tiles);
        }
    }
}

/* The same of int8: whole numbers, which bf16 has as well. Behind the last row it comes again. */
TARGET static void fill8(struct weight w, int64_t first, int64_t start, int64_t stop,
                         uint16_t *tiles)
{
    for (int64_t k = start; k < stop; k += DEPTH, tiles += TILE) {
        __m512i rows[SIDE];
        for (int r = 0; r < SIDE; r++) {
            const int64_t row = first + r < w.out ? first + r : w.out - 1;
            const __m128i *const at = (const __m128i *)(w.codes + row * w.columns + k);
            const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
            const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
            rows[r] = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        }
        put_tile(rows, tiles);
    }
}

/* Two tiles of input times two of the weight, for some columns; `sums` go on unless `fresh`. */
TARGET static INLINE void multiply(const uint16_t *const *input, int64_t row_bytes,
                                   const uint16_t *const *weight, int64_t steps, float *sums,
                                   int fresh)
{
    const int64_t line = SIDE * sizeof(float);
    if (fresh) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, line);
        _tile_loadd(1, sums + SUMS, line);
        _tile_loadd(2, sums + 2 * SUMS, line);
        _tile_loadd(3, sums + 3 * SUMS, line);
    }
    for (int64_t k = 0; k < steps; k++) {
        _tile_loadd(4, input[0] + k * DEPTH, row_bytes);
        _tile_loadd(6, weight[0] + k * TILE, line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight[1] + k * TILE, line);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, input[1] + k * DEPTH, row_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, line);
    _tile_stored(1, sums + SUMS, line);
    _tile_stored(2, sums + 2 * SUMS, line);
    _tile_stored(3, sums + 3 * SUMS, line);
}

/* Some rows of input times `count` rows of the weight from `first` on. `tiles` and `sums`: memory.
   The last tile of input overlaps the one before, so that it needs no rows that are not there; its
   twin, where tiles are odd in number, is itself. */
TARGET static void multiply_some(const uint16_t *input, int64_t rows, struct weight w,
                                 int64_t first, int64_t count, uint16_t *tiles, float *sums,
                                 uint16_t *made)
{
    const int64_t last = rows > SIDE ? rows - SIDE : 0, pairs = (count + 2 * SIDE - 1) / (2 * SIDE);
    for (int64_t start = 0; start < w.columns; start += COLUMNS) {
        const int64_t stop = start + COLUMNS < w.columns ? start + COLUMNS : w.columns;
        const int64_t steps = (stop - start) / DEPTH;
        for (int64_t r = 0; r < count; r += SIDE)
            (w.group ? fill4 : fill8)(w, first + r, start, stop, tiles + r * DEPTH * steps);
        float *into = sums;
        for (int64_t row = 0; row < rows; row += 2 * SIDE) {
            const int64_t low = row < last ? row : last;
            const int64_t high = row + SIDE < last ? row + SIDE : last;
            const uint16_t *const given[] = {input + low * w.columns + start,
                                             input + high * w.columns + start};
            for (int64_t r = 0; r < count; r += 2 * SIDE, into += 4 * SUMS) {
                const uint16_t *const one = tiles + r * DEPTH * steps;
                const uint16_t *const both[] = {one, r + SIDE < count ? one + steps * TILE : one};
                multiply(given, w.columns * sizeof(uint16_t), both, steps, into, !start);
            }
        }
    }
    for (int64_t r = 0; r < count; r += SIDE) {
        const int64_t left = count - r < SIDE ? count - r : SIDE;
        const __mmask16 there = (__mmask16)((1 << left) - 1);
        float scales[SIDE] = {0};
        for (int64_t i = 0; !w.group && i < left; i++)
            scales[i] = told(w.statistics, first + r + i, w.told_in);
        for (int64_t row = 0; row < rows; row++) {
            /* In the last tile, which began earlier, it lies further on. */
            const int64_t tile = row / SIDE, begin = tile * SIDE < last ? tile * SIDE : last;
            const float *const at = sums + (tile / 2 * pairs + r / SIDE / 2) * 4 * SUMS +
                                    (tile % 2 * 2 + r / SIDE % 2) * SUMS + (row - begin) * SIDE;
            __m512 sum = _mm512_loadu_ps(at);
            if (!w.group)
                sum = _mm512_mul_ps(sum, _mm512_loadu_ps(scales));
            _mm256_mask_storeu_epi16(made + row * w.out + first + r, there,
                                     (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

/* As the processor stores it. */
struct config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* input: bf16 of [rows, columns], columns a multiple of 32; codes: int8 of [out, columns] where
   `group` is 0, else int4 of [out, columns / 2], out a multiple of 16 and columns of the group;
   statistics: [out], or [groups, out, 2], in `told_in`; made: bf16 of [rows, out]. block: rows of
   the weight, a multiple of 32, that a thread takes at once; memory: for each thread `own` bytes,
   as many as hold bf16 of [block, COLUMNS] and fp32 of [block, MOST_ROWS], of columns and rows no
   more than there are (rows to whole 32), and begin at a multiple of 64. */
TARGET void product(const uint16_t *input, const uint8_t *codes, const void *statistics,
                    uint8_t *memory, uint16_t *made, int64_t rows, int64_t out, int64_t columns,
                    int64_t group, int64_t block, int64_t own, int64_t threads, int told_in)
{
    const struct weight w = {codes, statistics, out, columns, group, told_in};
    const int64_t blocks = (out + block - 1) / block, parts = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t filled = columns < COLUMNS ? columns : COLUMNS;
    const int64_t all = blocks * parts;
    int64_t woken = 0, next = 0;
#pragma omp parallel num_threads(threads) if (rows * out * columns >= LEAST_PRODUCTS)
    {
        int64_t thread, task;
        struct config before, ours = {.palette = 1};
#pragma omp atomic capture
        thread = woken++;
        uint16_t *const tiles = (uint16_t *)(memory + thread * own);
        _tile_storeconfig(&before); /* of a library's, which may take it for granted later */
        for (int i = 0; i < 8; i++) {
            ours.bytes[i] = SIDE * sizeof(float);
            ours.rows[i] = (uint8_t)(i < 6 && rows < SIDE ? rows : SIDE);
        }
        _tile_loadconfig(&ours);
        for (;;) { /* whatever comes next: a thread that waits for a core keeps nobody waiting */
#pragma omp atomic capture
            task = next++;
            if (task >= all)
                break;
            /* As even as can be: a part has a tile at least, as all rows have. */
            const int64_t part = task / blocks, first = task % blocks * block;
            const int64_t begin = rows * part / parts, end = rows * (part + 1) / parts;
            const int64_t count = out - first < block ? out - first : block;
            multiply_some(input + begin * columns, end - begin, w, first, count, tiles,
                          (float *)(tiles + block * filled), made + begin * out);
        }
        _tile_loadconfig(&before);
    }
}
#endif
