#include "cache/hooks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "cache/cell_groups.h"
#include "cache/config.h"
#include "cache/context_scope.h"
#include "cache/eviction.h"
#include "cache/fingerprint.h"
#include "cache/graph_nodes.h"
#include "cache/kvfold_cache.h"
#include "cache/lookup.h"
#include "cache/scoring.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"
#include "ops/graph_node.h"
#include "ops/kv_align.h"
#include "ops/kv_score.h"

namespace {

// Whether a device runs a node for this layer's shape. Asked with one that exists for the question only.
bool device_runs(decltype(kvfold::probe_attend) * probe, ggml_backend_dev_t dev, const llama_hparams & hparams,
                 uint32_t il, int32_t group) {
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead() * 16, nullptr, true}));
    return ggml_backend_dev_supports_op(dev,
                                        probe(ctx.get(), int32_t(hparams.n_head(il)), int32_t(hparams.n_head_kv(il)),
                                              int32_t(hparams.n_embd_head_k(il)), group));
}

// Whether the device of a layer runs such a select node.
bool device_selects(const kvfold_cache & cache, const kvfold::CacheLayer & layer, const llama_hparams & hparams,
                    bool pool) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.far_k->buffer));
    if (dev == nullptr || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
        return true;
    }
    ggml_context_ptr ctx(ggml_init({ggml_tensor_overhead() * 16, nullptr, true}));
    return ggml_backend_dev_supports_op(
        dev, kvfold::probe_select(ctx.get(), int32_t(hparams.n_head(uint32_t(layer.il))), layer.n_head_kv,
                                  layer.head_dim, cache.config.group, pool));
}

// Does a layer read a share that it chooses itself?
bool has_share(const kvfold::CacheLayer & layer) {
    return layer.mode == kvfold::LayerMode::full || layer.mode == kvfold::LayerMode::reindex;
}

// The largest share that look-ups of a layer may read.
float largest_share(const kvfold_cache & cache) {
    float share = 0.0f;
    for (const auto & layer : cache.layers) {
        if (has_share(layer)) {
            share = std::max(share, layer.lookup_max);
        }
    }
    return share;
}

// The smallest one that they may stop at.
float smallest_share(const kvfold_cache & cache) {
    float share = 1.0f;
    for (const auto & layer : cache.layers) {
        if (has_share(layer)) {
            share = std::min({share, layer.lookup_max, cache.config.lookup_min});
        }
    }
    return std::min(share, largest_share(cache));
}

// Decides what each layer does. Throws when the settings do not fit the model.
void set_modes(kvfold_cache & cache, const llama_hparams & hparams) {
    using kvfold::LayerMode;

    if (!kvfold::has_lookup(cache.config.type) || cache.config.lookup_max >= 1.0f) {
        return;
    }
    std::vector<int32_t> numbers;
    for (const auto & layer : cache.layers) {
        numbers.push_back(layer.il);
    }
    std::vector<kvfold::LayerRule> rules;
    if (!kvfold::layer_rules(cache.config, numbers, int32_t(hparams.n_layer()), rules)) {
        throw std::runtime_error(kvfold_last_error());
    }
    int32_t chosen_heads = 0;  // of the layer whose choice may be taken over
    bool    no_pools     = false;
    for (size_t i = 0; i < rules.size(); ++i) {
        const kvfold::CacheLayer & layer = cache.layers[i];
        if (rules[i].mode == LayerMode::reuse || rules[i].mode == LayerMode::reindex) {
            if (layer.n_head_kv != chosen_heads) {
                kvfold::fail(kvfold::message("kv_layers '%s': layer %d has %d KV heads and cannot use the choice of a "
                                             "layer with %d; possible there: dense, full, window",
                                             cache.config.layers, layer.il, layer.n_head_kv, chosen_heads));
                throw std::runtime_error(kvfold_last_error());
            }
        } else if (rules[i].mode == LayerMode::full) {
            chosen_heads = layer.n_head_kv;
        }
        if (rules[i].mode != LayerMode::dense && !device_selects(cache, layer, hparams, false)) {
            LLAMA_LOG_WARN("kvfold: the device of layer %d cannot look up; decoding reads the whole cache\n", layer.il);
            return;
        }
        if (rules[i].mode == LayerMode::reindex && !device_selects(cache, layer, hparams, true)) {
            no_pools      = true;
            rules[i].mode = LayerMode::full;
        }
    }
    if (no_pools) {
        LLAMA_LOG_WARN("kvfold: this device cannot choose from a pool; reindex layers choose from everything, as full "
                       "layers do\n");
    }
    size_t last_full = 0;
    for (size_t i = 0; i < rules.size(); ++i) {
        last_full = rules[i].mode == LayerMode::full ? i : last_full;
        cache.layers[last_full].makes_pool |= rules[i].mode == LayerMode::reindex;
        cache.layers[i].mode       = rules[i].mode;
        cache.layers[i].lookup_max = rules[i].share > 0.0f ? rules[i].share : cache.config.lookup_max;
        cache.looks_up             = cache.looks_up || rules[i].mode != LayerMode::dense;
    }
    cache.lookup_queries = std::min<uint32_t>(kvfold::kLookupQueries, uint32_t(std::max(1, cache.fused_queries)));
    cache.list_capacity  = kvfold::list_capacity(cache.config, largest_share(cache), cache.n_groups(), cache.n_seq_max);
    cache.pool_capacity  = kvfold::pool_capacity(cache.config, cache.n_groups(), cache.n_seq_max);
    cache.plan.sparse    = cache.looks_up;  // memory of the compute graph is planned with look-ups
}

