/* What product.c includes once for each kind of processor: FOR says which, ADD_PRODUCTS how products
   of int16 are added to int32, and NAME what things are called. */

/* Four rows of the weight times `count` rows of input, at most two. What comes next is fetched, as the
   processor would not see it coming: four times from row to row. */
FOR static INLINE void NAME(rows)(const uint8_t *weight, const void *statistics, int64_t first,
                                  int64_t stride, struct inputs x, int64_t columns, int64_t group,
                                  int kind, int count, float (*out)[ROWS])
{
    const __m256i mask = _mm256_set1_epi16(15);
    __m256 made[INPUTS][ROWS];
    __m128 shifted[INPUTS], scale[2], shift[2];
    for (int m = 0; m < count; m++) {
        shifted[m] = _mm_setzero_ps();
        for (int r = 0; r < ROWS; r++)
            made[m][r] = _mm256_setzero_ps();
    }
    for (int64_t start = 0, next; start < columns; start = next) {
        const int64_t g = start / group, at = g * stride + first;
        next = start + (group < BLOCK ? BLOCK : group);
        const int64_t last = group < BLOCK && next <= columns ? g + 1 : g;
        _mm_prefetch((const char *)statistics + (at + 2 * AHEAD) * item(kind), _MM_HINT_T0);
        for (int64_t i = 2 * start; i < 2 * next; i += 64)
            _mm_prefetch((const char *)weight + 2 * columns + i, _MM_HINT_T0);
        told(statistics, at, kind, scale, shift);
        told(statistics, last * stride + first, kind, scale + 1, shift + 1);
        __m128 low[INPUTS], high[INPUTS];
        for (int m = 0; m < count; m++) {
            const float *const scales = x.scales + m * x.groups, *const sums = x.sums + m * x.groups;
            low[m] = _mm_mul_ps(scale[0], _mm_set1_ps(scales[g]));
            high[m] = _mm_mul_ps(scale[1], _mm_set1_ps(scales[last]));
            shifted[m] = _mm_fmadd_ps(shift[0], _mm_set1_ps(sums[g]), shifted[m]);
            if (last > g)
                shifted[m] = _mm_fmadd_ps(shift[1], _mm_set1_ps(sums[last]), shifted[m]);
        }
        for (int r = 0; r < ROWS; r++) {
            __m256i sum[INPUTS] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
            for (int64_t i = start; i < next; i += BLOCK) {
                const uint8_t *const bytes = weight + (r * columns + i) / 2;
                const __m256i words =
                    i + BLOCK <= columns
                        ? _mm256_loadu_si256((const __m256i *)bytes)
                        : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
                const __m256i q[4] = {_mm256_and_si256(words, mask),
                                      _mm256_and_si256(_mm256_srli_epi16(words, 4), mask),
                                      _mm256_and_si256(_mm256_srli_epi16(words, 8), mask),
                                      _mm256_srli_epi16(words, 12)};
                for (int m = 0; m < count; m++)
                    for (int k = 0; k < 4; k++) {
                        const int16_t *const codes = x.codes + m * x.codes_of_row + i + 16 * k;
                        const __m256i four = _mm256_loadu_si256((const __m256i *)codes);
                        sum[m] = ADD_PRODUCTS(sum[m], q[k], four);
                    }
            }
            for (int m = 0; m < count; m++)
                made[m][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[m]),
                                             lanes(low[m], high[m], r), made[m][r]);
        }
    }
    for (int m = 0; m < count; m++) {
        _mm_storeu_ps(out[m], shifted[m]);
        for (int r = 0; r < ROWS; r++)
            out[m][r] += sum_of(made[m][r]);
    }
}

/* The same, compiled for each size of a group. */
FOR static void NAME(some)(const uint8_t *weight, const void *statistics, int64_t first,
                           int64_t out, struct inputs x, int64_t columns, int64_t group,
                           int told_in, int count, float (*products)[ROWS])
{
#define MULTIPLY(GROUP, KIND, COUNT)                                                               \
    NAME(rows)(weight + first * columns / 2, statistics, 2 * first, 2 * out, x, columns, GROUP,    \
               KIND, COUNT, products)
#define MULTIPLY_FOR(GROUP, KIND)                                                                  \
    do {                                                                                           \
        if (count == 1)                                                                            \
            MULTIPLY(GROUP, KIND, 1);                                                              \
        else                                                                                       \
            MULTIPLY(GROUP, KIND, INPUTS);                                                         \
    } while (0)
    if (told_in != BFLOAT16)
        MULTIPLY_FOR(group, told_in);
    else if (group == 32)
        MULTIPLY_FOR(32, BFLOAT16);
    else if (group == 64)
        MULTIPLY_FOR(64, BFLOAT16);
    else
        MULTIPLY_FOR(128, BFLOAT16);
#undef MULTIPLY
#undef MULTIPLY_FOR
}

FOR static void NAME(multiply)(const uint8_t *weight, const void *statistics,
                               const int16_t *codes, const float *scales, const float *sums,
                               void *made, int64_t rows, int64_t out, int64_t columns,
                               int64_t group, int told_in, int kind)
{
    const int64_t padded = (columns + BLOCK - 1) / BLOCK * BLOCK, groups = columns / group;
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t n = 0; n < (out + ROWS - 1) / ROWS; n++) {
        /* The last ones overlap those before, which get the same numbers twice. */
        const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
        for (int64_t row = 0; row < rows; row += INPUTS) {
            const int count = row + INPUTS <= rows ? INPUTS : 1;
            const struct inputs x = {codes + row * padded, scales + row * groups,
                                     sums + row * groups, padded, groups};
            float products[INPUTS][ROWS];
            NAME(some)(weight, statistics, first, out, x, columns, group, told_in, count, products);
            for (int m = 0; m < count; m++)
                for (int r = 0; r < ROWS; r++)
                    store(products[m][r], made, (row + m) * out + first + r, kind);
        }
    }
}

/* All rows that were sent to some experts, those of one side by side. Threads take what comes next,
   so that one that waits for a core keeps nobody waiting. */
FOR static void NAME(multiply_sent)(const uint8_t *codes_of, const uint8_t *told_of,
                                    int64_t expert_bytes, const struct sent *sent, int64_t count,
                                    const int16_t *codes, const float *scales, const float *sums,
                                    void *made, int64_t out, int64_t columns, int64_t group,
                                    int told_in, int kind)
{
    const int64_t padded = (columns + BLOCK - 1) / BLOCK * BLOCK, groups = columns / group;
    const int64_t blocks = (out + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, TASKS) if (count * out * columns >= LEAST_PRODUCTS)
    for (int64_t task = 0; task < count * blocks; task++) {
        const int64_t begin = task / blocks, n = task % blocks, expert = sent[begin].expert;
        const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
        if (begin && sent[begin - 1].expert == expert)
            continue; /* goes with the one before */
        for (int64_t i = begin; i < count && sent[i].expert == expert; i += INPUTS) {
            const int two = i + 1 < count && sent[i + 1].expert == expert;
            const int64_t row = sent[i].input, step = two ? sent[i + 1].input - row : 0;
            const struct inputs x = {codes + row * padded, scales + row * groups,
                                     sums + row * groups, step * padded, step * groups};
            float products[INPUTS][ROWS];
            NAME(some)(codes_of + expert * expert_bytes, told_of + expert * expert_bytes, first,
                       out, x, columns, group, told_in, 1 + two, products);
            for (int m = 0; m <= two; m++)
                for (int r = 0; r < ROWS; r++)
                    store(products[m][r], made, sent[i + m].made * out + first + r, kind);
        }
    }
}
