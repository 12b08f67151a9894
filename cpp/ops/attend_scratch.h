// What forms of attention have in common beside tiles: rotated inputs, where rows are, and the partial results of tasks that share a
// row, all in scratch, and how threads take tasks. Internal to the .cpp files of the operations, like simd.h.
#pragma once

#include <atomic>
#include <new>
#include <type_traits>

#include "ops/attend_tile.h"
#include "ops/rotate.h"
#include "ops/scratch_plan.h"

namespace kvfold {
namespace {

// --- rotated inputs --------------------------------------------------------------------------------------------------

struct RotatedOffsets {
    size_t q;  // [n_q][n_head][head_dim]
    size_t k;  // [n_rows][n_head_kv][head_dim]
    size_t v;
};

inline RotatedOffsets reserve_rotated(const AttendArgs & a, ScratchPlan & plan) {
    const size_t   row     = size_t(a.mem.head_dim) * sizeof(float);
    const size_t   q_rows  = size_t(a.n_q) * size_t(a.n_head);
    const size_t   kv_rows = size_t(a.cur.n_rows) * size_t(a.mem.n_head_kv);
    RotatedOffsets at{};
    at.q = plan.reserve(a.rot.k != 0 ? q_rows * row : 0);
    at.k = plan.reserve(a.rot.k != 0 ? kv_rows * row : 0);
    at.v = plan.reserve(a.rot.v != 0 ? kv_rows * row : 0);
    return at;
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
inline AttendArgs rotate_inputs(const AttendArgs & a, const RotatedOffsets & at, const Threads & t) {
    const int64_t dim     = a.mem.head_dim;
    const int64_t row     = a.mem.n_head_kv * dim;
    AttendArgs    rotated = a;
    if (a.rot.k != 0) {
        rotated.q              = rotate_share(t, at.q, int64_t(a.n_q) * a.n_head, dim, a.rot.k, [&a](int64_t r) {
            return a.q + r / a.n_head * a.q_stride_query + r % a.n_head * a.q_stride_head;
        });
        rotated.q_stride_query = a.n_head * dim;
        rotated.q_stride_head  = dim;

        rotated.cur.k =
            rotate_share(t, at.k, a.cur.n_rows, row, a.rot.k, [&a](int64_t r) { return a.cur.k + r * a.cur.k_stride; });
        rotated.cur.k_stride = row;
    }
    if (a.rot.v != 0) {
        rotated.cur.v =
            rotate_share(t, at.v, a.cur.n_rows, row, a.rot.v, [&a](int64_t r) { return a.cur.v + r * a.cur.v_stride; });
        rotated.cur.v_stride = row;
    }
    return rotated;
}

// --- where rows are --------------------------------------------------------------------------------------------------

// Writes the thread's share of the cells' sources, i32 [n_kv]: kSrcFar, kSrcHidden, or where the exact row is.
inline void spread_sources(const AttendArgs & a, size_t offset, const Threads & t) {
    int32_t *     src   = scratch_at<int32_t>(t, offset);
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

// --- partial results -------------------------------------------------------------------------------------------------

// [n_splits][n_q][n_head] rows of head_dim values that are not divided by the sum yet, the maximum, and the sum.
struct Partials {
    size_t  offset;
    int32_t n_splits;

    static size_t size(const AttendArgs & a, int32_t n_splits) {
        return size_t(n_splits) * size_t(a.n_q) * size_t(a.n_head) * size_t(a.mem.head_dim + 2) * sizeof(float);
    }

    float * row(const AttendArgs & a, const Threads & t, int32_t split, int64_t query, int32_t head) const {
        const size_t index = (size_t(split) * size_t(a.n_q) + size_t(query)) * size_t(a.n_head) + size_t(head);
        return scratch_at<float>(t, offset) + index * size_t(a.mem.head_dim + 2);
    }

    // Writes the results of the thread's share of the rows.
    void merge(const AttendArgs & a, const Threads & t) const {
        merge(a, t, [](int64_t, int32_t, float, float &, float *) {});
    }

    // The same; add(query, head, maximum, sum, values) may add to the sum of a row, in units of exp(maximum), and to its weighted
    // values.
    template <typename Add>
    void merge(const AttendArgs & a, const Threads & t, const Add & add) const {
        const int64_t rows = int64_t(a.n_q) * a.n_head;
        for (int64_t r = t.ith; r < rows; r += t.nth) {
            merge_row(a, t, r / a.n_head, int32_t(r % a.n_head), add);
        }
    }

  private:
    template <typename Add>
    void merge_row(const AttendArgs & a, const Threads & t, int64_t query, int32_t head, const Add & add) const {
        const int32_t dim     = a.mem.head_dim;
        float         maximum = -kInfinity;
        for (int32_t s = 0; s < n_splits; ++s) {
            maximum = std::max(maximum, row(a, t, s, query, head)[dim]);
        }
        float * to  = a.out + (query * a.n_head + head) * dim;
        float   sum = 0.0f;
        std::fill_n(to, dim, 0.0f);
        if (maximum == -kInfinity) {
            return;
        }
        for (int32_t s = 0; s < n_splits; ++s) {
            const float * from = row(a, t, s, query, head);
            if (from[dim] == -kInfinity) {
                continue;
            }
            const float weight = expf(from[dim] - maximum);
            sum += weight * from[dim + 1];
            for (int32_t d = 0; d < dim; ++d) {
                to[d] += weight * from[d];
            }
        }
        add(query, head, maximum, sum, to);
        const float factor = finish(maximum, sum, a.sinks, head);
        for (int32_t d = 0; d < dim; ++d) {
            to[d] *= factor;
        }
        rotate_row(to, to, dim, a.rot.v);
    }
};

// --- tasks -----------------------------------------------------------------------------------------------------------

inline void wait_for_all(const Threads & t) {
    if (t.nth > 1) {
        t.barrier(t.barrier_arg);
    }
}

// Tasks are taken by whoever is free. The first line of the scratch holds the next one that nobody has taken.
inline std::atomic<int32_t> * next_task(const Threads & t) { return static_cast<std::atomic<int32_t> *>(t.scratch); }

// One thread's part in setting tasks up; all threads meet before run_tasks().
inline void reset_tasks(const Threads & t) {
    if (t.ith == 0) {
        new (next_task(t)) std::atomic<int32_t>(0);
    }
}

// Calls run(dim, task), where dim is an integral constant of the head size, until all tasks are taken.
template <typename Run>
void run_tasks(const Threads & t, int32_t n_tasks, int32_t head_dim, const Run & run) {
    for (int32_t task; (task = next_task(t)->fetch_add(1, std::memory_order_relaxed)) < n_tasks;) {
        switch (head_dim) {
        case 64:
            run(std::integral_constant<int, 64>{}, task);
            break;
        case 128:
            run(std::integral_constant<int, 128>{}, task);
            break;
        default:
            run(std::integral_constant<int, 256>{}, task);
            break;
        }
    }
}

}  // namespace
}  // namespace kvfold
