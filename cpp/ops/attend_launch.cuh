// What those who launch attention kernels have in common.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/kv_ops.h"

namespace kvfold {

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Is there a column to spare for the sum of values that a mean is made of? (The decode kernel has 16, 8 at head size 256.)
inline bool can_stand_in(int head_dim, int gqa) { return gqa < (head_dim == 256 ? 8 : 16); }

// Blocks of 8 columns for so many; 16 at most, 8 at head size 256, have room in one thread block.
inline int column_blocks(int head_dim, int columns, bool stands_in) {
    return columns + (stands_in ? 1 : 0) > 8 && head_dim <= 128 ? 2 : 1;
}

inline int log2_of(int x) {
    int n = 0;
    while ((1 << n) < x) {
        ++n;
    }
    return n;
}

static_assert(sizeof(ExactCell) == sizeof(int2), "kernels read an entry as one word");

// Everything that follows from the arguments alone: no splits, lists, or memory that is the kernel's own.
inline device::AttendParams attend_params(const AttendArgs & a) {
    device::AttendParams p{};
    p.far_k          = reinterpret_cast<const uint32_t *>(a.mem.far_k);
    p.far_v          = reinterpret_cast<const uint32_t *>(a.mem.far_v);
    p.summary        = reinterpret_cast<const uint32_t *>(a.mem.side);
    p.near_k         = reinterpret_cast<const half *>(a.mem.near_k);
    p.near_v         = reinterpret_cast<const half *>(a.mem.near_v);
    p.cur_k          = a.cur.k;
    p.cur_v          = a.cur.v;
    p.far_bits       = a.far_bits;
    p.exact          = reinterpret_cast<const int2 *>(a.exact);
    p.n_exact        = a.n_exact;
    p.n_current      = a.cur.n_rows;
    p.rot_k          = a.rot.k;
    p.rot_v          = a.rot.v;
    p.mask           = reinterpret_cast<const half *>(a.mask);
    p.q              = a.q;
    p.sinks          = a.sinks;
    p.out            = a.out;
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
    p.part_rows      = a.n_q * a.n_head;
    p.group_shift    = log2_of(a.mem.group);
    p.q_scale        = a.scale;
    p.score_scale    = a.softcap == 0.0f ? device::kLog2E : 1.0f;
    p.softcap        = a.softcap;
    p.scale_shift    = log2_of(a.mem.scale_group);
    p.far_k_scales   = a.mem.far_k + far_scales_offset(a.mem);
    p.far_v_scales   = a.mem.far_v + far_scales_offset(a.mem);
    return p;
}

}  // namespace kvfold
