#include "cache/kvfold_cache.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "cache/cell_groups.h"
#include "cache/graph_nodes.h"
#include "cache/hooks.h"
#include "cache/lookup.h"
#include "llama-batch.h"
#include "llama-impl.h"
#include "ops/kv_align.h"

namespace {

std::mutex                                                                 g_mutex;
std::unordered_map<const ggml_tensor *, std::pair<kvfold_cache *, size_t>> g_layers;  // by far_k

kvfold::NearPool::Config near_config(const kvfold_config & c, uint32_t n_seq_max) {
    return {uint32_t(c.group), uint32_t(c.tail), uint32_t(c.sinks), n_seq_max};
}

}  // namespace

ggml_tensor * kvfold::new_samples(ggml_context * ctx, int64_t n_head, int64_t head_dim, SampledScore score) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F16, n_head * head_dim, 1 + sample_rule(score).rows);
}

ggml_tensor * kvfold::new_alignment(ggml_context * ctx, int64_t n_head) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F64, sizeof(Alignment) / sizeof(double), n_head);
}

std::vector<kvfold::Alignment> kvfold::read_alignment(const ggml_tensor * t) {
    std::vector<Alignment> heads(size_t(t->ne[1]));
    ggml_backend_tensor_get(t, heads.data(), 0, heads.size() * sizeof(Alignment));
    return heads;
}

kvfold_cache::kvfold_cache(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max)
    : config(config), n_ctx(n_ctx), n_seq_max(n_seq_max),
      n_cells(
          kvfold::physical_cells(kvfold::stored_tokens(config, n_ctx, n_seq_max), n_seq_max, uint32_t(config.group))),
      near(near_config(config, n_seq_max), n_cells), eviction{uint32_t(config.group),
                                                              n_seq_max,
                                                              config.keep,
                                                              std::max(config.sinks, 1),
                                                              llama_pos(kvfold::young_tokens(config, n_ctx, n_seq_max)),
                                                              {}},
      compacted(n_seq_max) {}

