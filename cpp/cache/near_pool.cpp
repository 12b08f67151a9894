#include "cache/near_pool.h"

#include <algorithm>

#include "ggml.h"
#include "ops/graph_node.h"
#include "ops/kv_ops.h"

// A function whose loops are worth having for wider vectors than every processor has; the loader picks.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define KVFOLD_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KVFOLD_VECTOR_CLONES
#endif

namespace kvfold {

NearPool::NearPool(const Config & config, uint32_t n_cells)
    : config_(config), row_of_cell_(n_cells, -1), current_row_(n_cells, -1) {
    cell_of_row_.assign(rows_needed(config, n_cells), -1);
    clear();
}

void NearPool::clear() {
    std::fill(row_of_cell_.begin(), row_of_cell_.end(), -1);
    std::fill(cell_of_row_.begin(), cell_of_row_.end(), -1);
    free_rows_.resize(cell_of_row_.size());
    for (size_t i = 0; i < free_rows_.size(); ++i) {
        free_rows_[i] = int32_t(free_rows_.size() - 1 - i);  // lowest row first
    }
}

void NearPool::release(uint32_t cell) {
    const int32_t row = row_of_cell_[cell];
    if (row >= 0) {
        row_of_cell_[cell]        = -1;
        cell_of_row_[size_t(row)] = -1;
        free_rows_.push_back(row);
    }
}

int32_t NearPool::assign(uint32_t cell) {
    if (free_rows_.empty()) {
        return -1;
    }
    const int32_t row = free_rows_.back();
    free_rows_.pop_back();
    row_of_cell_[cell]        = row;
    cell_of_row_[size_t(row)] = int32_t(cell);
    return row;
}

void NearPool::sweep(const llama_kv_cells & cells) {
    for (size_t row = 0; row < cell_of_row_.size(); ++row) {
        const int32_t cell = cell_of_row_[row];
        if (cell >= 0 && cells.is_empty(uint32_t(cell))) {
            release(uint32_t(cell));
        }
    }
}

uint32_t NearPool::count_used(const llama_kv_cells & cells) const {
    return uint32_t(std::count_if(cell_of_row_.begin(), cell_of_row_.end(),
                                  [&](int32_t cell) { return cell >= 0 && !cells.is_empty(uint32_t(cell)); }));
}

// A member has an exact row and is not a sink.
bool NearPool::has_foldable(const llama_kv_cells & cells, uint32_t group_index) const {
    for (uint32_t c = group_index * config_.group; c < (group_index + 1) * config_.group; ++c) {
        if (!cells.is_empty(c) && is_exact(c) && !is_sink(cells, c)) {
            return true;
        }
    }
    return false;
}

bool NearPool::is_sink(const llama_kv_cells & cells, uint32_t cell) const {
    return cells.pos_get(cell) < llama_pos(config_.sinks);
}

// Every token of the group has left the tail of every sequence that owns it.
bool NearPool::is_old(const llama_kv_cells & cells, uint32_t group_index) const {
    for (uint32_t c = group_index * config_.group; c < (group_index + 1) * config_.group; ++c) {
        if (cells.is_empty(c)) {
            continue;
        }
        const llama_pos pos = cells.pos_get(c);
        const llama_pos end = (pos / llama_pos(config_.group) + 1) * llama_pos(config_.group);
        const auto &    own = cells.seq_get_all(c);
        for (llama_seq_id s = 0; s < llama_seq_id(config_.n_seq_max); ++s) {
            if (own.test(size_t(s)) && end > cells.seq_pos_max(s) + 1 - llama_pos(config_.tail)) {
                return false;
            }
        }
    }
    return true;
}

llama_pos NearPool::last_pos(const llama_kv_cells & cells, uint32_t group_index) const {
    llama_pos last = -1;
    for (uint32_t c = group_index * config_.group; c < (group_index + 1) * config_.group; ++c) {
        if (!cells.is_empty(c)) {
            last = std::max(last, cells.pos_get(c));
        }
    }
    return last;
}

void NearPool::add_to_plan(const llama_kv_cells & cells, uint32_t group_index, bool with_sinks, UbatchPlan & plan) {
    plan.fold_entries.push_back(int32_t(group_index));
    for (uint32_t c = group_index * config_.group; c < (group_index + 1) * config_.group; ++c) {
        int32_t src = kSrcHidden;
        if (!cells.is_empty(c)) {
            if (!is_exact(c)) {
                src = kSrcFar;  // folded before: the group was cut and has been filled up again
            } else if (with_sinks || !is_sink(cells, c)) {
                src = current_row_[c] >= 0 ? src_current(current_row_[c]) : row_of_cell_[c];
            }
        }
        plan.fold_entries.push_back(src);
    }
    plan.n_groups += 1;
}

namespace {

// Sets the bit of every cell in use; `bits` is zero before.
KVFOLD_VECTOR_CLONES void list_used(const llama_kv_cells & cells, int32_t n_kv, uint32_t * bits) {
    const auto used  = [&](int32_t c) { return uint32_t(!cells.is_empty(uint32_t(c))); };
    int32_t    first = 0;
    for (; first + 32 <= n_kv; first += 32) {  // a fixed count, or compilers will not use vectors
        if (first < 0) {
            __builtin_unreachable();  // nor, if an index might wrap, loads of more than one cell: 20 us for 65536 instead of 3
        }
        uint32_t word = 0;
        for (int32_t i = 0; i < 32; ++i) {
            word |= used(first + i) << i;
        }
        bits[first / 32] = word;
    }
    for (; first < n_kv; ++first) {
        bits[first / 32] |= used(first) << (first % 32);
    }
}

// Is the token in `cell` the last one of all these sequences, at a position of its own?
bool is_last(const llama_kv_cells & cells, uint32_t cell, const llama_kv_cells::seq_set_t & seqs, uint32_t n_seq_max) {
    for (uint32_t s = 0; s < n_seq_max; ++s) {
        if (seqs.test(s)) {
            const auto & order = cells.seq_pos_get(llama_seq_id(s));
            auto         last  = order.rbegin();
            if (last == order.rend() || last->second != cell) {
                return false;
            }
            const llama_pos pos = last->first;
            if (++last != order.rend() && last->first >= pos) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace

// This runs for every token and looks at every cell, so with one sequence it asks for nothing but positions.
void NearPool::list_cells(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                          const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv, UbatchPlan & plan) const {
    plan.far_bits.assign(size_t(plan_words(n_kv)), 0);
    if (config_.n_seq_max == 1) {
        list_used(cells, int32_t(n_kv), plan.far_bits.data());
    } else {
        for (uint32_t c = 0; c < n_kv; ++c) {
            if (!cells.is_empty(c) && (cells.seq_get_all(c) & seqs).any()) {
                plan.far_bits[c / 32] |= 1u << (c % 32);
            }
        }
    }
    // A single token sees whatever is listed unless something of its sequences is at its position or behind it.
    plan.needs_mask = own.size() != 1 || seqs.count() != 1 || !is_last(cells, own[0], seqs, config_.n_seq_max);

    const auto add = [&](uint32_t cell, int32_t src) {
        if (cell < n_kv && (plan.far_bits[cell / 32] >> (cell % 32) & 1u) != 0) {
            plan.far_bits[cell / 32] &= ~(1u << (cell % 32));
            plan.exact.push_back({int32_t(cell), src});
        }
    };
    for (size_t i = 0; i < own.size(); ++i) {
        add(own[i], src_current(int32_t(i)));
    }
    for (size_t row = 0; row < cell_of_row_.size(); ++row) {
        if (cell_of_row_[row] >= 0) {
            add(uint32_t(cell_of_row_[row]), int32_t(row));
        }
    }
    // Sums are made in this order, and which row a cell has is an accident of the past.
    std::sort(plan.exact.begin(), plan.exact.end(),
              [](const ExactCell & a, const ExactCell & b) { return a.cell < b.cell; });
}

UbatchPlan NearPool::plan_reading(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                                  const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv) {
    UbatchPlan plan;
    plan.epoch = ++epoch_;
    plan.cells = own;
    plan.store_dst.assign(own.size(), -1);

    sweep(cells);
    for (const uint32_t cell : own) {
        release(cell);  // its former token may have had a row
    }
    list_cells(cells, own, seqs, n_kv, plan);
    return plan;
}

UbatchPlan NearPool::plan(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                          const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv) {
    UbatchPlan plan = plan_reading(cells, own, seqs, n_kv);
    for (size_t i = 0; i < own.size(); ++i) {
        current_row_[own[i]] = int32_t(i);
    }

    // Groups with exact members.
    std::vector<uint32_t> candidates;
    for (int32_t cell : cell_of_row_) {
        if (cell >= 0) {
            candidates.push_back(uint32_t(cell) / config_.group);
        }
    }
    for (uint32_t cell : own) {
        candidates.push_back(cell / config_.group);
    }
    std::sort(candidates.begin(), candidates.end());
    candidates.erase(std::unique(candidates.begin(), candidates.end()), candidates.end());

    std::vector<uint32_t> rest;  // may still be folded, should rows run short
    for (uint32_t g : candidates) {
        if (has_foldable(cells, g) && is_old(cells, g)) {
            add_to_plan(cells, g, false, plan);
        } else {
            rest.push_back(g);
        }
    }

    // Folded members give up their rows; rows of this micro-batch that were not folded take one.
    std::vector<bool> folded(own.size(), false);
    const size_t      stride     = 1 + config_.group;
    size_t            n_unfolded = own.size();
    const auto        settle     = [&](int32_t g) {
        const int32_t * entry = &plan.fold_entries[size_t(g) * stride];
        for (uint32_t j = 0; j < config_.group; ++j) {
            if (src_is_current(entry[1 + j])) {
                folded[size_t(src_current_row(entry[1 + j]))] = true;
                n_unfolded -= 1;
            } else if (entry[1 + j] >= 0) {
                release(uint32_t(entry[0]) * config_.group + j);
            }
        }
    };
    for (int32_t g = 0; g < plan.n_groups; ++g) {
        settle(g);
    }

    // Rows can run short where the policy's count does not hold: a fragmented cache whose groups mix old and young tokens, an
    // image among the first tokens (its patches share one position, so they all count as sinks). Then the oldest of the other
    // groups are folded before their time: less exact for a while, but no request fails.
    if (n_unfolded > free_rows_.size()) {
        std::stable_sort(rest.begin(), rest.end(),
                         [&](uint32_t a, uint32_t b) { return last_pos(cells, a) < last_pos(cells, b); });
        std::stable_partition(rest.begin(), rest.end(), [&](uint32_t g) { return has_foldable(cells, g); });
        for (size_t i = 0; i < rest.size() && n_unfolded > free_rows_.size(); ++i) {
            add_to_plan(cells, rest[i], true, plan);
            settle(plan.n_groups - 1);
        }
    }

    for (size_t i = 0; i < own.size(); ++i) {
        if (!folded[i]) {
            plan.store_dst[i] = assign(own[i]);
            GGML_ASSERT(plan.store_dst[i] >= 0);  // all that is exact could have been folded
        }
        current_row_[own[i]] = -1;
    }
    return plan;
}

}  // namespace kvfold
