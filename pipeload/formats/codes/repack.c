/* Codes as other programs lay them out in words of 32 bits, put one row of a weight after the other:
 * what our kernels read. Of 4 bits, a byte holds columns 2 c (low half) and 2 c + 1; of 8 bits, less
 * 128. Words hold neighbouring columns the lowest bits first, and so do bytes of a row, so a word
 * that holds some columns of one row is never taken apart unless columns change places.
 *
 * [Note: tiles] Stored words of neighbouring rows lie side by side, those of neighbouring columns in
 * other pages. A tile takes several lines of a page while it is there, and gives whole lines.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2","default")))
#else
#define FOR_EACH_CPU
#endif

enum { LINE = 16, CODES = 8, ROWS = 128, WORDS = 32 };

int supported(void) {
    const uint16_t one = 1;
    return *(const uint8_t *)&one == 1; /* little-endian */
}

/* Writes a tile [row][word] of a weight whose rows have `words` words. */
static void put(uint32_t tile[][LINE], int64_t rows, int64_t count, uint32_t *out, int64_t words) {
    if (count == LINE) { /* of a size that the compiler knows */
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + row * words, tile[row], sizeof tile[row]);
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        memcpy(out + row * words, tile[row], count * sizeof(uint32_t));
}

/* Codes of fewer than 4 bits become codes of 4 whose middle is 8. */
static uint32_t moved_up(int bits) {
    return 8 - (1u << (bits - 1));
}

/* Makes word `word` of each of so many rows, of codes of at most 4 bits that lie one behind the other
 * in words [][rows]. Of 3 bits, some lie in two words. */
FOR_EACH_CPU static void gather(const uint32_t *in, const int32_t *order, int64_t word, uint32_t *made,
                                int64_t height, int64_t rows, int bits) {
    const uint32_t mask = (1u << bits) - 1, up = moved_up(bits);
    memset(made, 0, height * sizeof(uint32_t));
    for (int64_t i = 0; i < CODES; i++) {
        const int64_t code = word * CODES + i, bit = (order == NULL ? code : order[code]) * bits;
        const uint32_t *line = in + bit / 32 * rows;
        const int shift = bit % 32, place = 4 * (int)i;
        if (shift + bits <= 32) {
            for (int64_t r = 0; r < height; r++)
                made[r] |= ((line[r] >> shift & mask) + up) << place;
        } else {
            const uint32_t *next = line + rows;
            for (int64_t r = 0; r < height; r++)
                made[r] |= (((line[r] >> shift | next[r] << (32 - shift)) & mask) + up) << place;
        }
    }
}

/* Of words [][rows], with columns of one row: GPTQ's. `order`: where each column lies among the stored
 * ones, of at most 4 bits; none where they are in order. `words`: of a row that is made. `flip` is
 * xored to all of those. `bits`: of a stored code. */
FOR_EACH_CPU void down(const uint32_t *in, const int32_t *order, uint32_t *out, int64_t rows, int64_t words,
          uint32_t flip, int bits) {
    uint32_t tile[ROWS][LINE];
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t height = rows - row < ROWS ? rows - row : ROWS;
        for (int64_t word = 0; word < words; word += LINE) {
            const int64_t width = words - word < LINE ? words - word : LINE;
            for (int64_t w = 0; w < width; w++) {
                uint32_t made[ROWS];
                const uint32_t *words_of = in + (word + w) * rows + row;
                if (order != NULL || bits < 4) {
                    gather(in + row, order, word + w, made, height, rows, bits);
                    words_of = made;
                }
                for (int64_t r = 0; r < height; r++)
                    tile[r][w] = words_of[r] ^ flip;
            }
            put(tile, height, width, out + row * words + word, words);
        }
    }
}

/* Of words [columns][rows / 8] with codes of 8 rows of one column, of 4 bits: AWQ's. `places`: which
 * code of a word is that of its first row, and so on. `words` is columns / 8; for `flip` see `down`. */
FOR_EACH_CPU void across(const uint32_t *in, const int32_t *places, uint32_t *out, int64_t rows, int64_t words,
            uint32_t flip) {
    static const uint32_t masks[] = {0x0000FFFF, 0x00FF00FF, 0x0F0F0F0F};
    const int64_t stored = rows / CODES;
    uint32_t tile[WORDS * CODES][LINE];
    for (int64_t s = 0; s < stored; s += WORDS) {
        const int64_t height = stored - s < WORDS ? stored - s : WORDS;
        for (int64_t word = 0; word < words; word += LINE) {
            const int64_t width = words - word < LINE ? words - word : LINE;
            for (int64_t w = 0; w < width; w++) {
                uint32_t block[CODES][WORDS] = {{0}};
                for (int64_t i = 0; i < CODES; i++)
                    memcpy(block[i], in + ((word + w) * CODES + i) * stored + s,
                           height * sizeof(uint32_t));
                /* Transposed as a matrix of 8 x 8 codes, by halves: word i then has the codes of
                 * place i, of all columns. */
                for (int step = 0; step < 3; step++) {
                    const int apart = 4 >> step, shift = 4 * apart;
                    for (int i = 0; i < CODES; i++) {
                        if (i & apart)
                            continue;
                        for (int64_t l = 0; l < WORDS; l++) {
                            const uint32_t low = block[i][l], high = block[i + apart][l];
                            const uint32_t moved = (low >> shift ^ high) & masks[step];
                            block[i][l] = low ^ moved << shift;
                            block[i + apart][l] = high ^ moved;
                        }
                    }
                }
                for (int64_t l = 0; l < height; l++)
                    for (int64_t r = 0; r < CODES; r++)
                        tile[l * CODES + r][w] = block[places[r]][l] ^ flip;
            }
            put(tile, height * CODES, width, out + s * CODES * words + word, words);
        }
    }
}

/* A word of eight codes of `bits`, 1 to 3, that lie one behind the other from a byte on. */
static inline uint32_t spread(const uint8_t *from, int bits) {
    uint32_t made = 0;
    memcpy(&made, from, bits);
    for (int half = 4; half > 0; half /= 2) { /* 4 codes move as one, then 2, then each */
        const uint32_t all = 0xFFFFFFFFu / ((1ull << 8 * half) - 1), some = (1u << half * bits) - 1;
        made = (made & all * some) | (made & all * (some << half * bits)) << half * (4 - bits);
    }
    return made + 0x11111111u * moved_up(bits);
}

/* Of words [rows][], with columns of one row: compressed-tensors' and MLX's. See `down`; of fewer than
 * 4 bits, they have to be in order. */
FOR_EACH_CPU void along(const uint32_t *in, const int32_t *order, uint32_t *out, int64_t rows, int64_t words,
           uint32_t flip, int bits) {
    if (bits < 4) {
        const uint8_t *from = (const uint8_t *)in;
        if (bits == 2) { /* sizes that the compiler knows */
            for (int64_t word = 0; word < rows * words; word++)
                out[word] = spread(from + word * 2, 2);
        } else {
            for (int64_t word = 0; word < rows * words; word++)
                out[word] = spread(from + word * 3, 3);
        }
        return;
    }
    for (int64_t row = 0; row < rows; row++, in += words, out += words) {
        for (int64_t word = 0; word < words; word++) {
            uint32_t made = 0;
            if (order == NULL) {
                made = in[word];
            } else {
                for (int64_t i = 0; i < CODES; i++) {
                    const int64_t from = order[word * CODES + i];
                    made |= (in[from / CODES] >> 4 * (from % CODES) & 0xF) << 4 * i;
                }
            }
            out[word] = made ^ flip;
        }
    }
}
