// Reductions over the lanes of a warp.
#pragma once

#include <cuda_runtime.h>

namespace kvfold {
namespace device {

struct Sum {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};

struct Max {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Min {
    __device__ __forceinline__ int operator()(int a, int b) const { return min(a, b); }
};

// `x` of the lanes whose numbers differ from this one's in the bits FROM .. TO / 2 only (powers of two), put together; all of them
// get the result. The whole warp calls.
template <int FROM = 1, int TO = 32, typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T x, Op op) {
#pragma unroll
    for (int d = FROM; d < TO; d <<= 1) {
        x = op(x, __shfl_xor_sync(~0u, x, d));
    }
    return x;
}

}  // namespace device
}  // namespace kvfold
