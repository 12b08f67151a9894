// Checks and times the CPU operations of a kvfold cache without a model.
//
//     cpu_attend check              random small layers against a plain double-precision reference; exit 1 on a mismatch
//     cpu_attend time [threads [what]]   decode, scales (decode, prefill with scale groups of 32 and 64), batch, prefill, fold,
//                                        lookup, score at the shapes of real models
//
// Built by hand:
//     g++ -O3 -march=native -std=c++17 -Icpp -o cpu_attend bench/cpu_attend.cpp
//         cpp/format/fp4_codec.cpp cpp/ops/{kv_attend,kv_attend_sparse,kv_fold,kv_score,kv_select,rotate}.cpp -lpthread

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "format/fp4_codec.h"
#include "ops/cell_lists.h"
#include "ops/kv_ops.h"
#include "ops/kv_score.h"
#include "ops/kv_select.h"
#include "ops/thread_team.h"

using namespace kvfold;

namespace {

// --- time of runs ---------------------------------------------------------------------------------------------------

// Seconds per run: on the clock, and of processor time over all threads (which a busy machine disturbs less).
struct Times {
    double wall, cpu;
};

double cpu_seconds() { return double(std::clock()) / CLOCKS_PER_SEC; }

// Runs `op` `repeats` times on `nth` threads.
template <typename Op>
Times run(int nth, size_t scratch_bytes, int repeats, const Op & op) {
    const double cpu   = cpu_seconds();
    const auto   start = std::chrono::steady_clock::now();
    run_on_threads(nth, scratch_bytes, op, repeats);
    const std::chrono::duration<double> wall = std::chrono::steady_clock::now() - start;
    return {wall.count() / repeats, (cpu_seconds() - cpu) / repeats};
}

// --- a layer ---------------------------------------------------------------------------------------------------------

struct Dims {
    int32_t n_head, n_head_kv, head_dim, group;
    int32_t scale_group = kFp4ScaleGroup;
};

struct Layer {
    Dims                  dims;
    std::vector<uint8_t>  far_k, far_v;
    std::vector<uint8_t>  side;
    std::vector<uint16_t> near_k, near_v;
    LayerMemory           mem;

