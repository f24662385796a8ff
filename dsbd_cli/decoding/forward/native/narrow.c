/* Rows of x as bytes, for products with narrow weights: for `int8.c`, which includes this.
 *
 * A row has one float32 size; of each 32 inputs two halves have a whole number of 32767ths of it for their scale.
 * Which inputs are a half is what the processor's products make cheap: where it adds up four products of bytes at
 * once (QUADS) inputs 0 to 3 of each 8 are one and 4 to 7 the other, elsewhere 0 and 1 of each 4, and 2 and 3.
 */

#define SPAN 32
#define STEPS 32767 /* of a row's size */

#if (defined(__AVX512VNNI__) && VL == 16) || (defined(__AVXVNNI__) && VL == 8) || defined(FOURS)
#define QUADS 1 /* FOURS: for tests, where no processor has such products */
#define LEFT ((i8){0, 2, 8, 10, 4, 6, 12, 14}) /* lanes of four blocks that meet */
#define RIGHT ((i8){1, 3, 9, 11, 5, 7, 13, 15})
#define HALVES(b) ((i8){b, b, b, b, (b) + 4, (b) + 4, (b) + 4, (b) + 4})
#else
#define QUADS 0
#define LEFT ((i8){0, 2, 8, 10, 1, 3, 9, 11})
#define RIGHT ((i8){4, 6, 12, 14, 5, 7, 13, 15})
#define HALVES(b) ((i8){b, b, (b) + 4, (b) + 4, b, b, (b) + 4, (b) + 4})
#endif

typedef struct {
    int8_t x[SPAN];  /* in the order of the inputs */
    int16_t scale[2]; /* of the halves; with QUADS the other one first */
    float sum;        /* of all x times their scales */
#if QUADS
    float times[2];   /* the scales, in order */
    int32_t start[2]; /* -128 times the sum of a half's x: what bytes of weights 128 too large begin from */
    int32_t unused[2];
#endif
} narrow;

typedef float f8 __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t i8 __attribute__((vector_size(32), may_alias, aligned(4)));
typedef int32_t i4 __attribute__((vector_size(16), may_alias, aligned(4)));
typedef float f4 __attribute__((vector_size(16), may_alias, aligned(4)));
typedef int64_t i2 __attribute__((vector_size(16), may_alias, aligned(4)));

/* As whole numbers, which compare like them; what is no number is larger than any. */
INLINE i8 size_of(const float *x) { return *(const i8 *)x & 0x7fffffff; }
INLINE i8 larger(i8 a, i8 b) {
#if defined(__AVX2__)
    return (i8)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    i8 first = a > b;
    return (first & a) | (~first & b);
#endif
}
INLINE i8 plus(i8 a, i8 b) { return a + b; }
INLINE i8 nearest(f8 x) { /* halves to even */
#if defined(__AVX__)
    return (i8)_mm256_cvtps_epi32((__m256)x);
#else
    return __builtin_convertvector(x + 0x1.8p23f - 0x1.8p23f, i8);
#endif
}

