// kvfold's operations on ggml's CPU backend.
#pragma once

#include "ggml-backend.h"

namespace kvfold {

// An "extra buffer type": no tensor lives in it; ggml-cpu asks every registered one whether it computes a node, and this one
// claims the nodes of graph_node.h.
ggml_backend_buffer_type_t cpu_buffer_type();

}  // namespace kvfold
