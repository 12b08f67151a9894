// llama-bench parses its own options; this takes the cache's among them.
#pragma once

#include <vector>

#include "ggml.h"

// True when argv[i] is one of ours: then its value is consumed (i moves on) and the lists of cache types are set. `invalid` is
// set, after a message, when the value is missing or impossible. llama-bench runs one kv type at a time.
bool kvfold_bench_arg(int argc, char ** argv, int & i, std::vector<ggml_type> & types_k,
                      std::vector<ggml_type> & types_v, bool & invalid);
