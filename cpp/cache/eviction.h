// A cache with room for a part of its context (kv type fp4_csa2_ced): how large it is, and which groups it gives up when it is
// full. Decided on the host, from positions and from scores that a graph node makes (ops/kv_score.h).
//
// Whole groups are evicted from all layers at once, because cells are shared by the layers. Survivors keep their positions, so
// sequences get gaps. Never evicted are
//   the first `sinks` tokens of a sequence, and its first token in any case
//   the exact tier, and the youngest tokens (EvictionRules::young)
//   pinned ranges
//   more of a sequence than leaves `keep` of its length: so n_ctx tokens always fit, and no sequence pays for others
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <vector>

#include "cache/cell_groups.h"
#include "cache/near_pool.h"
#include "kvfold/kvfold.h"
#include "llama-kv-cells.h"
#include "ops/kv_sample.h"
#include "ops/kv_score.h"

namespace kvfold {

bool evicts(const kvfold_config & config);

// Tokens that a cache has room for: n_ctx, or, when it evicts, its share and the exact tier.
uint32_t stored_tokens(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max);

// Youngest tokens of a sequence that are not evicted: a window of 512, less in small caches, and the tail.
uint32_t young_tokens(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max);

// Tokens of a micro-batch, at most, for which room can be made.
uint32_t largest_ubatch(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max);

// Positions below `end` that a sequence lacks.
int32_t count_evicted(const llama_kv_cells & cells, llama_seq_id seq, llama_pos end);

struct Pin {
    llama_seq_id seq;
    llama_pos    begin;
    llama_pos    end;
};

struct EvictionRules {
    uint32_t         group;
    uint32_t         n_seq_max;
    float            keep;
    llama_pos        first;  // positions below stay
    llama_pos        young;  // as many last positions of a sequence stay
    std::vector<Pin> pins;
};

// Groups that may be evicted (`near` may be null: then what is exact is judged by age alone), by age: those whose youngest token is the furthest from the end of its sequences first.
std::vector<uint32_t> evictable_groups(const llama_kv_cells & cells, const NearPool * near,
                                       const EvictionRules & rules);

// Scores [n_cells] by group: that of its best token.
std::vector<float> group_scores(const std::vector<uint32_t> & groups, const llama_kv_cells & cells, uint32_t group,
                                const float * score);

// Indices of values in ascending order; of equals, the first one first.
template <typename T>
std::vector<size_t> rank_order(const std::vector<T> & values) {
    std::vector<size_t> order(values.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
    return order;
}

// Groups in the order that indices of them have.
std::vector<uint32_t> take(const std::vector<uint32_t> & groups, const std::vector<size_t> & order);

// Sorts groups by a score (kvfold_score, several: by the sum of the ranks), the lowest first; of equals, the older first.
// `groups` come by age; `scores` is [kScoreRows][n_cells], ScoreKind and MoreScores, of which those that are asked for are read.
// A group's score is that of its best token.
std::vector<uint32_t> order_by_score(const std::vector<uint32_t> & groups, const llama_kv_cells & cells, uint32_t group,
                                     uint32_t kinds, const std::vector<float> & scores);

// Scores that order_by_score() knows beside those of ScoreKind.
enum MoreScores : int { kLastAttention = kScoreKinds, kWindowAttention, kScoreRows };

// Those that are made from queries that were kept.
struct SampledKind {
    uint32_t     flag;  // kvfold_score
    SampledScore score;
    MoreScores   row;
};
constexpr SampledKind kSampledKinds[] = {{KVFOLD_SCORE_SNAPKV, SampledScore::last, kLastAttention},
                                         {KVFOLD_SCORE_ENTROPY, SampledScore::windows, kWindowAttention}};

// Is one of those among `kinds` (kvfold_score)?
inline bool is_sampled(uint32_t kinds) {
    return std::any_of(std::begin(kSampledKinds), std::end(kSampledKinds),
                       [kinds](const SampledKind & kind) { return (kinds & kind.flag) != 0; });
}

// Evicts from `groups`, in their order, what the rules allow. Returns the number of tokens.
uint32_t thin_out(llama_kv_cells & cells, const EvictionRules & rules, const std::vector<uint32_t> & groups);

// Makes room for a micro-batch by evicting from `groups`, in their order. Returns its cells, empty when there is no room, and
// adds up in `evicted` what it has removed from `cells`.
std::vector<uint32_t> make_room(llama_kv_cells & cells, const EvictionRules & rules,
                                const std::vector<uint32_t> & groups, uint32_t hint,
                                const std::vector<TokenRef> & tokens, uint64_t & evicted);

}  // namespace kvfold
