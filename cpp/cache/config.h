// Configuration: the thread's scope, the process default, validation and the thread's last error.
#pragma once

#include <string>

#include "kvfold/kvfold.h"

namespace kvfold {

inline const char * type_name(kvfold_type type) { return kvfold_type_name(type); }

// Fills in defaults that depend on the type (group 0).
kvfold_config resolve(kvfold_config config);

// Remembers the reason for kvfold_last_error() and returns false, so that `return fail(...)` reads well.
bool fail(const std::string & reason);

std::string message(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

}  // namespace kvfold
