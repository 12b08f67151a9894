// kv_store: rows of the micro-batch that stay near are written to the near pool.

#include "format/fp4_codec.h"
#include "ops/kv_ops.h"

namespace kvfold {

void kv_store(const StoreArgs & a, const Threads & t) {
    const int64_t row = int64_t(a.mem.n_head_kv) * a.mem.head_dim;
    for (int32_t r = t.ith; r < a.cur.n_rows; r += t.nth) {
        const int32_t dst = a.dst[r];
        if (dst < 0) {
            continue;
        }
        f16_encode_row(a.cur.k + r * a.cur.k_stride, a.mem.near_k + dst * row, row);
        f16_encode_row(a.cur.v + r * a.cur.v_stride, a.mem.near_v + dst * row, row);
    }
}

}  // namespace kvfold
