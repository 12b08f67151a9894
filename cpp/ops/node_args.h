// Unpacks graph nodes into the arguments of the operations. Memory is not touched, so that it may be the device's; what stands in
// the plan's header is for the backend to read.
#pragma once

#include <algorithm>

#include "ops/graph_node.h"
#include "ops/kv_receive.h"
#include "ops/kv_sample.h"
#include "ops/kv_score.h"
#include "ops/kv_select.h"

namespace kvfold {

template <typename T>
T * tensor_data(const ggml_tensor * t) {
    return static_cast<T *>(t->data);
}

inline int32_t span_count(const NodeParams & p) { return p.spans != 0 ? p.n_cells / kSpanCells : 0; }

// The far tier may be missing: a store has no use for it.
inline LayerMemory layer_memory(const ggml_tensor * node, const ggml_tensor * far_k, const ggml_tensor * far_v,
                                const ggml_tensor * tier) {
    const NodeParams p      = node_params(node);
    const int32_t    spans  = span_count(p);
    const TierLayout layout = tier_layout(p.n_head_kv, p.head_dim, p.n_cells / p.group, spans, p.n_near);
    LayerMemory      m{};
    m.n_head_kv = p.n_head_kv;
    m.head_dim  = p.head_dim;
    m.group     = p.group;
    m.n_cells   = p.n_cells;
    m.n_near    = p.n_near;
    m.n_spans   = spans;
    m.far_k     = far_k != nullptr ? tensor_data<uint8_t>(far_k) : nullptr;
    m.far_v     = far_v != nullptr ? tensor_data<uint8_t>(far_v) : nullptr;
    m.side      = tensor_data<uint8_t>(tier);
    m.near_k    = reinterpret_cast<uint16_t *>(m.side + layout.near_offset);
    m.near_v    = m.near_k + layout.near_bytes / sizeof(uint16_t) / 2;

    m.scale_group = p.scale_group;
    return m;
}

inline CurrentRows current_rows(const ggml_tensor * k_cur, const ggml_tensor * v_cur) {
    CurrentRows c{};
    c.k        = tensor_data<const float>(k_cur);
    c.v        = tensor_data<const float>(v_cur);
    c.k_stride = int64_t(k_cur->nb[1] / sizeof(float));
    c.v_stride = int64_t(v_cur->nb[1] / sizeof(float));
    c.n_rows   = int32_t(k_cur->ne[1]);
    return c;
}

// The plan's words for far cells are what its size leaves beside everything else. `tokens` has the tokens in dimension 1.
inline PlanLayout plan_layout(const ggml_tensor * node, const ggml_tensor * plan, const ggml_tensor * tokens) {
    const NodeParams p      = node_params(node);
    const int64_t    others = kvfold::plan_layout(0, p.n_near, tokens->ne[1], p.group, span_count(p)).size;
    return kvfold::plan_layout(plan->ne[0] - others, p.n_near, tokens->ne[1], p.group, span_count(p));
}

inline Rotation rotation(const ggml_tensor * node) {
    const NodeParams p = node_params(node);
    return {p.rot_k, p.rot_v};
}

// What attention and look-up have in common: queries, what they see, and how scores are made. `mask` may be missing.
template <typename Args>
void set_queries(Args & a, const ggml_tensor * node, const ggml_tensor * q, const ggml_tensor * mask,
                 const int32_t * plan, const PlanLayout & layout) {
    const NodeParams p = node_params(node);
    a.rot              = rotation(node);
    a.far_bits         = reinterpret_cast<const uint32_t *>(plan + layout.far);
    a.n_kv             = int32_t(std::min<int64_t>(32 * (layout.ready - layout.far), p.n_cells));
    a.q                = tensor_data<const float>(q);
    a.q_stride_query   = int64_t(q->nb[1] / sizeof(float));
    a.q_stride_head    = int64_t(q->nb[2] / sizeof(float));
    a.n_q              = int32_t(q->ne[1]);
    a.n_head           = int32_t(q->ne[2]);
    a.mask             = mask != nullptr ? tensor_data<const uint16_t>(mask) : nullptr;
    a.mask_stride      = mask != nullptr ? int64_t(mask->nb[1] / sizeof(uint16_t)) : 0;
    a.scale            = p.scale;
    a.softcap          = p.softcap;
}

inline AttendArgs attend_args(const ggml_tensor * t) {
    const ggml_tensor * q      = t->src[attend_src::q];
    const ggml_tensor * plan   = t->src[attend_src::plan];
    const ggml_tensor * mask   = t->src[attend_src::mask];
    const ggml_tensor * sinks  = t->src[attend_src::sinks];
    const PlanLayout    layout = plan_layout(t, plan, t->src[attend_src::k_cur]);
    const auto *        words  = tensor_data<const int32_t>(plan);
    AttendArgs          a{};
    a.mem = layer_memory(t, t->src[attend_src::far_k], t->src[attend_src::far_v], t->src[attend_src::tier]);
    a.cur = current_rows(t->src[attend_src::k_cur], t->src[attend_src::v_cur]);
    set_queries(a, t, q, mask, words, layout);
    a.exact   = reinterpret_cast<const ExactCell *>(words + layout.exact);
    a.n_exact = int32_t(layout.exact_capacity);
    a.sinks   = sinks != nullptr ? tensor_data<const float>(sinks) : nullptr;
    a.out     = tensor_data<float>(t);
    return a;
}

inline ReceiveArgs receive_args(const ggml_tensor * t) { return {attend_args(t), tensor_data<float>(t)}; }

inline LoseArgs lose_args(const ggml_tensor * t) {
    return {attend_args(t), tensor_data<const uint32_t>(t->src[attend_src::selection]), tensor_data<Alignment>(t)};
}

// Where a layer counts its look-ups.
inline uint64_t * counters_of(const LayerMemory & m) {
    return reinterpret_cast<uint64_t *>(m.side + side_layout(m).counters_offset);
}

// What a select node says about unread groups, behind its lists; null if it has no room for that.
inline float * unread_of(const ggml_tensor * selection) {
    const int64_t n_q = selection->src[select_src::q]->ne[1];
    return selection->ne[2] > n_q
               ? reinterpret_cast<float *>(tensor_data<int32_t>(selection) + n_q * selection->ne[1] * selection->ne[0])
               : nullptr;
}

inline SparseAttendArgs sparse_attend_args(const ggml_tensor * t) {
    const ggml_tensor * selection = t->src[attend_src::selection];
    // A list that was made for the queries of another layer says nothing about what these leave unread.
    const bool own = selection->src[select_src::q] == t->src[attend_src::q];
    return {attend_args(t), tensor_data<const int32_t>(selection), int32_t(selection->ne[0] - 1),
            own ? unread_of(selection) : nullptr};
}

inline SelectArgs select_args(const ggml_tensor * t) {
    const NodeParams    p      = node_params(t);
    const ggml_tensor * q      = t->src[select_src::q];
    const ggml_tensor * plan   = t->src[select_src::plan];
    const ggml_tensor * mask   = t->src[select_src::mask];
    const ggml_tensor * pool   = t->src[select_src::pool];
    const PlanLayout    layout = plan_layout(t, plan, q);
    const auto *        words  = tensor_data<const int32_t>(plan);
    SelectArgs          a{};
    a.mem = layer_memory(t, nullptr, nullptr, t->src[select_src::tier]);
    set_queries(a, t, q, mask, words, layout);
    a.budget = {float(p.lookup_min) / kShareUnits, float(p.lookup_max) / kShareUnits, float(p.threshold) / kShareUnits,
                int32_t(p.min_tokens), int32_t(p.max_tokens)};
    a.pool   = pool != nullptr ? tensor_data<const int32_t>(pool) : nullptr;
    a.pool_capacity = pool != nullptr ? int32_t(pool->ne[0] - 1) : 0;
    a.ready         = p.most_spans > 0 ? reinterpret_cast<const uint32_t *>(words + layout.ready) : nullptr;
    a.most_spans    = p.most_spans;
    a.selected      = tensor_data<int32_t>(t);
    a.capacity      = int32_t(t->ne[0] - 1);
    a.counters      = p.lookup_max == 0 && p.min_tokens != 0 ? nullptr : counters_of(a.mem);
    a.unread        = unread_of(t);
    return a;
}

// `n_groups` and `n_spans` are the capacities of the plan.
inline FoldArgs fold_args(const ggml_tensor * t) {
    const ggml_tensor * plan   = t->src[fold_src::plan];
    const PlanLayout    layout = plan_layout(t, plan, t->src[fold_src::k_cur]);
    FoldArgs            a{};
    a.mem      = layer_memory(t, t->src[fold_src::far_k], t->src[fold_src::far_v], t->src[fold_src::tier]);
    a.cur      = current_rows(t->src[fold_src::k_cur], t->src[fold_src::v_cur]);
    a.rot      = rotation(t);
    a.plan     = tensor_data<const int32_t>(plan) + layout.fold;
    a.n_groups = int32_t(layout.fold_capacity);
    a.spans    = tensor_data<const int32_t>(plan) + layout.spans;
    a.n_spans  = int32_t(layout.span_capacity);
    return a;
}

inline StoreArgs store_args(const ggml_tensor * t) {
    const ggml_tensor * plan = t->src[store_src::plan];
    StoreArgs           a{};
    a.mem = layer_memory(t, nullptr, nullptr, t->src[store_src::tier]);
    a.cur = current_rows(t->src[store_src::k_cur], t->src[store_src::v_cur]);
    a.rot = rotation(t);
    a.dst = tensor_data<const int32_t>(plan) + plan_layout(t, plan, t->src[store_src::k_cur]).store;
    return a;
}

inline ScoreArgs score_args(const ggml_tensor * t) {
    const NodeParams    p       = node_params(t);
    const ggml_tensor * cells   = t->src[score_src::cells];
    const ggml_tensor * queries = t->src[score_src::queries];
    const ggml_tensor * before  = t->src[score_src::before];
    ScoreArgs           a{};
    a.mem      = layer_memory(t, t->src[score_src::far_k], t->src[score_src::far_v], t->src[score_src::tier]);
    a.far_bits = tensor_data<const uint32_t>(cells);
    a.n_kv     = int32_t(t->ne[0]);
    a.queries  = queries != nullptr ? tensor_data<const float>(queries) : nullptr;
    a.n_head   = queries != nullptr ? int32_t((queries->ne[0] - 1) / 2 / p.head_dim) : p.n_head_kv;
    a.scale    = p.scale;
    a.softcap  = p.softcap;
    a.sizes    = p.min_tokens != 0;
    a.before   = before != nullptr ? tensor_data<const float>(before) : nullptr;
    a.scores   = tensor_data<float>(t);
    return a;
}

inline QueryRows query_rows(const ggml_tensor * node, const ggml_tensor * q) {
    const NodeParams p = node_params(node);
    return {tensor_data<const float>(q),
            int64_t(q->nb[1] / sizeof(float)),
            int64_t(q->nb[2] / sizeof(float)),
            int32_t(q->ne[1]),
            int32_t(q->ne[2]),
            p.head_dim,
            p.rot_k};
}

// Of an observe node, or of a store node that observes.
inline ObserveArgs observe_args(const ggml_tensor * t) {
    const NodeOp op     = NodeOp(node_params(t).op);
    const bool   stores = op == NodeOp::store || op == NodeOp::store_batched;
    return {query_rows(t, t->src[stores ? int(store_src::q) : int(observe_src::q)]),
            tensor_data<float>(t->src[stores ? int(store_src::queries) : int(observe_src::queries)])};
}

inline SampleArgs sample_args(const ggml_tensor * t) {
    return {query_rows(t, t->src[sample_src::q]), sample_rule(SampledScore(node_params(t).min_tokens)),
            tensor_data<uint16_t>(t->src[sample_src::samples])};
}

inline SampledArgs sampled_args(const ggml_tensor * t) {
    const NodeParams    p       = node_params(t);
    const ggml_tensor * samples = t->src[sampled_src::samples];
    const ggml_tensor * before  = t->src[sampled_src::before];
    SampledArgs         a{};
    a.mem      = layer_memory(t, t->src[sampled_src::far_k], t->src[sampled_src::far_v], t->src[sampled_src::tier]);
    a.score    = SampledScore(p.min_tokens);
    a.far_bits = tensor_data<const uint32_t>(t->src[sampled_src::cells]);
    a.age      = tensor_data<const int32_t>(t->src[sampled_src::age]);
    a.n_kv     = int32_t(t->ne[0]);
    a.samples  = tensor_data<const uint16_t>(samples);
    a.n_head   = int32_t(samples->ne[0] / p.head_dim);
    a.scale    = p.scale;
    a.softcap  = p.softcap;
    a.before   = before != nullptr ? tensor_data<const float>(before) : nullptr;
    a.scores   = tensor_data<float>(t);
    return a;
}

// Where a layer's epoch is.
inline int32_t * epoch_of(const LayerMemory & m) {
    return reinterpret_cast<int32_t *>(m.side + side_layout(m).epoch_offset);
}

}  // namespace kvfold
