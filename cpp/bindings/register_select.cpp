// Look-up on the CPU (ops/kv_select.h) on NumPy arrays, for tests and experiments.

#include <pybind11/stl.h>

#include <limits>

#include "bindings/op_arguments.h"
#include "ops/kv_align.h"

namespace kvfold {

namespace {

// Lists of groups: i32 [n_q, n_head_kv, 1 + capacity], ascending and within `n_groups`.
const int32_t * require_lists(const char * name, const py::array & a, py::ssize_t n_q, py::ssize_t heads,
                              int32_t n_groups) {
    const auto *      lists  = static_cast<const int32_t *>(require(name, a, Element::i32, {n_q, heads, kAny}));
    const py::ssize_t stride = a.shape(2);
    for (py::ssize_t i = 0; i < n_q * heads; ++i) {
        const int32_t * list = lists + i * stride;
        bool            good = stride > 0 && list[0] >= 0 && list[0] < stride;
        for (int32_t k = 0; good && k < list[0]; ++k) {
            good = list[1 + k] < n_groups && list[1 + k] > (k == 0 ? -1 : list[k]);
        }
        if (!good) {
            throw py::value_error(std::string(name) + ": list " + std::to_string(i) + " of " + shape_text(a) +
                                  " is not a count followed by ascending groups below " + std::to_string(n_groups));
        }
    }
    return lists;
}

int32_t groups_of(const AttendArgs & a) { return (a.n_kv + a.mem.group - 1) / a.mem.group; }

py::tuple select(const py::array & far_k, const py::array & far_v, const py::array & side, const py::array & near_k,
                 const py::array & near_v, const py::array & cell_src, const py::array & q,
                 const std::optional<py::array> & mask, const std::optional<py::array> & pool, int group, float scale,
                 float softcap, const RotationSizes & rotation, const std::pair<float, float> & lookup, float threshold,
                 int min_tokens, int max_tokens, const std::optional<py::array> & ready, int most_spans,
                 std::optional<int> capacity, int n_threads) {
    require_threads(n_threads);
    const LayerMemory mem = layer_memory({far_k, far_v, side, near_k, near_v, group}, false);
    CurrentRows       any{};
    any.n_rows = std::numeric_limits<int32_t>::max();  // sources of exact rows are not followed
    CellLists        lists;
    const AttendArgs x = attend_arguments(mem, any, {cell_src, q, mask, {}, scale, softcap, rotation}, lists);
    if (!(0 <= lookup.first && lookup.first <= lookup.second && lookup.second <= 1)) {
        throw py::value_error("lookup: " + std::to_string(lookup.first) + ", " + std::to_string(lookup.second) +
                              " are not two ascending shares within 0 .. 1");
    }
    if (!(0 <= threshold && threshold <= 1)) {
        throw py::value_error("threshold: " + std::to_string(threshold) + " is not within 0 .. 1");
    }
    SelectArgs a{};
    a.mem            = x.mem;
    a.rot            = x.rot;
    a.far_bits       = x.far_bits;
    a.n_kv           = x.n_kv;
    a.q              = x.q;
    a.q_stride_query = x.q_stride_query;
    a.q_stride_head  = x.q_stride_head;
    a.n_q            = x.n_q;
    a.n_head         = x.n_head;
    a.mask           = x.mask;
    a.mask_stride    = x.mask_stride;
    a.scale          = scale;
    a.softcap        = softcap;
    a.budget         = {lookup.first, lookup.second, threshold, min_tokens, max_tokens};
    a.capacity       = capacity.value_or(groups_of(x));
    if (min_tokens < 0 || max_tokens < 0 || a.capacity < 0) {
        throw py::value_error("min_tokens, max_tokens and capacity: must not be negative, got " +
                              std::to_string(min_tokens) + ", " + std::to_string(max_tokens) + " and " +
                              std::to_string(a.capacity));
    }
    if (ready) {
        if (mem.n_spans == 0 || pool || most_spans < 1) {
            throw py::value_error(
                "ready: needs a side memory with spans, no pool and at least one span, got most_spans " +
                std::to_string(most_spans));
        }
        a.ready      = static_cast<const uint32_t *>(require("ready", *ready, Element::i32, {(mem.n_spans + 31) / 32}));
        a.most_spans = most_spans;
    }
    if (pool) {
        a.pool          = require_lists("pool", *pool, a.n_q, mem.n_head_kv, groups_of(x));
        a.pool_capacity = int32_t(pool->shape(2)) - 1;
    }
    py::array_t<int32_t> selected({py::ssize_t(a.n_q), py::ssize_t(mem.n_head_kv), py::ssize_t(1) + a.capacity});
    std::fill_n(selected.mutable_data(), selected.size(), -1);
    a.selected           = selected.mutable_data();
    uint64_t counters[2] = {0, 0};
    a.counters           = counters;
    py::array_t<float> unread({py::ssize_t(a.n_q), py::ssize_t(a.n_head)});
    a.unread = unread.mutable_data();
    run(n_threads, kv_select_scratch(a, n_threads), [&a](const Threads & t) { kv_select(a, t); });
    return py::make_tuple(selected, counters[0], counters[1], unread);
}

// Attention over lists: all arguments but `out` and `unread`. They point into the arrays and into `lists`.
SparseAttendArgs sparse_arguments(const LayerMemory & mem, const py::array & cur_k, const py::array & cur_v,
                                  const QueryArrays & x, const py::array & selected, CellLists & lists) {
    SparseAttendArgs a{};
    a.attend   = attend_arguments(mem, current_rows(cur_k, cur_v, mem.n_head_kv, mem.head_dim), x, lists);
    a.selected = require_lists("selected", selected, a.attend.n_q, mem.n_head_kv, groups_of(a.attend));
    a.capacity = int32_t(selected.shape(2)) - 1;
    return a;
}

py::array_t<float> attend_sparse(const py::array & far_k, const py::array & far_v, const py::array & side,
                                 const py::array & near_k, const py::array & near_v, const py::array & cur_k,
                                 const py::array & cur_v, const py::array & cell_src, const py::array & q,
                                 const py::array & selected, const std::optional<py::array> & mask,
                                 const std::optional<py::array> & sinks, const std::optional<py::array> & unread,
                                 int group, float scale, float softcap, const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    CellLists        lists;
    SparseAttendArgs a = sparse_arguments(layer_memory({far_k, far_v, side, near_k, near_v, group}, false), cur_k,
                                          cur_v, {cell_src, q, mask, sinks, scale, softcap, rotation}, selected, lists);
    if (unread) {
        a.unread =
            static_cast<const float *>(require("unread", *unread, Element::f32, {a.attend.n_q, a.attend.n_head}));
    }
    py::array_t<float> out(
        {py::ssize_t(a.attend.n_q), py::ssize_t(a.attend.n_head), py::ssize_t(a.attend.mem.head_dim)});
    a.attend.out = out.mutable_data();
    run(n_threads, kv_attend_sparse_scratch(a, n_threads), [&a](const Threads & t) { kv_attend_sparse(a, t); });
    return out;
}

py::array_t<double> align(const py::array & far_k, const py::array & far_v, const py::array & side,
                          const py::array & near_k, const py::array & near_v, const py::array & cur_k,
                          const py::array & cur_v, const py::array & cell_src, const py::array & q,
                          const py::array & selected, const std::optional<py::array> & mask,
                          const std::optional<py::array> & sinks, int group, float scale, float softcap,
                          const RotationSizes & rotation, int n_threads) {
    require_threads(n_threads);
    CellLists        lists;
    SparseAttendArgs a = sparse_arguments(layer_memory({far_k, far_v, side, near_k, near_v, group}, false), cur_k,
                                          cur_v, {cell_src, q, mask, sinks, scale, softcap, rotation}, selected, lists);
    py::array_t<double> sums({py::ssize_t(a.attend.n_head), py::ssize_t(sizeof(Alignment) / sizeof(double))});
    std::fill_n(sums.mutable_data(), sums.size(), 0.0);
    auto * to = reinterpret_cast<Alignment *>(sums.mutable_data());
    run(n_threads, 0, [&a, to](const Threads & t) { kv_align(a, to, t); });
    return sums;
}

}  // namespace

void register_select(py::module_ & m) {
    using py::arg;
    m.def("kv_select", &select, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cell_src"),
          arg("q"), arg("mask") = py::none(), arg("pool") = py::none(), py::kw_only(), arg("group"), arg("scale"),
          arg("softcap") = 0.0f, arg("rotation") = RotationSizes(0, 0),
          arg("lookup") = std::pair<float, float>(0.1f, 0.2f), arg("threshold") = 0.1f, arg("min_tokens") = 0,
          arg("max_tokens") = 0, arg("ready") = py::none(), arg("most_spans") = 1, arg("capacity") = py::none(),
          arg("n_threads") = 1,
          R"(Choose the groups of the far tier that a decode step reads.

far_k .. near_v    as for kv_attend; only the summaries and spreads are read
cell_src, q, mask  as for kv_attend
pool               int32 [n_q, n_head_kv, 1 + n]: lists (a count, then ascending groups) to choose from; None: all groups
lookup             smallest and largest share of the complete groups that a query sees
threshold          share of the estimated attention that may be left unread, within `lookup`
min_tokens         at least so many tokens are taken, where there are as many
max_tokens         and at most so many; 0: no bound
ready              int32 [(n_cells // 128 + 31) // 32], bit s % 32 of word s // 32: span s has a summary that is valid. Spans
                   are scored first, and only groups of the best are candidates; None: all groups are. Needs spans in `side`
most_spans         how many spans are taken then, of those that are ready
capacity           room of a list; None: for all groups

Returns the lists (taken groups and those that are only partly far) int32 [n_q, n_head_kv, 1 + capacity], the
number of complete groups that queries saw and the number of those taken, both summed over queries and KV
heads, and the log of the estimated attention that is left unread, float32 [n_q, n_head].
ValueError: an array of another type or shape, or a number out of range.)");
    m.def("kv_attend_sparse", &attend_sparse, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"),
          arg("cur_k"), arg("cur_v"), arg("cell_src"), arg("q"), arg("selected"), arg("mask") = py::none(),
          arg("sinks") = py::none(), arg("unread") = py::none(), py::kw_only(), arg("group"), arg("scale"),
          arg("softcap") = 0.0f, arg("rotation") = RotationSizes(0, 0), arg("n_threads") = 1,
          R"(kv_attend that reads, of the far cells, only those of the listed groups.

selected  int32 [n_q, n_head_kv, 1 + capacity]: for each query and KV head a count, then ascending groups
unread    float32 [n_q, n_head], as from kv_select: the mean value stands in for it; None: nothing does
The other arguments and the result are those of kv_attend.
ValueError: an array of another type or shape, a source that does not exist, or a list that is not ascending.)");
    m.def(
        "kv_align", &align, arg("far_k"), arg("far_v"), arg("side"), arg("near_k"), arg("near_v"), arg("cur_k"),
        arg("cur_v"), arg("cell_src"), arg("q"), arg("selected"), arg("mask") = py::none(), arg("sinks") = py::none(),
        py::kw_only(), arg("group"), arg("scale"), arg("softcap") = 0.0f, arg("rotation") = RotationSizes(0, 0),
        arg("n_threads") = 1,
        R"(How much of the attention over everything the listed groups and exact rows have; arguments as of kv_attend_sparse.

Returns float64 [n_head, 4], sums over queries that see anything: their number, the share of the softmax that is read,
its negative logarithm (the divergence from the exact distribution), and the largest of those.)");
}

}  // namespace kvfold
