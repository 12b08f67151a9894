// What eviction asks of the operations: how much each far token is likely to matter (kv_score), and what queries look like on
// average, which one of the answers is made from (kv_observe).
//
// Scores are only compared with each other: a low one says that the token can go. Nothing reads rows on the host.
#pragma once

#include "ops/kv_ops.h"

namespace kvfold {

// Kinds of scores, each one row of the result. For a far cell c, with keys and values as attention reads them, averages over
// KV heads h (for attention: heads j), summed over layers:
//   novelty    1 - cos(k[c][h], mean of the summaries of all far cells)     a key unlike the others is one that is looked for
//              (the idea of KeyDiff: Park et al., 2025)
//   size       |v[c][h]| / mean over far cells of |v[h]|                    a large value changes what it is added to
//   attention  n * p[c][j], p = softmax over the n far cells of             attention by a query as the last ones have been
//              cap(scale * mean_j . k) + scale^2 / 2 * sum over channels of variance_j * k^2
//              (the logarithm of the mean of exp(scale * q . k) over queries q with that mean and variance;
//              Devoto et al., "Expected Attention", 2025)
enum ScoreKind : int { kNovelty = 0, kSize = 1, kAttention = 2, kScoreKinds = 3 };

// Statistics of the queries of a layer, in the rotated basis: f32 [query_stats_size()].
//   [0]                       weight W of the queries seen
//   [1 ..]     [n_head][dim]  weighted sums of q
//   [...]      [n_head][dim]  weighted sums of q^2
// The newest query counts 1, every one before it kQueryDecay times the one after it, whatever the micro-batches are.
constexpr float kQueryDecay = 1.0f - 1.0f / 512.0f;

constexpr int64_t query_stats_size(int64_t n_head, int64_t head_dim) { return 1 + 2 * n_head * head_dim; }

struct ScoreArgs {
    LayerMemory      mem;       // near rows and spreads are not read
    const uint32_t * far_bits;  // [(n_kv + 31) / 32] cells to be scored; their rows must be far
    int32_t          n_kv;
    const float *    queries;  // statistics, or null or with a weight of 0: the attention is 0
    int32_t          n_head;
    float            scale;
    float            softcap;
    bool             sizes;   // the kind kSize is wanted: it alone takes values. Without, nothing need be added to it
    const float *    before;  // [kScoreKinds][n_kv] sums over earlier layers, or null
    float *          scores;  // [kScoreKinds][n_kv], may be `before`; nothing is added for cells that are not scored
};
size_t kv_score_scratch(const ScoreArgs & a, int nth);
void   kv_score(const ScoreArgs & a, const Threads & t);

struct ObserveArgs : QueryRows {
    float * queries;  // statistics, updated
};
size_t kv_observe_scratch(const ObserveArgs & a, int nth);
void   kv_observe(const ObserveArgs & a, const Threads & t);

}  // namespace kvfold
