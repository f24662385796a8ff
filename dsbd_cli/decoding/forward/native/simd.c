/* A whole forward of a Llama-shaped model in one call, on the vector units of any processor.
 *
 * float32 activations and sums; weights in the narrowest of five formats that holds them without loss
 * (`pack`), widened to float32 in registers: a matrix that came from 4-bit blocks is read as 4-bit
 * blocks. So the numbers are those of float32, and one row costs what reading the weights costs.
 *
 * What a row of x gives does not depend on the rows beside it: every sum runs over its terms in one order
 * (inputs one by one; attention by position), however rows are grouped and whoever computes them.
 * Vectors are GCC's (4, 8 or 16 floats, by the flags of the build): the same source serves SSE, AVX2,
 * AVX-512 and NEON.
 */
#include "kernels.c"

typedef float real;
#include "meet.c"
#include "whole.h"

#if defined(__F16C__) || defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) || defined(WIDE) /* WIDE: for tests, where no processor has such vectors */
#define VL 16
#define GROUP 12 /* rows of x that one pass over a unit serves: what the registers hold */
#elif defined(__AVX2__)
#define VL 8
#define GROUP 6
#else
#define VL 4
#define GROUP 4
#endif
#define UNIT 16 /* outputs a unit */
#define V (UNIT / VL)
#define FEW 4     /* up to so many rows weights are used as they are widened, above from a buffer */
#define DEPTH 128 /* inputs of a unit that the buffer holds */
#define ROWS 96  /* rows of x served between two readings of a chunk's weights */
#define APART 16  /* up to so many rows each thread norms and lays out for itself */
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef float vf_any __attribute__((vector_size(VL * 4), may_alias, aligned(4)));
typedef int32_t vi __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4), may_alias, aligned(VL * 4)));
typedef uint32_t vu_any __attribute__((vector_size(VL * 4), may_alias, aligned(4)));

/* Formats of a weight; blocks of `DEEP` inputs of a unit take `BYTES`.
 * Q4: scales f16 [16], offsets f16 [16], nibbles [4 words of 8 inputs, 16]. Q8: scales f16 [16], bytes
 * [8 words of 4 inputs, 16]. BF16: [16] words of 2 inputs. F16, F32: [16]. Of a word of nibbles the low ones of
 * its bytes come first. */
enum { Q4, Q8, BF16, F16, F32, FORMATS };
static const long DEEP[FORMATS] = {32, 32, 2, 1, 1};
static const long BYTES[FORMATS] = {320, 544, 64, 32, 64};

#define NIBBLE(i) ((i) % 4 * 2 + (i) / 4)

static long up(long x, long to) { return (x + to - 1) / to * to; }
static inline long unit_bytes(long format, long in) { return in / DEEP[format] * BYTES[format]; }

/* a b + c, rounded once where the processor can: written out, for compilers contract here and not there (GCC, for
 * some processors, not in a sum that waits for itself), and then a row's bits would depend on its neighbours. */
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
INLINE vf spread(float x) { return x - (vf){0}; }

/* Ask for memory that is read soon, into the cache behind the nearest, which rows of x fill. (The nearest, measured, is
 * slower than nothing: weights of small forwards come in too late and push each other out.) */
INLINE void fetch(const char *from, long bytes) {
    for (long i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Half precision. */

INLINE vf halves(const uint16_t *from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)from));
#elif VL == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const void *)from));
#else
    vu bits;
    for (int i = 0; i < VL; i++) bits[i] = from[i];
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias; right for subnormals too */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

static int half_of(float x, uint16_t *to) { /* 0 where x is no half */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000u, low = bits & 0x7fffffffu;
    if (low >= 0x38800000u && low < 0x47800000u) { /* normal */
        *to = (uint16_t)(sign | (low - 0x38000000u) >> 13);
        return !(low & 0x1fffu);
    }
    float steps = fabsf(x) * 0x1p24f;
    if (!(steps < 1024.0f) || steps != rintf(steps)) return 0;
    *to = (uint16_t)(sign | (uint32_t)steps);
    return 1;
}

