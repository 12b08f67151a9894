// kv_attend: softmax attention over near, current and far rows (dense form).
//
// The work is cut into tasks (KV head) x (block of queries) x (range of cells). A task walks its cells in tiles of 64:
// it decodes the tile's keys and values once into f32 and uses them for all its rows, a row being one query of one
// query head. Scores and P*V are small matrix products with a register-blocked kernel; softmax is the usual online one.
// With few queries the cells are split over several tasks, whose partial results are merged after a barrier. How work
// is cut does not depend on which thread takes which task, so results do not either.
//
// Cells that no query of the block sees (hidden, or -inf for all of them) are not read; their columns are zero and their
// scores -inf. A cell that some see and others do not is kept from the others even when it holds NaN.
//
// Before the tasks start, all threads together prepare what every task reads: the sources of the cells as an array, and
// queries and current rows in the rotated basis.

#include <algorithm>
#include <atomic>
#include <limits>
#include <new>

#include "ops/kv_ops.h"
#include "ops/rotate.h"
#include "ops/simd.h"

namespace kvfold {

namespace {

constexpr int32_t kTile             = 64;  // cells
constexpr int32_t kPanel            = 16;  // columns that are stored together, one cache line
constexpr int32_t kMinSplit         = 8;   // tiles; shorter ranges of cells are not worth a task
constexpr int32_t kMinSplitAllHeads = 2;
constexpr int64_t kSmall            = 32768;  // floats of all queries; up to here a task does all KV heads
constexpr int32_t kTargetTasks      = 64;     // split cells until there are about so many tasks
// Panels are a line longer than they need be: a power of two would put all panels into the same cache sets.
constexpr int32_t panel_floats(int32_t depth) { return (depth + 1) * kPanel; }
constexpr int32_t keys_floats(int32_t dim) { return kTile / kPanel * panel_floats(dim); }
constexpr int32_t values_floats(int32_t dim) { return dim / kPanel * panel_floats(kTile); }
constexpr size_t  kLine = 64;  // bytes

constexpr float    kInfinity    = std::numeric_limits<float>::infinity();
constexpr uint16_t kF16MinusInf = 0xFC00;

int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

// How the work is cut. Few queries: a task is a range of cells and does all KV heads, so that memory is read in order.
// Many queries: a task is one KV head and a block of queries, and if that makes too few tasks, a range of cells.
struct Shape {
    int32_t gqa;       // query heads a KV head
    int32_t heads;     // KV heads a task: all or one
    int32_t block;     // queries a task
    int32_t n_blocks;  // blocks of queries
    int32_t n_splits;  // ranges of cells
    int32_t split;     // tiles a range
    int32_t n_tasks;
    size_t  head_rows;  // rows of one KV head in a task
    size_t  thread_bytes;
    size_t  partial_floats;  // one row's partial result: head_dim values, maximum, sum

    // Scratch: the next task, the source of each cell, rotated queries, keys and values (if they are to be rotated), the
    // memory of each thread, partial results (if there are several ranges of cells).
    size_t sources_offset;
    size_t q_offset;  // [n_q][n_head][head_dim]
    size_t k_offset;  // [n_rows][n_head_kv][head_dim]
    size_t v_offset;
    size_t thread_offset;
    size_t partial_offset;
    size_t bytes;

