/* Attention over the slots of a pool on matrix tiles, for `tiles.c`, which includes this. Who sees what; a group's
 * queries a tile of 16 rows at a time, by 32 slots, leaving out those that none of the 16 sees. */

#define SLOTS 32   /* slots that a query tile looks at together */

/* The N-th 32 numbers of keys times those of queries, which are in tile N: 32 slots of 16 rows, into tiles 6 and 7. */
#define SCORES(N)                                               \
    if (deep > N) {                                             \
        _tile_loadd(4, k + N * 32, size * 2);                   \
        _tile_dpbf16ps(6, 4, N);                                \
        _tile_loadd(5, k + TILE * size + N * 32, size * 2);     \
        _tile_dpbf16ps(7, 5, N);                                \
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
            SCORES(0) SCORES(1) SCORES(2) SCORES(3)
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
