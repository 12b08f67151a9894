#include "cache/config.h"

#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

namespace kvfold {

namespace {

thread_local std::string                t_last_error;
thread_local std::vector<kvfold_config> t_scopes;

std::mutex    g_default_mutex;
kvfold_config g_default = {KVFOLD_TYPE_NONE, 0, 0, 0, KVFOLD_SWA_F16};

const int k_groups[] = {2, 4, 8, 16, 32};

int max_group(kvfold_type type) { return type == KVFOLD_TYPE_FP4 ? 32 : 16; }

std::string group_choices(kvfold_type type) {
    std::string text;
    for (int g : k_groups) {
        if (g <= max_group(type)) {
            text += (text.empty() ? "" : ", ") + std::to_string(g);
        }
    }
    return text;
}

bool parse_int(const char * key, const char * value, int32_t & out) {
    errno      = 0;
    char * end = nullptr;
    long   n   = std::strtol(value, &end, 10);
    if (end == value || *end != '\0' || errno == ERANGE || n < INT_MIN || n > INT_MAX) {
        return fail(message("kv_%s must be a whole number, got '%s'", key, value));
    }
    out = int32_t(n);
    return true;
}

bool is_any(const char * key, const char * a, const char * b) {
    return std::strcmp(key, a) == 0 || std::strcmp(key, b) == 0;
}

}  // namespace

std::string message(const char * fmt, ...) {
    va_list args;
    va_start(args, fmt);
    char buffer[1024];
    std::vsnprintf(buffer, sizeof(buffer), fmt, args);
    va_end(args);
    return buffer;
}

bool fail(const std::string & reason) {
    t_last_error = reason;
    return false;
}

kvfold_config resolve(kvfold_config config) {
    if (config.group == 0) {
        // Larger groups cost fewer summary bytes. fp4 reads every row, so its summaries only serve as the base of the key
        // differences, where 32 tokens are nearly as good as 4; fp4_csa2 also needs them as an index, where they are not.
        config.group = config.type == KVFOLD_TYPE_FP4 ? 32 : 4;
    }
    return config;
}

}  // namespace kvfold

using namespace kvfold;

const char * kvfold_version(void) { return KVFOLD_VERSION; }

const char * kvfold_type_name(kvfold_type type) {
    switch (type) {
    case KVFOLD_TYPE_FP4:
        return "fp4";
    case KVFOLD_TYPE_FP4_CSA2:
        return "fp4_csa2";
    case KVFOLD_TYPE_NONE:
        break;
    }
    return "none";
}

const char * kvfold_last_error(void) { return t_last_error.c_str(); }

kvfold_config kvfold_config_default(kvfold_type type) {
    kvfold_config config = {type, 0, 128, 4, KVFOLD_SWA_F16};
    return resolve(config);
}

bool kvfold_config_set(kvfold_config * config, const char * key, const char * value) {
    if (is_any(key, "type", "kv_type")) {
        const kvfold_config before = *config;
        if (std::strcmp(value, "fp4") == 0) {
            config->type = KVFOLD_TYPE_FP4;
        } else if (std::strcmp(value, "fp4_csa2") == 0) {
            config->type = KVFOLD_TYPE_FP4_CSA2;
        } else {
            return fail(message("kv_type '%s' is unknown; possible: fp4, fp4_csa2", value));
        }
        if (before.type != config->type) {
            config->group = 0;
        }
        return true;
    }
    if (is_any(key, "group", "kv_group")) {
        return parse_int("group", value, config->group);
    }
    if (is_any(key, "tail", "kv_tail")) {
        return parse_int("tail", value, config->tail);
    }
    if (is_any(key, "sinks", "kv_sinks")) {
        return parse_int("sinks", value, config->sinks);
    }
    if (is_any(key, "swa_type", "kv_swa_type")) {
        if (std::strcmp(value, "f16") == 0) {
            config->swa_type = KVFOLD_SWA_F16;
        } else if (std::strcmp(value, "q8_0") == 0) {
            config->swa_type = KVFOLD_SWA_Q8_0;
        } else {
            return fail(message("kv_swa_type '%s' is unknown; possible: f16, q8_0", value));
        }
        return true;
    }
    return fail(
        message("unknown cache setting '%s'; possible: kv_type, kv_group, kv_tail, kv_sinks, kv_swa_type", key));
}

bool kvfold_config_check(const kvfold_config * config) {
    const kvfold_config c = resolve(*config);
    if (c.type != KVFOLD_TYPE_FP4 && c.type != KVFOLD_TYPE_FP4_CSA2) {
        return fail(message("kv_type %d is unknown; possible: fp4, fp4_csa2", int(c.type)));
    }
    bool known = false;
    for (int g : k_groups) {
        known = known || (g == c.group && g <= max_group(c.type));
    }
    if (!known) {
        return fail(message("kv_group %d does not fit kv_type %s; possible: %s", c.group, kvfold_type_name(c.type),
                            group_choices(c.type).c_str()));
    }
    if (c.tail < 1 || c.tail > 65536) {
        return fail(message("kv_tail must be from 1 to 65536 tokens, got %d", c.tail));
    }
    if (c.sinks < 0 || c.sinks > 1024) {
        return fail(message("kv_sinks must be from 0 to 1024 tokens, got %d", c.sinks));
    }
    if (c.swa_type != KVFOLD_SWA_F16 && c.swa_type != KVFOLD_SWA_Q8_0) {
        return fail(message("kv_swa_type %d is unknown; possible: f16, q8_0", int(c.swa_type)));
    }
    return true;
}

bool kvfold_scope_push(const kvfold_config * config) {
    if (!kvfold_config_check(config)) {
        return false;
    }
    t_scopes.push_back(resolve(*config));
    return true;
}

void kvfold_scope_pop(void) {
    if (!t_scopes.empty()) {
        t_scopes.pop_back();
    }
}

bool kvfold_set_default(const kvfold_config * config) {
    if (config != nullptr && config->type != KVFOLD_TYPE_NONE && !kvfold_config_check(config)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(g_default_mutex);
    g_default = config != nullptr ? resolve(*config) : kvfold_config{KVFOLD_TYPE_NONE, 0, 0, 0, KVFOLD_SWA_F16};
    return true;
}

kvfold_config kvfold_active_config(void) {
    if (!t_scopes.empty()) {
        return t_scopes.back();
    }
    std::lock_guard<std::mutex> lock(g_default_mutex);
    return g_default;
}