    Shape(const AttendArgs & a, int nth) {
        const int32_t dim   = a.mem.head_dim;
        const int32_t tiles = divide_up(a.n_kv, kTile);
        gqa                 = a.n_head / a.mem.n_head_kv;
        if (int64_t(a.n_q) * a.n_head * dim <= kSmall) {
            heads = a.mem.n_head_kv;
            block = std::max(1, a.n_q);
        } else {
            // queries and results of a block stay in the second-level cache
            const int32_t most_rows = dim <= 64 ? 192 : dim <= 128 ? 144 : 96;
            heads                   = 1;
            block                   = std::max(1, std::min(a.n_q, most_rows / gqa));
        }
        n_blocks               = divide_up(a.n_q, block);
        const int32_t units    = std::max(1, n_blocks * (a.mem.n_head_kv / heads));
        const int32_t wanted   = divide_up(std::max(kTargetTasks, 2 * nth), units);
        const int32_t shortest = heads > 1 ? kMinSplitAllHeads : kMinSplit;
        n_splits               = std::max(1, std::min(wanted, tiles / shortest));
        split                  = divide_up(tiles, n_splits);
        n_splits               = std::max(1, divide_up(tiles, std::max(1, split)));
        n_tasks                = a.n_q == 0 ? 0 : units * n_splits;
        head_rows              = size_t(block) * size_t(gqa);

        const size_t rows       = head_rows * size_t(heads);
        const size_t row_floats = 2 * size_t(dim) + 3;
        const size_t floats =
            size_t(keys_floats(dim) + values_floats(dim) + 9 * dim) + rows * row_floats + head_rows * kTile;
        thread_bytes   = align(floats * sizeof(float));
        partial_floats = size_t(dim) + 2;

        const size_t q_rows  = size_t(a.n_q) * size_t(a.n_head);
        const size_t kv_rows = size_t(a.cur.n_rows) * size_t(a.mem.n_head_kv);
        const size_t row     = size_t(dim) * sizeof(float);
        bytes                = 0;
        reserve(kLine);  // the next task
        sources_offset = reserve(size_t(a.n_kv) * sizeof(int32_t));
        q_offset       = reserve(a.rot.k != 0 ? q_rows * row : 0);
        k_offset       = reserve(a.rot.k != 0 ? kv_rows * row : 0);
        v_offset       = reserve(a.rot.v != 0 ? kv_rows * row : 0);
        thread_offset  = reserve(size_t(nth) * thread_bytes);
        partial_offset = reserve(n_splits > 1 ? size_t(n_splits) * q_rows * partial_floats * sizeof(float) : 0);
    }

    static size_t align(size_t n) { return (n + kLine - 1) / kLine * kLine; }

