/* Matrix tiles (AMX) and AVX-512 as `tiles.c` uses them, in plain C: its tests run on any x86 with a C compiler.
 *
 * Found in place of the compiler's own header of this name, which it includes and then overrides by macros. Slow.
 * Sums of tiles are those that Intel's manual writes down (TDPBF16PS): the products of even and of odd inputs are
 * added up apart, each by fused multiply-adds from 0 in the order of the inputs, then both to one another and that to
 * the tile; denormals in and out are zeros. Rounding instructions round as the processor's do; `scalef` and
 * `roundscale` take whole powers and whole numbers only. A tile has its full size, whatever a configuration says.
 */
#include_next <immintrin.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef union {
    __m512 v;
    __m512i vi;
    float f[16];
    int32_t i[16];
    uint32_t u[16];
    uint16_t h[32];
    uint8_t b[64];
} emu;
typedef union {
    __m256i v;
    uint16_t h[16];
    uint8_t b[32];
} emu_half;
typedef union {
    __m128i v;
    int8_t b[16];
} emu_quarter;

#define EMU static inline __attribute__((unused))
#define EACH(I, N) for (int I = 0; I < N; I++)

EMU emu emu_of(__m512 v) { return (emu){.v = v}; }
EMU emu emu_ofi(__m512i v) { return (emu){.vi = v}; }
EMU float emu_flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.0f : x; }
EMU uint16_t emu_bf16(float x) { /* to even; NaN stays NaN */
    emu in;
    in.f[0] = emu_flushed(x);
    if (x != x) return (uint16_t)(in.u[0] >> 16 | 0x40);
    return (uint16_t)((in.u[0] + 0x7fff + (in.u[0] >> 16 & 1)) >> 16);
}

/* Lane by lane. */
#define EMU_2(NAME, TYPE, IN, EXPRESSION)                            \
    EMU TYPE emu_##NAME(TYPE x, TYPE y) {                            \
        emu a = IN(x), b = IN(y);                                    \
        EACH(i, 16) EXPRESSION;                                      \
        return *(TYPE *)(void *)&a;                                  \
    }
#define EMU_3(NAME, EXPRESSION)                                      \
    EMU __m512 emu_##NAME(__m512 x, __m512 y, __m512 z) {            \
        emu a = emu_of(x), b = emu_of(y), c = emu_of(z);             \
        EACH(i, 16) EXPRESSION;                                      \
        return a.v;                                                  \
    }
EMU_2(add_ps, __m512, emu_of, a.f[i] += b.f[i])
EMU_2(sub_ps, __m512, emu_of, a.f[i] -= b.f[i])
EMU_2(mul_ps, __m512, emu_of, a.f[i] *= b.f[i])
EMU_2(div_ps, __m512, emu_of, a.f[i] /= b.f[i])
EMU_2(max_ps, __m512, emu_of, a.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i]) /* the second where one is NaN */
EMU_2(scalef_ps, __m512, emu_of, a.f[i] = ldexpf(a.f[i], (int)b.f[i]))
EMU_2(or_si512, __m512i, emu_ofi, a.u[i] |= b.u[i])
EMU_2(mullo_epi32, __m512i, emu_ofi, a.u[i] *= b.u[i])
EMU_3(fmadd_ps, a.f[i] = fmaf(a.f[i], b.f[i], c.f[i]))
EMU_3(fnmadd_ps, a.f[i] = fmaf(-a.f[i], b.f[i], c.f[i]))
EMU_3(fmsub_ps, a.f[i] = fmaf(a.f[i], b.f[i], -c.f[i]))

EMU __m512 emu_set1_ps(float x) {
    emu a;
    EACH(i, 16) a.f[i] = x;
    return a.v;
}
EMU __m512i emu_set1_epi16(int x) {
    emu a;
    EACH(i, 32) a.h[i] = (uint16_t)x;
    return a.vi;
}
EMU __m512 emu_set_ps(float p, float o, float n, float m, float l, float k, float j, float i, float h, float g, float f,
                      float e, float d, float c, float b, float a) {
    return ((emu){.f = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p}}).v;
}
EMU __m512i emu_set1_epi32(int x) {
    emu a;
    EACH(i, 16) a.i[i] = x;
    return a.vi;
}
EMU __m512i emu_set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h, int g, int f, int e, int d,
                          int c, int b, int a) {
    return ((emu){.i = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p}}).vi;
}
EMU __m512 emu_roundscale_ps(__m512 x, int imm) {
    emu a = emu_of(x);
    (void)imm;
    EACH(i, 16) a.f[i] = rintf(a.f[i]);
    return a.v;
}
EMU __m512 emu_abs_ps(__m512 x) {
    emu a = emu_of(x);
    EACH(i, 16) a.u[i] &= 0x7fffffffu;
    return a.v;
}
EMU __m512 emu_sqrt_ps(__m512 x) {
    emu a = emu_of(x);
    EACH(i, 16) a.f[i] = sqrtf(a.f[i]);
    return a.v;
}
EMU float emu_reduce_max_ps(__m512 x) {
    emu a = emu_of(x);
    EACH(i, 16) a.f[0] = a.f[0] > a.f[i] ? a.f[0] : a.f[i];
    return a.f[0];
}
EMU __m512 emu_mask_max_ps(__m512 other, unsigned mask, __m512 x, __m512 y) {
    emu a = emu_of(other), b = emu_of(emu_max_ps(x, y));
    EACH(i, 16) if (mask >> i & 1) a.f[i] = b.f[i];
    return a.v;
}
EMU __m512 emu_maskz_mov_ps(unsigned mask, __m512 x) {
    emu a = emu_of(x);
    EACH(i, 16) if (!(mask >> i & 1)) a.f[i] = 0;
    return a.v;
}

