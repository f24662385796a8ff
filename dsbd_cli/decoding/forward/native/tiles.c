/* A whole forward of a Llama-shaped model in one call, on the matrix tiles (AMX) of x86 processors.
 *
 * A small model's CPU forward is bound by reading its weights, if nothing else takes time: here all
 * layers run in one parallel region, weights lie in the order in which they are read (those that came
 * from blocks as blocks, `blocks.c`), and attention over the tree's slots uses the tiles too. Products are
 * bfloat16 with float32 sums, or, for drafts, int8 by output row times int8 by token. What a row of x gives
 * does not depend on the other rows, nor on how its weights are kept.
 * amx.py has the shapes; roundings are those of kernels.c, or fewer.
 */
#include "kernels.c"

#include <immintrin.h>

typedef bf16 real;
#include "blocks.c"
#include "meet.c"
#include "whole.h"

typedef struct {
    const model *m;
    const request *r;
    const team *t;
    long rows, padded, seen; /* query rows of a group, the same and the slots rounded up */
    bf16 *x, *qkv, *query, *att, *act;
    char *ready;   /* a product's input for many rows, laid out by all threads */
    float *sizes;  /* of its rows, in int8 */
    uint16_t *bits; /* [query tile, slot]: which of 16 query rows see the slot */
    uint8_t *some;  /* [query tile, 32 slots]: whether any row sees any of them */
    long *start, *limit; /* [query tile]: slots before and beyond these are seen by none of them; multiples of 32 */
    char *own;      /* [threads, own_size] */
    size_t own_size;
    atomic_long *taken; /* [layers, PHASES], of the head too: units or tasks that threads have taken */
    meeting all;
} job;

#define TILE 16
#define UNIT 32    /* outputs a unit */
#define STEP 2048  /* bytes of a unit's weights for 64 bytes of a row, as tiles take them */
#define AHEAD 8192 /* bytes of weights to fetch before they are needed */
#define RING 4     /* steps of unpacked blocks that are kept where they are needed once */
#define SLOTS 32   /* slots that a query tile looks at together */
static long up(long x, long to) { return (x + to - 1) / to * to; }

static void configure(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t width[16];
        uint8_t height[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.width[i] = 64, all.height[i] = 16;
    _tile_loadconfig(&all);
}

/* Ask the system for the tiles; 0 where they may be used. */
int allow(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }

static inline __m512 exp16(__m512 x) { /* as exp_f32 */
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

static inline __m512 wide(const bf16 *x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)), 16));
}
static inline __m256i narrow(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

static inline __m512 bf16_of(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x)), 16));
}

/* Words of 16 bits: low 0, high 0, low 1, ... */
static inline __m512i paired(__m512 high, __m512 low) {
    uint16_t order[32] __attribute__((aligned(64)));
    for (int i = 0; i < 16; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(16 + i);
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), both(high, low));
}

/* Sums of squares, [16] a row: those of inputs 0, 16, 32, ... first; up to 4 rows wait for each other's sums. */
static void squares(const bf16 *const *x, long rows, long width, float *to) {
    __m512 sum[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    const bf16 *a = x[0], *b = x[rows > 1], *c = x[rows > 2 ? 2 : 0], *d = x[rows > 3 ? 3 : 0];
    for (long i = 0; i < width; i += 16) {
        __m512 v = wide(a + i);
        sum[0] = _mm512_fmadd_ps(v, v, sum[0]);
        if (rows == 1) continue;
        v = wide(b + i), sum[1] = _mm512_fmadd_ps(v, v, sum[1]);
        v = wide(c + i), sum[2] = _mm512_fmadd_ps(v, v, sum[2]);
        v = wide(d + i), sum[3] = _mm512_fmadd_ps(v, v, sum[3]);
    }
    for (long row = 0; row < rows; row++) _mm512_store_ps(to + row * 16, sum[row]);
}

/* As `rms_bf16`, rows x[0], x[1], ... (at most 16) into `out`: whatever their number, each row's sum is the same. */
static void rms(const bf16 *const *x, const bf16 *weight, bf16 *out, long rows, long width, float eps) {
    float parts[TILE * TILE] __attribute__((aligned(64))), inverse[TILE] __attribute__((aligned(64)));
    for (long row = 0; row < rows; row += 4)
        squares(x + row, rows - row < 4 ? rows - row : 4, width, parts + row * TILE);
    if (rows > 4) {
        float turned[TILE * TILE] __attribute__((aligned(64)));
        __m512 sum = _mm512_setzero_ps();
        transpose(parts, TILE, turned, TILE);
        for (int i = 0; i < TILE; i++) sum = _mm512_add_ps(sum, _mm512_load_ps(turned + i * TILE));
        sum = _mm512_add_ps(_mm512_div_ps(sum, _mm512_set1_ps((float)width)), _mm512_set1_ps(eps));
        _mm512_store_ps(inverse, _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_sqrt_ps(sum)));
    } else
        for (long row = 0; row < rows; row++) {
            float sum = 0;
            for (int i = 0; i < TILE; i++) sum += parts[row * TILE + i];
            inverse[row] = 1.0f / sqrtf(sum / (float)width + eps);
        }
    for (long row = 0; row < rows; row++, out += width) {
        __m512 by = _mm512_set1_ps(inverse[row]);
        const bf16 *from = x[row];
        for (long i = 0; i < width; i += 16)
            _mm256_storeu_si256((void *)(out + i),
                                narrow(_mm512_mul_ps(wide(weight + i), bf16_of(_mm512_mul_ps(wide(from + i), by)))));
    }
}