static float half_near(float x) { /* the nearest half, for x > 0 in its range */
    int exponent;
    if (!(x > 0) || x > 65504.0f) return x;
    frexpf(x, &exponent);
    exponent = exponent < -13 ? -13 : exponent;
    return ldexpf(rintf(ldexpf(x, 11 - exponent)), exponent - 11);
}

/* Packing: each returns 0 where the format does not give back every weight to the bit. */

static int nibbles_fit(const float *w, float d, float m, uint8_t *q) {
    int wrong = 0;
    float inverse = d != 0 ? 1 / d : 0;
    for (int i = 0; i < 32; i++) {
        float n = rintf((w[i] - m) * inverse);
        n = n < 0 ? 0 : n > 15 ? 15 : n;
        wrong |= d * n + m != w[i];
        q[i] = (uint8_t)n;
    }
    return !wrong;
}

static int nibbles(const float *w, uint16_t *d, uint16_t *m, uint8_t *q) {
    float low = w[0], high = w[0], far = w[0];
    for (int i = 1; i < 32; i++) {
        low = w[i] < low ? w[i] : low;
        high = w[i] > high ? w[i] : high;
        far = fabsf(w[i]) > fabsf(far) ? w[i] : far;
    }
    /* An offset below all, and 15 or fewer steps (Q4_1); or 8 steps from 0 to the farthest (Q4_0). */
    if (half_of(low, m))
        for (int steps = 15; steps > 0; steps--) {
            float scale = half_near((high - low) / (float)steps);
            if (half_of(scale, d) && nibbles_fit(w, scale, low, q)) return 1;
        }
    return half_of(far, m) && half_of(far / -8, d) && nibbles_fit(w, far / -8, far, q);
}

static int bytes_fit(const float *w, long count, float d, int8_t *q) {
    int wrong = 0;
    float inverse = d != 0 ? 1 / d : 0;
    for (long i = 0; i < count; i++) {
        float n = rintf(w[i] * inverse);
        n = n < -128 ? -128 : n > 127 ? 127 : n;
        wrong |= d * n != w[i];
        q[i] = (int8_t)n;
    }
    return !wrong;
}

static float farthest(const float *w, long count) {
    float far = 0;
    for (long i = 0; i < count; i++) far = fabsf(w[i]) > far ? fabsf(w[i]) : far;
    return far;
}

static int pack_row(const float *w, long in, long format, char *to, long row, int8_t *room) {
    if (format == Q8) { /* one scale a row, or one a block */
        float whole = farthest(w, in) / 127;
        uint16_t half = 0;
        int one = half_of(whole, &half) && bytes_fit(w, in, whole, room);
        for (long k = 0; k < in; k += 32, to += BYTES[Q8]) {
            if (!one) {
                float far = farthest(w + k, 32);
                if (!(half_of(far / 127, &half) && bytes_fit(w + k, 32, far / 127, room + k)) &&
                    !(half_of(far / 128, &half) && bytes_fit(w + k, 32, far / 128, room + k)))
                    return 0;
            }
            ((uint16_t *)to)[row] = half;
            for (int i = 0; i < 32; i++) to[32 + i / 4 * 64 + row * 4 + i % 4] = room[k + i];
        }
        return 1;
    }
    if (format == Q4) {
        for (long k = 0; k < in; k += 32, to += BYTES[Q4]) {
            uint8_t q[32];
            if (!nibbles(w + k, (uint16_t *)to + row, (uint16_t *)(to + 32) + row, q)) return 0;
            for (int word = 0; word < 4; word++) {
                uint32_t bits = 0;
                for (int i = 0; i < 8; i++) bits |= (uint32_t)q[word * 8 + i] << 4 * NIBBLE(i);
                ((uint32_t *)(to + 64 + word * 64))[row] = bits;
            }
        }
        return 1;
    }
    uint32_t wrong = 0;
    for (long k = 0; k < in; k++) {
        uint32_t bits;
        memcpy(&bits, w + k, 4);
        if (format == BF16) {
            wrong |= bits & 0xffffu;
            ((uint16_t *)(to + k / 2 * 64))[2 * row + k % 2] = (uint16_t)(bits >> 16);
        } else if (format == F16) {
            wrong |= !half_of(w[k], (uint16_t *)(to + k * 32) + row);
        } else {
            ((float *)(to + k * 64))[row] = w[k];
        }
    }
    return !wrong;
}

