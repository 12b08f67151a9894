// What the caches under construction in this thread may know about their context.
#pragma once

#include <cstdint>

#include "kvfold/kvfold.h"

namespace kvfold {

// Null unless llama_init_from_model() is making a kvfold context on this thread.
const kvfold_config * building_config();
uint32_t              building_n_seq_max();

bool check_model(const kvfold_config & config, const llama_model & model);

}  // namespace kvfold
