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
    uint16_t *bits; /* [query tile, slot]: which of 16 query rows see the slot */
    long *start, *limit; /* [query tile]: slots before and beyond these are seen by none of them; multiples of 32 */
    char *own;      /* [threads, own_size] */
    size_t own_size;
    meeting all;
} job;

#define TILE 16
#define UNIT 32    /* outputs a unit */
#define STEP 2048  /* bytes of a unit's weights for 64 bytes of a row, as tiles take them */
#define AHEAD 8192 /* bytes of weights to fetch before they are needed */
#define RING 4     /* steps of unpacked blocks that are kept where they are needed once */
#define QUERIES 64 /* query rows an attention task */
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

/* x [count, w->in] as `w` is multiplied with; `to` has room for two bytes a number of whole tiles. */
static input input_of(const job *j, const linear *w, const bf16 *x, long count, char *to, float *sizes) {
    long width = w->in, steps = width / DEEP;
    if (w->format != TILES) {
        for (long n = 0; n < count; n += TILE) {
            const uint32_t *rows = (const uint32_t *)(x + n * width);
            uint32_t *pairs = (uint32_t *)(to + n * width * 2);
            if (count - n > 4)
                for (long s = 0; s < steps; s++) transpose(rows + s * TILE, width / 2, pairs + s * TILE * TILE, TILE);
            else
                for (long row = 0; row < count - n; row++)
                    for (long i = 0; i < width / 2; i++) pairs[i * TILE + row] = rows[row * width / 2 + i];
        }
        return (input){to, 64, TILE * 64, TILE * width * 2, NULL};
    }
    if (!j->m->int8) return (input){(const char *)x, width * 2, 64, TILE * width * 2, NULL};
    for (long n = 0; n < count; n++, x += width) {
        char *high = to + (n / TILE * 2 * TILE + n % TILE) * width, *low = high + TILE * width;
        __m512 most = _mm512_set1_ps(1e-9f);
        for (long i = 0; i < width; i += 16) most = _mm512_max_ps(most, _mm512_abs_ps(wide(x + i)));
        float size = _mm512_reduce_max_ps(most) / 127.0f;
        __m512 scale = _mm512_set1_ps(1.0f / size);
        sizes[n] = size;
        for (long i = 0; i < width; i += 16) {
            __m512 v = _mm512_mul_ps(wide(x + i), scale);
            __m512i whole = _mm512_cvtps_epi32(v);
            __m512 rest = _mm512_mul_ps(_mm512_sub_ps(v, _mm512_cvtepi32_ps(whole)), _mm512_set1_ps(FINE));
            _mm_store_si128((void *)(high + i), _mm512_cvtsepi32_epi8(whole));
            _mm_store_si128((void *)(low + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rest)));
        }
    }
    return (input){to, width, 64, TILE * width, sizes};
}

enum { STORE, ADD, SILU };

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
            _tile_loadd(7, b + STEP / 2, 64);                                                                \
            DP(1, 6, 7);                                                                                     \
            DP(3, 5, 7);                                                                                     \
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

/* Sums [tile of rows, half of UNIT, 16, 16 rows] as [rows, UNIT]. */
static void turned_back(const float *from, float *to, long rows) {
    const __m512i lines = _mm512_mullo_epi32(_mm512_set1_epi32(TILE), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8,
                                                                                       7, 6, 5, 4, 3, 2, 1, 0));
    for (long n = 0; n < rows; n += TILE)
        for (int h = 0; h < 2; h++) {
            const float *tile = from + n * UNIT + h * TILE * TILE;
            float *out = to + n * UNIT + h * TILE;
            if (rows - n > 3) transpose(tile, TILE, out, UNIT);
            else
                for (long row = 0; row < rows - n; row++)
                    _mm512_store_ps(out + row * UNIT, _mm512_i32gather_ps(lines, tile + row, 4));
        }
}

/* Rows x units of one product; `out` [rows, stride] is written, added to, or gets silu(gate) x up. `buffer` has
 * room for a unit as tiles take it. */
