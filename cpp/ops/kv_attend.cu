// kv_attend on CUDA: which kernel, how many splits, where its scratch goes.
#include "ops/attend_decode.cuh"
#include "ops/kv_ops_cuda.h"

namespace kvfold {

namespace {

using device::AttendParams;

struct Plan {
    int    blocks;   // of 8 columns a thread block handles: 1 or 2
    int    z;        // thread blocks over the columns of a KV head
    int    n_split;  // shares of the cells
    size_t ml_offset;
    size_t scratch;
};

// The number of splits fills the device once; every warp then gets the same number of tiles, give or take one.
Plan make_plan(const AttendArgs & a, const CudaDevice & device) {
    Plan      p{};
    const int columns = a.n_q * (a.n_head / a.mem.n_head_kv);
    p.blocks          = columns > 8 && a.mem.head_dim <= 128 ? 2 : 1;
    p.z               = (columns + 8 * p.blocks - 1) / (8 * p.blocks);

    const int resident = a.mem.head_dim == 256 ? 2 : p.blocks == 1 ? 4 : 3;
    const int tiles    = (a.n_kv + device::kDecodeTile - 1) / device::kDecodeTile;
    const int room     = resident * device.n_sm / (a.mem.n_head_kv * p.z);
    const int shares   = (room < 1 ? 1 : room) * device::kDecodeWarps;
    const int per_warp = tiles <= 2 * device::kDecodeWarps ? 2 : (tiles + shares - 1) / shares;
    const int block    = per_warp * device::kDecodeWarps;
    p.n_split          = (tiles + block - 1) / block;

    if (p.n_split > 1) {
        const size_t rows = size_t(p.n_split) * a.n_q * a.n_head;
        p.ml_offset       = rows * a.mem.head_dim * sizeof(float);
        p.scratch         = p.ml_offset + rows * sizeof(float2);
    }
    return p;
}

template <int D> void launch(const AttendParams & p, const Plan & plan, cudaStream_t stream) {
    const dim3 grid(p.n_head_kv, plan.n_split, plan.z);
    if constexpr (D <= 128) {
        if (plan.blocks == 2) {
            device::attend_decode<D, 2><<<grid, 32 * device::kDecodeWarps, 0, stream>>>(p);
        }
    }
    if (plan.blocks == 1) {
        device::attend_decode<D, 1><<<grid, 32 * device::kDecodeWarps, 0, stream>>>(p);
    }
    if (plan.n_split > 1) {
        device::attend_merge<D><<<p.n_q * p.n_head, 32 * device::kMergeWarps, 0, stream>>>(p);
    }
}

int log2_of(int x) {
    int n = 0;
    while ((1 << n) < x) {
        ++n;
    }
    return n;
}

}  // namespace

const char * kv_ops_cuda_refusal(int32_t n_head_kv, int32_t head_dim, int32_t group, int32_t n_head) {
    if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
        return "head size must be 64, 128 or 256";
    }
    if (group < 2 || group > 32 || (group & (group - 1)) != 0) {
        return "cells a group must be 2, 4, 8, 16 or 32";
    }
    if (n_head_kv < 1 || n_head % n_head_kv != 0) {
        return "query heads must be a multiple of the KV heads";
    }
    return nullptr;
}

size_t kv_attend_cuda_scratch(const AttendArgs & a, const CudaDevice & device) { return make_plan(a, device).scratch; }

void kv_attend_cuda(const AttendArgs & a, const CudaDevice & device, void * scratch, cudaStream_t stream) {
    if (a.n_q == 0) {
        return;
    }
    const Plan   plan = make_plan(a, device);
    AttendParams p{};
    p.far_k          = reinterpret_cast<const uint32_t *>(a.mem.far_k);
    p.far_v          = reinterpret_cast<const uint32_t *>(a.mem.far_v);
    p.summary        = reinterpret_cast<const uint32_t *>(a.mem.side);
    p.near_k         = reinterpret_cast<const half *>(a.mem.near_k);
    p.near_v         = reinterpret_cast<const half *>(a.mem.near_v);
    p.cur_k          = a.cur.k;
    p.cur_v          = a.cur.v;
    p.cell_src       = a.cell_src;
    p.mask           = reinterpret_cast<const half *>(a.mask);
    p.q              = a.q;
    p.sinks          = a.sinks;
    p.out            = a.out;
    p.part           = static_cast<float *>(scratch);
    p.part_ml        = reinterpret_cast<float2 *>(static_cast<uint8_t *>(scratch) + plan.ml_offset);
    p.cur_k_stride   = a.cur.k_stride;
    p.cur_v_stride   = a.cur.v_stride;
    p.mask_stride    = a.mask_stride;
    p.q_stride_query = a.q_stride_query;
    p.q_stride_head  = a.q_stride_head;
    p.n_head_kv      = a.mem.n_head_kv;
    p.n_head         = a.n_head;
    p.gqa            = a.n_head / a.mem.n_head_kv;
    p.n_q            = a.n_q;
    p.n_kv           = a.n_kv;
    p.n_split        = plan.n_split;
    p.group_shift    = log2_of(a.mem.group);
    p.q_scale        = a.scale;
    p.score_scale    = a.softcap == 0.0f ? device::kLog2E : 1.0f;
    p.softcap        = a.softcap;
    switch (a.mem.head_dim) {
        case 64: launch<64>(p, plan, stream); break;
        case 128: launch<128>(p, plan, stream); break;
        case 256: launch<256>(p, plan, stream); break;
        default: break;  // kv_ops_cuda_refusal() names it
    }
}

}  // namespace kvfold
