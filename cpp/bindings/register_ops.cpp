// The CPU operations of the cache on NumPy arrays, for tests and experiments.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "ops/cell_lists.h"
#include "ops/kv_ops.h"
#include "ops/rotate.h"
#include "ops/thread_team.h"

namespace kvfold {

namespace {

// --- threads ---------------------------------------------------------------------------------------------------------

constexpr int kMaxThreads = 256;

// Runs `op` without Python's lock.
template <typename Op>
void run(int n_threads, size_t scratch_bytes, const Op & op) {
    const py::gil_scoped_release release;
    run_on_threads(n_threads, scratch_bytes, op);
}

// --- arguments -------------------------------------------------------------------------------------------------------

void require_one_of(const char * name, py::ssize_t value, std::initializer_list<py::ssize_t> possible) {
    std::string text;
    for (const py::ssize_t p : possible) {
        if (p == value) {
            return;
        }
        text += (text.empty() ? "" : ", ") + std::to_string(p);
    }
    throw py::value_error(std::string(name) + ": " + std::to_string(value) + " is not one of " + text);
}

void require_threads(int n_threads) {
    if (n_threads < 1 || n_threads > kMaxThreads) {
        throw py::value_error("n_threads: " + std::to_string(n_threads) + " is not within 1 .. " +
                              std::to_string(kMaxThreads));
    }
}

struct LayerArrays {
    py::array far_k, far_v, side, near_k, near_v;
    int       group;
};

LayerMemory layer_memory(const LayerArrays & l, bool write) {
    require("near_k", l.near_k, Element::f16, {kAny, kAny, kAny});
    require("far_k", l.far_k, Element::u8, {kAny, kAny, kAny});
    const py::ssize_t heads = l.near_k.shape(1);
    const py::ssize_t dim   = l.near_k.shape(2);
    const py::ssize_t cells = l.far_k.shape(0);
    const py::ssize_t near  = l.near_k.shape(0);
    if (heads < 1) {
        throw py::value_error("near_k: needs at least one KV head, got shape " + shape_text(l.near_k));
    }
    require_one_of("head_dim", dim, {64, 128, 256});
    require_one_of("group", l.group, {2, 4, 8, 16, 32});
    if (cells % l.group != 0) {
        throw py::value_error("far_k: " + std::to_string(cells) + " cells are no multiple of group " +
                              std::to_string(l.group));
    }
    const py::ssize_t row  = dim / kFp4BlockValues * py::ssize_t(sizeof(Fp4Block));
    const SideLayout  side = side_layout(int32_t(heads), int32_t(dim), int32_t(cells / l.group));
    const auto        take = [write](const char * name, const py::array & a, Element e,
                                     std::initializer_list<py::ssize_t> shape) {
        return write ? require_writable(name, a, e, shape) : const_cast<void *>(require(name, a, e, shape));
    };
    LayerMemory mem{};
    mem.n_head_kv = int32_t(heads);
    mem.head_dim  = int32_t(dim);
    mem.group     = l.group;
    mem.n_cells   = int32_t(cells);
    mem.n_near    = int32_t(near);
    mem.far_k     = static_cast<Fp4Block *>(take("far_k", l.far_k, Element::u8, {cells, heads, row}));
    mem.far_v     = static_cast<Fp4Block *>(take("far_v", l.far_v, Element::u8, {cells, heads, row}));
    mem.side      = static_cast<uint8_t *>(take("side", l.side, Element::u8, {py::ssize_t(side.bytes)}));
    mem.near_k =
        static_cast<uint16_t *>(const_cast<void *>(require("near_k", l.near_k, Element::f16, {near, heads, dim})));
    mem.near_v =
        static_cast<uint16_t *>(const_cast<void *>(require("near_v", l.near_v, Element::f16, {near, heads, dim})));
    return mem;
}

CurrentRows current_rows(const py::array & k, const py::array & v, int32_t heads, int32_t dim) {
    require("cur_k", k, Element::f32, {kAny, heads, dim});
    const py::ssize_t n = k.shape(0);
    CurrentRows       cur{};
    cur.k        = static_cast<const float *>(k.data());
    cur.v        = static_cast<const float *>(require("cur_v", v, Element::f32, {n, heads, dim}));
    cur.k_stride = int64_t(heads) * dim;
    cur.v_stride = int64_t(heads) * dim;
    cur.n_rows   = int32_t(n);
    return cur;
}

using RotationSizes = std::pair<int, int>;  // of keys, of values

Rotation require_rotation(const RotationSizes & sizes, int32_t head_dim) {
    for (const int size : {sizes.first, sizes.second}) {
        if (!rotation_fits(size, head_dim)) {
            throw py::value_error("rotation: " + std::to_string(size) +
                                  " is neither 0 nor a size (64, 128, 256) that divides head_dim " +
                                  std::to_string(head_dim));
        }
    }
    return {sizes.first, sizes.second};
}

// A source must be hidden, far, or a row that exists.
void require_source(const char * name, int32_t src, const LayerMemory & mem, const CurrentRows & cur) {
    if (src >= mem.n_near || (src_is_current(src) && src_current_row(src) >= cur.n_rows)) {
        throw py::value_error(std::string(name) + ": source " + std::to_string(src) + " is outside the " +
                              std::to_string(mem.n_near) + " near rows and " + std::to_string(cur.n_rows) +
                              " current rows");
    }
}

// --- operations ------------------------------------------------------------------------------------------------------

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
          const py::array & near_v, const py::array & cur_k, const py::array & cur_v, const py::array & plan, int group,
          const RotationSizes & rotation, int n_threads) {
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
    run(n_threads, kv_fold_scratch(a, n_threads), [&a](const Threads & t) { kv_fold(a, t); });
}

py::array_t<float> attend(const py::array & far_k, const py::array & far_v, const py::array & side,
                          const py::array & near_k, const py::array & near_v, const py::array & cur_k,
                          const py::array & cur_v, const py::array & cell_src, const py::array & q,
                          const std::optional<py::array> & mask, const std::optional<py::array> & sinks, int group,
                          float scale, float softcap, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    AttendArgs a{};
    a.mem            = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    a.cur            = current_rows(cur_k, cur_v, a.mem.n_head_kv, a.mem.head_dim);
    a.rot            = require_rotation(rotation, a.mem.head_dim);
    const auto * src = static_cast<const int32_t *>(require("cell_src", cell_src, Element::i32, {kAny}));
    a.n_kv           = int32_t(cell_src.shape(0));
    if (a.n_kv > a.mem.n_cells) {
        throw py::value_error("cell_src: " + std::to_string(a.n_kv) + " cells, but the layer has " +
                              std::to_string(a.mem.n_cells));
    }
    for (int32_t c = 0; c < a.n_kv; ++c) {
        require_source("cell_src", src[c], a.mem, a.cur);
    }
    const CellLists cells = cell_lists(src, a.n_kv);
    a.far_bits            = cells.far_bits.data();
    a.exact               = cells.exact.data();
    a.n_exact             = int32_t(cells.exact.size());
    a.q                   = static_cast<const float *>(require("q", q, Element::f32, {kAny, kAny, a.mem.head_dim}));
    a.n_q                 = int32_t(q.shape(0));
    a.n_head              = int32_t(q.shape(1));
    if (a.n_head == 0 || a.n_head % a.mem.n_head_kv != 0) {
        throw py::value_error("q: " + std::to_string(a.n_head) + " heads are no multiple of " +
                              std::to_string(a.mem.n_head_kv) + " KV heads");
    }
    a.q_stride_query = int64_t(a.n_head) * a.mem.head_dim;
    a.q_stride_head  = a.mem.head_dim;
    if (mask) {
        a.mask        = static_cast<const uint16_t *>(require("mask", *mask, Element::f16, {a.n_q, a.n_kv}));
        a.mask_stride = a.n_kv;
    }
    if (sinks) {
        a.sinks = static_cast<const float *>(require("sinks", *sinks, Element::f32, {a.n_head}));
    }
    a.scale   = scale;
    a.softcap = softcap;
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
        [](int32_t n_head_kv, int32_t head_dim, int32_t n_groups) {
            return side_layout(n_head_kv, head_dim, n_groups).bytes;
        },
        arg("n_head_kv"), arg("head_dim"), arg("n_groups"), "Size in bytes of a layer's side memory.");
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
          arg("cur_v"), arg("plan"), py::kw_only(), arg("group"), arg("rotation") = RotationSizes(0, 0),
          arg("n_threads") = 1,
          R"(Encode groups into the far tier, in place.

far_k, far_v    uint8 [n_cells, n_head_kv, 36 * head_dim / 64]
side            uint8 [side_bytes(n_head_kv, head_dim, n_cells / group)]
near_k, near_v  float16 (or its bits, uint16) [n_near, n_head_kv, head_dim]
cur_k, cur_v    float32 [n_rows, n_head_kv, head_dim]
plan            int32 [n_groups, 1 + group]: group index (negative: skipped), then the source of each member:
                a near row, SRC_FAR, SRC_HIDDEN (no such member) or SRC_CURRENT_BASE - row
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