/* As `turn_bf16`. */
static void turn(const bf16 *x, const bf16 *cos, const bf16 *sin, bf16 *out, long size) {
    for (long i = 0, k = size / 2; k < size; i += 16, k += 16) {
        __m512 a = wide(x + i), b = wide(x + k);
        __m512 low = _mm512_sub_ps(bf16_of(_mm512_mul_ps(a, wide(cos + i))), bf16_of(_mm512_mul_ps(b, wide(sin + i))));
        __m512 high = _mm512_add_ps(bf16_of(_mm512_mul_ps(b, wide(cos + k))), bf16_of(_mm512_mul_ps(a, wide(sin + k))));
        _mm256_storeu_si256((void *)(out + i), narrow(low));
        _mm256_storeu_si256((void *)(out + k), narrow(high));
    }
}

/* A product's input for all rows: as it is; in int8 with one scale a row; or, for weights in blocks, pairs of
 * inputs of 16 rows side by side. One byte would be too coarse beside a token's largest value, so there are two:
 * 16 rows of high bytes, then what those leave, in 254ths. They are multiplied by the same weights, which are
 * read once. */
typedef struct {
    const char *data;
    long stride, step, tile; /* bytes from line to line of a tile, to its next step, to the next 16 rows */
    const float *size;       /* NULL for bfloat16 */
} input;

#define FINE 254.0f

static input input_in_pairs(const char *data, long width) {
    return (input){data, 64, TILE * 64, TILE * width * 2, NULL};
}

/* Rows of 16 (at most) in pairs, `to` [width / 2, 16 rows]. */
static void in_pairs(const bf16 *x, long width, long rows, uint32_t *to) {
    const uint32_t *from = (const uint32_t *)x;
    if (rows > 4)
        for (long i = 0; i < width / 2; i += TILE) transpose(from + i, width / 2, to + i * TILE, TILE);
    else
        for (long row = 0; row < rows; row++)
            for (long i = 0; i < width / 2; i++) to[i * TILE + row] = from[row * width / 2 + i];
}

static void in_bytes(const bf16 *x, long width, long rows, char *to, float *sizes) {
    for (long row = 0; row < rows; row++, x += width) {
        char *high = to + row * width, *low = high + TILE * width;
        __m512 most = _mm512_set1_ps(1e-9f);
        for (long i = 0; i < width; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(wide(x + i)));
        float size = _mm512_reduce_max_ps(most) / 127.0f;
        __m512 scale = _mm512_set1_ps(1.0f / size);
        sizes[row] = size;
        for (long i = 0; i < width; i += 16) {
            __m512 v = _mm512_mul_ps(wide(x + i), scale);
            __m512i whole = _mm512_cvtps_epi32(v);
            __m512 rest = _mm512_mul_ps(_mm512_sub_ps(v, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(FINE));
            _mm_store_si128((void *)(high + i), _mm512_cvtsepi32_epi8(whole));
            _mm_store_si128((void *)(low + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rest)));
        }
    }
}

/* What a thread lays few rows out in; `normed` for 16 rows. */
typedef struct {
    char *small;
    float *sizes;
    bf16 *normed;
} desk;

/* x [count, w->in] (or its rows `keep`), normed where there are weights `norm` for that, as `w` is multiplied with.
 * Up to 16 rows each thread lays out for itself; more they share, and meet. */
static input input_of(job *j, const linear *w, const bf16 *x, const int64_t *keep, const bf16 *norm, long count,
                      const desk *d, long me) {
    long width = w->in, tiles = up(count, TILE) / TILE, first = 0, last = tiles;
    int blocks = w->format != TILES, bytes = j->m->int8 != 0;
    if (!blocks && !bytes && !norm) return (input){(const char *)x, width * 2, 64, TILE * width * 2, NULL};
    char *to = d->small;
    float *sizes = d->sizes;
    if (tiles > 1) {
        to = j->ready, sizes = j->sizes;
        first = tiles * me / j->all.workers, last = tiles * (me + 1) / j->all.workers;
    }
    for (long t = first; t < last; t++) {
        char *place = to + t * TILE * width * 2;
        long rows = count - t * TILE < TILE ? count - t * TILE : TILE;
        const bf16 *from = x + t * TILE * width;
        if (norm) {
            bf16 *normed = blocks || bytes ? d->normed : (bf16 *)place;
            const bf16 *of[TILE];
            for (long row = 0; row < rows; row++) of[row] = keep ? x + keep[t * TILE + row] * width : from + row * width;
            rms(of, norm, normed, rows, width, j->m->eps);
            from = normed;
        }
        if (blocks) in_pairs(from, width, rows, (uint32_t *)place);
        else if (bytes) in_bytes(from, width, rows, place, sizes + t * TILE);
    }
    if (tiles > 1) meet(&j->all);
    if (blocks) return input_in_pairs(to, width);
    if (bytes) return (input){to, width, 64, TILE * width, sizes};
    return (input){to, width * 2, 64, TILE * width * 2, NULL};
}

enum { STORE, ADD, SILU };
enum { PHASES = 5 };

