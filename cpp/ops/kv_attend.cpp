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

#include "ops/attend_scratch.h"
#include "ops/attend_tile.h"

namespace kvfold {

namespace {

constexpr int32_t kMinSplit         = 8;  // tiles; shorter ranges of cells are not worth a task
constexpr int32_t kMinSplitAllHeads = 2;
constexpr int64_t kSmall            = 32768;  // floats of all queries; up to here a task does all KV heads
constexpr int32_t kTargetTasks      = 64;     // split cells until there are about so many tasks

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

    // Scratch: the next task, the source of each cell, rotated queries, keys and values (if they are to be rotated), the
    // memory of each thread, partial results (if there are several ranges of cells).
    size_t         sources_offset;
    RotatedOffsets rotated;
    size_t         thread_offset;
    Partials       partials;
    size_t         bytes;

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
        const int32_t most     = std::max(1, std::min(wanted, tiles / shortest));
        split                  = divide_up(tiles, most);
        n_splits               = std::max(1, divide_up(tiles, std::max(1, split)));
        n_tasks                = a.n_q == 0 ? 0 : units * n_splits;
        head_rows              = size_t(block) * size_t(gqa);

        const size_t rows       = head_rows * size_t(heads);
        const size_t row_floats = 2 * size_t(dim) + 3;
        const size_t floats =
            size_t(keys_floats(dim) + values_floats(dim) + 9 * dim) + rows * row_floats + head_rows * kTile;
        thread_bytes = ScratchPlan::align(floats * sizeof(float));

        ScratchPlan plan;
        plan.reserve(kLine);  // the next task
        sources_offset = plan.reserve(size_t(a.n_kv) * sizeof(int32_t));
        rotated        = reserve_rotated(a, plan);
        thread_offset  = plan.reserve(size_t(nth) * thread_bytes);
        // `most` and not `n_splits`: more cells never need less, see Traits::work_size
        partials = {plan.reserve(most > 1 ? Partials::size(a, most) : 0), n_splits};
        bytes    = plan.bytes();
    }
};

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

    TileMemory memory;
    float *    summary;  // [head_dim]
    float *    q;        // [rows][head_dim], scaled
    float *    out;      // [rows][head_dim], not yet divided by `sum`
    float *    maximum;  // [rows]
    float *    sum;      // [rows]
    float *    rescale;  // [rows] what the results so far are multiplied with when the maximum moves

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

// Finds the key and value rows of cells c0 .. c0 + n - 1 of a tile, and calls use(c, key, value) with each pair.
template <int DIM, typename Rows>
struct TileReader {
    static constexpr int64_t blocks = DIM / kFp4BlockValues;
    static constexpr int64_t ahead  = 8;  // cells to prefetch before they are needed

    const Task & t;
    const View & view;
    const Rows   rows;
    int64_t      first;  // cell
    int64_t      head;
    int          group_shift;
    int64_t      group  = -1;    // whose summary is decoded
    bool         finite = true;  // no value read so far is Inf or NaN

    TileReader(const Task & task, const View & v, const Rows & far, int32_t tile, int32_t kv_head)
        : t(task), view(v), rows(far), first(int64_t(tile) * kTile), head(kv_head), group_shift(0) {
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
                const int64_t at = cell * heads + head;
                rows.prefetch(mem.far_k, at + ahead * heads);
                rows.prefetch(mem.far_v, at + ahead * heads);
                use(c, far_key(rows.row(mem.far_k, at), t.summary), rows.row(mem.far_v, at));
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
        const float * weight = t.memory.score + r * kTile;
        for (int32_t d = 0; d < DIM; d += kPanel) {
            float *       to    = out + int64_t(r) * DIM + d;
            const float * value = t.memory.values + d / kPanel * panel_floats(kTile);
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
template <int DIM, typename Rows>
void attend_head(const Task & t, const View & view, const Rows & far, int32_t tile, int32_t h) {
    const int32_t rows    = t.head_rows();
    const int32_t base    = h * rows;
    const int32_t head    = t.first_head + h;
    float *       q       = t.q + int64_t(base) * DIM;
    float *       out     = t.out + int64_t(base) * DIM;
    float *       rescale = t.rescale + base;
    const bool    direct  = rows <= kDirectRows;

    TileReader<DIM, Rows> reader(t, view, far, tile, head);
    if (direct) {
        score_directly<DIM>(rows, reader, t.memory, q);
    } else {
        load_tile<DIM>(reader, t.memory);
    }

    float   bias[kTile];
    int32_t bias_query = -1;
    for (int32_t r0 = 0; r0 < rows; r0 += kStrip) {
        const int32_t n = std::min(kStrip, rows - r0);
        if (!direct) {
            product(n, q + int64_t(r0) * DIM, DIM, t.memory.keys, DIM, t.memory.score + r0 * kTile, kTile, nullptr);
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
            soften(t.memory.score + r * kTile, row_bias, t.a.softcap, t.maximum[base + r], t.sum[base + r], rescale[r]);
        }
    }
    if (!reader.finite && !view.all) {
        weigh_visible<DIM>(t, rows, out, rescale);
        return;
    }
    for (int32_t r0 = 0; r0 < rows; r0 += kStrip) {
        const int32_t n = std::min(kStrip, rows - r0);
        product(n, t.memory.score + r0 * kTile, kTile, t.memory.values, kTile, out + int64_t(r0) * DIM, DIM,
                rescale + r0);
    }
}

// (Not inlined: with the code for two kinds of rows its caller would be so large that the compiler inlines nothing more.)
template <int DIM, typename Rows>
[[gnu::noinline]] void attend_tile(const Task & t, const Rows & far, int32_t tile) {
    const View view = look(t, tile);
    if (!view.any) {
        return;
    }
    for (int32_t h = 0; h < t.shape.heads; ++h) {
        attend_head<DIM>(t, view, far, tile, h);
    }
}

// --- results ---------------------------------------------------------------------------------------------------------

float * result_row(const AttendArgs & a, int64_t query, int32_t head) {
    return a.out + (query * a.n_head + head) * a.mem.head_dim;
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
                   {take(keys_floats(DIM)), take(values_floats(DIM)), take(8 * DIM), take(shape.head_rows * kTile)},
                   take(DIM),
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

    with_far_rows<DIM>(a.mem, [&t](const auto & far) {
        for (int32_t tile = t.first_tile; tile < t.last_tile; ++tile) {
            attend_tile<DIM>(t, far, tile);
        }
    });

    for (int32_t r = 0; r < rows; ++r) {
        const int32_t query  = t.row_query(r);
        const int32_t q_head = t.row_head(r);
        const float * from   = t.out + int64_t(r) * DIM;
        if (shape.n_splits > 1) {
            float * to = shape.partials.row(a, threads, split, query, q_head);
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

}  // namespace

size_t kv_attend_scratch(const AttendArgs & a, int nth) { return Shape(a, nth).bytes; }

void kv_attend(const AttendArgs & args, const Threads & t) {
    const Shape shape(args, t.nth);
    reset_tasks(t);
    spread_sources(args, shape.sources_offset, t);
    const AttendArgs a = rotate_inputs(args, shape.rotated, t);
    wait_for_all(t);
    run_tasks(t, shape.n_tasks, a.mem.head_dim,
              [&](auto dim, int32_t task) { run_task<decltype(dim)::value>(a, shape, t, task); });
    if (shape.n_splits > 1) {
        wait_for_all(t);
        shape.partials.merge(a, t);
    }
}

}  // namespace kvfold