    Layer(Dims d, int32_t n_cells, int32_t n_near, int32_t n_spans = 0) : dims(d) {
        const size_t row = size_t(d.n_head_kv) * size_t(d.head_dim);
        const size_t far = size_t(d.n_head_kv) * size_t(far_row_bytes(d.head_dim, d.scale_group));
        // Poison: bytes 0xFF are NaN in f16 and a huge scale in FP4.
        far_k.assign(size_t(n_cells) * far, 0xFF);
        far_v.assign(size_t(n_cells) * far, 0xFF);
        side.assign(side_layout(d.n_head_kv, d.head_dim, n_cells / d.group, n_spans).bytes, 0xFF);
        near_k.assign(size_t(n_near) * row, 0xFFFF);
        near_v.assign(size_t(n_near) * row, 0xFFFF);
        mem = {d.n_head_kv,  d.head_dim,   d.group,     n_cells,       n_near,        n_spans,
               far_k.data(), far_v.data(), side.data(), near_k.data(), near_v.data(), d.scale_group};
    }
};

std::vector<float> normal(std::mt19937 & rng, size_t n, float scale) {
    std::normal_distribution<float> distribution(0.0f, scale);
    std::vector<float>              x(n);
    for (float & value : x) {
        value = distribution(rng);
    }
    return x;
}

// As llama.cpp rotates a quantised cache: keys by all of a head, values by 64.
Rotation usual_rotation(Dims d) { return {d.head_dim, 64}; }

// Everything but masks and what else is optional; q is [head][query][head_dim], as ggml hands it over.
AttendArgs attend_args(const Layer & layer, const CurrentRows & cur, const CellLists & cells, int32_t n_kv,
                       const std::vector<float> & q, int32_t n_q, std::vector<float> & out) {
    AttendArgs a{};
    a.mem            = layer.mem;
    a.cur            = cur;
    a.far_bits       = cells.far_bits.data();
    a.exact          = cells.exact.data();
    a.n_exact        = int32_t(cells.exact.size());
    a.n_kv           = n_kv;
    a.q              = q.data();
    a.q_stride_query = layer.dims.head_dim;
    a.q_stride_head  = int64_t(n_q) * layer.dims.head_dim;
    a.n_q            = n_q;
    a.n_head         = layer.dims.n_head;
    a.scale          = 1.0f / std::sqrt(float(layer.dims.head_dim));
    a.out            = out.data();
    return a;
}

void decode_row(const Fp4Row & row, int32_t n, int32_t scale_group, double * x) {
    for (int32_t d = 0; d < n; d += 16) {
        float sixteen[16];
        fp4_decode_16(scale_decode(row.scale[d / 64 * row.scale_step + d % 64 / scale_group]),
                      row.quant + d / 64 * row.quant_step + d % 64 / 2, sixteen);
        std::copy(sixteen, sixteen + 16, x + d);
    }
}

// Key and value of a cell for one KV head, by definition.
void reference_row(const AttendArgs & a, int32_t cell, int32_t src, int32_t head, std::vector<double> & k,
                   std::vector<double> & v) {
    const LayerMemory & m   = a.mem;
    const int32_t       dim = m.head_dim;
    k.resize(size_t(dim));
    v.resize(size_t(dim));
    if (src == kSrcFar) {
        std::vector<double> s(static_cast<size_t>(dim));
        Fp4Block *          sum = group_summary(m, cell / m.group, head);
        decode_row({sum->scale, sum->quant, sizeof(Fp4Block), sizeof(Fp4Block)}, dim, kFp4ScaleGroup, s.data());
        decode_row(far_row(m.far_k, m, cell, head), dim, m.scale_group, k.data());
        decode_row(far_row(m.far_v, m, cell, head), dim, m.scale_group, v.data());
        for (int32_t d = 0; d < dim; ++d) {
            k[size_t(d)] += s[size_t(d)];
        }
    } else {
        for (int32_t d = 0; d < dim; ++d) {
            if (src_is_current(src)) {
                const int64_t r = src_current_row(src);
                k[size_t(d)]    = double(a.cur.k[r * a.cur.k_stride + head * dim + d]);
                v[size_t(d)]    = double(a.cur.v[r * a.cur.v_stride + head * dim + d]);
            } else {
                const int64_t at = (int64_t(src) * m.n_head_kv + head) * dim + d;
                k[size_t(d)]     = double(f16_decode(m.near_k[at]));
                v[size_t(d)]     = double(f16_decode(m.near_v[at]));
            }
        }
    }
}

// Largest deviation of a result row from the definition, relative to the largest value of the row's inputs.
double deviation(const AttendArgs & a, const int32_t * cell_src, int32_t query, int32_t head) {
    const int32_t        dim     = a.mem.head_dim;
    const int32_t        kv_head = head / (a.n_head / a.mem.n_head_kv);
    const float *        q       = a.q + query * a.q_stride_query + head * a.q_stride_head;
    std::vector<double>  k, v, result(static_cast<size_t>(dim), 0.0), logits;
    std::vector<int32_t> cells;
    for (int32_t cell = 0; cell < a.n_kv; ++cell) {
        const float bias = a.mask ? f16_decode(a.mask[query * a.mask_stride + cell]) : 0.0f;
        if (cell_src[cell] == kSrcHidden || bias == -std::numeric_limits<float>::infinity()) {
            continue;
        }
        reference_row(a, cell, cell_src[cell], kv_head, k, v);
        double dot = 0.0;
        for (int32_t d = 0; d < dim; ++d) {
            dot += double(q[d]) * k[size_t(d)];
        }
        dot *= double(a.scale);
        if (a.softcap != 0.0f) {
            dot = double(a.softcap) * std::tanh(dot / double(a.softcap));
        }
        logits.push_back(dot + double(bias));
        cells.push_back(cell);
    }
    double top = a.sinks ? double(a.sinks[head]) : -1e300;
    for (double x : logits) {
        top = std::max(top, x);
    }
    double sum = a.sinks ? std::exp(double(a.sinks[head]) - top) : 0.0;
    double big = 1e-30;
    for (size_t i = 0; i < cells.size(); ++i) {
        const double p = std::exp(logits[i] - top);
        sum += p;
        reference_row(a, cells[i], cell_src[cells[i]], kv_head, k, v);
        for (int32_t d = 0; d < dim; ++d) {
            result[size_t(d)] += p * v[size_t(d)];
            big = std::max(big, std::fabs(v[size_t(d)]));
        }
    }
    double        worst = 0.0;
    const float * out   = a.out + (int64_t(query) * a.n_head + head) * dim;
    for (int32_t d = 0; d < dim; ++d) {
        const double expected = cells.empty() ? 0.0 : result[size_t(d)] / sum;
        const double error    = std::fabs(double(out[d]) - expected);
        worst                 = std::isfinite(double(out[d])) ? std::max(worst, error / big) : 1e9;
    }
    return worst;
}

// --- checks ----------------------------------------------------------------------------------------------------------

// f32 sums of a few thousand terms of order one, and an exponential good to 2e-7.
constexpr double kTolerance = 2e-5;

// A layer in which far, near, current and hidden cells are mixed at random, and several sequences share the mask.
bool check_attend(std::mt19937 & rng, Dims d, int32_t n_kv, int32_t n_q, int variant) {
    const auto    below   = [&rng](int32_t n) { return int32_t(rng() % uint32_t(n)); };
    const int32_t n_cells = (n_kv + d.group - 1) / d.group * d.group;
    const int32_t n_near  = 40;
    const size_t  row     = size_t(d.n_head_kv) * size_t(d.head_dim);
    Layer         layer(d, n_cells, n_near);

    const std::vector<float> all_k = normal(rng, size_t(n_cells) * row, 1.0f);
    const std::vector<float> all_v = normal(rng, size_t(n_cells) * row, 1.0f);
    std::vector<float>       cur_k = normal(rng, size_t(n_q) * (row + 8), 1.0f);
    std::vector<float>       cur_v = normal(rng, size_t(n_q) * (row + 16), 1.0f);
    const CurrentRows        cur{cur_k.data(), cur_v.data(), int64_t(row + 8), int64_t(row + 16), n_q};

    // sources; near rows 0 .. n_near-2 hold something, the last is poison that only hidden cells could point to
    std::vector<int32_t> src(static_cast<size_t>(n_kv));
    for (int32_t c = 0; c < n_kv; ++c) {
        const int32_t kind = variant == 1 ? 0 : below(8);
        src[size_t(c)]     = kind < 5    ? kSrcFar
                             : kind == 5 ? below(n_near - 1)
                             : kind == 6 ? src_current(below(n_q))
                                         : kSrcHidden;
    }
    for (int32_t i = 0; i < (n_near - 1) * int32_t(row); ++i) {
        layer.near_k[size_t(i)] = f16_encode(all_k[size_t(i) % all_k.size()] * 0.7f);
        layer.near_v[size_t(i)] = f16_encode(all_v[size_t(i) % all_v.size()] * 1.3f);
    }

    // fold the far members of every group, hidden and other members are absent: their bytes are zero, then poisoned again
    std::vector<int32_t> plan;
    for (int32_t g = 0; g < n_cells / d.group; ++g) {
        plan.push_back(g);
        for (int32_t j = 0; j < d.group; ++j) {
            const int32_t cell = g * d.group + j;
            const bool    far  = cell < n_kv && src[size_t(cell)] == kSrcFar;
            plan.push_back(far ? src_current(cell) : kSrcHidden);
        }
    }
    const CurrentRows source{all_k.data(), all_v.data(), int64_t(row), int64_t(row), n_cells};
    FoldArgs          fold{};
    fold.mem      = layer.mem;
    fold.cur      = source;
    fold.plan     = plan.data();
    fold.n_groups = n_cells / d.group;
    run(2, kv_fold_scratch(fold, 2), 1, [&](const Threads & t) { kv_fold(fold, t); });
    for (int32_t c = 0; c < n_cells; ++c) {
        if (c >= n_kv || src[size_t(c)] != kSrcFar) {
            for (int32_t h = 0; h < d.n_head_kv; ++h) {
                fp4_fill_row(far_row(layer.mem.far_k, layer.mem, c, h), 0xFF, d.head_dim, d.scale_group);
            }
        }
    }

    // masks: none, causal, or random with whole stretches hidden, a query that sees nothing and some finite additions
    const int64_t         mask_stride = n_kv + 24;
    std::vector<uint16_t> mask(size_t(n_q) * size_t(mask_stride), 0xFC00);
    for (int32_t i = 0; i < n_q; ++i) {
        for (int32_t c = 0; c < n_kv; ++c) {
            bool seen = true;
            if (variant == 2) {
                seen = c <= n_kv - n_q + i;
            } else if (variant == 3) {
                seen = (c / 50 + i / 7) % 3 != 0 && !(n_q > 2 && i == n_q / 2);
            }
            if (seen) {
                mask[size_t(i * mask_stride + c)] = variant == 3 && c % 11 == 0 ? f16_encode(-1.5f) : uint16_t(0);
            }
        }
    }

    const std::vector<float> q     = normal(rng, size_t(d.n_head) * size_t(n_q) * size_t(d.head_dim), 1.5f);
    const std::vector<float> sinks = normal(rng, size_t(d.n_head), 2.0f);
    std::vector<float>       out(q.size(), std::nanf(""));

    const CellLists cells = cell_lists(src.data(), n_kv);
    AttendArgs      a     = attend_args(layer, cur, cells, n_kv, q, n_q, out);
    a.mask                = variant == 0 ? nullptr : mask.data();
    a.mask_stride         = mask_stride;
    a.sinks               = variant == 3 ? sinks.data() : nullptr;
    a.softcap             = variant == 2 ? 20.0f : 0.0f;

    std::vector<float> first;
    double             worst = 0.0;
    for (const int nth : {1, 2, 3}) {
        run(nth, kv_attend_scratch(a, nth), 1, [&](const Threads & t) { kv_attend(a, t); });
        if (first.empty()) {
            first = out;
            for (int32_t i = 0; i < n_q; i += std::max(1, n_q / 9)) {
                for (int32_t h = 0; h < d.n_head; ++h) {
                    worst = std::max(worst, deviation(a, src.data(), i, h));
                }
            }
        } else if (std::memcmp(first.data(), out.data(), out.size() * sizeof(float)) != 0) {
            std::printf("  result depends on the number of threads (%d)\n", nth);
            worst = 1e9;
        }
    }
    const bool good = worst < kTolerance;
    std::printf("%s heads %d/%d x %d group %d scales of %d n_kv %d n_q %d variant %d: %.1e\n", good ? "ok  " : "FAIL",
                d.n_head, d.n_head_kv, d.head_dim, d.group, d.scale_group, n_kv, n_q, variant, worst);
    return good;
}

bool check_all() {
    std::mt19937 rng(7);
    bool         good   = true;
    const Dims   dims[] = {{9, 3, 64, 4},      {4, 4, 64, 32},     {16, 1, 64, 2},     {8, 2, 128, 8},
                           {4, 1, 256, 16},    {7, 7, 128, 4},     {9, 3, 64, 4, 32},  {9, 3, 64, 8, 64},
                           {8, 2, 128, 4, 64}, {7, 7, 128, 4, 32}, {4, 1, 256, 16, 32}};
    for (const Dims & d : dims) {
        for (int variant = 0; variant < 4; ++variant) {
            for (const int32_t n_q : {1, 2, 5, 13, 67}) {
                for (const int32_t n_kv : {1, 63, 200, 1337}) {
                    if (n_kv >= n_q) {
                        good = check_attend(rng, d, n_kv, n_q, variant) && good;
                    }
                }
            }
        }
        good = check_attend(rng, d, 2000, 515, 2) && good;
    }
    std::printf(good ? "all checks passed\n" : "CHECKS FAILED\n");
    return good;
}

// --- times -----------------------------------------------------------------------------------------------------------

// A layer in the middle of a conversation: sinks and the recent window near, the micro-batch current, the rest far; a causal
// mask. Rows, queries and summaries are random, rows all the same ones.
struct Scene {
    Dims                  d;
    int32_t               n_past, n_q, n_kv;
    Layer                 layer;
    std::vector<float>    cur, q, out;
    std::vector<uint16_t> mask;
    CellLists             cells;
    AttendArgs            attend;

