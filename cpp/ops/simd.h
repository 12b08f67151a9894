// A float vector as wide as the build's instruction set, from one source (GCC / Clang vector extensions), and the few
// functions that attention needs on it. Internal: included by the .cpp files of the CPU operations only, because its
// meaning changes with compiler flags (hence the unnamed namespace).
#pragma once

#include <math.h>
#include <string.h>

#include <cstdint>

#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
// False alarms raised inside GCC's own AVX-512 header (GCC bug 105593), so this comes before it.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#if defined(__AVX__) || defined(__F16C__)
#include <immintrin.h>
#endif

#include "format/fp4_codec.h"

namespace kvfold {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float   VFloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t VInt __attribute__((vector_size(kLanes * 4)));

inline VFloat v_load(const float * p) {
    VFloat v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline void v_store(float * p, VFloat v) { memcpy(p, &v, sizeof v); }

inline VFloat v_set(float x) { return x - VFloat{}; }

// a * b + c
inline VFloat v_fma(VFloat a, VFloat b, VFloat c) {
#if defined(__AVX512F__)
    return VFloat(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX__) && defined(__FMA__)
    return VFloat(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#else
    return a * b + c;  // fused where the target and the compiler's default allow it
#endif
}

inline VFloat v_max(VFloat a, VFloat b) { return a > b ? a : b; }

inline float v_sum(VFloat v) {
    float lane[kLanes];
    v_store(lane, v);
    for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            lane[i] += lane[i + n];
        }
    }
    return lane[0];
}

inline float v_largest(VFloat v) {
    float lane[kLanes];
    v_store(lane, v);
    for (int n = kLanes / 2; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            lane[i] = lane[i] > lane[i + n] ? lane[i] : lane[i + n];
        }
    }
    return lane[0];
}

// e^x with a relative error below 2e-7 for |x| < 87; exactly 0 below (so for -inf), large but finite above.
inline VFloat v_exp(VFloat x) {
    const VFloat low  = v_set(-87.0f);
    const VFloat high = v_set(87.0f);
    const VInt   zero = x < low;
    x                 = v_max(low, x > high ? high : x);

    const VFloat magic = v_set(0x1.8p23f);  // rounds to an integer, which is then in the low mantissa bits
    const VFloat t     = v_fma(x, v_set(0x1.715476p0f), magic);
    const VFloat n     = t - magic;
    const VFloat r     = v_fma(n, v_set(-0x1.7f7d1cp-20f), v_fma(n, v_set(-0x1.62e4p-1f), x));

    VFloat p = v_set(0x1.6c16c2p-10f);  // Taylor coefficients 1/6! .. 1/1!; |r| <= ln(2)/2
    p        = v_fma(p, r, v_set(0x1.111112p-7f));
    p        = v_fma(p, r, v_set(0x1.555556p-5f));
    p        = v_fma(p, r, v_set(0x1.555556p-3f));
    p        = v_fma(p, r, v_set(0.5f));
    p        = v_fma(p, r, v_set(1.0f));
    p        = v_fma(p, r, v_set(1.0f));

    const VInt power = VInt(p) + (VInt(t) << 23);
    return VFloat(power & ~zero);
}

inline VFloat v_tanh(VFloat x) {
    const VFloat e = v_exp(x + x);
    return v_set(1.0f) - v_set(2.0f) / (e + v_set(1.0f));
}

// --- rows of 16 channels ---------------------------------------------------------------------------------------------

#if defined(__AVX2__) && !defined(__AVX512F__)

// Every scale times the eight magnitudes, so that a value needs one permutation and its sign.
struct alignas(32) ScaledMagnitudes {
    float at[256][8];
    ScaledMagnitudes() {
        for (uint32_t code = 0; code < 256; ++code) {
            for (int i = 0; i < 8; ++i) {
                at[code][i] = e2m1_magnitude(i) * scale_decode(code);
            }
        }
    }
};
const ScaledMagnitudes kScaledMagnitudes;

struct V16 {
    __m256 lo, hi;
};

inline V16 decode_16(uint8_t scale, const uint8_t * quant) {
    const __m256  table = _mm256_load_ps(kScaledMagnitudes.at[scale]);
    const __m256i sign  = _mm256_set1_epi32(int(0x80000000u));
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(quant)));
    const __m256  lo    = _mm256_permutevar8x32_ps(table, bytes);
    const __m256  hi    = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(bytes, 4));
    const __m256i s_lo  = _mm256_and_si256(_mm256_slli_epi32(bytes, 28), sign);
    const __m256i s_hi  = _mm256_and_si256(_mm256_slli_epi32(bytes, 24), sign);
    return {_mm256_xor_ps(lo, _mm256_castsi256_ps(s_lo)), _mm256_xor_ps(hi, _mm256_castsi256_ps(s_hi))};
}

inline V16 load_16(const float * x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }

inline V16 load_16(const uint16_t * h) {
#if defined(__F16C__)
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(h))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(h + 8)))};
#else
    float x[16];
    f16_decode_row(h, x, 16);
    return load_16(x);
#endif
}

inline V16 add_16(V16 a, V16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }

inline void store_16(float * x, V16 v) {
    _mm256_storeu_ps(x, v.lo);
    _mm256_storeu_ps(x + 8, v.hi);
}

// sum + a * b, lane by lane; kept as 16 lanes by the callers and added up at the end
inline V16 fma_16(V16 a, V16 b, V16 sum) {
    return {__m256(v_fma(VFloat(a.lo), VFloat(b.lo), VFloat(sum.lo))),
            __m256(v_fma(VFloat(a.hi), VFloat(b.hi), VFloat(sum.hi)))};
}