EMU uint32_t emu_testn_epi16_mask(__m512i x, __m512i y) {
    emu a = emu_ofi(x), b = emu_ofi(y);
    uint32_t out = 0;
    EACH(i, 32) out |= (uint32_t)!(a.h[i] & b.h[i]) << i;
    return out;
}
EMU __m512i emu_maskz_set1_epi16(uint32_t mask, int x) {
    emu a;
    EACH(i, 32) a.h[i] = mask >> i & 1 ? (uint16_t)x : 0;
    return a.vi;
}

/* From one type to another. */
EMU __m512i emu_cvtps_epi32(__m512 x) {
    emu a = emu_of(x);
    EACH(i, 16) a.i[i] = (int32_t)rintf(a.f[i]);
    return a.vi;
}
EMU __m512 emu_cvtepi32_ps(__m512i x) {
    emu a = emu_ofi(x);
    EACH(i, 16) a.f[i] = (float)a.i[i];
    return a.v;
}
EMU __m128i emu_cvtsepi32_epi8(__m512i x) {
    emu a = emu_ofi(x);
    emu_quarter out;
    EACH(i, 16) out.b[i] = (int8_t)(a.i[i] > 127 ? 127 : a.i[i] < -128 ? -128 : a.i[i]);
    return out.v;
}
EMU __m512i emu_cvtepu16_epi32(__m256i x) {
    emu_half in = {.v = x};
    emu a;
    EACH(i, 16) a.u[i] = in.h[i];
    return a.vi;
}
EMU __m256i emu_cvtneps_pbh(__m512 x) {
    emu a = emu_of(x);
    emu_half out;
    EACH(i, 16) out.h[i] = emu_bf16(a.f[i]);
    return out.v;
}

EMU __m512 emu_cvtph_ps(__m256i x) {
    emu_half in = {.v = x};
    emu a;
    EACH(i, 16) a.f[i] = _cvtsh_ss(in.h[i]);
    return a.v;
}
EMU __m256i emu_cvtps_ph(__m512 x, int rounding) {
    emu a = emu_of(x);
    emu_half out;
    (void)rounding; /* to even */
    EACH(i, 16) out.h[i] = _cvtss_sh(a.f[i], 0);
    return out.v;
}
EMU __m512i emu_cvtne2ps_pbh(__m512 high, __m512 low) {
    emu a = emu_of(low), b = emu_of(high), out;
    EACH(i, 16) out.h[i] = emu_bf16(a.f[i]), out.h[16 + i] = emu_bf16(b.f[i]);
    return out.vi;
}
EMU __m512i emu_cvtepi8_epi32(__m128i x) {
    emu_quarter in = {.v = x};
    emu a;
    EACH(i, 16) a.i[i] = in.b[i];
    return a.vi;
}

