// kv_score and kv_observe on the CPU.
//
// A score needs numbers about all cells before it can be made (the mean key, the mean size of values, the sum of a softmax), so
// kv_score has five phases with barriers between them. Sums are made over slices of fixed size first, so that they do not
// depend on the number of threads.

#include "ops/kv_score.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/fp4_codec.h"
#include "ops/far_rows.h"
#include "ops/rotate.h"
#include "ops/scratch_plan.h"

namespace kvfold {

namespace {

constexpr int32_t kSliceCells = 256;  // a multiple of every group size

constexpr int32_t kSumValues = 64;  // that are added up in single precision

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Shape {
    int32_t n_slices;
    int32_t width;  // channels of all KV heads
    size_t  part_offset, count_offset, mean_offset, query_offset, cos_offset, size_offset, logit_offset, total_offset;
    size_t  bytes;

    explicit Shape(const ScoreArgs & a) {
        n_slices = std::max(1, (a.n_kv + kSliceCells - 1) / kSliceCells);
        width    = a.mem.n_head_kv * a.mem.head_dim;

        const auto   floats = [](int64_t n) { return size_t(n) * sizeof(float); };
        const size_t cells  = size_t(a.n_kv);
        ScratchPlan  plan;
        part_offset  = plan.reserve(floats(int64_t(n_slices) * width));
        count_offset = plan.reserve(size_t(n_slices) * sizeof(int32_t));
        mean_offset  = plan.reserve(floats(width));
        query_offset = plan.reserve(floats(2 * int64_t(a.n_head) * a.mem.head_dim));
        cos_offset   = plan.reserve(floats(a.mem.n_head_kv) * cells);
        size_offset  = plan.reserve(floats(a.mem.n_head_kv) * cells);
        logit_offset = plan.reserve(floats(a.n_head) * cells);
        total_offset = plan.reserve(floats(2 * int64_t(a.n_head)));
        bytes        = plan.bytes();
    }
};

struct Work {
    const ScoreArgs & a;
    const Shape &     shape;
    float *           part;   // [n_slices][width] sums of summaries, once for every far cell
    int32_t *         count;  // [n_slices] far cells
    float *           mean;   // [width], of length 1 in each head (or 0)
    float *           query;  // [n_head][2][head_dim] scale * mean, scale^2 / 2 * variance
    float *           cos;    // [n_head_kv][n_kv]
    float *           size;   // [n_head_kv][n_kv]
    float *           logit;  // [n_head][n_kv]; then exp(logit - largest one)
    float *           total;  // [n_head_kv] mean size of values, then [n_head] sum of the exp
    bool              attention;

    Work(const ScoreArgs & args, const Shape & s, const Threads & t) : a(args), shape(s) {
        part      = scratch_at<float>(t, s.part_offset);
        count     = scratch_at<int32_t>(t, s.count_offset);
        mean      = scratch_at<float>(t, s.mean_offset);
        query     = scratch_at<float>(t, s.query_offset);
        cos       = scratch_at<float>(t, s.cos_offset);
        size      = scratch_at<float>(t, s.size_offset);
        logit     = scratch_at<float>(t, s.logit_offset);
        total     = scratch_at<float>(t, s.total_offset);
        attention = args.queries != nullptr && args.queries[0] > 0.0f;
    }

    bool    far(int32_t cell) const { return (a.far_bits[cell / 32] >> (cell % 32) & 1u) != 0; }
    int32_t begin(int32_t slice) const { return slice * kSliceCells; }
    int32_t end(int32_t slice) const { return std::min(a.n_kv, (slice + 1) * kSliceCells); }
};

// A row of far_k or far_v.
template <int DIM>
void decode(const uint8_t * far, const LayerMemory & mem, int64_t cell, int64_t kv_head, float * x) {
    with_far_rows<DIM>(
        mem, [&](const auto & rows) { write_row<DIM>(rows.row(far, cell * mem.n_head_kv + kv_head), x, 16); });
}

float sum_16(V16 v) {
    float x[16];
    store_16(x, v);
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) {
            x[i] += x[i + step];
        }
    }
    return x[0];
}

template <int DIM>
float dot(const float * x, const float * y) {
    V16 sum = {};
#pragma GCC unroll 16
    for (int i = 0; i < DIM; i += 16) {
        sum = fma_16(load_16(x + i), load_16(y + i), sum);
    }
    return sum_16(sum);
}

// Phase 1: sums of summaries.
template <int DIM>
void add_summaries(const Work & w, int32_t slice) {
    const LayerMemory & mem = w.a.mem;
    float *             sum = w.part + int64_t(slice) * w.shape.width;
    std::fill_n(sum, w.shape.width, 0.0f);
    w.count[slice] = 0;
    float s[DIM];
    for (int32_t c = w.begin(slice); c < w.end(slice); c += mem.group) {
        int32_t members = 0;
        for (int32_t j = c; j < std::min(c + mem.group, w.a.n_kv); ++j) {
            members += w.far(j);
        }
        if (members == 0) {
            continue;
        }
        w.count[slice] += members;
        for (int32_t h = 0; h < mem.n_head_kv; ++h) {
            write_row<DIM>(FarRow{group_summary(mem, c / mem.group, h)}, s, 16);
            for (int32_t d = 0; d < DIM; ++d) {
                sum[h * DIM + d] += float(members) * s[d];
            }
        }
    }
}