// out[i] = the sum of all lanes of v[i], i = 0..3
inline void sum_4x16(const V16 * v, float * out) {
    const auto   eight = [v](int i) { return _mm256_add_ps(v[i].lo, v[i].hi); };
    const __m256 a     = _mm256_hadd_ps(eight(0), eight(1));
    const __m256 b     = _mm256_hadd_ps(eight(2), eight(3));
    const __m256 c     = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(c), _mm256_extractf128_ps(c, 1)));
}

#elif defined(__AVX512F__)

struct alignas(64) ScaledValues {
    float at[256][16];
    ScaledValues() {
        for (uint32_t code = 0; code < 256; ++code) {
            for (uint32_t i = 0; i < 16; ++i) {
                at[code][i] = e2m1_decode(i) * scale_decode(code);
            }
        }
    }
};
const ScaledValues kScaledValues;

struct V16 {
    __m512 v;
};

inline V16 decode_16(uint8_t scale, const uint8_t * quant) {
    const __m512  table = _mm512_load_ps(kScaledValues.at[scale]);
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(quant));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(eight, eight));
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4);
    return {_mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, shift), table)};
}

inline V16 load_16(const float * x) { return {_mm512_loadu_ps(x)}; }
inline V16 load_16(const uint16_t * h) {
    return {_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(h)))};
}
inline V16  add_16(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline void store_16(float * x, V16 v) { _mm512_storeu_ps(x, v.v); }
inline V16  fma_16(V16 a, V16 b, V16 sum) { return {_mm512_fmadd_ps(a.v, b.v, sum.v)}; }

inline void sum_4x16(const V16 * v, float * out) {
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_reduce_add_ps(v[i].v);
    }
}

#else

struct V16 {
    float x[16];
};

inline V16 decode_16(uint8_t scale, const uint8_t * quant) {
    const float s = scale_decode(scale);
    V16         v;
    for (int j = 0; j < 8; ++j) {
        v.x[j]     = e2m1_decode(quant[j] & 0xF) * s;
        v.x[j + 8] = e2m1_decode(quant[j] >> 4) * s;
    }
    return v;
}

inline V16 load_16(const float * x) {
    V16 v;
    memcpy(v.x, x, sizeof v.x);
    return v;
}

inline V16 load_16(const uint16_t * h) {
    V16 v;
    f16_decode_row(h, v.x, 16);
    return v;
}

inline V16 add_16(V16 a, V16 b) {
    for (int i = 0; i < 16; ++i) {
        a.x[i] += b.x[i];
    }
    return a;
}

inline void store_16(float * x, V16 v) { memcpy(x, v.x, sizeof v.x); }

inline V16 fma_16(V16 a, V16 b, V16 sum) {
    for (int i = 0; i < 16; ++i) {
        sum.x[i] += a.x[i] * b.x[i];
    }
    return sum;
}

inline void sum_4x16(const V16 * v, float * out) {
    for (int i = 0; i < 4; ++i) {
        out[i] = 0.0f;
        for (const float x : v[i].x) {
            out[i] += x;
        }
    }
}

#endif

// 8 rows (at `x`, `x_stride` floats apart) of 8 columns each become 8 rows of `y`, `y_stride` apart.
inline void transpose_8x8(const float * x, int64_t x_stride, float * y, int64_t y_stride) {
#if defined(__AVX__)
    const auto row = [x, x_stride](int i) { return _mm256_loadu_ps(x + i * x_stride); };
    // pairs of rows interleaved, then quarters, then the 128-bit halves exchanged
    const __m256 a0 = _mm256_unpacklo_ps(row(0), row(1)), a1 = _mm256_unpackhi_ps(row(0), row(1));
    const __m256 a2 = _mm256_unpacklo_ps(row(2), row(3)), a3 = _mm256_unpackhi_ps(row(2), row(3));
    const __m256 a4 = _mm256_unpacklo_ps(row(4), row(5)), a5 = _mm256_unpackhi_ps(row(4), row(5));
    const __m256 a6 = _mm256_unpacklo_ps(row(6), row(7)), a7 = _mm256_unpackhi_ps(row(6), row(7));
    const __m256 b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xEE);
    const __m256 b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xEE);
    const __m256 b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xEE);
    const __m256 b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xEE);
    _mm256_storeu_ps(y + 0 * y_stride, _mm256_permute2f128_ps(b0, b4, 0x20));
    _mm256_storeu_ps(y + 1 * y_stride, _mm256_permute2f128_ps(b1, b5, 0x20));
    _mm256_storeu_ps(y + 2 * y_stride, _mm256_permute2f128_ps(b2, b6, 0x20));
    _mm256_storeu_ps(y + 3 * y_stride, _mm256_permute2f128_ps(b3, b7, 0x20));
    _mm256_storeu_ps(y + 4 * y_stride, _mm256_permute2f128_ps(b0, b4, 0x31));
    _mm256_storeu_ps(y + 5 * y_stride, _mm256_permute2f128_ps(b1, b5, 0x31));
    _mm256_storeu_ps(y + 6 * y_stride, _mm256_permute2f128_ps(b2, b6, 0x31));
    _mm256_storeu_ps(y + 7 * y_stride, _mm256_permute2f128_ps(b3, b7, 0x31));
#else
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) {
            y[j * y_stride + i] = x[i * x_stride + j];
        }
    }
#endif
}

}  // namespace
}  // namespace kvfold
