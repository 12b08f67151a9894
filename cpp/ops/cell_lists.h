// The two lists by which an attention knows its cells (AttendArgs), made from the source of every cell.
#pragma once

#include <vector>

#include "ops/kv_ops.h"

namespace kvfold {

struct CellLists {
    std::vector<uint32_t>  far_bits;  // [(n_kv + 31) / 32]
    std::vector<ExactCell> exact;
};

// cell_src [n_kv]: kSrcFar, kSrcHidden, a near row or a current row.
inline CellLists cell_lists(const int32_t * cell_src, int32_t n_kv) {
    CellLists lists;
    lists.far_bits.assign(size_t(n_kv + 31) / 32, 0);
    for (int32_t c = 0; c < n_kv; ++c) {
        if (cell_src[c] == kSrcFar) {
            lists.far_bits[size_t(c) / 32] |= 1u << (c % 32);
        } else if (cell_src[c] != kSrcHidden) {
            lists.exact.push_back({c, cell_src[c]});
        }
    }
    return lists;
}

}  // namespace kvfold
