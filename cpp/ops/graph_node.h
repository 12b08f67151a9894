// How a kvfold operation looks as a ggml graph node: GGML_OP_CUSTOM with our parameters behind the custom op's own.
//
// The function pointer of the custom op stays null on purpose: backends recognise the node by its magic number and never
// call a pointer that a graph carries (a graph may come from another process, see ggml's RPC backend).
#pragma once

#include <cstdint>
#include <cstring>

#include "ggml.h"

namespace kvfold {

constexpr int32_t kNodeMagic = 0x4b56464f;  // "KVFO"

enum class NodeOp : int32_t { attend = 1, fold = 2, store = 3 };

// Lives in op_params from slot kNodeSlot on; the slots before belong to ggml's custom op (pointer, tasks, user data).
constexpr int kNodeSlot = 6;
struct NodeParams {
    int32_t magic;
    int32_t op;  // NodeOp
    int32_t n_head_kv;
    int32_t head_dim;
    int32_t group;    // cells a group
    float   scale;    // attend
    float   softcap;  // attend; 0: none
};
static_assert(sizeof(NodeParams) <= GGML_MAX_OP_PARAMS - kNodeSlot * sizeof(int32_t), "must fit op_params");

// Sources of the nodes. Shapes in ggml order (fastest first); gqa = n_head_kv * head_dim.
//
// attend -> f32 [head_dim, n_head, n_tokens]
namespace attend_src {
enum : int {
    q,         // f32  [head_dim, n_tokens, n_head], any strides with unit stride in dimension 0
    far_k,     // nvfp4 [gqa, n_cells]
    far_v,     // nvfp4 [gqa, n_cells]
    side,      // i8   [side_layout(..).bytes]
    near,      // f16  [gqa, n_near, 2]: keys, then values
    k_cur,     // f32  [gqa, n_tokens], rows nb[1] apart
    v_cur,     // f32  [gqa, n_tokens]
    mask,      // f16  [n_kv, n_tokens]
    cell_src,  // i32  [n_kv]
    sinks,     // f32  [n_head] or none
};
}

// fold -> view of far_k
namespace fold_src {
enum : int {
    far_k,
    far_v,
    side,
    near,
    k_cur,
    v_cur,
    plan,    // i32 [kPlanHeader + capacity * (1 + group)]: header, then the entries of FoldArgs::plan
    before,  // a node that must have run (the last attention that reads the old state)
};
}

// store -> view of near
namespace store_src {
enum : int {
    near,
    side,
    k_cur,
    v_cur,
    dst,     // i32 [kPlanHeader + n_tokens]: header, then StoreArgs::dst
    before,  // the fold of the same layer: it may read pool rows that are overwritten here
};
}

// Header of the plan and of the store list.
constexpr int kPlanHeader = 4;
enum PlanHeader : int {
    kPlanCount = 0,  // entries that are real; the rest is padding, so that a graph keeps its shape
    kPlanEpoch = 1,  // number of this plan, > 0; the store writes it to the side memory when it is done
};

inline NodeParams node_params(const ggml_tensor * t) {
    NodeParams p;
    std::memcpy(&p, t->op_params + kNodeSlot, sizeof(p));
    return p;
}

inline bool is_kvfold_node(const ggml_tensor * t) {
    return t->op == GGML_OP_CUSTOM && t->op_params[kNodeSlot] == kNodeMagic;
}

}  // namespace kvfold
