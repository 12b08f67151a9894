// Scores of a few rows of queries for all keys of one KV head, kept for a second look: what operations need that ask how attention is
// spread over the cells. Internal to the .cpp files of the operations, like simd.h.
#pragma once

#include "ops/attend_tile.h"

namespace kvfold {
namespace {

// Keys of far cells, as attention reads them. Cells come in ascending order, so that a summary is decoded once.
template <int DIM>
class FarKeys {
  public:
    // summary [DIM]: memory to work in
    FarKeys(const LayerMemory & mem, int32_t kv_head, float * summary) : mem_(mem), head_(kv_head), summary_(summary) {}

    void read(int64_t cell, float * to) {
        if (cell / mem_.group != group_) {
            group_ = cell / mem_.group;
            read_summary(group_, summary_);
        }
        with_far_rows<DIM>(mem_, [this, cell, to](const auto & far) {
            write_row<DIM>(far_key(far.row(mem_.far_k, cell * mem_.n_head_kv + head_), summary_), to, 16);
        });
    }

    void read_summary(int64_t group, float * to) const {
        write_row<DIM>(FarRow{group_summary(mem_, group, head_)}, to, 16);
    }

  private:
    const LayerMemory & mem_;
    int64_t             head_;
    float *             summary_;
    int64_t             group_ = -1;
};

// Memory of score_rows(), and of the scores of `rows` rows for `n` keys.
constexpr size_t key_tile_floats(int32_t dim) { return size_t(keys_floats(dim) + 8 * dim); }
constexpr size_t row_scores_floats(int32_t rows, int32_t n) {
    return size_t(rows) * size_t((n + kTile - 1) / kTile) * size_t(kTile);
}

// score [tiles][rows][64] of `rows` rows q [rows][DIM] for keys 0 .. n - 1; read(key, to) writes the channels of one. What is behind
// the last key holds anything finite.
template <int DIM, typename Read>
void score_rows(const float * q, int32_t rows, int32_t n, float * memory, float * score, const Read & read) {
    float * keys  = memory;
    float * eight = keys + keys_floats(DIM);
    for (int32_t first = 0; first < n; first += kTile, score += rows * kTile) {
        for (int32_t c0 = 0; c0 < kTile; c0 += 8) {
            for (int32_t c = c0; c < c0 + 8; ++c) {
                float * to = eight + (c - c0) * DIM;
                if (first + c < n) {
                    read(first + c, to);
                } else {
                    std::fill_n(to, DIM, 0.0f);
                }
            }
            float * panel = keys + c0 / kPanel * panel_floats(DIM) + c0 % kPanel;
            for (int d = 0; d < DIM; d += 8) {
                transpose_8x8(eight + d, DIM, panel + d * kPanel, kPanel);
            }
        }
        for (int32_t r = 0; r < rows; r += kStrip) {
            product(std::min(kStrip, rows - r), q + int64_t(r) * DIM, DIM, keys, DIM, score + r * kTile, kTile,
                    nullptr);
        }
    }
}

// One row of such scores becomes probabilities: exp(cap(score) + bias), divided by their sum and that of the sink (null: none).
// bias [tiles * 64]: -inf hides a key whatever its score is, also behind the last key. False, and all zero, if no key is seen.
inline bool make_probabilities(float * score, int32_t rows, int32_t tiles, const float * bias, float softcap,
                               const float * sink) {
    const int64_t stride = int64_t(rows) * kTile;
    VFloat        top    = v_set(-kInfinity);
    for (int32_t tile = 0; tile < tiles; ++tile) {
        for (int32_t c = 0; c < kTile; c += kLanes) {
            float *      at = score + tile * stride + c;
            const VFloat b  = v_load(bias + tile * kTile + c);
            VFloat       s  = v_load(at);
            if (softcap != 0.0f) {
                s = v_set(softcap) * v_tanh(s * v_set(1.0f / softcap));
            }
            s = b == v_set(-kInfinity) ? b : s + b;
            v_store(at, s);
            top = v_max(top, s);
        }
    }
    const float best = v_largest(top);
    const bool  seen = best > -kInfinity;
    VFloat      sum  = {};
    for (int32_t tile = 0; tile < tiles; ++tile) {
        for (int32_t c = 0; c < kTile; c += kLanes) {
            float *      at = score + tile * stride + c;
            const VFloat p  = seen ? v_exp(v_load(at) - v_set(best)) : VFloat{};
            v_store(at, p);
            sum += p;
        }
    }
    if (!seen) {
        return false;
    }
    const float  total = v_sum(sum) + (sink != nullptr ? expf(*sink - best) : 0.0f);
    const VFloat scale = v_set(1.0f / total);
    for (int32_t tile = 0; tile < tiles; ++tile) {
        for (int32_t c = 0; c < kTile; c += kLanes) {
            float * at = score + tile * stride + c;
            v_store(at, v_load(at) * scale);
        }
    }
    return true;
}

}  // namespace
}  // namespace kvfold
