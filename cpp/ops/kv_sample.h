// Scores for eviction from queries that were kept: some of those that a layer has seen lately (kv_sample), and how much attention they
// give to the far cells (kv_sampled).
#pragma once

#include "ops/kv_ops.h"

namespace kvfold {

// Which queries are kept: of every `every` consecutive ones the first, and of those the last `rows`.
struct SampleRule {
    int32_t every;
    int32_t rows;
};

// Samples of a layer, f16 [1 + rows][n_head][head_dim], in the rotated basis. The first row is a header: every head's part begins with an
// int64, the number N of queries seen (heads are watched independently of each other). Query number n, a multiple of `every`, is in row 1 + n / every % rows, and its age is N - 1 - n.
struct SampleArgs : QueryRows {
    SampleRule rule;
    uint16_t * samples;  // updated
};
void kv_sample(const SampleArgs & a, const Threads & t);

// A query sees the far cells whose age is its own or more. Its attention p is the softmax over them.
enum class SampledScore {
    // The mean over samples and heads of n * p[c], n the number of far cells (the observation window of Li et al., "SnapKV", 2024,
    // of kLastQueries queries).
    last,
    // Attention by windows, from the summaries: over groups g that have far cells, with the logarithm of their number added to the score
    // of the summary; a group is as old as its youngest far cell. m[w][j][g] is the mean over the samples of window w, which has the
    // ages kStride * w .. kStride * w + kWindow - 1, of what head j gives. All far cells of g have
    //   n * sum over w, j of 2^-w * (1 - H[w][j]) * m[w][j][g] / (sum over w of 2^-w * number of heads)
    // n is the number of groups, H the entropy of m[w][j] divided by log n; windows without samples that see anything are left out.
    windows,
};

constexpr int32_t    kWindow = 512, kStride = 256;
constexpr SampleRule kLastQueries = {1, 32}, kWindowQueries = {32, 48};

constexpr SampleRule sample_rule(SampledScore score) {
    return score == SampledScore::last ? kLastQueries : kWindowQueries;
}

struct SampledArgs {
    LayerMemory      mem;  // near rows and spreads are not read
    SampledScore     score;
    const uint32_t * far_bits;  // [(n_kv + 31) / 32] cells to be scored; their rows must be far
    const int32_t *  age;       // [n_kv] tokens since, of far cells
    int32_t          n_kv;
    const uint16_t * samples;  // as sample_rule() has it
    int32_t          n_head;
    float            scale;
    float            softcap;
    const float *    before;  // [n_kv] sums over earlier layers, or null
    float *          scores;  // [n_kv], may be `before`; nothing is added for cells that are not scored
};
size_t kv_sampled_scratch(const SampledArgs & a, int nth);
void   kv_sampled(const SampledArgs & a, const Threads & t);

}  // namespace kvfold
