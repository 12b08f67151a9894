// Which spans (kv_ops.h) have a summary, and which get one next. Host side only: decides; the graph's fold nodes execute.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/near_pool.h"
#include "llama-kv-cells.h"

namespace kvfold {

// A span is summarised by the first graph that finds all of its cells far, once: what is far stays as it is until the cell is
// emptied. From the next graph on it is ready. Nothing about spans is saved with a state; they are made again.
class SpanIndex {
  public:
    void resize(uint32_t n_spans) { summarised_.assign(n_spans, 0); }

    uint32_t size() const { return uint32_t(summarised_.size()); }

    // Nothing has a summary any more.
    void clear() { resize(size()); }

    // Fills in `ready` and `spans` of a plan that is complete otherwise, for a micro-batch of sequences `seqs` that is in `cells`
    // already. A span that mixes sequences is left out where it matters which of them a query is of.
    void add_to_plan(const llama_kv_cells & cells, const llama_kv_cells::seq_set_t & seqs, UbatchPlan & plan);

    // The graph of a plan has summarised these.
    void done(const std::vector<int32_t> & spans);

  private:
    std::vector<uint8_t> summarised_;  // [n_spans] and no cell has been emptied since the last plan
};

}  // namespace kvfold
