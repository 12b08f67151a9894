// Whether a micro-batch looks up (reads a selection of far groups) or reads everything: decided on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "kvfold/kvfold.h"

namespace kvfold {

constexpr uint32_t kLookupQueries = 16;  // tokens of a micro-batch that looks up, at most: it is a means for decoding
// From where on looking up is faster than reading everything, by where the cache is. The default of kvfold_config::min_context. A GPU
// reads so fast that scores and lists take most of what is saved, and no whole model has been timed with them: only when asked for.
constexpr int32_t kMinContextCpu = 4096;
constexpr int32_t kMinContextGpu = INT32_MAX;

constexpr int32_t kPoolTokens = 16384;  // what reindex layers choose from

// Fewer cells are not searched in two levels unless it is asked for.
constexpr int64_t kMinSpanCells = 65536;

struct FarCount {
    uint32_t tokens;
    uint32_t partial_groups;  // some cells far, some not: always read
};

// Counts in UbatchPlan::far_bits; groups of 2 .. 32 cells.
FarCount count_far(const std::vector<uint32_t> & far_bits, uint32_t group);

// Partial groups that lists have room for. They come from edits of the history, and a sequence rarely has many.
uint32_t partial_room(uint32_t n_seq_max);

// Whether a look-up among the groups of `n_kv` cells is to search in two levels, and how many spans it then takes.
bool    exceeds_pool(const kvfold_config & config, int64_t n_kv);
int32_t pool_spans(const kvfold_config & config);

// Spans that a cache keeps summaries of: all, if look-ups may ever search in two levels, or none.
uint32_t span_count(const kvfold_config & config, uint32_t n_tokens, uint32_t n_cells);

// Groups a list has room for, with the largest share of any layer; the same for all micro-batches, so that graphs can be reused.
int32_t list_capacity(const kvfold_config & config, float largest_share, uint32_t n_groups, uint32_t n_seq_max);
int32_t pool_capacity(const kvfold_config & config, uint32_t n_groups, uint32_t n_seq_max);

}  // namespace kvfold
