// Putting together the partial results of the splits of one attention.
#pragma once

#include "ops/attend_params.cuh"

namespace kvfold {
namespace device {

// One block an output row; warps share the splits.
constexpr int kMergeWarps = 8;

template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps) attend_merge(const AttendParams p) {
    constexpr int     C = D / 32;  // channels a lane
    __shared__ float  acc[kMergeWarps][D];
    __shared__ float2 ml[kMergeWarps];

    const int    lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
    const size_t rows = size_t(p.n_q) * p.n_head;

    float m = kNoScore;
    for (int i = lane; i < p.n_split; i += 32) {
        m = fmaxf(m, p.part_ml[i * rows + row].x);
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    }
    float sum[C] = {}, l = 0.0f;
#pragma unroll 4
    for (int i = warp; i < p.n_split; i += kMergeWarps) {
        const float2  x    = p.part_ml[i * rows + row];
        const float * from = p.part + (i * rows + row) * D + lane;
        const float   f    = exp2_fast(x.x - m);
        l += f * x.y;
#pragma unroll
        for (int c = 0; c < C; ++c) {
            sum[c] += f * from[32 * c];
        }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
        acc[warp][lane + 32 * c] = sum[c];
    }
    if (lane == 0) {
        ml[warp] = make_float2(m, l);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += 32 * kMergeWarps) {
        float total = 0.0f, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
            total += acc[w][d];
            weight += ml[w].y;
        }
        if (p.sinks) {
            const float sink = p.sinks[row % p.n_head] * kLog2E, top = fmaxf(m, sink);
            const float f = exp2_fast(m - top);
            total *= f;
            weight = weight * f + exp2_fast(sink - top);
        }
        p.out[size_t(row) * D + d] = weight > 0.0f ? total * kFp4Inverse / weight : 0.0f;
    }
}

}  // namespace device
}  // namespace kvfold
