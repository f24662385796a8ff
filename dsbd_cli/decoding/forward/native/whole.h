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
