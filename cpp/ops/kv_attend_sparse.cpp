// kv_attend_sparse: softmax attention over exact rows and the far rows of listed groups.
//
// A task is one query, one KV head and a share of its rows. It gathers the cells it is to read into tiles of 64 and
// attends to them as the dense form does. Rows of one KV head lie far apart and in no order that hardware foresees, so a
// tile's rows are prefetched when it is gathered, which is one tile before it is used.
//
// Only cells that the query sees are gathered, so whatever other cells hold cannot reach its result.
//
// When something stands in for what is not read, a row of weights that are all 1 goes along with those of the query heads: it adds
// up the values of everything that is read, for their mean.

#include "ops/attend_scratch.h"
#include "ops/attend_tile.h"
#include "ops/kv_select.h"

namespace kvfold {

namespace {

constexpr int32_t kTargetTasks = 16;
constexpr int32_t kMinCells    = 256;  // far cells; fewer are not worth a task

struct Shape {
    int32_t gqa;
    int32_t n_splits;  // tasks a query and KV head
    int32_t n_tasks;
    size_t  thread_bytes;

    // Scratch: the next task, rotated queries, keys and values (if they are to be rotated), the memory of each thread,
    // partial results.
    RotatedOffsets rotated;
    size_t         thread_offset;
    Partials       partials;
    size_t         mean_offset;  // [n_splits][n_q][n_head_kv] sums of values, head_dim, and how many of them
    size_t         bytes;

    Shape(const SparseAttendArgs & args, int nth) {
        const AttendArgs & a     = args.attend;
        const int32_t      dim   = a.mem.head_dim;
        const int32_t      units = std::max(1, a.n_q * a.mem.n_head_kv);
        const int64_t      far   = int64_t(args.capacity) * a.mem.group;
        gqa                      = a.n_head / a.mem.n_head_kv;
        n_splits                 = divide_up(std::max(kTargetTasks, 2 * nth), units);
        n_splits                 = int32_t(std::max<int64_t>(1, std::min<int64_t>(n_splits, far / kMinCells)));
        n_tasks                  = a.n_q * a.mem.n_head_kv * n_splits;

        const size_t rows = size_t(gqa) + 1;
        const size_t floats =
            size_t(keys_floats(dim) + values_floats(dim) + 9 * dim) + rows * size_t(kTile + 2 * dim + 3);
        thread_bytes = ScratchPlan::align(floats * sizeof(float));

        ScratchPlan plan;
        plan.reserve(kLine);  // the next task
        rotated       = reserve_rotated(a, plan);
        thread_offset = plan.reserve(size_t(nth) * thread_bytes);
        partials      = {plan.reserve(Partials::size(a, n_splits)), n_splits};
        mean_offset   = plan.reserve(size_t(n_tasks) * size_t(dim + 1) * sizeof(float));
        bytes         = plan.bytes();
    }

    float * mean(const AttendArgs & a, const Threads & t, int32_t split, int64_t query, int32_t kv_head) const {
        const size_t index =
            (size_t(split) * size_t(a.n_q) + size_t(query)) * size_t(a.mem.n_head_kv) + size_t(kv_head);
        return scratch_at<float>(t, mean_offset) + index * size_t(a.mem.head_dim + 1);
    }
};

// --- tiles -----------------------------------------------------------------------------------------------------------

struct Tile {
    int32_t n;            // cells; the rest of the tile is empty
    bool    biased;       // a bias of a cell is not 0
    int32_t cell[kTile];  // of far rows
    int32_t group[kTile];
    int32_t src[kTile];   // as in ExactCell, or kSrcFar
    float   bias[kTile];  // mask entries; -inf for the empty rest
};

// Gathers the cells of a share of a query's rows: exact ones, then listed groups. All of it is for one KV head.
template <int DIM>
class Gatherer {
  public:
    Gatherer(const AttendArgs & a, const int32_t * groups, int32_t query, int32_t head, int32_t exact,
             int32_t exact_end, int32_t group, int32_t group_end)
        : a_(a), groups_(groups), mask_(a.mask != nullptr ? a.mask + query * a.mask_stride : nullptr), head_(head),
          exact_(exact), exact_end_(exact_end), group_(group), group_end_(group_end) {}

    // False: there are no more cells.
    bool fill(Tile & tile) {
        tile.n      = 0;
        tile.biased = false;
        while (tile.n < kTile && exact_ < exact_end_) {
            const ExactCell & x = a_.exact[exact_++];
            if (x.src != kSrcHidden) {
                add(tile, x.cell, x.src);
            }
        }
        while (tile.n < kTile && group_ < group_end_) {
            const int32_t cell = groups_[group_] * a_.mem.group + offset_;
            if (cell < a_.n_kv && (a_.far_bits[cell / 32] >> (cell % 32) & 1u) != 0) {
                add(tile, cell, kSrcFar);
            }
            if (++offset_ == a_.mem.group) {
                offset_ = 0;
                ++group_;
            }
        }
        std::fill(tile.bias + tile.n, tile.bias + kTile, -kInfinity);
        return tile.n > 0;
    }

