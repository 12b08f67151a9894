#include "cache/graph_nodes.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cache/hooks.h"
#include "cache/lookup.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"
#include "ops/graph_node.h"
#include "ops/kv_score.h"
#include "ops/kv_select.h"

namespace kvfold {

namespace {

// The plan of the running micro-batch as graph inputs, one object a cache and graph.
class PlanInput : public llm_graph_input_i {
  public:
    PlanInput(kvfold_cache * cache, ggml_context * ctx, int64_t n_kv, int64_t n_tokens)
        : n_kv(n_kv), layout_(plan_layout(plan_words(n_kv), cache->near.n_rows(), n_tokens, cache->config.group,
                                          cache->spans.size())),
          cache_(cache), n_tokens_(n_tokens), sparse_(cache->plan.sparse), needs_mask_(cache->plan.needs_mask),
          fused_rotation_(cache->fused_rotation), second_pass_(cache->second_pass) {
        GGML_ASSERT(layout_.exact % 2 == 0);  // plan_words()
        words = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, layout_.size);
        ggml_set_input(words);
        ggml_set_name(words, "kvfold_plan");
    }

    void set_input(const llama_ubatch *) override {
        if (words->buffer == nullptr) {
            return;  // no node of this graph reads it
        }
        const UbatchPlan & plan = cache_->plan;
        GGML_ASSERT(commits.empty());  // a graph has all layers of its cache
        GGML_ASSERT(int64_t(plan.far_bits.size()) == layout_.ready - layout_.far &&
                    int64_t(plan.ready.size()) == layout_.exact - layout_.ready &&
                    int64_t(plan.exact.size()) <= layout_.exact_capacity && plan.n_groups <= layout_.fold_capacity &&
                    int64_t(plan.spans.size()) <= layout_.span_capacity && int64_t(plan.store_dst.size()) == n_tokens_);
        values_.resize(size_t(layout_.size));
        values_[kPlanFolds] = plan.n_groups;
        values_[kPlanEpoch] = plan.epoch;
        values_[kPlanSpans] = int32_t(plan.spans.size());
        std::memcpy(&values_[size_t(layout_.far)], plan.far_bits.data(), plan.far_bits.size() * sizeof(uint32_t));
        std::copy(plan.ready.begin(), plan.ready.end(), values_.begin() + layout_.ready);
        std::memcpy(&values_[size_t(layout_.exact)], plan.exact.data(), plan.exact.size() * sizeof(ExactCell));
        for (int64_t i = int64_t(plan.exact.size()); i < layout_.exact_capacity; ++i) {
            values_[size_t(layout_.exact + 2 * i)]     = 0;
            values_[size_t(layout_.exact + 2 * i + 1)] = kSrcHidden;
        }
        std::copy(plan.fold_entries.begin(), plan.fold_entries.end(), values_.begin() + layout_.fold);
        std::copy(plan.spans.begin(), plan.spans.end(), values_.begin() + layout_.spans);
        std::copy(plan.store_dst.begin(), plan.store_dst.end(), values_.begin() + layout_.store);
        ggml_backend_tensor_set(words, values_.data(), 0, values_.size() * sizeof(int32_t));
    }

    bool can_reuse(const llm_graph_params & params) override {
        const UbatchPlan & plan = cache_->plan;
        return int64_t(params.ubatch.n_tokens) == n_tokens_ &&
               int64_t(plan.far_bits.size()) == layout_.ready - layout_.far && plan.sparse == sparse_ &&
               plan.needs_mask == needs_mask_ && cache_->fused_rotation == fused_rotation_ &&
               cache_->second_pass == second_pass_;
    }

    const kvfold_cache * cache() const { return cache_; }

    const int64_t              n_kv;
    ggml_tensor *              words;    // PlanLayout
    std::vector<ggml_tensor *> commits;  // store and observe nodes that the graph will get with its last layer

    // What layers of this graph have chosen so far; null: nothing.
    ggml_tensor * chosen = nullptr;
    ggml_tensor * pool   = nullptr;