static void product(const job *j, const linear *w, input a, long count, bf16 *out, long stride, int kind, long me,
                    char *buffer) {
    long steps = w->in * (j->m->int8 ? 1 : 2) / 64, units = up(w->out, UNIT) / UNIT;
    long begin = units * me / j->all.workers, end = units * (me + 1) / j->all.workers;
    int blocks = w->format != TILES;
    long ring = blocks && count <= 3 * TILE ? RING - 1 : -1; /* needed once: what stays near is enough */
    long side = blocks ? TILE * TILE : TILE, line = blocks ? TILE * 4 : UNIT * 4;
    float sums[3 * TILE * UNIT] __attribute__((aligned(64))), back[3 * TILE * UNIT] __attribute__((aligned(64)));
    for (long u = begin; u < end; u++) {
        const char *unit = w->weight + u * steps * STEP_BYTES[w->format], *again = blocks ? buffer : unit;
        for (long n = 0, rows; n < count; n += rows) {
            long left = count - n, tall = left <= TILE ? 1 : left > 2 * TILE && left <= 3 * TILE ? 3 : 2;
            rows = tall * TILE;
            const char *x = a.data + n / TILE * a.tile;
            float *c = sums;
            if (a.size) tall = 2, rows = TILE, x += n / TILE * a.tile; /* high and low bytes */
            if (j->m->int8) {
                MULTIPLY(_tile_dpbssd, read_tiles(unit, s))
            } else if (blocks) {
                MULTIPLY(OUTPUTS_FIRST, read_blocks(w, unit, s, steps, buffer, ring))
                turned_back(sums, c = back, left < rows ? left : rows);
            } else {
                MULTIPLY(_tile_dpbf16ps, read_tiles(unit, s))
            }
            long last = left < rows ? left : rows;
            for (long row = 0; row < last; row++) {
                __m512 half[2];
                for (int h = 0; h < 2; h++) {
                    const float *from = c + row * UNIT + h * TILE;
                    half[h] = _mm512_load_ps(from);
                    if (a.size) {
                        __m512 scale = _mm512_loadu_ps(w->scale + u * UNIT + h * TILE);
                        __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(from + TILE * UNIT));
                        half[h] = _mm512_cvtepi32_ps(_mm512_castps_si512(half[h]));
                        half[h] = _mm512_fmadd_ps(low, _mm512_set1_ps(1.0f / FINE), half[h]);
                        half[h] = _mm512_mul_ps(half[h], _mm512_mul_ps(scale, _mm512_set1_ps(a.size[n + row])));
                    }
                    if (w->bias) half[h] = _mm512_add_ps(half[h], _mm512_loadu_ps(w->bias + u * UNIT + h * TILE));
                }
                bf16 *to = out + (n + row) * stride;
                if (kind == SILU) {
                    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), half[0]));
                    __m512 gate = _mm512_div_ps(half[0], _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
                    _mm256_storeu_si256((void *)(to + u * TILE), narrow(_mm512_mul_ps(gate, half[1])));
                    continue;
                }
                for (int h = 0; h < 2; h++) {
                    long at = u * UNIT + h * TILE;
                    if (at >= w->out) break;
                    if (kind == ADD) half[h] = _mm512_add_ps(half[h], wide(to + at));
                    _mm256_storeu_si256((void *)(to + at), narrow(half[h]));
                }
            }
        }
    }
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
                rms_bf16(from, weight, normed, 1, size, m->head_eps);
                head = normed;
            }
            bf16 *to = is_key ? r->keys[at] + ((h - m->heads) * r->capacity + r->slots[n]) * size
                              : j->query + ((h / shared) * j->padded + n * shared + h % shared) * size;
            turn_bf16(head, r->cos + n * size, r->sin + n * size, to, size);
        }
        for (long g = 0; g < m->groups; g++, from += size)
            memcpy(r->values[at] + (g * r->capacity + r->slots[n]) * size, from, (size_t)size * 2);
    }
}

