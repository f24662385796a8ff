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
#include "vectors.c"

enum { PHASES = 5 }; /* of a layer, in which threads take units or tasks of each other's */

typedef struct {
    const model *m;
    const request *r;
    const team *t;
    long rows, padded, seen; /* query rows of a group, the same and the slots rounded up */
    bf16 *x, *qkv, *query, *att, *act, *last; /* last: rows behind the last attention */
    char *ready;   /* a product's input for many rows, laid out by all threads */
    float *sizes;  /* of its rows, in int8 */
    uint16_t *bits; /* [query tile, slot]: which of 16 query rows see the slot */
    uint8_t *some;  /* [query tile, 32 slots]: whether any row sees any of them */
    long *start, *limit; /* [query tile]: slots before and beyond these are seen by none of them; multiples of 32 */
    char *own;      /* [threads, own_size] */
    size_t own_size;
    atomic_long *taken; /* [layers and head, PHASES, threads]: units or tasks that have been taken of theirs */
    meeting all;
} job;

#include "products.c"
#include "attention.c"

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

/* Behind the last attention only rows whose logits are wanted go on: they, and what they saw, to the front of others. */
static void go_on(const job *j, long me) {
    const request *r = j->r;
    long hidden = j->m->hidden, wide = j->m->heads * j->m->size;
    long first = r->kept * me / j->all.workers, count = r->kept * (me + 1) / j->all.workers - first;
    gathered(j->x, r->keep + first, count, hidden, j->last + first * hidden);
    gathered(j->att, r->keep + first, count, wide, j->qkv + first * wide);
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
    char *unit = (char *)(d.normed + TILE * m->hidden), *rest = unit + width / DEEP * STEP;
    long stride = (m->heads + 2 * m->groups) * m->size, parts = 1, tiles = up(j->rows, TILE) / TILE;
    while (parts < tiles && parts * m->groups % j->all.workers) parts++; /* the same for each thread, if that can be */
    if (tiles > 16 * parts) parts *= 2; /* quick threads take more */
    see(j, me);
    bf16 *x = j->x, *att = j->att;
    const int64_t *keep = r->keep;
    for (long at = 0; at < m->layers; at++) {
        const layer *l = m->layer + at;
        int some = at + 1 == m->layers && r->kept < count;
        long rows = some ? r->kept : count;
        atomic_long *taken = j->taken + at * PHASES * j->all.workers;
        input a = input_of(j, &l->qkv, x, NULL, l->before, count, &d, me);
        product(j, a, count, (result){&l->qkv, .out = j->qkv, .stride = stride, .kind = STORE}, me, unit, taken);
        taken += j->all.workers;
        meet(&j->all);
        rotate(j, at, me);
        meet(&j->all);
        for (long task = me; task < parts * m->groups; task = atomic_fetch_add(taken, 1) + j->all.workers)
            attend(j, at, task / parts, task % parts, parts, rest);
        meet(&j->all);
        if (some) {
            go_on(j, me);
            x = j->last, att = j->qkv, keep = NULL;
            meet(&j->all);
        }
        a = input_of(j, &l->out, att, NULL, NULL, rows, &d, me);
        taken += j->all.workers;
        result on = {.out = x, .stride = m->hidden, .kind = ADD};
        on.w = &l->out;
        product(j, a, rows, on, me, unit, taken);
        taken += j->all.workers;
        meet(&j->all);
        a = input_of(j, &l->gate_up, x, NULL, l->after, rows, &d, me);
        int pairs = rows > TILE / 2 && l->gate_up.format != TILES && l->down.format != TILES;
        product(j, a, rows, (result){&l->gate_up, .out = j->act, .stride = pairs ? 0 : m->inner, .kind = SILU}, me,
                unit, taken);
        taken += j->all.workers;
        meet(&j->all);
        if (pairs) a = input_in_pairs((const char *)j->act, m->inner);
        else a = input_of(j, &l->down, j->act, NULL, NULL, rows, &d, me);
        on.w = &l->down;
        product(j, a, rows, on, me, unit, taken);
        meet(&j->all);
    }
    input a = input_of(j, &m->head, x, keep, m->norm, r->kept, &d, me);
    product(j, a, r->kept, (result){&m->head, .out = r->logits, .stride = m->head.out, .kind = STORE}, me, unit,
            j->taken + m->layers * PHASES * j->all.workers);
    _tile_release();
}

enum { PARTS = 12 };

/* Bytes of each buffer of a forward of `count` rows over `used` slots. */
static void sizes_of(const model *m, long count, long used, long threads, long *parts) {
    long rows = up(count, 3 * TILE), padded = up(count * (m->heads / m->groups), TILE), seen = up(used, SLOTS);
    long width = m->hidden > m->inner ? m->hidden : m->inner;
    if (m->heads * m->size > width) width = m->heads * m->size;
    long own = 2 * TILE * width + TILE * 4 + TILE * m->hidden * 2 + width / DEEP * STEP;
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
    parts[10] = (m->layers + 1) * PHASES * threads * (long)sizeof(atomic_long);
    parts[11] = parts[0];
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
             .some = (uint8_t *)at[9], .taken = (atomic_long *)at[10], .last = (bf16 *)at[11], .all = {.workers = 1}};
    j.sizes = (float *)(at[8] + parts[8]) - up(r->count, 3 * TILE);
    for (long i = 0; i < (m->layers + 1) * PHASES * t->threads; i++) atomic_init(j.taken + i, 0);
    memcpy(j.x, r->x, (size_t)(r->count * m->hidden) * 2);
    if (t->threads > 1) t->parallel(work, &j, (unsigned)t->threads, 0);
    else work(&j);
}
