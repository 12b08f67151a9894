// NumPy arrays as arguments of the CPU operations, checked. Shared by the register_*.cpp that offer operations.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "ops/cell_lists.h"
#include "ops/kv_ops.h"
#include "ops/rotate.h"
#include "ops/thread_team.h"

namespace kvfold {

constexpr int kMaxThreads = 256;

// Runs `op` without Python's lock.
template <typename Op>
void run(int n_threads, size_t scratch_bytes, const Op & op) {
    const py::gil_scoped_release release;
    run_on_threads(n_threads, scratch_bytes, op);
}

inline void require_one_of(const char * name, py::ssize_t value, std::initializer_list<py::ssize_t> possible) {
    std::string text;
    for (const py::ssize_t p : possible) {
        if (p == value) {
            return;
        }
        text += (text.empty() ? "" : ", ") + std::to_string(p);
    }
    throw py::value_error(std::string(name) + ": " + std::to_string(value) + " is not one of " + text);
}

inline void require_threads(int n_threads) {
    if (n_threads < 1 || n_threads > kMaxThreads) {
        throw py::value_error("n_threads: " + std::to_string(n_threads) + " is not within 1 .. " +
                              std::to_string(kMaxThreads));
    }
}

struct LayerArrays {
    py::array far_k, far_v, side, near_k, near_v;
    int       group;
};

// Channels a scale of far rows that have so many bytes for a KV head.
inline int32_t scale_group_of(py::ssize_t row_bytes, int32_t head_dim) {
    std::string sizes;
    for (const int32_t scale_group : {16, 32, 64}) {
        if (row_bytes == far_row_bytes(head_dim, scale_group)) {
            return scale_group;
        }
        sizes += (sizes.empty() ? "" : ", ") + std::to_string(far_row_bytes(head_dim, scale_group));
    }
    throw py::value_error("far_k: rows of " + std::to_string(row_bytes) + " bytes; " + std::to_string(head_dim) +
                          " channels take " + sizes);
}

inline LayerMemory layer_memory(const LayerArrays & l, bool write) {
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
    const py::ssize_t row         = l.far_k.shape(2);
    const int32_t     scale_group = scale_group_of(row, int32_t(dim));
    // A layer keeps summaries of spans or not: its side memory tells.
    const int32_t n_groups = int32_t(cells / l.group), spans = l.group <= 16 ? int32_t(cells / kSpanCells) : 0;
    const size_t  with  = side_layout(int32_t(heads), int32_t(dim), n_groups, spans).bytes;
    const bool    has   = l.side.ndim() == 1 && size_t(l.side.shape(0)) == with;
    const size_t  bytes = has ? with : side_layout(int32_t(heads), int32_t(dim), n_groups, 0).bytes;
    const auto    take  = [write](const char * name, const py::array & a, Element e,
                                  std::initializer_list<py::ssize_t> shape) {
        return write ? require_writable(name, a, e, shape) : const_cast<void *>(require(name, a, e, shape));
    };
    LayerMemory mem{};
    mem.n_head_kv = int32_t(heads);
    mem.head_dim  = int32_t(dim);
    mem.group     = l.group;
    mem.n_cells   = int32_t(cells);
    mem.n_near    = int32_t(near);
    mem.n_spans   = has ? spans : 0;
    mem.far_k     = static_cast<uint8_t *>(take("far_k", l.far_k, Element::u8, {cells, heads, row}));
    mem.far_v     = static_cast<uint8_t *>(take("far_v", l.far_v, Element::u8, {cells, heads, row}));
    mem.side      = static_cast<uint8_t *>(take("side", l.side, Element::u8, {py::ssize_t(bytes)}));

    mem.scale_group = scale_group;
    mem.near_k =
        static_cast<uint16_t *>(const_cast<void *>(require("near_k", l.near_k, Element::f16, {near, heads, dim})));
    mem.near_v =
        static_cast<uint16_t *>(const_cast<void *>(require("near_v", l.near_v, Element::f16, {near, heads, dim})));
    return mem;
}

inline CurrentRows current_rows(const py::array & k, const py::array & v, int32_t heads, int32_t dim) {
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

inline Rotation require_rotation(const RotationSizes & sizes, int32_t head_dim) {
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
inline void require_source(const char * name, int32_t src, const LayerMemory & mem, const CurrentRows & cur) {
    if (src >= mem.n_near || (src_is_current(src) && src_current_row(src) >= cur.n_rows)) {
        throw py::value_error(std::string(name) + ": source " + std::to_string(src) + " is outside the " +
                              std::to_string(mem.n_near) + " near rows and " + std::to_string(cur.n_rows) +
                              " current rows");
    }
}

// What is asked of an attention.
struct QueryArrays {
    py::array                cell_src, q;
    std::optional<py::array> mask, sinks;
    float                    scale, softcap;
    RotationSizes            rotation;
};

// All arguments but `out`. They point into the arrays and into `lists`.
inline AttendArgs attend_arguments(const LayerMemory & mem, const CurrentRows & cur, const QueryArrays & x,
                                   CellLists & lists) {
    AttendArgs a{};
    a.mem            = mem;
    a.cur            = cur;
    a.rot            = require_rotation(x.rotation, mem.head_dim);
    const auto * src = static_cast<const int32_t *>(require("cell_src", x.cell_src, Element::i32, {kAny}));
    a.n_kv           = int32_t(x.cell_src.shape(0));
    if (a.n_kv > mem.n_cells) {
        throw py::value_error("cell_src: " + std::to_string(a.n_kv) + " cells, but the layer has " +
                              std::to_string(mem.n_cells));
    }
    for (int32_t c = 0; c < a.n_kv; ++c) {
        require_source("cell_src", src[c], mem, cur);
    }
    lists      = cell_lists(src, a.n_kv);
    a.far_bits = lists.far_bits.data();
    a.exact    = lists.exact.data();
    a.n_exact  = int32_t(lists.exact.size());
    a.q        = static_cast<const float *>(require("q", x.q, Element::f32, {kAny, kAny, mem.head_dim}));
    a.n_q      = int32_t(x.q.shape(0));
    a.n_head   = int32_t(x.q.shape(1));
    if (a.n_head == 0 || a.n_head % mem.n_head_kv != 0) {
        throw py::value_error("q: " + std::to_string(a.n_head) + " heads are no multiple of " +
                              std::to_string(mem.n_head_kv) + " KV heads");
    }
    a.q_stride_query = int64_t(a.n_head) * mem.head_dim;
    a.q_stride_head  = mem.head_dim;
    if (x.mask) {
        a.mask        = static_cast<const uint16_t *>(require("mask", *x.mask, Element::f16, {a.n_q, a.n_kv}));
        a.mask_stride = a.n_kv;
    }
    if (x.sinks) {
        a.sinks = static_cast<const float *>(require("sinks", *x.sinks, Element::f32, {a.n_head}));
    }
    a.scale   = x.scale;
    a.softcap = x.softcap;
    return a;
}

}  // namespace kvfold
