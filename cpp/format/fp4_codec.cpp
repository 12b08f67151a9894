// Row encoding and decoding for the host. Same bits as the scalar code in fp4_codec.h, several channels at a time.

#include "format/fp4_codec.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define KVFOLD_CODEC_AVX2 1
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvfold {

#if defined(KVFOLD_CODEC_AVX2)

namespace {

struct Scale {
    float value;
    float inverse;
};

// Every scale code and its reciprocal.
struct ScaleTable {
    Scale at[kScaleMax + 1];
    ScaleTable() {
        for (int code = 0; code <= kScaleMax; ++code) {
            const float s = scale_decode(uint32_t(code));
            at[code]      = {s, 1.0f / s};
        }
    }
};
const ScaleTable kScales;

// Magnitude index of eight non-negative scaled values: every comparison that holds is -1.
__m256i e2m1_index_8(__m256 y) {
    const auto above = [y](float threshold) {
        return _mm256_castps_si256(_mm256_cmp_ps(y, _mm256_set1_ps(threshold), _CMP_GT_OQ));
    };
    const __m256i a = _mm256_add_epi32(above(0.25f), above(0.75f));
    const __m256i b = _mm256_add_epi32(above(1.25f), above(1.75f));
    const __m256i c = _mm256_add_epi32(above(2.5f), above(3.5f));
    const __m256i n = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, above(5.0f)));
    return _mm256_sub_epi32(_mm256_setzero_si256(), n);
}

__m256 magnitudes() { return _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f); }

float error_16(__m256 d_lo, __m256 d_hi) {
    const __m256 a = _mm256_fmadd_ps(d_hi, d_hi, _mm256_mul_ps(d_lo, d_lo));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));  // b0 + b2, b1 + b3
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

// The channels of one scale; a pair of vectors holds sixteen of them.
template <int kScaleGroup>
void encode_group(const float * x, uint8_t * scale, uint8_t * quant) {
    constexpr int n        = kScaleGroup / 16;
    const __m256  sign_bit = _mm256_set1_ps(-0.0f);
    __m256        a_lo[n], a_hi[n];
    __m256i       best_lo[n], best_hi[n];
    __m256        m8 = _mm256_setzero_ps();
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) {
        a_lo[i]    = _mm256_andnot_ps(sign_bit, _mm256_loadu_ps(x + 16 * i));
        a_hi[i]    = _mm256_andnot_ps(sign_bit, _mm256_loadu_ps(x + 16 * i + 8));
        m8         = i == 0 ? _mm256_max_ps(a_lo[i], a_hi[i]) : _mm256_max_ps(m8, _mm256_max_ps(a_lo[i], a_hi[i]));
        best_lo[i] = best_hi[i] = _mm256_setzero_si256();
    }
    const __m128 m4   = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    const __m128 m2   = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    const float  amax = _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
    if (amax == 0.0f) {
        *scale = 0;
        memset(quant, 0, kScaleGroup / 2);
        return;
    }

    const int c0         = scale_nearest(amax * (1.0f / 6.0f));
    int       best_code  = 0;
    float     best_error = 0.0f;
    for (int k = 0; k < kFp4Candidates; ++k) {
        int code = c0 + fp4_scale_offset(k);
        code     = code < 1 ? 1 : code > kScaleMax ? kScaleMax : code;

        const __m256 s     = _mm256_broadcast_ss(&kScales.at[code].value);
        const __m256 r     = _mm256_broadcast_ss(&kScales.at[code].inverse);
        float        error = 0.0f;
        __m256i      n_lo[n], n_hi[n];
#pragma GCC unroll 4
        for (int i = 0; i < n; ++i) {
            n_lo[i]           = e2m1_index_8(_mm256_mul_ps(a_lo[i], r));
            n_hi[i]           = e2m1_index_8(_mm256_mul_ps(a_hi[i], r));
            const __m256 d_lo = _mm256_fnmadd_ps(_mm256_permutevar8x32_ps(magnitudes(), n_lo[i]), s, a_lo[i]);
            const __m256 d_hi = _mm256_fnmadd_ps(_mm256_permutevar8x32_ps(magnitudes(), n_hi[i]), s, a_hi[i]);
            error             = i == 0 ? error_16(d_lo, d_hi) : error + error_16(d_lo, d_hi);
        }
        if (k == 0 || error < best_error) {
            best_code  = code;
            best_error = error;
#pragma GCC unroll 4
            for (int i = 0; i < n; ++i) {
                best_lo[i] = n_lo[i];
                best_hi[i] = n_hi[i];
            }
        }
    }

    *scale                  = uint8_t(best_code);
    const auto signed_index = [](const float * from, __m256i index) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
        return _mm256_or_si256(index, _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 3));
    };
