#include "cache/eviction.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cache/config.h"

namespace kvfold {

namespace {

constexpr uint32_t kYoungTokens = 512;

uint32_t share_of(const kvfold_config & config, uint32_t n_ctx) {
    return uint32_t(std::ceil(double(config.keep) * double(n_ctx)));
}

uint32_t exact_tokens(const kvfold_config & config, uint32_t n_seq_max) {
    return n_seq_max * uint32_t(config.tail + config.group - 1 + config.sinks);
}

}  // namespace

bool evicts(const kvfold_config & config) { return config.type == KVFOLD_TYPE_FP4_CSA2_CED && config.keep < 1.0f; }

uint32_t stored_tokens(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max) {
    return evicts(config) ? std::min(n_ctx, share_of(config, n_ctx) + exact_tokens(config, n_seq_max)) : n_ctx;
}

uint32_t young_tokens(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max) {
    const uint32_t window = std::min(kYoungTokens, share_of(config, n_ctx) / (4 * n_seq_max));
    return std::max(window, uint32_t(config.tail + config.group));
}

uint32_t largest_ubatch(const kvfold_config & config, uint32_t n_ctx, uint32_t n_seq_max) {
    const uint32_t stored = stored_tokens(config, n_ctx, n_seq_max);
    if (stored == n_ctx) {
        return n_ctx;
    }
    // Half of what can be evicted from a full cache.
    const uint32_t kept =
        n_seq_max * (young_tokens(config, n_ctx, n_seq_max) + uint32_t(config.sinks + 2 * config.group));
    return std::max(16u, stored > kept ? (stored - kept) / 2 : 0);
}

int32_t count_evicted(const llama_kv_cells & cells, llama_seq_id seq, llama_pos end) {
    const llama_pos last = cells.seq_pos_max(seq);
    if (last < 0) {
        return 0;
    }
    end               = std::min(end, last + 1);
    const auto & held = cells.seq_pos_get(seq);
    const auto   n    = std::distance(held.begin(), held.lower_bound({end, 0}));
    return std::max<int32_t>(0, end - cells.seq_pos_min(seq) - int32_t(n));
}

namespace {

// How far a group is from the end of the sequences that own it, at least; -1: it must stay.
llama_pos age_of(const llama_kv_cells & cells, const NearPool * near, const EvictionRules & rules, uint32_t g) {
    llama_pos age = -1;
    for (uint32_t c = g * rules.group; c < (g + 1) * rules.group; ++c) {
        if (cells.is_empty(c)) {
            continue;
        }
        const llama_pos pos = cells.pos_get(c);
        if ((near != nullptr && near->row_of(c) >= 0) || pos < rules.first) {
            return -1;
        }
        const auto & owners = cells.seq_get_all(c);
        for (llama_seq_id s = 0; s < llama_seq_id(rules.n_seq_max); ++s) {
            if (!owners.test(size_t(s))) {
                continue;
            }
            const llama_pos mine = cells.seq_pos_max(s) - pos;
            if (mine < rules.young || pos == cells.seq_pos_min(s) ||
                std::any_of(
                    rules.pins.begin(), rules.pins.end(),
                    [&](const Pin & p) { return p.seq == s && p.begin <= pos && pos < p.end; })) {
                return -1;
            }
            age = age < 0 ? mine : std::min(age, mine);
        }
    }
    return age;
}

}  // namespace

std::vector<uint32_t> evictable_groups(const llama_kv_cells & cells, const NearPool * near,
                                       const EvictionRules & rules) {
    std::vector<std::pair<llama_pos, uint32_t>> found;
    for (uint32_t g = 0; g < cells.size() / rules.group; ++g) {
        const llama_pos age = age_of(cells, near, rules, g);
        if (age >= 0) {
            found.emplace_back(-age, g);
        }
    }
    std::sort(found.begin(), found.end());
    std::vector<uint32_t> groups;
    for (const auto & [age, g] : found) {
        groups.push_back(g);
    }
    return groups;
}

std::vector<float> group_scores(const std::vector<uint32_t> & groups, const llama_kv_cells & cells, uint32_t group,
                                const float * score) {
    std::vector<float> best(groups.size(), -INFINITY);
    for (size_t i = 0; i < groups.size(); ++i) {
        for (uint32_t c = groups[i] * group; c < (groups[i] + 1) * group; ++c) {
            if (!cells.is_empty(c) && score[c] > best[i]) {  // a NaN is no score
                best[i] = score[c];
            }
        }
    }
    return best;
}

std::vector<uint32_t> take(const std::vector<uint32_t> & groups, const std::vector<size_t> & order) {
    std::vector<uint32_t> sorted(order.size());
    std::transform(order.begin(), order.end(), sorted.begin(), [&](size_t i) { return groups[i]; });
    return sorted;
}

std::vector<uint32_t> order_by_score(const std::vector<uint32_t> & groups, const llama_kv_cells & cells, uint32_t group,
                                     uint32_t kinds, const std::vector<float> & scores) {
    const struct {
        uint32_t flag;
        int      row;
    } rows[] = {{KVFOLD_SCORE_KEYDIFF, kNovelty},
                {KVFOLD_SCORE_VNORM, kSize},
                {KVFOLD_SCORE_ATTN, kAttention},
                {KVFOLD_SCORE_SNAPKV, kLastAttention},
                {KVFOLD_SCORE_ENTROPY, kWindowAttention}};

    const size_t        n = groups.size();
    std::vector<size_t> rank_sum(n, 0);
    for (size_t i = 0; (kinds & KVFOLD_SCORE_RECENT) != 0 && i < n; ++i) {
        rank_sum[i] += i;  // they come by age
    }
    for (const auto & row : rows) {
        if ((kinds & row.flag) == 0) {
            continue;
        }
        const float *             score = scores.data() + size_t(row.row) * cells.size();
        const std::vector<size_t> order = rank_order(group_scores(groups, cells, group, score));
        for (size_t rank = 0; rank < n; ++rank) {
            rank_sum[order[rank]] += rank;
        }
    }
    return take(groups, rank_order(rank_sum));
}

namespace {

// How many more tokens every sequence may lose, once `tokens` are in.
std::vector<int64_t> allowances(const llama_kv_cells & cells, const EvictionRules & rules,
                                const std::vector<TokenRef> & tokens) {
    std::vector<int64_t> allowed(rules.n_seq_max, 0);
    for (uint32_t s = 0; s < rules.n_seq_max; ++s) {
        const auto seq  = llama_seq_id(s);
        llama_pos  last = cells.seq_pos_max(seq);
        if (last < 0) {
            continue;
        }
        auto held = int64_t(cells.seq_pos_get(seq).size());
        for (const TokenRef & token : tokens) {
            if (token.seqs.test(s)) {
                held += 1;
                last = std::max(last, token.pos);
            }
        }
        const double length = double(last - cells.seq_pos_min(seq)) + 1.0;
        allowed[s]          = held - int64_t(std::ceil(double(rules.keep) * length));
    }
    return allowed;
}

// Evicts a group if its owners can spare it. Returns the number of its tokens.
uint32_t evict(llama_kv_cells & cells, const EvictionRules & rules, uint32_t g, std::vector<int64_t> & allowed) {
    std::vector<int64_t> lost(rules.n_seq_max, 0);
    uint32_t             n = 0;
    for (uint32_t c = g * rules.group; c < (g + 1) * rules.group; ++c) {
        n += !cells.is_empty(c);
        for (uint32_t s = 0; s < rules.n_seq_max; ++s) {
            lost[s] += !cells.is_empty(c) && cells.seq_has(c, llama_seq_id(s));
        }
    }
    for (uint32_t s = 0; s < rules.n_seq_max; ++s) {
        if (lost[s] > 0 && lost[s] > allowed[s]) {
            return 0;
        }
    }
    for (uint32_t s = 0; s < rules.n_seq_max; ++s) {
        allowed[s] -= lost[s];
    }
    for (uint32_t c = g * rules.group; c < (g + 1) * rules.group; ++c) {
        if (!cells.is_empty(c)) {
            cells.rm(c);
        }
    }
    return n;
}

}  // namespace

uint32_t thin_out(llama_kv_cells & cells, const EvictionRules & rules, const std::vector<uint32_t> & groups) {
    std::vector<int64_t> allowed = allowances(cells, rules, {});
    uint32_t             n       = 0;
    for (const uint32_t g : groups) {
        n += evict(cells, rules, g, allowed);
    }
    return n;
}

std::vector<uint32_t> make_room(llama_kv_cells & cells, const EvictionRules & rules,
                                const std::vector<uint32_t> & groups, uint32_t hint,
                                const std::vector<TokenRef> & tokens, uint64_t & evicted) {
    std::vector<int64_t> allowed = allowances(cells, rules, tokens);
    const uint32_t       free    = cells.size() - cells.get_used();
    // Tokens beyond those of the micro-batch: scoring a whole cache costs as much as several tokens that read all of it.
    const uint32_t ahead  = std::max(std::min(128u, cells.size() / 16), cells.size() / 64);
    const auto     wanted = int64_t(tokens.size()) + ahead - free;

    int64_t wish = std::max<int64_t>(wanted, rules.group);
    size_t  next = 0;
    for (;;) {
        for (; next < groups.size() && wish > 0; ++next) {
            const uint32_t n = evict(cells, rules, groups[next], allowed);
            wish -= n;
            evicted += n;
        }
        std::vector<uint32_t> found = place_tokens(cells, rules.group, hint, tokens);
        if (!found.empty() || next == groups.size()) {
            return found;
        }
        wish =
            std::max<int64_t>(rules.group, int64_t(tokens.size()) / 16);  // free cells, but not where they can be used
    }
}

}  // namespace kvfold
