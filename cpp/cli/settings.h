// The command line's cache settings, collected option by option into the process default.
#pragma once

#include <string>

#include "ggml.h"

namespace kvfold {

// "f16, q8_0, ..., fp4, fp4_csa2, fp4_csa2_ced"
std::string type_choices();

// All throw std::invalid_argument with a sentence that names the setting, the value and what is possible.
void set_kv_type(const std::string & value, ggml_type & type_k, ggml_type & type_v);
void set_kv_option(const char * key, const std::string & value);
void check_settings(ggml_type type_k, ggml_type type_v);

}  // namespace kvfold