/* Weights of a step of a unit for the first rows, which read them from memory. */
#define FIRST static inline __attribute__((always_inline))
FIRST void fetch(const char *b, const long bytes) {
#pragma GCC unroll 32
    for (long line = 0; line < bytes; line += 64) _mm_prefetch(b + AHEAD + line, _MM_HINT_T0);
}
FIRST const char *read_tiles(const char *unit, long s) {
    fetch(unit + s * STEP, STEP);
    return unit + s * STEP;
}
/* They are unpacked a step before they are multiplied. */
FIRST const char *read_blocks(const linear *w, const char *unit, long s, long steps, char *buffer, long ring) {
    long bytes = STEP_BYTES[w->format];
    const char *b = unit + s * bytes;
    if (w->format < EIGHT) fetch(b, STEP_BYTES[FOUR]);
    else fetch(b, STEP_BYTES[EIGHT]);
    if (!s) unpack(w->format, b, buffer);
    if (s + 1 < steps) unpack(w->format, b + bytes, buffer + ((s + 1) & ring) * STEP);
    return buffer + (s & ring) * STEP;
}

/* One unit times `tall` x 16 rows, into c: [rows, UNIT], or [tile of rows, half of UNIT, 16, 16 rows] from blocks.
 * Weights come from memory once, for the first rows; sums of three row tiles leave no tile to keep a row tile in,
 * so it is read twice. */
#define MULTIPLY(DP, FIRST_READ)                                                                             \
    _tile_zero(0);                                                                                           \
    _tile_zero(1);                                                                                           \
    _tile_zero(2);                                                                                           \
    _tile_zero(3);                                                                                           \
    _tile_zero(4);                                                                                           \
    _tile_zero(5);                                                                                           \
    for (long s = 0; s < steps; s++) {                                                                       \
        const char *from = x + s * a.step;                                                                   \
        const char *b = n ? again + s * STEP : FIRST_READ;                                                   \
        _tile_loadd(7, b, 64);                                                                               \
        _tile_loadd(6, from, a.stride);                                                                      \
        DP(0, 6, 7);                                                                                         \
        if (tall == 1) {                                                                                     \
            _tile_loadd(7, b + STEP / 2, 64);                                                                \
            DP(1, 6, 7);                                                                                     \
        } else if (tall == 2) {                                                                              \
            _tile_loadd(5, from + a.tile, a.stride);                                                         \
            DP(2, 5, 7);                                                                                     \
            _tile_loadd(4, b + STEP / 2, 64);                                                                \
            DP(1, 6, 4);                                                                                     \
            DP(3, 5, 4);                                                                                     \
        } else {                                                                                             \
            _tile_loadd(6, from + a.tile, a.stride);                                                         \
            DP(2, 6, 7);                                                                                     \
            _tile_loadd(6, from + 2 * a.tile, a.stride);                                                     \
            DP(4, 6, 7);                                                                                     \
            _tile_loadd(7, b + STEP / 2, 64);                                                                \
            DP(5, 6, 7);                                                                                     \
            _tile_loadd(6, from, a.stride);                                                                  \
            DP(1, 6, 7);                                                                                     \
            _tile_loadd(6, from + a.tile, a.stride);                                                         \
            DP(3, 6, 7);                                                                                     \
        }                                                                                                    \
    }                                                                                                        \
    _tile_stored(0, c, line);                                                                                \
    _tile_stored(1, c + side, line);                                                                         \
    _tile_stored(2, c + TILE * UNIT, line);                                                                  \
    _tile_stored(3, c + TILE * UNIT + side, line);                                                           \
    if (tall == 3) {                                                                                         \
        _tile_stored(4, c + 2 * TILE * UNIT, line);                                                          \
        _tile_stored(5, c + 2 * TILE * UNIT + side, line);                                                   \
    }
#define OUTPUTS_FIRST(c, x, weight) _tile_dpbf16ps(c, weight, x) /* the same products and sums */

/* Sums of a tile of rows from blocks, [half of UNIT, 16, 16 rows], as [rows, UNIT]. */
static void turned_back(const float *from, float *to, long rows) {
    const __m512i lines = _mm512_mullo_epi32(_mm512_set1_epi32(TILE), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8,
                                                                                       7, 6, 5, 4, 3, 2, 1, 0));
    for (int h = 0; h < 2; h++, from += TILE * TILE, to += TILE) {
        if (rows > 3) transpose(from, TILE, to, UNIT);
        else
            for (long row = 0; row < rows; row++)
                _mm512_store_ps(to + row * UNIT, _mm512_i32gather_ps(lines, from + row, 4));
    }
}

static inline __m512 silu(__m512 gate, __m512 by) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(e, _mm512_set1_ps(1.0f))), by);
}

/* What becomes of the sums of some rows of a unit: `out` [rows, stride] is written, added to, or gets silu(gate) x up;
 * in pairs, as the next product takes them, where `stride` is 0. */
typedef struct {
    const linear *w;
    const float *sums, *size; /* [rows, UNIT], or from blocks [tile of rows, half of UNIT, 16, 16 rows] */
    bf16 *out;
    long u, rows, stride;
    int kind;
} result;

/* Sums from blocks (and the bias), an output of 16 rows. */
static inline __m512 sums_of(const result *r, const float *sums, int output) {
    __m512 out = _mm512_load_ps(sums + output * TILE);
    return r->w->bias ? _mm512_add_ps(out, _mm512_set1_ps(r->w->bias[r->u * UNIT + output])) : out;
}

