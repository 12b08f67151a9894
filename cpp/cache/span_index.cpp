#include "cache/span_index.h"

#include <algorithm>

#include "ops/graph_node.h"

namespace kvfold {

namespace {

constexpr uint32_t kCells = uint32_t(kSpanCells);
constexpr uint32_t kWords = kCells / 32;  // of far bits a span

bool is_far(const std::vector<uint32_t> & far_bits, uint32_t span) {
    if (size_t(span + 1) * kWords > far_bits.size()) {
        return false;
    }
    const auto first = far_bits.begin() + span * kWords;
    return std::all_of(first, first + kWords, [](uint32_t word) { return word == ~0u; });
}

bool has_empty_cell(const llama_kv_cells & cells, uint32_t span) {
    bool empty = false;
    for (uint32_t c = span * kCells; c < (span + 1) * kCells; ++c) {
        empty |= cells.is_empty(c);
    }
    return empty;
}

bool has_one_owner(const llama_kv_cells & cells, uint32_t span) {
    const auto & owner = cells.seq_get_all(span * kCells);
    for (uint32_t c = span * kCells + 1; c < (span + 1) * kCells; ++c) {
        if (cells.seq_get_all(c) != owner) {
            return false;
        }
    }
    return true;
}

}  // namespace

void SpanIndex::add_to_plan(const llama_kv_cells & cells, const llama_kv_cells::seq_set_t & seqs, UbatchPlan & plan) {
    // A cell that was emptied and taken by this micro-batch does not look empty.
    for (const uint32_t cell : plan.cells) {
        if (cell / kCells < size()) {
            summarised_[cell / kCells] = 0;
        }
    }
    const bool   one_sequence = seqs.count() == 1;
    const size_t most         = size_t(span_capacity(size(), int64_t(plan.cells.size())));
    plan.ready.assign(size_t(plan_words(int64_t(size()))), 0);
    for (uint32_t s = 0; s < size(); ++s) {
        if (!is_far(plan.far_bits, s)) {
            // Far cells of other sequences are not listed; they are there all the same.
            summarised_[s] = summarised_[s] != 0 && !has_empty_cell(cells, s);
        } else if (one_sequence || has_one_owner(cells, s)) {
            if (summarised_[s] != 0) {
                plan.ready[s / 32] |= 1u << (s % 32);
            } else if (plan.spans.size() < most) {
                plan.spans.push_back(int32_t(s));
            }
        }
    }
}

void SpanIndex::done(const std::vector<int32_t> & spans) {
    for (const int32_t s : spans) {
        summarised_[size_t(s)] = 1;
    }
}

}  // namespace kvfold