// Tokens of the longest sequence of a micro-batch.
uint32_t longest(const llama_kv_cells & cells, const llama_kv_cells::seq_set_t & seqs, uint32_t n_seq_max) {
    llama_pos most = 0;
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (seqs.test(s) && cells.seq_pos_max(llama_seq_id(s)) >= 0) {
            most = std::max(most, cells.seq_pos_max(llama_seq_id(s)) - cells.seq_pos_min(llama_seq_id(s)) + 1);
        }
    }
    return uint32_t(most);
}

// A look-up share above this costs nearly as much as reading everything.
constexpr double kLargeShare = 0.3;

// Whether the planned micro-batch looks up; counts it.
bool looks_up(kvfold_cache & cache, const llama_kv_cells & cells, const llama_kv_cells::seq_set_t & seqs,
              uint32_t n_tokens) {
    if (!cache.looks_up || n_tokens > cache.lookup_queries) {
        return false;
    }
    const auto enough = uint32_t(cache.min_context);
    if (longest(cells, seqs, cache.n_seq_max) < enough) {
        return false;
    }
    const auto far = kvfold::count_far(cache.plan.far_bits, cache.group());
    if (far.tokens == 0 || far.tokens < enough) {
        return false;
    }
    if (far.partial_groups > kvfold::partial_room(cache.n_seq_max)) {
        cache.dense_fallbacks += 1;
        return false;
    }
    cache.lookup_steps += 1;
    if (!cache.warned && cache.lookup_steps % 512 == 64) {
        const auto   seen  = cache.lookups();
        const double share = seen.visible > 0 ? double(seen.read) / double(seen.visible) : 0.0;
        if (share > kLargeShare) {
            cache.warned = true;
            LLAMA_LOG_WARN("kvfold: decoding reads %.0f %% of the far groups, more than look-up is good for; a larger "
                           "kv_min_context, a smaller kv_lookup or smaller kv_min_tokens make it faster\n",
                           100.0 * share);
        }
    }
    return true;
}

}  // namespace