  private:
    const PlanLayout     layout_;
    kvfold_cache * const cache_;
    const int64_t        n_tokens_;
    const bool           sparse_;
    const bool           needs_mask_;
    const bool           fused_rotation_;
    const uint32_t       second_pass_;
    std::vector<int32_t> values_;
};

// What is the same in all nodes of a layer.
struct NodeSpec {
    const CacheLayer & layer;
    int32_t            group;
    Rotation           rot;
    float              scale      = 0.0f;
    float              softcap    = 0.0f;
    LookupBudget       budget     = {};  // of a select node, as the next
    int32_t            most_spans = 0;
};

// Shares are rounded down: the number of groups is rounded up later.
uint16_t share_units(float share) { return uint16_t(double(share) * double(kShareUnits)); }

void make_custom(ggml_tensor * t, NodeOp op, const NodeSpec & spec, std::initializer_list<ggml_tensor *> sources) {
    const CacheLayer & layer = spec.layer;
    t->op                    = GGML_OP_CUSTOM;
    // Layout of ggml's custom-op parameters: function (left null), number of tasks, user data.
    const int32_t all_threads = GGML_N_TASKS_MAX;
    std::memset(t->op_params, 0, sizeof(t->op_params));
    std::memcpy(reinterpret_cast<char *>(t->op_params) + sizeof(void *), &all_threads, sizeof(all_threads));
    const NodeParams p = {kNodeMagic,
                          int8_t(op),
                          int8_t(layer.scale_group),
                          int8_t(spec.group),
                          int8_t(layer.n_spans > 0),
                          int16_t(layer.n_head_kv),
                          int16_t(layer.head_dim),
                          int32_t(layer.far_k->ne[1]),
                          int32_t(layer.near->ne[1]),
                          int16_t(spec.rot.k),
                          int16_t(spec.rot.v),
                          spec.scale,
                          spec.softcap,
                          share_units(spec.budget.lookup_min),
                          share_units(spec.budget.lookup_max),
                          share_units(spec.budget.threshold),
                          uint16_t(spec.budget.min_tokens),
                          uint16_t(spec.budget.max_tokens),
                          uint16_t(spec.most_spans)};
    std::memcpy(t->op_params + kNodeSlot, &p, sizeof(p));
    std::copy(sources.begin(), sources.end(), t->src);
}

ggml_tensor * attend_node(ggml_context * ctx, const NodeSpec & spec, ggml_tensor * q, ggml_tensor * plan,
                          ggml_tensor * mask, ggml_tensor * sinks, ggml_tensor * selection) {
    const CacheLayer & layer = spec.layer;
    ggml_tensor *      t     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.head_dim, q->ne[2], q->ne[1]);
    make_custom(t, NodeOp::attend, spec,
                {q, layer.far_k, layer.far_v, layer.tier, layer.k_cur, layer.v_cur, plan, mask, sinks, selection});
    return t;
}

// With `unread` there is room for SelectArgs::unread.
ggml_tensor * select_node(ggml_context * ctx, const NodeSpec & spec, ggml_tensor * q, ggml_tensor * plan,
                          ggml_tensor * mask, ggml_tensor * pool, int32_t capacity, bool unread) {
    const int64_t n_q = q->ne[1], heads = spec.layer.n_head_kv, stride = group_list_stride(capacity);
    const int64_t behind = unread ? (n_q * q->ne[2] + stride * heads - 1) / (stride * heads) : 0;
    ggml_tensor * t      = ggml_new_tensor_3d(ctx, GGML_TYPE_I32, stride, heads, n_q + behind);
    make_custom(t, NodeOp::select, spec, {q, spec.layer.tier, plan, mask, pool});
    return t;
}

