// The configuration scope around context creation, and the reason of the last failure.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "bindings/failure.h"
#include "kvfold/kvfold.h"

namespace py = pybind11;

namespace {

kvfold_config to_config(const std::map<std::string, std::string> & settings) {
    kvfold_config config = kvfold_config_default(KVFOLD_TYPE_NONE);
    // The type first: it decides what the others may be.
    const auto type = settings.find("kv_type");
    if (type == settings.end()) {
        throw py::value_error("a cache configuration needs kv_type");
    }
    const auto set = [&](const std::string & key, const std::string & value) {
        kvfold::require_done(kvfold_config_set(&config, key.c_str(), value.c_str()));
    };
    set(type->first, type->second);
    for (const auto & [key, value] : settings) {
        if (key != "kv_type") {
            set(key, value);
        }
    }
    kvfold::require_done(kvfold_config_check(&config));
    return config;
}

std::map<std::string, std::string> to_text(const py::dict & settings) {
    std::map<std::string, std::string> text;
    for (const auto & [key, value] : settings) {
        if (!value.is_none()) {
            text[py::str(key)] = py::str(value);
        }
    }
    return text;
}

}  // namespace

namespace kvfold {

void register_config(py::module_ & m);

void register_config(py::module_ & m) {
    m.def(
        "scope_push",
        [](const py::dict & settings) {
            const kvfold_config config = to_config(to_text(settings));
            kvfold::require_done(kvfold_scope_push(&config));
        },
        py::arg("settings"),
        "Makes this configuration active for contexts created by this thread until scope_pop().\n\n"
        "Keys: kv_type (fp4, fp4_csa2), group, tail, sinks, swa_type (f16, q8_0), scale_group (16, 32, 64), lookup\n"
        "('0.2' or '0.1,0.2'), threshold,\n"
        "min_tokens, max_tokens, min_context, layers, alignment, calibration, hierarchical (auto, on, off), span_pool; "
        "None\n"
        "means the default.\n"
        "Raises ValueError naming the setting, its value and what is possible.");
    m.def("scope_pop", &kvfold_scope_pop, "Ends the innermost scope of this thread.");
    m.def("last_error", &kvfold_last_error, "Why the last kvfold call on this thread failed; empty if none did.");
    m.def(
        "check_config", [](const py::dict & settings) { to_config(to_text(settings)); }, py::arg("settings"),
        "Raises ValueError for a configuration that scope_push() would refuse.");
}

}  // namespace kvfold
