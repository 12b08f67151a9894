// Command-line options of the cache: --kv-type, --kv-group, --kv-tail, --kv-sinks, --kv-swa-type (env LLAMA_ARG_KV_*).
#pragma once

#include <vector>

#include "arg.h"

// For the programs that parse their options with llama.cpp's `common` (server, cli, perplexity, ...).
void kvfold_add_args(std::vector<common_arg> & options);

// After parsing: refuses combinations that would leave a setting without effect. Throws std::invalid_argument.
void kvfold_check_args(const common_params & params);
