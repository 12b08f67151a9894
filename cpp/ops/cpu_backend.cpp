#include "ops/cpu_backend.h"

#include <algorithm>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops/kv_align.h"
#include "ops/node_args.h"
#include "traits.h"

namespace kvfold {

namespace {

// While a graph is planned its inputs hold nothing yet and the largest plan counts; when it runs, the one that it was given.
FoldArgs real_folds(const ggml_tensor * t) {
    FoldArgs     a      = fold_args(t);
    const auto * header = tensor_data<const int32_t>(t->src[fold_src::plan]);
    a.n_groups          = header[kPlanFolds];
    a.n_spans           = header[kPlanSpans];
    return a;
}

// The same operation when every cell is in use. Scratch is asked for by it: a work buffer that followed the depth of a context
// would be allocated anew again and again, and each time leave a hole of its former size in the heap.
template <typename Args>
Args at_full_depth(Args a) {
    a.n_kv = a.mem.n_cells;
    return a;
}

// Of an operation that is more than an attention.
template <typename Args>
Args attend_at_full_depth(Args a) {
    a.attend = at_full_depth(a.attend);
    return a;
}

// Queries are selected for in rounds, so that fewer cells can need more.
size_t select_scratch(const SelectArgs & a, int n_threads) {
    return std::max(kv_select_scratch(a, n_threads), kv_select_scratch(at_full_depth(a), n_threads));
}

class Traits : public ggml::cpu::tensor_traits {
  public:
    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = 64;  // alignment of the scratch
        switch (NodeOp(node_params(op).op)) {
        case NodeOp::attend:
            size += op->src[attend_src::selection] != nullptr
                        ? kv_attend_sparse_scratch(attend_at_full_depth(sparse_attend_args(op)), n_threads)
                        : kv_attend_scratch(at_full_depth(attend_args(op)), n_threads);
            return true;
        case NodeOp::select:
            size += select_scratch(select_args(op), n_threads);
            return true;
        case NodeOp::fold:
            size += kv_fold_scratch(fold_args(op), n_threads);
            return true;
        case NodeOp::score:
            size += kv_score_scratch(at_full_depth(score_args(op)), n_threads);
            return true;
        case NodeOp::observe:
        case NodeOp::observe_batched:
            size += kv_observe_scratch(observe_args(op), n_threads);
            return true;
        case NodeOp::receive:
            size += kv_receive_scratch(attend_at_full_depth(receive_args(op)), n_threads);
            return true;
        case NodeOp::lose:
            size += kv_lose_scratch(attend_at_full_depth(lose_args(op)), n_threads);
            return true;
        case NodeOp::sampled:
            size += kv_sampled_scratch(at_full_depth(sampled_args(op)), n_threads);
            return true;
        case NodeOp::store:
        case NodeOp::store_batched:
            size += op->src[store_src::queries] != nullptr ? kv_observe_scratch(observe_args(op), n_threads) : 0;
            return true;
        case NodeOp::align:
        case NodeOp::sample:
        case NodeOp::sample_batched:
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
            if (op->src[attend_src::selection] != nullptr) {
                kv_attend_sparse(sparse_attend_args(op), t);
            } else {
                kv_attend(attend_args(op), t);
            }
            return true;
        case NodeOp::select:
            kv_select(select_args(op), t);
            return true;
        case NodeOp::align:
            kv_align(sparse_attend_args(op), tensor_data<Alignment>(op), t);
            return true;
        case NodeOp::fold:
            kv_fold(real_folds(op), t);
            return true;
        case NodeOp::score:
            kv_score(score_args(op), t);
            return true;
        case NodeOp::observe:
        case NodeOp::observe_batched:
            kv_observe(observe_args(op), t);
            return true;
        case NodeOp::receive:
            kv_receive(receive_args(op), t);
            return true;
        case NodeOp::lose:
            kv_lose(lose_args(op), t);
            return true;
        case NodeOp::sample:
        case NodeOp::sample_batched:
            kv_sample(sample_args(op), t);
            return true;
        case NodeOp::sampled:
            kv_sampled(sampled_args(op), t);
            return true;
        case NodeOp::store:
        case NodeOp::store_batched: {
            const StoreArgs a = store_args(op);
            kv_store(a, t);
            if (op->src[store_src::queries] != nullptr) {
                kv_observe(observe_args(op), t);
            }
            if (t.ith == 0) {
                *epoch_of(a.mem) = tensor_data<const int32_t>(op->src[store_src::plan])[kPlanEpoch];
            }
            return true;
        }
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
