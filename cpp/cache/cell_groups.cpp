#include "cache/cell_groups.h"

#include <unordered_map>

namespace kvfold {

namespace {

constexpr uint32_t kNone = UINT32_MAX;

// The cells as they will be once the tokens placed so far are in.
class Placement {
  public:
    Placement(const llama_kv_cells & cells, uint32_t group) : cells_(cells), group_(group) {}

    bool is_free(uint32_t cell) const { return cells_.is_empty(cell) && placed_.find(cell) == placed_.end(); }

    bool is_group_free(uint32_t g) const {
        for (uint32_t c = g * group_; c < (g + 1) * group_; ++c) {
            if (!is_free(c)) {
                return false;
            }
        }
        return true;
    }

    // Everything in the group belongs to exactly these sequences (true for an empty group).
    bool is_owned_by(uint32_t g, const llama_kv_cells::seq_set_t & seqs) const {
        for (uint32_t c = g * group_; c < (g + 1) * group_; ++c) {
            const auto it = placed_.find(c);
            if (it != placed_.end() ? it->second->seqs != seqs
                                    : (!cells_.is_empty(c) && cells_.seq_get_all(c) != seqs)) {
                return false;
            }
        }
        return true;
    }

    void put(uint32_t cell, const TokenRef & token) { placed_.emplace(cell, &token); }

  private:
    const llama_kv_cells &                         cells_;
    uint32_t                                       group_;
    std::unordered_map<uint32_t, const TokenRef *> placed_;
};

llama_seq_id first_of(const llama_kv_cells::seq_set_t & seqs) {
    for (llama_seq_id s = 0; s < LLAMA_MAX_SEQ; ++s) {
        if (seqs.test(size_t(s))) {
            return s;
        }
    }
    return 0;
}

// The cell of position `pos` in sequence `seq`.
uint32_t find_cell(const llama_kv_cells & cells, llama_seq_id seq, llama_pos pos) {
    const auto & by_pos = cells.seq_pos_get(seq);
    const auto   it     = by_pos.lower_bound({pos, 0});
    return it != by_pos.end() && it->first == pos ? it->second : kNone;
}

}  // namespace

std::vector<TokenRef> tokens_of(const llama_ubatch & ubatch) {
    std::vector<TokenRef> tokens(ubatch.n_tokens);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        tokens[i].pos = ubatch.pos[i];
        for (int32_t s = 0; s < ubatch.n_seq_id[i]; ++s) {
            tokens[i].seqs.set(size_t(ubatch.seq_id[i][s]));
        }
    }
    return tokens;
}

std::vector<uint32_t> place_tokens(const llama_kv_cells & cells, uint32_t group, uint32_t hint,
                                   const std::vector<TokenRef> & tokens) {
    const uint32_t n_groups = cells.size() / group;

    Placement             placement(cells, group);
    std::vector<uint32_t> out;
    out.reserve(tokens.size());

    // The last token placed here for each sequence; a micro-batch mostly continues what it just placed.
    std::unordered_map<llama_seq_id, std::pair<llama_pos, uint32_t>> last;

    uint32_t next_group =
        hint < n_groups ? hint : 0;  // search position; only moves forward, so a batch costs one sweep
    uint32_t searched = 0;

    for (const TokenRef & token : tokens) {
        const llama_seq_id seq    = first_of(token.seqs);
        const uint32_t     offset = uint32_t(token.pos) % group;
        uint32_t           cell   = kNone;

        // Beside the predecessor: the token before it, or one at the same position (the patches of an image share theirs).
        uint32_t   prev = kNone;
        const auto it   = last.find(seq);
        if (it != last.end() && (it->second.first == token.pos || it->second.first == token.pos - 1)) {
            prev = it->second.second;
        } else if (offset != 0) {
            prev = find_cell(cells, seq, token.pos - 1);
        }
        const bool same_pos = it != last.end() && it->second.first == token.pos;
        if (prev != kNone && (offset != 0 || same_pos)) {
            const uint32_t g = prev / group;
            if (placement.is_owned_by(g, token.seqs)) {
                for (uint32_t j = 0; cell == kNone && j < (same_pos ? group : 1); ++j) {
                    const uint32_t candidate = g * group + (offset + j) % group;
                    cell                     = placement.is_free(candidate) ? candidate : kNone;
                }
            }
        }

        for (; cell == kNone && searched < n_groups; ++searched, next_group = (next_group + 1) % n_groups) {
            if (placement.is_group_free(next_group)) {
                cell = next_group * group + offset;
            }
        }

        for (uint32_t g = 0; cell == kNone && g < n_groups; ++g) {
            for (uint32_t c = g * group; cell == kNone && c < (g + 1) * group; ++c) {
                if (placement.is_free(c) && placement.is_owned_by(g, token.seqs)) {
                    cell = c;
                }
            }
        }

        if (cell == kNone) {
            return {};
        }
        placement.put(cell, token);
        last[seq] = {token.pos, cell};
        out.push_back(cell);
    }
    return out;
}

uint32_t physical_cells(uint32_t n_ctx, uint32_t n_seq_max, uint32_t group) {
    const uint32_t n_groups = (n_ctx + group - 1) / group + 1 + 2 * (n_seq_max - 1);
    return n_groups * group;
}

}  // namespace kvfold
