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
#define ACROSS ((i8){2, 3, 0, 1, 6, 7, 4, 5})
#define OTHER 4 /* an input of the other half */
#else
#define QUADS 0
#define ACROSS ((i8){4, 5, 6, 7, 0, 1, 2, 3})
#define OTHER 2
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

INLINE f8 size_of(f8 x) { return (f8)((i8)x & 0x7fffffff); }
INLINE f8 larger(f8 a, f8 b) { /* b where one of them is no number */
#if defined(__AVX__)
    return (f8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    i8 first = a > b;
    return (f8)((first & (i8)a) | (~first & (i8)b));
#endif
}
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
        memset(to, 0, (size_t)(in / SPAN) * sizeof *to);
        return most * 0; /* nothing next to nothing; what is no number stays none */
    }
    const float size = most / (127.0f * STEPS), steps = STEPS / most;
    for (long k = 0; k < in; k += SPAN, x += SPAN, to++) {
        f8 part[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) part[i] = *(const f8 *)(x + 8 * i);
        f8 top = larger(larger(size_of(part[0]), size_of(part[1])), larger(size_of(part[2]), size_of(part[3])));
        top = larger(top, __builtin_shuffle(top, (i8){1, 0, 3, 2, 5, 4, 7, 6}));
        top = larger(top, __builtin_shuffle(top, ACROSS));
        i8 scale = __builtin_convertvector(top * steps, i8) + 1; /* so that no x is beyond 127 */
        scale = (scale > STEPS) + scale;
        f8 times = __builtin_convertvector(scale, f8), by = 1.0f / (size * times);
        i8 whole[4], sum = {0};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) whole[i] = nearest(part[i] * by), sum += whole[i];
        bytes_of(whole, to->x);
        sum += __builtin_shuffle(sum, (i8){1, 0, 3, 2, 5, 4, 7, 6});
        sum += __builtin_shuffle(sum, ACROSS);
#if QUADS
        to->start[0] = -128 * sum[0], to->start[1] = -128 * sum[OTHER];
        to->times[0] = times[0], to->times[1] = times[OTHER];
#endif
        to->sum = (float)(sum[0] * scale[0] + sum[OTHER] * scale[OTHER]);
        to->scale[QUADS] = (int16_t)scale[0], to->scale[1 - QUADS] = (int16_t)scale[OTHER];
    }
    return size;
}