/* A tile's sums from blocks, in bfloat16, to its rows of `out`. */
static void store_rows(const result *r, const float *sums, long rows, bf16 *out) {
    uint32_t pairs[TILE * TILE] __attribute__((aligned(64))), lines[TILE * TILE];
    for (int o = 0; o < UNIT; o += 2)
        _mm512_store_si512(pairs + o / 2 * TILE, paired(sums_of(r, sums, o + 1), sums_of(r, sums, o)));
    long width = r->w->out - r->u * UNIT < UNIT ? r->w->out - r->u * UNIT : UNIT;
    if (rows == TILE && width == UNIT) {
        transpose(pairs, TILE, out, r->stride / 2);
        return;
    }
    transpose(pairs, TILE, lines, TILE);
    for (long row = 0; row < rows; row++) memcpy(out + row * r->stride, lines + row * TILE, (size_t)width * 2);
}

/* One row's sums [UNIT]. */
static inline void finish_row(const result *r, const float *from, const float *size, long row) {
    const linear *w = r->w;
    __m512 half[2];
    for (int h = 0; h < 2; h++, from += TILE) {
        half[h] = _mm512_load_ps(from);
        if (size) {
            __m512 scale = _mm512_loadu_ps(w->scale + r->u * UNIT + h * TILE);
            __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(from + TILE * UNIT));
            half[h] = _mm512_cvtepi32_ps(_mm512_castps_si512(half[h]));
            half[h] = _mm512_fmadd_ps(low, _mm512_set1_ps(1.0f / FINE), half[h]);
            half[h] = _mm512_mul_ps(half[h], _mm512_mul_ps(scale, _mm512_set1_ps(size[row])));
        }
        if (w->bias) half[h] = _mm512_add_ps(half[h], _mm512_loadu_ps(w->bias + r->u * UNIT + h * TILE));
    }
    bf16 *to = r->out + row * r->stride;
    if (r->kind == SILU) {
        _mm256_storeu_si256((void *)(to + r->u * TILE), narrow(silu(half[0], half[1])));
        return;
    }
    for (int h = 0; h < 2; h++) {
        long at = r->u * UNIT + h * TILE;
        if (at >= w->out) break;
        if (r->kind == ADD) half[h] = _mm512_add_ps(half[h], wide(to + at));
        _mm256_storeu_si256((void *)(to + at), narrow(half[h]));
    }
}

/* It is done in pieces, so that they can be put between products: a row; from blocks a tile of rows; in pairs two
 * outputs of a tile of rows. */
static long pieces(const result *r) {
    if (r->w->format == TILES) return r->rows;
    return up(r->rows, TILE) / TILE * (r->stride ? 1 : TILE / 2);
}
static void finish(const result *r, long piece) {
    if (r->w->format == TILES) {
        finish_row(r, r->sums + piece * UNIT, r->size, piece);
        return;
    }
    if (!r->stride) {
        long t = piece / (TILE / 2), o = piece % (TILE / 2) * 2;
        const float *sums = r->sums + t * TILE * UNIT;
        __m512 part[2];
        for (long i = 0; i < 2; i++) part[i] = silu(sums_of(r, sums, o + i), sums_of(r, sums, TILE + o + i));
        _mm512_store_si512((char *)r->out + t * TILE * r->w->out + (r->u * TILE + o) * 32, paired(part[1], part[0]));
        return;
    }
    long first = piece * TILE, rows = r->rows - first < TILE ? r->rows - first : TILE;
    if (r->kind == STORE && r->rows > 3) {
        store_rows(r, r->sums + first * UNIT, rows, r->out + first * r->stride + r->u * UNIT);
        return;
    }
    float back[TILE * UNIT] __attribute__((aligned(64)));
    turned_back(r->sums + first * UNIT, back, rows);
    for (long row = 0; row < rows; row++) finish_row(r, back + row * UNIT, NULL, first + row);
}

/* Rows x units of one product, into `out` from its first row on; `buffer` has room for two units as tiles take them. */
static void product_of_few(const job *j, input a, long count, result r, long me, char *buffer) {
    const linear *w = r.w;
    long steps = w->in * (j->m->int8 ? 1 : 2) / 64, units = up(w->out, UNIT) / UNIT;
    long begin = units * me / j->all.workers, end = units * (me + 1) / j->all.workers;
    int blocks = w->format != TILES;
    bf16 *out = r.out;
    long ring = blocks && count <= 3 * TILE ? RING - 1 : -1; /* needed once: what stays near is enough */
    long side = blocks ? TILE * TILE : TILE, line = blocks ? TILE * 4 : UNIT * 4;
    float c[3 * TILE * UNIT] __attribute__((aligned(64)));
    r.sums = c;
    for (r.u = begin; r.u < end; r.u++) {
        const char *unit = w->weight + r.u * steps * STEP_BYTES[w->format], *again = blocks ? buffer : unit;
        for (long n = 0, rows; n < count; n += rows) {
            long left = count - n, tall = left <= TILE ? 1 : left > 2 * TILE && left <= 3 * TILE ? 3 : 2;
            rows = tall * TILE;
            const char *x = a.data + n / TILE * a.tile;
            if (a.size) tall = 2, rows = TILE, x += n / TILE * a.tile, r.size = a.size + n; /* high and low bytes */
            r.rows = left < rows ? left : rows;
            r.out = r.stride ? out + n * r.stride : out + n * w->out / 2;
            if (j->m->int8) {
                MULTIPLY(_tile_dpbssd, read_tiles(unit, s))
            } else if (blocks) {
                MULTIPLY(OUTPUTS_FIRST, read_blocks(w, unit, s, steps, buffer, ring))
            } else {
                MULTIPLY(_tile_dpbf16ps, read_tiles(unit, s))
            }
            for (long piece = 0; piece < pieces(&r); piece++) finish(&r, piece);
        }
    }
}

