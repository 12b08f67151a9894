// What every attention kernel is told, and the parts of it that all of them share.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "ops/fp4_device.cuh"
#include "ops/kv_ops.h"

namespace kvfold {
namespace device {

constexpr float kLog2E = 1.4426950408889634f;

// A score below every real one, finite so that differences of such scores are 0 and never NaN.
constexpr float kNoScore = -1e30f;

struct AttendParams {
    const uint32_t * far_k;
    const uint32_t * far_v;
    const uint32_t * summary;
    const half *     near_k;
    const half *     near_v;
    const float *    cur_k;
    const float *    cur_v;
    const half *
        cur_half_k;  // [n_current][heads of this launch][head_dim]; null in decode where they fit shared memory
    const half *     cur_half_v;
    const uint32_t * far_bits;
    const int2 *     exact;       // ExactCell
    const int32_t *  cell_src;    // [n_kv], prefill only: the two lists above, spread out
    const uint8_t *  tile_flags;  // [blocks of columns][tiles], prefill only: TileFlag
    const int32_t *  selected;    // sparse only: lists of groups, [n_q][n_head_kv][list_stride], the count first
    int32_t          list_stride;
    bool             after_lookup;  // the kernel before this one made the lists, from the same queries
    bool             stands_in;  // sparse only: the mean value stands in for unread groups (SparseAttendArgs::unread)
    const float *    unread;     // [n_q][n_head] then; null where the kernel makes the lists itself
    const half *     mask;       // null: nothing masked
    const float *    q;
    const float *    sinks;  // null: none
    float *          out;
    float *          part;       // [n_split][part_rows][head_dim]: partial sums, unnormalised
    float2 *         part_ml;    // [n_split][part_rows]: their maximum (base 2) and sum of weights
    int32_t          part_rows;  // n_q * n_head outputs; with stands_in, n_q * n_head_kv more, see mean_row()
    int64_t          cur_k_stride;
    int64_t          cur_v_stride;
    int64_t          mask_stride;
    int64_t          q_stride_query;
    int64_t          q_stride_head;
    int32_t          n_head_kv;
    int32_t          head0;    // prefill: the KV heads of this launch begin here
    int32_t          n_heads;  // and are so many
    int32_t          n_head;
    int32_t          gqa;  // query heads a KV head
    int32_t          n_q;
    int32_t          n_kv;
    int32_t          n_exact;
    int32_t          n_current;  // rows of the micro-batch
    int32_t          rot_k;      // Rotation; decode only
    int32_t          rot_v;
    int32_t          n_split;
    int32_t          arrival_slot;  // of the counters by which the last split merges; negative: another launch merges
    int32_t          group_shift;   // log2 of the cells a group
    float            q_scale;       // applied to queries when they become f16
    float            score_scale;   // applied to q . k afterwards; the result is in base-2 units unless soft-capped
    float            softcap;       // 0: none

    // log2 of the channels a scale of far rows. Unless that is kFineShift, far_k and far_v are the values only.
    int32_t         scale_shift;
    const uint8_t * far_k_scales;
    const uint8_t * far_v_scales;
};

// Query of a column of a KV head.
__device__ __forceinline__ int column_query(const AttendParams & p, int column) {
    return p.n_q == 1 ? 0 : column / p.gqa;  // a division is long
}

// Row of the partial sums with the plain sum of the values that a query reads for a KV head; their number is its sum of weights.
__device__ __forceinline__ int mean_row(const AttendParams & p, int query, int head) {
    return p.n_q * p.n_head + query * p.n_head_kv + head;
}

// Dot products times `scale` -> scores, base 2.
template <int N>
__device__ __forceinline__ void finish_scores(const AttendParams & p, float scale, float (&s)[N][4]) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) {
        s[i / 4][i % 4] *= scale;
    }
    if (p.softcap != 0.0f) {
        // tanh(x) = 1 - 2 / (1 + e^2x): right in both limits, its error that of rounding 1 in f32
        const float in = 2.0f * kLog2E / p.softcap, out = kLog2E * p.softcap;
#pragma unroll
        for (int i = 0; i < N * 4; ++i) {
            s[i / 4][i % 4] = out * (1.0f - __fdividef(2.0f, 1.0f + exp2_fast(in * s[i / 4][i % 4])));
        }
    }
}

}  // namespace device
}  // namespace kvfold