/* The last bytes of 32 whole numbers that a byte holds. */
INLINE void bytes_of(const i8 *from, int8_t *to) {
#if defined(__AVX2__)
    __m256i a = _mm256_packs_epi32((__m256i)from[0], (__m256i)from[1]);
    __m256i b = _mm256_packs_epi32((__m256i)from[2], (__m256i)from[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((void *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
#else
    for (int i = 0; i < SPAN; i++) to[i] = (int8_t)from[i / 8][i % 8];
#endif
}

/* What lanes of a half come to, of four blocks: their first halves, then the others. */
#define MEET(OF, a)                                                                                       \
    OF(__builtin_shuffle(OF(MET(a, 0, EVEN), MET(a, 0, ODD)), OF(MET(a, 2, EVEN), MET(a, 2, ODD)), LEFT), \
       __builtin_shuffle(OF(MET(a, 0, EVEN), MET(a, 0, ODD)), OF(MET(a, 2, EVEN), MET(a, 2, ODD)), RIGHT))
#define MET(a, at, which) __builtin_shuffle(a[at], a[at + 1], which)
#define EVEN ((i8){0, 2, 8, 10, 4, 6, 12, 14})
#define ODD ((i8){1, 3, 9, 11, 5, 7, 13, 15})
INLINE i8 tops_of(const float *x, const int count) {
    i8 top[4] = {{0}};
#pragma GCC unroll 4
    for (int b = 0; b < count; b++, x += SPAN)
        top[b] = larger(larger(size_of(x), size_of(x + 8)), larger(size_of(x + 16), size_of(x + 24)));
    return MEET(larger, top);
}

INLINE i4 first_half(i8 a) { return ((i4 *)&a)[0]; }
INLINE i4 other_half(i8 a) { return ((i4 *)&a)[1]; }
INLINE i4 lows(i4 a, i4 b) { return __builtin_shuffle(a, b, (i4){0, 4, 1, 5}); }
INLINE i4 highs(i4 a, i4 b) { return __builtin_shuffle(a, b, (i4){2, 6, 3, 7}); }

/* Up to four blocks of a row; the first begins with the tops of their halves. */
INLINE void narrowed_blocks(const float *x, const int count, float size, float steps, narrow *to) {
    i8 sum[4] = {{0}}, scale = __builtin_convertvector(*(const f8 *)to->x * steps, i8) + 1; /* no x beyond 127 */
    scale = (scale > STEPS) + scale;
    f8 times = __builtin_convertvector(scale, f8), by = 1.0f / (size * times);
#pragma GCC unroll 4
    for (int b = 0; b < count; b++) {
        f8 mine = __builtin_shuffle(by, HALVES(b));
        i8 whole[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) whole[i] = nearest(*(const f8 *)(x + b * SPAN + 8 * i) * mine), sum[b] += whole[i];
        bytes_of(whole, to[b].x);
    }
    i8 total = MEET(plus, sum), part = total * scale;
    i4 all = (i4)__builtin_convertvector(first_half(part) + other_half(part), f4);
#if QUADS
    i4 scales = first_half(scale) << 16 | other_half(scale), one = first_half((i8)times), two = other_half((i8)times);
    i4 start = first_half(total) * -128, next = other_half(total) * -128;
    i4 ends[2] = {lows(one, two), highs(one, two)}, starts[2] = {lows(start, next), highs(start, next)};
#else
    i4 scales = first_half(scale) | other_half(scale) << 16;
#endif
    i4 begins[2] = {lows(scales, all), highs(scales, all)};
#pragma GCC unroll 4
    for (int b = 0; b < count; b++) {
        memcpy(to[b].scale, (int64_t *)&begins[b / 2] + b % 2, 8);
#if QUADS
        memcpy(to[b].times, (int64_t *)&ends[b / 2] + b % 2, 8);
        memcpy(to[b].start, (int64_t *)&starts[b / 2] + b % 2, 8);
#endif
    }
}

/* A row of x, block by block; its size, in 32767ths of 127ths. */
static float narrowed(const float *x, long in, narrow *to) {
    const long four = in / SPAN / 4 * 4, blocks = in / SPAN;
    i8 far = {0};
    float most;
    for (long k = 0; k < four; k += 4) far = larger(*(i8 *)to[k].x = tops_of(x + k * SPAN, 4), far);
    for (long k = four; k < blocks; k++) far = larger(*(i8 *)to[k].x = tops_of(x + k * SPAN, 1), far);
    int32_t top = 0;
    for (int j = 0; j < 8; j++) top = far[j] > top ? far[j] : top;
    memcpy(&most, &top, 4);
    if (!(most > 1e-30f && most < INFINITY)) {
        memset(to, 0, (size_t)blocks * sizeof *to);
        return most * 0; /* nothing next to nothing; what is no number stays none */
    }
    const float size = most / (127.0f * STEPS), steps = STEPS / most;
    for (long k = 0; k < four; k += 4) narrowed_blocks(x + k * SPAN, 4, size, steps, to + k);
    for (long k = four; k < blocks; k++) narrowed_blocks(x + k * SPAN, 1, size, steps, to + k);
    return size;
}
