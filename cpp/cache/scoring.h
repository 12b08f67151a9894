// Scores of all tokens of a cache that may be evicted (ops/kv_score.h, ops/kv_sample.h), as order_by_score() takes them.
#pragma once

#include <vector>

#include "cache/kvfold_cache.h"
#include "llama-kv-cells.h"

namespace kvfold {

// By the scores that the cache is configured with. Empty on failure. Waits for the layers' backend.
std::vector<float> make_scores(const kvfold_cache & cache, const llama_kv_cells & cells);

// [n_cells] how new every key is (kNovelty), whatever the cache is configured with. Empty on failure.
std::vector<float> make_novelty(const kvfold_cache & cache, const llama_kv_cells & cells);

}  // namespace kvfold