// A node that looks at an attention from beside, and has its sources: what it leaves out (align), what it gives (receive).
ggml_tensor * beside_attend(ggml_context * ctx, NodeOp op, const NodeSpec & spec, const ggml_tensor * attend,
                            ggml_tensor * result) {
    ggml_tensor * t = ggml_view_tensor(ctx, result);
    make_custom(t, op, spec, {});
    std::copy(std::begin(attend->src), std::end(attend->src), t->src);
    return t;
}

ggml_tensor * fold_node(ggml_context * ctx, const NodeSpec & spec, ggml_tensor * plan, ggml_tensor * before) {
    const CacheLayer & layer = spec.layer;
    ggml_tensor *      t     = ggml_view_tensor(ctx, layer.far_k);
    make_custom(t, NodeOp::fold, spec, {layer.far_k, layer.far_v, layer.tier, layer.k_cur, layer.v_cur, plan, before});
    return t;
}

// With `q` the queries are observed too.
ggml_tensor * store_node(ggml_context * ctx, const NodeSpec & spec, bool batched, ggml_tensor * plan,
                         ggml_tensor * before, ggml_tensor * q = nullptr) {
    const CacheLayer & layer = spec.layer;
    ggml_tensor *      t     = ggml_view_tensor(ctx, layer.tier);
    make_custom(t, batched ? NodeOp::store_batched : NodeOp::store, spec,
                {layer.tier, layer.k_cur, layer.v_cur, plan, before, q, q != nullptr ? layer.queries : nullptr});
    return t;
}

// The result of a score node, f32 [n, rows]. Sums over layers are made in place, in `room`: f32, of as many bytes as a backend wants for
// the node of any of the layers. Without it, a node to ask for that.
ggml_tensor * score_result(ggml_context * ctx, int64_t n, int64_t rows, ggml_tensor * room) {
    return room != nullptr ? ggml_view_2d(ctx, room, n, rows, size_t(n) * sizeof(float), 0)
                           : ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n, rows);
}

ggml_tensor * score_node(ggml_context * ctx, const NodeSpec & spec, ggml_tensor * cells, ggml_tensor * room,
                         ggml_tensor * before) {
    const CacheLayer & layer = spec.layer;
    ggml_tensor *      t     = score_result(ctx, layer.far_k->ne[1], kScoreKinds, room);
    make_custom(t, NodeOp::score, spec, {layer.far_k, layer.far_v, layer.tier, cells, layer.queries, before});
    return t;
}

// A sampled score, as a node's budget.
LookupBudget sample_spec(SampledScore score) {
    LookupBudget budget{};
    budget.min_tokens = int32_t(score);
    return budget;
}

ggml_tensor * sampled_node(ggml_context * ctx, const NodeSpec & spec, ggml_tensor * cells, ggml_tensor * ages,
                           ggml_tensor * samples, ggml_tensor * room, ggml_tensor * before) {
    const CacheLayer & layer = spec.layer;
    ggml_tensor *      t     = score_result(ctx, ages->ne[0], 1, room);
    make_custom(t, NodeOp::sampled, spec, {layer.far_k, layer.far_v, layer.tier, cells, ages, samples, before});
    return t;
}

ggml_tensor * sample_node(ggml_context * ctx, const NodeSpec & spec, bool batched, ggml_tensor * q,
                          ggml_tensor * samples) {
    ggml_tensor * t = ggml_view_tensor(ctx, samples);
    make_custom(t, batched ? NodeOp::sample_batched : NodeOp::sample, spec, {q, samples});
    return t;
}