/* One unit times 16 or 32 rows; between products what SPARE does: the tiles need neither of it. */
#define MULTIPLY_MANY(DP)                                                                                    \
    _tile_zero(0);                                                                                           \
    _tile_zero(1);                                                                                           \
    _tile_zero(2);                                                                                           \
    _tile_zero(3);                                                                                           \
    for (long s = 0; s < steps; s++) {                                                                       \
        const char *from = x + s * a.step, *b = weights + s * STEP;                                          \
        _tile_loadd(6, b, 64);                                                                               \
        _tile_loadd(4, from, a.stride);                                                                      \
        DP(0, 4, 6);                                                                                         \
        if (two) {                                                                                           \
            _tile_loadd(5, from + a.tile, a.stride);                                                         \
            DP(2, 5, 6);                                                                                     \
        }                                                                                                    \
        if (!n) {                                                                                            \
            for (long i = 0; coming && i < bytes; i += 64) _mm_prefetch(coming + s * bytes + i, _MM_HINT_T1); \
        } else                                                                                               \
            for (read++; read >= pairs - 1; read -= pairs - 1, there++)                                      \
                if (coming && blocks) unpack(w->format, coming + there * bytes, far + there * STEP);         \
        _tile_loadd(7, b + STEP / 2, 64);                                                                    \
        DP(1, 4, 7);                                                                                         \
        if (two) DP(3, 5, 7);                                                                                \
        for (due += last; due >= steps; due -= steps) finish(&done, piece++);                                \
    }

/* The same for more rows than one pass takes, in bfloat16. Threads take unit after unit: none waits for one that the
 * machine slows down. While a unit is multiplied the next one is fetched (with the first rows), then unpacked, and the
 * sums of the rows before are finished. */
static void product_of_many(const job *j, input a, long count, result r, long me, char *buffer, atomic_long *taken) {
    const linear *w = r.w;
    long steps = w->in / DEEP, units = up(w->out, UNIT) / UNIT, bytes = STEP_BYTES[w->format];
    long tiles = up(count, TILE) / TILE, pairs = (tiles + 1) / 2;
    int blocks = w->format != TILES;
    long side = blocks ? TILE * TILE : TILE, line = blocks ? TILE * 4 : UNIT * 4;
    char *near = buffer, *far = buffer + steps * STEP;
    float sums[2][2 * TILE * UNIT] __attribute__((aligned(64)));
    result done = r;
    long piece = 0, last = 0; /* of `done` */
    for (long s = 0; blocks && s < steps && me < units; s++)
        unpack(w->format, w->weight + (me * steps + s) * bytes, near + s * STEP);
    for (long u = me, next, turn = 0; u < units; u = next) {
        next = atomic_fetch_add(taken, 1) + j->all.workers;
        const char *coming = next < units ? w->weight + next * steps * bytes : NULL;
        const char *weights = blocks ? near : w->weight + u * steps * STEP;
        for (long n = 0, there = 0, read = 0; n < tiles; n += 2) {
            const char *x = a.data + n * a.tile;
            long due = 0;
            int two = n + 1 < tiles;
            if (blocks) {
                MULTIPLY_MANY(OUTPUTS_FIRST)
            } else {
                MULTIPLY_MANY(_tile_dpbf16ps)
            }
            float *c = sums[turn++ % 2];
            _tile_stored(0, c, line);
            _tile_stored(1, c + side, line);
            if (two) {
                _tile_stored(2, c + TILE * UNIT, line);
                _tile_stored(3, c + TILE * UNIT + side, line);
            }
            done = r, done.sums = c, done.u = u;
            done.rows = count - n * TILE < 2 * TILE ? count - n * TILE : 2 * TILE;
            done.out += r.stride ? n * TILE * r.stride : n * TILE * w->out / 2;
            piece = 0, last = pieces(&done);
        }
        char *swap = near;
        near = far, far = swap;
    }
    for (; piece < last; piece++) finish(&done, piece);
}

static void product(const job *j, input a, long count, result r, long me, char *buffer, atomic_long *taken) {
    if (count > 3 * TILE && !j->m->int8) product_of_many(j, a, count, r, me, buffer, taken);
    else product_of_few(j, a, count, r, me, buffer);
}

/* Rotate this thread's share of the nodes; queries [group, row, size], keys and values into the pool. */
static void rotate(const job *j, long at, long me) {
    const model *m = j->m;
    const request *r = j->r;
    const layer *l = m->layer + at;
    long size = m->size, shared = m->heads / m->groups, width = (m->heads + 2 * m->groups) * size;
    bf16 normed[1024];
    for (long n = r->count * me / j->all.workers; n < r->count * (me + 1) / j->all.workers; n++) {
        const bf16 *from = j->qkv + n * width;
        for (long h = 0; h < m->heads + m->groups; h++, from += size) {
            int is_key = h >= m->heads;
            const bf16 *weight = is_key ? l->k_norm : l->q_norm, *head = from;
            if (weight) {
                rms(&head, weight, normed, 1, size, m->head_eps);
                head = normed;
            }
            bf16 *to = is_key ? r->keys[at] + ((h - m->heads) * r->capacity + r->slots[n]) * size
                              : j->query + ((h / shared) * j->padded + n * shared + h % shared) * size;
            turn(head, r->cos + n * size, r->sin + n * size, to, size);
        }
        for (long g = 0; g < m->groups; g++, from += size)
            memcpy(r->values[at] + (g * r->capacity + r->slots[n]) * size, from, (size_t)size * 2);
    }
}

