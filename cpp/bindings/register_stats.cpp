// What a context's cache holds.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "kvfold/kvfold.h"

namespace py = pybind11;

namespace {

py::object context_stats(uintptr_t ctx) {
    kvfold_stats s;
    if (ctx == 0) {
        throw py::value_error("context_stats: the context is null");
    }
    if (!kvfold_get_stats(reinterpret_cast<const llama_context *>(ctx), &s)) {
        return py::none();
    }
    py::dict d;
    d["kv_type"]       = kvfold_type_name(s.config.type);
    d["group"]         = s.config.group;
    d["tail"]          = s.config.tail;
    d["sinks"]         = s.config.sinks;
    d["swa_type"]      = s.config.swa_type == KVFOLD_SWA_Q8_0 ? "q8_0" : "f16";
    d["bytes"]         = s.bytes;
    d["f16_bytes"]     = s.f16_bytes;
    d["far_bytes"]     = s.far_bytes;
    d["side_bytes"]    = s.side_bytes;
    d["near_bytes"]    = s.near_bytes;
    d["swa_bytes"]     = s.swa_bytes;
    d["n_cells"]       = s.n_cells;
    d["tokens"]        = s.tokens;
    d["near_tokens"]   = s.near_tokens;
    d["folded_tokens"] = s.folded_tokens;
    d["folds"]         = s.folds;
    d["backend"]       = s.backend;
    return d;
}

}  // namespace

namespace kvfold {

void register_stats(py::module_ & m);

void register_stats(py::module_ & m) {
    m.def("context_stats", &context_stats, py::arg("ctx"),
          "Statistics of the kvfold cache of a llama_context given by address, as a dict (sizes in bytes, all "
          "allocated memory\n"
          "counted; tokens are cells in use); None when the context has no kvfold cache.");
}

}  // namespace kvfold
