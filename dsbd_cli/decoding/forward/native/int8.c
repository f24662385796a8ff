/* Products of 4 and 8-bit blocks with activations of 8 bits (`narrow.c`): for `simd.c`, which includes this.
 *
 * Nibbles or bytes times bytes of x, their sums, and for 4-bit blocks the one product with both scales of a block
 * are whole numbers of 32 bits and fewer: exact, in whatever order. Only blocks are added up in float32, one by one.
 * What that rounds is about what bfloat16 does (docs/speed.md).
 */
#include "narrow.c"

typedef uint8_t vb __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef int16_t vs __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));

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

/* The lower or the upper half of each byte of a vector of 4-bit weights. */
INLINE vb nibbles_at(const char *weight, const int upper) {
    vu bits = *(const vu *)weight;
    return (vb)((upper ? bits >> 4 : bits) & 0x0f0f0f0fu);
}

/* narrow_units: out [N, 16 A] (rows `wide` floats apart) = N rows (`in` / 32 blocks each) times A units of weights;
 * `each` bytes a block are fetched for a later product, from `ahead` on. */
#if QUADS
#include "quads.c"
#else
#include "pairs.c"
#endif

#define NARROW_CASE(F, A, N)                                                                            \
    case N:                                                                                             \
        if (N <= AT_ONCE(F)) narrow_units(F, A, N, weight, x, size, in, out, wide, ahead, each);        \
        break;
#define NARROW_ROWS(F, A)                                                                               \
    static void narrow_##F##_##A(long rows, const char *weight, const narrow *x, const float *size,     \
                                 long in, float *out, long wide, const char *ahead, long each) {        \
        switch (rows) {                                                                                 \
            NARROW_CASE(F, A, 1) NARROW_CASE(F, A, 2) NARROW_CASE(F, A, 3) NARROW_CASE(F, A, 4)         \
            NARROW_CASE(F, A, 5) NARROW_CASE(F, A, 6) NARROW_CASE(F, A, 7) NARROW_CASE(F, A, 8)         \
        }                                                                                               \
    }
#define NARROW(F)                                                                                       \
    NARROW_ROWS(F, 1)                                                                                   \
    NARROW_ROWS(F, 2)                                                                                   \
    static void narrow_##F(const char *weight, long units, const narrow *x, const float *size, long in, \
                           long count, float *out, const char *ahead) {                                 \
        const long unit = unit_bytes(F, in), wide = units * UNIT, blocks = in / SPAN;                  \
        const long groups = up(count, AT_ONCE(F)) / AT_ONCE(F);                                         \
        for (long u = 0, now; u < units; u += now) {                                                    \
            now = V == 1 && u + 2 <= units ? 2 : 1; /* two vectors of weights */                        \
            long each = up(now * BYTES[F], 64 * groups) / groups;                                       \
            for (long g = 0; g < groups; g++) {                                                         \
                long first = count * g / groups, last = count * (g + 1) / groups;                       \
                (now == 2 ? narrow_##F##_2 : narrow_##F##_1)(                                           \
                    last - first, weight + u * unit, x + first * blocks, size + first, in,              \
                    out + first * wide + u * UNIT, wide, ahead + u * unit + g * each * blocks, each);   \
            }                                                                                           \
        }                                                                                               \
    }
NARROW(Q4)
#if QUADS
NARROW(Q8)
#endif

/* Whether activations are rounded where they meet weights of a format, if that is wanted. */
int narrows(long format) { return format == Q4 || (QUADS && format == Q8); }

/* What a product multiplies: rows x [count, in], or those in bytes with their sizes. */
typedef struct {
    const float *x, *size;
    const narrow *narrow;
} input;

/* Bytes that `input_of` needs. */
static long narrow_bytes(long count, long in) {
    return up(count * (up(in, SPAN) / SPAN) * (long)sizeof(narrow) + count * 4, 64);
}

/* x [count, in] as `w` is multiplied with: in bytes where that is wanted (`own`, with room for them) and it can be. Rows
 * from `first` to `last` are laid out. */
static input input_of(const linear *w, const float *x, long first, long last, long count, char *own) {
    if (!own || !narrows(w->format)) return (input){x, NULL, NULL};
    long blocks = w->in / SPAN;
    narrow *to = (narrow *)own;
    float *size = (float *)(to + count * blocks);
    for (long n = first; n < last; n++) size[n] = narrowed(x + n * w->in, w->in, to + n * blocks);
    return (input){x, size, to};
}

/* out [count, 16 units] = rows of `a` from `first` on times `units` units of weights. */
static void narrow_chunk(long format, const char *weight, long units, const input *a, long first, long in, long count,
                         float *out, const char *ahead) {
    const narrow *x = a->narrow + first * (in / SPAN);
#if QUADS
    if (format == Q8) {
        narrow_Q8(weight, units, x, a->size + first, in, count, out, ahead);
        return;
    }
#endif
    (void)format;
    narrow_Q4(weight, units, x, a->size + first, in, count, out, ahead);
}