/* One group's attention for query tiles `first`, `first` + `by`, ... */
static void attend(const job *j, long at, long g, long first, long by, char *own) {
    const model *m = j->m;
    const request *r = j->r;
    long size = m->size, shared = m->heads / m->groups, deep = size / 32, tiles = up(j->rows, TILE) / TILE;
    uint32_t *turned = (uint32_t *)own;                  /* [size / 2, 16 rows] */
    float *scores = (float *)(turned + TILE * size / 2); /* [slot, 16 rows] */
    bf16 *weights = (bf16 *)(scores + j->seen * TILE);   /* [slot / 32, 16 rows, 32] */
    bf16 *pairs = weights + j->seen * TILE;              /* [slot / 32, size / 16, 16, 16, 2] */
    bf16 *edge = pairs + j->seen * size;                 /* [32 slots, size] */
    float *out = (float *)(edge + SLOTS * size);         /* [16, 64] */
    float *sums = out + TILE * 64;                       /* [row] */
    const bf16 *keys = r->keys[at] + g * r->capacity * size, *values = r->values[at] + g * r->capacity * size;
    uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(32 + i);
    __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
    for (long s = 0; s < j->seen; s += SLOTS) {
        int any = 0;
        for (long t = first; t < tiles && !any; t += by) any = j->some[(t * j->seen + s) / SLOTS];
        if (!any) continue;
        for (long i = s; i < s + SLOTS; i += 2)
            for (long d = 0; d < size; d += 32) {
                __m512i a = _mm512_setzero_si512(), b = a;
                if (i < r->capacity) a = _mm512_loadu_si512(values + i * size + d);
                if (i + 1 < r->capacity) b = _mm512_loadu_si512(values + (i + 1) * size + d);
                bf16 *to = pairs + s * size + d * SLOTS + (i - s) * TILE;
                _mm512_store_si512(to, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(to + TILE * SLOTS, _mm512_permutex2var_epi16(a, high, b));
            }
    }
    __m512 scaling = _mm512_set1_ps(m->scaling);
    for (long t = first; t < tiles; t += by) {
        const uint16_t *bits = j->bits + t * j->seen;
        const uint8_t *some = j->some + t * j->seen / SLOTS;
        long start = j->start[t], limit = j->limit[t];
        const uint32_t *query = (const uint32_t *)(j->query + (g * j->padded + t * TILE) * size);
        for (long i = 0; i < size / 2; i += TILE) transpose(query + i, size / 2, turned + i * TILE, TILE);
        _tile_loadd(0, turned, 64);
        if (deep > 1) _tile_loadd(1, turned + 256, 64);
        if (deep > 2) _tile_loadd(2, turned + 512, 64);
        if (deep > 3) _tile_loadd(3, turned + 768, 64);
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        for (long s = start; s < limit; s += SLOTS) {
            if (!some[s / SLOTS]) continue;
            const bf16 *k = keys + s * size;
            if (s + SLOTS > r->capacity) {
                memset(edge, 0, (size_t)(SLOTS * size) * 2);
                if (s < r->capacity) memcpy(edge, k, (size_t)((r->capacity - s) * size) * 2);
                k = edge;
            }
            _tile_zero(6);
            _tile_zero(7);
            _tile_loadd(4, k, size * 2);
            _tile_dpbf16ps(6, 4, 0);
            _tile_loadd(5, k + TILE * size, size * 2);
            _tile_dpbf16ps(7, 5, 0);
            if (deep > 1) {
                _tile_loadd(4, k + 32, size * 2);
                _tile_dpbf16ps(6, 4, 1);
                _tile_loadd(5, k + TILE * size + 32, size * 2);
                _tile_dpbf16ps(7, 5, 1);
            }
            if (deep > 2) {
                _tile_loadd(4, k + 64, size * 2);
                _tile_dpbf16ps(6, 4, 2);
                _tile_loadd(5, k + TILE * size + 64, size * 2);
                _tile_dpbf16ps(7, 5, 2);
            }
            if (deep > 3) {
                _tile_loadd(4, k + 96, size * 2);
                _tile_dpbf16ps(6, 4, 3);
                _tile_loadd(5, k + TILE * size + 96, size * 2);
                _tile_dpbf16ps(7, 5, 3);
            }
            _tile_stored(6, scores + s * TILE, 64);
            _tile_stored(7, scores + (s + TILE) * TILE, 64);
        }
        for (long s = start; s < limit; s += SLOTS)
            if (some[s / SLOTS])
                for (long i = s; i < s + SLOTS; i++)
                    most = _mm512_mask_max_ps(most, bits[i], most, _mm512_load_ps(scores + i * TILE));
        most = _mm512_mul_ps(most, scaling);
        for (long s = start; s < limit; s += SLOTS) {
            if (!some[s / SLOTS]) continue;
            uint32_t turn[TILE * TILE] __attribute__((aligned(64)));
            for (long i = s; i < s + SLOTS; i += 2) {
                __m512i line = _mm512_setzero_si512();
                if (bits[i] | bits[i + 1]) {
                    __m512 e = _mm512_maskz_mov_ps(
                        bits[i], exp16(_mm512_fmsub_ps(_mm512_load_ps(scores + i * TILE), scaling, most)));
                    __m512 f = _mm512_maskz_mov_ps(
                        bits[i + 1], exp16(_mm512_fmsub_ps(_mm512_load_ps(scores + (i + 1) * TILE), scaling, most)));
                    sum = _mm512_add_ps(sum, _mm512_add_ps(e, f));
                    line = paired(f, e);
                }
                _mm512_store_si512(turn + (i - s) / 2 * TILE, line);
            }
            transpose(turn, TILE, weights + s * TILE, TILE);
        }
        _mm512_store_ps(sums, sum);
        for (long d = 0; d < size; d += 64) {
            int more = size - d > 32;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (long s = start; s < limit; s += SLOTS) {
                if (!some[s / SLOTS]) continue;
                const bf16 *v = pairs + s * size + d * SLOTS;
                _tile_loadd(4, weights + s * TILE, 64);
                _tile_loadd(5, v, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, v + TILE * SLOTS, 64);
                _tile_dpbf16ps(1, 4, 6);
                if (!more) continue;
                _tile_loadd(7, v + 2 * TILE * SLOTS, 64);
                _tile_dpbf16ps(2, 4, 7);
                _tile_loadd(5, v + 3 * TILE * SLOTS, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_stored(0, out, 256);
            _tile_stored(1, out + TILE, 256);
            if (more) {
                _tile_stored(2, out + 2 * TILE, 256);
                _tile_stored(3, out + 3 * TILE, 256);
            }
            for (long row = 0; row < TILE && t * TILE + row < j->rows; row++) {
                long q = t * TILE + row;
                __m512 scale = _mm512_set1_ps(1.0f / sums[row]);
                bf16 *to = j->att + (q / shared) * m->heads * size + (g * shared + q % shared) * size + d;
                for (int h = 0; h < (more ? 4 : 2); h++)
                    _mm256_storeu_si256((void *)(to + h * TILE),
                                        narrow(_mm512_mul_ps(_mm512_load_ps(out + row * 64 + h * TILE), scale)));
            }
        }
    }
}

/* Which of the 32 slots from s on node n sees. */
static uint32_t looked_at(const request *r, long n, long s) {
    if (!r->mask) { /* slots 1, 2, ... hold a prompt in order */
        long last = r->begin + n + 2 - s;
        uint32_t all = last <= 0 ? 0 : last < SLOTS ? (1u << last) - 1 : ~0u;
        return s ? all : all & ~1u;
    }
    const bf16 *mask = r->mask + n * r->mask_stride + s;
    if (s + SLOTS <= r->used) return _mm512_testn_epi16_mask(_mm512_loadu_si512(mask), _mm512_set1_epi16(0x7fff));
    uint32_t found = 0;
    for (long i = 0; i < r->used - s; i++) found |= (uint32_t)!(mask[i] & 0x7fffu) << i;
    return found;
}

/* Who sees what, as bits: this thread's share of the query tiles. */
static void see(const job *j, long me) {
    long shared = j->m->heads / j->m->groups, tiles = up(j->rows, TILE) / TILE;
    for (long t = tiles * me / j->all.workers; t < tiles * (me + 1) / j->all.workers; t++) {
        uint16_t *bits = j->bits + t * j->seen;
        uint8_t *some = j->some + t * j->seen / SLOTS;
        long start = j->seen, limit = 0, end = (t + 1) * TILE < j->rows ? (t + 1) * TILE : j->rows;
        memset(bits, 0, (size_t)j->seen * 2);
        memset(some, 0, (size_t)(j->seen / SLOTS));
        for (long row = t * TILE, next; row < end; row = next) {
            long n = row / shared;
            next = (n + 1) * shared < end ? (n + 1) * shared : end;
            int mine = ((1 << (next - row)) - 1) << row % TILE;
            for (long s = 0; s < j->seen; s += SLOTS) {
                uint32_t which = looked_at(j->r, n, s);
                if (!which) continue;
                __m512i more = _mm512_maskz_set1_epi16(which, (short)mine);
                _mm512_store_si512(bits + s, _mm512_or_si512(_mm512_load_si512(bits + s), more));
                some[s / SLOTS] = 1;
                start = s < start ? s : start;
                limit = s + SLOTS > limit ? s + SLOTS : limit;
            }
        }
        j->start[t] = start, j->limit[t] = limit;
    }
}

static void work(void *data) {
    job *j = data;
    const model *m = j->m;
    const request *r = j->r;
    long me = j->t->threads > 1 ? j->t->number() : 0, count = r->count;
    if (j->t->threads > 1) j->all.workers = j->t->count(); /* the same for all; may be fewer than asked for */
    configure();
    char *own = j->own + (size_t)me * j->own_size;
    long width = m->hidden > m->inner ? m->hidden : m->inner;
    if (m->heads * m->size > width) width = m->heads * m->size;
    desk d = {.small = own, .sizes = (float *)(own + 2 * TILE * width)};
    d.normed = (bf16 *)(d.sizes + TILE);
    char *unit = (char *)(d.normed + TILE * m->hidden), *rest = unit + 2 * (width / DEEP * STEP);
    long stride = (m->heads + 2 * m->groups) * m->size, parts = 1, tiles = up(j->rows, TILE) / TILE;
    while (parts < tiles && parts * m->groups % j->all.workers) parts++; /* the same for each thread, if that can be */
    if (tiles > 16 * parts) parts *= 2; /* quick threads take more */
    see(j, me);
    for (long at = 0; at < m->layers; at++) {
        const layer *l = m->layer + at;
        atomic_long *taken = j->taken + at * PHASES;
        input a = input_of(j, &l->qkv, j->x, NULL, l->before, count, &d, me);
        product(j, a, count, (result){&l->qkv, .out = j->qkv, .stride = stride, .kind = STORE}, me, unit, taken);
        meet(&j->all);
        rotate(j, at, me);
        meet(&j->all);
        for (long task = me; task < parts * m->groups; task = atomic_fetch_add(taken + 1, 1) + j->all.workers)
            attend(j, at, task / parts, task % parts, parts, rest);
        meet(&j->all);
        a = input_of(j, &l->out, j->att, NULL, NULL, count, &d, me);
        result on = {.out = j->x, .stride = m->hidden, .kind = ADD};
        on.w = &l->out;
        product(j, a, count, on, me, unit, taken + 2);
        meet(&j->all);
        a = input_of(j, &l->gate_up, j->x, NULL, l->after, count, &d, me);
        int pairs = count > TILE / 2 && l->gate_up.format != TILES && l->down.format != TILES;
        product(j, a, count, (result){&l->gate_up, .out = j->act, .stride = pairs ? 0 : m->inner, .kind = SILU}, me,
                unit, taken + 3);
        meet(&j->all);
        if (pairs) a = input_in_pairs((const char *)j->act, m->inner);
        else a = input_of(j, &l->down, j->act, NULL, NULL, count, &d, me);
        on.w = &l->down;
        product(j, a, count, on, me, unit, taken + 4);
        meet(&j->all);
    }
    input a = input_of(j, &m->head, j->x, r->keep, m->norm, r->kept, &d, me);
    product(j, a, r->kept, (result){&m->head, .out = r->logits, .stride = m->head.out, .kind = STORE}, me, unit,
            j->taken + m->layers * PHASES);
    _tile_release();
}

enum { PARTS = 11 };

/* Bytes of each buffer of a forward of `count` rows over `used` slots. */
static void sizes_of(const model *m, long count, long used, long threads, long *parts) {
    long rows = up(count, 3 * TILE), padded = up(count * (m->heads / m->groups), TILE), seen = up(used, SLOTS);
    long width = m->hidden > m->inner ? m->hidden : m->inner;
    if (m->heads * m->size > width) width = m->heads * m->size;
    long own = 2 * TILE * width + TILE * 4 + TILE * m->hidden * 2 + 2 * (width / DEEP * STEP);
    own += 2 * TILE * m->size + seen * TILE * 6 + seen * m->size * 2 + SLOTS * m->size * 2 + 2 * 4096 + TILE * 4;
    parts[0] = rows * m->hidden * 2;
    parts[1] = rows * (m->heads + 2 * m->groups) * m->size * 2;
    parts[2] = m->groups * padded * m->size * 2;
    parts[3] = rows * m->heads * m->size * 2;
    parts[4] = rows * m->inner * 2;
    parts[5] = padded / TILE * seen * 2;
    parts[6] = padded / TILE * 2 * (long)sizeof(long);
    parts[7] = up(own, 4096) * threads;
    parts[8] = rows * (width * 2 + 4);
    parts[9] = padded / TILE * seen / SLOTS;
    parts[10] = (m->layers + 1) * PHASES * (long)sizeof(atomic_long);
    for (int i = 0; i < PARTS; i++) parts[i] = up(parts[i], 64);
}

/* Bytes that `forward` needs. */
long room(const model *m, long count, long used, long capacity, long threads) {
    (void)capacity; /* simd.c asks for it */
    long parts[PARTS], total = 0;
    sizes_of(m, count, used, threads, parts);
    for (int i = 0; i < PARTS; i++) total += parts[i];
    return total;
}

/* Logits [kept, head.out] of a request; `memory` has `room` bytes, aligned to 64. */
void forward(const model *m, const request *r, const team *t, char *memory) {
    long parts[PARTS], shared = m->heads / m->groups;
    char *at[PARTS];
    sizes_of(m, r->count, r->used, t->threads, parts);
    for (int i = 0; i < PARTS; memory += parts[i++]) at[i] = memory;
    job j = {.m = m, .r = r, .t = t, .rows = r->count * shared, .padded = up(r->count * shared, TILE),
             .seen = up(r->used, SLOTS), .x = (bf16 *)at[0], .qkv = (bf16 *)at[1], .query = (bf16 *)at[2],
             .att = (bf16 *)at[3], .act = (bf16 *)at[4], .bits = (uint16_t *)at[5], .limit = (long *)at[6],
             .start = (long *)at[6] + up(r->count * shared, TILE) / TILE,
             .own = at[7], .own_size = (size_t)(parts[7] / t->threads), .ready = at[8],
             .some = (uint8_t *)at[9], .taken = (atomic_long *)at[10], .all = {.workers = 1}};
    j.sizes = (float *)(at[8] + parts[8]) - up(r->count, 3 * TILE);
    for (long i = 0; i < (m->layers + 1) * PHASES; i++) atomic_init(j.taken + i, 0);
    memcpy(j.x, r->x, (size_t)(r->count * m->hidden) * 2);
    if (t->threads > 1) t->parallel(work, &j, (unsigned)t->threads, 0);
    else work(&j);
}
