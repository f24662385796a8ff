/* Products of 4 and 8-bit blocks with bytes, on processors that add up four products at once (AVX-512 VNNI,
 * AVX-VNNI): for `int8.c`. */

/* sum + a0 b0 + a1 b1 + a2 b2 + a3 b3 of each 4 bytes. */
INLINE vi quads(vi sum, vb a, const int8_t *four) {
    int32_t b;
    memcpy(&b, four, 4);
#if defined(FOURS)
    for (int i = 0; i < VL; i++)
        for (int k = 0; k < 4; k++) sum[i] += a[4 * i + k] * four[k];
    return sum;
#elif VL == 16
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, _mm512_set1_epi32(b));
#else
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, _mm256_set1_epi32(b));
#endif
}
INLINE vi alike(int32_t x) { return x - (vi){0}; }

/* Rows of x that one pass over two vectors of weights serves: what the registers hold. */
#define AT_ONCE(F) (VL == 16 && (F) == Q4 ? 6 : 4)
#define AT_MOST 8 /* also where fewer are at once: GCC leaves smaller arrays in memory */

/* As in `int8.c`. The sum of a half of 4-bit numbers has 16 bits: that of the first half stands in the upper ones of
 * a word while the other is added up below it, from 2^15 on, so that it borrows nothing. */
INLINE void narrow_units(const int F, const int A, const int N, const char *weight, const narrow *x,
                         const float *size, long in, float *out, long wide, const char *ahead, long each) {
    const long blocks = in / SPAN, unit = unit_bytes(F, in);
    vf sum[2 * V][AT_MOST];
#pragma GCC unroll 8
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[c][n] = (vf){0};
    for (long k = 0; k < blocks; k++, weight += BYTES[F], x++, ahead += each) {
        vi whole[2 * V][AT_MOST];
        vf all[2 * V][AT_MOST];
        fetch(ahead, each);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
            for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) {
                    if (F == Q8) whole[c][n] = alike(x[n * blocks].start[half]);
                    else if (half) whole[c][n] = whole[c][n] << 16 | 0x8000;
                    else whole[c][n] = (vi){0};
                }
#pragma GCC unroll 4
            for (int word = 0; word < 4; word++) {
                vb byte[2 * V];
#pragma GCC unroll 8
                for (int c = 0; c < A * V; c++) {
                    const char *at = weight + c / V * unit + c % V * VL * 4;
                    if (F == Q8) byte[c] = (vb)(*(const vu_any *)(at + 32 + (2 * word + half) * 64) ^ 0x80808080u);
                    else byte[c] = nibbles_at(at + 64 + word * 64, half);
                }
#pragma GCC unroll 16
                for (int n = 0; n < N; n++)
#pragma GCC unroll 8
                    for (int c = 0; c < A * V; c++)
                        whole[c][n] = quads(whole[c][n], byte[c], x[n * blocks].x + 8 * word + 4 * half);
            }
            if (F == Q8) {
#pragma GCC unroll 8
                for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
                    for (int n = 0; n < N; n++) {
                        vf now = __builtin_convertvector(whole[c][n], vf), by = spread(x[n * blocks].times[half]);
                        if (half) all[c][n] = fused(now, by, all[c][n]);
                        else all[c][n] = now * by;
                    }
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < A * V; c++) {
            const uint16_t *scales = (const uint16_t *)(weight + c / V * unit) + c % V * VL;
            vf d = halves(scales);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                if (F == Q8) {
                    sum[c][n] = fused(all[c][n], d, sum[c][n]);
                } else {
                    vf one = __builtin_convertvector(both((vs)(whole[c][n] ^ 0x8000), x[n * blocks].scale), vf);
                    sum[c][n] = fused(spread(x[n * blocks].sum), halves(scales + 16), fused(one, d, sum[c][n]));
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) *(vf_any *)(out + n * wide + c * VL) = sum[c][n] * spread(size[n]);
}
