#include "ops/cpu_backend.h"

#include <cstring>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops/graph_node.h"
#include "ops/kv_ops.h"
#include "traits.h"

namespace kvfold {

namespace {

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
    if (far_k != nullptr) {
        m.n_cells = int32_t(far_k->ne[1]);
        m.far_k   = data<Fp4Block>(far_k);
        m.far_v   = data<Fp4Block>(far_v);
    }
    m.side   = data<uint8_t>(side);
    m.near_k = data<uint16_t>(near);
    m.near_v = m.near_k + near->ne[0] * near->ne[1];
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
    const NodeParams    p    = node_params(t);
    const ggml_tensor * q    = t->src[attend_src::q];
    const ggml_tensor * mask = t->src[attend_src::mask];
    AttendArgs          a{};
    a.mem            = layer_memory(p, t->src[attend_src::far_k], t->src[attend_src::far_v], t->src[attend_src::side],
                                    t->src[attend_src::near]);
    a.cur            = current_rows(t->src[attend_src::k_cur], t->src[attend_src::v_cur]);
    a.cell_src       = data<const int32_t>(t->src[attend_src::cell_src]);
    a.n_kv           = int32_t(t->src[attend_src::cell_src]->ne[0]);
    a.q              = data<const float>(q);
    a.q_stride_query = int64_t(q->nb[1] / sizeof(float));
    a.q_stride_head  = int64_t(q->nb[2] / sizeof(float));
    a.n_q            = int32_t(q->ne[1]);
    a.n_head         = int32_t(q->ne[2]);
    a.mask           = data<const uint16_t>(mask);
    a.mask_stride    = int64_t(mask->nb[1] / sizeof(uint16_t));
    a.sinks          = t->src[attend_src::sinks] != nullptr ? data<const float>(t->src[attend_src::sinks]) : nullptr;
    a.scale          = p.scale;
    a.softcap        = p.softcap;
    a.out            = data<float>(t);
    return a;
}

FoldArgs fold_args(const ggml_tensor * t, bool with_data) {
    const NodeParams p = node_params(t);
    FoldArgs         a{};
    a.mem = layer_memory(p, t->src[fold_src::far_k], t->src[fold_src::far_v], t->src[fold_src::side],
                         t->src[fold_src::near]);
    a.cur = current_rows(t->src[fold_src::k_cur], t->src[fold_src::v_cur]);
    if (with_data) {
        const auto * plan = data<const int32_t>(t->src[fold_src::plan]);
        a.n_groups        = plan[kPlanCount];
        a.plan            = plan + kPlanHeader;
    } else {
        // While a graph is planned its inputs hold nothing yet: assume the largest plan that fits.
        a.n_groups = int32_t((t->src[fold_src::plan]->ne[0] - kPlanHeader) / (1 + p.group));
    }
    return a;
}

StoreArgs store_args(const ggml_tensor * t) {
    StoreArgs a{};
    a.mem = layer_memory(node_params(t), nullptr, nullptr, t->src[store_src::side], t->src[store_src::near]);
    a.cur = current_rows(t->src[store_src::k_cur], t->src[store_src::v_cur]);
    a.dst = data<const int32_t>(t->src[store_src::dst]) + kPlanHeader;
    return a;
}

// The side memory of a layer starts with the summaries; the epoch is its last word.
void write_epoch(const ggml_tensor * side, int32_t epoch) {
    std::memcpy(data<char>(side) + side->ne[0] - int64_t(sizeof(epoch)), &epoch, sizeof(epoch));
}

class Traits : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = 64;  // alignment of the scratch
        switch (NodeOp(node_params(op).op)) {
        case NodeOp::attend:
            size += kv_attend_scratch(attend_args(op), n_threads);
            return true;
        case NodeOp::fold:
            size += kv_fold_scratch(fold_args(op, false), n_threads);
            return true;
        case NodeOp::store:
            return true;
        }
        return false;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        Threads t{};
        t.ith           = params->ith;
        t.nth           = params->nth;
        t.barrier       = [](void * pool) { ggml_barrier(static_cast<ggml_threadpool *>(pool)); };
        t.barrier_arg   = params->threadpool;
        const auto base = (reinterpret_cast<uintptr_t>(params->wdata) + 63) / 64 * 64;
        t.scratch       = reinterpret_cast<void *>(base);
        t.scratch_bytes = params->wsize - (base - reinterpret_cast<uintptr_t>(params->wdata));

        switch (NodeOp(node_params(op).op)) {
        case NodeOp::attend:
            kv_attend(attend_args(op), t);
            return true;
        case NodeOp::fold:
            kv_fold(fold_args(op, true), t);
            return true;
        case NodeOp::store:
            kv_store(store_args(op), t);
            if (t.ith == 0) {
                write_epoch(op->src[store_src::side], data<const int32_t>(op->src[store_src::dst])[kPlanEpoch]);
            }
            return true;
        }
        return false;
    }
};

class BufferType : public ggml::cpu::extra_buffer_type {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *) override { return false; }  // never a place for weights

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        static Traits traits;
        return is_kvfold_node(op) ? &traits : nullptr;
    }
};

const char * name(ggml_backend_buffer_type_t) { return "CPU_KVFOLD"; }

}  // namespace

ggml_backend_buffer_type_t cpu_buffer_type() {
    static BufferType               context;
    static ggml_backend_buffer_type buft = [] {
        // Allocation goes to plain host memory, should anybody ask.
        ggml_backend_buffer_type b = *ggml_backend_cpu_buffer_type();
        b.iface.get_name           = name;
        b.context                  = static_cast<ggml::cpu::extra_buffer_type *>(&context);
        return b;
    }();
    return &buft;
}

}  // namespace kvfold
