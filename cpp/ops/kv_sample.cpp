// kv_sample and kv_sampled on the CPU. A task of kv_sampled is a query head and a window; each has a row of its own for its part of the
// scores, and the rows are added up in their order, so that nothing depends on who did what.

#include "ops/kv_sample.h"

#include <cmath>

#include "ops/attend_scratch.h"
#include "ops/row_scores.h"

namespace kvfold {

namespace {

constexpr int32_t kWindows = 1 + (kWindowQueries.every * kWindowQueries.rows - kWindow) / kStride;
static_assert(kWindow % kStride == 0 && kStride % kWindowQueries.every == 0, "windows have as many samples each");

int64_t queries_seen(const uint16_t * samples) {
    int64_t n;
    memcpy(&n, samples, sizeof(n));
    return n;
}

struct Shape {
    int32_t n_windows;
    int32_t size;  // cells a unit: one or a group
    int32_t n_units;
    int32_t n_tasks;
    int32_t rows;  // samples of a task, at most
    int32_t padded;
    size_t  age_offset;     // i32 [padded] of units
    size_t  count_offset;   // f32 [padded] log of their far cells; -inf: none
    size_t  share_offset;   // f32 [n_tasks][padded]
    size_t  weight_offset;  // f32 [n_tasks]
    size_t  thread_offset, thread_bytes;
    size_t  bytes;

    Shape(const SampledArgs & a, int nth) {
        const bool    windows = a.score == SampledScore::windows;
        const int32_t dim     = a.mem.head_dim;
        n_windows             = windows ? kWindows : 1;
        size                  = windows ? a.mem.group : 1;
        n_units               = divide_up(a.n_kv, size);
        n_tasks               = a.n_head * n_windows;
        rows                  = windows ? kWindow / kWindowQueries.every : kLastQueries.rows;
        padded                = divide_up(n_units, kTile) * kTile;

        const size_t floats = key_tile_floats(dim) + size_t(dim) + size_t(rows) * size_t(dim) + size_t(padded) +
                              row_scores_floats(rows, n_units);
        ScratchPlan  plan;
        plan.reserve(kLine);  // the next task
        age_offset    = plan.reserve(size_t(padded) * sizeof(int32_t));
        count_offset  = plan.reserve(size_t(padded) * sizeof(float));
        share_offset  = plan.reserve(size_t(n_tasks) * size_t(padded) * sizeof(float));
        weight_offset = plan.reserve(size_t(n_tasks) * sizeof(float));
        thread_bytes  = ScratchPlan::align(floats * sizeof(float));
        thread_offset = plan.reserve(size_t(nth) * thread_bytes);
        bytes         = plan.bytes();
    }
};

bool is_far(const SampledArgs & a, int32_t cell) { return (a.far_bits[cell / 32] >> (cell % 32) & 1u) != 0; }

// Writes the thread's share of what is to be known of the units.
void look_at_units(const SampledArgs & a, const Shape & shape, const Threads & t) {
    int32_t * age   = scratch_at<int32_t>(t, shape.age_offset);
    float *   count = scratch_at<float>(t, shape.count_offset);
    for (int32_t unit = t.ith; unit < shape.padded; unit += t.nth) {
        int32_t far = 0;
        age[unit]   = INT32_MAX;
        for (int32_t c = unit * shape.size; c < std::min(a.n_kv, (unit + 1) * shape.size); ++c) {
            far += is_far(a, c);
            age[unit] = is_far(a, c) ? std::min(age[unit], a.age[c]) : age[unit];
        }
        count[unit] = far > 0 ? std::log(float(far)) : -kInfinity;
    }
}

int32_t count_units(const Shape & shape, const float * count) {
    return int32_t(std::count_if(count, count + shape.n_units, [](float n) { return n >= 0.0f; }));
}

// Entropy of a distribution [n], divided by its largest possible value.
float normalised_entropy(const float * m, int32_t n, int32_t possible) {
    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        sum -= m[i] > 0.0f ? double(m[i]) * std::log(double(m[i])) : 0.0;
    }
    return possible > 1 ? float(sum / std::log(double(possible))) : 0.0f;
}

template <int DIM>
void run_task(const SampledArgs & a, const Shape & shape, const Threads & t, int32_t task) {
    const SampleRule rule    = sample_rule(a.score);
    const bool       windows = a.score == SampledScore::windows;
    const int32_t    head    = task % a.n_head;
    const int32_t    window  = task / a.n_head;
    const int32_t    kv_head = head / (a.n_head / a.mem.n_head_kv);
    const int64_t    seen    = queries_seen(a.samples);
    const int32_t    tiles   = shape.padded / kTile;

    const int32_t * unit_age = scratch_at<int32_t>(t, shape.age_offset);
    const float *   count    = scratch_at<float>(t, shape.count_offset);

    float * share   = scratch_at<float>(t, shape.share_offset) + int64_t(task) * shape.padded;
    float * tile    = scratch_at<float>(t, shape.thread_offset + size_t(t.ith) * shape.thread_bytes);
    float * summary = tile + key_tile_floats(DIM);
    float * q       = summary + DIM;
    float * bias    = q + int64_t(shape.rows) * DIM;
    float * score   = bias + shape.padded;
    std::fill_n(share, shape.padded, 0.0f);

    // The samples of the task, the youngest first.
    int32_t   rows = 0;
    int64_t   ages[std::max(kLastQueries.rows, kWindow / kWindowQueries.every)];
    const int youngest = windows ? kStride * window : 0;
    for (int64_t k = (seen - 1) / rule.every; k >= 0 && k > (seen - 1) / rule.every - rule.rows; --k) {
        const int64_t age = seen - 1 - k * rule.every;
        if (age >= youngest && rows < shape.rows && (!windows || age < youngest + kWindow)) {
            const uint16_t * from = a.samples + ((1 + k % rule.rows) * a.n_head + head) * DIM;
            f16_decode_row(from, q + rows * DIM, DIM);
            for (int d = 0; d < DIM; ++d) {
                q[rows * DIM + d] *= a.scale;
            }
            ages[rows++] = age;
        }
    }

    FarKeys<DIM> keys(a.mem, kv_head, summary);
    score_rows<DIM>(q, rows, shape.n_units, tile, score, [&](int32_t unit, float * to) {
        if (count[unit] == -kInfinity) {
            std::fill_n(to, DIM, 0.0f);
        } else if (windows) {
            keys.read_summary(unit, to);
        } else {
            keys.read(unit, to);
        }
    });
    int32_t see = 0;  // samples that see anything
    for (int32_t r = 0; r < rows; ++r) {
        for (int32_t unit = 0; unit < shape.padded; ++unit) {
            bias[unit] = unit_age[unit] >= ages[r] ? count[unit] : -kInfinity;
        }
        see += make_probabilities(score + r * kTile, rows, tiles, bias, a.softcap, nullptr);
        for (int32_t i = 0; i < tiles; ++i) {
            const float * p = score + (int64_t(i) * rows + r) * kTile;
            for (int32_t c = 0; c < kTile; ++c) {
                share[i * kTile + c] += p[c];
            }
        }
    }
    for (int32_t unit = 0; unit < shape.padded; ++unit) {
        share[unit] /= float(std::max(1, see));
    }
    float & weight = scratch_at<float>(t, shape.weight_offset)[task];
    weight         = see > 0 ? std::exp2(-float(window)) : 0.0f;
    if (windows) {
        const float sharp = 1.0f - normalised_entropy(share, shape.n_units, count_units(shape, count));
        for (int32_t unit = 0; unit < shape.padded; ++unit) {
            share[unit] *= sharp;
        }
    }
}

}  // namespace