ggml_tensor * observe_node(ggml_context * ctx, const NodeSpec & spec, bool batched, ggml_tensor * q) {
    ggml_tensor * t = ggml_view_tensor(ctx, spec.layer.queries);
    make_custom(t, batched ? NodeOp::observe_batched : NodeOp::observe, spec, {q, spec.layer.queries});
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

namespace {

// Places a node where the cache is: it must never be copied to another backend.
void keep_with_cache(const llm_graph_context & g, const CacheLayer & layer, ggml_tensor * node) {
    if (ggml_backend_buffer_is_host(layer.far_k->buffer)) {
        ggml_backend_sched_set_tensor_backend(g.sched, node, g.backend_cpu);
    }
}

// Adds a node, and what it needs, not at the end of the graph but as early as its sources are there.
void expand_early(ggml_cgraph * graph, ggml_tensor * node) {
    const int before = ggml_graph_n_nodes(graph);
    ggml_build_forward_expand(graph, node);
    ggml_tensor ** nodes = ggml_graph_nodes(graph);
    const int      after = ggml_graph_n_nodes(graph);
    int            place = 0;
    for (int i = before; i < after; ++i) {
        for (const ggml_tensor * source : nodes[i]->src) {
            // a source among what was added is where it was added
            const int at = int(std::find(nodes, nodes + before, source) - nodes);
            place        = at < before ? std::max(place, at + 1) : place;
        }
    }
    std::rotate(nodes + place, nodes + before, nodes + after);
}

// The lists that a layer's attention reads by, or null: everything. Adds what nodes it takes.
ggml_tensor * select_groups(const llm_graph_context & g, const kvfold_cache & cache, NodeSpec spec, ggml_tensor * q,
                            ggml_tensor * mask, PlanInput & input, int il) {
    const kvfold_config & config = cache.config;
    const auto select = [&](const LookupBudget & budget, ggml_tensor * pool, int32_t capacity, const char * what) {
        spec.budget          = budget;
        spec.most_spans      = spec.layer.mode == LayerMode::full ? cache.most_spans(input.n_kv) : 0;
        const bool    unread = budget.lookup_max > 0.0f;
        ggml_tensor * node   = select_node(g.ctx0, spec, q, input.words, mask, pool, capacity, unread);
        ggml_format_name(node, "kvfold_%s-%d", what, il);
        keep_with_cache(g, spec.layer, node);
        // A device has other work meanwhile (cuda_backend.cu).
        if (ggml_backend_buffer_is_host(spec.layer.far_k->buffer)) {
            ggml_build_forward_expand(g.gf, node);
        } else {
            expand_early(g.gf, node);
        }
        return node;
    };
    const float        most   = spec.layer.lookup_max;
    const LookupBudget budget = {std::min(config.lookup_min, most), most, config.threshold, config.min_tokens,
                                 config.max_tokens};
    switch (spec.layer.mode) {
    case LayerMode::dense:
        return nullptr;
    case LayerMode::full:
        if (spec.layer.makes_pool) {
            // A node of its own, with a fixed number of tokens, that is not counted.
            input.pool = select({0.0f, 0.0f, 0.0f, kPoolTokens, 0}, nullptr, cache.pool_capacity, "pool");
        }
        return input.chosen = select(budget, nullptr, cache.list_capacity, "select");
    case LayerMode::reindex:
        return input.chosen = select(budget, input.pool, cache.list_capacity, "select");
    case LayerMode::reuse:
        return input.chosen;
    case LayerMode::window:
        return select({}, nullptr, cache.list_capacity, "select");
    }
    return nullptr;
}

}  // namespace

namespace {

ggml_backend_dev_t device_of(const CacheLayer & layer) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.far_k->buffer));
}

