/* Attention of one row over its slots: for `simd.c`, which includes this.
 *
 * Heads that share keys and values are computed together, for what they read is read once. Every sum runs over
 * slots in one order, and in one way for any number of heads, rows and threads.
 */

/* Heads at once, and vectors of an output at once: what the registers hold. */
#define HEADS (VL == 16 ? 4 : 2)
#define COLUMNS (VL == 16 ? 4 : VL == 8 ? 4 : 2)

/* Sums of the numbers of four vectors each. */
INLINE void across(const vf *sum, float *out) {
#if VL == 8 || defined(__AVX512F__)
    __m256 half[4];
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++)
#if VL == 16
        half[s] = _mm256_add_ps(_mm512_castps512_ps256((__m512)sum[s]),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)sum[s], 1)));
#else
        half[s] = (__m256)sum[s];
#endif
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int s = 0; s < 4; s++) {
        vf all = sum[s];
        for (int left = VL / 2; left; left /= 2)
            for (int i = 0; i < left; i++) all[i] = all[2 * i] + all[2 * i + 1];
        out[s] = all[0];
    }
#endif
}

/* Products of H queries with four keys: out [H, 4], rows `wide` floats apart. */
INLINE void dots(const int H, const float *q, const float *const k[4], long size, float *out, long wide) {
    vf sum[HEADS][4];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) sum[h][s] = (vf){0};
    for (long i = 0; i < size; i += VL) {
        vf key[4];
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) key[s] = *(const vf_any *)(k[s] + i);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            vf one = *(const vf_any *)(q + h * size + i);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) sum[h][s] = fused(one, key[s], sum[h][s]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) across(sum[h], out + h * wide);
}

/* out [H, VL C] = sum over slots of weight x values, times each head's scale. */
INLINE void weigh(const int C, const int H, const float *values, const int32_t *slots, long count, long size,
                  const float *weights, long wide, const float *scale, float *out) {
    vf sum[HEADS][COLUMNS];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sum[h][c] = (vf){0};
    for (long i = 0; i < count; i++) {
        const float *row = values + slots[i] * size;
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            vf value = *(const vf_any *)(row + c * VL);
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) sum[h][c] = fused(value, spread(weights[h * wide + i]), sum[h][c]);
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) *(vf_any *)(out + h * size + c * VL) = sum[h][c] * spread(scale[h]);
}

/* Scores to weights, 0 behind the last of `count`; their sum. */
static float softened(float *scores, long count, float scaling) {
    float most = -INFINITY, lane[16] = {0}, sum = 0;
    long whole = up(count, 16);
    for (long i = count; i < whole; i++) scores[i] = -INFINITY;
    _Pragma("omp simd reduction(max : most)") for (long i = 0; i < whole; i++) {
        scores[i] *= scaling;
        most = scores[i] > most ? scores[i] : most;
    }
    _Pragma("omp simd") for (long i = 0; i < whole; i++) scores[i] = exp_f32(scores[i] - most);
    for (long i = count; i < whole; i++) scores[i] = 0;
    for (long i = 0; i < whole; i += 16)
        _Pragma("omp simd") for (int l = 0; l < 16; l++) lane[l] += scores[i + l];
    for (int l = 0; l < 16; l++) sum += lane[l];
    return sum;
}

/* H heads of one row: q and out [H, size], over keys and values [slots, size]; scores has H rows of `wide`. */
INLINE void attend_heads(const int H, const float *q, const float *keys, const float *values, const int32_t *slots,
                         long count, long size, float scaling, float *scores, long wide, float *out) {
    float scale[HEADS];
    for (long i = 0; i < count; i += 4) {
        const float *k[4];
        for (long s = 0; s < 4; s++) k[s] = keys + slots[i + s < count ? i + s : count - 1] * size;
        dots(H, q, k, size, scores + i, wide);
    }
    for (int h = 0; h < H; h++) scale[h] = 1 / softened(scores + h * wide, count, scaling);
    long c = 0;
    for (; c + COLUMNS * VL <= size; c += COLUMNS * VL)
        weigh(COLUMNS, H, values + c, slots, count, size, scores, wide, scale, out + c);
    for (; c < size; c += VL) weigh(1, H, values + c, slots, count, size, scores, wide, scale, out + c);
}

/* The same for any number of heads; scores has HEADS rows. */
static void attend_over(long heads, const float *q, const float *keys, const float *values, const int32_t *slots,
                        long count, long size, float scaling, float *scores, long wide, float *out) {
    for (long h = 0, now; h < heads; h += now, q += now * size, out += now * size) {
        now = heads - h < HEADS ? heads - h : HEADS;
        switch (now) {
        case 1: attend_heads(1, q, keys, values, slots, count, size, scaling, scores, wide, out); break;
        case 2: attend_heads(2, q, keys, values, slots, count, size, scaling, scores, wide, out); break;
#if VL == 16
        case 3: attend_heads(3, q, keys, values, slots, count, size, scaling, scores, wide, out); break;
        case 4: attend_heads(4, q, keys, values, slots, count, size, scaling, scores, wide, out); break;
#endif
        }
    }
}