    static constexpr int32_t kTail = 128;

    Scene(std::mt19937 & rng, Dims dims, int32_t past, int32_t queries)
        : d(dims), n_past(past), n_q(queries), n_kv((past + queries + 255) / 256 * 256),
          layer(dims, n_kv, kTail + 8, n_kv / kSpanCells), mask(size_t(queries) * size_t(n_kv), 0xFC00) {
        const size_t row    = size_t(d.n_head_kv) * size_t(d.head_dim);
        const auto   sample = normal(rng, row, 1.0f);
        cur                 = normal(rng, size_t(n_q) * row, 1.0f);
        q                   = normal(rng, size_t(d.n_head) * size_t(n_q) * size_t(d.head_dim), 1.0f);
        out.resize(q.size());
        for (int32_t c = 0; c < n_kv; ++c) {
            fp4_encode_row(sample.data(), far_row(layer.mem.far_k, layer.mem, c, 0), int64_t(row), d.scale_group);
            fp4_encode_row(sample.data(), far_row(layer.mem.far_v, layer.mem, c, 0), int64_t(row), d.scale_group);
        }
        const SideLayout at = side_layout(layer.mem);
        summarise(rng, 0, at.spread_offset, n_kv / d.group);
        summarise(rng, at.span_offset, at.span_spread_offset, layer.mem.n_spans);
        std::fill(layer.near_k.begin(), layer.near_k.end(), f16_encode(0.5f));
        std::fill(layer.near_v.begin(), layer.near_v.end(), f16_encode(0.5f));

        std::vector<int32_t> src(static_cast<size_t>(n_kv), kSrcHidden);
        for (int32_t c = 0; c < n_past + n_q; ++c) {
            const bool exact = c < 4 || c >= n_past - kTail;
            src[size_t(c)]   = c >= n_past ? src_current(c - n_past) : exact ? c % (kTail + 8) : kSrcFar;
            for (int32_t i = 0; i < n_q; ++i) {
                if (c <= n_past + i) {
                    mask[size_t(i) * size_t(n_kv) + size_t(c)] = 0;
                }
            }
        }
        cells = cell_lists(src.data(), n_kv);
        const CurrentRows rows{cur.data(), cur.data(), int64_t(row), int64_t(row), n_q};
        attend             = attend_args(layer, rows, cells, n_kv, q, n_q, out);
        attend.rot         = usual_rotation(d);
        attend.mask        = mask.data();
        attend.mask_stride = n_kv;
    }