// A backend of one's own for memory that is there already; null if there is none.
ggml_backend_ptr backend_of(const CacheLayer & layer) {
    ggml_backend_dev_t dev = device_of(layer);
    ggml_backend_ptr   backend(dev != nullptr ? ggml_backend_dev_init(dev, nullptr)
                                              : ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (backend) {
        // ggml takes 4 whatever the machine has; more threads than cores wait for each other. Only a CPU has this function.
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
        if (void * set = ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads")) {
            const int n_threads = int(std::clamp(std::thread::hardware_concurrency(), 1u, 4u));
            reinterpret_cast<ggml_backend_set_n_threads_t>(set)(backend.get(), n_threads);
        }
    }
    return backend;
}

// What scores are made from beside the cache: 4-byte words.
struct ScoreInput {
    const void * data;
    size_t       n;
};

// Makes the node that adds the scores of a layer to those of `before` (null for the first one); `room` is score_result()'s.
using MakeScoreNode = std::function<ggml_tensor *(ggml_context * ctx, const CacheLayer & layer, ggml_tensor ** inputs,
                                                  ggml_tensor * room, ggml_tensor * before)>;

// Scores from layers of one device, added up; empty on failure.
std::vector<float> score_on_device(const std::vector<const CacheLayer *> & layers,
                                   const std::vector<ScoreInput> & inputs, const MakeScoreNode & make_node) {
    const ggml_backend_ptr backend = backend_of(*layers[0]);
    if (!backend) {
        return {};
    }
    const size_t n_tensors = 10 * layers.size() + 8;  // sources of all nodes are counted too
    const auto   new_ctx   = [&] {
        return ggml_context_ptr(ggml_init(
            {ggml_tensor_overhead() * n_tensors + ggml_graph_overhead_custom(n_tensors, false), nullptr, true}));
    };
    const ggml_context_ptr     questions = new_ctx(), ctx = new_ctx();
    std::vector<ggml_tensor *> tensors;
    for (const ScoreInput & input : inputs) {
        tensors.push_back(ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, int64_t(input.n)));
    }
    size_t wanted = 0;
    for (const CacheLayer * layer : layers) {
        const ggml_tensor * node = make_node(questions.get(), *layer, tensors.data(), nullptr, nullptr);
        wanted = std::max(wanted,
                          ggml_backend_buft_get_alloc_size(ggml_backend_get_default_buffer_type(backend.get()), node));
    }
    ggml_tensor * room =
        ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, int64_t((wanted + sizeof(float) - 1) / sizeof(float)));
    ggml_cgraph * gf  = ggml_new_graph_custom(ctx.get(), n_tensors, false);
    ggml_tensor * sum = nullptr;
    for (const CacheLayer * layer : layers) {
        sum = make_node(ctx.get(), *layer, tensors.data(), room, sum);
        ggml_build_forward_expand(gf, sum);
    }
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        return {};
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
        ggml_backend_tensor_set(tensors[i], inputs[i].data, 0, ggml_nbytes(tensors[i]));
    }
    if (ggml_backend_graph_compute(backend.get(), gf) != GGML_STATUS_SUCCESS) {
        return {};
    }
    std::vector<float> values(size_t(ggml_nelements(sum)));
    ggml_backend_tensor_get(sum, values.data(), 0, values.size() * sizeof(float));
    return values;
}

// The same for layers wherever they are.
std::vector<float> score_layers(const std::vector<CacheLayer> & layers, const std::vector<ScoreInput> & inputs,
                                const MakeScoreNode & make_node) {
    std::vector<std::vector<const CacheLayer *>> devices;
    for (const CacheLayer & layer : layers) {
        const auto same = std::find_if(devices.begin(), devices.end(),
                                       [&](const auto & d) { return device_of(*d[0]) == device_of(layer); });
        if (same != devices.end()) {
            same->push_back(&layer);
        } else {
            devices.push_back({&layer});
        }
    }
    std::vector<float> sum;
    for (const auto & device : devices) {
        const std::vector<float> scores = score_on_device(device, inputs, make_node);
        if (scores.empty()) {
            return {};
        }
        sum.resize(scores.size(), 0.0f);
        std::transform(sum.begin(), sum.end(), scores.begin(), sum.begin(), std::plus<float>());
    }
    return sum;
}

size_t index_of(SampledScore score) { return score == kSampledKinds[0].score ? 0 : 1; }

}  // namespace

std::vector<float> run_score(const std::vector<CacheLayer> & layers, int32_t group,
                             const std::vector<uint32_t> & far_bits, bool sizes) {
    return score_layers(layers, {{far_bits.data(), far_bits.size()}},
                        [&](ggml_context * ctx, const CacheLayer & layer, ggml_tensor ** inputs, ggml_tensor * room,
                            ggml_tensor * before) {
                            NodeSpec spec{layer, group, {}, layer.scale, layer.softcap};
                            spec.budget.min_tokens = sizes ? 1 : 0;  // ScoreArgs::sizes
                            return score_node(ctx, spec, inputs[0], room, before);
                        });
}

