// Scores for eviction (ops/kv_score.h) on NumPy arrays, for tests and experiments.

#include <pybind11/stl.h>

#include "bindings/op_arguments.h"
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

void observe(const py::array & q, const py::array & queries, int rotation, int n_threads) {
    require_threads(n_threads);
    ObserveArgs a{};
    a.q              = static_cast<const float *>(require("q", q, Element::f32, {kAny, kAny, kAny}));
    a.n_q            = int32_t(q.shape(0));
    a.n_head         = int32_t(q.shape(1));
    a.head_dim       = int32_t(q.shape(2));
    a.q_stride_query = q.shape(1) * q.shape(2);
    a.q_stride_head  = q.shape(2);
    a.rot            = require_rotation({rotation, 0}, a.head_dim).k;
    a.queries        = static_cast<float *>(
        require_writable("queries", queries, Element::f32, {py::ssize_t(query_stats_size(a.n_head, a.head_dim))}));
    run(n_threads, kv_observe_scratch(a, n_threads), [&a](const Threads & t) { kv_observe(a, t); });
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
    m.def("kv_observe", &observe, arg("q"), arg("queries"), py::kw_only(), arg("rotation") = 0, arg("n_threads") = 1,
          R"(Add queries float32 [n_q, n_head, head_dim] to statistics float32 [1 + 2 * n_head * head_dim], in place.

ValueError: an array of another type or shape.)");
}

}  // namespace kvfold
