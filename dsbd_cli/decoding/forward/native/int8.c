/* Products of 4-bit blocks with activations of 8 bits: for `simd.c`, which includes this.
 *
 * A row of x has one float32 size; of each 32 inputs those 0 and 1 of every 4, and those 2 and 3, have a whole
 * number of 32767ths of it for their scale. So nibbles times bytes of x, sums of them in 16 bits (16 x 15 x 127
 * fits) and one product with both scales in 32 bits are whole numbers: exact, in whatever order. Only blocks
 * are added up in float32, one by one. What that rounds is about what bfloat16 does (docs/speed.md).
 */

#define NARROW_BLOCK 32
#define STEPS 32767 /* of a row's size */

typedef struct {
    int8_t x[NARROW_BLOCK]; /* in the order of the inputs */
    int16_t scale[2];       /* of inputs 0 and 1, 2 and 3 of each 4 */
    float sum;              /* of all x times their scales */
} narrow;

typedef uint8_t vb __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef int16_t vs __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef float f8 __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), may_alias, aligned(4)));

INLINE f8 size_of(f8 x) { return (f8)((i8)x & 0x7fffffff); }
INLINE f8 larger(f8 a, f8 b) {
    i8 first = a > b;
    return (f8)((first & (i8)a) | (~first & (i8)b));
}

