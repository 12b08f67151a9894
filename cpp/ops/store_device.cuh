// Writing rows of the micro-batch to the near pool.
#pragma once

#include <cuda_fp16.h>

#include "ops/kv_ops_cuda.h"

namespace kvfold {
namespace device {

struct StoreParams {
    const float *   k;
    const float *   v;
    uint16_t *      near_k;
    uint16_t *      near_v;
    const int32_t * dst;
    Epoch           epoch;
    int64_t         k_stride;
    int64_t         v_stride;
    int32_t         row;  // channels of a row
    int32_t         n_rows;
};

inline StoreParams store_params(const StoreArgs & a, const Epoch & epoch) {
    StoreParams p{};
    p.k        = a.cur.k;
    p.v        = a.cur.v;
    p.near_k   = a.mem.near_k;
    p.near_v   = a.mem.near_v;
    p.dst      = a.dst;
    p.epoch    = epoch;
    p.k_stride = a.cur.k_stride;
    p.v_stride = a.cur.v_stride;
    p.row      = a.mem.n_head_kv * a.mem.head_dim;
    p.n_rows   = a.cur.n_rows;
    return p;
}

// The whole grid calls; it is done when the kernel is.
__device__ __forceinline__ void write_epoch(const StoreParams & p) {
    if (p.epoch.from != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *p.epoch.to = *p.epoch.from;
    }
}

// All threads of the block: channels first .. first + count - 1 of row r, keys or values, of which `from` is the first.
__device__ __forceinline__ void store_row(const StoreParams & p, int r, const float * from, bool keys, int first,
                                          int count) {
    const int dst = p.dst[r];
    if (dst < 0) {
        return;
    }
    uint16_t * to = (keys ? p.near_k : p.near_v) + int64_t(dst) * p.row + first;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        to[i] = __half_as_ushort(__float2half_rn(from[i]));
    }
}

}  // namespace device
}  // namespace kvfold
