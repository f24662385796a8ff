/* The small steps between the matrix products of a Llama-shaped layer, each in one pass.
 *
 * On a CPU a small model spends half of its time in them when every one is several tensor operations:
 * the weights that stream by have thrown the operations' code and data out of the caches. Plain C,
 * no headers of torch: compiled once by the system's compiler (native/__init__.py), called on raw
 * pointers. Rounding follows Hugging Face's modelling code step by step: bfloat16 values are computed
 * in float32 and rounded where that code rounds.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline float load_f32(float x) { return x; }
static inline float store_f32(float x) { return x; }

static inline float load_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

/* Round to nearest, ties to even; NaN stays NaN. */
static inline bf16 store_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bf16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* exp(x) for x <= 88, within 2 ulp; x below -87 gives 0 or a number next to it. */
static inline float exp_f32(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

/* One candidate of a row's best entries. */
typedef struct {
    float logp;
    int32_t id;
} entry;

static int before(const void *a, const void *b) {
    const entry *x = a, *y = b;
    if (x->logp != y->logp) return x->logp > y->logp ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

#define BLOCK 64

#define KERNELS(S, T)                                                                                        \
    /* out = weight * (x / rms(x)); x, out [count, width]. */                                                \
    void rms_##S(const T *x, const T *weight, T *out, long count, long width, float eps) {                   \
        for (long n = 0; n < count; n++, x += width, out += width) {                                         \
            float sum = 0;                                                                                   \
            _Pragma("omp simd reduction(+ : sum)") for (long i = 0; i < width; i++) {                        \
                float v = load_##S(x[i]);                                                                    \
                sum += v * v;                                                                                \
            }                                                                                                \
            float inverse = 1.0f / sqrtf(sum / (float)width + eps);                                          \
            _Pragma("omp simd") for (long i = 0; i < width; i++) out[i] =                                    \
                store_##S(load_##S(weight[i]) * load_##S(store_##S(load_##S(x[i]) * inverse)));              \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    static inline void turn_##S(const T *x, const T *cos, const T *sin, T *out, long size) {                 \
        long half = size / 2;                                                                                \
        _Pragma("omp simd") for (long i = 0; i < half; i++) {                                                \
            float a = load_##S(x[i]), b = load_##S(x[i + half]);                                             \
            float low = load_##S(store_##S(a * load_##S(cos[i])));                                           \
            float high = load_##S(store_##S(b * load_##S(cos[i + half])));                                   \
            out[i] = store_##S(low - load_##S(store_##S(b * load_##S(sin[i]))));                             \
            out[i + half] = store_##S(high + load_##S(store_##S(a * load_##S(sin[i + half]))));              \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* Rotate queries and keys, write keys and values into the pool.                                         \
     * qkv [count, heads + 2 groups, size]; cos, sin [count, size]; slots [count];                           \
     * query [count, heads / groups, groups, size] (heads of a group apart, groups together);                \
     * keys, values [groups, capacity, size]. q_weight, k_weight: RMS weights [size], or NULL. */            \
    void rope_##S(const T *qkv, const T *cos, const T *sin, const int64_t *slots, const T *q_weight,         \
                  const T *k_weight, T *query, T *keys, T *values, long count, long heads, long groups,      \
                  long size, long capacity, float eps) {                                                     \
        long shared = heads / groups;                                                                        \
        T normed[1024];                                                                                      \
        for (long n = 0; n < count; n++, cos += size, sin += size) {                                         \
            for (long h = 0; h < heads + groups; h++, qkv += size) {                                         \
                int is_key = h >= heads;                                                                     \
                const T *weight = is_key ? k_weight : q_weight, *from = qkv;                                 \
                if (weight) {                                                                                \
                    rms_##S(qkv, weight, normed, 1, size, eps);                                              \
                    from = normed;                                                                           \
                }                                                                                            \
                T *to = is_key ? keys + ((h - heads) * capacity + slots[n]) * size                           \
                               : query + ((n * shared + h % shared) * groups + h / shared) * size;           \
                turn_##S(from, cos, sin, to, size);                                                          \
            }                                                                                                \
            for (long g = 0; g < groups; g++, qkv += size)                                                   \
                memcpy(values + (g * capacity + slots[n]) * size, qkv, (size_t)size * sizeof(T));            \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* out = silu(gate) * up; both [count, 2 width] side by side, out [count, width]. */                     \
    void silu_##S(const T *both, T *out, long count, long width) {                                           \
        for (long n = 0; n < count; n++, both += 2 * width, out += width) {                                  \
            _Pragma("omp simd") for (long i = 0; i < width; i++) {                                           \
                float v = load_##S(both[i]), down = -v;                                                      \
                float gate = v / (1.0f + exp_f32(down > 88.0f ? 88.0f : down));                              \
                out[i] = store_##S(load_##S(store_##S(gate)) * load_##S(both[width + i]));                   \
            }                                                                                                \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    /* The `best` largest raw log-probabilities of each row of logits [count, stride], first `vocab`         \
     * columns: ids and logps [count, best], larger first, ties to the lower id; finite [count].             \
     * Returns 0, or -1 without memory. */                                                                   \
    int rows_##S(const T *logits, long stride, long count, long vocab, long best, int64_t *ids,              \
                 float *logps, uint8_t *finite) {                                                            \
        long blocks = (vocab + BLOCK - 1) / BLOCK;                                                           \
        float *peaks = malloc((size_t)(2 * blocks) * sizeof(float));                                         \
        entry *found = malloc((size_t)vocab * sizeof(entry));                                                \
        if (!peaks || !found) {                                                                              \
            free(peaks);                                                                                     \
            free(found);                                                                                     \
            return -1;                                                                                       \
        }                                                                                                    \
        for (long n = 0; n < count; n++, logits += stride, ids += best, logps += best) {                     \
            float top = -INFINITY, wrong = 0;                                                                \
            for (long b = 0; b < blocks; b++) {                                                              \
                long begin = b * BLOCK, end = begin + BLOCK < vocab ? begin + BLOCK : vocab;                 \
                float peak = -INFINITY, bad = 0;                                                             \
                _Pragma("omp simd reduction(max : peak) reduction(+ : bad)") for (long i = begin; i < end;   \
                                                                                  i++) {                     \
                    float v = load_##S(logits[i]);                                                           \
                    peak = v > peak ? v : peak;                                                              \
                    bad += v == -INFINITY ? 0 : v - v; /* a masked token is legal */                         \
                }                                                                                            \
                peaks[b] = peak;                                                                             \
                top = peak > top ? peak : top;                                                               \
                wrong += bad;                                                                                \
            }                                                                                                \
            finite[n] = wrong == 0 && top > -INFINITY;                                                       \
            if (!finite[n]) {                                                                                \
                memset(ids, 0, (size_t)best * sizeof(int64_t));                                              \
                memset(logps, 0, (size_t)best * sizeof(float));                                              \
                continue;                                                                                    \
            }                                                                                                \
            double mass = 0;                                                                                 \
            for (long b = 0; b < blocks; b++) {                                                              \
                long begin = b * BLOCK, end = begin + BLOCK < vocab ? begin + BLOCK : vocab;                 \
                float sum = 0;                                                                               \
                _Pragma("omp simd reduction(+ : sum)") for (long i = begin; i < end; i++) sum +=             \
                    exp_f32(load_##S(logits[i]) - top);                                                      \
                mass += sum;                                                                                 \
            }                                                                                                \
            float log_mass = (float)log(mass);                                                               \
            /* The best-th largest block maximum: that many entries are at least as large. */                \
            float bar = -INFINITY;                                                                           \
            if (best < blocks) {                                                                             \
                float *heap = peaks + blocks; /* the largest maxima so far, the smallest on top */           \
                long size = 0;                                                                               \
                for (long b = 0; b < blocks; b++) {                                                          \
                    long at;                                                                                 \
                    if (size < best) {                                                                       \
                        at = size++;                                                                         \
                        for (long up; at && heap[up = (at - 1) / 2] > peaks[b]; at = up) heap[at] = heap[up]; \
                    } else {                                                                                 \
                        if (peaks[b] <= heap[0]) continue;                                                   \
                        at = 0;                                                                              \
                        for (long down; (down = 2 * at + 1) < size; at = down) {                             \
                            if (down + 1 < size && heap[down + 1] < heap[down]) down++;                      \
                            if (heap[down] >= peaks[b]) break;                                               \
                            heap[at] = heap[down];                                                           \
                        }                                                                                    \
                    }                                                                                        \
                    heap[at] = peaks[b];                                                                     \
                }                                                                                            \
                bar = heap[0];                                                                               \
                /* Different logits may round to one log-probability: a tie, to be seen whole. */            \
                bar -= 1e-6f * (top - bar + fabsf(log_mass) + fabsf(bar) + 1.0f);                            \
            }                                                                                                \
            long size = 0;                                                                                   \
            for (long b = 0; b < blocks; b++) {                                                              \
                if (peaks[b] < bar) continue;                                                                \
                long begin = b * BLOCK, end = begin + BLOCK < vocab ? begin + BLOCK : vocab;                 \
                for (long i = begin; i < end; i++) {                                                         \
                    float v = load_##S(logits[i]);                                                           \
                    if (v >= bar) {                                                                          \
                        found[size].logp = (v - top) - log_mass;                                             \
                        found[size++].id = (int32_t)i;                                                       \
                    }                                                                                        \
                }                                                                                            \
            }                                                                                                \
            qsort(found, (size_t)size, sizeof(entry), before);                                               \
            for (long i = 0; i < best; i++) {                                                                \
                ids[i] = found[i].id;                                                                        \
                logps[i] = found[i].logp;                                                                    \
            }                                                                                                \
        }                                                                                                    \
        free(peaks);                                                                                         \
        free(found);                                                                                         \
        return 0;                                                                                            \
    }

/* For products in int8: scale each row to a largest absolute value of 1; x, out [count, width]. */
void shrink(const float *x, float *out, float *sizes, long count, long width) {
    for (long n = 0; n < count; n++, x += width, out += width) {
        float size = 1e-9f;
        _Pragma("omp simd reduction(max : size)") for (long i = 0; i < width; i++) {
            float v = fabsf(x[i]);
            size = v > size ? v : size;
        }
        sizes[n] = size;
        float inverse = 1.0f / size;
        _Pragma("omp simd") for (long i = 0; i < width; i++) out[i] = x[i] * inverse;
    }
}

/* x = x * sizes + add, by row, in place; add may be NULL. */
void grow(float *x, const float *sizes, const float *add, long count, long width) {
    for (long n = 0; n < count; n++, x += width) {
        float size = sizes[n];
        if (add) {
            _Pragma("omp simd") for (long i = 0; i < width; i++) x[i] = x[i] * size + add[n * width + i];
        } else {
            _Pragma("omp simd") for (long i = 0; i < width; i++) x[i] *= size;
        }
    }
}

KERNELS(f32, float)
KERNELS(bf16, bf16)

/* `rows` on several threads: each takes a share of the rows. */
typedef int rows_function(const void *, long, long, long, long, int64_t *, float *, uint8_t *);

typedef struct {
    rows_function *rows;
    const char *logits;
    long stride, size, count, vocab, best;
    int64_t *ids;
    float *logps;
    uint8_t *finite;
    int (*number)(void);
    int (*threads)(void);
    int failed;
} rows_job;

static void rows_share(void *data) {
    rows_job *j = data;
    long me = j->number(), all = j->threads();
    long begin = j->count * me / all, end = j->count * (me + 1) / all;
    if (end > begin && j->rows(j->logits + begin * j->stride * j->size, j->stride, end - begin, j->vocab, j->best,
                               j->ids + begin * j->best, j->logps + begin * j->best, j->finite + begin))
        j->failed = -1;
}

/* How to run on several threads: GOMP_parallel and its two questions, as the process has them. */
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*number)(void);
    int (*count)(void);
    long threads;
} team;

int shared_rows(const team *t, rows_function *rows, long size, const void *logits, long stride, long count,
                long vocab, long best, int64_t *ids, float *logps, uint8_t *finite) {
    rows_job j = {rows, logits, stride, size, count, vocab, best, ids, logps, finite, t->number, t->count, 0};
    t->parallel(rows_share, &j, (unsigned)t->threads, 0);
    return j.failed;
}