// Phase 2: directions of the mean keys, and the query statistics as they are used.
template <int DIM>
void make_means(const Work & w, int32_t h) {
    float * mean = w.mean + h * DIM;
    std::fill_n(mean, DIM, 0.0f);
    for (int32_t slice = 0; slice < w.shape.n_slices; ++slice) {
        for (int32_t d = 0; d < DIM; ++d) {
            mean[d] += w.part[int64_t(slice) * w.shape.width + h * DIM + d];
        }
    }
    const float length  = sqrtf(dot<DIM>(mean, mean));
    const float inverse = length > 0.0f ? 1.0f / length : 0.0f;
    for (int32_t d = 0; d < DIM; ++d) {
        mean[d] *= inverse;
    }
    if (!w.attention) {
        return;
    }
    const int32_t gqa      = w.a.n_head / w.a.mem.n_head_kv;
    const float * sums     = w.a.queries + 1;
    const float * squares  = sums + int64_t(w.a.n_head) * DIM;
    const float   per_item = 1.0f / w.a.queries[0];
    for (int32_t j = h * gqa; j < (h + 1) * gqa; ++j) {
        float * query = w.query + int64_t(j) * 2 * DIM;
        for (int32_t d = 0; d < DIM; ++d) {
            const float m  = per_item * sums[j * DIM + d];
            query[d]       = w.a.scale * m;
            query[DIM + d] = 0.5f * w.a.scale * w.a.scale * std::max(0.0f, per_item * squares[j * DIM + d] - m * m);
        }
    }
}

// Phase 3: what a row says by itself.
template <int DIM>
void read_rows(const Work & w, int32_t slice) {
    const ScoreArgs &   a   = w.a;
    const LayerMemory & mem = a.mem;
    const int32_t       gqa = a.n_head / mem.n_head_kv;
    float               s[DIM], k[2 * DIM], v[DIM];  // the second half of k: squares
    for (int32_t h = 0; h < mem.n_head_kv; ++h) {
        int32_t decoded = -1;
        for (int32_t c = w.begin(slice); c < w.end(slice); ++c) {
            if (!w.far(c)) {
                for (int32_t j = h * gqa; w.attention && j < (h + 1) * gqa; ++j) {
                    w.logit[int64_t(j) * a.n_kv + c] = -kInfinity;
                }
                continue;
            }
            if (decoded != c / mem.group) {
                decoded = c / mem.group;
                write_row<DIM>(FarRow{group_summary(mem, decoded, h)}, s, 16);
            }
            decode<DIM>(mem.far_k, mem, c, h, k);
            for (int32_t d = 0; d < DIM; ++d) {
                k[d] += s[d];
            }
            const float length             = sqrtf(dot<DIM>(k, k));
            w.cos[int64_t(h) * a.n_kv + c] = length > 0.0f ? dot<DIM>(k, w.mean + h * DIM) / length : 0.0f;

            if (a.sizes) {
                decode<DIM>(mem.far_v, mem, c, h, v);
                w.size[int64_t(h) * a.n_kv + c] = sqrtf(dot<DIM>(v, v));
            }
            if (!w.attention) {
                continue;
            }
            for (int32_t d = 0; d < DIM; ++d) {
                k[DIM + d] = k[d] * k[d];
            }
            for (int32_t j = h * gqa; j < (h + 1) * gqa; ++j) {
                const float * query = w.query + int64_t(j) * 2 * DIM;
                float &       logit = w.logit[int64_t(j) * a.n_kv + c];
                if (a.softcap == 0.0f) {
                    logit = dot<2 * DIM>(query, k);
                } else {
                    logit = a.softcap * tanhf(dot<DIM>(query, k) / a.softcap) + dot<DIM>(query + DIM, k + DIM);
                }
            }
        }
    }
}

int32_t count_far(const Work & w) {
    int32_t n = 0;
    for (int32_t slice = 0; slice < w.shape.n_slices; ++slice) {
        n += w.count[slice];
    }
    return n;
}

// Replaces x[i] by exp(x[i] - the largest of them), and returns their sum.
float exponentials(float * x, int32_t n) {
    float top = -std::numeric_limits<float>::max();
    for (int32_t i = 0; i < n; ++i) {
        top = x[i] > top ? x[i] : top;  // of numbers
    }
    double total = 0.0;
    for (int32_t i = 0; i < n; i += kSumValues) {
        const int32_t count = std::min(kSumValues, n - i);
        float         e[kSumValues];
        VFloat        sum = v_set(0.0f);
        std::copy_n(x + i, count, e);
        std::fill(e + count, e + kSumValues, -kInfinity);
        for (int32_t j = 0; j < kSumValues; j += kLanes) {
            const VFloat some = v_exp(v_load(e + j) - v_set(top));
            v_store(e + j, some);
            sum = sum + some;
        }
        total += double(v_sum(sum));
        std::copy_n(e, count, x + i);
    }
    return float(total);
}

