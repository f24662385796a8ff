/* Weights in bfloat16 as the 4 and 8-bit blocks that they were rounded from: for `tiles.c`, which includes this.
 *
 * A GGUF file's weights are d q + m (4 bits) or d q (8 bits) by blocks of 32 inputs of an output, d and m in half
 * precision; in bfloat16 they are the nearest to that, or, of a large model that was kept in half precision meanwhile,
 * to the half that is nearest to that. `pack` finds halves and whole numbers that give back every
 * weight to the bit (but for the sign of zeros) where there are any: they need not be the file's. `unpacked` gives
 * back a step of a unit right before it is multiplied, so a forward reads a third or half of the bytes.
 *
 * An output's block fills a line of a tile: weights are the first factor here, an output a row. So a line of 4 bits
 * is 16 values (one fused multiply-add, half a rounding) that 32 words pick from (one permutation). By LLVM's tables
 * of Sapphire Rapids that and the shifts are 25 operations for 4 lines, at 2 a cycle some 3 cycles a line.
 */

/* A step of a unit: 32 outputs of 32 inputs.
 * FOUR: d [32], m [32], words [8, 32 inputs] whose nibbles are those of 4 outputs, the lowest the first's.
 * EIGHT: d [32], bytes [32, 32 inputs]. HALF: rounded to half precision first. TILES is bfloat16 (or int8) as tiles
 * take it, and no block. */
enum { TILES, FOUR, FOUR_HALF, EIGHT, EIGHT_HALF, FORMATS };
static const long STEP_BYTES[FORMATS] = {2048, 640, 640, 1088, 1088};

#define DEEP 32 /* inputs of a block */

/* Finding blocks. */

static inline float wide_half(uint16_t x) { return _cvtsh_ss(x); }
static inline float rounded(float x, int half) {
    return load_bf16(store_bf16(half ? wide_half(_cvtss_sh(x, 0)) : x)); /* to even, both times */
}
static inline float within(float x, float low, float high) { return x > low ? x < high ? x : high : low; }

/* The numbers halfway from a bfloat16 number to its neighbours: those between are rounded to it, and by way of half
 * precision some just beyond. */
static inline void around(float x, float *low, float *high, int half) {
    uint32_t bits, up, down;
    memcpy(&bits, &x, 4);
    if (!(bits & 0x7fffffffu)) {
        *low = *high = 0;
        return;
    }
    up = bits + 0x8000u, down = bits - 0x8000u;
    memcpy(low, x > 0 ? &down : &up, 4);
    memcpy(high, x > 0 ? &up : &down, 4);
    if (half) *low -= fabsf(x) * 0x1p-10f + 0x1p-25f, *high += fabsf(x) * 0x1p-10f + 0x1p-25f;
}

/* The halves from `low` to `high`, which have one sign: the first and how many (at most `most`), by size. */
static long halves(float low, float high, uint16_t *first, long most) {
    float small = fabsf(low) < fabsf(high) ? low : high, large = small == low ? high : low;
    if (!(low <= high) || low * high < 0 || !(fabsf(large) < 65520.0f)) return 0;
    uint16_t from = _cvtss_sh(small, 3), to = _cvtss_sh(large, 3); /* toward zero */
    if (wide_half(from) != small) from++;
    *first = from;
    return from > to ? 0 : to - from < most ? to - from + 1 : most;
}

/* Whether each of w is d q + m, rounded, for a whole q from 0 to 15; `hard` is the first one tried. */
static int four_fits(const float *w, int hard, float d, float m, int half, uint8_t *q) {
    float values[16], inverse = 1 / d;
    if (rounded(fmaf(d, rintf((w[hard] - m) * inverse), m), half) != w[hard]) return 0;
    for (int i = 0; i < 16; i++) values[i] = rounded(fmaf(d, (float)i, m), half);
    for (int i = 0; i < DEEP; i++) {
        int n = (int)rintf(within((w[i] - m) * inverse, 0, 15));
        if (values[n] != w[i]) { /* a rounding away */
            if (n && values[n - 1] == w[i]) n--;
            else if (n < 15 && values[n + 1] == w[i]) n++;
            else return 0;
        }
        q[i] = (uint8_t)n;
    }
    return 1;
}

