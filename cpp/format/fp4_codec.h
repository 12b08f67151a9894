// Encoding and decoding of FP4 rows. This header is the specification: the scalar code below is what every other
// implementation (the vector code in fp4_codec.cpp, CUDA kernels, the NumPy oracle of the tests) must match bit for
// bit.
//
// Scale byte (unsigned E5M3, code 0 .. 0xF7, see fp4_block.h):  exponent e = code >> 3, mantissa m = code & 7,
//     value = m * 2^-25 when e == 0, (8 + m) * 2^(e - 26) otherwise.  Largest: 240. Codes 0xF8 .. 0xFF are never
//     written.
//
// Encoding the G = 16, 32 or 64 channels x[0..G-1] of a scale, all arithmetic in IEEE f32, round to nearest even, no flush to
// zero:
//   1. amax = max |x[i]|. When amax == 0 the scale byte and the value bytes are 0.
//   2. c0 = the scale code nearest to t = amax * f32(1/6), ties to the even code, at most 0xF7.
//   3. The candidates are the scale codes clamp(c0 + k, 1, 0xF7), k taken in the order of kFp4ScaleOffsets.
//      For each, with s its value and r = 1/s (f32 division):
//        y[i] = |x[i]| * r
//        n[i] = how many of the thresholds .25 .75 1.25 1.75 2.5 3.5 5 are strictly below y[i]
//               (a value halfway between two magnitudes takes the smaller)
//        d[i] = |x[i]| - M[n[i]] * s,  M = 0 .5 1 1.5 2 3 4 6   (the product is exact: 2 by 4 significant bits)
//      and for each 16 of them, in order, with d counted from their first,
//        a[j] = fma(d[j+8], d[j+8], d[j] * d[j])     j = 0..7
//        b[j] = a[j] + a[j+4]                        j = 0..3
//        e = (b[0] + b[2]) + (b[1] + b[3])
//      the error is the sum of the e, added in order.
//   4. The candidate with the smallest error wins, the first of equals. Its n[i] are the magnitudes; the sign bit of
//      nibble i is the sign bit of x[i], also when the magnitude is 0.
//
// Rows are finite; with Inf or NaN in a row nothing is promised except that no memory is harmed.
//
// Why these offsets: a greedy choice on Gaussian, Laplacian, Student-t(4) and rotated outlier-heavy data. Mean squared
// error relative to trying every code: {0} 1.35, {0, 5} ("amax -> 6 or 4") 1.15, these eight 1.0002.
#pragma once

#include <math.h>
#include <string.h>

#include "format/fp4_block.h"

namespace kvfold {

constexpr int kFp4Candidates = 8;

// Offsets to the code nearest amax / 6, in the order in which candidates are tried.
KVFOLD_HOST_DEVICE constexpr int fp4_scale_offset(int candidate) {
    constexpr int kFp4ScaleOffsets[kFp4Candidates] = {0, 5, -1, 4, 1, 6, 3, -2};
    return kFp4ScaleOffsets[candidate];
}

constexpr int kScaleMax = 0xF7;  // the largest scale code: 240

KVFOLD_HOST_DEVICE inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

KVFOLD_HOST_DEVICE inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// --- scales (unsigned E5M3) ------------------------------------------------------------------------------------------

KVFOLD_HOST_DEVICE inline float scale_decode(uint32_t code) {
    const float subnormal = float(int(code & 7)) * 0x1p-25f;
    return code < 8 ? subnormal : bits_float((code << 20) + (104u << 23));
}

// Nearest code, ties to even, of a non-negative number; kScaleMax for everything from 240 up.
KVFOLD_HOST_DEVICE inline int scale_nearest(float x) {
    if (!(x < 240.0f)) {
        return kScaleMax;
    }
    if (x < 0x1p-22f) {
        // Steps of 2^-25. Rounded by hand: a "magic" addition could be fused with the caller's multiplication.
        const float steps = x * 0x1p25f;
        const int   whole = int(steps);
        const float rest  = steps - float(whole);
        return whole + (rest > 0.5f || (rest == 0.5f && (whole & 1)));
    }
    const uint32_t bits    = float_bits(x);
    const uint32_t rounded = bits + 0x7FFFFu + ((bits >> 20) & 1u);
    return int(rounded >> 20) - (104 << 3);
}

// --- E2M1 values -----------------------------------------------------------------------------------------------------

// Magnitude index 0..7 of a non-negative, scaled value.
KVFOLD_HOST_DEVICE inline int e2m1_index(float y) {
    return (y > 0.25f) + (y > 0.75f) + (y > 1.25f) + (y > 1.75f) + (y > 2.5f) + (y > 3.5f) + (y > 5.0f);
}

// Magnitude of index 0..7: 0 .5 1 1.5 2 3 4 6.
KVFOLD_HOST_DEVICE inline float e2m1_magnitude(int index) {
    // twice the magnitudes as the nibbles of one word: 0 1 2 3 4 6 8 12
    return 0.5f * float(int((0xC8643210u >> (4 * index)) & 0xFu));
}

// Signed value of a nibble.
KVFOLD_HOST_DEVICE inline float e2m1_decode(uint32_t nibble) {
    return bits_float(float_bits(e2m1_magnitude(int(nibble & 7))) | ((nibble & 8u) << 28));
}

// --- the channels of a scale: the reference ---------------------------------------------------------------------------

KVFOLD_HOST_DEVICE inline float fp4_error_16(const float * d) {
    float a[8];
    for (int j = 0; j < 8; ++j) {
        a[j] = fmaf(d[j + 8], d[j + 8], d[j] * d[j]);
    }
    const float b0 = a[0] + a[4], b1 = a[1] + a[5], b2 = a[2] + a[6], b3 = a[3] + a[7];
    return (b0 + b2) + (b1 + b3);
}

// Encodes the channels of one scale into its byte and kScaleGroup / 2 value bytes.
template <int kScaleGroup>
KVFOLD_HOST_DEVICE inline void fp4_encode_group(const float * x, uint8_t * scale, uint8_t * quant) {
    float amax = 0.0f;
    for (int i = 0; i < kScaleGroup; ++i) {
        const float a = fabsf(x[i]);
        amax          = a > amax ? a : amax;
    }
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

        const float s     = scale_decode(uint32_t(code));
        const float r     = 1.0f / s;
        float       error = 0.0f;
        for (int first = 0; first < kScaleGroup; first += 16) {
            float d[16];
            for (int i = 0; i < 16; ++i) {
                const float a = fabsf(x[first + i]);
                d[i]          = a - e2m1_magnitude(e2m1_index(a * r)) * s;
            }
            const float e = fp4_error_16(d);
            error         = first == 0 ? e : error + e;
        }
        if (k == 0 || error < best_error) {
            best_code  = code;
            best_error = error;
        }
    }
    const float r = 1.0f / scale_decode(uint32_t(best_code));
    *scale        = uint8_t(best_code);
    for (int i = 0; i < kScaleGroup / 2; ++i) {
        const float    x_lo = x[i / 8 * 16 + i % 8], x_hi = x[i / 8 * 16 + i % 8 + 8];
        const uint32_t lo = uint32_t(e2m1_index(fabsf(x_lo) * r)) | (float_bits(x_lo) >> 28 & 8u);
        const uint32_t hi = uint32_t(e2m1_index(fabsf(x_hi) * r)) | (float_bits(x_hi) >> 28 & 8u);
        quant[i]          = uint8_t(lo | hi << 4);
    }
}

