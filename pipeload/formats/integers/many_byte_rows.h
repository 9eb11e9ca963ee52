/* What byte_product.c includes for many rows of input, where vectors have 256 bits: as many_rows.h
   has it of int4. A row of the weight that is not there is one of zeros. */

/* Four rows of the weight: int16 of [groups, halves, steps, ROWS, 16]. */
struct panel {
    __m256i codes[DEEP * ROWS / 16];
};

/* Sums of some rows of input with four of the weight, in halves. */
struct sums {
    __m256 made[MOST_ROWS][2][ROWS];
};

TARGET static void widen(const int8_t *weight, int64_t columns, int64_t start, int64_t stop,
                         int rows, struct panel *to)
{
    __m256i *at = to->codes;
    for (int64_t column = start; column < stop; column += GROUP)
        for (int half = 0; half < 2; half++)
            for (int64_t i = column + 16 * half; i < column + GROUP; i += STEP)
                for (int r = 0; r < ROWS; r++) {
                    const __m128i *const from = (const __m128i *)(weight + r * columns + i);
                    *at++ = r < rows && i < columns ? _mm256_cvtepi8_epi16(_mm_loadu_si128(from))
                                                    : _mm256_setzero_si256();
                }
}

/* `count` rows of input, one or two, times `steps` times 32 columns of a panel, one half of them. */
TARGET static INLINE void multiply_half(const __m256i *panel, const int16_t *codes,
                                        int64_t codes_of_row, int64_t steps, int count,
                                        const float *scales, int64_t groups, __m256 (*made)[2][ROWS],
                                        int half)
{
    __m256i sum[2][ROWS];
#pragma GCC unroll 2
    for (int m = 0; m < count; m++)
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            sum[m][r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int64_t k = 0; k < steps; k++) {
        __m256i given[2];
        for (int m = 0; m < count; m++)
            given[m] = _mm256_loadu_si256(
                (const __m256i *)(codes + m * codes_of_row + STEP * k + 16 * half));
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            __m256i wide = panel[k * ROWS + r];
            __asm__("" : "+x"(wide)); /* read once */
#pragma GCC unroll 2
            for (int m = 0; m < count; m++) {
                sum[m][r] = _mm256_add_epi32(sum[m][r], _mm256_madd_epi16(wide, given[m]));
                __asm__("" : "+x"(sum[m][r])); /* added at once, not all at the end */
            }
        }
    }
#pragma GCC unroll 2
    for (int m = 0; m < count; m++) {
        const __m256 by = _mm256_broadcast_ss(scales + m * groups);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++)
            made[m][half][r] = _mm256_add_ps(made[m][half][r],
                                             _mm256_mul_ps(_mm256_cvtepi32_ps(sum[m][r]), by));
    }
}

TARGET static INLINE void multiply_panel(const struct panel *panel, struct inputs x, int64_t start,
                                         int64_t stop, int count, __m256 (*made)[2][ROWS])
{
    const __m256i *at = panel->codes;
    for (int64_t column = start; column < stop; column += GROUP)
        for (int half = 0; half < 2; half++, at += GROUP / STEP * ROWS) {
            const int16_t *const codes = x.codes + column;
            const float *const scales = x.scales + column / GROUP;
            if (column + GROUP <= x.codes_of_row) /* a constant, for most of them */
                multiply_half(at, codes, x.codes_of_row, GROUP / STEP, count, scales, x.groups, made,
                              half);
            else
                multiply_half(at, codes, x.codes_of_row, (x.codes_of_row - column) / STEP, count,
                              scales, x.groups, made, half);
        }
}

/* As multiply_avx2, which see. */
TARGET static void multiply_many(const int8_t *weight, const void *statistics, struct inputs x,
                                 void *made, int64_t rows, int64_t out, int64_t columns, int told_in,
                                 int kind)
{
    const int64_t step = rows_at_once(x.codes_of_row);
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t begin = 0; begin < out; begin += WIDE) {
        struct panel panel;
        struct sums sums;
        for (int64_t row = 0; row < rows; row += step) {
            const int64_t count = rows - row < step ? rows - row : step;
            for (int64_t first = begin; first < begin + WIDE && first < out; first += ROWS) {
                const int here = first + ROWS <= out ? ROWS : (int)(out - first);
                memset(&sums, 0, sizeof(sums));
                for (int64_t start = 0; start < columns; start += DEEP) {
                    const int64_t stop = columns - start > DEEP ? start + DEEP : columns;
                    widen(weight + first * columns, columns, start, stop, here, &panel);
                    for (int64_t m = 0; m < count; m += 2) {
                        const struct inputs some = {x.codes + (row + m) * x.codes_of_row,
                                                    x.scales + (row + m) * x.groups, x.codes_of_row,
                                                    x.groups};
                        if (m + 1 < count)
                            multiply_panel(&panel, some, start, stop, 2, sums.made + m);
                        else
                            multiply_panel(&panel, some, start, stop, 1, sums.made + m);
                    }
                }
                for (int64_t m = 0; m < count; m++)
                    for (int r = 0; r < here; r++) {
                        const float sum = sum_of(_mm256_add_ps(sums.made[m][0][r],
                                                               sums.made[m][1][r]));
                        store(sum * told(statistics, first + r, told_in), made,
                              (row + m) * out + first + r, kind);
                    }
            }
        }
    }
}