  private:
    void add(Tile & tile, int32_t cell, int32_t src) {
        float bias = 0.0f;
        if (mask_ != nullptr && mask_[cell] != 0) {
            if (mask_[cell] == kF16MinusInf) {
                return;
            }
            bias        = f16_decode(mask_[cell]);
            tile.biased = true;
        }
        if (src == kSrcFar) {
            const int64_t at = int64_t(cell) * a_.mem.n_head_kv + head_;
            with_far_rows<DIM>(a_.mem, [this, at](const auto & far) {
                far.prefetch(a_.mem.far_k, at);
                far.prefetch(a_.mem.far_v, at);
            });
            if (offset_ == 0) {
                prefetch_row(group_summary(a_.mem, groups_[group_], head_), DIM / kFp4BlockValues);
            }
        }
        tile.cell[tile.n]  = cell;
        tile.group[tile.n] = src == kSrcFar ? groups_[group_] : -1;
        tile.src[tile.n]   = src;
        tile.bias[tile.n]  = bias;
        ++tile.n;
    }

    const AttendArgs & a_;
    const int32_t *    groups_;
    const uint16_t *   mask_;
    int64_t            head_;
    int32_t            exact_, exact_end_;
    int32_t            group_, group_end_;
    int32_t            offset_ = 0;  // into the group
};

// A reader (see attend_tile.h) of a gathered tile.
template <int DIM, typename Rows>
struct TileReader {
    const AttendArgs & a;
    const Tile &       tile;
    const Rows         rows;
    int64_t            head;
    float *            summary;     // [head_dim]
    int64_t            group = -1;  // whose summary is decoded

