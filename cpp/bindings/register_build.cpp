// What this build is: version, commit, pinned llama.cpp, compiler, flags and backends. The values come from CMake.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

namespace py = pybind11;

namespace kvfold {

void register_build(py::module_ & m) {
    m.attr("__version__") = KVFOLD_VERSION;
    m.def("version", [] { return KVFOLD_VERSION; }, "Version of the compiled runtime.");
    m.def(
        "build_info",
        [] {
            py::list           backends;
            std::istringstream names(KVFOLD_BACKENDS);
            for (std::string name; names >> name;) {
                backends.append(name);
            }
            py::dict info;
            info["version"]          = KVFOLD_VERSION;
            info["commit"]           = KVFOLD_COMMIT;
            info["llama_cpp_python"] = KVFOLD_PIN_VERSION;
            info["llama_cpp_commit"] = KVFOLD_PIN_COMMIT;
            info["compiler"]         = KVFOLD_COMPILER;
            info["build_type"]       = KVFOLD_BUILD_TYPE;
            info["flags"]            = KVFOLD_FLAGS;
            info["backends"]         = backends;
            return info;
        },
        "Version, commit (of a build from a repository; + with changes), pinned llama.cpp, compiler, build type, flags "
        "and compiled-in backends, as a dict.");
}

}  // namespace kvfold
