// The operations of a kvfold cache, as plain functions over raw memory.
//
// Nothing here knows ggml: `cpp/ops/cpu_backend.cpp` unpacks graph nodes into these structs for the CPU and
// `cpp/ops/cuda_backend.cu` does the same for CUDA, so that tests and benchmarks can call an operation directly.
//
// Vocabulary (see docs/design.md): a *cell* holds one token; `group` consecutive cells form a *group*; a cell's row is
// *near* (exact, f16, in the near pool), *current* (exact, f32, born in the running micro-batch) or *far* (FP4: keys as
// the difference to their group's summary key, values as they are).
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/fp4_block.h"

namespace kvfold {

// Where the row of a cell is read from. Used by the list of exact cells (attention) and by the fold plan.
//   >= 0                  row of the near pool
//   kSrcFar               the far tier (in a fold plan: the cell's own decoded far row, when a group is folded again)
//   kSrcHidden            no query of this micro-batch sees the cell / the group has no such member. Its memory may hold
//                         anything, NaN included, and must not reach a result.
//   <= kSrcCurrentBase    row (kSrcCurrentBase - src) of the micro-batch
constexpr int32_t kSrcFar         = -1;
constexpr int32_t kSrcHidden      = -2;
constexpr int32_t kSrcCurrentBase = -3;

constexpr int32_t src_current(int32_t row) { return kSrcCurrentBase - row; }
constexpr bool    src_is_current(int32_t src) { return src <= kSrcCurrentBase; }
constexpr int32_t src_current_row(int32_t src) { return kSrcCurrentBase - src; }

// Groups in turn form *spans*: span s is the cells [kSpanCells * s, kSpanCells * (s + 1)). A layer that is searched in two levels
// (SelectArgs::ready) has a summary of every span; cells behind the last whole span belong to none.
constexpr int32_t kSpanCells = 128;

// Byte offsets inside a layer's *side* memory, which holds what belongs to groups and spans rather than to cells:
//   summaries  fp4_block [n_groups][n_head_kv][head_dim / 64]   decoded: the group's summary key
//   spread     f16       [n_groups][n_head_kv]                  mean over channels of the variance of the group's keys
//   counters   u64       [2]                                    what look-ups counted (SelectArgs::counters)
//   epoch      i32                                              number of the last plan whose fold and store both ran here;
//                                                               written by the backends, read after an aborted graph
// and only where there are spans, from a multiple of 16 on:
//   spans        fp4_block [n_spans][n_head_kv][head_dim / 64]  as summaries
//   span_spread  f16       [n_spans][n_head_kv]
struct SideLayout {
    size_t summary_row_bytes;  // one group, or one span
    size_t spread_offset;
    size_t counters_offset;
    size_t epoch_offset;
    size_t span_offset;
    size_t span_spread_offset;
    size_t bytes;
};

constexpr SideLayout side_layout(int32_t n_head_kv, int32_t head_dim, int32_t n_groups, int32_t n_spans) {
    SideLayout l{};
    l.summary_row_bytes = size_t(n_head_kv) * size_t(head_dim / kFp4BlockValues) * sizeof(Fp4Block);
    l.spread_offset     = l.summary_row_bytes * size_t(n_groups);
    l.counters_offset   = (l.spread_offset + size_t(n_groups) * size_t(n_head_kv) * 2 + 7) / 8 * 8;
    l.epoch_offset      = l.counters_offset + 2 * sizeof(uint64_t);
    l.bytes             = l.epoch_offset + sizeof(int32_t);
    if (n_spans > 0) {
        l.span_offset        = (l.bytes + 15) / 16 * 16;
        l.span_spread_offset = l.span_offset + l.summary_row_bytes * size_t(n_spans);
        l.bytes              = l.span_spread_offset + size_t(n_spans) * size_t(n_head_kv) * 2;
    }
    return l;
}

// One layer's persistent memory. Rows are contiguous: [n_head_kv][head_dim].
struct LayerMemory {
    int32_t    n_head_kv;
    int32_t    head_dim;  // 64, 128 or 256
    int32_t    group;     // m: 2, 4, 8, 16 or 32 cells a group
    int32_t    n_cells;   // a multiple of `group`
    int32_t    n_near;    // rows of the near pool
    int32_t    n_spans;   // 0 (the layer keeps nothing about spans) or n_cells / kSpanCells; then group is 16 at most
    uint8_t *  far_k;     // far_row() says where a row is
    uint8_t *  far_v;
    uint8_t *  side;    // side_layout() of it
    uint16_t * near_k;  // f16 [n_near][n_head_kv][head_dim]
    uint16_t * near_v;
    int32_t    scale_group = kFp4ScaleGroup;  // channels of a far row that share a scale: 16, 32 or 64
};

// Rows of far_k and far_v are, with a scale group of 16,
//     Fp4Block [n_cells][n_head_kv][head_dim/64]
// and with G = 32 or 64
//     values  uint8 [n_cells][n_head_kv][head_dim/2]
//     scales  uint8 [n_cells][n_head_kv][head_dim/G]    kernels read whole words of it: their memory ends at a multiple of 4 bytes
// This many bytes for a KV head:
constexpr int64_t far_row_bytes(int32_t head_dim, int32_t scale_group) {
    return int64_t(head_dim / kFp4BlockValues) * fp4_block_bytes(scale_group);
}

// Where the scales begin, with a scale group of 32 or 64.
KVFOLD_HOST_DEVICE inline int64_t far_scales_offset(const LayerMemory & m) {
    return int64_t(m.n_cells) * m.n_head_kv * (m.head_dim / 2);
}

// The row of a cell and KV head in `far`, which is far_k or far_v.
KVFOLD_HOST_DEVICE inline Fp4Row far_row(uint8_t * far, const LayerMemory & m, int64_t cell, int64_t kv_head) {
    const int64_t at = cell * m.n_head_kv + kv_head;
    if (m.scale_group == kFp4ScaleGroup) {
        uint8_t * row = far + at * (m.head_dim / kFp4BlockValues) * int64_t(sizeof(Fp4Block));
        return {row, row + sizeof(Fp4Block::scale), sizeof(Fp4Block), sizeof(Fp4Block)};
    }
    return {far + far_scales_offset(m) + at * (m.head_dim / m.scale_group), far + at * (m.head_dim / 2),
            kFp4BlockValues / m.scale_group, kFp4BlockValues / 2};
}

// The summary of a group for a KV head.
inline Fp4Block * group_summary(const LayerMemory & m, int64_t group, int64_t kv_head) {
    return reinterpret_cast<Fp4Block *>(m.side) + (group * m.n_head_kv + kv_head) * (m.head_dim / kFp4BlockValues);
}

constexpr SideLayout side_layout(const LayerMemory & m) {
    return side_layout(m.n_head_kv, m.head_dim, m.n_cells / m.group, m.n_spans);
}

// Queries of a micro-batch for operations that only watch them.
struct QueryRows {
    const float * q;  // as in AttendArgs
    int64_t       q_stride_query;
    int64_t       q_stride_head;
    int32_t       n_q;
    int32_t       n_head;
    int32_t       head_dim;
    int32_t       rot;  // Rotation::k
};

// The micro-batch's own rows, f32; row r of head h starts at base + r*row_stride + h*head_dim (strides in floats).
struct CurrentRows {
    const float * k;
    const float * v;
    int64_t       k_stride;
    int64_t       v_stride;
    int32_t       n_rows;
};

// How an operation runs on several threads: every thread calls the function with its own `ith`.
struct Threads {
    int ith;
    int nth;
    void (*barrier)(void * arg);  // all `nth` threads; must not be null when nth > 1
    void * barrier_arg;
    void * scratch;  // shared by all threads, 64-byte aligned, as large as NAME_scratch() asks
    size_t scratch_bytes;
};

// Keys and values live in a rotated basis: every `n` consecutive channels are multiplied with the n-point Hadamard matrix (in
// natural order, scaled by n^-1/2, so that it is its own inverse), which spreads outliers over the channels of a scale. An
// operation rotates the rows it is given itself; a size of 0 means that they come rotated. Sizes are powers of two, 64 at
// least, and divide head_dim.
struct Rotation {
    int32_t k;  // of keys and queries
    int32_t v;  // of values; the result of an attention is rotated back
};

// kv_store: current rows that stay near are written to the near pool as f16.
//   dst  [n_rows]  near row of each current row, or a negative number for "not stored"
struct StoreArgs {
    LayerMemory     mem;
    CurrentRows     cur;
    Rotation        rot;
    const int32_t * dst;
};
void kv_store(const StoreArgs & a, const Threads & t);

// kv_fold: planned groups are encoded into the far tier (summary, spread, key differences, values).
//   plan [n_groups][1 + group]   group index, then the source of each member (kSrcHidden: no such member)
// For every planned group and KV head, in this order, in f32:
//   1. mean over the n present members, in member order (sum, then times 1.0f / n); summary = fp4(mean); S = decode(summary)
//   2. spread = f16( mean over channels of (1/n) sum over members (key - mean)^2 )
//   3. far_k[member] = fp4(key - S), far_v[member] = fp4(value), with scales of LayerMemory::scale_group; absent members get zero
//      bytes
// A far source is read (decoded with the *old* summary) before anything of its group is written.
//
//   spans [n_spans]  spans to summarise, all of whose n = kSpanCells / group groups are complete and none is planned here
// For every one of those and every KV head, in f32, S_g and spread_g being what the groups have in memory:
//   1. mean over g of S_g, in order of groups (sum, then times 1.0f / n); the span's summary = fp4(mean)
//   2. its spread = f16( mean over g of spread_g + mean over g and channels of (S_g - mean)^2 ), so that a span's keys spread
//      about its mean as a group's keys do about theirs
struct FoldArgs {
    LayerMemory     mem;
    CurrentRows     cur;
    Rotation        rot;
    const int32_t * plan;
    int32_t         n_groups;
    const int32_t * spans;
    int32_t         n_spans;
};
size_t kv_fold_scratch(const FoldArgs & a, int nth);
void   kv_fold(const FoldArgs & a, const Threads & t);

// A visible cell whose row is exact.
struct ExactCell {
    int32_t cell;  // its column of the mask
    int32_t src;   // near row or current row; kSrcHidden: an entry that only pads the list
};

// kv_attend: softmax attention of n_q queries over n_kv cells, dense.
//   score(q, cell) = cap(scale * q . k) + mask, cap(x) = softcap * tanh(x / softcap) when softcap != 0
//   sinks: a per-head logit that joins the softmax denominator and has no value (attention-sink tensors, gpt-oss)
// A query that sees no cell gets zeros. All arithmetic in f32; far rows are exactly summary + difference.
struct AttendArgs {
    LayerMemory mem;
    CurrentRows cur;
    Rotation    rot;
    const uint32_t *
        far_bits;  // [(n_kv + 31) / 32] bit c % 32 of word c / 32: some query sees cell c, and its row is far
    const ExactCell * exact;  // [n_exact] the other cells that some query sees, each once
    int32_t           n_exact;
    int32_t           n_kv;  // <= mem.n_cells
    const float *     q;     // f32; element (d, query i, head h) at q + i*q_stride_query + h*q_stride_head + d
    int64_t           q_stride_query;
    int64_t           q_stride_head;
    int32_t           n_q;
    int32_t           n_head;  // a multiple of n_head_kv; head h uses KV head h / (n_head / n_head_kv)
    const uint16_t *
            mask;  // f16 0 or -inf (other values are added); [n_q][mask_stride]; null: every query sees what is listed
    int64_t mask_stride;  // in elements
    const float * sinks;  // [n_head] or null
    float         scale;
    float         softcap;  // 0: none
    float *       out;      // f32 [n_q][n_head][head_dim]
};
size_t kv_attend_scratch(const AttendArgs & a, int nth);
void   kv_attend(const AttendArgs & a, const Threads & t);

}  // namespace kvfold