    template <typename Use>
    void read(int32_t c0, int32_t n, const Use & use) {
        const LayerMemory & mem   = a.mem;
        const int64_t       heads = mem.n_head_kv;
        for (int32_t c = c0; c < c0 + n; ++c) {
            if (c >= tile.n) {
                use(c, ZeroRow{}, ZeroRow{});
                continue;
            }
            const int32_t src = tile.src[c];
            if (src == kSrcFar) {
                const int64_t cell = tile.cell[c];
                if (tile.group[c] != group) {
                    group = tile.group[c];
                    write_row<DIM>(FarRow{group_summary(mem, group, head)}, summary, 16);
                }
                const int64_t at = cell * heads + head;
                use(c, far_key(rows.row(mem.far_k, at), summary), rows.row(mem.far_v, at));
            } else if (src_is_current(src)) {
                const int64_t row = src_current_row(src);
                use(c, ExactRow<float>{a.cur.k + row * a.cur.k_stride + head * DIM},
                    ExactRow<float>{a.cur.v + row * a.cur.v_stride + head * DIM});
            } else {
                const int64_t at = (src * heads + head) * DIM;
                use(c, ExactRow<uint16_t>{mem.near_k + at}, ExactRow<uint16_t>{mem.near_v + at});
            }
        }
    }
};

// --- tasks -----------------------------------------------------------------------------------------------------------

// One query's heads of a KV head.
struct Rows {
    int32_t       n;
    int32_t       n_out;  // n, or one more: that one adds up all values
    const float * q;      // [n][head_dim], rotated and scaled
    float *       out;    // [n_out][head_dim], not yet divided by `sum`
    float *       maximum;
    float *       sum;
    float *       rescale;  // [n_out]
};

// (Not inlined: as in kv_attend.cpp.)
template <int DIM, typename Far>
[[gnu::noinline]] void attend_tile(const AttendArgs & a, const Far & far, const Tile & tile, int32_t head,
                                   const Rows & rows, const TileMemory & memory, float * summary) {
    TileReader<DIM, Far> reader{a, tile, far, head, summary};
    const bool           direct = rows.n <= kDirectRows;
    if (direct) {
        score_directly<DIM>(rows.n, reader, memory, rows.q);
    } else {
        load_tile<DIM>(reader, memory);
    }
    const float * bias = tile.biased || tile.n < kTile ? tile.bias : nullptr;
    for (int32_t r0 = 0; r0 < rows.n_out; r0 += kStrip) {
        const int32_t n_out = std::min(kStrip, rows.n_out - r0);
        const int32_t n     = std::min(n_out, rows.n - r0);
        if (!direct && n > 0) {
            product(n, rows.q + r0 * DIM, DIM, memory.keys, DIM, memory.score + r0 * kTile, kTile, nullptr);
        }
        for (int32_t r = r0; r < r0 + n; ++r) {
            soften(memory.score + r * kTile, bias, a.softcap, rows.maximum[r], rows.sum[r], rows.rescale[r]);
        }
        product(n_out, memory.score + r0 * kTile, kTile, memory.values, kTile, rows.out + r0 * DIM, DIM,
                rows.rescale + r0);
    }
}

template <int DIM>
void run_task(const SparseAttendArgs & args, const AttendArgs & a, const Shape & shape, const Threads & threads,
              int32_t index) {
    const int32_t   split = index % shape.n_splits;
    const int32_t   head  = index / shape.n_splits % a.mem.n_head_kv;
    const int32_t   query = index / shape.n_splits / a.mem.n_head_kv;
    const int32_t * list = args.selected + (int64_t(query) * a.mem.n_head_kv + head) * group_list_stride(args.capacity);
    const auto      begin = [&shape](int32_t n, int32_t s) { return int32_t(int64_t(n) * s / shape.n_splits); };

    float *    pool = scratch_at<float>(threads, shape.thread_offset + size_t(threads.ith) * shape.thread_bytes);
    const auto take = [&pool](size_t n) {
        float * p = pool;
        pool += n;
        return p;
    };
    const size_t     gqa     = size_t(shape.gqa);
    const size_t     n_out   = gqa + (args.unread != nullptr ? 1 : 0);
    const TileMemory memory  = {take(keys_floats(DIM)), take(values_floats(DIM)), take(8 * DIM), take(n_out * kTile)};
    float *          summary = take(DIM);
    float *          q       = take(gqa * DIM);
    const Rows       rows    = {
        shape.gqa, int32_t(n_out), q, take(n_out * DIM), take(gqa), take(gqa), take(n_out),
    };
    for (int32_t r = 0; r < rows.n; ++r) {
        const float * from = a.q + query * a.q_stride_query + (head * shape.gqa + r) * a.q_stride_head;
        for (int d = 0; d < DIM; ++d) {
            q[r * DIM + d] = from[d] * a.scale;
        }
    }
    std::fill_n(rows.out, n_out * DIM, 0.0f);
    std::fill_n(rows.maximum, gqa, -kInfinity);
    std::fill_n(rows.sum, gqa, 0.0f);
    std::fill_n(rows.rescale, n_out, 1.0f);
    std::fill(memory.score + gqa * kTile, memory.score + n_out * kTile, 1.0f);  // (empty rows of a tile are zeros)
    int32_t n_read = 0;

    Gatherer<DIM> gatherer(a, list + 1, query, head, begin(a.n_exact, split), begin(a.n_exact, split + 1),
                           begin(list[0], split), begin(list[0], split + 1));
    Tile          tiles[2];
    int           now = 0;
    for (bool more = gatherer.fill(tiles[now]); more; now ^= 1) {
        more = gatherer.fill(tiles[now ^ 1]);
        n_read += tiles[now].n;
        with_far_rows<DIM>(
            a.mem, [&](const auto & far) { attend_tile<DIM>(a, far, tiles[now], head, rows, memory, summary); });
    }
    for (int32_t r = 0; r < rows.n; ++r) {
        float * to = shape.partials.row(a, threads, split, query, head * shape.gqa + r);
        memcpy(to, rows.out + r * DIM, DIM * sizeof(float));
        to[DIM]     = rows.maximum[r];
        to[DIM + 1] = rows.sum[r];
    }
    if (args.unread != nullptr) {
        float * to = shape.mean(a, threads, split, query, head);
        memcpy(to, rows.out + gqa * DIM, DIM * sizeof(float));
        to[DIM] = float(n_read);
    }
}

// Adds what stands in for the unread groups to a row; see SparseAttendArgs.
void stand_in(const SparseAttendArgs & args, const Shape & shape, const Threads & t, int64_t query, int32_t head,
              float maximum, float & sum, float * values) {
    const AttendArgs & a = args.attend;
    const float mass = std::min(kStandIn * expf(args.unread[query * a.n_head + head] - maximum), kMostStandIn * sum);
    float       n    = 0.0f;
    for (int32_t s = 0; s < shape.n_splits; ++s) {
        n += shape.mean(a, t, s, query, head / shape.gqa)[a.mem.head_dim];
    }
    if (!(mass > 0.0f) || n == 0.0f) {
        return;
    }
    sum += mass;
    for (int32_t s = 0; s < shape.n_splits; ++s) {
        const float * from = shape.mean(a, t, s, query, head / shape.gqa);
        for (int32_t d = 0; d < a.mem.head_dim; ++d) {
            values[d] += mass / n * from[d];
        }
    }
}

}  // namespace

size_t kv_attend_sparse_scratch(const SparseAttendArgs & a, int nth) { return Shape(a, nth).bytes; }

void kv_attend_sparse(const SparseAttendArgs & args, const Threads & t) {
    const Shape shape(args, t.nth);
    reset_tasks(t);
    const AttendArgs a = rotate_inputs(args.attend, shape.rotated, t);
    wait_for_all(t);
    run_tasks(t, shape.n_tasks, a.mem.head_dim,
              [&](auto dim, int32_t task) { run_task<decltype(dim)::value>(args, a, shape, t, task); });
    wait_for_all(t);
    if (args.unread == nullptr) {
        shape.partials.merge(a, t);
        return;
    }
    shape.partials.merge(a, t, [&](int64_t query, int32_t head, float maximum, float & sum, float * values) {
        stand_in(args, shape, t, query, head, maximum, sum, values);
    });
}

}  // namespace kvfold