/* The last bytes of 32 whole numbers that a byte holds. */
INLINE void bytes_of(const i8 *from, int8_t *to) {
#if defined(__AVX2__)
    __m256i a = _mm256_packs_epi32((__m256i)from[0], (__m256i)from[1]);
    __m256i b = _mm256_packs_epi32((__m256i)from[2], (__m256i)from[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((void *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
    for (int i = 0; i < NARROW_BLOCK; i++) to[i] = (int8_t)from[i / 8][i % 8];
#endif
}

/* A row of x, block by block; its size, in 32767ths of 127ths. */
static float narrowed(const float *x, long in, narrow *to) {
    f8 far = {0};
    i8 wrong = {0};
    float most = 0;
    for (long k = 0; k < in; k += 8) {
        f8 now = *(const f8 *)(x + k);
        far = larger(size_of(now), far);
        wrong |= now != now;
    }
    for (int j = 0; j < 8; j++) most = wrong[j] ? NAN : far[j] > most ? far[j] : most;
    if (!(most > 1e-30f && most < INFINITY)) {
        memset(to, 0, (size_t)(in / NARROW_BLOCK) * sizeof *to);
        return most * 0; /* nothing next to nothing; what is no number stays none */
    }
    const float size = most / (127.0f * STEPS), steps = STEPS / most;
    for (long k = 0; k < in; k += NARROW_BLOCK, x += NARROW_BLOCK, to++) {
        f8 part[4], sum = {0};
        for (int i = 0; i < 4; i++) part[i] = *(const f8 *)(x + 8 * i);
        f8 top = larger(larger(size_of(part[0]), size_of(part[1])), larger(size_of(part[2]), size_of(part[3])));
        top = larger(top, __builtin_shuffle(top, (i8){1, 0, 3, 2, 5, 4, 7, 6}));
        top = larger(top, __builtin_shuffle(top, (i8){4, 5, 6, 7, 0, 1, 2, 3}));
        i8 scale = __builtin_convertvector(top * steps, i8) + 1; /* so that no x is beyond 127 */
        scale = (scale > STEPS) + scale;
        f8 times = __builtin_convertvector(scale, f8), by = 1.0f / (size * times);
        i8 whole[4];
        for (int i = 0; i < 4; i++) {
            f8 rounded = part[i] * by + 0x1.8p23f - 0x1.8p23f; /* to even */
            whole[i] = __builtin_convertvector(rounded, i8);
            sum += rounded;
        }
        bytes_of(whole, to->x);
        sum *= times;
        to->sum = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
        to->scale[0] = (int16_t)scale[0], to->scale[1] = (int16_t)scale[2];
    }
    return size;
}

/* Of each 4 bytes a0 b0 + a1 b1, and a2 b2 + a3 b3. */
INLINE vs pairs(vb a, const int8_t *four) {
    int32_t b;
    memcpy(&b, four, 4);
#if defined(__AVX512BW__)
    return (vs)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif VL == 8 && defined(__AVX2__)
    return (vs)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
    vs out;
    for (int i = 0; i < VL * 2; i++) out[i] = (int16_t)(a[2 * i] * four[i % 2 * 2] + a[2 * i + 1] * four[i % 2 * 2 + 1]);
    return out;
#endif
}

/* Of each 2 a0 b0 + a1 b1. */
INLINE vi both(vs a, const int16_t *two) {
    int32_t b;
    memcpy(&b, two, 4);
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif VL == 8 && defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
    vi out;
    for (int i = 0; i < VL; i++) out[i] = a[2 * i] * two[0] + a[2 * i + 1] * two[1];
    return out;
#endif
}

#define NARROW_VECTORS (V > 2 ? V : 2)
#if VL == 16
#define NARROW_GROUP 8 /* rows of x that one pass over two vectors of weights serves: what the registers hold */
#else
#define NARROW_GROUP 4
#endif

/* out [N, 16 A] (rows `wide` floats apart) = N rows (`in` / 32 blocks each) times A units of Q4 weights. */
INLINE void narrow_units(const int A, const int N, const char *weight, const narrow *x, const float *size, long in,
                         float *out, long wide) {
    const long blocks = in / NARROW_BLOCK, unit = unit_bytes(Q4, in);
    vf sum[NARROW_VECTORS][NARROW_GROUP];
#pragma GCC unroll 4
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[c][n] = (vf){0};
    for (long k = 0; k < blocks; k++, weight += BYTES[Q4], x++) {
        vs total[NARROW_VECTORS][NARROW_GROUP];
#pragma GCC unroll 4
        for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) total[c][n] = (vs){0};
#pragma GCC unroll 1
        for (int word = 0; word < 4; word++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vb nibble[NARROW_VECTORS];
#pragma GCC unroll 4
                for (int c = 0; c < A * V; c++) {
                    vu bits = *(const vu *)(weight + c / V * unit + 64 + word * 64 + c % V * VL * 4);
                    nibble[c] = (vb)((half ? bits >> 4 : bits) & 0x0f0f0f0fu);
                }
#pragma GCC unroll 16
                for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                    for (int c = 0; c < A * V; c++)
                        total[c][n] += pairs(nibble[c], x[n * blocks].x + 8 * word + 4 * half);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < A * V; c++) {
            const uint16_t *scales = (const uint16_t *)(weight + c / V * unit) + c % V * VL;
            vf d = halves(scales), m = halves(scales + 16);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                vf all = __builtin_convertvector(both(total[c][n], x[n * blocks].scale), vf);
                sum[c][n] = fused(spread(x[n * blocks].sum), m, fused(all, d, sum[c][n]));
            }
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) *(vf_any *)(out + n * wide + c * VL) = sum[c][n] * spread(size[n]);
}

#define NARROW_CASE(N)                                                   \
    case N:                                                              \
        narrow_units(A, N, weight, x, size, in, out, wide);              \
        break;
#define NARROW_FUNCTION(A_)                                                                                       \
    static void narrow_##A_(long rows, const char *weight, const narrow *x, const float *size, long in, float *out, \
                            long wide) {                                                                          \
        enum { A = A_ };                                                                                          \
        switch (rows) {                                                                                           \
            NARROW_CASE(1) NARROW_CASE(2) NARROW_CASE(3) NARROW_CASE(4)            \
            NARROW_MORE                                                                                           \
        }                                                                                                         \
    }
#if NARROW_GROUP > 4
#define NARROW_MORE NARROW_CASE(5) NARROW_CASE(6) NARROW_CASE(7) NARROW_CASE(8)
#else
#define NARROW_MORE
#endif
NARROW_FUNCTION(1)
#if V == 1
NARROW_FUNCTION(2)
#endif

/* out [count, 16 units] = x [count, in] times `units` units of Q4 weights. */
static void narrow_chunk(const char *weight, long units, const narrow *x, const float *size, long in, long count,
                         float *out) {
    long unit = unit_bytes(Q4, in), wide = units * UNIT, blocks = in / NARROW_BLOCK;
    long groups = up(count, NARROW_GROUP) / NARROW_GROUP;
    for (long u = 0, now; u < units; u += now, weight += now * unit, out += now * UNIT) {
        now = V == 1 && u + 2 <= units ? 2 : 1;
        for (long g = 0; g < groups; g++) {
            long first = count * g / groups, last = count * (g + 1) / groups;
            const narrow *rows = x + first * blocks;
            float *to = out + first * wide;
#if V == 1
            if (now == 2) {
                narrow_2(last - first, weight, rows, size + first, in, to, wide);
                continue;
            }
#endif
            narrow_1(last - first, weight, rows, size + first, in, to, wide);
        }
    }
}

/* What a product multiplies: rows x [count, in], or those in bytes with their sizes. */
typedef struct {
    const float *x, *size;
    const narrow *narrow;
} input;

/* Bytes that `input_of` needs. */
static long narrow_bytes(long count, long in) {
    return up(count * (up(in, NARROW_BLOCK) / NARROW_BLOCK) * (long)sizeof(narrow) + count * 4, 64);
}

/* x as `w` is multiplied with: in bytes where that is wanted (`own`, with room for them) and it can be. */
static input input_of(const linear *w, const float *x, long count, char *own) {
    if (!own || w->format != Q4) return (input){x, NULL, NULL};
    long blocks = w->in / NARROW_BLOCK;
    narrow *to = (narrow *)own;
    float *size = (float *)(to + count * blocks);
    for (long n = 0; n < count; n++) size[n] = narrowed(x + n * w->in, w->in, to + n * blocks);
    return (input){x, size, to};
}