/* Bytes of [rows, in] in a format, -1 where it does not go. */
long packed_bytes(long rows, long in, long format) {
    return in % DEEP[format] ? -1 : up(rows, UNIT) / UNIT * unit_bytes(format, in);
}

/* w [rows, in] into `to` (zeroed); 0 where the format would change a weight, -1 without memory. */
int pack(const float *w, long rows, long in, long format, char *to) {
    int8_t *room = malloc((size_t)in);
    int fits = room ? 1 : -1;
    for (long row = 0; row < rows && fits == 1; row++)
        fits = pack_row(w + row * in, in, format, to + row / UNIT * unit_bytes(format, in), row % UNIT, room);
    free(room);
    return fits;
}

/* Products. */

/* Vector v of a unit's weights at input k of a block. */
INLINE vf widened(const int format, const char *block, const int v, const int k, vf d, vf m) {
    if (format == Q4) {
        vu word = *(const vu *)(block + 64 + k / 8 * 64 + v * VL * 4);
        return __builtin_convertvector((vi)(word >> 4 * NIBBLE(k % 8) & 15), vf) * d + m;
    }
    if (format == Q8) {
        vu word = *(const vu_any *)(block + 32 + k / 4 * 64 + v * VL * 4);
        return __builtin_convertvector((vi)(word << (24 - 8 * (k % 4))) >> 24, vf) * d;
    }
    if (format == BF16) {
        vu word = *(const vu *)(block + v * VL * 4);
        if (k) return (vf)(word & 0xffff0000u);
        return (vf)(word << 16);
    }
    if (format == F16) return halves((const uint16_t *)block + v * VL);
    return *(const vf *)(block + v * VL * 4);
}

/* out [N, 16 A] = x [N, in] times A units of weights. */
INLINE void few(const int format, const int A, const int N, const char *weight, const float *x, long stride,
                long in, float *out, const char *ahead) {
    vf sum[4 * V][FEW], d[4 * V], m[4 * V];
    long unit = unit_bytes(format, in);
    const int deep = (int)DEEP[format];
#pragma GCC unroll 16
    for (int a = 0; a < A * V; a++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[a][n] = (vf){0};
    for (long k = 0; k < in; k += deep, weight += BYTES[format], ahead += A * BYTES[format]) {
        fetch(ahead, A * BYTES[format]);
        if (format == Q4 || format == Q8) {
#pragma GCC unroll 16
            for (int a = 0; a < A * V; a++) {
                const uint16_t *scales = (const uint16_t *)(weight + a / V * unit) + a % V * VL;
                d[a] = halves(scales);
                if (format == Q4) m[a] = halves(scales + 16);
            }
        }
        const int word = format == Q4 ? 8 : format == Q8 ? 4 : deep;
#pragma GCC unroll 1
        for (int i = 0; i < deep; i += word)
#pragma GCC unroll 8
            for (int j = 0; j < word; j++)
#pragma GCC unroll 16
                for (int a = 0; a < A * V; a++) {
                    vf w = widened(format, weight + a / V * unit + i / word * 64, a % V, j, d[a], m[a]);
#pragma GCC unroll 16
                    for (int n = 0; n < N; n++) sum[a][n] = fused(w, spread(x[n * stride + k + i + j]), sum[a][n]);
                }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 16
        for (int a = 0; a < A * V; a++) *(vf_any *)(out + n * A * UNIT + a * VL) = sum[a][n];
}

/* Inputs `from` to `to` of a unit as float32 [inputs, 16]. */
INLINE void widen_as(const int format, const char *weight, long from, long to, float *out) {
    const int deep = (int)DEEP[format];
    weight += from / deep * BYTES[format];
    for (long k = from; k < to; k += deep, weight += BYTES[format]) {
        vf d[V], m[V];
        if (format == Q4 || format == Q8) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                d[v] = halves((const uint16_t *)weight + v * VL);
                if (format == Q4) m[v] = halves((const uint16_t *)weight + 16 + v * VL);
            }
        }
#pragma GCC unroll 32
        for (int i = 0; i < deep; i++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++, out += VL) *(vf *)out = widened(format, weight, v, i, d[v], m[v]);
    }
}

