// Reading FP4 rows in kernels, and the tensor-core instructions that consume them.
//
// A 32-bit word of a row holds 8 channels of one 16-channel sub-block: with `base` = word_channel(word), byte j has channel
// base + j in its low and base + 8 + j in its high nibble. A byte with the sign of a nibble in bit 7 and its other bits in
// 3..1 is the upper byte of a half which is the value times 2^-14, exactly. A scale byte t is half_bits(t << 7) * 2^-8, so the
// product of the two halves is the decoded value times kFp4Unit. It is exact for scales from 2^-13 up; below, it is rounded in
// steps of 2^-18 (decoded: 2^-18 * 2^-6 = 2^-24 is the smallest half).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "format/fp4_block.h"

namespace kvfold {
namespace device {

constexpr float kFp4Unit    = 0x1p-6f;  // what a decoded half carries
constexpr float kFp4Inverse = 0x1p+6f;
constexpr int   kBlockWords = sizeof(Fp4Block) / 4;  // one word of scales, eight of values
constexpr int   kFineShift  = 4;                     // log2 of the channels a scale has there
static_assert(1 << kFineShift == kFp4ScaleGroup);

__device__ __forceinline__ uint32_t load_word(const uint32_t * p) {
    uint32_t r;
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}

__device__ __forceinline__ uint32_t load_byte(const uint8_t * p) {
    uint32_t r;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(r) : "l"(p));
    return r;
}

// Copies WORDS (1, 2 or 4) aligned words from global to shared memory; without waiting, where the device can do that.
template <int WORDS>
__device__ __forceinline__ void copy_async(uint32_t * to, const uint32_t * from) {
#if __CUDA_ARCH__ >= 800
    const uint32_t at = uint32_t(__cvta_generic_to_shared(to));
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(at), "l"(from), "n"(4 * WORDS) : "memory");
#else
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        to[i] = load_word(from + i);
    }
#endif
}

// Copies since the last commit belong together.
__device__ __forceinline__ void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until at most N commits are not done, and for the other lanes of the warp to have waited too.
template <int N>
__device__ __forceinline__ void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
#endif
    __syncwarp();
}

__device__ __forceinline__ int word_channel(int word) { return (word >> 1) * 16 + 4 * (word & 1); }

// The values of a word, two halves a register, in the order in which they are cheapest: channels
//     base + 9, base + 11     base + 1, base + 3     base + 8, base + 10     base + 0, base + 2
struct Pairs {
    uint32_t p[4];
};

__device__ __forceinline__ int pair_channel(int j) { return (0x0819 >> (4 * j)) & 0xF; }  // 9, 1, 8, 0

// Without their scale, times 2^-14.
__device__ __forceinline__ Pairs fp4_pairs(uint32_t word) {
    const uint32_t hi = (word & 0x80808080u) | ((word >> 3) & 0x0E0E0E0Eu);
    const uint32_t lo = ((word << 4) & 0x80808080u) | ((word << 1) & 0x0E0E0E0Eu);
    return {{hi & 0xFF00FF00u, lo & 0xFF00FF00u, __byte_perm(hi, 0, 0x2404), __byte_perm(lo, 0, 0x2404)}};
}

// scale_pair()'s `select` for byte 0 .. 3 of a word.
__device__ __forceinline__ uint32_t scale_selector(uint32_t byte) { return 0x4440u + byte; }

// A scale as a half, twice. `select` is what makes byte_perm(scales, 0, select) its byte. (The multiplication spares the
// pipeline of bit operations, which is the busiest.)
__device__ __forceinline__ uint32_t scale_pair(uint32_t scales, uint32_t select) {
    return __byte_perm(scales, 0, select) * 0x00800080u;
}

__device__ __forceinline__ uint32_t mul_half2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ uint32_t pack_half2(float lo, float hi) {
    const half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
}

// Lane l holds row l/4, columns 2(l%4) and 2(l%4)+1 of an 8x8 matrix of halves; afterwards of its transpose.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t a) {
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
    return r;
}

// c (16x8, f32) += a (16x16) * b (16x8). With l = lane: r = l/4, t = l%4,
//   a0: row r, k 2t,2t+1   a1: row r+8, k 2t,2t+1   a2: row r, k 2t+8,2t+9   a3: row r+8, k 2t+8,2t+9
//   b0: k 2t,2t+1, column r   b1: k 2t+8,2t+9, column r     c0,c1: row r, columns 2t,2t+1   c2,c3: row r+8
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                            uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else  // Turing has the half of it
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a2), "r"(a3), "r"(b1));
#endif
}

// 2^x with results below 2^-126 flushed, whatever the compiler's math flags.
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

}  // namespace device
}  // namespace kvfold
