#include "cache/graph_nodes.h"

#include <stdexcept>

#include "cache/hooks.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "ops/graph_node.h"

namespace kvfold {

namespace {

// The plan of the running micro-batch as graph inputs, one object a cache and graph.
class PlanInput : public llm_graph_input_i {
  public:
    PlanInput(kvfold_cache * cache, ggml_context * ctx, int64_t n_kv, int64_t n_tokens)
        : cache_(cache), n_tokens_(n_tokens) {
        const int64_t capacity = NearPool::plan_capacity(cache->near.n_rows(), uint32_t(n_tokens));
        cell_src               = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_kv);
        fold  = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kPlanHeader + capacity * (1 + cache->config.group));
        store = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kPlanHeader + n_tokens);
        for (ggml_tensor * t : {cell_src, fold, store}) {
            ggml_set_input(t);
        }
        ggml_set_name(cell_src, "kvfold_cell_src");
        ggml_set_name(fold, "kvfold_fold_plan");
        ggml_set_name(store, "kvfold_store_dst");
    }

    void set_input(const llama_ubatch *) override {
        const UbatchPlan & plan = cache_->plan;
        write(cell_src, {}, plan.cell_src);
        write(fold, {plan.n_groups, plan.epoch, 0, 0}, plan.fold_entries);
        write(store, {int32_t(plan.store_dst.size()), plan.epoch, 0, 0}, plan.store_dst);
    }

    bool can_reuse(const llm_graph_params & params) override {
        return int64_t(params.ubatch.n_tokens) == n_tokens_ && int64_t(cache_->plan.cell_src.size()) == cell_src->ne[0];
    }

    const kvfold_cache * cache() const { return cache_; }

    ggml_tensor * cell_src;
    ggml_tensor * fold;
    ggml_tensor * store;

  private:
    static void write(ggml_tensor * t, const std::vector<int32_t> & header, const std::vector<int32_t> & data) {
        if (t->buffer == nullptr) {
            return;  // no node of this graph reads it
        }
        GGML_ASSERT((header.size() + data.size()) * sizeof(int32_t) <= ggml_nbytes(t));
        if (!header.empty()) {
            ggml_backend_tensor_set(t, header.data(), 0, header.size() * sizeof(int32_t));
        }
        if (!data.empty()) {
            ggml_backend_tensor_set(t, data.data(), header.size() * sizeof(int32_t), data.size() * sizeof(int32_t));
        }
    }

    kvfold_cache * cache_;
    int64_t        n_tokens_;
};

void make_custom(ggml_tensor * t, NodeOp op, const CacheLayer & layer, int32_t group, float scale, float softcap) {
    t->op = GGML_OP_CUSTOM;
    // Layout of ggml's custom-op parameters: function (left null), number of tasks, user data.
    const int32_t all_threads = GGML_N_TASKS_MAX;
    std::memset(t->op_params, 0, sizeof(t->op_params));
    std::memcpy(reinterpret_cast<char *>(t->op_params) + sizeof(void *), &all_threads, sizeof(all_threads));
    const NodeParams p = {kNodeMagic, int32_t(op), layer.n_head_kv, layer.head_dim, group, scale, softcap};
    std::memcpy(t->op_params + kNodeSlot, &p, sizeof(p));
}

ggml_tensor * attend_node(ggml_context * ctx, const CacheLayer & layer, int32_t group, ggml_tensor * q,
                          ggml_tensor * mask, ggml_tensor * cell_src, ggml_tensor * sinks, float scale, float softcap) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.head_dim, q->ne[2], q->ne[1]);
    make_custom(t, NodeOp::attend, layer, group, scale, softcap);
    t->src[attend_src::q]        = q;
    t->src[attend_src::far_k]    = layer.far_k;
    t->src[attend_src::far_v]    = layer.far_v;
    t->src[attend_src::side]     = layer.side;
    t->src[attend_src::near]     = layer.near;
    t->src[attend_src::k_cur]    = layer.k_cur;
    t->src[attend_src::v_cur]    = layer.v_cur;
    t->src[attend_src::mask]     = mask;
    t->src[attend_src::cell_src] = cell_src;
    t->src[attend_src::sinks]    = sinks;
    return t;
}

ggml_tensor * fold_node(ggml_context * ctx, const CacheLayer & layer, int32_t group, ggml_tensor * plan,
                        ggml_tensor * before) {
    ggml_tensor * t = ggml_view_tensor(ctx, layer.far_k);
    make_custom(t, NodeOp::fold, layer, group, 0.0f, 0.0f);
    t->src[fold_src::far_k]  = layer.far_k;
    t->src[fold_src::far_v]  = layer.far_v;
    t->src[fold_src::side]   = layer.side;
    t->src[fold_src::near]   = layer.near;
    t->src[fold_src::k_cur]  = layer.k_cur;
    t->src[fold_src::v_cur]  = layer.v_cur;
    t->src[fold_src::plan]   = plan;
    t->src[fold_src::before] = before;
    return t;
}

ggml_tensor * store_node(ggml_context * ctx, const CacheLayer & layer, int32_t group, ggml_tensor * dst,
                         ggml_tensor * before) {
    ggml_tensor * t = ggml_view_tensor(ctx, layer.near);
    make_custom(t, NodeOp::store, layer, group, 0.0f, 0.0f);
    t->src[store_src::near]   = layer.near;
    t->src[store_src::side]   = layer.side;
    t->src[store_src::k_cur]  = layer.k_cur;
    t->src[store_src::v_cur]  = layer.v_cur;
    t->src[store_src::dst]    = dst;
    t->src[store_src::before] = before;
    return t;
}

