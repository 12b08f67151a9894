#include "ops/cuda_backend.h"

#include "common.cuh"
#include "ops/graph_node.h"
#include "ops/kv_ops_cuda.h"

namespace kvfold {

namespace {

// A micro-batch of up to so many rows is folded and stored by one launch.
constexpr int64_t kCommitRows = 16;

template <typename T>
T * data(const ggml_tensor * t) {
    return static_cast<T *>(t->data);
}

LayerMemory layer_memory(const NodeParams & p, const ggml_tensor * far_k, const ggml_tensor * far_v,
                         const ggml_tensor * side, const ggml_tensor * near) {
    LayerMemory m{};
    m.n_head_kv = p.n_head_kv;
    m.head_dim  = p.head_dim;
    m.group     = p.group;
    m.n_near    = int32_t(near->ne[1]);
    m.side      = data<uint8_t>(side);
    m.near_k    = data<uint16_t>(near);
    m.near_v    = m.near_k + near->ne[0] * near->ne[1];
    if (far_k != nullptr) {
        m.n_cells = int32_t(far_k->ne[1]);
        m.far_k   = data<Fp4Block>(far_k);
        m.far_v   = data<Fp4Block>(far_v);
    }
    return m;
}

CurrentRows current_rows(const ggml_tensor * k_cur, const ggml_tensor * v_cur) {
    CurrentRows c{};
    c.k        = data<const float>(k_cur);
    c.v        = data<const float>(v_cur);
    c.k_stride = int64_t(k_cur->nb[1] / sizeof(float));
    c.v_stride = int64_t(v_cur->nb[1] / sizeof(float));
    c.n_rows   = int32_t(k_cur->ne[1]);
    return c;
}

AttendArgs attend_args(const ggml_tensor * t) {
    const NodeParams    p     = node_params(t);
    const ggml_tensor * q     = t->src[attend_src::q];
    const ggml_tensor * mask  = t->src[attend_src::mask];
    const ggml_tensor * cells = t->src[attend_src::cell_src];
    const ggml_tensor * sinks = t->src[attend_src::sinks];
    AttendArgs          a{};
    a.mem            = layer_memory(p, t->src[attend_src::far_k], t->src[attend_src::far_v], t->src[attend_src::side],
                                    t->src[attend_src::near]);
    a.cur            = current_rows(t->src[attend_src::k_cur], t->src[attend_src::v_cur]);
    a.cell_src       = data<const int32_t>(cells);
    a.n_kv           = int32_t(cells->ne[0]);
    a.q              = data<const float>(q);
    a.q_stride_query = int64_t(q->nb[1] / sizeof(float));
    a.q_stride_head  = int64_t(q->nb[2] / sizeof(float));
    a.n_q            = int32_t(q->ne[1]);
    a.n_head         = int32_t(q->ne[2]);
    a.mask           = data<const uint16_t>(mask);
    a.mask_stride    = int64_t(mask->nb[1] / sizeof(uint16_t));
    a.sinks          = sinks != nullptr ? data<const float>(sinks) : nullptr;
    a.scale          = p.scale;
    a.softcap        = p.softcap;
    a.out            = data<float>(t);
    return a;
}

// `n_real` gets where the device finds the number of entries that are not padding.
FoldArgs fold_args(const ggml_tensor * t, const int32_t *& n_real) {
    const NodeParams    p    = node_params(t);
    const ggml_tensor * plan = t->src[fold_src::plan];
    FoldArgs            a{};
    a.mem      = layer_memory(p, t->src[fold_src::far_k], t->src[fold_src::far_v], t->src[fold_src::side],
                              t->src[fold_src::near]);
    a.cur      = current_rows(t->src[fold_src::k_cur], t->src[fold_src::v_cur]);
    a.plan     = data<const int32_t>(plan) + kPlanHeader;
    a.n_groups = int32_t((plan->ne[0] - kPlanHeader) / (1 + p.group));
    n_real     = data<const int32_t>(plan) + kPlanCount;
    return a;
}

StoreArgs store_args(const ggml_tensor * t, Epoch & epoch) {
    const ggml_tensor * side = t->src[store_src::side];
    const ggml_tensor * dst  = t->src[store_src::dst];
    StoreArgs           a{};
    a.mem = layer_memory(node_params(t), nullptr, nullptr, side, t->src[store_src::near]);
    a.cur = current_rows(t->src[store_src::k_cur], t->src[store_src::v_cur]);
    a.dst = data<const int32_t>(dst) + kPlanHeader;
    epoch = {data<const int32_t>(dst) + kPlanEpoch,
             reinterpret_cast<int32_t *>(data<uint8_t>(side) + side->ne[0] - sizeof(int32_t))};
    return a;
}

// A fold that leaves its work to the store node which comes after it. Outside of an attention graph there is no such node.
bool is_deferred(const ggml_tensor * fold) {
    return fold->src[fold_src::before] != nullptr && fold->src[fold_src::k_cur]->ne[1] <= kCommitRows;
}

bool packed(const ggml_tensor * t, ggml_type type) {
    return t != nullptr && t->type == type && t->nb[0] == ggml_type_size(type);
}

}  // namespace

bool cuda_compute(ggml_backend_cuda_context & ctx, ggml_tensor * node) {
    if (!is_kvfold_node(node)) {
        return false;
    }
    cudaStream_t stream = ctx.stream();
    switch (NodeOp(node_params(node).op)) {
    case NodeOp::attend: {
        const AttendArgs              a    = attend_args(node);
        const auto &                  info = ggml_cuda_info().devices[ctx.device];
        const CudaDevice              device{info.nsm, info.cc / 10};
        const size_t                  bytes = kv_attend_cuda_scratch(a, device);
        ggml_cuda_pool_alloc<uint8_t> scratch(ctx.pool());
        kv_attend_cuda(a, device, bytes > 0 ? scratch.alloc(bytes) : nullptr, stream);
        break;
    }
    case NodeOp::fold:
        if (!is_deferred(node)) {
            const int32_t * n_real;
            const FoldArgs  a = fold_args(node, n_real);
            kv_fold_cuda(a, n_real, stream);
        }
        break;
    case NodeOp::store: {
        Epoch               epoch;
        const StoreArgs     a    = store_args(node, epoch);
        const ggml_tensor * fold = node->src[store_src::before];
        if (fold != nullptr && is_kvfold_node(fold) && is_deferred(fold)) {
            const int32_t * n_real;
            const FoldArgs  f = fold_args(fold, n_real);
            kv_commit_cuda(f, n_real, a, epoch, stream);
        } else {
            kv_store_cuda(a, epoch, stream);
        }
        break;
    }
    default:
        return false;
    }
    CUDA_CHECK(cudaGetLastError());
    return true;
}

int cuda_supports(int device, const ggml_tensor * node) {
    if (!is_kvfold_node(node)) {
        return -1;
    }
    const auto & info = ggml_cuda_info().devices[device];
    if (!GGML_CUDA_CC_IS_NVIDIA(info.cc) || info.cc < 750) {
        return 0;
    }
    const NodeParams p = node_params(node);
    if (NodeOp(p.op) != NodeOp::attend) {
        return kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, p.n_head_kv) == nullptr;
    }
    const ggml_tensor * q = node->src[attend_src::q];
    return packed(q, GGML_TYPE_F32) && packed(node->src[attend_src::k_cur], GGML_TYPE_F32) &&
           packed(node->src[attend_src::v_cur], GGML_TYPE_F32) && packed(node->src[attend_src::mask], GGML_TYPE_F16) &&
           kv_ops_cuda_refusal(p.n_head_kv, p.head_dim, p.group, int32_t(q->ne[2])) == nullptr;
}

}  // namespace kvfold
