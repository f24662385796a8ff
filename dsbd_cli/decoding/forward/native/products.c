/* Products of rows and weights on matrix tiles, for `tiles.c`, which includes this: rows laid out for a kind of weights,
 * tiles of sums, and what becomes of those. One file, since a layout is what these three share.
 *
 * Weights are read from memory once a forward. Up to 48 rows all sums of a unit of outputs are tiles at once; more rows
 * take a unit 32 at a time, two tiles of rows by two of outputs: a load a product.
 */

#define UNIT 32    /* outputs a unit */
#define STEP 2048  /* bytes of a unit's weights for 64 bytes of a row, as tiles take them */
#define AHEAD 8192 /* bytes of weights to fetch before they are needed */
#define RING 4     /* steps of unpacked blocks that are kept where they are needed once */

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

/* Rows x units of one product, into `out` from its first row on; `buffer` has room for a unit as tiles take it. */
static void product_of_few(const job *j, input a, long count, result r, long me, char *buffer) {
    const linear *w = r.w;
    long steps = w->in * (j->m->int8 ? 1 : 2) / 64, units = up(w->out, UNIT) / UNIT;
    long begin = units * me / j->all.workers, end = units * (me + 1) / j->all.workers;
    int blocks = w->format != TILES;
    bf16 *out = r.out;
    long ring = blocks && !j->m->int8 ? RING - 1 : -1; /* needed once: what stays near is enough */
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

/* One unit times 16 or 32 rows, which pass by: it is the unit's weights that should stay near. Meanwhile the sums of
 * the rows before are finished: the tiles do not wait for that. */
#define MULTIPLY_MANY(DP, FIRST_READ)                                                                        \
    _tile_zero(0);                                                                                           \
    _tile_zero(1);                                                                                           \
    _tile_zero(2);                                                                                           \
    _tile_zero(3);                                                                                           \
    for (long s = 0; s < steps; s++) {                                                                       \
        const char *from = x + s * a.step, *b = n ? again + s * STEP : FIRST_READ;                           \
        _tile_loadd(6, b, 64);                                                                               \
        _tile_stream_loadd(4, from, a.stride);                                                               \
        DP(0, 4, 6);                                                                                         \
        if (two) {                                                                                           \
            _tile_stream_loadd(5, from + a.tile, a.stride);                                                  \
            DP(2, 5, 6);                                                                                     \
        }                                                                                                    \
        _tile_loadd(7, b + STEP / 2, 64);                                                                    \
        DP(1, 4, 7);                                                                                         \
        if (two) DP(3, 5, 7);                                                                                \
        for (due += last; due >= steps; due -= steps) finish(&done, piece++);                                \
    }

/* The next unit of a product of many rows: of this thread's share, then of the others', which the machine may have slowed
 * down; -1: none is left. `taken` [workers]. */
static long unit_of(const job *j, atomic_long *taken, long units, long me) {
    long workers = j->all.workers;
    for (long i = 0; i < workers; i++) {
        long whose = (me + i) % workers, end = units * (whose + 1) / workers;
        long u = units * whose / workers + atomic_fetch_add(taken + whose, 1);
        if (u < end) return u;
    }
    return -1;
}

/* The same for more rows than one pass takes, in bfloat16. */
static void product_of_many(const job *j, input a, long count, result r, long me, char *buffer, atomic_long *taken) {
    const linear *w = r.w;
    long steps = w->in / DEEP, units = up(w->out, UNIT) / UNIT, tiles = up(count, TILE) / TILE;
    int blocks = w->format != TILES;
    long side = blocks ? TILE * TILE : TILE, line = blocks ? TILE * 4 : UNIT * 4;
    float sums[2][2 * TILE * UNIT] __attribute__((aligned(64)));
    result done = r;
    long piece = 0, last = 0, turn = 0; /* of `done` */
    for (long u; (u = unit_of(j, taken, units, me)) >= 0;) {
        const char *unit = w->weight + u * steps * STEP_BYTES[w->format], *again = blocks ? buffer : unit;
        for (long n = 0; n < tiles; n += 2) {
            const char *x = a.data + n * a.tile;
            long due = 0;
            int two = n + 1 < tiles;
            if (blocks) {
                MULTIPLY_MANY(OUTPUTS_FIRST, read_blocks(w, unit, s, steps, buffer, -1))
            } else {
                MULTIPLY_MANY(_tile_dpbf16ps, read_tiles(unit, s))
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
    }
    for (; piece < last; piece++) finish(&done, piece);
}

static void product(const job *j, input a, long count, result r, long me, char *buffer, atomic_long *taken) {
    if (count > 3 * TILE && !j->m->int8) product_of_many(j, a, count, r, me, buffer, taken);
    else product_of_few(j, a, count, r, me, buffer);
}