// Decodes 16 channels: exact products of value and scale.
KVFOLD_HOST_DEVICE inline void fp4_decode_16(float scale, const uint8_t * quant, float * x) {
    for (int j = 0; j < 8; ++j) {
        x[j]     = e2m1_decode(quant[j] & 0xF) * scale;
        x[j + 8] = e2m1_decode(quant[j] >> 4) * scale;
    }
}

// --- f16 -------------------------------------------------------------------------------------------------------------

KVFOLD_HOST_DEVICE inline float f16_decode(uint16_t h) {
    const uint32_t sign     = uint32_t(h & 0x8000u) << 16;
    const uint32_t exponent = (h >> 10) & 0x1Fu;
    const uint32_t mantissa = h & 0x3FFu;
    if (exponent == 0) {
        const float value = float(int(mantissa)) * 0x1p-24f;
        return bits_float(float_bits(value) | sign);
    }
    if (exponent == 31) {
        return bits_float(sign | 0x7F800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));  // NaNs come out quiet
    }
    return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// Round to nearest even; overflow gives infinity, a NaN stays one.
KVFOLD_HOST_DEVICE inline uint16_t f16_encode(float x) {
    const uint32_t bits = float_bits(x);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t mag  = bits & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) {
        return uint16_t(sign | 0x7E00u | (mag >> 13 & 0x3FFu));
    }
    if (mag >= 0x477FF000u) {  // 65520, the first that rounds to infinity
        return uint16_t(sign | 0x7C00u);
    }
    if (mag < 0x38800000u) {  // below 2^-14: steps of 2^-24, which is the last place of 0.5
        return uint16_t(sign | (float_bits(bits_float(mag) + 0.5f) - 0x3F000000u));
    }
    return uint16_t(sign | ((mag - 0x38000000u + 0xFFFu + (mag >> 13 & 1u)) >> 13));
}

// --- rows (host; vector code where the build has it, same bits) ------------------------------------------------------

// `n` channels, a multiple of 64, with a scale for 16 or for `scale_group` channels.
void fp4_encode_row(const float * x, Fp4Block * blocks, int64_t n);
void fp4_decode_row(const Fp4Block * blocks, float * x, int64_t n);
void fp4_encode_row(const float * x, const Fp4Row & row, int64_t n, int scale_group);
void fp4_decode_row(const Fp4Row & row, float * x, int64_t n, int scale_group);
void fp4_fill_row(const Fp4Row & row, uint8_t byte, int64_t n, int scale_group);  // every byte of it
void f16_encode_row(const float * x, uint16_t * h, int64_t n);
void f16_decode_row(const uint16_t * h, float * x, int64_t n);

}  // namespace kvfold
