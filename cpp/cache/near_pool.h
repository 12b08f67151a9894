// Which rows are exact, and what a micro-batch folds. Host side only: decides; the graph's fold and store nodes execute.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "llama-kv-cells.h"
#include "ops/kv_ops.h"

namespace kvfold {

// What one micro-batch's graph reads and does. Encodings: kv_ops.h (kSrc...), graph_node.h (kPlan...).
struct UbatchPlan {
    int32_t                epoch = 0;
    std::vector<uint32_t>  far_bits;            // [(n_kv + 31) / 32]
    std::vector<ExactCell> exact;               // real entries only, by cell
    bool                   sparse     = false;  // far rows are looked up
    bool                   needs_mask = true;   // the queries do not all see every cell that is listed
    std::vector<int32_t>   fold_entries;        // n_groups * (1 + group)
    int32_t                n_groups = 0;
    std::vector<int32_t>   store_dst;  // [n_tokens]
    std::vector<uint32_t>  ready;      // SelectArgs::ready
    std::vector<int32_t>   spans;      // FoldArgs::spans
    std::vector<uint32_t>  cells;      // the micro-batch's own cells
};

// The exact tier: which cell has which row of the near pool.
//
// Policy. A sequence keeps its first `sinks` tokens and everything from the group border at or before its last `tail` tokens
// exact. A group is folded as soon as every token in it has left the tail of every sequence that owns it. So at most
// tail + group - 1 + sinks rows are needed a sequence, whatever the micro-batch size, and what is exact depends on positions
// alone.
class NearPool {
  public:
    struct Config {
        uint32_t group;
        uint32_t tail;
        uint32_t sinks;
        uint32_t n_seq_max;
    };

    NearPool(const Config & config, uint32_t n_cells);

    static uint32_t rows_needed(const Config & config, uint32_t n_cells) {
        return std::min(n_cells, config.n_seq_max * (config.tail + config.group - 1 + config.sinks));
    }

    uint32_t n_rows() const { return uint32_t(cell_of_row_.size()); }

    // Rows whose cell is still in use.
    uint32_t count_used(const llama_kv_cells & cells) const;

    // Releases rows of cells that have been emptied since.
    void sweep(const llama_kv_cells & cells);
    void clear();

    // Decides for a micro-batch that sits in `own` (cell of each token) and records the result as done. `cells` already holds it.
    UbatchPlan plan(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                    const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv);

    // The same for a micro-batch whose tokens are removed again right after it: it reads the cache, and nothing is folded or stored.
    UbatchPlan plan_reading(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                            const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv);

    // -1 when the cell's row is far (or the cell is empty).
    int32_t row_of(uint32_t cell) const { return row_of_cell_[cell]; }

    // Gives a cell a row (restoring a state); -1 when there is none left.
    int32_t  assign(uint32_t cell);
    uint32_t n_free() const { return uint32_t(free_rows_.size()); }

  private:
    void      release(uint32_t cell);
    bool      is_exact(uint32_t cell) const { return current_row_[cell] >= 0 || row_of_cell_[cell] >= 0; }
    bool      is_sink(const llama_kv_cells & cells, uint32_t cell) const;
    bool      has_foldable(const llama_kv_cells & cells, uint32_t group_index) const;
    bool      is_old(const llama_kv_cells & cells, uint32_t group_index) const;
    llama_pos last_pos(const llama_kv_cells & cells, uint32_t group_index) const;
    void      list_cells(const llama_kv_cells & cells, const std::vector<uint32_t> & own,
                         const llama_kv_cells::seq_set_t & seqs, uint32_t n_kv, UbatchPlan & plan) const;
    void      add_to_plan(const llama_kv_cells & cells, uint32_t group_index, bool with_sinks, UbatchPlan & plan);

    Config               config_;
    std::vector<int32_t> row_of_cell_;
    std::vector<int32_t> cell_of_row_;  // -1: free
    std::vector<int32_t> free_rows_;
    std::vector<int32_t> current_row_;  // [n_cells] -1, or the row in the micro-batch; only valid inside plan()
    int32_t              epoch_ = 0;
};

}  // namespace kvfold
