// The score `reconstruct`: in which order groups of a text may go, by what a second reading has attended to (ops/kv_receive.h) and by how
// new their keys are (ops/kv_score.h).
#pragma once

#include <cstddef>
#include <vector>

namespace kvfold {

// Indices of groups, the least needed first; of equals, the earlier one in the text.
// received  [heads][n_groups] for every KV head of every layer, the largest weight of each group
// novelty   [n_groups] (kNovelty)
// Both are of groups in the order of the text.
//
// Every head ranks the groups (Kim et al., "KVzip", 2025): weights of different heads cannot be added up, as heads differ in how
// concentrated they are. Cells are shared by all heads, so a group's need is what the quarter of the heads want that want it most, on
// the average. To this and to novelty three things are done that facts in a text have shown to need:
// - Both count by their rank among the neighbours, 96 groups before and 96 behind. Attention falls off with the distance, so the end of a
//   text gets more from its second reading than the beginning; and a stretch of text should not pay for another one.
// - These ranks are added up: a fact that is told twice, or looks like others, shares the attention of whoever copies it with those.
// - Groups are smoothed with the one before and the one behind, weights 1 2 1: half a fact is none.
std::vector<size_t> order_by_need(const std::vector<std::vector<float>> & received, const std::vector<float> & novelty);

}  // namespace kvfold