static void widen(long format, const char *weight, long from, long to, float *out) {
    switch (format) {
    case Q4: widen_as(Q4, weight, from, to, out); break;
    case Q8: widen_as(Q8, weight, from, to, out); break;
    case BF16: widen_as(BF16, weight, from, to, out); break;
    default: widen_as(F16, weight, from, to, out);
    }
}

/* sums [N, 16] += x [N, count] times weights [count, 16]. */
INLINE void many(const int N, const float *weight, const float *x, long stride, long count, float *sums) {
    vf sum[V][GROUP];
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[v][n] = *(vf *)(sums + n * UNIT + v * VL);
#pragma GCC unroll 2
    for (long k = 0; k < count; k++, weight += UNIT) {
        vf w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) w[v] = *(const vf *)(weight + v * VL);
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            vf one = spread(x[n * stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[v][n] = fused(w[v], one, sum[v][n]);
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) *(vf *)(sums + n * UNIT + v * VL) = sum[v][n];
}

#define CASE(N)                                         \
    case N:                                             \
        many(N, weight, x, stride, count, sums); break;
static void grouped(long rows, const float *weight, const float *x, long stride, long count, float *sums) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
#if GROUP > 4
        CASE(5) CASE(6)
#endif
#if GROUP > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

/* Units at a time for so many rows: enough sums that none waits for its last one. (Two vectors of a unit of
 * blocks fill the registers of AVX2 with their scales: measured, more units are slower.) */
#define UNITS(F, N) (VL == 16 ? (N) <= 2 ? 4 : 2 : (F) <= Q8 ? 1 : (N) == 1 ? 4 : (N) == 2 ? 2 : 1)

/* out [count, 16 units] = x [count <= FEW, stride] times `units` units of weights. */
#define FEW_OF(F, N)                                                                                                  \
    for (long u = 0; u < units;) {                                                                                    \
        float part[FEW * 4 * UNIT];                                                                                   \
        long a = units - u >= UNITS(F, N) ? UNITS(F, N) : 1;                                                          \
        const char *from = weight + u * unit, *next = ahead + u * unit;                                               \
        if (a == UNITS(F, N)) few(F, UNITS(F, N), N, from, x, stride, in, part, next);                                \
        else few(F, 1, N, from, x, stride, in, part, next);                                                           \
        for (long n = 0; n < N; n++)                                                                                  \
            memcpy(out + n * wide + u * UNIT, part + n * a * UNIT, (size_t)(a * UNIT) * 4);                           \
        u += a;                                                                                                       \
    }
#define FEW_FUNCTION(F)                                                                                               \
    static void few_##F(const char *weight, long units, const float *x, long stride, long in, long count, float *out, \
                        const char *ahead) {                                                                          \
        long unit = unit_bytes(F, in), wide = units * UNIT;                                                           \
        switch (count) {                                                                                              \
        case 1: FEW_OF(F, 1) break;                                                                                   \
        case 2: FEW_OF(F, 2) break;                                                                                   \
        case 3: FEW_OF(F, 3) break;                                                                                   \
        default: FEW_OF(F, 4)                                                                                         \
        }                                                                                                             \
    }
FEW_FUNCTION(Q4)
FEW_FUNCTION(Q8)
FEW_FUNCTION(BF16)
FEW_FUNCTION(F16)
FEW_FUNCTION(F32)

#include "int8.c"

/* out [count, 16 (to - from)] = rows `first` and following of x times units `from` to `to`; as many bytes from `ahead`
 * on are fetched meanwhile. */
