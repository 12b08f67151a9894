// What a context's cache holds.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "bindings/failure.h"
#include "kvfold/kvfold.h"

namespace py = pybind11;

namespace {

llama_context * to_context(uintptr_t ctx) {
    if (ctx == 0) {
        throw py::value_error("the context is null");
    }
    return reinterpret_cast<llama_context *>(ctx);
}

py::object context_stats(uintptr_t ctx) {
    kvfold_stats s;
    if (!kvfold_get_stats(to_context(ctx), &s)) {
        return py::none();
    }
    py::dict d;
    d["kv_type"]       = kvfold_type_name(s.config.type);
    d["group"]         = s.config.group;
    d["tail"]          = s.config.tail;
    d["sinks"]         = s.config.sinks;
    d["swa_type"]      = s.config.swa_type == KVFOLD_SWA_Q8_0 ? "q8_0" : "f16";
    d["scale_group"]   = s.config.scale_group;
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
    if (s.config.type != KVFOLD_TYPE_FP4) {
        d["lookup"]      = py::make_tuple(s.config.lookup_min, s.config.lookup_max);
        d["threshold"]   = s.config.threshold;
        d["min_tokens"]  = s.config.min_tokens;
        d["max_tokens"]  = s.config.max_tokens;
        d["min_context"] = s.config.min_context;
        d["layers"]      = s.config.layers[0] != '\0' ? s.config.layers : "auto";

        d["hierarchical"] = kvfold_hierarchical_name(s.config.hierarchical);
        d["span_pool"]    = s.config.span_pool;
    }
    d["evicted_tokens"] = s.evicted_tokens;
    d["evictions"]      = s.evictions;
    if (s.config.type == KVFOLD_TYPE_FP4_CSA2_CED) {
        d["keep"]  = s.config.keep;
        d["score"] = kvfold_score_name(s.config.score);
    }
    d["lookup_visible"]  = s.lookup_visible;
    d["lookup_read"]     = s.lookup_read;
    d["lookup_share"]    = s.lookup_visible > 0 ? double(s.lookup_read) / double(s.lookup_visible) : 1.0;
    d["lookup_steps"]    = s.lookup_steps;
    d["dense_fallbacks"] = s.dense_fallbacks;
    return d;
}

}  // namespace

namespace kvfold {

void register_stats(py::module_ & m);

void register_stats(py::module_ & m) {
    m.def(
        "alignment",
        [](uintptr_t ctx) {
            if (ctx == 0) {
                throw py::value_error("alignment: the context is null");
            }
            const auto *                  context = reinterpret_cast<const llama_context *>(ctx);
            std::vector<kvfold_alignment> rows(kvfold_get_alignment(context, nullptr, 0));
            kvfold_get_alignment(context, rows.data(), rows.size());
            py::list list;
            for (const kvfold_alignment & row : rows) {
                list.append(py::make_tuple(row.layer, row.head, row.tokens, row.recalled, row.divergence, row.largest,
                                           row.read));
            }
            return list;
        },
        py::arg("ctx"),
        "What look-ups of a llama_context given by address find of the attention: for every layer and head a tuple of "
        "layer,\n"
        "head, tokens, mean share found, mean and largest divergence, and the share of the groups that the layer "
        "reads. "
        "Empty\n"
        "without the setting kv_alignment.");
    m.def("context_stats", &context_stats, py::arg("ctx"),
          "Statistics of the kvfold cache of a llama_context given by address, as a dict (sizes in bytes, all "
          "allocated memory\n"
          "counted; tokens are cells in use); None when the context has no kvfold cache.");
    m.def(
        "model_fingerprint",
        [](uintptr_t model) {
            if (model == 0) {
                throw py::value_error("model_fingerprint: the model is null");
            }
            return kvfold_model_fingerprint(reinterpret_cast<const llama_model *>(model));
        },
        py::arg("model"),
        "A number that two models (llama_model given by address) share only by being the same model; never 0.");
    m.def(
        "evicted",
        [](uintptr_t ctx, int32_t seq, int32_t n_pos) { return kvfold_evicted(to_context(ctx), seq, n_pos); },
        py::arg("ctx"), py::arg("seq"), py::arg("n_pos"),
        "Positions below n_pos that eviction has taken from a sequence.");
    m.def(
        "prefix_usable",
        [](uintptr_t ctx, int32_t seq, int32_t n_pos) { return kvfold_prefix_usable(to_context(ctx), seq, n_pos); },
        py::arg("ctx"), py::arg("seq"), py::arg("n_pos"),
        "Whether the first n_pos positions of a sequence can stand for a text of that length.");
    m.def(
        "pin",
        [](uintptr_t ctx, int32_t seq, int32_t start, int32_t stop) {
            kvfold::require_done(kvfold_pin(to_context(ctx), seq, start, stop));
        },
        py::arg("ctx"), py::arg("seq"), py::arg("start"), py::arg("stop"),
        "Never evicts positions start to stop - 1 of a sequence; an empty range forgets its pins. Raises ValueError.");
    m.def(
        "compact_alignment",
        [](uintptr_t ctx, int32_t seq, const std::vector<int32_t> & tokens, float keep) {
            std::vector<kvfold_part_alignment> rows;
            bool                               done = false;
            {
                const py::gil_scoped_release release;
                const auto                   sink = [](const kvfold_part_alignment * row, void * to) {
                    static_cast<std::vector<kvfold_part_alignment> *>(to)->push_back(*row);
                };
                done = kvfold_compact_alignment(to_context(ctx), seq, tokens.data(), tokens.size(), keep, sink, &rows);
            }
            kvfold::require_done(done);
            py::list list;
            for (const auto & row : rows) {
                list.append(py::make_tuple(row.layer, row.start, row.stop, row.recalled, row.divergence, row.largest));
            }
            return list;
        },
        py::arg("ctx"), py::arg("seq"), py::arg("tokens"), py::arg("keep"),
        "What compact with these arguments would miss: for every part of the text and layer a tuple of layer, first "
        "position,\n"
        "position behind the last, mean share of the attention that stays, mean and largest divergence. Raises "
        "ValueError.");
    m.def(
        "compact",
        [](uintptr_t ctx, int32_t seq, const std::vector<int32_t> & tokens, float keep) {
            int32_t dropped = 0;
            {
                const py::gil_scoped_release release;
                dropped = kvfold_compact(to_context(ctx), seq, tokens.data(), tokens.size(), keep);
            }
            kvfold::require_done(dropped >= 0);
            return dropped;
        },
        py::arg("ctx"), py::arg("seq"), py::arg("tokens"), py::arg("keep"),
        "Reads the tokens, which the sequence holds, a second time and drops those groups that they do not need, down "
        "to "
        "a share.\n"
        "Returns the number of dropped tokens. ValueError: why not.");
}

}  // namespace kvfold
