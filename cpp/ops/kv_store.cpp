// kv_store: rows of the micro-batch that stay near are written to the near pool.

#include "format/fp4_codec.h"
#include "ops/kv_ops.h"
#include "ops/rotate.h"

namespace kvfold {

namespace {

void store_row(const float * from, uint16_t * to, int64_t n, int32_t rotation) {
    if (rotation == 0) {
        f16_encode_row(from, to, n);
        return;
    }
    float rotated[kRotationMax];
    for (int64_t at = 0; at < n; at += rotation) {
        rotate_row(from + at, rotated, rotation, rotation);
        f16_encode_row(rotated, to + at, rotation);
    }
}

}  // namespace

void kv_store(const StoreArgs & a, const Threads & t) {
    const int64_t row = int64_t(a.mem.n_head_kv) * a.mem.head_dim;
    for (int32_t r = t.ith; r < a.cur.n_rows; r += t.nth) {
        const int32_t dst = a.dst[r];
        if (dst < 0) {
            continue;
        }
        store_row(a.cur.k + r * a.cur.k_stride, a.mem.near_k + dst * row, row, a.rot.k);
        store_row(a.cur.v + r * a.cur.v_stride, a.mem.near_v + dst * row, row, a.rot.v);
    }
}

}  // namespace kvfold