    // Where the next `n` bytes of scratch begin.
    size_t reserve(size_t n) {
        const size_t at = bytes;
        bytes += align(n);
        return at;
    }
};

template <typename Element>
Element * scratch_at(const Threads & t, size_t offset) {
    return reinterpret_cast<Element *>(static_cast<uint8_t *>(t.scratch) + offset);
}

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
void product(int32_t rows, const float * a, int64_t a_stride, const float * b, int32_t depth, float * c,
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

// --- tiles -----------------------------------------------------------------------------------------------------------

// One task and the memory it works in. Rows are ordered [KV head of the task][query][query head of the KV head].
struct Task {
    const AttendArgs & a;
    const int32_t *    cell_src;  // [n_kv] kSrcHidden, or where the row is
    const Shape &      shape;
    int32_t            first_head;  // KV head
    int32_t            first_query;
    int32_t            n_queries;
    int32_t            first_tile;
    int32_t            last_tile;  // one past

    float * keys;     // panels of 16 cells: [64/16][head_dim][16]
    float * values;   // panels of 16 channels: [head_dim/16][64][16]
    float * eight;    // [8][head_dim] rows on their way to be transposed
    float * summary;  // [head_dim]
    float * score;    // [rows of a head][64]
    float * q;        // [rows][head_dim], scaled
    float * out;      // [rows][head_dim], not yet divided by `sum`
    float * maximum;  // [rows]
    float * sum;      // [rows]
    float * rescale;  // [rows] what the results so far are multiplied with when the maximum moves

    int32_t head_rows() const { return n_queries * shape.gqa; }
    int32_t rows() const { return head_rows() * shape.heads; }
    int32_t row_head(int32_t row) const {
        return first_head * shape.gqa + row / head_rows() * shape.gqa + row % shape.gqa;
    }
    int32_t row_query(int32_t row) const { return first_query + row % head_rows() / shape.gqa; }
};

// What the queries of a task see of a tile.
struct View {
    bool     any;            // something
    bool     all;            // everything, without additions: no mask needed
    uint16_t seen[kTile];    // per cell, non-zero: some query sees it
    float    hidden[kTile];  // added to scores: 0, or -inf for cells that are not to be read
};

View look(const Task & t, int32_t tile) {
    const AttendArgs & a     = t.a;
    const int32_t      first = tile * kTile;
    const int32_t      width = std::min(kTile, a.n_kv - first);
    View               view{};
    uint16_t           bits[kTile] = {};  // or of all mask entries
    if (a.mask == nullptr) {
        std::fill_n(view.seen, width, uint16_t(1));
    } else if (width == kTile) {
        for (int32_t i = 0; i < t.n_queries; ++i) {
            const uint16_t * mask = a.mask + (t.first_query + i) * a.mask_stride + first;
            for (int32_t c = 0; c < kTile; ++c) {
                view.seen[c] = uint16_t(view.seen[c] | (mask[c] ^ kF16MinusInf));
                bits[c]      = uint16_t(bits[c] | mask[c]);
            }
        }
    } else {
        for (int32_t i = 0; i < t.n_queries; ++i) {
            const uint16_t * mask = a.mask + (t.first_query + i) * a.mask_stride + first;
            for (int32_t c = 0; c < width; ++c) {
                view.seen[c] = uint16_t(view.seen[c] | (mask[c] ^ kF16MinusInf));
                bits[c]      = uint16_t(bits[c] | mask[c]);
            }
        }
    }
    view.all = width == kTile;
    for (int32_t c = 0; c < kTile; ++c) {
        if (c >= width || t.cell_src[first + c] == kSrcHidden) {
            view.seen[c] = 0;
        }
        const bool seen = view.seen[c] != 0;
        view.any        = view.any || seen;
        view.all        = view.all && seen && bits[c] == 0;
        view.hidden[c]  = seen ? 0.0f : -kInfinity;
    }
    return view;
}

// A row of a tile, 16 channels at a time: what is asked for by index, the rest decides the compiler.
template <typename Element>
struct ExactRow {
    const Element * from;
    V16             operator()(int i) const { return load_16(from + 16 * i); }
};

struct FarRow {
    const Fp4Block * from;
    V16 operator()(int i) const { return decode_16(from[i / 4].scale[i % 4], from[i / 4].quant + i % 4 * 8); }
};

struct FarKey {
    const Fp4Block * from;
    const float *    summary;
    V16              operator()(int i) const { return add_16(load_16(summary + 16 * i), FarRow{from}(i)); }
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

// Channels 16 i .. 16 i + 15 go to `to` + i * stride.
template <int DIM, typename Row>
inline void write_row(const Row & row, float * to, int64_t stride) {
#pragma GCC unroll 16
    for (int i = 0; i < DIM / 16; ++i) {
        store_16(to + i * stride, row(i));
    }
}

// Rows of one KV head lie n_head_kv rows apart, which hardware does not foresee.
inline void prefetch_row(const Fp4Block * row, int64_t blocks) {
    const char *  p     = reinterpret_cast<const char *>(row);
    const int64_t bytes = blocks * int64_t(sizeof(Fp4Block));
    for (int64_t at = 0; at < bytes; at += int64_t(kLine)) {
        __builtin_prefetch(p + at);
    }
    __builtin_prefetch(p + bytes - 1);
}

// Finds the key and value rows of cells c0 .. c0 + n - 1 of a tile, and calls use(c, key, value) with each pair.
template <int DIM>
struct TileReader {
    static constexpr int64_t blocks = DIM / kFp4BlockValues;
    static constexpr int64_t ahead  = 8;  // cells to prefetch before they are needed

    const Task & t;
    const View & view;
    int64_t      first;  // cell
    int64_t      head;
    int          group_shift;
    int64_t      group  = -1;    // whose summary is decoded
    bool         finite = true;  // no value read so far is Inf or NaN

    TileReader(const Task & task, const View & v, int32_t tile, int32_t kv_head)
        : t(task), view(v), first(int64_t(tile) * kTile), head(kv_head), group_shift(0) {
        while (1 << group_shift < t.a.mem.group) {
            ++group_shift;
        }
    }

    template <typename Use>
    void read(int32_t c0, int32_t n, const Use & use) {
        const AttendArgs &  a     = t.a;
        const LayerMemory & mem   = a.mem;
        const int64_t       heads = mem.n_head_kv;
        for (int32_t c = c0; c < c0 + n; ++c) {
            if (view.seen[c] == 0) {
                use(c, ZeroRow{}, ZeroRow{});
                continue;
            }
            const int64_t cell = first + c;
            const int32_t src  = t.cell_src[cell];
            if (src == kSrcFar) {
                if (cell >> group_shift != group) {
                    group = cell >> group_shift;
                    const Fp4Block * from =
                        reinterpret_cast<const Fp4Block *>(mem.side) + (group * heads + head) * blocks;
                    prefetch_row(from + ((ahead + mem.group - 1) >> group_shift) * heads * blocks, blocks);
                    write_row<DIM>(FarRow{from}, t.summary, 16);
                }
                const Fp4Block * far_k = mem.far_k + (cell * heads + head) * blocks;
                const Fp4Block * far_v = mem.far_v + (cell * heads + head) * blocks;
                prefetch_row(far_k + ahead * heads * blocks, blocks);
                prefetch_row(far_v + ahead * heads * blocks, blocks);
                use(c, FarKey{far_k, t.summary}, FarRow{far_v});
            } else if (src_is_current(src)) {
                const int64_t row = src_current_row(src);
                use_exact(c, a.cur.k + row * a.cur.k_stride + head * DIM, a.cur.v + row * a.cur.v_stride + head * DIM,
                          use);
            } else {
                const int64_t at = (src * heads + head) * DIM;
                use_exact(c, mem.near_k + at, mem.near_v + at, use);
            }
        }
    }

    template <typename Element, typename Use>
    void use_exact(int32_t c, const Element * key, const Element * value, const Use & use) {
        const ExactRow<Element> row{value};
        finite = is_finite<DIM>(row) && finite;
        use(c, ExactRow<Element>{key}, row);
    }
};

// Decodes the visible cells of a tile into `keys` and `values`. Returns whether all values are finite.
template <int DIM>
bool load_tile(const Task & t, const View & view, int32_t tile, int32_t head) {
    TileReader<DIM> reader(t, view, tile, head);
    for (int32_t c0 = 0; c0 < kTile; c0 += 8) {
        reader.read(c0, 8, [&t, c0](int32_t c, const auto & key, const auto & value) {
            write_row<DIM>(key, t.eight + (c - c0) * DIM, 16);
            write_row<DIM>(value, t.values + c * kPanel, panel_floats(kTile));
        });
        float * panel = t.keys + c0 / kPanel * panel_floats(DIM) + c0 % kPanel;
        for (int d = 0; d < DIM; d += 8) {
            transpose_8x8(t.eight + d, DIM, panel + d * kPanel, kPanel);
        }
    }
    return reader.finite;
}

// With up to this many rows a key is used while it is in registers: writing and transposing it would not pay.
constexpr int kDirectRows = 4;

// Scores of ROWS rows straight from the rows of a tile; the values go to `values` as usual. Returns whether those are
// all finite.
template <int DIM, int ROWS>
bool score_directly(const Task & t, const View & view, int32_t tile, int32_t head, const float * q) {
    TileReader<DIM> reader(t, view, tile, head);
    for (int32_t c0 = 0; c0 < kTile; c0 += 4) {
        V16 part[ROWS][4];
        reader.read(c0, 4, [&t, &part, q, c0](int32_t c, const auto & key, const auto & value) {
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
            write_row<DIM>(value, t.values + c * kPanel, panel_floats(kTile));
        });
        for (int r = 0; r < ROWS; ++r) {
            sum_4x16(part[r], t.score + r * kTile + c0);
        }
    }
    return reader.finite;
}

template <int DIM>
bool score_directly(int32_t rows, const Task & t, const View & view, int32_t tile, int32_t head, const float * q) {
    switch (rows) {
    case 1:
        return score_directly<DIM, 1>(t, view, tile, head, q);
    case 2:
        return score_directly<DIM, 2>(t, view, tile, head, q);
    case 3:
        return score_directly<DIM, 3>(t, view, tile, head, q);
    default:
        return score_directly<DIM, 4>(t, view, tile, head, q);
    }
}

// --- softmax ---------------------------------------------------------------------------------------------------------

// Replaces a row of 64 scores by exp(score - maximum) and updates the row's maximum, sum and rescale factor.
// `bias`: added to the scores, -inf hides; null: none.
void soften(float * score, const float * bias, float softcap, float & maximum, float & sum, float & rescale) {
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

// Mask entries of one query for a tile as numbers to add.
void mask_row(const Task & t, const View & view, int32_t tile, int32_t query, float * bias) {
    const AttendArgs & a     = t.a;
    const int32_t      first = tile * kTile;
    const int32_t      width = std::min(kTile, a.n_kv - first);
    if (a.mask == nullptr) {
        memcpy(bias, view.hidden, sizeof view.hidden);
        return;
    }
    const uint16_t * mask = a.mask + (t.first_query + query) * a.mask_stride + first;
    if (width == kTile) {
        for (int32_t c = 0; c < kTile; c += 16) {
            store_16(bias + c, load_16(mask + c));
        }
    } else {
        f16_decode_row(mask, bias, width);
        std::fill(bias + width, bias + kTile, 0.0f);
    }
    for (int32_t c = 0; c < kTile; ++c) {
        bias[c] = view.hidden[c] != 0.0f ? -kInfinity : bias[c];
    }
}

// P*V for a tile that holds Inf or NaN: a cell that a row does not see (weight 0) is left out instead of multiplied by 0,
// so that one sequence's broken numbers stay its own.
template <int DIM>
void weigh_visible(const Task & t, int32_t rows, float * out, const float * rescale) {
    for (int32_t r = 0; r < rows; ++r) {
        const float * weight = t.score + r * kTile;
        for (int32_t d = 0; d < DIM; d += kPanel) {
            float *       to    = out + int64_t(r) * DIM + d;
            const float * value = t.values + d / kPanel * panel_floats(kTile);
            for (int32_t i = 0; i < kPanel; ++i) {
                to[i] *= rescale[r];
            }
            for (int32_t c = 0; c < kTile; ++c) {
                if (weight[c] != 0.0f) {
                    for (int32_t i = 0; i < kPanel; ++i) {
                        to[i] += weight[c] * value[c * kPanel + i];
                    }
                }
            }
        }
    }
}

// One KV head of a tile: row 0 is the task's row `base`.
template <int DIM>
void attend_head(const Task & t, const View & view, int32_t tile, int32_t h) {
    const int32_t rows    = t.head_rows();
    const int32_t base    = h * rows;
    const int32_t head    = t.first_head + h;
    float *       q       = t.q + int64_t(base) * DIM;
    float *       out     = t.out + int64_t(base) * DIM;
    float *       rescale = t.rescale + base;
    const bool    direct  = rows <= kDirectRows;
    const bool    finite =
        direct ? score_directly<DIM>(rows, t, view, tile, head, q) : load_tile<DIM>(t, view, tile, head);

    float   bias[kTile];
    int32_t bias_query = -1;
    for (int32_t r0 = 0; r0 < rows; r0 += kStrip) {
        const int32_t n = std::min(kStrip, rows - r0);
        if (!direct) {
            product(n, q + int64_t(r0) * DIM, DIM, t.keys, DIM, t.score + r0 * kTile, kTile, nullptr);
        }
        for (int32_t r = r0; r < r0 + n; ++r) {
            const float * row_bias = nullptr;
            if (!view.all) {
                const int32_t query = r / t.shape.gqa;
                if (query != bias_query) {
                    mask_row(t, view, tile, query, bias);
                    bias_query = query;
                }
                row_bias = bias;
            }
            soften(t.score + r * kTile, row_bias, t.a.softcap, t.maximum[base + r], t.sum[base + r], rescale[r]);
        }
    }
    if (!finite && !view.all) {
        weigh_visible<DIM>(t, rows, out, rescale);
        return;
    }
    for (int32_t r0 = 0; r0 < rows; r0 += kStrip) {
        const int32_t n = std::min(kStrip, rows - r0);
        product(n, t.score + r0 * kTile, kTile, t.values, kTile, out + int64_t(r0) * DIM, DIM, rescale + r0);
    }
}

template <int DIM>
void attend_tile(const Task & t, int32_t tile) {
    const View view = look(t, tile);
    if (!view.any) {
        return;
    }
    for (int32_t h = 0; h < t.shape.heads; ++h) {
        attend_head<DIM>(t, view, tile, h);
    }
}

// --- results ---------------------------------------------------------------------------------------------------------

// Adds a head's sink to the softmax denominator. Returns the factor that turns the weighted sum into the result.
float finish(float maximum, float sum, const float * sinks, int32_t head) {
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

float * partial_row(const AttendArgs & a, const Shape & shape, const Threads & t, int32_t split, int64_t query,
                    int32_t head) {
    float *      base  = scratch_at<float>(t, shape.partial_offset);
    const size_t index = (size_t(split) * size_t(a.n_q) + size_t(query)) * size_t(a.n_head) + size_t(head);
    return base + index * shape.partial_floats;
}

float * result_row(const AttendArgs & a, int64_t query, int32_t head) {
    return a.out + (query * a.n_head + head) * a.mem.head_dim;
}

// --- what all tasks read ---------------------------------------------------------------------------------------------

// Writes the thread's share of the cells' sources.
void spread_sources(const AttendArgs & a, const Shape & shape, const Threads & t) {
    int32_t *     src   = scratch_at<int32_t>(t, shape.sources_offset);
    const int32_t words = divide_up(a.n_kv, 32);
    const int32_t first = int32_t(int64_t(words) * t.ith / t.nth) * 32;
    const int32_t last  = std::min(a.n_kv, int32_t(int64_t(words) * (t.ith + 1) / t.nth) * 32);
    for (int32_t c = first; c < last; ++c) {
        src[c] = a.far_bits[c / 32] >> (c % 32) & 1u ? kSrcFar : kSrcHidden;
    }
    for (int32_t i = 0; i < a.n_exact; ++i) {
        if (a.exact[i].src != kSrcHidden && a.exact[i].cell >= first && a.exact[i].cell < last) {
            src[a.exact[i].cell] = a.exact[i].src;
        }
    }
}

// Rotates the thread's share of `rows` rows of `n` channels into scratch; from(r) is row r.
template <typename Row>
const float * rotate_share(const Threads & t, size_t offset, int64_t rows, int64_t n, int32_t size, const Row & from) {
    float * to = scratch_at<float>(t, offset);
    for (int64_t r = rows * t.ith / t.nth; r < rows * (t.ith + 1) / t.nth; ++r) {
        rotate_row(from(r), to + r * n, n, size);
    }
    return to;
}

// The same attention with rows that are rotated already: in scratch, of which the thread writes its share.
AttendArgs rotate_inputs(const AttendArgs & a, const Shape & shape, const Threads & t) {
    const int64_t dim     = a.mem.head_dim;
    const int64_t row     = a.mem.n_head_kv * dim;
    AttendArgs    rotated = a;
    if (a.rot.k != 0) {
        rotated.q = rotate_share(t, shape.q_offset, int64_t(a.n_q) * a.n_head, dim, a.rot.k, [&a](int64_t r) {
            return a.q + r / a.n_head * a.q_stride_query + r % a.n_head * a.q_stride_head;
        });
        rotated.q_stride_query = a.n_head * dim;
        rotated.q_stride_head  = dim;

        rotated.cur.k        = rotate_share(t, shape.k_offset, a.cur.n_rows, row, a.rot.k,
                                            [&a](int64_t r) { return a.cur.k + r * a.cur.k_stride; });
        rotated.cur.k_stride = row;
    }
    if (a.rot.v != 0) {
        rotated.cur.v        = rotate_share(t, shape.v_offset, a.cur.n_rows, row, a.rot.v,
                                            [&a](int64_t r) { return a.cur.v + r * a.cur.v_stride; });
        rotated.cur.v_stride = row;
    }
    return rotated;
}

// --- tasks -----------------------------------------------------------------------------------------------------------

template <int DIM>
void run_task(const AttendArgs & a, const Shape & shape, const Threads & threads, int32_t index) {
    // The last queries see most: they go first, so that threads end at about the same time.
    const int32_t head_sets = a.mem.n_head_kv / shape.heads;
    const int32_t split     = index % shape.n_splits;
    const int32_t head      = index / shape.n_splits % head_sets * shape.heads;
    const int32_t block     = shape.n_blocks - 1 - index / shape.n_splits / head_sets;
    const int32_t first     = block * shape.block;
    const int32_t tiles     = divide_up(a.n_kv, kTile);

    float *    pool = scratch_at<float>(threads, shape.thread_offset + size_t(threads.ith) * shape.thread_bytes);
    const auto take = [&pool](size_t n) {
        float * p = pool;
        pool += n;
        return p;
    };
    const size_t most = shape.head_rows * size_t(shape.heads);
    Task         t{a,
                   scratch_at<int32_t>(threads, shape.sources_offset),
                   shape,
                   head,
                   first,
                   std::min(shape.block, a.n_q - first),
                   split * shape.split,
                   std::min(tiles, (split + 1) * shape.split),
                   take(keys_floats(DIM)),
                   take(values_floats(DIM)),
                   take(8 * DIM),
                   take(DIM),
                   take(shape.head_rows * kTile),
                   take(most * DIM),
                   take(most * DIM),
                   take(most),
                   take(most),
                   take(most)};

    const int32_t rows = t.rows();
    for (int32_t r = 0; r < rows; ++r) {
        const float * q = a.q + t.row_query(r) * a.q_stride_query + t.row_head(r) * a.q_stride_head;
        for (int d = 0; d < DIM; ++d) {
            t.q[r * DIM + d] = q[d] * a.scale;
        }
    }
    std::fill_n(t.out, size_t(rows) * DIM, 0.0f);
    std::fill_n(t.maximum, rows, -kInfinity);
    std::fill_n(t.sum, rows, 0.0f);

    for (int32_t tile = t.first_tile; tile < t.last_tile; ++tile) {
        attend_tile<DIM>(t, tile);
    }

    for (int32_t r = 0; r < rows; ++r) {
        const int32_t query  = t.row_query(r);
        const int32_t q_head = t.row_head(r);
        const float * from   = t.out + int64_t(r) * DIM;
        if (shape.n_splits > 1) {
            float * to = partial_row(a, shape, threads, split, query, q_head);
            memcpy(to, from, DIM * sizeof(float));
            to[DIM]     = t.maximum[r];
            to[DIM + 1] = t.sum[r];
        } else {
            float *     to     = result_row(a, query, q_head);
            const float factor = finish(t.maximum[r], t.sum[r], a.sinks, q_head);
            for (int d = 0; d < DIM; ++d) {
                to[d] = from[d] * factor;
            }
            rotate_row(to, to, DIM, a.rot.v);
        }
    }
}

// Merges the partial results of one row.
void merge(const AttendArgs & a, const Shape & shape, const Threads & t, int64_t query, int32_t head) {
    const int32_t dim     = a.mem.head_dim;
    float         maximum = -kInfinity;
    for (int32_t s = 0; s < shape.n_splits; ++s) {
        maximum = std::max(maximum, partial_row(a, shape, t, s, query, head)[dim]);
    }
    float * to  = result_row(a, query, head);
    float   sum = 0.0f;
    std::fill_n(to, dim, 0.0f);
    if (maximum == -kInfinity) {
        return;
    }
    for (int32_t s = 0; s < shape.n_splits; ++s) {
        const float * from = partial_row(a, shape, t, s, query, head);
        if (from[dim] == -kInfinity) {
            continue;
        }
        const float weight = expf(from[dim] - maximum);
        sum += weight * from[dim + 1];
        for (int32_t d = 0; d < dim; ++d) {
            to[d] += weight * from[d];
        }
    }
    const float factor = finish(maximum, sum, a.sinks, head);
    for (int32_t d = 0; d < dim; ++d) {
        to[d] *= factor;
    }
    rotate_row(to, to, dim, a.rot.v);
}

}  // namespace

size_t kv_attend_scratch(const AttendArgs & a, int nth) { return Shape(a, nth).bytes; }

void kv_attend(const AttendArgs & args, const Threads & t) {
    const Shape shape(args, t.nth);
    auto *      next = static_cast<std::atomic<int32_t> *>(t.scratch);  // the first task that nobody has taken
    if (t.ith == 0) {
        new (next) std::atomic<int32_t>(0);
    }
    spread_sources(args, shape, t);
    const AttendArgs a = rotate_inputs(args, shape, t);
    if (t.nth > 1) {
        t.barrier(t.barrier_arg);
    }
    for (;;) {
        const int32_t task = next->fetch_add(1, std::memory_order_relaxed);
        if (task >= shape.n_tasks) {
            break;
        }
        switch (a.mem.head_dim) {
        case 64:
            run_task<64>(a, shape, t, task);
            break;
        case 128:
            run_task<128>(a, shape, t, task);
            break;
        default:
            run_task<256>(a, shape, t, task);
            break;
        }
    }
    if (shape.n_splits > 1) {
        if (t.nth > 1) {
            t.barrier(t.barrier_arg);
        }
        const int64_t rows = int64_t(a.n_q) * a.n_head;
        for (int64_t row = t.ith; row < rows; row += t.nth) {
            merge(a, shape, t, row / a.n_head, int32_t(row % a.n_head));
        }
    }
}

}  // namespace kvfold
