// Attention on tiles of 64 rows, shared by the dense and the sparse form: decoding rows into panels, small matrix products
// with register blocking, and the online softmax. Internal to the .cpp files of the operations, like simd.h.
//
// A *reader* finds the rows of a tile. It has
//     template <typename Use> void read(int32_t c0, int32_t n, const Use & use)
// which calls use(c, key, value) for c = c0 .. c0 + n - 1 with row objects: row(i) gives channels 16 i .. 16 i + 15.
#pragma once

#include <algorithm>
#include <limits>

#include "ops/far_rows.h"
#include "ops/scratch_plan.h"

namespace kvfold {
namespace {

constexpr int32_t kTile  = 64;  // cells
constexpr int32_t kPanel = 16;  // columns that are stored together, one cache line
// Panels are a line longer than they need be: a power of two would put all panels into the same cache sets.
constexpr int32_t panel_floats(int32_t depth) { return (depth + 1) * kPanel; }
constexpr int32_t keys_floats(int32_t dim) { return kTile / kPanel * panel_floats(dim); }
constexpr int32_t values_floats(int32_t dim) { return dim / kPanel * panel_floats(kTile); }

constexpr float    kInfinity    = std::numeric_limits<float>::infinity();
constexpr uint16_t kF16MinusInf = 0xFC00;

inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

// What a tile is decoded to.
struct TileMemory {
    float * keys;    // panels of 16 cells: [64/16][head_dim][16]
    float * values;  // panels of 16 channels: [head_dim/16][64][16]
    float * eight;   // [8][head_dim] rows on their way to be transposed
    float * score;   // [rows][64]
};

// --- matrix products -------------------------------------------------------------------------------------------------

// Vectors of a result row that one kernel call works on, by number of rows: as many sums as fit the registers.
constexpr int kernel_vectors(int rows) {
    constexpr int most = kTile / kLanes;
    const int     want = kLanes == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2;
    return want < most ? want : most;
}

// c[i][:] = (first ? 0 : c[i][:] * rescale[i]) + sum over k of a[i][k] * b[k][:] for ROWS rows and VECTORS vectors.
// `b` is stored in panels of kPanel columns: panel p, row k at b + p * panel_stride + k * kPanel.
template <int ROWS, int VECTORS>
void kernel(const float * a, int64_t a_stride, const float * b, int64_t panel_stride, int32_t depth, float * c,
            int64_t c_stride, const float * rescale) {
    constexpr int per_panel = kPanel / kLanes;
    VFloat        sum[ROWS][VECTORS];
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < VECTORS; ++j) {
            sum[i][j] = rescale ? v_load(c + i * c_stride + j * kLanes) * v_set(rescale[i]) : VFloat{};
        }
    }
    for (int32_t k = 0; k < depth; ++k) {
        VFloat column[VECTORS];
        for (int j = 0; j < VECTORS; ++j) {
            column[j] = v_load(b + (j / per_panel) * panel_stride + k * kPanel + (j % per_panel) * kLanes);
        }
        for (int i = 0; i < ROWS; ++i) {
            const VFloat x = v_set(a[i * a_stride + k]);
            for (int j = 0; j < VECTORS; ++j) {
                sum[i][j] = v_fma(x, column[j], sum[i][j]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int j = 0; j < VECTORS; ++j) {
            v_store(c + i * c_stride + j * kLanes, sum[i][j]);
        }
    }
}

template <int ROWS>
void product_rows(const float * a, int64_t a_stride, const float * b, int32_t depth, float * c, int32_t columns,
                  const float * rescale) {
    constexpr int vectors      = kernel_vectors(ROWS);
    constexpr int width        = vectors * kLanes;
    const int64_t panel_stride = panel_floats(depth);
    for (int32_t x = 0; x < columns; x += width) {
        kernel<ROWS, vectors>(a, a_stride, b + x / kPanel * panel_stride + x % kPanel, panel_stride, depth, c + x,
                              columns, rescale);
    }
}

constexpr int kStrip = 6;  // rows a kernel call

// Up to kStrip rows; `c` has `columns` contiguous columns. `rescale` null: c is overwritten.
inline void product(int32_t rows, const float * a, int64_t a_stride, const float * b, int32_t depth, float * c,
                    int32_t columns, const float * rescale) {
    switch (rows) {
    case 1:
        return product_rows<1>(a, a_stride, b, depth, c, columns, rescale);
    case 2:
        return product_rows<2>(a, a_stride, b, depth, c, columns, rescale);
    case 3:
        return product_rows<3>(a, a_stride, b, depth, c, columns, rescale);
    case 4:
        return product_rows<4>(a, a_stride, b, depth, c, columns, rescale);
    case 5:
        return product_rows<5>(a, a_stride, b, depth, c, columns, rescale);
    default:
        return product_rows<6>(a, a_stride, b, depth, c, columns, rescale);
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

// An exact row (far ones: far_rows.h), 16 channels at a time: what is asked for by index, the rest decides the compiler.
template <typename Element>
struct ExactRow {
    const Element * from;
    V16             operator()(int i) const { return load_16(from + 16 * i); }
};

struct ZeroRow {
    V16 operator()(int) const { return V16{}; }
};

// False if a channel is Inf or NaN (only exact rows can be: whatever FP4 bytes hold, they decode to a number).
template <int DIM, typename Row>
inline bool is_finite(const Row & row) {
    V16 sum{};
    for (int i = 0; i < DIM / 16; ++i) {
        sum = fma_16(row(i), V16{}, sum);
    }
    float lane[16];
    store_16(lane, sum);
    bool finite = true;
    for (const float x : lane) {
        finite = finite && x == 0.0f;
    }
    return finite;
}

// Decodes a tile into `keys` and `values`.
template <int DIM, typename Reader>
void load_tile(Reader & reader, const TileMemory & tile) {
    for (int32_t c0 = 0; c0 < kTile; c0 += 8) {
        reader.read(c0, 8, [&tile, c0](int32_t c, const auto & key, const auto & value) {
            write_row<DIM>(key, tile.eight + (c - c0) * DIM, 16);
            write_row<DIM>(value, tile.values + c * kPanel, panel_floats(kTile));
        });
        float * panel = tile.keys + c0 / kPanel * panel_floats(DIM) + c0 % kPanel;
        for (int d = 0; d < DIM; d += 8) {
            transpose_8x8(tile.eight + d, DIM, panel + d * kPanel, kPanel);
        }
    }
}

// With up to this many rows a key is used while it is in registers: writing and transposing it would not pay.
constexpr int kDirectRows = 4;

// Scores of ROWS rows straight from the rows of a tile; the values go to `values` as usual.
template <int DIM, int ROWS, typename Reader>
[[gnu::always_inline]] inline void score_directly(Reader & reader, const TileMemory & tile, const float * q) {
    for (int32_t c0 = 0; c0 < kTile; c0 += 4) {
        V16 part[ROWS][4];
        reader.read(c0, 4, [&tile, &part, q, c0](int32_t c, const auto & key, const auto & value) {
            V16 sum[ROWS] = {};
#pragma GCC unroll 16
            for (int i = 0; i < DIM / 16; ++i) {
                const V16 k = key(i);
                for (int r = 0; r < ROWS; ++r) {
                    sum[r] = fma_16(k, load_16(q + r * DIM + 16 * i), sum[r]);
                }
            }
            for (int r = 0; r < ROWS; ++r) {
                part[r][c - c0] = sum[r];
            }
            write_row<DIM>(value, tile.values + c * kPanel, panel_floats(kTile));
        });
        for (int r = 0; r < ROWS; ++r) {
            sum_4x16(part[r], tile.score + r * kTile + c0);
        }
    }
}

template <int DIM, typename Reader>
void score_directly(int32_t rows, Reader & reader, const TileMemory & tile, const float * q) {
    switch (rows) {
    case 1:
        return score_directly<DIM, 1>(reader, tile, q);
    case 2:
        return score_directly<DIM, 2>(reader, tile, q);
    case 3:
        return score_directly<DIM, 3>(reader, tile, q);
    default:
        return score_directly<DIM, 4>(reader, tile, q);
    }
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// Replaces a row of 64 scores by exp(score - maximum) and updates the row's maximum, sum and rescale factor.
// `bias`: added to the scores, -inf hides; null: none.
inline void soften(float * score, const float * bias, float softcap, float & maximum, float & sum, float & rescale) {
    constexpr int n = kTile / kLanes;
    VFloat        s[n];
    for (int i = 0; i < n; ++i) {
        s[i] = v_load(score + i * kLanes);
    }
    if (softcap != 0.0f) {
        for (int i = 0; i < n; ++i) {
            s[i] = v_set(softcap) * v_tanh(s[i] * v_set(1.0f / softcap));
        }
    }
    if (bias != nullptr) {
        for (int i = 0; i < n; ++i) {
            const VFloat b = v_load(bias + i * kLanes);
            s[i]           = b == v_set(-kInfinity) ? b : s[i] + b;
        }
    }
    VFloat top = s[0];
    for (int i = 1; i < n; ++i) {
        top = v_max(top, s[i]);
    }
    const float best = std::max(maximum, v_largest(top));
    if (best == -kInfinity) {  // nothing seen yet
        memset(score, 0, kTile * sizeof(float));
        rescale = 1.0f;
        return;
    }
    rescale = best == maximum ? 1.0f : expf(maximum - best);
    maximum = best;

    VFloat total = {};
    for (int i = 0; i < n; ++i) {
        const VFloat p = v_exp(s[i] - v_set(best));
        v_store(score + i * kLanes, p);
        total += p;
    }
    sum = sum * rescale + v_sum(total);
}

// Adds a head's sink to the softmax denominator. Returns the factor that turns the weighted sum into the result.
inline float finish(float maximum, float sum, const float * sinks, int32_t head) {
    if (sinks != nullptr) {
        const float best = std::max(maximum, sinks[head]);
        if (maximum == -kInfinity) {
            return 0.0f;
        }
        const float scale = expf(maximum - best);
        return scale / (sum * scale + expf(sinks[head] - best));
    }
    return sum > 0.0f ? 1.0f / sum : 0.0f;
}

}  // namespace
}  // namespace kvfold