/* Order of lanes. */
EMU __m512i emu_slli_epi32(__m512i x, unsigned by) {
    emu a = emu_ofi(x);
    EACH(i, 16) a.u[i] <<= by;
    return a.vi;
}
EMU __m512i emu_srli_epi16(__m512i x, unsigned by) {
    emu a = emu_ofi(x);
    EACH(i, 32) a.h[i] = (uint16_t)(a.h[i] >> by);
    return a.vi;
}
EMU __m512i emu_ternarylogic_epi32(__m512i x, __m512i y, __m512i z, int table) {
    emu a = emu_ofi(x), b = emu_ofi(y), c = emu_ofi(z), out = {.u = {0}};
    EACH(i, 16) EACH(bit, 32) {
        int at = (a.u[i] >> bit & 1) << 2 | (b.u[i] >> bit & 1) << 1 | (c.u[i] >> bit & 1);
        out.u[i] |= (uint32_t)(table >> at & 1) << bit;
    }
    return out.vi;
}
EMU __m512i emu_permutexvar_epi16(__m512i index, __m512i x) {
    emu a = emu_ofi(x), at = emu_ofi(index), out;
    EACH(i, 32) out.h[i] = a.h[at.h[i] & 31];
    return out.vi;
}
/* From each 128 bits of both in turn, beginning with word `first`; words of `wide` 32 bits. */
EMU __m512i emu_unpack(__m512i x, __m512i y, int first, int wide) {
    emu a = emu_ofi(x), b = emu_ofi(y), out;
    EACH(i, 16) {
        int at = i % 4 / wide, from = i / 4 * 4 + first + at / 2 * wide + i % wide;
        out.u[i] = at % 2 ? b.u[from] : a.u[from];
    }
    return out.vi;
}
EMU __m512i emu_shuffle_i32x4(__m512i x, __m512i y, int order) {
    emu a = emu_ofi(x), b = emu_ofi(y), out;
    EACH(i, 16) {
        int from = (order >> i / 4 * 2 & 3) * 4 + i % 4;
        out.u[i] = i < 8 ? a.u[from] : b.u[from];
    }
    return out.vi;
}
EMU __m512i emu_permutex2var_epi16(__m512i x, __m512i index, __m512i y) {
    emu a = emu_ofi(x), b = emu_ofi(y), at = emu_ofi(index), out;
    EACH(i, 32) out.h[i] = at.h[i] & 32 ? b.h[at.h[i] & 31] : a.h[at.h[i] & 31];
    return out.vi;
}

/* Memory. */
EMU __m512i emu_load(const void *from) {
    emu a;
    memcpy(&a, from, 64);
    return a.vi;
}
EMU void emu_store(void *to, __m512i x) { memcpy(to, &x, 64); }
EMU __m512i emu_load_aligned(const void *from) {
    if ((uintptr_t)from % 64) __builtin_trap();
    return emu_load(from);
}
EMU void emu_store_aligned(void *to, __m512i x) {
    if ((uintptr_t)to % 64) __builtin_trap();
    emu_store(to, x);
}
EMU void emu_i32scatter_epi32(void *to, __m512i index, __m512i x, int scale) {
    emu at = emu_ofi(index), a = emu_ofi(x);
    EACH(i, 16) memcpy((char *)to + (long)at.i[i] * scale, &a.u[i], 4);
}
EMU __m512 emu_i32gather_ps(__m512i index, const void *from, int scale) {
    emu at = emu_ofi(index), a;
    EACH(i, 16) memcpy(&a.f[i], (const char *)from + (long)at.i[i] * scale, 4);
    return a.v;
}

/* Tiles. */
static _Thread_local union {
    float f[16][16];
    int32_t i[16][16];
    uint16_t h[16][32];
    int8_t b[16][64];
} emu_tile[8] __attribute__((unused));

EMU void emu_tile_zero(int t) { memset(&emu_tile[t], 0, 1024); }
EMU void emu_tile_loadd(int t, const void *from, long stride) {
    EACH(row, 16) memcpy(emu_tile[t].b[row], (const char *)from + row * stride, 64);
}
EMU void emu_tile_stored(int t, void *to, long stride) {
    EACH(row, 16) memcpy((char *)to + row * stride, emu_tile[t].b[row], 64);
}
#define EMU_FAST __attribute__((optimize("O3"))) static
EMU_FAST void emu_pairs(int t, float even[16][16], float odd[16][16]) {
    EACH(k, 16) EACH(n, 16) {
        union { uint32_t u; float f; } low = {(uint32_t)emu_tile[t].h[k][2 * n] << 16};
        union { uint32_t u; float f; } high = {(uint32_t)emu_tile[t].h[k][2 * n + 1] << 16};
        even[k][n] = fabsf(low.f) < 0x1p-126f ? 0.0f : low.f;
        odd[k][n] = fabsf(high.f) < 0x1p-126f ? 0.0f : high.f;
    }
}
EMU_FAST void emu_tile_dpbf16ps(int t, int a, int b) {
    float x[2][16][16], y[2][16][16];
    emu_pairs(a, x[0], x[1]);
    emu_pairs(b, y[0], y[1]);
    EACH(m, 16) {
        float sum[2][16] = {{0}, {0}};
        EACH(k, 16) EACH(side, 2) EACH(n, 16) {
            float next = fmaf(x[side][m][k], y[side][k][n], sum[side][n]);
            sum[side][n] = fabsf(next) < 0x1p-126f ? 0.0f : next;
        }
        EACH(n, 16) {
            float both = sum[0][n] + sum[1][n], all = emu_tile[t].f[m][n] + (fabsf(both) < 0x1p-126f ? 0.0f : both);
            emu_tile[t].f[m][n] = fabsf(all) < 0x1p-126f ? 0.0f : all;
        }
    }
}
EMU_FAST void emu_tile_dpbssd(int t, int a, int b) {
    EACH(m, 16) EACH(k, 16) EACH(n, 16) EACH(i, 4)
        emu_tile[t].i[m][n] += emu_tile[a].b[m][4 * k + i] * emu_tile[b].b[k][4 * n + i];
}

