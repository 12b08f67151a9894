// kv_receive and kv_lose on the CPU. A task is a KV head and a few queries: the scores of all cells are kept until their sums are known.
// Threads take the largest of their tasks, and the largest of the threads' is what remains; what is lost is added up by task. So nothing
// depends on who did what.

#include "ops/kv_receive.h"

#include <cmath>

#include "ops/attend_scratch.h"
#include "ops/row_scores.h"

namespace kvfold {

namespace {

constexpr int32_t kRows = 48;  // rows of a task, about: they share a decoded key, and their scores have to be kept

struct Shape {
    int32_t        gqa;
    int32_t        block;  // queries a task
    int32_t        rows;   // of a task, at most
    int32_t        tiles;
    int32_t        n_tasks;
    size_t         sources_offset;
    RotatedOffsets rotated;
    size_t         sums_offset;  // Alignment [n_tasks][gqa]
    size_t         thread_offset, thread_bytes;
    size_t         bytes;

    Shape(const AttendArgs & a, int nth) {
        const int32_t dim = a.mem.head_dim;
        gqa               = a.n_head / a.mem.n_head_kv;
        block             = std::max(1, std::min(a.n_q, kRows / gqa));
        rows              = block * gqa;
        tiles             = divide_up(a.n_kv, kTile);
        n_tasks           = a.mem.n_head_kv * divide_up(a.n_q, block);

        const size_t cells  = size_t(tiles) * size_t(kTile);
        const size_t floats = size_t(a.mem.n_head_kv) * cells + key_tile_floats(dim) + size_t(dim) +
                              size_t(rows) * size_t(dim) + cells + row_scores_floats(rows, a.n_kv);
        ScratchPlan  plan;
        plan.reserve(kLine);  // the next task
        sources_offset = plan.reserve(size_t(a.n_kv) * sizeof(int32_t));
        rotated        = reserve_rotated(a, plan);
        sums_offset    = plan.reserve(size_t(n_tasks) * size_t(gqa) * sizeof(Alignment));
        thread_bytes   = ScratchPlan::align(floats * sizeof(float));
        thread_offset  = plan.reserve(size_t(nth) * thread_bytes);
        bytes          = plan.bytes();
    }