#pragma GCC unroll 4
    for (int i = 0; i < n; ++i) {
        const __m256i nibbles = _mm256_or_si256(signed_index(x + 16 * i, best_lo[i]),
                                                _mm256_slli_epi32(signed_index(x + 16 * i + 8, best_hi[i]), 4));
        // eight 32-bit lanes -> eight bytes
        const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(nibbles), _mm256_extracti128_si256(nibbles, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(quant + 8 * i), _mm_packus_epi16(words, words));
    }
}

void decode_16(float scale, const uint8_t * quant, float * x) {
    const __m256  table = _mm256_mul_ps(magnitudes(), _mm256_set1_ps(scale));
    const __m256i sign  = _mm256_set1_epi32(int(0x80000000u));
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(quant)));
    const __m256  lo    = _mm256_permutevar8x32_ps(table, bytes);
    const __m256  hi    = _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(bytes, 4));
    const __m256i s_lo  = _mm256_and_si256(_mm256_slli_epi32(bytes, 28), sign);
    const __m256i s_hi  = _mm256_and_si256(_mm256_slli_epi32(bytes, 24), sign);
    _mm256_storeu_ps(x, _mm256_xor_ps(lo, _mm256_castsi256_ps(s_lo)));
    _mm256_storeu_ps(x + 8, _mm256_xor_ps(hi, _mm256_castsi256_ps(s_hi)));
}

}  // namespace

#else

namespace {

template <int kScaleGroup>
void encode_group(const float * x, uint8_t * scale, uint8_t * quant) {
    fp4_encode_group<kScaleGroup>(x, scale, quant);
}

void decode_16(float scale, const uint8_t * quant, float * x) { fp4_decode_16(scale, quant, x); }

}  // namespace

#endif

namespace {

template <int kScaleGroup>
void encode_row(const float * x, const Fp4Row & row, int64_t n) {
    for (int64_t i = 0; i < n; i += kScaleGroup) {
        const int64_t block = i / kFp4BlockValues, first = i % kFp4BlockValues;
        encode_group<kScaleGroup>(x + i, row.scale + block * row.scale_step + first / kScaleGroup,
                                  row.quant + block * row.quant_step + first / 2);
    }
}

}  // namespace

void fp4_encode_row(const float * x, Fp4Block * blocks, int64_t n) {
    encode_row<kFp4ScaleGroup>(x, {blocks->scale, blocks->quant, sizeof(Fp4Block), sizeof(Fp4Block)}, n);
}

void fp4_decode_row(const Fp4Block * blocks, float * x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const Fp4Block & block = blocks[i / 64];
        const int        sub   = int(i / 16 % 4);
        decode_16(scale_decode(block.scale[sub]), &block.quant[8 * sub], x + i);
    }
}

void fp4_encode_row(const float * x, const Fp4Row & row, int64_t n, int scale_group) {
    switch (scale_group) {
    case 32:
        return encode_row<32>(x, row, n);
    case 64:
        return encode_row<64>(x, row, n);
    default:
        return encode_row<kFp4ScaleGroup>(x, row, n);
    }
}

void fp4_decode_row(const Fp4Row & row, float * x, int64_t n, int scale_group) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t block = i / kFp4BlockValues, first = i % kFp4BlockValues;
        decode_16(scale_decode(row.scale[block * row.scale_step + first / scale_group]),
                  row.quant + block * row.quant_step + first / 2, x + i);
    }
}

void fp4_fill_row(const Fp4Row & row, uint8_t byte, int64_t n, int scale_group) {
    for (int64_t block = 0; block < n / kFp4BlockValues; ++block) {
        memset(row.scale + block * row.scale_step, byte, size_t(kFp4BlockValues / scale_group));
        memset(row.quant + block * row.quant_step, byte, kFp4BlockValues / 2);
    }
}

void f16_encode_row(const float * x, uint16_t * h, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(h + i), eight);
    }
#endif
    for (; i < n; ++i) {
        h[i] = f16_encode(x[i]);
    }
}

void f16_decode_row(const uint16_t * h, float * x, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
        const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i *>(h + i));
        _mm256_storeu_ps(x + i, _mm256_cvtph_ps(eight));
    }
#endif
    for (; i < n; ++i) {
        x[i] = f16_decode(h[i]);
    }
}

}  // namespace kvfold
