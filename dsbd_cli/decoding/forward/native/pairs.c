/* Products of 4-bit blocks with bytes, on processors that add up two products at once: for `int8.c`. */

/* Of each 4 bytes a0 b0 + a1 b1, and a2 b2 + a3 b3. */
INLINE vs pairs(vb a, const int8_t *four) {
    int32_t b;
    memcpy(&b, four, 4);
#if defined(__AVX512BW__)
    return (vs)_mm512_maddubs_epi16((__m512i)a, _mm512_set1_epi32(b));
#elif VL == 8 && defined(__AVX2__)
    return (vs)_mm256_maddubs_epi16((__m256i)a, _mm256_set1_epi32(b));
#else
    vs out;
    for (int i = 0; i < VL * 2; i++) out[i] = (int16_t)(a[2 * i] * four[i % 2 * 2] + a[2 * i + 1] * four[i % 2 * 2 + 1]);
    return out;
#endif
}

/* Rows of x that one pass over two vectors of weights serves: what the registers hold. */
#define AT_ONCE(F) (VL == 16 ? 8 : 4)
#define AT_MOST 8 /* also where fewer are at once: GCC leaves smaller arrays in memory */

/* As in `int8.c`. */
INLINE void narrow_units(const int F, const int A, const int N, const char *weight, const narrow *x,
                         const float *size, long in, float *out, long wide, const char *ahead, long each) {
    const long blocks = in / SPAN, unit = unit_bytes(F, in);
    vf sum[2 * V][AT_MOST];
#pragma GCC unroll 8
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) sum[c][n] = (vf){0};
    for (long k = 0; k < blocks; k++, weight += BYTES[F], x++, ahead += each) {
        vs total[2 * V][AT_MOST];
        fetch(ahead, each);
#pragma GCC unroll 8
        for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) total[c][n] = (vs){0};
#pragma GCC unroll 1
        for (int word = 0; word < 4; word++) {
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vb nibble[2 * V];
#pragma GCC unroll 8
                for (int c = 0; c < A * V; c++)
                    nibble[c] = nibbles_at(weight + c / V * unit + 64 + word * 64 + c % V * VL * 4, half);
#pragma GCC unroll 16
                for (int n = 0; n < N; n++)
#pragma GCC unroll 8
                    for (int c = 0; c < A * V; c++)
                        total[c][n] += pairs(nibble[c], x[n * blocks].x + 8 * word + 4 * half);
            }
        }
#pragma GCC unroll 8
        for (int c = 0; c < A * V; c++) {
            const uint16_t *scales = (const uint16_t *)(weight + c / V * unit) + c % V * VL;
            vf d = halves(scales), m = halves(scales + 16);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                vf all = __builtin_convertvector(both(total[c][n], x[n * blocks].scale), vf);
                sum[c][n] = fused(spread(x[n * blocks].sum), m, fused(all, d, sum[c][n]));
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < A * V; c++)
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) *(vf_any *)(out + n * wide + c * VL) = sum[c][n] * spread(size[n]);
}
