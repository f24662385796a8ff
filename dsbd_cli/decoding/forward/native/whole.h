/* What a whole forward in one call is given; `whole.py` has the same records. `real` is the type of
 * activations, keys, values and logits: bf16 in `tiles.c`, float in `simd.c`. */

/* out = x W^T (+ bias): W packed by the file that multiplies; scale and format are for its own use. */
typedef struct {
    const char *weight;
    const float *scale, *bias;
    long in, out, format;
} linear;

typedef struct {
    const real *before, *after, *q_norm, *k_norm; /* RMS weights; the last two may be NULL */
    linear qkv, out, gate_up, down;               /* gate_up: units of 16 gates and their 16 ups */
} layer;

typedef struct {
    long layers, hidden, heads, groups, size, inner, int8;
    float eps, head_eps, scaling;
    const layer *layer;
    const real *norm;
    linear head;
} model;

typedef struct {
    long count, used, capacity, begin; /* begin: the first row's place in a prompt, where there is no mask */
    const real *x, *cos, *sin, *mask;  /* mask [count, mask_stride], 0 where a slot is seen; or NULL */
    long mask_stride;
    const int64_t *slots, *keep, *positions; /* positions [capacity]: of every slot; tiles.c reads none */
    long kept;
    real *const *keys, *const *values;
    real *logits;
} request;

long room(const model *m, long count, long used, long capacity, long threads);
void forward(const model *m, const request *r, const team *t, char *memory);

/* A forward over new nodes of a tree, from their tokens to the best entries of their logits. One call, for the weights
 * that a forward reads have thrown everything else out of the caches: what is called around it costs by how much code
 * that is, ten times what it does in a loop of its own. */
typedef struct {
    request r; /* capacity, keys and values; the rest is made here */
    /* count, used, kept; [count] each: token, position, slot, row of the table to write and to begin with, place of
     * the nearest ancestor among these (-1: none); [kept]: places of those whose logits are wanted. */
    const int64_t *numbers;
    const real *embedding, *cos, *sin; /* by token; by position */
    real *table;                       /* [rows, width]: see `cache/buffers.py`, TreeMasks */
    const real *hidden;
    long width;
    int64_t *positions; /* [capacity], of all slots; or NULL */
    rows_function *rows_of;
    long vocab, best; /* best entries of the first `vocab` logits: see `rows_of` in kernels.c */
    int64_t *best_ids;
    float *best_logps;
    uint8_t *finite;
} tree_step;

static inline long line_bytes(long reals) { return (reals * (long)sizeof(real) + 63) / 64 * 64; }

static inline void gathered(const real *from, const int64_t *which, long count, long width, real *to) {
    for (long n = 0; n < count; n++) memcpy(to + n * width, from + which[n] * width, (size_t)width * sizeof(real));
}

/* 0; -1 where there is no memory; or how many bytes of memory it needs, where `size` are fewer: nothing is done then. */
long step(const model *m, tree_step *s, const team *t, char *memory, long size) {
    request *r = &s->r;
    const int64_t *ids = s->numbers + 3;
    long count = r->count = s->numbers[0];
    r->used = s->numbers[1], r->kept = s->numbers[2];
    const int64_t *at = ids + count, *slots = at + count, *rows = slots + count, *base = rows + count;
    const int64_t *above = base + count;
    r->slots = slots, r->keep = above + count;
    long own = (room(m, count, r->used, r->capacity, t->threads) + 63) / 64 * 64;
    long x_bytes = line_bytes(count * m->hidden), turn_bytes = line_bytes(count * m->size);
    long mask_bytes = line_bytes(count * s->width), need = own + x_bytes + 2 * turn_bytes + mask_bytes;
    need += line_bytes(r->kept * m->head.out);
    if (need > size) return need;
    char *rest = memory + own;
    real *x = (real *)rest, *cos = (real *)(rest += x_bytes), *sin = (real *)(rest += turn_bytes);
    real *mask = (real *)(rest += turn_bytes), *logits = (real *)(rest + mask_bytes);
    gathered(s->embedding, ids, count, m->hidden, x);
    gathered(s->cos, at, count, m->size, cos);
    gathered(s->sin, at, count, m->size, sin);
    gathered(s->table, base, count, s->width, mask);
    for (long n = 0; n < count; n++) {
        real *row = mask + n * s->width;
        for (long i = 0; i < count; i++) row[slots[i]] = *s->hidden;
        for (long i = n; i >= 0; i = above[i]) row[slots[i]] = 0;
        if (s->positions) s->positions[slots[n]] = at[n];
    }
    for (long n = 0; n < count; n++)
        memcpy(s->table + rows[n] * s->width, mask + n * s->width, (size_t)s->width * sizeof(real));
    r->x = x, r->cos = cos, r->sin = sin, r->mask = mask, r->mask_stride = s->width;
    r->positions = s->positions, r->logits = logits;
    forward(m, r, t, memory);
    /* The threads of the forward wait for more yet: they cost nothing. */
    long wide = m->head.out, vocab = s->vocab < wide ? s->vocab : wide;
    if (t->threads > 1 && r->kept > 1)
        return shared_rows(t, s->rows_of, sizeof(real), logits, wide, r->kept, vocab, s->best, s->best_ids,
                           s->best_logps, s->finite);
    return s->rows_of(logits, wide, r->kept, vocab, s->best, s->best_ids, s->best_logps, s->finite);
}
