/* What product.c includes once for each kind of processor: FOR says which, WORDS are two blocks
   there, and NAME what things are called. */

/* What products of a block are multiplied by: one number, or two in halves. */
FOR static INLINE __m256 NAME(lanes)(float (*by)[ROWS], int block, int r, int64_t group, int groups)
{
    if (group >= BLOCK)
        return _mm256_broadcast_ss(by[block] + r);
    const int last = 2 * block + 1 < groups ? 2 * block + 1 : 2 * block;
    return _mm256_blend_ps(_mm256_broadcast_ss(by[2 * block] + r), _mm256_broadcast_ss(by[last] + r),
                           0xF0);
}

/* Four rows of the weight times `count` rows of input. What comes next is fetched, into the larger
   cache, as the processor would not see it coming: four times from row to row. */
FOR static INLINE void NAME(rows)(const uint8_t *weight, const void *statistics, int64_t first,
                                  int64_t stride, struct inputs x, int64_t columns, int64_t group,
                                  int kind, int count, float (*out)[ROWS])
{
    __m256 made[INPUTS][ROWS];
    __m128 shifted[INPUTS];
    float by[INPUTS][MOST_GROUPS][ROWS];
    for (int m = 0; m < count; m++) {
        shifted[m] = _mm_setzero_ps();
        for (int r = 0; r < ROWS; r++)
            made[m][r] = _mm256_setzero_ps();
    }
    for (int64_t start = 0; start < columns; start += PAIR) {
        const int64_t g = start / group, left = columns - start;
        const int whole = left >= PAIR, two = left > BLOCK; /* blocks */
        const int groups = (int)(whole ? PAIR / group : left / group);
        for (int64_t i = 2 * start; i < 2 * (start + PAIR); i += 64)
            _mm_prefetch((const char *)weight + FETCHED + i, _MM_HINT_T1);
        for (int n = 0; n < groups; n++) {
            const int64_t at = (g + n) * stride + first;
            __m128 scale, shift;
            _mm_prefetch((const char *)statistics + (at + 2 * AHEAD) * item(kind), _MM_HINT_T0);
            told(statistics, at, kind, &scale, &shift);
            for (int m = 0; m < count; m++) {
                const float scale_of = x.scales[m * x.groups + g + n];
                const float sum_of = x.sums[m * x.groups + g + n];
                _mm_storeu_ps(by[m][n], _mm_mul_ps(scale, _mm_set1_ps(scale_of)));
                shifted[m] = _mm_fmadd_ps(shift, _mm_set1_ps(sum_of), shifted[m]);
            }
        }
        __asm__ volatile("" : "+m"(by)); /* from memory, spreading a number over lanes is free */
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *const bytes = weight + (r * columns + start) / 2;
            const WORDS words = NAME(words)(bytes, whole ? PAIR / 2 : left / 2);
            WORDS sum[INPUTS];
            for (int m = 0; m < count; m++)
                sum[m] = NAME(none)();
            for (int k = 0; k < 4; k++) {
                const WORDS q = NAME(cut)(words, k);
                for (int m = 0; m < count; m++)
                    sum[m] = NAME(added)(sum[m], q, x.codes + m * x.codes_of_row + start + 32 * k);
            }
            for (int m = 0; m < count; m++) {
                __m256i low = NAME(half)(sum[m], 0);
                const __m256i high = NAME(half)(sum[m], 1);
                if (group == PAIR)
                    low = _mm256_add_epi32(low, high);
                made[m][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(low),
                                             NAME(lanes)(by[m], 0, r, group, groups), made[m][r]);
                if (group < PAIR && two)
                    made[m][r] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(high),
                                        NAME(lanes)(by[m], 1, r, group, groups), made[m][r]);
            }
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
        else if (count == 2)                                                                       \
            MULTIPLY(GROUP, KIND, 2);                                                              \
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
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR, groups = columns / group;
#pragma omp parallel for schedule(static) if (rows * out * columns >= LEAST_PRODUCTS)
    for (int64_t n = 0; n < (out + ROWS - 1) / ROWS; n++) {
        /* The last ones overlap those before, which get the same numbers twice. */
        const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
        for (int64_t row = 0, count; row < rows; row += count) {
            count = rows - row >= INPUTS ? INPUTS : rows - row >= 2 ? 2 : 1;
            const struct inputs x = {codes + row * padded, scales + row * groups,
                                     sums + row * groups, padded, groups};
            float products[INPUTS][ROWS];
            NAME(some)(weight, statistics, first, out, x, columns, group, told_in, (int)count,
                       products);
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
    const int64_t padded = (columns + PAIR - 1) / PAIR * PAIR, groups = columns / group;
    const int64_t blocks = (out + ROWS - 1) / ROWS;
#pragma omp parallel for schedule(dynamic, TASKS) if (count * out * columns >= LEAST_PRODUCTS)
    for (int64_t task = 0; task < count * blocks; task++) {
        const int64_t begin = task / blocks, n = task % blocks, expert = sent[begin].expert;
        const int64_t first = n * ROWS + ROWS <= out ? n * ROWS : out - ROWS;
        if (begin && sent[begin - 1].expert == expert)
            continue; /* goes with the one before */
        for (int64_t i = begin, together; i < count && sent[i].expert == expert; i += together) {
            const int64_t row = sent[i].input;
            const int two = i + 1 < count && sent[i + 1].expert == expert;
            const int64_t step = two ? sent[i + 1].input - row : 0;
            for (together = 1 + two; two && together < INPUTS; together++)
                if (i + together >= count || sent[i + together].expert != expert ||
                    sent[i + together].input - row != together * step)
                    break;
            together = together < INPUTS ? 1 + two : INPUTS;
            const struct inputs x = {codes + row * padded, scales + row * groups,
                                     sums + row * groups, step * padded, step * groups};
            float products[INPUTS][ROWS];
            NAME(some)(codes_of + expert * expert_bytes, told_of + expert * expert_bytes, first,
                       out, x, columns, group, told_in, (int)together, products);
            for (int m = 0; m < together; m++)
                for (int r = 0; r < ROWS; r++)
                    store(products[m][r], made, sent[i + m].made * out + first + r, kind);
        }
    }
}
