// FP4 rows: E2M1 values with one 8-bit scale for 16, 32 or 64 channels, the *scale group*. With 16, which summaries have always, a
// row is made of blocks in the byte layout of ggml's block_nvfp4 (so that GGML_TYPE_NVFP4 tensors hold them). With 32 and 64, whose
// blocks would be 34 and 33 bytes long, values and scales of many rows lie apart, so that words of values are aligned.
// Shared by host and device code.
//
// The scale byte is an unsigned float with 5 exponent and 3 mantissa bits:
//     scale(t) = half_bits(t << 7) * 2^-8        (t = 0..0xF7; exponent field 31 is not used)
// that is 2^(e - 23) * (1 + m/8) for e = t >> 3 >= 1, m = t & 7, and m * 2^-25 for e = 0. NVFP4's E4M3 scale has no use for its
// sign bit; taking it as a fifth exponent bit keeps every normal E4M3 value up to 240 exactly representable (E4M3 byte s with
// exponent field >= 1 is t = 0x80 | s) and adds 16 octaves below, where the values of some models and many key differences
// live (E4M3's smallest normal scale is 2^-6, i.e. blocks below 0.09). No second-level scale is needed, so a row depends on
// nothing but its own content. Largest block value 6 * 240 = 1440; encoders saturate there.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define KVFOLD_HOST_DEVICE __host__ __device__
#else
#define KVFOLD_HOST_DEVICE
#endif

namespace kvfold {

constexpr int kFp4BlockValues = 64;  // channels a block
constexpr int kFp4ScaleGroup  = 16;  // channels a scale, where nothing else is said

// 64 channels, a scale for 16. Sub-block s (channels 16s .. 16s+15) has scale[s] and the bytes quant[8s .. 8s+7]:
// byte 8s+j holds channel 16s+j in its low nibble and channel 16s+j+8 in its high nibble.
// A nibble is sign (bit 3), exponent (bits 2..1), mantissa (bit 0): 0 .5 1 1.5 2 3 4 6.
struct Fp4Block {
    uint8_t scale[4];
    uint8_t quant[32];
};
static_assert(sizeof(Fp4Block) == 36, "must match block_nvfp4");
static_assert(alignof(Fp4Block) == 1, "rows are packed");

// Where a row is, whatever its scale group G: the 64 / G scales of block b at scale + b * scale_step, its 32 bytes of values, which are
// those of Fp4Block, at quant + b * quant_step.
struct Fp4Row {
    uint8_t * scale;
    uint8_t * quant;
    int32_t   scale_step;
    int32_t   quant_step;
};

// Bytes of 64 channels: 4.5, 4.25 and 4.125 bits each.
constexpr int fp4_block_bytes(int scale_group) { return kFp4BlockValues / scale_group + kFp4BlockValues / 2; }
static_assert(fp4_block_bytes(16) == sizeof(Fp4Block) && fp4_block_bytes(32) == 34 && fp4_block_bytes(64) == 33);

constexpr bool is_scale_group(int n) { return n == 16 || n == 32 || n == 64; }

}  // namespace kvfold