std::vector<float> run_sampled(const std::vector<CacheLayer> & layers, int32_t group, SampledScore score,
                               const std::vector<uint32_t> & far_bits, const std::vector<int32_t> & ages) {
    return score_layers(layers, {{far_bits.data(), far_bits.size()}, {ages.data(), ages.size()}},
                        [&](ggml_context * ctx, const CacheLayer & layer, ggml_tensor ** inputs, ggml_tensor * room,
                            ggml_tensor * before) {
                            const NodeSpec spec{layer, group, {}, layer.scale, layer.softcap, sample_spec(score)};
                            return sampled_node(ctx, spec, inputs[0], inputs[1], layer.samples[index_of(score)], room,
                                                before);
                        });
}

bool run_fold(const CacheLayer & layer, int32_t group, const std::vector<int32_t> & entries, int32_t n_groups,
              int32_t epoch) {
    const ggml_backend_ptr backend = backend_of(layer);
    if (!backend) {
        return false;
    }
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead() * 8 + ggml_graph_overhead_custom(8, false), nullptr, true}));

    // The node derives the plan's capacity from the number of near and current rows.
    CacheLayer    rows  = layer;
    const int64_t gqa   = int64_t(layer.n_head_kv) * layer.head_dim;
    const int64_t n_cur = std::max<int64_t>(1, n_groups - layer.near->ne[1]);
    rows.k_cur          = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, gqa, n_cur);
    rows.v_cur          = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, gqa, n_cur);

    const PlanLayout layout = plan_layout(0, layer.near->ne[1], n_cur, group, layer.n_spans);
    ggml_tensor *    plan   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, layout.size);
    ggml_tensor *    node   = fold_node(ctx.get(), {rows, group, {}}, plan, nullptr);
    ggml_cgraph *    gf     = ggml_new_graph_custom(ctx.get(), 8, false);
    ggml_build_forward_expand(gf, node);

    // The views of cache tensors are in place already; this allocates the three inputs.
    ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
    if (!buffer) {
        return false;
    }
    const int32_t header[kPlanHeader] = {n_groups, epoch, 0, 0};
    ggml_backend_tensor_set(plan, header, 0, sizeof(header));
    ggml_backend_tensor_set(plan, entries.data(), size_t(layout.fold) * sizeof(int32_t),
                            entries.size() * sizeof(int32_t));
    return ggml_backend_graph_compute(backend.get(), gf) == GGML_STATUS_SUCCESS;
}

namespace {

constexpr int64_t kProbeCells = 256, kProbeNear = 1;

// A layer with placeholders.
CacheLayer probe_layer(ggml_context * ctx, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    constexpr int64_t n_cells = kProbeCells, n_near = kProbeNear;
    const int64_t     gqa  = int64_t(n_head_kv) * head_dim;
    const TierLayout  tier = tier_layout(n_head_kv, head_dim, int32_t(n_cells / group), 0, int32_t(n_near));
    CacheLayer        layer{};
    layer.n_head_kv = n_head_kv;
    layer.head_dim  = head_dim;
    layer.far_k     = ggml_new_tensor_2d(ctx, GGML_TYPE_NVFP4, gqa, n_cells);
    layer.far_v     = ggml_new_tensor_2d(ctx, GGML_TYPE_NVFP4, gqa, n_cells);
    layer.tier      = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, int64_t(tier.bytes));
    layer.near      = ggml_new_tensor_3d(ctx, GGML_TYPE_F16, gqa, n_near, 2);
    layer.k_cur     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, gqa, 1);
    layer.v_cur     = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, gqa, 1);
    return layer;
}

ggml_tensor * probe_q(ggml_context * ctx, int32_t n_head, int32_t head_dim) {
    return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, head_dim, 1, n_head);
}