void kvfold_access::ctor_begin(llama_kv_cache & kv, ggml_type & type_k, ggml_type & type_v, bool & offload,
                               uint32_t & kv_size) {
    const kvfold_config * config = kvfold::building_config();
    if (config == nullptr || type_k != GGML_TYPE_NVFP4 || type_v != GGML_TYPE_NVFP4) {
        return;
    }
    if (kv.swa_type != LLAMA_SWA_TYPE_NONE) {
        // Windows are small and sensitive: at least 8 bits, whatever the kv type.
        type_k = type_v = config->swa_type == KVFOLD_SWA_Q8_0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
        return;
    }

    kv.kvfold = std::make_shared<kvfold_cache>(*config, kv_size, kvfold::building_n_seq_max());
    kv_size   = kv.kvfold->n_cells;

    if (offload) {
        for (uint32_t il = 0; il < kv.hparams.n_layer(); ++il) {
            ggml_backend_dev_t dev = kv.model.dev_layer(int(il));
            if (!kv.hparams.has_kv(il) || kv.hparams.is_swa(il) || kv.hparams.is_recr(il) ||
                kv.hparams.n_head_kv(il) == 0 || dev == nullptr ||
                ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU) {
                continue;
            }
            const auto runs = [&](decltype(kvfold::probe_attend) * probe) {
                return device_runs(probe, dev, kv.hparams, il, config->group);
            };
            if (!runs(kvfold::probe_attend)) {
                LLAMA_LOG_WARN("kvfold: device %s has no kvfold attention for this model; the cache stays in host "
                               "memory and attention "
                               "runs on the CPU, which is slow\n",
                               ggml_backend_dev_name(dev));
                offload = false;
                break;
            }
            if (kv.kvfold->evicts() && config->score != KVFOLD_SCORE_RECENT &&
                !(runs(kvfold::probe_score) && runs(kvfold::probe_observe) && runs(kvfold::probe_sampled) &&
                  runs(kvfold::probe_sample))) {
                kvfold::fail(kvfold::message("kv_type fp4_csa2_ced: %s cannot score tokens by kv_score %s; possible "
                                             "there: kv_score recent, or a "
                                             "cache in host memory (offload_kqv off)",
                                             ggml_backend_dev_name(dev), kvfold::score_name(config->score).c_str()));
                throw std::runtime_error(kvfold_last_error());
            }
        }
    }
}

void kvfold_access::layer_added(llama_kv_cache & kv) {
    const int32_t scale_group = kv.kvfold->config.scale_group;
    if (scale_group == kvfold::kFp4ScaleGroup) {
        return;  // that is GGML_TYPE_NVFP4
    }
    auto & layer = kv.layers.back();
    for (ggml_tensor * t : {layer.k, layer.v, layer.k_stream[0], layer.v_stream[0]}) {
        t->type  = GGML_TYPE_I8;
        t->ne[0] = t->ne[0] / kvfold::kFp4BlockValues * kvfold::fp4_block_bytes(scale_group);
        t->nb[0] = 1;
        for (int i = 1; i < GGML_MAX_DIMS; ++i) {
            t->nb[i] = t->nb[i - 1] * size_t(t->ne[i - 1]);
        }
    }
}