PlanInput & plan_input(const llm_graph_context & g, kvfold_cache * cache, int64_t n_kv, int64_t n_tokens) {
    for (const auto & input : g.res->inputs) {
        auto * mine = dynamic_cast<PlanInput *>(input.get());
        if (mine != nullptr && mine->cache() == cache) {
            return *mine;
        }
    }
    return *static_cast<PlanInput *>(g.res->add_input(std::make_unique<PlanInput>(cache, g.ctx0, n_kv, n_tokens)));
}

}  // namespace

bool run_fold(const CacheLayer & layer, int32_t group, const std::vector<int32_t> & entries, int32_t n_groups,
              int32_t epoch) {
    ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(layer.far_k->buffer);
    ggml_backend_dev_t         dev  = ggml_backend_buft_get_device(buft);
    ggml_backend_ptr backend(dev != nullptr ? ggml_backend_dev_init(dev, nullptr)
                                            : ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!backend) {
        return false;
    }
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead_custom(8, false), nullptr, true}));

    CacheLayer    rows = layer;
    const int64_t gqa  = int64_t(layer.n_head_kv) * layer.head_dim;
    rows.k_cur         = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, gqa, 1);
    rows.v_cur         = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, gqa, 1);
    ggml_tensor * plan = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, kPlanHeader + int64_t(entries.size()));
    ggml_tensor * node = fold_node(ctx.get(), rows, group, plan, nullptr);
    ggml_cgraph * gf   = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_build_forward_expand(gf, node);

    // The views of cache tensors are in place already; this allocates the three inputs.
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        return false;
    }
    const int32_t header[kPlanHeader] = {n_groups, epoch, 0, 0};
    ggml_backend_tensor_set(plan, header, 0, sizeof(header));
    ggml_backend_tensor_set(plan, entries.data(), sizeof(header), entries.size() * sizeof(int32_t));
    return ggml_backend_graph_compute(backend.get(), gf) == GGML_STATUS_SUCCESS;
}

ggml_tensor * probe_attend(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    const int64_t gqa = int64_t(n_head_kv) * head_dim;
    CacheLayer    layer{};
    layer.n_head_kv = n_head_kv;
    layer.head_dim  = head_dim;
    layer.far_k     = ggml_new_tensor_2d(ctx, GGML_TYPE_NVFP4, gqa, 256);
    layer.far_v     = ggml_new_tensor_2d(ctx, GGML_TYPE_NVFP4, gqa, 256);
    layer.side  = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, int64_t(side_layout(n_head_kv, head_dim, 256 / group).bytes));
    layer.near  = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, gqa, 1, 2);
    layer.k_cur = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, gqa, 1);
    layer.v_cur = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, gqa, 1);
    return attend_node(ctx, layer, group, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim, 1, n_head),
                       ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 256, 1), ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 256),
                       nullptr, 1.0f, 0.0f);
}

}  // namespace kvfold

ggml_tensor * kvfold_build_attn(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_b,
                                ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale,
                                int il) {
    size_t         index = 0;
    kvfold_cache * cache = kvfold_cache::find(k->view_src != nullptr ? k->view_src : k, index);
    if (cache == nullptr) {
        return nullptr;
    }
    // Models that need these are refused before the context is made; a graph with them is an error of ours, not the user's.
    if (kq_b != nullptr || v_mla != nullptr || kq_mask == nullptr || kq_mask->type != GGML_TYPE_F16) {
        throw std::runtime_error("kvfold: this model's attention cannot use an FP4 cache");
    }

    const kvfold::CacheLayer & layer   = cache->layers[index];
    const int32_t              group   = cache->config.group;
    const float                softcap = g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f;
    auto &                     input   = kvfold::plan_input(g, cache, kq_mask->ne[0], q->ne[1]);

    ggml_tensor * attend =
        kvfold::attend_node(g.ctx0, layer, group, q, kq_mask, input.cell_src, sinks, kq_scale, softcap);
    ggml_format_name(attend, "kvfold_attend-%d", il);
    g.res->add_fused_node({LLM_FUSED_OP_FLASH_ATTN, attend, il});
    if (ggml_backend_buffer_is_host(layer.far_k->buffer)) {
        ggml_backend_sched_set_tensor_backend(g.sched, attend, g.backend_cpu);  // never copy the cache to the attention
    }
    ggml_build_forward_expand(g.gf, attend);

    if (il == layer.last_il) {
        ggml_tensor * fold  = kvfold::fold_node(g.ctx0, layer, group, input.fold, attend);
        ggml_tensor * store = kvfold::store_node(g.ctx0, layer, group, input.store, fold);
        ggml_format_name(fold, "kvfold_fold-%d", il);
        ggml_format_name(store, "kvfold_store-%d", il);
        ggml_build_forward_expand(g.gf, store);
    }

    ggml_tensor * out = ggml_reshape_2d(g.ctx0, attend, attend->ne[0] * attend->ne[1], attend->ne[2]);
    ggml_build_forward_expand(g.gf, out);
    return out;
}
