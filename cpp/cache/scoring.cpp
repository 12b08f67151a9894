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

// Bits of the cells that are scored.
std::vector<uint32_t> far_bits(const kvfold_cache & cache, const llama_kv_cells & cells) {
    std::vector<uint32_t> far((cells.size() + 31) / 32, 0);
    for (uint32_t c = 0; c < cells.size(); ++c) {
        far[c / 32] |= uint32_t(!cells.is_empty(c) && cache.near.row_of(c) < 0) << (c % 32);
    }
    return far;
}

}  // namespace

std::vector<float> make_novelty(const kvfold_cache & cache, const llama_kv_cells & cells) {
    std::vector<float> scores = run_score(cache.layers, cache.config.group, far_bits(cache, cells), false);
    if (!scores.empty()) {
        scores.erase(scores.begin(), scores.begin() + std::ptrdiff_t(kNovelty) * cells.size());
        scores.resize(cells.size());
    }
    return scores;
}

std::vector<float> make_scores(const kvfold_cache & cache, const llama_kv_cells & cells) {
    const uint32_t              n   = cells.size();
    const std::vector<uint32_t> far = far_bits(cache, cells);
    std::vector<int32_t>        ages(n, 0);
    const uint32_t              kinds = cache.config.score;
    for (uint32_t c = 0; is_sampled(kinds) && c < n; ++c) {
        ages[c] = cells.is_empty(c) ? 0 : age_of(cells, c, cache.n_seq_max);
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