static void chunk(const linear *w, long from, long to, input a, long first, long count, float *out,
                  const char *ahead) {
    long in = w->in, unit = unit_bytes(w->format, in), units = to - from, wide = units * UNIT, stride = in;
    const char *weight = w->weight + from * unit;
    if (a.narrow) {
        narrow_chunk(w->format, weight, units, &a, first, in, count, out, ahead);
        return;
    }
    const float *x = a.x + first * in;
    if (count <= FEW) {
        switch (w->format) {
        case Q4: few_Q4(weight, units, x, stride, in, count, out, ahead); break;
        case Q8: few_Q8(weight, units, x, stride, in, count, out, ahead); break;
        case BF16: few_BF16(weight, units, x, stride, in, count, out, ahead); break;
        case F16: few_F16(weight, units, x, stride, in, count, out, ahead); break;
        default: few_F32(weight, units, x, stride, in, count, out, ahead);
        }
        return;
    }
    float buffer[DEPTH * UNIT] __attribute__((aligned(64))), sums[ROWS * UNIT] __attribute__((aligned(64)));
    long groups = up(count, GROUP) / GROUP;
    for (long u = 0; u < units; u++, weight += unit, ahead += unit) {
        memset(sums, 0, (size_t)(count * UNIT) * 4);
        for (long k = 0; k < in; k += DEPTH) {
            long end = k + DEPTH < in ? k + DEPTH : in;
            const float *wide_weight = (const float *)weight + k * UNIT;
            fetch(ahead + unit * k / in, unit * (end - k) / in);
            if (w->format != F32) widen(w->format, weight, k, end, buffer), wide_weight = buffer;
            for (long g = 0; g < groups; g++) {
                long first = count * g / groups, last = count * (g + 1) / groups;
                grouped(last - first, wide_weight, x + first * stride + k, stride, end - k, sums + first * UNIT);
            }
        }
        for (long n = 0; n < count; n++) memcpy(out + n * wide + u * UNIT, sums + n * UNIT, UNIT * 4);
    }
}

/* y [count, rows] = x [count, in] W^T, for tests and measurements; int8: as a forward of that kind. */
void multiply(const linear *w, const float *x, long count, long int8, float *y) {
    float out[ROWS * 4 * UNIT];
    long units = up(w->out, UNIT) / UNIT;
    char *own = int8 ? malloc((size_t)narrow_bytes(count, w->in)) : NULL;
    input a = input_of(w, x, 0, count, count, own);
    for (long n = 0; n < count; n += ROWS)
        for (long u = 0; u < units; u += 4) {
            long to = u + 4 < units ? u + 4 : units, rows = n + ROWS < count ? ROWS : count - n;
            chunk(w, u, to, a, n, rows, out, w->weight + to * unit_bytes(w->format, w->in));
            for (long i = 0; i < rows; i++)
                for (long o = u * UNIT; o < to * UNIT && o < w->out; o++)
                    y[(n + i) * w->out + o] =
                        out[i * (to - u) * UNIT + o - u * UNIT] + (w->bias ? w->bias[o] : 0.0f);
        }
    free(own);
}

/* The forward. */

typedef struct {
    const model *m;
    const request *r;
    const team *t;
    float *x, *query, *att, *act;
    int32_t *seen, *length; /* [rows, used]: slots that a row sees, by position; how many */
    long seen_stride;       /* 0: a prompt in slots 1, 2, ..., one list for all */
    char *own;              /* [threads, own_size] */
    size_t own_size;
    float *normed, *last; /* [rows, hidden]: normed for all threads; those behind the last attention */
    char *ready;          /* what all threads multiply, in bytes */
    atomic_long *next;      /* [steps]: the next piece of each step that nobody has taken */
    meeting all;
} job;

enum { STORE, ADD, SILU, TURN };