ggml_tensor * probe_plan(ggml_context * ctx, int32_t group) {
    return ggml_new_tensor_1d(ctx, GGML_TYPE_I32, plan_layout(plan_words(kProbeCells), kProbeNear, 1, group, 0).size);
}

// f32 [query_stats_size()]
ggml_tensor * probe_queries(ggml_context * ctx, int32_t n_head, int32_t head_dim) {
    return ggml_new_tensor_1d(ctx, GGML_TYPE_F32, query_stats_size(n_head, head_dim));
}

ggml_tensor * probe_mask(ggml_context * ctx) { return ggml_new_tensor_2d(ctx, GGML_TYPE_F16, kProbeCells, 1); }

}  // namespace

ggml_tensor * probe_attend(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    const CacheLayer layer = probe_layer(ctx, n_head_kv, head_dim, group);
    return attend_node(ctx, {layer, group, {}, 1.0f}, probe_q(ctx, n_head, head_dim), probe_plan(ctx, group),
                       probe_mask(ctx), nullptr, nullptr);
}

ggml_tensor * probe_select(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group,
                           bool pool) {
    const CacheLayer layer    = probe_layer(ctx, n_head_kv, head_dim, group);
    const int32_t    capacity = int32_t(kProbeCells / group);
    ggml_tensor *    groups =
        pool ? ggml_new_tensor_3d(ctx, GGML_TYPE_I32, group_list_stride(capacity), n_head_kv, 1) : nullptr;
    return select_node(ctx, {layer, group, {}, 1.0f}, probe_q(ctx, n_head, head_dim), probe_plan(ctx, group),
                       probe_mask(ctx), groups, capacity, false);
}

ggml_tensor * probe_score(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    CacheLayer layer    = probe_layer(ctx, n_head_kv, head_dim, group);
    layer.queries       = probe_queries(ctx, n_head, head_dim);
    ggml_tensor * cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kProbeCells / 32);
    return score_node(ctx, {layer, group, {}, 1.0f}, cells, nullptr, nullptr);
}

// A layer with samples of one kind.
namespace {

CacheLayer probe_sampled_layer(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    CacheLayer layer = probe_layer(ctx, n_head_kv, head_dim, group);
    layer.samples[0] = new_samples(ctx, n_head, head_dim, kSampledKinds[0].score);
    return layer;
}

}  // namespace

ggml_tensor * probe_sample(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    const CacheLayer layer = probe_sampled_layer(ctx, n_head, n_head_kv, head_dim, group);
    return sample_node(ctx, {layer, group, {}, 0.0f, 0.0f, sample_spec(kSampledKinds[0].score)}, false,
                       probe_q(ctx, n_head, head_dim), layer.samples[0]);
}

ggml_tensor * probe_sampled(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    const CacheLayer layer = probe_sampled_layer(ctx, n_head, n_head_kv, head_dim, group);
    return sampled_node(ctx, {layer, group, {}, 1.0f, 0.0f, sample_spec(kSampledKinds[0].score)},
                        ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kProbeCells / 32),
                        ggml_new_tensor_1d(ctx, GGML_TYPE_I32, kProbeCells), layer.samples[0], nullptr, nullptr);
}