/* One group's attention for query rows `first` to `last` (at most QUERIES of them). */
static void attend(const job *j, long at, long g, long first, long last, char *own) {
    const model *m = j->m;
    const request *r = j->r;
    long size = m->size, shared = m->heads / m->groups, deep = size / 32, tiles = up(last - first, TILE) / TILE;
    /* Requests have slots of their own: a tile of rows looks from the first to the last that they see. */
    const long *starts = j->start + first / TILE, *limits = j->limit + first / TILE;
    long start = j->seen, limit = 0;
    for (long t = 0; t < tiles; t++) {
        start = starts[t] < start ? starts[t] : start;
        limit = limits[t] > limit ? limits[t] : limit;
    }
    uint32_t *turned = (uint32_t *)own;                      /* [tile, size / 2, 16 rows] */
    float *scores = (float *)(turned + QUERIES * size / 2);  /* [slot, row] */
    bf16 *weights = (bf16 *)(scores + j->seen * QUERIES);    /* [row, slot] */
    bf16 *pairs = weights + j->seen * QUERIES;               /* [slot / 2, size, 2] */
    bf16 *edge = pairs + j->seen * size;                     /* [16 slots, size] */
    float *sums = (float *)(edge + TILE * size), *out = sums + QUERIES; /* [row], [16, 64] */
    const bf16 *keys = r->keys[at] + g * r->capacity * size, *values = r->values[at] + g * r->capacity * size;
    for (long t = 0; t < tiles; t++)
        for (long row = 0; row < TILE; row++) {
            const uint32_t *from = (const uint32_t *)(j->query + (g * j->padded + first + t * TILE + row) * size);
            for (long i = 0; i < size / 2; i++) turned[(t * size / 2 + i) * TILE + row] = from[i];
        }
    for (long s = start; s < limit; s += TILE) {
        const bf16 *k = keys + s * size;
        if (s + TILE > r->capacity) {
            memset(edge, 0, (size_t)(TILE * size) * 2);
            if (s < r->capacity) memcpy(edge, k, (size_t)((r->capacity - s) * size) * 2);
            k = edge;
        }
        _tile_loadd(0, k, size * 2);
        if (deep > 1) _tile_loadd(1, k + 32, size * 2);
        if (deep > 2) _tile_loadd(2, k + 64, size * 2);
        if (deep > 3) _tile_loadd(3, k + 96, size * 2);
        for (long t = 0; t < tiles; t++) {
            if (s < starts[t] || s >= limits[t]) continue;
            const uint32_t *q = turned + t * size / 2 * TILE;
            _tile_zero(4);
            _tile_loadd(5, q, 64);
            _tile_dpbf16ps(4, 0, 5);
            if (deep > 1) {
                _tile_loadd(6, q + 256, 64);
                _tile_dpbf16ps(4, 1, 6);
            }
            if (deep > 2) {
                _tile_loadd(5, q + 512, 64);
                _tile_dpbf16ps(4, 2, 5);
            }
            if (deep > 3) {
                _tile_loadd(6, q + 768, 64);
                _tile_dpbf16ps(4, 3, 6);
            }
            _tile_stored(4, scores + s * QUERIES + t * TILE, QUERIES * 4);
        }
    }
    __m512 scaling = _mm512_set1_ps(m->scaling);
    __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                      _mm512_set1_epi32((int)(limit / 2)));
    for (long t = 0; t < tiles; t++) {
        const uint16_t *bits = j->bits + (first / TILE + t) * j->seen;
        const float *column = scores + t * TILE;
        __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
        for (long s = starts[t]; s < limits[t]; s++)
            most = _mm512_mask_max_ps(most, bits[s], most, _mm512_load_ps(column + s * QUERIES));
        most = _mm512_mul_ps(most, scaling);
        uint32_t *to = (uint32_t *)(weights + t * TILE * limit);
        for (long s = starts[t]; s < limits[t]; s += 2) {
            __m512i both = _mm512_setzero_si512();
            if (bits[s] | bits[s + 1]) {
                __m512 e = _mm512_maskz_mov_ps(
                    bits[s], exp16(_mm512_fmsub_ps(_mm512_load_ps(column + s * QUERIES), scaling, most)));
                __m512 f = _mm512_maskz_mov_ps(
                    bits[s + 1], exp16(_mm512_fmsub_ps(_mm512_load_ps(column + (s + 1) * QUERIES), scaling, most)));
                sum = _mm512_add_ps(sum, _mm512_add_ps(e, f));
                both = _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(e)),
                                       _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(f)), 16));
            }
            _mm512_i32scatter_epi32(to + s / 2, rows, both, 4);
        }
        _mm512_store_ps(sums + t * TILE, sum);
    }
    uint16_t order[64];
    for (int i = 0; i < 32; i++) order[2 * i] = (uint16_t)i, order[2 * i + 1] = (uint16_t)(32 + i);
    __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
    for (long s = start; s < limit; s += 2)
        for (long d = 0; d < size; d += 32) {
            __m512i a = _mm512_setzero_si512(), b = a;
            if (s < r->capacity) a = _mm512_loadu_si512(values + s * size + d);
            if (s + 1 < r->capacity) b = _mm512_loadu_si512(values + (s + 1) * size + d);
            _mm512_storeu_si512(pairs + s * size + 2 * d, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(pairs + s * size + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
        }
    for (long t = 0; t < tiles; t++)
        for (long d = 0; d < size; d += 32) {
            _tile_zero(0);
            _tile_zero(1);
            for (long s = starts[t]; s < limits[t]; s += 32) {
                const bf16 *v = pairs + s * size + 2 * d;
                _tile_loadd(4, weights + t * TILE * limit + s, limit * 2);
                _tile_loadd(5, v, size * 4);
                _tile_loadd(6, v + 32, size * 4);
                _tile_dpbf16ps(0, 4, 5);
                _tile_dpbf16ps(1, 4, 6);
            }
            _tile_stored(0, out, 128);
            _tile_stored(1, out + TILE, 128);
            for (long row = 0; row < TILE && first + t * TILE + row < last; row++) {
                long q = first + t * TILE + row;
                __m512 scale = _mm512_set1_ps(1.0f / sums[t * TILE + row]);
                bf16 *to = j->att + (q / shared) * m->heads * size + (g * shared + q % shared) * size + d;
                for (int h = 0; h < 2; h++)
                    _mm256_storeu_si256((void *)(to + h * TILE),
                                        narrow(_mm512_mul_ps(_mm512_load_ps(out + row * 32 + h * TILE), scale)));
            }
        }
}

/* Who sees what, as bits: once a forward, by the calling thread. */
static void see(job *j) {
    const request *r = j->r;
    long shared = j->m->heads / j->m->groups;
    for (long n = 0; n < r->count; n++) {
        const bf16 *mask = r->mask + n * r->mask_stride;
        long last = r->mask ? r->used : r->begin + n + 2; /* slots 1, 2, ... hold a prompt in order */
        for (long row = n * shared; row < (n + 1) * shared; row++) {
            uint16_t bit = (uint16_t)(1u << row % TILE), *bits = j->bits + row / TILE * j->seen;
            long top = 0, bottom = j->seen;
            for (long s = r->mask ? 0 : 1; s < last; s++)
                if (!r->mask || !(mask[s] & 0x7fffu)) {
                    bits[s] |= bit;
                    bottom = s < bottom ? s : bottom;
                    top = s + 1;
                }
            top = up(top, 32), bottom = bottom / 32 * 32;
            if (top > j->limit[row / TILE]) j->limit[row / TILE] = top;
            if (bottom < j->start[row / TILE]) j->start[row / TILE] = bottom;
        }
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
    long width = m->hidden > m->inner ? m->hidden : m->inner, rows = up(count, 3 * TILE);
    if (m->heads * m->size > width) width = m->heads * m->size;
    bf16 *normed = (bf16 *)own;
    char *small = (char *)(normed + rows * m->hidden);
    float *sizes = (float *)(small + 2 * rows * width);
    char *unit = (char *)(sizes + up(rows, 16)), *rest = unit + width / DEEP * STEP;
    long tasks = up(j->rows, QUERIES) / QUERIES, stride = (m->heads + 2 * m->groups) * m->size;
    for (long at = 0; at < m->layers; at++) {
        const layer *l = m->layer + at;
        rms_bf16(j->x, l->before, normed, count, m->hidden, m->eps);
        product(j, &l->qkv, input_of(j, &l->qkv, normed, count, small, sizes), count, j->qkv, stride, STORE, me,
                unit);
        meet(&j->all);
        rotate(j, at, me);
        meet(&j->all);
        for (long task = me; task < tasks * m->groups; task += j->all.workers) {
            long first = task % tasks * QUERIES;
            attend(j, at, task / tasks, first, first + QUERIES < j->rows ? first + QUERIES : j->rows, rest);
        }
        meet(&j->all);
        product(j, &l->out, input_of(j, &l->out, j->att, count, small, sizes), count, j->x, m->hidden, ADD, me,
                unit);
        meet(&j->all);
        rms_bf16(j->x, l->after, normed, count, m->hidden, m->eps);
        product(j, &l->gate_up, input_of(j, &l->gate_up, normed, count, small, sizes), count, j->act, m->inner,
                SILU, me, unit);
        meet(&j->all);
        product(j, &l->down, input_of(j, &l->down, j->act, count, small, sizes), count, j->x, m->hidden, ADD, me,
                unit);
        meet(&j->all);
    }
    for (long i = 0; i < r->kept; i++)
        rms_bf16(j->x + r->keep[i] * m->hidden, m->norm, normed + i * m->hidden, 1, m->hidden, m->eps);
    product(j, &m->head, input_of(j, &m->head, normed, r->kept, small, sizes), r->kept, r->logits, m->head.out, STORE,
            me, unit);
    _tile_release();
}

enum { PARTS = 8 };

/* Bytes of each buffer of a forward of `count` rows over `used` slots. */
static void sizes_of(const model *m, long count, long used, long threads, long *parts) {
    long rows = up(count, 3 * TILE), padded = up(count * (m->heads / m->groups), QUERIES), seen = up(used, 32);
    long width = m->hidden > m->inner ? m->hidden : m->inner;
    if (m->heads * m->size > width) width = m->heads * m->size;
    long own = rows * m->hidden * 2 + 2 * rows * width + up(rows, 16) * 4 + width / DEEP * STEP;
    own += QUERIES * m->size * 2 + seen * QUERIES * 6 + seen * m->size * 2 + TILE * m->size * 2 + 4096;
    parts[0] = rows * m->hidden * 2;
    parts[1] = rows * (m->heads + 2 * m->groups) * m->size * 2;
    parts[2] = m->groups * padded * m->size * 2;
    parts[3] = rows * m->heads * m->size * 2;
    parts[4] = rows * m->inner * 2;
    parts[5] = padded / TILE * seen * 2;
    parts[6] = padded / TILE * 2 * (long)sizeof(long);
    parts[7] = up(own, 4096) * threads;
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
    job j = {.m = m, .r = r, .t = t, .rows = r->count * shared, .padded = up(r->count * shared, QUERIES),
             .seen = up(r->used, 32), .x = (bf16 *)at[0], .qkv = (bf16 *)at[1], .query = (bf16 *)at[2],
             .att = (bf16 *)at[3], .act = (bf16 *)at[4], .bits = (uint16_t *)at[5], .limit = (long *)at[6],
             .start = (long *)at[6] + up(r->count * shared, QUERIES) / TILE,
             .own = at[7], .own_size = (size_t)(parts[7] / t->threads), .all = {.workers = 1}};
    memcpy(j.x, r->x, (size_t)(r->count * m->hidden) * 2);
    memset(j.bits, 0, (size_t)parts[5]);
    memset(j.limit, 0, (size_t)parts[6]);
    for (long t = 0; t < j.padded / TILE; t++) j.start[t] = j.seen;
    see(&j);
    if (t->threads > 1) t->parallel(work, &j, (unsigned)t->threads, 0);
    else work(&j);
}
