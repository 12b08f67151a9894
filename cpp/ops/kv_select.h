// Look-up: which groups of the far tier a decode step reads (kv_select), and attention over those (kv_attend_sparse).
//
// Vocabulary (beside that of kv_ops.h), for one query and one KV head:
//   complete group   every one of its `group` cells has its far bit set
//   partial group    some have it and some have not: read whatever the query is, outside of the budget
//   candidate        a complete group whose first cell is not -inf in the query's mask row; with a pool: and in the pool
//   pool             groups that another look-up has listed (SelectArgs::pool), or those of some spans (SelectArgs::ready)
#pragma once

#include "ops/kv_ops.h"

namespace kvfold {

// How many candidates are taken. With V groups that would be candidates without a pool and C that are (C = V: no pool),
//   most  = min(C, max(ceil(lookup_max * V), ceil(min_tokens / group)))      the product in f32
//   least = min(C, max(ceil(lookup_min * V), ceil(min_tokens / group)))
// neither of them above floor(max_tokens / group) unless max_tokens is 0, and between them as many whole bins (see kv_select) as leave at most `threshold` of the estimated mass unread; a threshold
// of 0 is `most`.
struct LookupBudget {
    float   lookup_min;  // 0 .. 1
    float   lookup_max;  // lookup_min .. 1
    float   threshold;   // 0 .. 1
    int32_t min_tokens;
    int32_t max_tokens;  // 0: no bound
};

// Keys that spread alike in all channels would make it 0.5. Real ones spread more along the directions that queries ask
// about; 0.75 recalls most (bench/sparse_quality.py).
constexpr float kSpreadWeight = 0.75f;

constexpr int kSelectBins = 2048;
constexpr int kBinsPerNat = 64;

// Groups of one (query, KV head) in memory: how many, then their numbers, ascending; the rest of the `capacity` is not
// written and must not be read.
constexpr int64_t group_list_stride(int32_t capacity) { return 1 + int64_t(capacity); }

// kv_select: for each of a few queries (decoding) and each KV head, the groups whose far rows are worth reading.
//   e[g][j] = cap(scale * q_j . S_g) + kSpreadWeight * scale^2 * |q_j|^2 * spread_g     for query head j of the KV head
// is the log of the attention that group g should get: the mean score, and what the spread of the keys adds to the mean of
// the exponentials. The heads of a KV head share one selection, by the sum of their estimated probabilities:
//   p[g]   = log sum over j of exp(e[g][j] - log sum over candidates c of exp(e[c][j]))
//   bin[g] = min(2047, floor(-64 * p[g]) - min over candidates c of floor(-64 * p[c]))
// Candidates are taken in order of bin, and within a bin from the highest group number (the most recent) down. Bins make
// the result independent of the order in which sums are made, but for scores on an edge. A bin of n groups counts as a
// mass of n * exp(-bin / 64). A NaN score sorts last.
//
// A list holds the taken candidates and all partial groups. Should those not fit `capacity` the partial groups go first,
// then candidates in order; callers that cannot accept this check the number of partial groups themselves.
//
// In two levels: with `ready`, spans are scored first and groups only where spans are good. A span that is ready is scored by its
// summary and spread as a group is, for the same query heads, unless its first cell is -inf in the query's mask row; then it is
// as if none of its groups were there. Spans are put into bins among themselves and taken in order of bin and from the highest number
// down, as candidates are, until there are `most_spans` (or none left). The pool is the groups of those, of spans that are not
// ready, and of cells behind the last span.
//
// What is left unread is estimated too, for a stand-in (see kv_attend_sparse); of candidates only, so nothing outside of a pool:
//   unread[j] = log( group * sum over candidates g that are not taken of exp(e[g][j]) ), -inf when all are taken
struct SelectArgs {
    LayerMemory      mem;  // far_k, far_v and near rows are not read
    Rotation         rot;
    const uint32_t * far_bits;  // as in AttendArgs
    int32_t          n_kv;
    const float *    q;  // as in AttendArgs
    int64_t          q_stride_query;
    int64_t          q_stride_head;
    int32_t          n_q;
    int32_t          n_head;
    const uint16_t * mask;  // f16 [n_q][mask_stride] or null
    int64_t          mask_stride;
    float            scale;
    float            softcap;

    LookupBudget    budget;
    const int32_t * pool;  // lists [n_q][n_head_kv][1 + pool_capacity] that candidates must be in, or null
    int32_t         pool_capacity;

    // Two levels; not together with `pool`, and only where mem.n_spans > 0.
    const uint32_t *
            ready;  // [(mem.n_spans + 31) / 32] bit s % 32 of word s / 32: span s is complete and summarised; or null
    int32_t most_spans;  // >= 1

    int32_t *  selected;  // lists [n_q][n_head_kv][1 + capacity]
    int32_t    capacity;
    uint64_t * counters;  // [2] candidates without a pool (V), candidates taken: added to; or null
    float *    unread;    // [n_q][n_head]; or null
};
size_t kv_select_scratch(const SelectArgs & a, int nth);
void   kv_select(const SelectArgs & a, const Threads & t);

// Of the estimated mass that is left unread, the share that the mean value stands in for. Were unread values like any other,
// it would be 1; but they are also like those that the same query has found (bench/sparse_quality.py).
constexpr float kStandIn = 0.5f;

// And no more than this share of what was read. Estimates can be far too high: keys of a group that differ much have a large spread, and the
// mean of the exponentials is taken to grow with it without end (docs/decisions.md). A sixteenth is nearly always enough for what is really
// unread, and too little to do harm.
constexpr float kMostStandIn = 1.0f / 16.0f;

// kv_attend_sparse: kv_attend that reads, of the far cells, only those of the groups listed for the query and KV head.
//
// With `unread` the mean value stands in for the rest: with M the mass that head j has read (its softmax sum, without sinks, in
// units of exp(score)) and v the plain mean of the values of all cells that the query reads for the KV head,
//   w = min(kStandIn * exp(unread[j]), kMostStandIn * M)
// is added to the sum and w * v to the weighted values.
struct SparseAttendArgs {
    AttendArgs      attend;
    const int32_t * selected;  // lists [n_q][n_head_kv][1 + capacity]
    int32_t         capacity;
    const float *   unread;  // [n_q][n_head], as kv_select makes it; null: nothing stands in
};
size_t kv_attend_sparse_scratch(const SparseAttendArgs & a, int nth);
void   kv_attend_sparse(const SparseAttendArgs & a, const Threads & t);

}  // namespace kvfold
