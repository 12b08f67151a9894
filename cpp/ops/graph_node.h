// How a kvfold operation looks as a ggml graph node: GGML_OP_CUSTOM with our parameters behind the custom op's own.
//
// The function pointer of the custom op stays null on purpose: backends recognise the node by its magic number and never
// call a pointer that a graph carries (a graph may come from another process, see ggml's RPC backend).
#pragma once

#include <cstdint>
#include <cstring>

#include "ggml.h"
#include "ops/kv_ops.h"

namespace kvfold {

constexpr int32_t kNodeMagic = 0x4b56464f;  // "KVFO"

enum class NodeOp : int32_t {
    attend = 1,
    fold   = 2,
    store  = 3,
    select = 4,
    store_batched =
        5,  // a store that a backend may do together with the next store of the graph, there being nothing between
    align   = 6,
    score   = 7,
    observe = 8,
    observe_batched =
        9,  // an observe that a backend may do together with the next store of the graph that is not batched
    receive        = 10,
    sample         = 11,
    sampled        = 12,
    lose           = 13,
    sample_batched = 14,  // as observe_batched
};

// Lives in op_params from slot kNodeSlot on; the slots before belong to ggml's custom op (pointer, tasks, user data). The
// first slot is the upper half of the user data, which only the function reads that the null pointer does not name.
constexpr int kNodeSlot = 5;
struct NodeParams {
    int32_t magic;
    int8_t  op;           // NodeOp
    int8_t  scale_group;  // LayerMemory::scale_group
    int8_t  group;        // cells a group
    int8_t  spans;        // whether the layer keeps summaries of spans
    int16_t n_head_kv;
    int16_t head_dim;
    int32_t n_cells;  // of the layer
    int32_t n_near;   // rows of its near pool
    int16_t rot_k;    // Rotation
    int16_t rot_v;
    float   scale;    // attend, select, score
    float   softcap;  // attend, select, score; 0: none
    // select: LookupBudget, shares in units of 1 / kShareUnits. With a lookup_max of 0 and some min_tokens the list is a pool
    // for other layers, and not counted. sample, sampled: min_tokens is a SampledScore.
    uint16_t lookup_min;
    uint16_t lookup_max;
    uint16_t threshold;
    uint16_t min_tokens;
    uint16_t max_tokens;
    uint16_t most_spans;  // select: SelectArgs::most_spans; 0: no search in two levels
};
constexpr float kShareUnits = 65535.0f;
static_assert(sizeof(NodeParams) == 44 && sizeof(NodeParams) <= GGML_MAX_OP_PARAMS - kNodeSlot * sizeof(int32_t),
              "must fit op_params");

// What a layer keeps besides the far rows is one tensor, i8 [TierLayout::bytes], because a node has ten sources at most:
//   side  SideLayout
//   near  f16 [2][n_near][n_head_kv][head_dim]: keys, then values
struct TierLayout {
    SideLayout side;
    size_t     near_offset;
    size_t     near_bytes;
    size_t     bytes;
};

constexpr TierLayout tier_layout(int32_t n_head_kv, int32_t head_dim, int32_t n_groups, int32_t n_spans,
                                 int32_t n_near) {
    TierLayout l{};
    l.side        = side_layout(n_head_kv, head_dim, n_groups, n_spans);
    l.near_offset = (l.side.bytes + 63) / 64 * 64;
    l.near_bytes  = size_t(2) * size_t(n_near) * size_t(n_head_kv) * size_t(head_dim) * sizeof(uint16_t);
    l.bytes       = l.near_offset + l.near_bytes;
    return l;
}

// What the nodes of a micro-batch are told is one tensor, i32 [PlanLayout::size], because every graph input costs a transfer:
//   header  [kPlanHeader]
//   far     [n_words = plan_words(n_kv)]      AttendArgs::far_bits
//   ready   [plan_words(n_spans)]             SelectArgs::ready, for all spans of the layer whatever n_words is
//   exact   [exact_capacity][2]               AttendArgs::exact; entries behind the real ones are kSrcHidden
//   fold    [fold_capacity][1 + group]        FoldArgs::plan; entries behind the real ones hold anything
//   spans   [span_capacity]                   FoldArgs::spans; likewise
//   store   [n_tokens]                        StoreArgs::dst
struct PlanLayout {
    int64_t exact_capacity;
    int64_t fold_capacity;  // every group that is folded has a near or a current member
    int64_t span_capacity;
    int64_t far;  // offsets, in words
    int64_t ready;
    int64_t exact;
    int64_t fold;
    int64_t spans;
    int64_t store;
    int64_t size;
};

// Words of so many bits in a plan. Their number is even, so that entries of `exact`, which the device reads as a pair, are aligned.
constexpr int64_t plan_words(int64_t n_bits) { return (n_bits + 63) / 64 * 2; }

constexpr int kPlanHeader = 4;
static_assert(kPlanHeader % 2 == 0);
enum PlanHeader : int {
    kPlanFolds = 0,  // entries of `fold` that are real
    kPlanEpoch = 1,  // number of this plan, > 0; the store writes it to the side memory when it is done
    kPlanSpans = 2,  // entries of `spans` that are real
};

// Spans that a micro-batch can summarise: more than it completes, to catch up after a restore.
constexpr int64_t span_capacity(int64_t n_spans, int64_t n_tokens) {
    return n_spans < 64 + n_tokens ? n_spans : 64 + n_tokens;
}

constexpr PlanLayout plan_layout(int64_t n_words, int64_t n_near, int64_t n_tokens, int64_t group, int64_t n_spans) {
    PlanLayout l{};
    l.exact_capacity = n_near + n_tokens;
    l.fold_capacity  = n_near + n_tokens;
    l.span_capacity  = kvfold::span_capacity(n_spans, n_tokens);
    l.far            = kPlanHeader;
    l.ready          = l.far + n_words;
    l.exact          = l.ready + plan_words(n_spans);
    l.fold           = l.exact + 2 * l.exact_capacity;
    l.spans          = l.fold + l.fold_capacity * (1 + group);
    l.store          = l.spans + l.span_capacity;
    l.size           = l.store + n_tokens;
    return l;
}

// Sources of the nodes. Shapes in ggml order (fastest first); gqa = n_head_kv * head_dim.
//
// attend -> f32 [head_dim, n_head, n_tokens]
namespace attend_src {
enum : int {
    q,          // f32  [head_dim, n_tokens, n_head], any strides with unit stride in dimension 0
    far_k,      // nvfp4 [gqa, n_cells], or with another scale group than 16 i8 [bytes of gqa channels, n_cells]
    far_v,      // likewise
    tier,       // TierLayout
    k_cur,      // f32  [gqa, n_tokens], rows nb[1] apart
    v_cur,      // f32  [gqa, n_tokens]
    plan,       // PlanLayout
    mask,       // f16  [n_kv, n_tokens], or none: all queries see what the plan lists
    sinks,      // f32  [n_head], or none
    selection,  // the output of a select node, or none: dense
};
}

// select -> i32 [1 + capacity, n_head_kv, n_tokens + n], the lists of SelectArgs::selected; with n > 0, SelectArgs::unread (f32)
//           behind them
namespace select_src {
enum : int {
    q,  // as for attend
    tier,
    plan,
    mask,  // as for attend
    pool,  // the output of another select node, or none
};
}

// align -> view of f64 [4, n_head], an Alignment a head that is added to; sources as of an attend with a selection

// receive -> view of f32 [n_cells, n_head_kv], ReceiveArgs::received; sources as of an attend

// lose -> view of f64 [4, n_head], LoseArgs::sums; sources as of an attend, the selection being i32 words, LoseArgs::dropped

// fold -> view of far_k
namespace fold_src {
enum : int {
    far_k,
    far_v,
    tier,
    k_cur,
    v_cur,
    plan,
    before,  // a node that must have run (the last attention that reads the old state)
};
}

// store -> view of tier
namespace store_src {
enum : int {
    tier,
    k_cur,
    v_cur,
    plan,
    before,  // the fold of the same layer: it may read pool rows that are overwritten here
    q,  // with the next one, on the CPU: the queries are observed as well (observe_src), which spares a node; or none
    queries,
};
}

// score -> f32 [n_kv, kScoreKinds] sums over the layers so far; all layers' are views of the same memory
namespace score_src {
enum : int {
    far_k,
    far_v,
    tier,
    cells,    // i32 [n_kv / 32] ScoreArgs::far_bits
    queries,  // f32 [query_stats_size()], or none
    before,   // the score of an earlier layer, or none
};
}

// observe -> view of queries
namespace observe_src {
enum : int {
    q,  // as for attend
    queries,
};
}

// sample -> view of samples
namespace sample_src {
enum : int {
    q,        // as for attend
    samples,  // f16 [n_head * head_dim, 1 + SampleRule::rows]
};
}

// sampled -> f32 [n_kv] sums over the layers so far; a view of `before` where there is one
namespace sampled_src {
enum : int {
    far_k,
    far_v,
    tier,
    cells,    // i32 [n_kv / 32] SampledArgs::far_bits
    age,      // i32 [n_kv]
    samples,  // as for sample
    before,   // the node of an earlier layer, or none
};
}

inline NodeParams node_params(const ggml_tensor * t) {
    NodeParams p;
    std::memcpy(&p, t->op_params + kNodeSlot, sizeof(p));
    return p;
}

inline bool is_kvfold_node(const ggml_tensor * t) {
    return t->op == GGML_OP_CUSTOM && t->op_params[kNodeSlot] == kNodeMagic;
}

}  // namespace kvfold