kvfold_cache::~kvfold_cache() {
    if (lookup_steps > 0) {
        const Lookups seen = lookups();
        kvfold::say(kvfold::message("kv look-up: %.1f %% of the folded groups read in %llu steps, %llu dense fallbacks",
                                    100.0 * double(seen.read) / double(std::max<uint64_t>(1, seen.visible)),
                                    static_cast<unsigned long long>(lookup_steps),
                                    static_cast<unsigned long long>(dense_fallbacks)));
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    for (const auto & layer : layers) {
        g_layers.erase(layer.far_k);
    }
}

kvfold::SideLayout kvfold_cache::side_layout(const kvfold::CacheLayer & layer) const {
    return kvfold::side_layout(layer.n_head_kv, layer.head_dim, int32_t(n_groups()), layer.n_spans);
}

int32_t kvfold_cache::most_spans(int64_t n_kv) const {
    return spans.size() > 0 && kvfold::exceeds_pool(config, n_kv) ? kvfold::pool_spans(config) : 0;
}

kvfold_cache::Lookups kvfold_cache::lookups(const kvfold::CacheLayer & layer) const {
    if (!looks_up || ggml_backend_buffer_get_size(layer.tier->buffer) == 0) {
        return {};  // nothing was allocated: a dry run
    }
    const auto layout      = side_layout(layer);
    uint64_t   counters[2] = {};
    ggml_backend_tensor_get(layer.side, counters, layout.counters_offset, sizeof(counters));
    return {counters[0], counters[1]};
}

kvfold_cache::Lookups kvfold_cache::lookups() const {
    Lookups sum{};
    for (const auto & layer : layers) {
        const Lookups of_layer = lookups(layer);
        sum.visible += of_layer.visible;
        sum.read += of_layer.read;
    }
    return sum;
}

std::vector<kvfold_alignment> kvfold_cache::alignment() const {
    std::vector<kvfold_alignment> rows;
    for (const auto & layer : layers) {
        if (layer.align == nullptr || ggml_backend_buffer_get_size(layer.align->buffer) == 0) {
            continue;
        }
        const std::vector<kvfold::Alignment> heads = kvfold::read_alignment(layer.align);
        const Lookups                        seen  = lookups(layer);
        const double                         share = double(seen.read) / double(std::max<uint64_t>(1, seen.visible));
        for (size_t h = 0; h < heads.size(); ++h) {
            const kvfold::Alignment & x = heads[h];
            const double              n = std::max(1.0, x.queries);
            rows.push_back(
                {layer.il, int32_t(h), uint64_t(x.queries), x.recalled / n, x.divergence / n, x.largest, share});
        }
    }
    return rows;
}

std::string kvfold_cache::metrics() {
    std::lock_guard<std::mutex>              lock(g_mutex);
    std::unordered_set<const kvfold_cache *> caches;
    for (const auto & [tensor, place] : g_layers) {
        caches.insert(place.first);
    }
    if (caches.empty()) {
        return "";
    }
    uint64_t folded = 0, visible = 0, read = 0, steps = 0, fallbacks = 0, evicted = 0;
    for (const kvfold_cache * cache : caches) {
        const Lookups seen = cache->lookups();
        folded += cache->folded_tokens;
        visible += seen.visible;
        read += seen.read;
        steps += cache->lookup_steps;
        fallbacks += cache->dense_fallbacks;
        evicted += cache->evicted_tokens;
    }
    std::string text;
    const auto  counter = [&text](const char * name, const char * help, uint64_t value) {
        const std::string full = std::string("kvfold:") + name;
        text += "# HELP " + full + " " + help + "\n# TYPE " + full + " counter\n" + full + " " + std::to_string(value) +
                "\n";
    };
    counter("folded_tokens_total", "Tokens whose rows were folded to FP4", folded);
    counter("lookup_groups_visible_total", "Folded groups that look-ups saw, by layer and KV head", visible);
    counter("lookup_groups_read_total", "Folded groups that look-ups read", read);
    counter("lookup_steps_total", "Decode steps that looked up", steps);
    counter("dense_fallbacks_total", "Decode steps that read everything although they were to look up", fallbacks);
    counter("evicted_tokens_total", "Tokens dropped to make room", evicted);
    return text;
}

void kvfold_cache::publish() {
    std::lock_guard<std::mutex> lock(g_mutex);
    for (size_t i = 0; i < layers.size(); ++i) {
        g_layers[layers[i].far_k] = {this, i};
    }
}

kvfold_cache * kvfold_cache::find(const ggml_tensor * far_k, size_t & layer) {
    std::lock_guard<std::mutex> lock(g_mutex);
    const auto                  it = g_layers.find(far_k);
    if (it == g_layers.end()) {
        return nullptr;
    }
    layer = it->second.second;
    return it->second.first;
}

void kvfold_cache::forget_compacted(const llama_ubatch & ubatch) {
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
            Compacted & before = compacted[size_t(ubatch.seq_id[i][s])];
            if (ubatch.pos[i] < before.end - config.tail) {
                before = {};
            }
            before.end = std::min(before.end, ubatch.pos[i]);  // of its exact tail nothing was lost
        }
    }
}

void kvfold_cache::repair(const llama_kv_cells & cells, const std::vector<uint32_t> & reused) {
    if (plan.n_groups == 0 && plan.spans.empty()) {
        return;
    }
    const std::unordered_set<uint32_t> next(reused.begin(), reused.end());
    const bool removed = std::any_of(plan.cells.begin(), plan.cells.end(),
                                     [&](uint32_t c) { return cells.is_empty(c) || next.count(c) > 0; });
    if (!removed) {
        spans.done(plan.spans);
        plan.spans.clear();
        return;  // the graph ran; nothing to ask the device
    }
    plan.spans.clear();  // they are planned again

    // The rows of the micro-batch are gone with the graph; the groups are folded without them, which is what they now hold.
    std::vector<int32_t> entries = plan.fold_entries;
    const size_t         stride  = 1 + group();
    for (size_t i = 0; i < entries.size(); ++i) {
        if (i % stride != 0 && kvfold::src_is_current(entries[i])) {
            entries[i] = kvfold::kSrcHidden;
        }
    }

    for (const auto & layer : layers) {
        const auto layout = side_layout(layer);
        int32_t    epoch  = 0;
        ggml_backend_tensor_get(layer.side, &epoch, layout.epoch_offset, sizeof(epoch));
        if (epoch == plan.epoch) {
            continue;
        }
        if (!kvfold::run_fold(layer, int32_t(group()), entries, plan.n_groups, plan.epoch)) {
            LLAMA_LOG_ERROR("%s: layer %d could not be repaired after an aborted computation\n", __func__, layer.il);
        }
    }
    plan.n_groups = 0;
}

const char * kvfold_metrics(void) {
    thread_local std::string text;
    text = kvfold_cache::metrics();
    return text.c_str();
}
