// The Python extension module kvfold._core. Each topic has its own file and registers itself; a topic whose file is not
// there is left out (the build defines KVFOLD_HAVE_REGISTER_<TOPIC> for those that are).
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace kvfold {

void register_build(py::module_ & m);
void register_config(py::module_ & m);
void register_format(py::module_ & m);
void register_memory(py::module_ & m);
void register_ops(py::module_ & m);
void register_score(py::module_ & m);
void register_select(py::module_ & m);
void register_stats(py::module_ & m);

}  // namespace kvfold

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
    m.doc() = "kvfold's native part: cache configuration and statistics, codecs, operations and build information.";
#ifdef KVFOLD_HAVE_REGISTER_BUILD
    kvfold::register_build(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_FORMAT
    kvfold::register_format(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_OPS
    kvfold::register_ops(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_SELECT
    kvfold::register_select(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_SCORE
    kvfold::register_score(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_CONFIG
    kvfold::register_config(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_MEMORY
    kvfold::register_memory(m);
#endif
#ifdef KVFOLD_HAVE_REGISTER_STATS
    kvfold::register_stats(m);
#endif
}