void kvfold_access::attach(llama_kv_cache & kv) {
    if (!kv.kvfold) {
        return;
    }
    kvfold_cache & cache = *kv.kvfold;

    struct BuftLess {
        bool operator()(ggml_backend_buffer_type_t a, ggml_backend_buffer_type_t b) const {
            return std::strcmp(ggml_backend_buft_name(a), ggml_backend_buft_name(b)) < 0;
        }
    };
    std::map<ggml_backend_buffer_type_t, ggml_context_ptr, BuftLess> contexts;

    const bool all_host = std::all_of(kv.layers.begin(), kv.layers.end(),
                                      [](const auto & layer) { return ggml_backend_buffer_is_host(layer.k->buffer); });
    const uint32_t n_spans = kvfold::span_count(
        cache.config, kvfold::stored_tokens(cache.config, cache.n_ctx, cache.n_seq_max), cache.n_cells);
    if (!all_host && n_spans > 0 && cache.config.hierarchical == KVFOLD_HIERARCHICAL_ON) {
        kvfold::fail("kv_hierarchical on: layers on a GPU are searched in one level, which is faster there; possible: "
                     "auto, off");
        throw std::runtime_error(kvfold_last_error());
    }
    cache.spans.resize(all_host ? n_spans : 0);

    int32_t most_columns = 1;
    bool    one_device   = true;
    for (size_t ikv = 0; ikv < kv.layers.size(); ++ikv) {
        const auto &       from = kv.layers[ikv];
        kvfold::CacheLayer layer{};
        layer.il        = int32_t(from.il);
        layer.last_il   = layer.il;
        layer.n_head_kv = int32_t(kv.hparams.n_head_kv(from.il));
        layer.head_dim  = int32_t(kv.hparams.n_embd_head_k(from.il));
        layer.n_spans   = int32_t(cache.spans.size());
        layer.far_k     = from.k;
        layer.far_v     = from.v;

        layer.scale_group = cache.config.scale_group;
        for (const auto & [il, index] : kv.map_layer_ids) {
            if (index == int32_t(ikv)) {
                layer.last_il = std::max(layer.last_il, il);
            }
        }

        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(from.k->buffer);
        auto &                     ctx  = contexts[buft];
        if (!ctx) {
            ctx.reset(ggml_init({ggml_tensor_overhead() * 7 * kv.layers.size(), nullptr, true}));
        }
        const int64_t gqa     = int64_t(layer.n_head_kv) * layer.head_dim;
        const int32_t columns = int32_t(kv.hparams.n_head(from.il)) / layer.n_head_kv;  // of one query
        most_columns          = std::max(most_columns, columns);

        one_device      = one_device && !ggml_backend_buffer_is_host(from.k->buffer) &&
                          buft == ggml_backend_buffer_get_type(kv.layers[0].k->buffer);
        cache.final_il  = std::max(cache.final_il, layer.last_il);
        const auto tier = kvfold::tier_layout(layer.n_head_kv, layer.head_dim, int32_t(cache.n_groups()), layer.n_spans,
                                              int32_t(cache.near.n_rows()));
        layer.tier      = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(tier.bytes));
        layer.side      = ggml_view_1d(ctx.get(), layer.tier, int64_t(tier.side.bytes), 0);
        layer.near      = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, gqa, cache.near.n_rows(), 2);
        layer.near->view_src  = layer.tier;  // ggml's own views cannot change the type
        layer.near->view_offs = tier.near_offset;
        ggml_format_name(layer.tier, "cache_tier_l%d", layer.il);
        if (cache.config.alignment) {
            layer.align = kvfold::new_alignment(ctx.get(), kv.hparams.n_head(from.il));
            cache.side_bytes += ggml_nbytes(layer.align);
        }
        if (cache.evicts() && (cache.config.score & KVFOLD_SCORE_ATTN) != 0) {
            layer.queries = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32,
                                               kvfold::query_stats_size(kv.hparams.n_head(from.il), layer.head_dim));
            cache.side_bytes += ggml_nbytes(layer.queries);
        }
        for (size_t i = 0; i < std::size(kvfold::kSampledKinds); ++i) {
            const auto & kind = kvfold::kSampledKinds[i];
            if (cache.evicts() && (cache.config.score & kind.flag) != 0) {
                layer.samples[i] =
                    kvfold::new_samples(ctx.get(), kv.hparams.n_head(from.il), layer.head_dim, kind.score);
                cache.side_bytes += ggml_nbytes(layer.samples[i]);
            }
        }

        cache.far_bytes += ggml_nbytes(layer.far_k) + ggml_nbytes(layer.far_v);
        cache.side_bytes += tier.near_offset;
        cache.near_bytes += ggml_nbytes(layer.near);
        cache.f16_bytes += uint64_t(2) * uint64_t(gqa) * cache.n_ctx * sizeof(ggml_fp16_t);
        cache.layers.push_back(layer);
    }

    for (auto & [buft, ctx] : contexts) {
        ggml_backend_buffer_t buffer;
        if (kv.hparams.no_alloc) {
            buffer = ggml_backend_buft_alloc_buffer(buft, 0);  // a dry run measures; nothing may be allocated
            for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t != nullptr;
                 t               = ggml_get_next_tensor(ctx.get(), t)) {
                t->buffer = buffer;
            }
        } else {
            buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        }
        if (buffer == nullptr) {
            kvfold::fail("kvfold: not enough memory for the near pool and the summaries of the cache");
            throw std::runtime_error(kvfold_last_error());
        }
        ggml_backend_buffer_clear(buffer, 0);
        // Owned, counted (memory_breakdown) and cleared like the cache's own buffers.
        kv.ctxs_bufs.emplace_back(std::move(ctx), ggml_backend_buffer_ptr(buffer));
    }

    // The device's decode kernel has 16 columns at most; the CPU rotates everything itself.
    cache.fused_queries  = all_host ? INT32_MAX : 16 / most_columns;
    cache.fused_rotation = all_host;
    cache.one_device     = one_device;
    if (kv.attn_rot_k) {
        for (cache.rotation.k = 64; kv.n_embd_head_k_all % (2 * cache.rotation.k) == 0;) {
            cache.rotation.k *= 2;
        }
    }
    cache.rotation.v  = kv.attn_rot_v ? 64 : 0;
    cache.min_context = cache.config.min_context >= 0 ? cache.config.min_context
                        : all_host                    ? kvfold::kMinContextCpu
                                                      : kvfold::kMinContextGpu;
    set_modes(cache, kv.hparams);
    if (cache.config.alignment && !cache.looks_up) {
        LLAMA_LOG_WARN("kvfold: alignment is measured where decoding looks up, which is nowhere here\n");
    }

    cache.fingerprint = kvfold::model_fingerprint(kv.model);
    cache.publish();
}

