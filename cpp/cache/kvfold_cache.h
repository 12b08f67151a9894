// What kvfold adds to one llama_kv_cache: memory of its own per layer, the near pool, and the pending micro-batch plan.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "cache/config.h"
#include "cache/eviction.h"
#include "cache/near_pool.h"
#include "cache/span_index.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "kvfold/kvfold.h"
#include "ops/kv_align.h"
#include "ops/kv_ops.h"

struct llama_context;
struct llama_ubatch;
struct llm_graph_context;

namespace kvfold {

struct CacheLayer {
    int32_t       il;       // layer of the model
    int32_t       last_il;  // last layer of the model that reads this cache layer (models that share keys and values)
    int32_t       n_head_kv;
    int32_t       head_dim;
    int32_t       n_spans    = 0;  // the same in all layers of a cache
    LayerMode     mode       = LayerMode::dense;
    float         lookup_max = 0.0f;   // share of the groups that the layer's look-ups read at most
    bool          makes_pool = false;  // a later layer is in reindex mode and takes this one's pool
    ggml_tensor * far_k;               // the cache's own root tensors, see attend_src
    ggml_tensor * far_v;
    int32_t       scale_group = kFp4ScaleGroup;
    ggml_tensor * tier;             // i8 [tier_layout().bytes], of which the next two are parts
    ggml_tensor * side;             // i8 [side_layout().bytes]
    ggml_tensor * align = nullptr;  // f64 [4, n_head], an ops/kv_align.h Alignment a head; only where it was asked for
    ggml_tensor * near;             // f16 [gqa, n_near, 2]
    ggml_tensor * queries = nullptr;  // f32 [query_stats_size()], when evictions ask for it
    // new_samples() for each of kSampledKinds that evictions ask for
    ggml_tensor * samples[std::size(kSampledKinds)] = {};
    ggml_tensor * received =
        nullptr;  // during a second reading (cache/compact.cpp): f32 [n_cells, n_head_kv], or of what would be lost
                  // f64 [4, n_head], an ops/kv_align.h Alignment a head
    ggml_tensor * k_cur   = nullptr;  // rows of the micro-batch in the graph being built
    ggml_tensor * v_cur   = nullptr;
    float         scale   = 1.0f;  // of scores of attention, as the last graph had it
    float         softcap = 0.0f;
};

// A tensor for samples of the queries of a layer (ops/kv_sample.h): f16 [n_head * head_dim, 1 + SampleRule::rows].
ggml_tensor * new_samples(ggml_context * ctx, int64_t n_head, int64_t head_dim, SampledScore score);

// A tensor for an Alignment (ops/kv_align.h) of every head, and what is in one.
ggml_tensor *          new_alignment(ggml_context * ctx, int64_t n_head);
std::vector<Alignment> read_alignment(const ggml_tensor * t);

}  // namespace kvfold

struct kvfold_cache {
    kvfold_cache(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max);
    ~kvfold_cache();
    kvfold_cache(const kvfold_cache &)             = delete;
    kvfold_cache & operator=(const kvfold_cache &) = delete;

    uint32_t group() const { return uint32_t(config.group); }
    uint32_t n_groups() const { return n_cells / group(); }

    kvfold::SideLayout side_layout(const kvfold::CacheLayer & layer) const;

    const kvfold_config config;
    const uint32_t      n_ctx;  // tokens that fit
    const uint32_t      n_seq_max;
    const uint32_t      n_cells;  // cells that hold them

    std::vector<kvfold::CacheLayer> layers;
    kvfold::NearPool                near;
    kvfold::UbatchPlan              plan;  // of the micro-batch whose graph runs next (or ran last)

    // Hadamard sizes as llama.cpp has chosen them; 0: none. Whether the graph that is being built leaves the rotation to our
    // nodes, instead of having nodes of its own for it: that saves launches, but with many queries is work done twice.
    kvfold::Rotation rotation{};
    bool             fused_rotation = false;
    int32_t          fused_queries  = 0;  // a micro-batch of up to so many tokens does

    const llama_context * context = nullptr;  // whose cache it is; null until that is complete

    bool    one_device = false;  // all layers are on the same one, which is not the CPU
    int32_t final_il   = 0;      // the greatest last_il

    // Look-up. A layer that has no room for one is dense, so that all of them can be without `looks_up`.
    bool     looks_up       = false;
    int32_t  min_context    = 0;  // shorter sequences are read whole
    uint32_t lookup_queries = 0;  // a micro-batch of up to so many tokens may
    int32_t  list_capacity  = 0;  // groups
    int32_t  pool_capacity  = 0;

    // The search in two levels. There are spans where the settings ask for it and all layers are in host memory.
    kvfold::SpanIndex spans;

    // SelectArgs::most_spans of a look-up among `n_kv` cells; 0: it looks at all groups.
    int32_t most_spans(int64_t n_kv) const;

    // Whether there is room for less than n_ctx tokens.
    bool evicts() const { return kvfold::stored_tokens(config, n_ctx, n_seq_max) < n_ctx; }

    kvfold::EvictionRules eviction;

    uint64_t fingerprint = 0;  // of the model, for state files

    // Counters of kvfold_stats.
    uint64_t folded_tokens = 0;
    uint64_t folds         = 0;
    uint64_t near_bytes    = 0;
    uint64_t side_bytes    = 0;
    uint64_t far_bytes     = 0;
    uint64_t f16_bytes     = 0;

    uint64_t lookup_steps    = 0;
    uint64_t dense_fallbacks = 0;
    bool     warned          = false;  // of a large look-up share

    uint64_t evicted_tokens = 0;
    uint64_t evictions      = 0;

    // A second pass over a text is running, the how manieth; 0: none. Its micro-batches read the cache, and leave no rows.
    uint32_t second_pass = 0;
    // i32 [n_cells / 32] bits of cells that might be dropped, if that is what the pass is about; else null.
    ggml_tensor * dropped = nullptr;

    // A beginning of a sequence that was compacted: its length, and what it has lost by that. By sequence; a length of 0: none.
    struct Compacted {
        llama_pos end  = 0;
        int32_t   lost = 0;
    };
    std::vector<Compacted> compacted;
    // Sequences may lack tokens that were dropped, here or before their state was saved.
    bool has_dropped() const { return evicts() || evicted_tokens > 0 || restored_gaps; }
    bool restored_gaps = false;
    // A micro-batch puts another text in the place of the end of a compacted beginning, or of more than that.
    void forget_compacted(const llama_ubatch & ubatch);

    // Groups that look-ups of all layers saw, and read, since the last clear. Waits for the layers' devices.
    struct Lookups {
        uint64_t visible;
        uint64_t read;
    };
    Lookups lookups() const;
    Lookups lookups(const kvfold::CacheLayer & layer) const;

    // kvfold_metrics()
    static std::string metrics();

    // kvfold_get_alignment()
    std::vector<kvfold_alignment> alignment() const;

    // Takes note of what the graph of `plan` has done, and finishes its folds in layers that it did not reach when aborted. After an
    // abort the micro-batch's tokens are removed, so its cells are empty now or among `reused`, the cells of the next micro-batch.
    void repair(const llama_kv_cells & cells, const std::vector<uint32_t> & reused);

    // The cache that owns a root key tensor, and the layer; null for other tensors. (Attention is built from tensors alone.)
    static kvfold_cache * find(const ggml_tensor * far_k, size_t & layer);
    void                  publish();
};