// Phase 4: sums over all cells, of one KV head and of its heads.
void make_totals(const Work & w, int32_t h) {
    const ScoreArgs & a   = w.a;
    const int32_t     gqa = a.n_head / a.mem.n_head_kv;
    if (a.sizes) {
        const float * size = w.size + int64_t(h) * a.n_kv;
        double        sum  = 0.0;
        for (int32_t c = 0; c < a.n_kv; ++c) {
            sum += w.far(c) ? double(size[c]) : 0.0;
        }
        w.total[h] = float(sum / std::max(1, count_far(w)));
    }
    for (int32_t j = h * gqa; w.attention && j < (h + 1) * gqa; ++j) {
        w.total[a.mem.n_head_kv + j] = exponentials(w.logit + int64_t(j) * a.n_kv, a.n_kv);
    }
}

// Phase 5
void write_scores(const Work & w, int32_t slice) {
    const ScoreArgs & a     = w.a;
    const int32_t     heads = a.mem.n_head_kv;
    const float       n     = float(count_far(w));
    for (int32_t c = w.begin(slice); c < w.end(slice); ++c) {
        float mine[kScoreKinds] = {};
        if (w.far(c)) {
            for (int32_t h = 0; h < heads; ++h) {
                mine[kNovelty] += 1.0f - w.cos[int64_t(h) * a.n_kv + c];
                if (a.sizes) {
                    mine[kSize] += w.total[h] > 0.0f ? w.size[int64_t(h) * a.n_kv + c] / w.total[h] : 1.0f;
                }
            }
            mine[kNovelty] /= float(heads);
            mine[kSize] /= float(heads);
            for (int32_t j = 0; w.attention && j < a.n_head; ++j) {
                mine[kAttention] += n / w.total[heads + j] * w.logit[int64_t(j) * a.n_kv + c];
            }
            mine[kAttention] /= float(a.n_head);
        }
        for (int kind = 0; kind < kScoreKinds; ++kind) {
            const int64_t at = int64_t(kind) * a.n_kv + c;
            a.scores[at]     = mine[kind] + (a.before != nullptr ? a.before[at] : 0.0f);
        }
    }
}

void wait(const Threads & t) {
    if (t.nth > 1) {
        t.barrier(t.barrier_arg);
    }
}

template <int DIM>
void score(const Work & w, const Threads & t) {
    const int32_t n = w.shape.n_slices, heads = w.a.mem.n_head_kv;
    for (int32_t slice = t.ith; slice < n; slice += t.nth) {
        add_summaries<DIM>(w, slice);
    }
    wait(t);
    for (int32_t h = t.ith; h < heads; h += t.nth) {
        make_means<DIM>(w, h);
    }
    wait(t);
    for (int32_t slice = t.ith; slice < n; slice += t.nth) {
        read_rows<DIM>(w, slice);
    }
    wait(t);
    for (int32_t h = t.ith; h < heads; h += t.nth) {
        make_totals(w, h);
    }
    wait(t);
    for (int32_t slice = t.ith; slice < n; slice += t.nth) {
        write_scores(w, slice);
    }
}

}  // namespace

size_t kv_score_scratch(const ScoreArgs & a, int) { return Shape(a).bytes; }

void kv_score(const ScoreArgs & a, const Threads & t) {
    const Shape shape(a);
    const Work  w(a, shape, t);
    switch (a.mem.head_dim) {
    case 64:
        return score<64>(w, t);
    case 128:
        return score<128>(w, t);
    default:
        return score<256>(w, t);
    }
}

size_t kv_observe_scratch(const ObserveArgs & a, int nth) {
    return size_t(nth) * ScratchPlan::align(size_t(a.head_dim) * sizeof(float));
}

void kv_observe(const ObserveArgs & a, const Threads & t) {
    const int32_t dim = a.head_dim;
    const double  all = std::pow(double(kQueryDecay), a.n_q);
    float *       q   = scratch_at<float>(t, size_t(t.ith) * ScratchPlan::align(size_t(dim) * sizeof(float)));
    for (int32_t h = t.ith; h < a.n_head; h += t.nth) {
        float * sums    = a.queries + 1 + int64_t(h) * dim;
        float * squares = sums + int64_t(a.n_head) * dim;
        for (int32_t d = 0; d < dim; ++d) {
            sums[d] *= float(all);
            squares[d] *= float(all);
        }
        for (int32_t i = 0; i < a.n_q; ++i) {
            rotate_row(a.q + i * a.q_stride_query + h * a.q_stride_head, q, dim, a.rot);
            const float weight = float(std::pow(double(kQueryDecay), a.n_q - 1 - i));
            for (int32_t d = 0; d < dim; ++d) {
                sums[d] += weight * q[d];
                squares[d] += weight * q[d] * q[d];
            }
        }
    }
    if (t.ith == 0) {
        // the sum of the weights of n_q queries
        a.queries[0] = float(double(a.queries[0]) * all + (1.0 - all) / (1.0 - double(kQueryDecay)));
    }
}

}  // namespace kvfold
