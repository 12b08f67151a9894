// Configuration: the thread's scope, the process default, validation and the thread's last error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kvfold/kvfold.h"

namespace kvfold {

// Fills in defaults that depend on the type (group 0).
kvfold_config resolve(kvfold_config config);

// Types whose decoding may look up.
bool has_lookup(kvfold_type type);

// "keydiff+attn" for kvfold_config::score.
std::string score_name(uint32_t score);

// A configuration in which everything is still to be decided.
kvfold_config unset_config(kvfold_type type);

enum class LayerMode { dense, full, reuse, reindex, window };

struct LayerRule {
    LayerMode mode;
    float     share;  // takes the place of kvfold_config::lookup_max; 0: none of its own
};

// Expands kvfold_config::layers, of a resolved configuration, for layers of these numbers in a model of `n_layer`; false (see fail) if
// that is impossible. An empty list of layers only checks the text.
bool layer_rules(const kvfold_config & config, const std::vector<int32_t> & layers, int32_t n_layer,
                 std::vector<LayerRule> & rules);

// Remembers the reason for kvfold_last_error() and returns false, so that `return fail(...)` reads well.
bool fail(const std::string & reason);

std::string message(const char * fmt, ...) __attribute__((format(printf, 1, 2)));

}  // namespace kvfold