/* Rotate head h of row n, and put it where attention looks for it. */
static void turn(const job *j, long at, long n, long h, const float *from) {
    const model *m = j->m;
    const request *r = j->r;
    const layer *l = m->layer + at;
    long size = m->size, shared = m->heads / m->groups, slot = r->slots[n];
    if (h >= m->heads + m->groups) {
        memcpy(r->values[at] + ((h - m->heads - m->groups) * r->capacity + slot) * size, from, (size_t)size * 4);
        return;
    }
    int is_key = h >= m->heads;
    const float *weight = is_key ? l->k_norm : l->q_norm;
    float normed[1024];
    if (weight) {
        rms_f32(from, weight, normed, 1, size, m->head_eps);
        from = normed;
    }
    float *to = is_key ? r->keys[at] + ((h - m->heads) * r->capacity + slot) * size
                       : j->query + ((n * m->groups + h / shared) * shared + h % shared) * size;
    turn_f32(from, r->cos + n * size, r->sin + n * size, to, size);
}

/* What becomes of rows [count, 16 (to - from)] of one product. */
static void finish(const job *j, const linear *w, long at, int kind, long from, long to, long first, long count,
                   float *rows, float *out, long stride) {
    long wide = (to - from) * UNIT;
    if (w->bias)
        for (long n = 0; n < count; n++)
            for (long i = 0; i < wide; i++) rows[n * wide + i] += w->bias[from * UNIT + i];
    for (long n = 0; n < count; n++, rows += wide) {
        float *row = out + (first + n) * stride + from * UNIT;
        long valid = w->out - from * UNIT < wide ? w->out - from * UNIT : wide;
        switch (kind) {
        case STORE: memcpy(row, rows, (size_t)valid * 4); break;
        case ADD:
            for (long i = 0; i < valid; i++) row[i] += rows[i];
            break;
        case SILU: /* units of 16 gates and their 16 ups */
            row = out + (first + n) * stride + from / 2 * UNIT;
            for (long u = 0; u < wide; u += 2 * UNIT, row += UNIT) {
                _Pragma("omp simd") for (long i = 0; i < UNIT; i++) {
                    float v = rows[u + i], down = -v;
                    row[i] = v / (1.0f + exp_f32(down > 88.0f ? 88.0f : down)) * rows[u + UNIT + i];
                }
            }
            break;
        default:
            for (long i = 0; i < wide; i += j->m->size) turn(j, at, first + n, (from * UNIT + i) / j->m->size, rows + i);
        }
    }
}

/* One product over all rows, piece by piece, whoever has time. */
static void product(job *j, const linear *w, input a, long count, float *out, long stride, int kind, long at,
                    long step, long piece) {
    float rows[ROWS * 8 * UNIT] __attribute__((aligned(64))); /* a head has up to 128 outputs */
    long units = up(w->out, UNIT) / UNIT;
    for (;;) {
        long begin = atomic_fetch_add(&j->next[step], 1) * piece;
        if (begin >= units) return;
        long end = begin + piece < units ? begin + piece : units;
        long wide = kind == TURN ? piece : piece < 4 ? piece : 4; /* a head stays whole */
        for (long n = 0; n < count; n += ROWS) {
            long now = n + ROWS < count ? ROWS : count - n;
            for (long u = begin; u < end; u += wide) {
                long to = u + wide < end ? u + wide : end;
                const char *ahead = w->weight + (u + j->t->threads * piece) * unit_bytes(w->format, w->in);
                if (kind == ADD) /* what is added to, read meanwhile */
                    for (long i = 0; i < now; i++)
                        fetch((const char *)(out + (n + i) * stride + u * UNIT), (to - u) * UNIT * 4);
                chunk(w, u, to, a, n, now, rows, ahead);
                finish(j, w, at, kind, u, to, n, now, rows, out, stride);
            }
        }
    }
}

#include "heads.c"

/* Floats of a row of scores. */
static long score_room(long used) { return up(used + 4, 16); }

/* Attention of row n over its slots, for the heads of group g. */
static void attend(const job *j, long at, long n, long g, float *scores) {
    const model *m = j->m;
    const request *r = j->r;
    long size = m->size, shared = m->heads / m->groups, first = g * shared;
    attend_over(shared, j->query + (n * m->heads + first) * size, r->keys[at] + g * r->capacity * size,
                r->values[at] + g * r->capacity * size, j->seen + n * j->seen_stride, j->length[n], size, m->scaling,
                scores, score_room(r->used), j->att + (n * m->heads + first) * size);
}

