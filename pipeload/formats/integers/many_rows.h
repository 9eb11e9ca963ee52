/* What product.c includes for many rows of input, where vectors have 256 bits: the same sums in the
   same order, so the same bits, with fewer loads for each of them. Codes of four rows of the weight
   are cut out of their words once for some rows of input, and multiplied by two of them at a time:
   see rounded_inputs.h. */

/* Four rows of the weight: int16 of [pairs, halves, fourths, ROWS, 16]; scales and shifts of their
   groups. */
struct panel {
    __m256i codes[DEEP * ROWS / 16];
    __m128 scales[DEEP / 32], shifts[DEEP / 32];
};

/* Sums of some rows of input with four of the weight, and what comes for shifts. */
struct sums {
    __m256 made[MOST_ROWS][ROWS];
    __m128 shifted[MOST_ROWS];
};

TARGET static void cut_out(const uint8_t *weight, const void *statistics, int64_t first,
                           int64_t stride, int64_t columns, int64_t start, int64_t stop,
                           int64_t group, int kind, struct panel *to)
{
    int16_t *at = (int16_t *)to->codes;
    for (int64_t column = start; column < stop; column += PAIR, at += PAIR * ROWS) {
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *const bytes = weight + (r * columns + column) / 2;
            const int64_t left = columns - column;
            const struct words words = words_avx2(bytes, left >= PAIR ? PAIR / 2 : left / 2);
            for (int k = 0; k < 4; k++) {
                const struct words q = cut_avx2(words, k);
                _mm256_store_si256((__m256i *)(at + (k * ROWS + r) * 16), q.low);
                _mm256_store_si256((__m256i *)(at + ((4 + k) * ROWS + r) * 16), q.high);
            }
        }
    }
    for (int64_t g = start / group, n = 0; g * group < stop; g++, n++)
        told(statistics, g * stride + first, kind, to->scales + n, to->shifts + n);
}

/* `count` rows of input, one or two, times the columns of a panel. */
TARGET static INLINE void multiply_panel(const struct panel *panel, struct inputs x, int64_t start,
                                         int64_t stop, int64_t group, int count, __m256 (*made)[ROWS],
                                         __m128 *shifted)
{
    float by[2][MOST_GROUPS][ROWS];
    const int16_t *codes = (const int16_t *)panel->codes;
    int64_t g = start / group, n = 0;
    for (int64_t column = start; column < stop; column += PAIR) {
        const int64_t left = stop - column;
        const int groups = (int)(left >= PAIR ? PAIR / group : left / group);
        const int halves = left > BLOCK ? 2 : 1;
        __m256i sum[2][ROWS];
        for (int i = 0; i < groups; i++, g++, n++) {
            for (int m = 0; m < count; m++) {
                const __m128 scale = _mm_set1_ps(x.scales[m * x.groups + g]);
                const __m128 sum_of = _mm_set1_ps(x.sums[m * x.groups + g]);
                _mm_storeu_ps(by[m][i], _mm_mul_ps(panel->scales[n], scale));
                shifted[m] = _mm_fmadd_ps(panel->shifts[n], sum_of, shifted[m]);
            }
        }
        __asm__ volatile("" : "+m"(by)); /* from memory, spreading a number over lanes is free */
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++, codes += PAIR / 2 * ROWS) {
            if (half == halves)
                continue;
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                __m256i given[2];
                for (int m = 0; m < count; m++)
                    given[m] = _mm256_loadu_si256((const __m256i *)(x.codes + m * x.codes_of_row +
                                                                    column + 32 * k + 16 * half));
                __asm__("" : "+x"(given[0]), "+x"(given[count - 1]));
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    const __m256i *const at = (const __m256i *)(codes + (k * ROWS + r) * 16);
                    __m256i q = _mm256_load_si256(at);
                    __asm__("" : "+x"(q)); /* read once */
#pragma GCC unroll 2
                    for (int m = 0; m < count; m++) {
                        const __m256i product = _mm256_madd_epi16(q, given[m]);
                        sum[m][r] = k || (half && group == PAIR)
                                        ? _mm256_add_epi32(sum[m][r], product)
                                        : product;
                        __asm__("" : "+x"(sum[m][r])); /* added at once, not all at the end */
                    }
                }
            }
            if (half + 1 < halves && group == PAIR)
                continue;
            const int block = group == PAIR ? 0 : half;
#pragma GCC unroll 2
            for (int m = 0; m < count; m++)
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++)
                    made[m][r] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m][r]),
                                        lanes_avx2(by[m], block, r, group, groups), made[m][r]);
        }
    }
}

/* Some rows of input, MOST_ROWS at most, times four rows of the weight from `first` on. */
TARGET static INLINE void multiply_four(const uint8_t *weight, const void *statistics,
                                        int64_t first, int64_t out, struct inputs x, int64_t rows,
                                        int64_t columns, int64_t group, int told_in,
                                        struct panel *panel, struct sums *sums)
{
    for (int m = 0; m < rows; m++) {
        sums->shifted[m] = _mm_setzero_ps();
        for (int r = 0; r < ROWS; r++)
            sums->made[m][r] = _mm256_setzero_ps();
    }
    for (int64_t start = 0; start < columns; start += DEEP) {
        const int64_t stop = columns - start > DEEP ? start + DEEP : columns;
        cut_out(weight + first * columns / 2, statistics, 2 * first, 2 * out, columns, start, stop,
                group, told_in, panel);
        for (int64_t m = 0; m < rows; m += 2) {
            const struct inputs some = {x.codes + m * x.codes_of_row, x.scales + m * x.groups,
                                        x.sums + m * x.groups, x.codes_of_row, x.groups};
            if (m + 1 < rows)
                multiply_panel(panel, some, start, stop, group, 2, sums->made + m,
                               sums->shifted + m);
            else
                multiply_panel(panel, some, start, stop, group, 1, sums->made + m,
                               sums->shifted + m);
        }
    }
}

/* As multiply_avx2, which see. */
TARGET static void multiply_many(const uint8_t *weight, const void *statistics,
                                 const int16_t *codes, const float *scales, const float *sums_of,
                                 void *made, int64_t rows, int64_t out, int64_t columns,
                                 int64_t group, int told_in, int kind)
{
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR, groups = columns / group;
    const int64_t step = rows_at_once(padded);
    const int64_t fours = (out + ROWS - 1) / ROWS, each = WIDE / ROWS;
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t task = 0; task < (fours + each - 1) / each; task++) {
        struct panel panel;
        struct sums sums;
        for (int64_t row = 0; row < rows; row += step) {
            const int64_t count = rows - row < step ? rows - row : step;
            const struct inputs x = {codes + row * padded, scales + row * groups,
                                     sums_of + row * groups, padded, groups};
            for (int64_t n = task * each; n < (task + 1) * each && n < fours; n++) {
                /* The last ones overlap those before, which get the same numbers twice. */
                const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
                if (group == 64)
                    multiply_four(weight, statistics, first, out, x, count, columns, 64, told_in,
                                  &panel, &sums);
                else if (group == 128)
                    multiply_four(weight, statistics, first, out, x, count, columns, 128, told_in,
                                  &panel, &sums);
                else
                    multiply_four(weight, statistics, first, out, x, count, columns, 32, told_in,
                                  &panel, &sums);
                for (int m = 0; m < count; m++) {
                    float products[ROWS];
                    _mm_storeu_ps(products, sums.shifted[m]);
                    for (int r = 0; r < ROWS; r++)
                        store(products[r] + sum_of(sums.made[m][r]), made,
                              (row + m) * out + first + r, kind);
                }
            }
        }
    }
}
