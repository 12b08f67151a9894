#include "cli/settings.h"

#include <stdexcept>

#include "kvfold/kvfold.h"

namespace kvfold {

namespace {

// Types of llama.cpp itself, which go through unchanged.
const ggml_type k_upstream[] = {GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_F32,  GGML_TYPE_Q8_0,  GGML_TYPE_Q5_1,
                                GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};

struct Settings {
    std::string   type;          // as given; empty: no --kv-type
    std::string   first_option;  // an option that needs --kv-type
    kvfold_config config      = kvfold_config_default(KVFOLD_TYPE_NONE);
    bool          group_given = false;
};

Settings & settings() {
    static Settings s;
    return s;
}

[[noreturn]] void refuse(const std::string & reason) { throw std::invalid_argument(reason); }

// Makes the collected settings the process default; complete ones are checked as a whole in check_settings().
void apply() {
    const Settings & s = settings();
    if (s.config.type != KVFOLD_TYPE_NONE && !kvfold_set_default(&s.config)) {
        refuse(kvfold_last_error());
    }
}

}  // namespace

std::string type_choices() {
    std::string text;
    for (ggml_type t : k_upstream) {
        text += std::string(ggml_type_name(t)) + ", ";
    }
    return text + "fp4, fp4_csa2, fp4_csa2_ced";
}

void set_kv_type(const std::string & value, ggml_type & type_k, ggml_type & type_v) {
    Settings & s = settings();
    if (type_k != GGML_TYPE_F16 || type_v != GGML_TYPE_F16) {
        if (s.type.empty()) {
            refuse("--kv-type " + value +
                   " sets both cache types; it cannot be combined with --cache-type-k or --cache-type-v");
        }
    }
    for (ggml_type t : k_upstream) {
        if (value == ggml_type_name(t)) {
            s.type        = value;
            s.config.type = KVFOLD_TYPE_NONE;
            type_k = type_v = t;
            kvfold_set_default(nullptr);
            return;
        }
    }
    const int32_t group = s.config.group;
    if (!kvfold_config_set(&s.config, "kv_type", value.c_str())) {
        refuse("kv_type '" + value + "' is unknown; possible: " + type_choices());
    }
    s.config.group = s.group_given ? group : 0;
    s.type         = value;
    type_k = type_v = GGML_TYPE_NVFP4;
    apply();
}

void set_kv_option(const char * key, const std::string & value) {
    Settings & s = settings();
    if (!kvfold_config_set(&s.config, key, value.c_str())) {
        refuse(kvfold_last_error());
    }
    s.group_given  = s.group_given || std::string(key) == "kv_group";
    s.first_option = s.first_option.empty() ? key : s.first_option;
    apply();
}

void check_settings(ggml_type type_k, ggml_type type_v) {
    const Settings & s = settings();
    if (s.config.type == KVFOLD_TYPE_NONE) {
        if (!s.first_option.empty()) {
            refuse(s.first_option + " needs --kv-type fp4, fp4_csa2 or fp4_csa2_ced" +
                   (s.type.empty() ? "" : ", got --kv-type " + s.type));
        }
        if (!s.type.empty() && (s.type != ggml_type_name(type_k) || s.type != ggml_type_name(type_v))) {
            refuse("--kv-type " + s.type +
                   " sets both cache types; it cannot be combined with --cache-type-k or --cache-type-v");
        }
        return;
    }
    if (type_k != GGML_TYPE_NVFP4 || type_v != GGML_TYPE_NVFP4) {
        refuse("--kv-type " + s.type +
               " sets both cache types; it cannot be combined with --cache-type-k or --cache-type-v");
    }
    apply();
}

}  // namespace kvfold