size_t kv_sampled_scratch(const SampledArgs & a, int nth) { return Shape(a, nth).bytes; }

void kv_sampled(const SampledArgs & a, const Threads & t) {
    const Shape shape(a, t.nth);
    reset_tasks(t);
    look_at_units(a, shape, t);
    wait_for_all(t);
    run_tasks(t, shape.n_tasks, a.mem.head_dim,
              [&](auto dim, int32_t task) { run_task<decltype(dim)::value>(a, shape, t, task); });
    wait_for_all(t);

    const float * weight = scratch_at<float>(t, shape.weight_offset);
    const float * share  = scratch_at<float>(t, shape.share_offset);
    const float   n      = float(count_units(shape, scratch_at<float>(t, shape.count_offset)));
    float         total  = 0.0f;
    for (int32_t task = 0; task < shape.n_tasks; ++task) {
        total += weight[task];
    }
    for (int32_t c = int32_t(int64_t(a.n_kv) * t.ith / t.nth); c < int64_t(a.n_kv) * (t.ith + 1) / t.nth; ++c) {
        float sum = 0.0f;
        for (int32_t task = 0; task < shape.n_tasks && is_far(a, c); ++task) {
            sum += weight[task] * share[int64_t(task) * shape.padded + c / shape.size];
        }
        a.scores[c] = (a.before != nullptr ? a.before[c] : 0.0f) + (total > 0.0f ? n * sum / total : 0.0f);
    }
}

void kv_sample(const SampleArgs & a, const Threads & t) {
    const int64_t seen = queries_seen(a.samples);
    float         q[kRotationMax];
    for (int32_t i = 0; i < a.n_q; ++i) {
        const int64_t n = seen + i;
        if (n % a.rule.every != 0 || (a.n_q - i > int64_t(a.rule.every) * a.rule.rows)) {
            continue;
        }
        for (int32_t h = t.ith; h < a.n_head; h += t.nth) {
            rotate_row(a.q + i * a.q_stride_query + h * a.q_stride_head, q, a.head_dim, a.rot);
            uint16_t * to = a.samples + ((1 + n / a.rule.every % a.rule.rows) * a.n_head + h) * a.head_dim;
            for (int32_t d = 0; d < a.head_dim; ++d) {
                to[d] = f16_encode(q[d]);
            }
        }
    }
    wait_for_all(t);
    const int64_t n = seen + a.n_q;
    for (int32_t h = t.ith; h < a.n_head; h += t.nth) {
        memcpy(a.samples + int64_t(h) * a.head_dim, &n, sizeof(n));
    }
}

}  // namespace kvfold