void kvfold_access::applied(llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch,
                            uint32_t n_kv) {
    if (!kv.kvfold) {
        return;
    }
    kvfold_cache &         cache = *kv.kvfold;
    const llama_kv_cells & cells = kv.v_cells[0];

    cache.repair(cells, sinfo.idxs[0]);

    llama_kv_cells::seq_set_t seqs;
    for (uint32_t s = 0; s < ubatch.n_seqs_unq; ++s) {
        seqs.set(size_t(ubatch.seq_id_unq[s]));
    }
    // On a device, nodes beside the attention take rows that are rotated already.
    const bool beside = cache.second_pass != 0 || cache.config.alignment;
    cache.fused_rotation =
        int64_t(ubatch.n_tokens) <= cache.fused_queries && (!beside || cache.fused_queries == INT32_MAX);
    if (cache.second_pass != 0) {
        cache.plan = cache.near.plan_reading(cells, sinfo.idxs[0], seqs, n_kv);
        cache.spans.add_to_plan(cells, seqs, cache.plan);
        cache.plan.spans.clear();
        return;
    }
    cache.forget_compacted(ubatch);
    cache.plan = cache.near.plan(cells, sinfo.idxs[0], seqs, n_kv);
    cache.spans.add_to_plan(cells, seqs, cache.plan);
    cache.plan.sparse = looks_up(cache, cells, seqs, ubatch.n_tokens);

    cache.folds += uint64_t(cache.plan.n_groups);
    const size_t stride = 1 + cache.group();
    for (size_t i = 0; i < cache.plan.fold_entries.size(); ++i) {
        cache.folded_tokens += i % stride != 0 && cache.plan.fold_entries[i] != kvfold::kSrcHidden;
    }
}

namespace {

llama_kv_cache::slot_info slots_of(std::vector<uint32_t> cells) {
    if (cells.empty()) {
        return {};
    }
    llama_kv_cache::slot_info slots{};
    slots.s0   = 0;
    slots.s1   = 0;
    slots.strm = {0};
    slots.idxs = {std::move(cells)};
    return slots;
}

bool full(const kvfold_cache & cache) {
    return kvfold::fail(
        kvfold::message("the cache of %u cells is full, and no more of its tokens may be evicted (kv_keep %g, "
                        "pins, the youngest %d tokens of a sequence)",
                        cache.n_cells, double(cache.config.keep), cache.eviction.young));
}

// Stands for cells that are chosen when it is the micro-batch's turn.
constexpr uint32_t kLater = UINT32_MAX;

}  // namespace

llama_kv_cache::slot_info kvfold_access::find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch) {
    const uint32_t group = kv.kvfold->group();
    return slots_of(kvfold::place_tokens(kv.v_cells[0], group, kv.v_heads[0] / group, kvfold::tokens_of(ubatch)));
}

