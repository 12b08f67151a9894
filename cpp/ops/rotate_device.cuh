// The rotation of kv_ops.h for one row in the registers of a warp. Bit for bit what rotate.h computes on the CPU: butterflies from
// distance 1 up, then one multiplication.
#pragma once

#include <cstdint>

namespace kvfold {
namespace device {

// n^-1/2 for the sizes there are.
__device__ __forceinline__ float rotation_scale(int n) {
    return n == 64 ? 0.125f : n == 128 ? 0.08838834764831845f : 0.0625f;
}

// x[i] is channel lane + 32 i. The whole warp calls; n is 0 (nothing happens) or a power of two, 64 .. 32 C.
template <int C>
__device__ __forceinline__ void rotate_row(float (&x)[C], int n, int lane) {
    if (n == 0) {
        return;
    }
#pragma unroll
    for (int h = 1; h < 32; h <<= 1) {
#pragma unroll
        for (int i = 0; i < C; ++i) {
            const float other = __shfl_xor_sync(~0u, x[i], h);
            x[i]              = lane & h ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int h = 1; h < C; h <<= 1) {
        if (32 * h < n) {
#pragma unroll
            for (int i = 0; i < C; ++i) {
                if ((i & h) == 0) {
                    const float a = x[i], b = x[i + h];
                    x[i]     = a + b;
                    x[i + h] = a - b;
                }
            }
        }
    }
    const float f = rotation_scale(n);
#pragma unroll
    for (int i = 0; i < C; ++i) {
        x[i] *= f;
    }
}

}  // namespace device
}  // namespace kvfold
