// What a call of the C API that failed becomes in Python.
#pragma once

#include <pybind11/pybind11.h>

#include "kvfold/kvfold.h"

namespace kvfold {

// ValueError with kvfold_last_error().
inline void require_done(bool done) {
    if (!done) {
        throw pybind11::value_error(kvfold_last_error());
    }
}

}  // namespace kvfold