/* A block whose least or greatest weight (`base`) has q = 0, and the other one q = `steps`. */
static int four_between(const float *w, int hard, float base, float far, int steps, int half, uint16_t *d,
                        uint16_t *m, uint8_t *q) {
    float low, high, end[2], inverse = (float)steps / (far - base);
    float slack = (2 * fabsf(base) + fabsf(far)) * fabsf(inverse) * 0x1p-8f + 0x1p-8f, wrong = 0;
    for (int i = 0; i < DEEP; i++) { /* steps of about this size? */
        float n = (w[i] - base) * inverse, off = fabsf(n - rintf(n)) - fabsf(w[i] * inverse) * 0x1p-8f;
        wrong = off > wrong ? off : wrong;
    }
    if (wrong > slack) return 0;
    uint16_t offset, scale;
    around(base, &low, &high, 0);
    long offsets = halves(low, high, &offset, 32);
    around(far, end, end + 1, half);
    for (long i = 0; i < offsets; i++) {
        float from = wide_half((uint16_t)(offset + i));
        if (rounded(from, 0) != base) continue;
        low = (end[0] - from) / (float)steps, high = (end[1] - from) / (float)steps;
        long scales = halves(low, high, &scale, 32);
        for (long k = 0; k < scales; k++) {
            *m = (uint16_t)(offset + i), *d = (uint16_t)(scale + k);
            if (four_fits(w, hard, wide_half(*d), from, half, q)) return 1;
        }
    }
    return 0;
}

static int four(const float *w, int half, uint16_t *d, uint16_t *m, uint8_t *q) {
    float low = w[0], high = w[0];
    int hard = 0;
    for (int i = 1; i < DEEP; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
        if (w[i] != 0 && (w[hard] == 0 || fabsf(w[i]) < fabsf(w[hard]))) hard = i; /* rounded the least */
    }
    if (low == high) {
        *d = 0, *m = _cvtss_sh(low, 0);
        memset(q, 0, DEEP);
        return rounded(wide_half(*m), 0) == low;
    }
    for (int steps = 15; steps; steps--)
        if (four_between(w, hard, low, high, steps, half, d, m, q) ||
            four_between(w, hard, high, low, steps, half, d, m, q))
            return 1;
    return 0;
}

static inline __attribute__((always_inline)) int eight(const float *w, const int half, uint16_t *d, int8_t *q) {
    float far = 0, low, high;
    for (int i = 0; i < DEEP; i++) far = fabsf(w[i]) > far || w[i] != w[i] ? fabsf(w[i]) : far;
    around(far, &low, &high, half);
    for (int steps = 127; steps < 129; steps++) {
        uint16_t first = 0;
        long scales = far ? halves(low / (float)steps, high / (float)steps, &first, 32) : 1;
        for (long k = 0; k < scales; k++) {
            float scale = wide_half((uint16_t)(first + k)), inverse = far ? 1 / scale : 0;
            int wrong = 0;
            for (int i = 0; i < DEEP; i++) {
                float n = rintf(within(w[i] * inverse, -128, 127));
                if (half && rounded(scale * n, half) != w[i]) /* two roundings may be half a step */
                    n = within(n + (rounded(scale * n, half) < w[i] ? 1 : -1), -128, 127);
                wrong |= rounded(scale * n, half) != w[i];
                q[i] = (int8_t)n;
            }
            *d = (uint16_t)(first + k);
            if (!wrong) return 1;
        }
    }
    return 0;
}

/* Bytes of a unit of `in` inputs. */
long unit_bytes(long in, long format) { return in / DEEP * STEP_BYTES[format]; }

/* w [rows, in], in a multiple of 32, into `to` (zeroed); 0 where some weight is not in such a block. */
int pack(const bf16 *w, long rows, long in, long format, char *to) {
    for (long row = 0; row < rows; row++)
        for (long k = 0; k < in; k += DEEP) {
            long o = row % 32;
            char *step = to + row / 32 * unit_bytes(in, format) + k / DEEP * STEP_BYTES[format];
            uint16_t *d = (uint16_t *)step + o;
            float block[DEEP];
            uint8_t q[DEEP];
            for (int i = 0; i < DEEP; i++) block[i] = load_bf16(w[row * in + k + i]);
            if (format >= EIGHT) {
                int8_t *bytes = (int8_t *)step + 64 + o * DEEP;
                if (!(format == EIGHT ? eight(block, 0, d, bytes) : eight(block, 1, d, bytes))) return 0;
                continue;
            }
            if (!four(block, format == FOUR_HALF, d, d + 32, q)) return 0;
            uint16_t *words = (uint16_t *)(step + 128 + o / 4 * 64);
            for (int i = 0; i < DEEP; i++) words[i] |= (uint16_t)(q[i] << 4 * (o % 4));
        }
    return 1;
}

