// The CPU operations of the cache on NumPy arrays, for tests and experiments.

#include <pybind11/stl.h>

#include <vector>

#include "bindings/op_arguments.h"

namespace kvfold {

namespace {

void store(const py::array & near_k, const py::array & near_v, const py::array & cur_k, const py::array & cur_v,
           const py::array & dst, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    require_writable("near_k", near_k, Element::f16, {kAny, kAny, kAny});
    const py::ssize_t near = near_k.shape(0), heads = near_k.shape(1), dim = near_k.shape(2);
    require_one_of("head_dim", dim, {64, 128, 256});
    StoreArgs a{};
    a.mem.n_head_kv = int32_t(heads);
    a.mem.head_dim  = int32_t(dim);
    a.mem.n_near    = int32_t(near);
    a.mem.near_k    = static_cast<uint16_t *>(require_writable("near_k", near_k, Element::f16, {near, heads, dim}));
    a.mem.near_v    = static_cast<uint16_t *>(require_writable("near_v", near_v, Element::f16, {near, heads, dim}));
    a.cur           = current_rows(cur_k, cur_v, int32_t(heads), int32_t(dim));
    a.rot           = require_rotation(rotation, int32_t(dim));
    a.dst           = static_cast<const int32_t *>(require("dst", dst, Element::i32, {a.cur.n_rows}));
    for (int32_t r = 0; r < a.cur.n_rows; ++r) {
        if (a.dst[r] >= near) {
            throw py::value_error("dst: row " + std::to_string(a.dst[r]) + " is outside the " + std::to_string(near) +
                                  " near rows");
        }
    }
    run(n_threads, 0, [&a](const Threads & t) { kv_store(a, t); });
}

void fold(const py::array & far_k, const py::array & far_v, const py::array & side, const py::array & near_k,
          const py::array & near_v, const py::array & cur_k, const py::array & cur_v, const py::array & plan,
          const std::optional<py::array> & spans, int group, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    FoldArgs a{};
    a.mem      = layer_memory({far_k, far_v, side, near_k, near_v, group}, true);
    a.cur      = current_rows(cur_k, cur_v, a.mem.n_head_kv, a.mem.head_dim);
    a.rot      = require_rotation(rotation, a.mem.head_dim);
    a.plan     = static_cast<const int32_t *>(require("plan", plan, Element::i32, {kAny, 1 + group}));
    a.n_groups = int32_t(plan.shape(0));
    for (int32_t g = 0; g < a.n_groups; ++g) {
        const int32_t * entry = a.plan + int64_t(g) * (1 + group);
        if (entry[0] >= a.mem.n_cells / group) {
            throw py::value_error("plan: group " + std::to_string(entry[0]) + " is outside the " +
                                  std::to_string(a.mem.n_cells / group) + " groups");
        }
        for (int32_t j = 0; j < group; ++j) {
            require_source("plan", entry[1 + j], a.mem, a.cur);
        }
    }
    if (spans) {
        a.spans   = static_cast<const int32_t *>(require("spans", *spans, Element::i32, {kAny}));
        a.n_spans = int32_t(spans->shape(0));
    }
    for (int32_t s = 0; s < a.n_spans; ++s) {
        if (a.spans[s] < 0 || a.spans[s] >= a.mem.n_spans) {
            throw py::value_error("spans: " + std::to_string(a.spans[s]) + " is none of the " +
                                  std::to_string(a.mem.n_spans) + " spans");
        }
    }
    run(n_threads, kv_fold_scratch(a, n_threads), [&a](const Threads & t) { kv_fold(a, t); });
}

py::array_t<float> attend(const py::array & far_k, const py::array & far_v, const py::array & side,
                          const py::array & near_k, const py::array & near_v, const py::array & cur_k,
                          const py::array & cur_v, const py::array & cell_src, const py::array & q,
                          const std::optional<py::array> & mask, const std::optional<py::array> & sinks, int group,
                          float scale, float softcap, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    const LayerMemory  mem = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    CellLists          lists;
    AttendArgs         a = attend_arguments(mem, current_rows(cur_k, cur_v, mem.n_head_kv, mem.head_dim),
                                            {cell_src, q, mask, sinks, scale, softcap, rotation}, lists);
    py::array_t<float> out({py::ssize_t(a.n_q), py::ssize_t(a.n_head), py::ssize_t(a.mem.head_dim)});
    a.out = out.mutable_data();
    run(n_threads, kv_attend_scratch(a, n_threads), [&a](const Threads & t) { kv_attend(a, t); });
    return out;
}

py::array_t<float> rotate(const py::array & x, int n) {
    require_one_of("n", n, {64, 128, 256});
    if (!has_element(x, Element::f32) || (x.flags() & py::array::c_style) == 0) {
        throw py::value_error("x: expected a C-contiguous array of float32, got " + std::string(py::str(x.dtype())));
    }
    if (x.ndim() == 0 || x.shape(x.ndim() - 1) % n != 0) {
        throw py::value_error("x: the last axis of shape " + shape_text(x) + " is no multiple of " + std::to_string(n));
    }
    py::array_t<float> out(std::vector<py::ssize_t>(x.shape(), x.shape() + x.ndim()));
    rotate_row(static_cast<const float *>(x.data()), out.mutable_data(), x.size(), n);
    return out;
}

}  // namespace

void register_ops(py::module_ & m) {
    using py::arg;
    m.attr("SRC_FAR")          = kSrcFar;
    m.attr("SRC_HIDDEN")       = kSrcHidden;
    m.attr("SRC_CURRENT_BASE") = kSrcCurrentBase;
    m.def(
        "side_bytes",
        [](int32_t n_head_kv, int32_t head_dim, int32_t n_groups, int32_t n_spans) {
            return side_layout(n_head_kv, head_dim, n_groups, n_spans).bytes;
        },
        arg("n_head_kv"), arg("head_dim"), arg("n_groups"), arg("n_spans") = 0,
        "Size in bytes of a layer's side memory, with or without summaries of spans of 128 cells.");
    m.def("rotate", &rotate, arg("x"), arg("n"),
          R"(Every n consecutive channels times the n-point Hadamard matrix in natural order, scaled by n ** -0.5.

x  float32 [..., channels], channels a multiple of n
n  64, 128 or 256
ValueError: an array of another type or shape, or another n.)");
    m.def("kv_store", &store, arg("near_k"), arg("near_v"), arg("cur_k"), arg("cur_v"), arg("dst"), py::kw_only(),
          arg("rotation") = RotationSizes(0, 0), arg("n_threads") = 1,
          R"(Write rows of a micro-batch to the near pool, in place.

near_k, near_v  float16 (or its bits, uint16) [n_near, n_head_kv, head_dim]
cur_k, cur_v    float32 [n_rows, n_head_kv, head_dim]
dst             int32 [n_rows]: near row of each row, negative: not stored
rotation        sizes of the Hadamard rotation applied to keys and to values (see rotate); 0: they come rotated
ValueError: an array of another type or shape, or a row that does not exist.)");
    m.def("kv_fold", &fold, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cur_k"),
          arg("cur_v"), arg("plan"), arg("spans") = py::none(), py::kw_only(), arg("group"),
          arg("rotation") = RotationSizes(0, 0), arg("n_threads") = 1,
          R"(Encode groups into the far tier, in place.

far_k, far_v    uint8 [n_cells, n_head_kv, 36 * head_dim / 64]
side            uint8 [side_bytes(n_head_kv, head_dim, n_cells / group)], or with n_cells // 128 spans
near_k, near_v  float16 (or its bits, uint16) [n_near, n_head_kv, head_dim]
cur_k, cur_v    float32 [n_rows, n_head_kv, head_dim]
plan            int32 [n_groups, 1 + group]: group index (negative: skipped), then the source of each member:
                a near row, SRC_FAR, SRC_HIDDEN (no such member) or SRC_CURRENT_BASE - row
spans           int32 [n]: spans to summarise, whose groups are complete and not planned; None: none
rotation        of the current keys and values, as for kv_store (near rows are rotated already)
ValueError: an array of another type or shape, or a source that does not exist.)");
    m.def("kv_attend", &attend, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cur_k"),
          arg("cur_v"), arg("cell_src"), arg("q"), arg("mask") = py::none(), arg("sinks") = py::none(), py::kw_only(),
          arg("group"), arg("scale"), arg("softcap") = 0.0f, arg("rotation") = RotationSizes(0, 0),
          arg("n_threads") = 1,
          R"(Softmax attention over cells: float32 [n_q, n_head, head_dim].

far_k .. cur_v  as for kv_fold
cell_src        int32 [n_kv], n_kv <= n_cells: where each cell's row is (SRC_HIDDEN: nobody sees it)
q               float32 [n_q, n_head, head_dim], n_head a multiple of n_head_kv
mask            float16 (or its bits, uint16) [n_q, n_kv], added to the scores; -inf hides; None: all see all
sinks           float32 [n_head], logits that join the denominator; None: no sinks
scale, softcap  score = cap(scale * q.k), cap(x) = softcap * tanh(x / softcap) unless softcap is 0
rotation        of queries and current keys, and of current values; the result is rotated back
ValueError: an array of another type or shape, or a source that does not exist.)");
}

}  // namespace kvfold
