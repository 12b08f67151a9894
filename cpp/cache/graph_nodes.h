// Graph nodes of a kvfold cache: construction, the inputs they read, and a fold outside a graph.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kvfold_cache.h"
#include "ggml.h"

namespace kvfold {

// Folds `entries` (FoldArgs::plan) of one layer now, on the backend that holds it, without rows of a micro-batch.
bool run_fold(const CacheLayer & layer, int32_t group, const std::vector<int32_t> & entries, int32_t n_groups,
              int32_t epoch);

// Scores the cells of `far_bits` (ScoreArgs, as is `sizes`), which all cells of the layers have a place in, and adds layers
// up: [kScoreKinds][n_cells]; empty on failure. Runs on the layers' devices, which must have nothing left to do.
std::vector<float> run_score(const std::vector<CacheLayer> & layers, int32_t group,
                             const std::vector<uint32_t> & far_bits, bool sizes);

// The same for scores from kept queries, [n_cells]; `ages` is SampledArgs::age.
std::vector<float> run_sampled(const std::vector<CacheLayer> & layers, int32_t group, SampledScore score,
                               const std::vector<uint32_t> & far_bits, const std::vector<int32_t> & ages);

// An attend node with placeholder sources of the right types and shapes, to ask a device whether it supports the operation.
ggml_tensor * probe_attend(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group);

// The same for a select node, which chooses from the pool of another layer if there is one.
ggml_tensor * probe_select(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group,
                           bool pool);

// The same for the nodes that scores are made by: score and observe, sampled and sample.
ggml_tensor * probe_score(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group);
ggml_tensor * probe_observe(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group);
ggml_tensor * probe_sampled(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group);
ggml_tensor * probe_sample(ggml_context * ctx, int32_t n_head, int32_t n_head_kv, int32_t head_dim, int32_t group);

}  // namespace kvfold
