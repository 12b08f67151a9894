// Scores for eviction (ops/kv_score.h) on NumPy arrays, for tests and experiments.

#include <pybind11/stl.h>

#include "bindings/op_arguments.h"
#include "cache/reconstruct.h"
#include "ops/kv_receive.h"
#include "ops/kv_sample.h"
#include "ops/kv_score.h"

namespace kvfold {

namespace {

py::array_t<float> score(const py::array & far_k, const py::array & far_v, const py::array & side,
                         const py::array & near_k, const py::array & near_v, const py::array & cell_src,
                         const std::optional<py::array> & queries, const std::optional<py::array> & before, int group,
                         int n_head, float scale, float softcap, int n_threads) {
    require_threads(n_threads);
    ScoreArgs a{};
    a.mem                 = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    const auto *    src   = static_cast<const int32_t *>(require("cell_src", cell_src, Element::i32, {a.mem.n_cells}));
    const CellLists lists = cell_lists(src, a.mem.n_cells);
    a.far_bits            = lists.far_bits.data();
    a.n_kv                = a.mem.n_cells;
    a.n_head              = n_head;
    a.scale               = scale;
    a.softcap             = softcap;
    a.sizes               = true;
    if (n_head < 1 || n_head % a.mem.n_head_kv != 0) {
        throw py::value_error("n_head: " + std::to_string(n_head) + " is no multiple of " +
                              std::to_string(a.mem.n_head_kv));
    }
    if (queries) {
        a.queries = static_cast<const float *>(
            require("queries", *queries, Element::f32, {py::ssize_t(query_stats_size(n_head, a.mem.head_dim))}));
    }
    if (before) {
        a.before = static_cast<const float *>(require("before", *before, Element::f32, {kScoreKinds, a.n_kv}));
    }
    py::array_t<float> out({py::ssize_t(kScoreKinds), py::ssize_t(a.n_kv)});
    a.scores = out.mutable_data();
    run(n_threads, kv_score_scratch(a, n_threads), [&a](const Threads & t) { kv_score(a, t); });
    return out;
}

// q f32 [n_q, n_head, head_dim]
QueryRows query_rows(const py::array & q, int rotation) {
    QueryRows rows{};
    rows.q              = static_cast<const float *>(require("q", q, Element::f32, {kAny, kAny, kAny}));
    rows.n_q            = int32_t(q.shape(0));
    rows.n_head         = int32_t(q.shape(1));
    rows.head_dim       = int32_t(q.shape(2));
    rows.q_stride_query = q.shape(1) * q.shape(2);
    rows.q_stride_head  = q.shape(2);
    rows.rot            = require_rotation({rotation, 0}, rows.head_dim).k;
    return rows;
}

void observe(const py::array & q, const py::array & queries, int rotation, int n_threads) {
    require_threads(n_threads);
    ObserveArgs a{query_rows(q, rotation), nullptr};
    a.queries = static_cast<float *>(
        require_writable("queries", queries, Element::f32, {py::ssize_t(query_stats_size(a.n_head, a.head_dim))}));
    run(n_threads, kv_observe_scratch(a, n_threads), [&a](const Threads & t) { kv_observe(a, t); });
}

// Samples f16 [1 + rows, n_head, head_dim] of a rule; NumPy names it by the score that it is for.
SampledScore sampled_score(const std::string & name) {
    if (name == "last" || name == "windows") {
        return name == "last" ? SampledScore::last : SampledScore::windows;
    }
    throw py::value_error("score: '" + name + "' is neither 'last' nor 'windows'");
}

void sample(const py::array & q, const py::array & samples, const std::string & score, int rotation, int n_threads) {
    require_threads(n_threads);
    SampleArgs a{query_rows(q, rotation), sample_rule(sampled_score(score)), nullptr};
    a.samples = static_cast<uint16_t *>(
        require_writable("samples", samples, Element::f16, {1 + a.rule.rows, a.n_head, a.head_dim}));
    run(n_threads, 0, [&a](const Threads & t) { kv_sample(a, t); });
}

py::array_t<float> sampled(const py::array & far_k, const py::array & far_v, const py::array & side,
                           const py::array & near_k, const py::array & near_v, const py::array & cell_src,
                           const py::array & age, const py::array & samples, const std::string & score, int group,
                           float scale, float softcap, int n_threads) {
    require_threads(n_threads);
    SampledArgs a{};
    a.mem                 = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    a.score               = sampled_score(score);
    const auto *    src   = static_cast<const int32_t *>(require("cell_src", cell_src, Element::i32, {a.mem.n_cells}));
    const CellLists lists = cell_lists(src, a.mem.n_cells);
    a.far_bits            = lists.far_bits.data();
    a.age                 = static_cast<const int32_t *>(require("age", age, Element::i32, {a.mem.n_cells}));
    a.n_kv                = a.mem.n_cells;
    a.samples             = static_cast<const uint16_t *>(
        require("samples", samples, Element::f16, {1 + sample_rule(a.score).rows, kAny, a.mem.head_dim}));
    a.n_head  = int32_t(samples.shape(1));
    a.scale   = scale;
    a.softcap = softcap;
    if (a.n_head < 1 || a.n_head % a.mem.n_head_kv != 0) {
        throw py::value_error("samples: " + std::to_string(a.n_head) + " heads are no multiple of " +
                              std::to_string(a.mem.n_head_kv));
    }
    py::array_t<float> out({py::ssize_t(a.n_kv)});
    a.scores = out.mutable_data();
    run(n_threads, kv_sampled_scratch(a, n_threads), [&a](const Threads & t) { kv_sampled(a, t); });
    return out;
}

py::array receive(const py::array & far_k, const py::array & far_v, const py::array & side, const py::array & near_k,
                  const py::array & near_v, const py::array & cur_k, const py::array & cur_v,
                  const py::array & cell_src, const py::array & q, const std::optional<py::array> & mask,
                  const std::optional<py::array> & sinks, const std::optional<py::array> & dropped, int group,
                  float scale, float softcap, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    const LayerMemory mem = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    CellLists         lists;
    const AttendArgs  attend = attend_arguments(mem, current_rows(cur_k, cur_v, mem.n_head_kv, mem.head_dim),
                                                {cell_src, q, mask, sinks, scale, softcap, rotation}, lists);
    if (dropped) {
        const auto * flags = static_cast<const uint8_t *>(require("dropped", *dropped, Element::u8, {attend.n_kv}));
        std::vector<uint32_t> bits(lists.far_bits.size(), 0);
        for (int32_t c = 0; c < attend.n_kv; ++c) {
            bits[size_t(c) / 32] |= uint32_t(flags[c] != 0) << (c % 32);
        }
        py::array_t<double> sums({py::ssize_t(attend.n_head), py::ssize_t(sizeof(Alignment) / sizeof(double))});
        std::fill_n(sums.mutable_data(), sums.size(), 0.0);
        const LoseArgs a{attend, bits.data(), reinterpret_cast<Alignment *>(sums.mutable_data())};
        run(n_threads, kv_lose_scratch(a, n_threads), [&a](const Threads & t) { kv_lose(a, t); });
        return sums;
    }
    py::array_t<float> out({py::ssize_t(mem.n_head_kv), py::ssize_t(mem.n_cells)});
    std::fill_n(out.mutable_data(), out.size(), 0.0f);
    const ReceiveArgs a{attend, out.mutable_data()};
    run(n_threads, kv_receive_scratch(a, n_threads), [&a](const Threads & t) { kv_receive(a, t); });
    return out;
}

py::array_t<int64_t> need_order(const py::array & received, const py::array & novelty) {
    const auto * r = static_cast<const float *>(require("received", received, Element::f32, {kAny, kAny}));
    const auto   n = size_t(received.shape(1));
    const auto * v = static_cast<const float *>(require("novelty", novelty, Element::f32, {py::ssize_t(n)}));
    std::vector<std::vector<float>> heads;
    for (size_t h = 0; h < size_t(received.shape(0)); ++h) {
        heads.emplace_back(r + h * n, r + (h + 1) * n);
    }
    const std::vector<size_t> order = order_by_need(heads, {v, v + n});
    return py::array_t<int64_t>(py::ssize_t(n), reinterpret_cast<const int64_t *>(order.data()));
}

}  // namespace

void register_score(py::module_ & m);

void register_score(py::module_ & m) {
    using py::arg;
    m.def("kv_score", &score, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cell_src"),
          arg("queries") = py::none(), arg("before") = py::none(), py::kw_only(), arg("group"), arg("n_head"),
          arg("scale") = 1.0f, arg("softcap") = 0.0f, arg("n_threads") = 1,
          R"(Score far tokens for eviction: how new each key is, how large its value, how much attention to expect.

far_k .. near_v  as for kv_attend
cell_src         int32 [n_cells]: -1 for the far cells, which are scored
queries          float32 [1 + 2 * n_head * head_dim]: statistics made by kv_observe; None: no attention
before           float32 [3, n_cells]: scores of earlier layers, added

Returns float32 [3, n_cells]: novelty, size and attention of each cell, 0 for cells that are not far.
ValueError: an array of another type or shape.)");
    m.def("kv_receive", &receive, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cur_k"),
          arg("cur_v"), arg("cell_src"), arg("q"), arg("mask") = py::none(), arg("sinks") = py::none(),
          arg("dropped") = py::none(), py::kw_only(), arg("group"), arg("scale"), arg("softcap") = 0.0f,
          arg("rotation") = RotationSizes(0, 0), arg("n_threads") = 1,
          R"(How much attention far cells get from any query, at most; arguments as of kv_attend.

dropped  uint8 [n_kv]: far cells that are left out; None: none

Returns float32 [n_head_kv, n_cells]: the largest softmax weight of the cell over queries and the heads of a KV head, 0 for cells that are not far. With
`dropped` (kv_lose) float64 [n_head, 4] as of kv_align: how much of the attention would be left without those cells.)");
    m.def("order_by_need", &need_order, arg("received"), arg("novelty"),
          R"(The order in which groups of a text may go when it is compacted, the least needed first: int64 [n_groups].

received  float32 [heads, n_groups]: from kv_receive, the best token of each group, for all layers' KV heads
novelty   float32 [n_groups]: from kv_score, likewise
ValueError: an array of another type or shape.)");
    m.def(
        "kv_sample", &sample, arg("q"), arg("samples"), py::kw_only(), arg("score"), arg("rotation") = 0,
        arg("n_threads") = 1,
        R"(Keep some of the queries float32 [n_q, n_head, head_dim] in samples float16 [1 + n, n_head, head_dim], in place.

score  'last' (n = 32) or 'windows' (n = 48): what they are for
ValueError: an array of another type or shape.)");
    m.def("kv_sampled", &sampled, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"),
          arg("cell_src"), arg("age"), arg("samples"), py::kw_only(), arg("score"), arg("group"), arg("scale") = 1.0f,
          arg("softcap") = 0.0f, arg("n_threads") = 1,
          R"(Score far tokens for eviction by the attention that sampled queries give them.

far_k .. cell_src  as for kv_score
age                int32 [n_cells]: tokens since; a query sees cells as old as itself
samples, score     as from kv_sample

Returns float32 [n_cells], 0 for cells that are not far.
ValueError: an array of another type or shape.)");
    m.def("kv_observe", &observe, arg("q"), arg("queries"), py::kw_only(), arg("rotation") = 0, arg("n_threads") = 1,
          R"(Add queries float32 [n_q, n_head, head_dim] to statistics float32 [1 + 2 * n_head * head_dim], in place.

ValueError: an array of another type or shape.)");
}

}  // namespace kvfold