/* Giving them back. */

static inline void scales(const char *from, float *to) {
    for (int i = 0; i < 32; i += 16)
        _mm512_store_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(from + 2 * i))));
}

static inline __m512i both(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

/* Steps as bfloat16 [32 outputs, 32 inputs]. */

#define UNPACK static inline __attribute__((always_inline))

/* To half precision and back, where that is how the weights came. */
UNPACK __m512 by_way(const int half, __m512 x) {
    return half ? _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) : x;
}

UNPACK void unpack_bytes(const int by_half, const char *from, char *to) {
    float d[32] __attribute__((aligned(64)));
    scales(from, d);
#pragma GCC unroll 4
    for (int o = 0; o < 32; o++) {
        const char *bytes = from + 64 + o * DEEP;
        __m512 part[2];
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512i whole = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(bytes + 16 * h)));
            part[h] = by_way(by_half, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(d[o])));
        }
        _mm512_store_si512(to + o * 64, both(part[1], part[0]));
    }
}

UNPACK void unpack_nibbles(const int by_half, const char *from, char *to) {
    float d[32] __attribute__((aligned(64))), m[32] __attribute__((aligned(64)));
    scales(from, d);
    scales(from + 64, m);
    const __m512 steps = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i nibbles = _mm512_set1_epi16(0x0f0f), second = _mm512_set1_epi16(0x1000);
#pragma GCC unroll 2
    for (int o = 0; o < 32; o += 4, to += 256) {
        __m512 value[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            value[i] = by_way(by_half, _mm512_fmadd_ps(steps, _mm512_set1_ps(d[o + i]), _mm512_set1_ps(m[o + i])));
        /* Words 0 to 15 hold the values of one output, 16 to 31 those of the next but one. */
        __m512i even = both(value[2], value[0]), odd = both(value[3], value[1]);
        __m512i word = _mm512_load_si512(from + 128 + o * 16);
        __m512i low = _mm512_ternarylogic_epi32(word, nibbles, second, 0xea); /* a & b | c */
        __m512i high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(word, 4), nibbles, second, 0xea);
        _mm512_store_si512(to, _mm512_permutexvar_epi16(low, even)); /* of an index 5 bits count */
        _mm512_store_si512(to + 64, _mm512_permutexvar_epi16(high, odd));
        _mm512_store_si512(to + 128, _mm512_permutexvar_epi16(_mm512_srli_epi16(low, 8), even));
        _mm512_store_si512(to + 192, _mm512_permutexvar_epi16(_mm512_srli_epi16(high, 8), odd));
    }
}

static __attribute__((noinline)) void unpack(long format, const char *from, char *to) {
    switch (format) {
    case FOUR: unpack_nibbles(0, from, to); break;
    case FOUR_HALF: unpack_nibbles(1, from, to); break;
    case EIGHT: unpack_bytes(0, from, to); break;
    default: unpack_bytes(1, from, to);
    }
}

/* `count` steps of units, one after the other, as bfloat16: for tests. `from` and `to` are aligned to 64 bytes. */
void steps_of(const char *from, long count, long format, char *to) {
    for (long i = 0; i < count; i++) unpack(format, from + i * STEP_BYTES[format], to + i * STEP_BYTES[TILES]);
}

/* to[i][k] = from[k][i], 16 x 16 words of 32 bits; strides in words. */
static void transpose(const void *from, long from_stride, void *to, long to_stride) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512((const uint32_t *)from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* a[i + c]: of each 4 words those at c, of rows i to i + 3 */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44);
        b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
        b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
        b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        uint32_t *out = (uint32_t *)to + c * to_stride;
        _mm512_storeu_si512(out, _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88));
        _mm512_storeu_si512(out + 4 * to_stride, _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd));
        _mm512_storeu_si512(out + 8 * to_stride, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88));
        _mm512_storeu_si512(out + 12 * to_stride, _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd));
    }
}