// Goes through the micro-batches on a copy. Which groups are evicted depends on scores that are not known yet, but how many
// does not.
llama_kv_cache::slot_info_vec_t kvfold_access::prepare(llama_kv_cache &                  kv,
                                                       const std::vector<llama_ubatch> & ubatches) {
    if (!kv.kvfold || !kv.kvfold->evicts()) {
        return {};
    }
    kvfold_cache &                  cache   = *kv.kvfold;
    const llama_kv_cells            cells   = kv.v_cells[0];
    const uint32_t                  head    = kv.v_heads[0];
    uint64_t                        evicted = 0;
    llama_kv_cache::slot_info_vec_t slots;
    for (const llama_ubatch & ubatch : ubatches) {
        llama_kv_cache::slot_info placed = find_slot(kv, ubatch);
        slots.push_back(placed);
        if (evicted > 0 || placed.empty()) {
            slots.back() = slots_of(std::vector<uint32_t>(ubatch.n_tokens, kLater));
        }
        if (placed.empty()) {
            const auto groups = kvfold::evictable_groups(kv.v_cells[0], nullptr, cache.eviction);
            placed = slots_of(kvfold::make_room(kv.v_cells[0], cache.eviction, groups, kv.v_heads[0] / cache.group(),
                                                kvfold::tokens_of(ubatch), evicted));
        }
        if (placed.empty()) {
            slots.clear();
            full(cache);
            break;
        }
        kv.apply_ubatch(placed, ubatch);
    }
    kv.v_cells[0] = cells;
    kv.v_heads[0] = head;
    return slots;
}

bool kvfold_access::place(llama_kv_cache & kv, llama_kv_cache::slot_info & slots, const llama_ubatch & ubatch) {
    if (!kv.kvfold || slots.idxs[0][0] != kLater) {
        return true;
    }
    kvfold_cache & cache = *kv.kvfold;
    auto &         cells = kv.v_cells[0];
    cache.repair(cells, {});
    cache.near.sweep(cells);
    slots = find_slot(kv, ubatch);
    if (slots.empty()) {
        auto       groups = kvfold::evictable_groups(cells, &cache.near, cache.eviction);
        const auto kinds  = cache.config.score;
        if (kinds != KVFOLD_SCORE_RECENT) {
            if (cache.context != nullptr) {
                // The micro-batch before may still be running on a device.
                ggml_backend_sched_synchronize(cache.context->get_sched());
            }
            const auto scores = kvfold::make_scores(cache, cells);
            if (scores.empty()) {
                return kvfold::fail("the cache is full and its tokens could not be scored");
            }
            groups = kvfold::order_by_score(groups, cells, cache.group(), kinds, scores);
        }
        slots = slots_of(kvfold::make_room(cells, cache.eviction, groups, kv.v_heads[0] / cache.group(),
                                           kvfold::tokens_of(ubatch), cache.evicted_tokens));
        cache.evictions += 1;
    }
    return !slots.empty() || full(cache);
}

ggml_tensor * kvfold_access::cpy_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, int32_t il) {
    auto & layer = kv.kvfold->layers[size_t(kv.map_layer_ids.at(il))];
    layer.k_cur  = ggml_view_2d(ctx, k_cur, k_cur->ne[0] * k_cur->ne[1], k_cur->ne[2], k_cur->nb[2], 0);
    return layer.k_cur;
}

ggml_tensor * kvfold_access::cpy_v(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * v_cur, int32_t il) {
    auto & layer = kv.kvfold->layers[size_t(kv.map_layer_ids.at(il))];
    layer.v_cur  = ggml_view_2d(ctx, v_cur, v_cur->ne[0] * v_cur->ne[1], v_cur->ne[2], v_cur->nb[2], 0);
    return layer.v_cur;
}

bool kvfold_access::rotates(const llama_kv_cache & kv) { return kv.kvfold && kv.kvfold->fused_rotation; }

void kvfold_access::refuse_shift(const char * what) {
    kvfold::fail(
        kvfold::message("%s: positions of an FP4 cache cannot be shifted (llama_memory_can_shift says so)", what));
    LLAMA_LOG_ERROR("kvfold: %s; nothing was changed\n", kvfold_last_error());
}

// Statistics ----------------------------------------------------------------------------------------------------------

namespace {

// The caches inside a context's memory module: the one with FP4 rows and, for sliding-window models, the window cache.
struct Found {
    llama_kv_cache * base = nullptr;
    llama_kv_cache * swa  = nullptr;
};

Found find_caches(llama_memory_i * memory) {
    if (auto * kv = dynamic_cast<llama_kv_cache *>(memory)) {
        return {kv, nullptr};
    }
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return {iswa->get_base(), iswa->get_swa()};
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return {hybrid->get_mem_attn(), nullptr};
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return {hybrid->get_mem_attn()->get_base(), hybrid->get_mem_attn()->get_swa()};
    }
    return {};
}