    // Of a token: a key or value, the summary of its group.
    double far_bytes() const { return double(d.n_head_kv) * double(far_row_bytes(d.head_dim, d.scale_group)); }
    double summary_bytes() const { return double(d.n_head_kv) * double(far_row_bytes(d.head_dim, kFp4ScaleGroup)); }

  private:
    // Summaries and spreads of `n` groups or spans. No two neighbours are alike, or what is looked up would lie side by side.
    void summarise(std::mt19937 & rng, size_t rows_at, size_t spreads_at, int32_t n) {
        const size_t row    = size_t(d.n_head_kv) * size_t(d.head_dim);
        const int    n_rows = 61;
        const auto   some   = normal(rng, size_t(n_rows) * row, 0.5f);
        auto *       to     = reinterpret_cast<Fp4Block *>(layer.side.data() + rows_at);
        for (int32_t i = 0; i < n; ++i) {
            const size_t which = rng() % size_t(n_rows);
            fp4_encode_row(some.data() + which * row, to + size_t(i) * (row / 64), int64_t(row));
        }
        const std::vector<uint16_t> spreads(size_t(n) * size_t(d.n_head_kv), f16_encode(0.1f));
        std::memcpy(layer.side.data() + spreads_at, spreads.data(), spreads.size() * sizeof(uint16_t));
    }
};

// The best of three measurements, of about a third of a second each.
template <typename Op>
Times time_of(int nth, size_t scratch, const Op & op) {
    const Times estimate = run(nth, scratch, 1, op);
    const int   repeats  = std::clamp(int(0.3 / estimate.wall), 1, 300);
    Times       best{1e9, 1e9};
    for (int i = 0; i < 3; ++i) {
        const Times now = run(nth, scratch, repeats, op);
        best            = {std::min(best.wall, now.wall), std::min(best.cpu, now.cpu)};
    }
    return best;
}

void time_attend(std::mt19937 & rng, const char * name, Dims d, int32_t n_past, int32_t n_q, int nth) {
    const Scene scene(rng, d, n_past, n_q);
    const Times best =
        time_of(nth, kv_attend_scratch(scene.attend, nth), [&](const Threads & t) { kv_attend(scene.attend, t); });
    const double bytes = double(n_past) * (2 * scene.far_bytes() + scene.summary_bytes() / d.group);
    const double flops = 4.0 * double(d.n_head) * d.head_dim * n_q * (n_past + 0.5 * n_q);
    std::printf(
        "%-8s %2d/%d x %3d group %d scales of %d past %5d n_q %3d: %9.1f us a layer, %6.2f GB/s, %6.1f Gflop/s; "
        "processor time %9.1f us\n",
        name, d.n_head, d.n_head_kv, d.head_dim, d.group, d.scale_group, n_past, n_q, best.wall * 1e6,
        bytes / best.wall * 1e-9, flops / best.wall * 1e-9, best.cpu * 1e6);
}

// One token that looks up: `share` of the groups, `most` tokens at most (0: no bound), found among all groups, or among those
// of the best spans, `pool` groups of them.
void time_lookup(const Scene & scene, const char * name, float share, int32_t most, int32_t pool, int nth) {
    const LayerMemory &   mem      = scene.layer.mem;
    const int32_t         n_groups = scene.n_kv / mem.group;
    const int32_t         capacity = int32_t(share * float(n_groups)) + 64;
    std::vector<int32_t>  lists(size_t(mem.n_head_kv) * size_t(group_list_stride(capacity)));
    std::vector<float>    unread(size_t(scene.d.n_head));
    std::vector<uint64_t> counters(2, 0);
    // Every span is summarised but the first and the last ones, which hold exact rows.
    std::vector<uint32_t> ready(size_t(mem.n_spans) / 32 + 1, 0);
    for (int32_t s = 1; s < (scene.n_past - Scene::kTail) / kSpanCells; ++s) {
        ready[size_t(s) / 32] |= 1u << (s % 32);
    }

    const AttendArgs & a = scene.attend;
    SelectArgs         select{};
    select.mem            = mem;
    select.rot            = a.rot;
    select.far_bits       = a.far_bits;
    select.n_kv           = a.n_kv;
    select.q              = a.q;
    select.q_stride_query = a.q_stride_query;
    select.q_stride_head  = a.q_stride_head;
    select.n_q            = a.n_q;
    select.n_head         = a.n_head;
    select.mask           = a.mask;
    select.mask_stride    = a.mask_stride;
    select.scale          = a.scale;
    select.budget         = {share, share, 0.0f, 0, most};
    select.ready          = pool > 0 ? ready.data() : nullptr;
    select.most_spans     = std::max(1, pool * mem.group / kSpanCells);
    select.selected       = lists.data();
    select.capacity       = capacity;
    select.counters       = counters.data();
    select.unread         = unread.data();
    const SparseAttendArgs sparse{a, lists.data(), capacity, unread.data()};

    const Times find = time_of(nth, kv_select_scratch(select, nth), [&](const Threads & t) { kv_select(select, t); });
    const Times read =
        time_of(nth, kv_attend_sparse_scratch(sparse, nth), [&](const Threads & t) { kv_attend_sparse(sparse, t); });
    const double taken  = double(lists[0]) * mem.group;
    const double spans  = pool > 0 ? double(mem.n_spans) : 0.0;
    const double scored = pool > 0 ? std::min(double(pool), double(n_groups)) : double(n_groups);
    std::printf(
        "lookup   %2d/%d x %3d group %d past %6d %-24s: %8.1f us to find %6.0f tokens, %6.2f GB/s; %8.1f us to read "
        "them, %6.2f GB/s; together %8.1f us\n",
        scene.d.n_head, mem.n_head_kv, mem.head_dim, mem.group, scene.n_past, name, find.wall * 1e6, taken,
        (scored + spans) * scene.summary_bytes() / find.wall * 1e-9, read.wall * 1e6,
        taken * (2 * scene.far_bytes() + scene.summary_bytes() / mem.group) / read.wall * 1e-9,
        (find.wall + read.wall) * 1e6);
}

void time_lookups(std::mt19937 & rng, Dims d, std::initializer_list<int32_t> pasts, int nth) {
    for (const int32_t past : pasts) {
        time_attend(rng, "all", d, past, 1, nth);
        const Scene scene(rng, d, past, 1);
        time_lookup(scene, "20 %", 0.2f, 0, 0, nth);
        time_lookup(scene, "20 %, 4096 at most", 0.2f, 4096, 0, nth);
        time_lookup(scene, "the same, of 8192 groups", 0.2f, 4096, 8192, nth);
        time_lookup(scene, "the same, of 4096 groups", 0.2f, 4096, 4096, nth);
    }
}

// Scores of all cells of a layer, with those that take values or without, and statistics of the queries of one token and of 512.
void time_score(std::mt19937 & rng, Dims d, int32_t past, bool sizes, int nth) {
    const Scene        scene(rng, d, past, 512);
    const AttendArgs & a = scene.attend;
    std::vector<float> queries(size_t(query_stats_size(d.n_head, d.head_dim)), 0.0f);
    const QueryRows    rows{a.q, a.q_stride_query, a.q_stride_head, 1, d.n_head, d.head_dim, a.rot.k};
    ObserveArgs        observe{rows, queries.data()};
    const auto         watch = [&](const Threads & t) { kv_observe(observe, t); };
    const Times        one   = time_of(nth, kv_observe_scratch(observe, nth), watch);
    observe.n_q              = 512;
    const Times many         = time_of(nth, kv_observe_scratch(observe, nth), watch);

    std::vector<float> scores(size_t(kScoreKinds) * size_t(a.n_kv));
    ScoreArgs          score{};
    score.mem         = a.mem;
    score.far_bits    = a.far_bits;
    score.n_kv        = a.n_kv;
    score.queries     = queries.data();
    score.n_head      = a.n_head;
    score.scale       = a.scale;
    score.sizes       = sizes;
    score.scores      = scores.data();
    const Times  all  = time_of(nth, kv_score_scratch(score, nth), [&](const Threads & t) { kv_score(score, t); });
    const double read = double(past) * ((1.0 + double(sizes)) * scene.far_bytes() + scene.summary_bytes() / d.group);
    std::printf(
        "score    %2d/%d x %3d group %d past %6d %s values: %8.1f us a layer, %6.2f GB/s, processor time %8.1f us; "
        "queries of 1 token %6.2f us, of 512 %8.1f us\n",
        d.n_head, d.n_head_kv, d.head_dim, d.group, past, sizes ? "with" : "without", all.wall * 1e6,
        read / all.wall * 1e-9, all.cpu * 1e6, one.wall * 1e6, many.wall * 1e6);
}

void time_fold(std::mt19937 & rng, Dims d, int32_t tokens, int nth) {
    const size_t         row = size_t(d.n_head_kv) * size_t(d.head_dim);
    Layer                layer(d, tokens, 1);
    const auto           cur = normal(rng, size_t(tokens) * row, 1.0f);
    std::vector<int32_t> plan;
    for (int32_t c = 0; c < tokens; ++c) {
        if (c % d.group == 0) {
            plan.push_back(c / d.group);
        }
        plan.push_back(src_current(c));
    }
    FoldArgs a{};
    a.mem             = layer.mem;
    a.cur             = {cur.data(), cur.data(), int64_t(row), int64_t(row), tokens};
    a.rot             = usual_rotation(d);
    a.plan            = plan.data();
    a.n_groups        = tokens / d.group;
    const Times times = run(nth, kv_fold_scratch(a, nth), 20, [&](const Threads & t) { kv_fold(a, t); });
    std::printf("%-10s    %d x %d group %d scales of %d: %.2f us a token and layer, processor time %.2f us\n", "fold",
                d.n_head_kv, d.head_dim, d.group, d.scale_group, times.wall * 1e6 / tokens, times.cpu * 1e6 / tokens);
}

void time_all(int nth, const std::string & only) {
    std::mt19937 rng(3);
    const Dims   small{9, 3, 64, 4};    // SmolLM2-135M
    const Dims   large{32, 8, 128, 4};  // 8B class
    const auto   attend = [&](const char * name, Dims d, int32_t past, int32_t n_q) {
        if (std::string(name).find(only) != std::string::npos) {
            time_attend(rng, name, d, past, n_q, nth);
        }
    };
    for (const int32_t past : {1024, 8192}) {
        attend("decode", small, past, 1);
        attend("decode", large, past, 1);
    }
    for (const int32_t scale_group : {32, 64}) {
        attend("scales", {9, 3, 64, 4, scale_group}, 8192, 1);
        attend("scales", {32, 8, 128, 4, scale_group}, 8192, 1);
        attend("scales", {9, 3, 64, 4, scale_group}, 8192, 512);
    }
    attend("batch", small, 8192, 4);
    attend("batch", small, 8192, 16);
    attend("prefill", small, 0, 512);
    attend("prefill", small, 8192, 512);
    attend("prefill", large, 8192, 128);
    attend("prefill", Dims{4, 1, 256, 4}, 8192, 128);
    if (std::string("lookup").find(only) != std::string::npos) {
        time_lookups(rng, small, {8192}, nth);
        time_lookups(rng, large, {8192, 32768, 65536, 131072}, nth);
    }
    if (std::string("score").find(only) != std::string::npos) {
        for (const bool sizes : {false, true}) {
            time_score(rng, small, 3328, sizes, nth);
            time_score(rng, large, 8192, sizes, nth);
        }
    }
    if (std::string("fold").find(only) != std::string::npos) {
        for (const int32_t scale_group : {16, 32, 64}) {
            time_fold(rng, {9, 3, 64, 4, scale_group}, 512, nth);
            time_fold(rng, {32, 8, 128, 4, scale_group}, 512, nth);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    const std::string command = argc > 1 ? argv[1] : "";
    if (command == "check") {
        return check_all() ? 0 : 1;
    }
    if (command == "time") {
        time_all(argc > 2 ? std::max(1, std::atoi(argv[2])) : int(std::thread::hardware_concurrency()),
                 argc > 3 ? argv[3] : "");
        return 0;
    }
    std::fprintf(stderr, "usage: cpu_attend check | time [threads [decode|scales|batch|prefill|fold|lookup|score]]\n");
    return 1;
}
