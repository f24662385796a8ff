/* Steps on rows of bfloat16 numbers in AVX-512, for `tiles.c`, which includes this: those of kernels.c, with its
 * roundings. */

#define TILE 16 /* rows, or outputs, of a tile */
static long up(long x, long to) { return (x + to - 1) / to * to; }

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

static inline __m512 silu(__m512 gate, __m512 by) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(e, _mm512_set1_ps(1.0f))), by);
}
