// What a context allocates, buffer by buffer. In a model loaded with `no_alloc` these are the sizes it would allocate.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "ggml-backend.h"
#include "llama-ext.h"
#include "llama.h"

namespace py = pybind11;

namespace {

py::list memory_breakdown(uintptr_t ctx) {
    if (ctx == 0) {
        throw py::value_error("memory_breakdown: the context is null");
    }
    py::list out;
    for (const auto & [buft, size] : llama_get_memory_breakdown(reinterpret_cast<const llama_context *>(ctx))) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
        py::dict           d;
        d["buffer"]  = ggml_backend_buft_name(buft);
        d["device"]  = dev != nullptr ? ggml_backend_dev_name(dev) : "CPU";
        d["host"]    = ggml_backend_buft_is_host(buft) || dev == nullptr ||
                       ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
        d["model"]   = size.model;
        d["context"] = size.context;
        d["compute"] = size.compute;
        out.append(d);
    }
    return out;
}

}  // namespace

namespace kvfold {

void register_memory(py::module_ & m);

void register_memory(py::module_ & m) {
    m.def("memory_breakdown", &memory_breakdown, py::arg("ctx"),
          "Memory of a llama_context given by address: one dict per buffer type with its name, its device, whether it "
          "is\n"
          "host memory, and the bytes of weights (model), caches (context) and scratch (compute). Of a model loaded "
          "with\n"
          "no_alloc: the bytes that would be allocated.");
}

}  // namespace kvfold