    // A thread's memory begins with its largest probabilities, [n_head_kv][tiles * 64].
    float * memory(const Threads & t, int ith) const {
        return scratch_at<float>(t, thread_offset + size_t(ith) * thread_bytes);
    }
};

// What one query sees: its mask, and -inf for cells that nobody sees.
void read_bias(const AttendArgs & a, const int32_t * cell_src, int32_t query, int32_t n, float * bias) {
    for (int32_t c = 0; c < n; ++c) {
        const bool hidden = c >= a.n_kv || cell_src[c] == kSrcHidden;
        bias[c] = hidden ? -kInfinity : a.mask != nullptr ? f16_decode(a.mask[query * a.mask_stride + c]) : 0.0f;
    }
}

// Calls use(row, first) for every row of a task whose query sees anything: its probabilities for the cells of tile i are at
// first + i * stride.
template <int DIM, typename Use>
void run_task(const AttendArgs & a, const Shape & shape, const Threads & t, int32_t task, const Use & use) {
    const int32_t * cell_src = scratch_at<int32_t>(t, shape.sources_offset);
    const int32_t   head     = task % a.mem.n_head_kv;
    const int32_t   first    = task / a.mem.n_head_kv * shape.block;
    const int32_t   rows     = std::min(shape.block, a.n_q - first) * shape.gqa;
    const int32_t   cells    = shape.tiles * kTile;

    float * tile    = shape.memory(t, t.ith) + int64_t(a.mem.n_head_kv) * cells;
    float * summary = tile + key_tile_floats(DIM);
    float * q       = summary + DIM;
    float * bias    = q + int64_t(shape.rows) * DIM;
    float * score   = bias + cells;

    for (int32_t r = 0; r < rows; ++r) {
        const float * from =
            a.q + (first + r / shape.gqa) * a.q_stride_query + (head * shape.gqa + r % shape.gqa) * a.q_stride_head;
        for (int d = 0; d < DIM; ++d) {
            q[r * DIM + d] = from[d] * a.scale;
        }
    }
    FarKeys<DIM> far(a.mem, head, summary);
    score_rows<DIM>(q, rows, a.n_kv, tile, score, [&](int32_t cell, float * to) {
        const int32_t src = cell_src[cell];
        if (src == kSrcFar) {
            far.read(cell, to);
        } else if (src == kSrcHidden) {
            std::fill_n(to, DIM, 0.0f);
        } else if (src_is_current(src)) {
            std::copy_n(a.cur.k + src_current_row(src) * a.cur.k_stride + head * DIM, DIM, to);
        } else {
            f16_decode_row(a.mem.near_k + (int64_t(src) * a.mem.n_head_kv + head) * DIM, to, DIM);
        }
    });
    for (int32_t r = 0; r < rows; ++r) {
        if (r % shape.gqa == 0) {
            read_bias(a, cell_src, first + r / shape.gqa, cells, bias);
        }
        const float * sink = a.sinks != nullptr ? a.sinks + head * shape.gqa + r % shape.gqa : nullptr;
        if (make_probabilities(score + r * kTile, rows, shape.tiles, bias, a.softcap, sink)) {
            use(r, score + r * kTile, int64_t(rows) * kTile);
        }
    }
}

// Runs all tasks; make_use(task) is what run_task() is to call.
template <typename MakeUse>
void run_all(const AttendArgs & args, const Shape & shape, const Threads & t, const MakeUse & make_use) {
    reset_tasks(t);
    spread_sources(args, shape.sources_offset, t);
    std::fill_n(shape.memory(t, t.ith), int64_t(args.mem.n_head_kv) * shape.tiles * kTile, 0.0f);
    const AttendArgs a = rotate_inputs(args, shape.rotated, t);
    wait_for_all(t);
    run_tasks(t, shape.n_tasks, a.mem.head_dim,
              [&](auto dim, int32_t task) { run_task<decltype(dim)::value>(a, shape, t, task, make_use(task)); });
    wait_for_all(t);
}

}  // namespace

size_t kv_receive_scratch(const ReceiveArgs & a, int nth) { return Shape(a.attend, nth).bytes; }

void kv_receive(const ReceiveArgs & args, const Threads & t) {
    const Shape        shape(args.attend, t.nth);
    const AttendArgs & a   = args.attend;
    const int64_t      row = int64_t(shape.tiles) * kTile;
    run_all(a, shape, t, [&](int32_t task) {
        float * largest = shape.memory(t, t.ith) + task % a.mem.n_head_kv * row;
        return [&shape, largest](int32_t, const float * p, int64_t stride) {
            for (int32_t i = 0; i < shape.tiles; ++i) {
                for (int32_t c = 0; c < kTile; c += kLanes) {
                    float * at = largest + i * kTile + c;
                    v_store(at, v_max(v_load(at), v_load(p + i * stride + c)));
                }
            }
        };
    });
    for (int32_t c = int32_t(int64_t(a.n_kv) * t.ith / t.nth); c < int64_t(a.n_kv) * (t.ith + 1) / t.nth; ++c) {
        const bool far = (a.far_bits[c / 32] >> (c % 32) & 1u) != 0;
        for (int32_t head = 0; head < a.mem.n_head_kv && far; ++head) {
            float & most = args.received[head * a.mem.n_cells + c];
            for (int i = 0; i < t.nth; ++i) {
                most = std::max(most, shape.memory(t, i)[head * row + c]);
            }
        }
    }
}

size_t kv_lose_scratch(const LoseArgs & a, int nth) { return Shape(a.attend, nth).bytes; }

void kv_lose(const LoseArgs & args, const Threads & t) {
    const Shape        shape(args.attend, t.nth);
    const AttendArgs & a    = args.attend;
    auto *             sums = scratch_at<Alignment>(t, shape.sums_offset);
    run_all(a, shape, t, [&](int32_t task) {
        Alignment * mine = sums + int64_t(task) * shape.gqa;
        std::fill_n(mine, shape.gqa, Alignment{});
        return [&args, &a, &shape, mine](int32_t row, const float * p, int64_t stride) {
            double lost = 0.0;
            for (int32_t c = 0; c < a.n_kv; ++c) {
                const uint32_t far = a.far_bits[c / 32] & args.dropped[c / 32];
                lost += (far >> (c % 32) & 1u) != 0 ? double(p[c / kTile * stride + c % kTile]) : 0.0;
            }
            const double kept = std::max(1.0 - lost, 1e-7);  // what rounding leaves of nothing
            mine[row % shape.gqa].add({1.0, kept, -std::log(kept), -std::log(kept)});
        };
    });
    for (int32_t j = t.ith; j < a.n_head; j += t.nth) {
        for (int32_t task = j / shape.gqa; task < shape.n_tasks; task += a.mem.n_head_kv) {
            args.sums[j].add(sums[int64_t(task) * shape.gqa + j % shape.gqa]);
        }
    }
}

}  // namespace kvfold