uint64_t bytes_of(const llama_kv_cache & kv) {
    uint64_t bytes = 0;
    for (const auto & [buft, size] : kv.memory_breakdown()) {
        bytes += size;
    }
    return bytes;
}

}  // namespace

bool kvfold_access::stats(const llama_context & ctx, kvfold_stats & out) {
    const Found found = find_caches(ctx.get_memory());
    if (found.base == nullptr || !found.base->kvfold) {
        return false;
    }
    const kvfold_cache &   cache = *found.base->kvfold;
    const llama_kv_cells & cells = found.base->v_cells[0];

    out        = {};
    out.config = cache.config;
    if (kvfold::has_lookup(cache.config.type)) {
        out.config.min_context = cache.min_context;
    }
    out.far_bytes  = cache.far_bytes;
    out.side_bytes = cache.side_bytes;
    out.near_bytes = cache.near_bytes;
    out.bytes      = bytes_of(*found.base);
    out.f16_bytes  = cache.f16_bytes;
    if (found.swa != nullptr) {
        out.swa_bytes = bytes_of(*found.swa);
        out.bytes += out.swa_bytes;
        // An f16 context keeps its windows in f16.
        for (const auto & layer : found.swa->layers) {
            out.f16_bytes += uint64_t(ggml_nelements(layer.k) + ggml_nelements(layer.v)) * sizeof(ggml_fp16_t);
        }
    }
    out.n_cells       = cache.n_cells;
    out.tokens        = cells.get_used();
    out.near_tokens   = cache.near.count_used(cells);
    out.folded_tokens = cache.folded_tokens;
    out.folds         = cache.folds;

    const auto lookups  = cache.lookups();
    out.lookup_visible  = lookups.visible;
    out.lookup_read     = lookups.read;
    out.lookup_steps    = cache.lookup_steps;
    out.dense_fallbacks = cache.dense_fallbacks;
    out.evicted_tokens  = cache.evicted_tokens;
    out.evictions       = cache.evictions;

    std::string backend;
    for (const auto & layer : cache.layers) {
        ggml_backend_dev_t dev  = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(layer.far_k->buffer));
        const char *       name = dev != nullptr ? ggml_backend_dev_name(dev) : "CPU";
        if (backend.find(name) == std::string::npos) {
            backend += (backend.empty() ? "" : ", ") + std::string(name);
        }
    }
    std::strncpy(out.backend, backend.c_str(), sizeof(out.backend) - 1);
    return true;
}

namespace {

std::atomic<kvfold_announcer> g_announcer{nullptr};

}  // namespace

void kvfold_set_announcer(kvfold_announcer announcer) { g_announcer = announcer; }

void kvfold::say(const std::string & line) {
    if (kvfold_announcer announcer = g_announcer) {
        announcer(line.c_str());
    } else {
        LLAMA_LOG_INFO("%s\n", line.c_str());
    }
}

void kvfold_access::announce(const llama_context & ctx) {
    llama_kv_cache * kv = folding_cache(ctx);
    if (kv != nullptr) {
        kv->kvfold->context = &ctx;
    }
    kvfold_stats s;
    if (ctx.get_model().hparams.no_alloc || !stats(ctx, s)) {
        return;  // a dry run allocates nothing worth a line
    }
    const double mib = 1024.0 * 1024.0;
    std::string  lookup;
    if (kv->kvfold->looks_up) {
        lookup =
            kvfold::message("; beyond %d tokens layers read %.0f to %.0f %% of it in decoding", s.config.min_context,
                            100.0 * double(smallest_share(*kv->kvfold)), 100.0 * double(largest_share(*kv->kvfold)));
    }
    const std::string line = kvfold::message(
        "kv %s: %.1f MiB, f16 would be %.1f (%.1f %%); near %.1f MiB; attention on %s%s",
        kvfold_type_name(s.config.type), double(s.bytes) / mib, double(s.f16_bytes) / mib,
        100.0 * double(s.bytes) / double(s.f16_bytes), double(s.near_bytes) / mib, s.backend, lookup.c_str());
    kvfold::say(line);
}

size_t kvfold_access::alignment(const llama_context & ctx, kvfold_alignment * out, size_t room) {
    const Found found = find_caches(ctx.get_memory());
    if (found.base == nullptr || !found.base->kvfold) {
        return 0;
    }
    const std::vector<kvfold_alignment> rows = found.base->kvfold->alignment();
    std::copy_n(rows.begin(), std::min(room, rows.size()), out);
    return rows.size();
}