/* Who sees what, by position: once a forward, by the calling thread. `place` [capacity] is all -1. */
static void see(job *j, int32_t *place) {
    const request *r = j->r;
    if (!r->mask) { /* slots 1, 2, ... hold a prompt in order */
        j->seen_stride = 0;
        for (long s = 0; s < r->used; s++) j->seen[s] = (int32_t)(s + 1);
        for (long n = 0; n < r->count; n++) j->length[n] = (int32_t)(r->begin + n + 1);
        return;
    }
    for (long n = 0; n < r->count; n++) {
        const float *mask = r->mask + n * r->mask_stride;
        int32_t *slots = j->seen + n * j->seen_stride;
        long count = 0, far = -1, held = 0;
        for (long s = 0; s < r->used; s++)
            if (mask[s] == 0) slots[count++] = (int32_t)s;
        int twice = 0;
        for (long i = 0; i < count; i++) {
            long position = r->positions[slots[i]];
            if (position < 0 || position >= r->capacity || place[position] >= 0) {
                twice = 1;
                break;
            }
            place[position] = slots[i];
            far = position > far ? position : far;
        }
        for (long p = 0; p <= far; p++) {
            if (place[p] >= 0 && !twice) slots[held++] = place[p];
            place[p] = -1;
        }
        j->length[n] = (int32_t)count; /* slots that share a position stay in the order of slots */
    }
}

/* Inputs of the widest product. */
static long widest(const model *m) {
    long most = m->hidden > m->inner ? m->hidden : m->inner;
    return m->heads * m->size > most ? m->heads * m->size : most;
}

/* Where a thread lays out few rows. */
typedef struct {
    char *bytes; /* NULL: activations stay as they are */
    float *normed;
} desk;

/* x [count, w->in] (or its rows `keep`), normed where there are weights `norm` for that, as `w` is multiplied with.
 * Up to 16 rows each thread lays out for itself; more they share, and meet. */
static input laid_out(job *j, const linear *w, const float *x, const int64_t *keep, const float *norm, long count,
                      const desk *d, long me) {
    int all = count > APART;
    long first = all ? count * me / j->all.workers : 0, last = all ? count * (me + 1) / j->all.workers : count;
    if (norm) {
        float *to = all ? j->normed : d->normed;
        for (long n = first; n < last; n++)
            rms_f32(x + (keep ? keep[n] : n) * w->in, norm, to + n * w->in, 1, w->in, j->m->eps);
        x = to;
    }
    input a = input_of(w, x, first, last, count, all && d->bytes ? j->ready : d->bytes);
    if (all && (norm || a.narrow)) meet(&j->all);
    return a;
}

/* Behind the last attention only rows whose logits are wanted go on: they, and what they saw, to the front of others. */
static void go_on(const job *j, long me) {
    const request *r = j->r;
    long hidden = j->m->hidden, wide = j->m->heads * j->m->size;
    long first = r->kept * me / j->all.workers, count = r->kept * (me + 1) / j->all.workers - first;
    gathered(j->x, r->keep + first, count, hidden, j->last + first * hidden);
    gathered(j->att, r->keep + first, count, wide, j->query + first * wide);
}