#undef EACH
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#define _tile_loadconfig(config) ((void)(config))
#define _tile_release() ((void)0)
#define _tile_zero emu_tile_zero
#define _tile_loadd emu_tile_loadd
#define _tile_stream_loadd emu_tile_loadd
#define _tile_stored emu_tile_stored
#define _tile_dpbf16ps emu_tile_dpbf16ps
#define _tile_dpbssd emu_tile_dpbssd
#define _mm512_add_ps emu_add_ps
#define _mm512_sub_ps emu_sub_ps
#define _mm512_mul_ps emu_mul_ps
#define _mm512_div_ps emu_div_ps
#define _mm512_max_ps emu_max_ps
#define _mm512_scalef_ps emu_scalef_ps
#define _mm512_or_si512 emu_or_si512
#define _mm512_mullo_epi32 emu_mullo_epi32
#define _mm512_fmadd_ps emu_fmadd_ps
#define _mm512_fnmadd_ps emu_fnmadd_ps
#define _mm512_fmsub_ps emu_fmsub_ps
#define _mm512_set1_ps emu_set1_ps
#define _mm512_set_ps emu_set_ps
#define _mm512_set1_epi16 emu_set1_epi16
#define _mm512_set1_epi32 emu_set1_epi32
#define _mm512_set_epi32 emu_set_epi32
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps emu_roundscale_ps
#define _mm512_abs_ps emu_abs_ps
#define _mm512_sqrt_ps emu_sqrt_ps
#define _mm512_reduce_max_ps emu_reduce_max_ps
#define _mm512_mask_max_ps emu_mask_max_ps
#define _mm512_maskz_mov_ps emu_maskz_mov_ps
#define _mm512_testn_epi16_mask emu_testn_epi16_mask
#define _mm512_maskz_set1_epi16 emu_maskz_set1_epi16
#define _mm512_cvtps_epi32 emu_cvtps_epi32
#define _mm512_cvtepi32_ps emu_cvtepi32_ps
#define _mm512_cvtsepi32_epi8 emu_cvtsepi32_epi8
#define _mm512_cvtepu16_epi32 emu_cvtepu16_epi32
#define _mm512_cvtneps_pbh emu_cvtneps_pbh
#define _mm512_cvtne2ps_pbh emu_cvtne2ps_pbh
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph emu_cvtps_ph
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emu_cvtph_ps
#define _mm512_cvtepi8_epi32 emu_cvtepi8_epi32
#define _mm512_srli_epi16 emu_srli_epi16
#undef _mm512_ternarylogic_epi32
#define _mm512_ternarylogic_epi32 emu_ternarylogic_epi32
#define _mm512_permutexvar_epi16 emu_permutexvar_epi16
#define _mm512_unpacklo_epi32(x, y) emu_unpack(x, y, 0, 1)
#define _mm512_unpackhi_epi32(x, y) emu_unpack(x, y, 2, 1)
#define _mm512_unpacklo_epi64(x, y) emu_unpack(x, y, 0, 2)
#define _mm512_unpackhi_epi64(x, y) emu_unpack(x, y, 2, 2)
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 emu_shuffle_i32x4
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps emu_i32gather_ps
#define _mm512_store_si512(to, x) emu_store_aligned(to, x)
#define _mm512_slli_epi32 emu_slli_epi32
#define _mm512_permutex2var_epi16 emu_permutex2var_epi16
#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_castps_si512(x) ((__m512i)(x))
#define _mm512_setzero_ps() emu_set1_ps(0)
#define _mm512_setzero_si512() emu_set1_epi32(0)
#define _mm512_loadu_ps(from) ((__m512)emu_load(from))
#define _mm512_load_ps(from) ((__m512)emu_load_aligned(from))
#define _mm512_store_ps(to, x) emu_store_aligned(to, (__m512i)(x))
#define _mm512_loadu_si512(from) emu_load(from)
#define _mm512_load_si512(from) emu_load_aligned(from)
#define _mm512_storeu_si512(to, x) emu_store(to, x)
#undef _mm512_i32scatter_epi32
#define _mm512_i32scatter_epi32 emu_i32scatter_epi32
