#include "cache/scoring.h"

#include <algorithm>

#include "cache/eviction.h"
#include "cache/graph_nodes.h"

namespace kvfold {

namespace {

// Tokens that have come since, in that of the owning sequences which has gone on least.
int32_t age_of(const llama_kv_cells & cells, uint32_t cell, uint32_t n_seq_max) {
    const auto & owners = cells.seq_get_all(cell);
    llama_pos    age    = INT32_MAX;
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (owners.test(s)) {
            age = std::min(age, cells.seq_pos_max(llama_seq_id(s)) - cells.pos_get(cell));
        }
    }
    return age;
}

}  // namespace

std::vector<float> make_scores(const kvfold_cache & cache, const llama_kv_cells & cells) {
    const uint32_t        n = cells.size();
    std::vector<uint32_t> far((n + 31) / 32, 0);
    std::vector<int32_t>  ages(n, 0);  // wanted by sampled scores only
    const uint32_t        kinds = cache.config.score;
    const bool            aged  = is_sampled(kinds);
    for (uint32_t c = 0; c < n; ++c) {
        if (!cells.is_empty(c) && cache.near.row_of(c) < 0) {
            far[c / 32] |= 1u << (c % 32);
            ages[c] = aged ? age_of(cells, c, cache.n_seq_max) : 0;
        }
    }
    std::vector<float> scores(size_t(kScoreRows) * n, 0.0f);
    const auto         put = [&scores, n](int row, const std::vector<float> & made) {
        std::copy(made.begin(), made.end(), scores.begin() + std::ptrdiff_t(row) * n);
        return !made.empty();
    };
    if ((kinds & (KVFOLD_SCORE_KEYDIFF | KVFOLD_SCORE_VNORM | KVFOLD_SCORE_ATTN)) != 0 &&
        !put(0, run_score(cache.layers, cache.config.group, far, (kinds & KVFOLD_SCORE_VNORM) != 0))) {
        return {};
    }
    for (const auto & kind : kSampledKinds) {
        if ((kinds & kind.flag) != 0 &&
            !put(kind.row, run_sampled(cache.layers, cache.config.group, kind.score, far, ages))) {
            return {};
        }
    }
    return scores;
}

}  // namespace kvfold