static void work(void *data) {
    job *j = data;
    const model *m = j->m;
    const request *r = j->r;
    long me = j->t->threads > 1 ? j->t->number() : 0, count = r->count, step = 0;
    if (j->t->threads > 1) j->all.workers = j->t->count(); /* the same for all; may be fewer than asked for */
    char *own = j->own + (size_t)me * j->own_size;
    desk d = {.bytes = m->int8 ? own : NULL, .normed = (float *)(own + m->int8 * narrow_bytes(APART, widest(m)))};
    float *scores = d.normed + APART * m->hidden, *x = j->x, *att = j->att;
    long head = m->size / UNIT;
    const int64_t *keep = r->keep;
    for (long at = 0; at < m->layers; at++) {
        const layer *l = m->layer + at;
        int some = at + 1 == m->layers && r->kept < count;
        long rows = some ? r->kept : count;
        input a = laid_out(j, &l->qkv, x, NULL, l->before, count, &d, me);
        product(j, &l->qkv, a, count, NULL, 0, TURN, at, step++, head);
        meet(&j->all);
        for (;;) {
            long task = atomic_fetch_add(&j->next[step], 1);
            if (task >= rows * m->groups) break;
            attend(j, at, some ? keep[task % rows] : task % rows, task / rows, scores);
        }
        step++;
        meet(&j->all);
        if (some) {
            go_on(j, me);
            x = j->last, att = j->query, keep = NULL;
            meet(&j->all);
        }
        a = laid_out(j, &l->out, att, NULL, NULL, rows, &d, me);
        product(j, &l->out, a, rows, x, m->hidden, ADD, at, step++, 2);
        meet(&j->all);
        a = laid_out(j, &l->gate_up, x, NULL, l->after, rows, &d, me);
        product(j, &l->gate_up, a, rows, j->act, m->inner, SILU, at, step++, 4);
        meet(&j->all);
        a = laid_out(j, &l->down, j->act, NULL, NULL, rows, &d, me);
        product(j, &l->down, a, rows, x, m->hidden, ADD, at, step++, 2);
        meet(&j->all);
    }
    input a = laid_out(j, &m->head, x, keep, m->norm, r->kept, &d, me);
    product(j, &m->head, a, r->kept, r->logits, m->head.out, STORE, 0, step, 16);
}

enum { PARTS = 12 };

/* Bytes of each buffer of a forward of `count` rows over `used` slots. */
static void sizes_of(const model *m, long count, long used, long capacity, long threads, long *parts) {
    parts[0] = count * m->hidden * 4;
    parts[1] = (5 * m->layers + 1) * (long)sizeof(atomic_long);
    parts[2] = count * m->heads * m->size * 4;
    parts[3] = count * m->heads * m->size * 4;
    parts[4] = count * m->inner * 4;
    parts[5] = (count + 1) * (used + 1) * 4;
    parts[6] = count * 4;
    long own = m->int8 * narrow_bytes(APART, widest(m)) + APART * m->hidden * 4 + HEADS * score_room(used) * 4;
    parts[7] = up(own, 4096) * threads;
    parts[8] = capacity * 4;
    parts[9] = parts[10] = count * m->hidden * 4;
    parts[11] = m->int8 * narrow_bytes(count, widest(m));
    for (int i = 0; i < PARTS; i++) parts[i] = up(parts[i], 64);
}

/* Bytes that `forward` needs. */
long room(const model *m, long count, long used, long capacity, long threads) {
    long parts[PARTS], total = 0;
    sizes_of(m, count, used, capacity, threads, parts);
    for (int i = 0; i < PARTS; i++) total += parts[i];
    return total;
}

/* Logits [kept, head.out] of a request; `memory` has `room` bytes, aligned to 64. */
void forward(const model *m, const request *r, const team *t, char *memory) {
    long parts[PARTS];
    char *at[PARTS];
    sizes_of(m, r->count, r->used, r->capacity, t->threads, parts);
    for (int i = 0; i < PARTS; memory += parts[i++]) at[i] = memory;
    job j = {.m = m, .r = r, .t = t, .x = (float *)at[0], .next = (atomic_long *)at[1], .query = (float *)at[2],
             .att = (float *)at[3], .act = (float *)at[4], .seen = (int32_t *)at[5], .length = (int32_t *)at[6],
             .normed = (float *)at[9], .last = (float *)at[10], .ready = at[11],
             .seen_stride = r->used, .own = at[7], .own_size = (size_t)(parts[7] / t->threads), .all = {.workers = 1}};
    memcpy(j.x, r->x, (size_t)(r->count * m->hidden) * 4);
    memset(at[1], 0, (size_t)parts[1]);
    memset(at[8], 255, (size_t)parts[8]); /* -1 */
    see(&j, (int32_t *)at[8]);
    if (t->threads > 1) t->parallel(work, &j, (unsigned)t->threads, 0);
    else work(&j);
}
