/* What byte_product.c includes once for each kind of processor: FOR says which, INTEGERS and FLOATS
   are sixteen lanes there, and NAME what things are called. */

/* One group of one row of the weight times `count` rows of input. */
FOR static INLINE void NAME(group)(const int8_t *weight, const int16_t *codes, int64_t codes_of_row,
                                   int64_t columns, int count, INTEGERS *sums)
{
    int64_t i = 0;
    for (; i + STEP <= columns; i += STEP) {
        const INTEGERS wide = NAME(widened)(weight + i, 1);
        for (int m = 0; m < count; m++)
            sums[m] = NAME(added)(sums[m], wide, codes + m * codes_of_row + i);
    }
    if (i < columns) {
        const INTEGERS wide = NAME(widened)(weight + i, 0);
        for (int m = 0; m < count; m++)
            sums[m] = NAME(added)(sums[m], wide, codes + m * codes_of_row + i);
    }
}

/* `rows` rows of the weight times `count` rows of input. What comes next is fetched, into the larger
   cache, as the processor would not see it coming: as often from row to row. */
FOR static INLINE void NAME(rows)(const int8_t *weight, struct inputs x, int64_t columns, int rows,
                                  int count, float (*out)[ROWS])
{
    FLOATS made[INPUTS][ROWS];
    for (int m = 0; m < count; m++)
        for (int r = 0; r < rows; r++)
            made[m][r] = NAME(zero)();
    for (int64_t g = 0; g < x.groups; g++) {
        const int64_t start = g * GROUP;
        const int whole = start + GROUP <= columns;
        const int64_t width = whole ? GROUP : columns - start;
        for (int64_t i = rows * start; i < rows * (start + width); i += 64)
            _mm_prefetch((const char *)weight + FETCHED + i, _MM_HINT_T1);
        for (int r = 0; r < rows; r++) {
            INTEGERS sums[INPUTS];
            for (int m = 0; m < count; m++)
                sums[m] = NAME(none)();
            const int8_t *const at = weight + r * columns + start;
            if (whole) /* a constant, for most of them */
                NAME(group)(at, x.codes + start, x.codes_of_row, GROUP, count, sums);
            else
                NAME(group)(at, x.codes + start, x.codes_of_row, width, count, sums);
            for (int m = 0; m < count; m++)
                made[m][r] = NAME(scaled)(made[m][r], sums[m], x.scales[m * x.groups + g]);
        }
    }
    for (int m = 0; m < count; m++)
        for (int r = 0; r < rows; r++)
            out[m][r] = NAME(total)(made[m][r]);
}

FOR static INLINE void NAME(some)(const int8_t *weight, struct inputs x, int64_t columns, int rows,
                                  int count, float (*out)[ROWS])
{
    if (count == 1)
        NAME(rows)(weight, x, columns, rows, 1, out);
    else if (count == 2)
        NAME(rows)(weight, x, columns, rows, 2, out);
    else
        NAME(rows)(weight, x, columns, rows, INPUTS, out);
}

FOR static void NAME(multiply)(const int8_t *weight, const void *statistics, struct inputs x,
                               void *made, int64_t rows, int64_t out, int64_t columns, int told_in,
                               int kind)
{
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t first = 0; first < out; first += ROWS) {
        const int here = first + ROWS <= out ? ROWS : (int)(out - first);
        for (int64_t row = 0, count; row < rows; row += count) {
            const struct inputs some = {x.codes + row * x.codes_of_row,
                                        x.scales + row * x.groups, x.codes_of_row, x.groups};
            float products[INPUTS][ROWS];
            count = rows - row >= INPUTS ? INPUTS : rows - row >= 2 ? 2 : 1;
            if (here == ROWS)
                NAME(some)(weight + first * columns, some, columns, ROWS, (int)count, products);
            else
                NAME(some)(weight + first * columns, some, columns, here, (int)count, products);
            for (int m = 0; m < count; m++)
                for (int r = 0; r < here; r++)
                    store(products[m][r] * told(statistics, first + r, told_in), made,
                          (row + m) * out + first + r, kind);
        }
    }
}