size_t kvfold_get_alignment(const llama_context * ctx, kvfold_alignment * rows, size_t room) {
    return kvfold_access::alignment(*ctx, rows, room);
}

bool kvfold_get_stats(const llama_context * ctx, kvfold_stats * stats) {
    return kvfold_access::stats(*ctx, *stats) || kvfold::fail("this context has no kvfold cache");
}

llama_kv_cache * kvfold_access::folding_cache(const llama_context & ctx) {
    llama_kv_cache * kv = find_caches(ctx.get_memory()).base;
    return kv != nullptr && kv->kvfold ? kv : nullptr;
}

int32_t kvfold_access::kept(const llama_context & ctx, llama_seq_id seq) {
    const llama_kv_cache * kv = folding_cache(ctx);
    return kv != nullptr && seq >= 0 && seq < llama_seq_id(kv->kvfold->n_seq_max)
               ? int32_t(kv->v_cells[0].seq_pos_get(seq).size())
               : -1;
}

int32_t kvfold_access::evicted(const llama_context & ctx, llama_seq_id seq, llama_pos end) {
    const llama_kv_cache * kv = folding_cache(ctx);
    if (kv == nullptr || seq < 0 || seq >= llama_seq_id(kv->kvfold->n_seq_max) || !kv->kvfold->has_dropped()) {
        return 0;
    }
    return kvfold::count_evicted(kv->v_cells[0], seq, end);
}

bool kvfold_access::is_usable(const llama_context & ctx, llama_seq_id seq, llama_pos end) {
    int32_t gone = evicted(ctx, seq, end);
    if (gone == 0) {
        return true;
    }
    const llama_kv_cache & kv        = *folding_cache(ctx);
    const kvfold_cache &   cache     = *kv.kvfold;
    const auto &           compacted = cache.compacted[size_t(seq)];
    // A text that was compacted was meant to be asked again and again; its last tokens are all there.
    gone -= compacted.end > 0 && end >= compacted.end - cache.config.tail ? compacted.lost : 0;
    // A sequence that goes on as it was is what it is, also when its last tokens are taken back (rejected drafts, an answer that
    // is rendered anew).
    if (end > kv.v_cells[0].seq_pos_max(seq) - cache.eviction.young) {
        return true;
    }
    // What a sequence of that length has to lose if it is alone, and a tenth.
    return gone <= std::max(0, end - int32_t(cache.n_cells)) + end / 10;
}

bool kvfold_access::pin(llama_context & ctx, llama_seq_id seq, llama_pos begin, llama_pos end) {
    const llama_kv_cache * kv = folding_cache(ctx);
    if (kv == nullptr || !kvfold::evicts(kv->kvfold->config)) {
        return kvfold::fail("pins need a context with kv_type fp4_csa2_ced and a kv_keep below 1");
    }
    if (seq < 0 || seq >= llama_seq_id(kv->kvfold->n_seq_max)) {
        return kvfold::fail(
            kvfold::message("sequence %d does not exist; possible: 0 to %u", seq, kv->kvfold->n_seq_max - 1));
    }
    end         = end < 0 ? std::numeric_limits<llama_pos>::max() : end;
    auto & pins = kv->kvfold->eviction.pins;
    if (begin >= end) {
        pins.erase(std::remove_if(pins.begin(), pins.end(), [&](const kvfold::Pin & p) { return p.seq == seq; }),
                   pins.end());
    } else {
        pins.push_back({seq, begin, end});
    }
    return true;
}

int32_t kvfold_kept(const llama_context * ctx, int32_t seq_id) { return kvfold_access::kept(*ctx, seq_id); }

int32_t kvfold_evicted(const llama_context * ctx, int32_t seq_id, int32_t n_pos) {
    return kvfold_access::evicted(*ctx, seq_id, n_pos);
}

bool kvfold_prefix_usable(const llama_context * ctx, int32_t seq_id, int32_t n_pos) {
    return kvfold_access::is_usable(*ctx, seq_id, n_pos);
}

bool kvfold_pin(llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1) {
    return kvfold_access::pin(*ctx, seq_id, p0, p1);
}