ggml_tensor * probe_observe(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group) {
    CacheLayer layer = probe_layer(ctx, n_head_kv, head_dim, group);
    layer.queries    = probe_queries(ctx, n_head, head_dim);
    return observe_node(ctx, {layer, group, {}}, false, probe_q(ctx, n_head, head_dim));
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

    kvfold::CacheLayer & layer   = cache->layers[index];
    const float          softcap = g.hparams.attn_soft_cap ? g.hparams.f_attn_logit_softcapping : 0.0f;
    auto &               input   = kvfold::plan_input(g, cache, kq_mask->ne[0], q->ne[1]);

    const kvfold::NodeSpec spec = {layer, cache->config.group,
                                   cache->fused_rotation ? cache->rotation : kvfold::Rotation{}, kq_scale, softcap};

    // With few tokens on a GPU all layers are observed, folded and stored at the end, by a launch each: a launch a layer would cost more
    // than its work. (Many tokens' rows would have to be kept for that.)
    const bool at_the_end = cache->fused_rotation && cache->one_device;

    const auto add = [&](ggml_tensor * node, const char * what) {
        ggml_format_name(node, "kvfold_%s-%d", what, il);
        kvfold::keep_with_cache(g, layer, node);
        ggml_build_forward_expand(g.gf, node);
    };
    // On the CPU a node costs as much as watching the queries of a token: the store node does it, if this layer has one.
    const bool first_reading  = il == layer.il && cache->second_pass == 0;
    const bool store_observes = first_reading && il == layer.last_il && layer.queries != nullptr &&
                                ggml_backend_buffer_is_host(layer.far_k->buffer);
    if (first_reading) {
        layer.scale      = kq_scale;
        layer.softcap    = softcap;
        const auto watch = [&](ggml_tensor * node, const char * what) {
            if (at_the_end) {
                ggml_format_name(node, "kvfold_%s-%d", what, il);
                kvfold::keep_with_cache(g, layer, node);
                input.commits.push_back(node);
            } else {
                add(node, what);
            }
        };
        if (layer.queries != nullptr && !store_observes) {
            watch(kvfold::observe_node(g.ctx0, spec, at_the_end, q), "observe");
        }
        for (const auto & kind : kvfold::kSampledKinds) {
            if (ggml_tensor * samples = layer.samples[kvfold::index_of(kind.score)]) {
                kvfold::NodeSpec with = spec;
                with.budget           = kvfold::sample_spec(kind.score);
                watch(kvfold::sample_node(g.ctx0, with, at_the_end, q, samples), "sample");
            }
        }
    }

    ggml_tensor * mask      = cache->plan.needs_mask ? kq_mask : nullptr;
    ggml_tensor * selection = nullptr;
    if (cache->plan.sparse && q->ne[1] <= int64_t(cache->lookup_queries)) {
        selection = kvfold::select_groups(g, *cache, spec, q, mask, input, il);
    }
    ggml_tensor * attend = kvfold::attend_node(g.ctx0, spec, q, input.words, mask, sinks, selection);
    g.res->add_fused_node({LLM_FUSED_OP_FLASH_ATTN, attend, il});
    add(attend, "attend");
    if (layer.align != nullptr && selection != nullptr) {
        add(kvfold::beside_attend(g.ctx0, kvfold::NodeOp::align, spec, attend, layer.align), "align");
    }
    if (cache->second_pass != 0) {
        const bool    lose   = cache->dropped != nullptr;
        ggml_tensor * beside = kvfold::beside_attend(g.ctx0, lose ? kvfold::NodeOp::lose : kvfold::NodeOp::receive,
                                                     spec, attend, layer.received);
        if (lose) {
            beside->src[kvfold::attend_src::selection] = cache->dropped;
        }
        add(beside, lose ? "lose" : "receive");
    }

    if (il == layer.last_il) {
        const bool    batched = at_the_end && il != cache->final_il;
        ggml_tensor * fold    = kvfold::fold_node(g.ctx0, spec, input.words, attend);
        ggml_tensor * store =
            kvfold::store_node(g.ctx0, spec, batched, input.words, fold, store_observes ? q : nullptr);
        ggml_format_name(fold, "kvfold_fold-%d", il);
        ggml_format_name(store, "kvfold_store-%d", il);
        input.commits.push_back(store);
        if (!batched) {
            for (ggml_tensor * node : input.commits) {
                ggml_build_forward_expand(g.gf, node);
            }
            input.commits.clear();
        }
    }

    ggml_tensor * out = ggml_reshape_2d(g.ctx0, attend, attend->ne[0] * attend->ne[1], attend->ne[2]);
    ggml_build_forward_expand(g.gf, out);
    return out;
}
