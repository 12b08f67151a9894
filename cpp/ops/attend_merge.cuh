// Putting together the partial results of the splits of one attention: in the kernel that makes them, by the block which is
// last to finish, or by a launch of its own.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/kv_select.h"
#include "ops/launch.cuh"
#include "ops/rotate_device.cuh"
#include "ops/warp.cuh"

namespace kvfold {
namespace device {

// How many splits of an output have arrived; all zero between launches. Launches that may overlap use different slots.
static __device__ uint32_t split_arrivals[kArrivalSlots][kArrivals];

// Sum of weighted values, and maximum and sum of weights -> the output.
__device__ __forceinline__ float finish_output(const AttendParams & p, int h, float total, float2 ml) {
    if (p.sinks) {
        const float sink = p.sinks[h] * kLog2E, top = fmaxf(ml.x, sink);
        const float f = exp2_fast(ml.x - top);
        total *= f;
        ml.y = ml.y * f + exp2_fast(sink - top);
    }
    return ml.y > 0.0f ? total * kFp4Inverse / ml.y : 0.0f;
}

// What stands in for unread groups, added to a row's weighted sums (channel lane + 32 c) and to its sum of weights: the mean of
// what was read, weighted as SparseAttendArgs says. `unread`: log2 of their estimated mass; `mean`: the sum of `n` values.
template <int C>
__device__ __forceinline__ void add_stand_in(float (&total)[C], float2 & ml, float unread, const float (&mean)[C],
                                             float n) {
    const float mass = fminf(kStandIn * exp2_fast(unread - ml.x), kMostStandIn * ml.y);
    if (mass > 0.0f && n > 0.0f) {
        ml.y += mass;
#pragma unroll
        for (int c = 0; c < C; ++c) {
            total[c] += mass / n * mean[c];
        }
    }
}

// A row of the output: the weighted sums (channel lane + 32 c) are divided and rotated back. The whole warp calls.
template <int D>
__device__ __forceinline__ void write_output(const AttendParams & p, int query, int h, const float (&total)[D / 32],
                                             float2 ml, int lane) {
    float x[D / 32];
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
        x[c] = finish_output(p, h, total[c], ml);
    }
    rotate_row(x, p.rot_v, lane);
    float * to = p.out + (size_t(query) * p.n_head + h) * D + lane;
#pragma unroll
    for (int c = 0; c < D / 32; ++c) {
        to[32 * c] = x[c];
    }
}

// Adds up the splits share, share + shares, ... of output row `row` (of `rows`) to `acc` [D]; the whole warp calls. Returns
// the maximum of all splits and the share's sum of weights.
template <int D>
__device__ __forceinline__ float2 merge_splits(const AttendParams & p, size_t row, size_t rows, int share, int shares,
                                               float * acc, int lane) {
    constexpr int C = D / 32, kAhead = 4;  // channels a lane, splits that are on the way together
    const auto    ml_of = [&](int i) { return __ldcg(&p.part_ml[i * rows + row]); };
    float         value[kAhead][C];
    const auto    load = [&](int first) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int i = first + a * shares;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                value[a][c] = i < p.n_split ? __ldcg(p.part + (i * rows + row) * D + lane + 32 * c) : 0.0f;
            }
        }
    };
    load(share);
    const float2 own = lane < p.n_split ? ml_of(lane) : make_float2(kNoScore, 0.0f);
    float        m   = own.x;
#pragma unroll 1
    for (int i = lane + 32; i < p.n_split; i += 32) {
        m = fmaxf(m, ml_of(i).x);
    }
    m            = warp_reduce(m, Max{});
    float sum[C] = {}, l = 0.0f;
#pragma unroll 1
    for (int first = share; first < p.n_split;) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int i = first + a * shares;
            if (i < p.n_split) {
                float2 x = make_float2(__shfl_sync(~0u, own.x, i & 31), __shfl_sync(~0u, own.y, i & 31));
                if (i >= 32) {
                    x = ml_of(i);
                }
                const float f = exp2_fast(x.x - m);
                l += f * x.y;
#pragma unroll
                for (int c = 0; c < C; ++c) {
                    sum[c] += f * value[a][c];
                }
            }
        }
        first += kAhead * shares;
        if (first < p.n_split) {
            load(first);
        }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
        acc[lane + 32 * c] = sum[c];
    }
    return make_float2(m, l);
}

// One block an output row; warps share the splits.
constexpr int kMergeWarps = 8;

template <int D>
struct MergeShared {
    float  acc[kMergeWarps][D];
    float2 ml[kMergeWarps];
};

// All splits of a row: its sums (channel lane + 32 c), maximum and sum of weights, in every warp. The whole block calls.
template <int D>
__device__ __forceinline__ float2 merge_row(const AttendParams & p, int row, MergeShared<D> & s, float (&total)[D / 32],
                                            int lane, int warp) {
    const float2 mine = merge_splits<D>(p, row, p.part_rows, warp, kMergeWarps, s.acc[warp], lane);
    if (lane == 0) {
        s.ml[warp] = mine;
    }
    __syncthreads();
    float l = 0.0f;
#pragma unroll
    for (int w = 0; w < kMergeWarps; ++w) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c) {
            total[c] += s.acc[w][lane + 32 * c];
        }
        l += s.ml[w].y;
    }
    const float m = s.ml[0].x;
    __syncthreads();
    return make_float2(m, l);
}

template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps) attend_merge(const AttendParams p) {
    __shared__ MergeShared<D> s;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x, query = row / p.n_head,
              h             = row % p.n_head;
    float     total[D / 32] = {}, mean[D / 32] = {};
    float2    ml = merge_row<D>(p, row, s, total, lane, warp);
    if (p.stands_in) {
        const float2 n = merge_row<D>(p, mean_row(p, query, h / p.gqa), s, mean, lane, warp);
        add_stand_in(total, ml, p.unread[row] * kLog2E, mean, n.y);
    }
    if (warp == 0) {
        write_output<D>(p, query, h, total, ml, lane);
    }
}

}  // namespace device
}  // namespace kvfold
