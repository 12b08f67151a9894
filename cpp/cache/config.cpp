#include "cache/config.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "cache/calibration.h"
#include "format/fp4_block.h"

namespace kvfold {

namespace {

// Look-up defaults (bench/sparse_quality.py).
constexpr float    kLookup    = 0.2f;
constexpr float    kThreshold = 0.1f;
constexpr int32_t  kMinTokens = 256;
constexpr int32_t  kSpanPool  = 16384;
constexpr int32_t  kMaxPool   = 262144;
constexpr float    kKeep      = 0.78f;
constexpr uint32_t kScore     = KVFOLD_SCORE_KEYDIFF | KVFOLD_SCORE_ATTN;  // bench/prune_quality.py

// What `auto` makes of the layers. The first ones of a model are dense: little to read, much to lose. In the rest of the first third attention
// is diffuse, and what is not found there is lost to all that follow: these layers may read more than the budget says where the
// threshold asks for it, and the others a little less for that (docs/look-up.md).
constexpr int32_t kDenseLayers = 2;
constexpr int32_t kEarlyPart   = 3;     // of the layers, one in so many is early
constexpr float   kEarlyShare  = 2.0f;  // times the budget, at most
constexpr float   kLateShare   = 0.9f;

thread_local std::string                t_last_error;
thread_local std::vector<kvfold_config> t_scopes;

std::mutex    g_default_mutex;
kvfold_config g_default = unset_config(KVFOLD_TYPE_NONE);

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

bool parse_number(const char * key, const char * text, size_t length, float & out) {
    const std::string value(text, length);
    char *            end = nullptr;
    out                   = std::strtof(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !std::isfinite(out)) {
        return fail(message("kv_%s must be a number, got '%s'", key, value.c_str()));
    }
    return true;
}

// "0.2" or "0.1,0.2"
bool parse_lookup(const char * value, float & least, float & most) {
    const char * comma = std::strchr(value, ',');
    if (comma == nullptr) {
        if (!parse_number("lookup", value, std::strlen(value), most)) {
            return false;
        }
        least = most;
    } else if (!parse_number("lookup", value, size_t(comma - value), least) ||
               !parse_number("lookup", comma + 1, std::strlen(comma + 1), most)) {
        return false;
    }
    if (!(0.0f <= least && least <= most && 0.0f < most && most <= 1.0f)) {
        return fail(
            message("kv_lookup must be a share above 0 and up to 1, or two of them, 'MIN,MAX', got '%s'", value));
    }
    return true;
}

// --- layer modes -----------------------------------------------------------------------------------------------------

const char * const k_modes[]  = {"dense", "full", "reuse", "reindex", "window"};
constexpr int      kMaxLayers = 4096;

bool bad_layers(const char * text, const char * why) {
    return fail(message("kv_layers '%s': %s; possible: auto, or modes (dense, full, reuse, reindex, window) as in "
                        "'dense*2,full*10,reuse' or '(full:0.3,reuse*3)*8'",
                        text, why));
}

// Reads ":SHARE" if it is there.
bool parse_share(const char *& at, float & share) {
    share = 0.0f;
    if (*at != ':') {
        return true;
    }
    char * end = nullptr;
    share      = std::strtof(at + 1, &end);
    if (end == at + 1 || !(share > 0.0f && share <= 1.0f)) {
        return false;
    }
    at = end;
    return true;
}

// Reads "*N" if it is there.
bool parse_count(const char *& at, long & n) {
    n = 1;
    if (*at == '*') {
        char * end = nullptr;
        n          = std::strtol(at + 1, &end, 10);
        if (end == at + 1 || n < 1 || n > kMaxLayers) {
            return false;
        }
        at = end;
    }
    return true;
}

// Reads a list up to its end or to a closing bracket.
bool parse_rules(const char * text, const char *& at, bool nested, std::vector<LayerRule> & rules) {
    for (;;) {
        std::vector<LayerRule> item;
        if (*at == '(' && !nested) {
            ++at;
            if (!parse_rules(text, at, true, item)) {
                return false;
            }
            if (*at++ != ')') {
                return bad_layers(text, "a bracket is not closed");
            }
        } else {
            for (size_t i = 0; i < sizeof(k_modes) / sizeof(*k_modes); ++i) {
                const size_t length = std::strlen(k_modes[i]);
                if (std::strncmp(at, k_modes[i], length) == 0 && std::strchr(":,*)", at[length]) != nullptr) {
                    item = {{LayerMode(i), 0.0f}};  // the end of the text is found by strchr too
                    at += length;
                    break;
                }
            }
            const bool budget =
                !item.empty() && (item[0].mode == LayerMode::full || item[0].mode == LayerMode::reindex);
            if (budget && !parse_share(at, item[0].share)) {
                return bad_layers(text, "after : a share above 0 and up to 1 is expected");
            }
            if (item.empty()) {
                return bad_layers(text, "not a list of modes");
            }
        }
        long n = 0;
        if (!parse_count(at, n)) {
            return bad_layers(text, "after * a number of layers is expected");
        }
        for (long i = 0; i < n; ++i) {
            rules.insert(rules.end(), item.begin(), item.end());
        }
        if (rules.size() > size_t(kMaxLayers)) {
            return bad_layers(text, "too many layers");
        }
        if (*at != ',') {
            break;
        }
        ++at;
    }
    return *at == '\0' || (nested && *at == ')') || bad_layers(text, "not a list of modes");
}

// A setting of look-ups that was given.
const char * lookup_setting(const kvfold_config & c) {
    return c.lookup_max != 0.0f  ? "kv_lookup"
           : c.threshold >= 0.0f ? "kv_threshold"
           : c.min_tokens >= 0   ? "kv_min_tokens"
           : c.max_tokens != 0   ? "kv_max_tokens"
           : c.min_context >= 0  ? "kv_min_context"
           : c.layers[0] != '\0' ? "kv_layers"
           : c.alignment         ? "kv_alignment"
           : c.hierarchical != 0 ? "kv_hierarchical"
           : c.span_pool != 0    ? "kv_span_pool"
           : c.calibration.model ? "kv_calibration"
                                 : nullptr;
}

// A setting of evictions that was given.
const char * eviction_setting(const kvfold_config & c) {
    return c.keep != 0.0f ? "kv_keep" : c.score != 0 ? "kv_score" : nullptr;
}

const struct {
    const char * name;
    uint32_t     flag;
} k_scores[] = {{"keydiff", KVFOLD_SCORE_KEYDIFF}, {"vnorm", KVFOLD_SCORE_VNORM},   {"attn", KVFOLD_SCORE_ATTN},
                {"recent", KVFOLD_SCORE_RECENT},   {"snapkv", KVFOLD_SCORE_SNAPKV}, {"entropy", KVFOLD_SCORE_ENTROPY}};

// "keydiff" or "keydiff+attn"
bool parse_score(const char * value, uint32_t & score) {
    score = 0;
    for (const char * at = value;;) {
        const size_t length = std::strcspn(at, "+");
        uint32_t     flag   = 0;
        for (const auto & known : k_scores) {
            flag = std::string(at, length) == known.name ? known.flag : flag;
        }
        if (flag == 0 || (score & flag) != 0) {
            return fail(message("kv_score '%s' is unknown; possible: keydiff, vnorm, attn, recent, snapkv, entropy, or "
                                "several of them as in keydiff+attn",
                                value));
        }
        score |= flag;
        if (at[length] == '\0') {
            return true;
        }
        at += length + 1;
    }
}

const char * const k_hierarchical[] = {"off", "auto", "on"};  // kvfold_hierarchical

bool check_max_tokens(int32_t tokens) {
    return (tokens >= 0 && tokens <= 65535) ||
           fail(message("kv_max_tokens must be from 0 (no bound) to 65535 tokens, got %d", tokens));
}

bool check_span_pool(int32_t groups) {
    return (groups >= 1 && groups <= kMaxPool) ||
           fail(message("kv_span_pool must be from 1 to %d groups, got %d", kMaxPool, groups));
}

bool check_scale_group(int32_t channels) {
    return is_scale_group(channels) || fail(message("kv_scale_group must be 16, 32 or 64 channels, got %d", channels));
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

namespace {

bool is_auto(const char * layers) { return layers[0] == '\0' || std::strcmp(layers, "auto") == 0; }

// What kv_min_tokens is where only its default says something: no more than what may be read.
int32_t default_min_tokens(const kvfold_config & config, int32_t tokens) {
    return config.max_tokens > 0 ? std::min(tokens, config.max_tokens) : tokens;
}

// Fills in what a calibration says and nothing explicit does.
void calibrate(kvfold_config & config) {
    const kvfold_calibration & found = config.calibration;
    if (config.min_tokens < 0) {
        config.min_tokens = default_min_tokens(config, found.min_tokens);
    }
    config.group     = config.group == 0 ? found.group : config.group;
    config.threshold = config.threshold < 0.0f ? found.threshold : config.threshold;
    if (is_auto(config.layers)) {
        // An explicit budget goes before those of layers.
        const bool shares = config.lookup_max == 0.0f;
        char *     out    = config.layers;
        for (const char * at = found.layers; *at != '\0';) {
            at += !shares && *at == ':' ? std::strcspn(at, ",*)") : 0;
            *out++ = *at;
            at += *at != '\0';
        }
        *out = '\0';
    }
    if (config.lookup_max == 0.0f) {
        config.lookup_min = found.lookup_min;
        config.lookup_max = found.lookup_max;
    }
}

}  // namespace

kvfold_config resolve(kvfold_config config) {
    if (config.calibration.model != 0 && has_lookup(config.type)) {
        calibrate(config);
    }
    if (config.group == 0) {
        // Larger groups cost fewer summary bytes. fp4 reads every row, so its summaries only serve as the base of the key
        // differences, where 32 tokens are nearly as good as 4; fp4_csa2 also needs them as an index, where they are not.
        config.group = config.type == KVFOLD_TYPE_FP4 ? 32 : 4;
    }
    config.scale_group = config.scale_group == 0 ? kFp4ScaleGroup : config.scale_group;
    if (config.type == KVFOLD_TYPE_FP4_CSA2_CED) {
        config.keep  = config.keep == 0.0f ? kKeep : config.keep;
        config.score = config.score == 0 ? kScore : config.score;
    }
    if (has_lookup(config.type)) {
        if (config.lookup_max == 0.0f) {
            config.lookup_min = kLookup;
            config.lookup_max = kLookup;
        }
        config.threshold = config.threshold < 0.0f ? kThreshold : config.threshold;
        if (config.min_tokens < 0) {
            config.min_tokens = default_min_tokens(config, kMinTokens);
        }
        config.span_pool = config.span_pool == 0 ? kSpanPool : config.span_pool;
    }
    return config;
}

bool has_lookup(kvfold_type type) { return type == KVFOLD_TYPE_FP4_CSA2 || type == KVFOLD_TYPE_FP4_CSA2_CED; }

std::string score_name(uint32_t score) {
    std::string text;
    for (const auto & known : k_scores) {
        if ((score & known.flag) != 0) {
            text += (text.empty() ? "" : "+") + std::string(known.name);
        }
    }
    return text;
}

kvfold_config unset_config(kvfold_type type) {
    kvfold_config c{};
    c.type        = type;
    c.threshold   = -1.0f;
    c.min_tokens  = -1;
    c.min_context = -1;
    return c;
}

bool layer_rules(const kvfold_config & config, const std::vector<int32_t> & layers, int32_t n_layer,
                 std::vector<LayerRule> & rules) {
    const char * text = config.layers;
    rules.clear();
    if (is_auto(text)) {
        // without a threshold every layer reads as much as it may
        const bool  may_stop = config.threshold > 0.0f;
        const float early    = may_stop ? std::min(1.0f, kEarlyShare * config.lookup_max) : config.lookup_max;
        const float late     = may_stop ? kLateShare * config.lookup_max : config.lookup_max;
        for (const int32_t il : layers) {
            rules.push_back(
                {il < kDenseLayers ? LayerMode::dense : LayerMode::full, il < n_layer / kEarlyPart ? early : late});
        }
        return true;
    }
    const char * at = text;
    if (!parse_rules(text, at, false, rules)) {
        return false;
    }
    // What a layer may take over must have been chosen before.
    bool chosen = false, full = false;
    for (const auto [mode, share] : rules) {
        if (mode == LayerMode::reuse && !chosen) {
            return bad_layers(text, "reuse needs a full layer before it");
        }
        if (mode == LayerMode::reindex && !full) {
            return bad_layers(text, "reindex needs a full layer before it");
        }
        full   = full || mode == LayerMode::full;
        chosen = chosen || mode == LayerMode::full || mode == LayerMode::reindex;
    }
    if (layers.empty()) {
        return true;
    }
    if (rules.size() > layers.size()) {
        return fail(message("kv_layers '%s' lists %zu layers; the model has %zu that keep the whole context", text,
                            rules.size(), layers.size()));
    }
    rules.resize(layers.size(), rules.back());
    return true;
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
    case KVFOLD_TYPE_FP4_CSA2_CED:
        return "fp4_csa2_ced";
    case KVFOLD_TYPE_NONE:
        break;
    }
    return "none";
}

const char * kvfold_score_name(uint32_t score) {
    thread_local std::string name;
    name = score_name(score);
    return name.c_str();
}

const char * kvfold_hierarchical_name(enum kvfold_hierarchical hierarchical) {
    return k_hierarchical[int(hierarchical)];
}

const char * kvfold_last_error(void) { return t_last_error.c_str(); }

kvfold_config kvfold_config_default(kvfold_type type) {
    kvfold_config config = unset_config(type);
    config.tail          = 128;
    config.sinks         = 4;
    return resolve(config);
}

bool kvfold_config_set(kvfold_config * config, const char * key, const char * value) {
    if (is_any(key, "type", "kv_type")) {
        const kvfold_config before = *config;
        if (std::strcmp(value, "fp4") == 0) {
            config->type = KVFOLD_TYPE_FP4;
        } else if (std::strcmp(value, "fp4_csa2") == 0) {
            config->type = KVFOLD_TYPE_FP4_CSA2;
        } else if (std::strcmp(value, "fp4_csa2_ced") == 0) {
            config->type = KVFOLD_TYPE_FP4_CSA2_CED;
        } else {
            return fail(message("kv_type '%s' is unknown; possible: fp4, fp4_csa2, fp4_csa2_ced", value));
        }
        if (before.type != config->type) {
            config->group = 0;
        }
        if (has_lookup(before.type) && before.type != config->type) {
            // What the type would refuse may only be its former type's default.
            kvfold_config fresh = unset_config(config->type);
            fresh.calibration   = config->calibration;
            fresh.tail          = config->tail;
            fresh.sinks         = config->sinks;
            fresh.swa_type      = config->swa_type;
            fresh.scale_group   = config->scale_group;
            *config             = fresh;
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
    if (is_any(key, "scale_group", "kv_scale_group")) {
        return parse_int("scale_group", value, config->scale_group) && check_scale_group(config->scale_group);
    }
    if (is_any(key, "lookup", "kv_lookup")) {
        return parse_lookup(value, config->lookup_min, config->lookup_max);
    }
    if (is_any(key, "threshold", "kv_threshold")) {
        if (!parse_number("threshold", value, std::strlen(value), config->threshold)) {
            return false;
        }
        return (config->threshold >= 0.0f && config->threshold <= 1.0f) ||
               fail(message("kv_threshold must be from 0 to 1, got %s", value));
    }
    if (is_any(key, "min_tokens", "kv_min_tokens")) {
        return parse_int("min_tokens", value, config->min_tokens) &&
               ((config->min_tokens >= 0 && config->min_tokens <= 65535) ||
                fail(message("kv_min_tokens must be from 0 to 65535 tokens, got %s", value)));
    }
    if (is_any(key, "max_tokens", "kv_max_tokens")) {
        return parse_int("max_tokens", value, config->max_tokens) && check_max_tokens(config->max_tokens);
    }
    if (is_any(key, "hierarchical", "kv_hierarchical")) {
        for (size_t i = 0; i < sizeof(k_hierarchical) / sizeof(*k_hierarchical); ++i) {
            if (std::strcmp(value, k_hierarchical[i]) == 0) {
                config->hierarchical = kvfold_hierarchical(i);
                return true;
            }
        }
        return fail(message("kv_hierarchical '%s' is unknown; possible: off, auto, on", value));
    }
    if (is_any(key, "span_pool", "kv_span_pool")) {
        return parse_int("span_pool", value, config->span_pool) && check_span_pool(config->span_pool);
    }
    if (is_any(key, "min_context", "kv_min_context")) {
        return parse_int("min_context", value, config->min_context) &&
               (config->min_context >= 0 || fail(message("kv_min_context must be 0 tokens or more, got %s", value)));
    }
    if (is_any(key, "alignment", "kv_alignment")) {
        config->alignment = is_any(value, "true", "True");
        return config->alignment || is_any(value, "false", "False") ||
               fail(message("kv_alignment must be true or false, got '%s'", value));
    }
    if (is_any(key, "layers", "kv_layers")) {
        std::vector<LayerRule> rules;
        if (std::strlen(value) >= sizeof(config->layers)) {
            return fail(message("kv_layers is longer than %zu characters; use mode*N for runs of layers",
                                sizeof(config->layers) - 1));
        }
        kvfold_config with = *config;
        std::strcpy(with.layers, value);
        if (!layer_rules(with, {}, 0, rules)) {
            return false;
        }
        *config = with;
        return true;
    }
    if (is_any(key, "calibration", "kv_calibration")) {
        return read_calibration(value, config->calibration);
    }
    if (is_any(key, "keep", "kv_keep")) {
        return parse_number("keep", value, std::strlen(value), config->keep) &&
               ((config->keep > 0.0f && config->keep <= 1.0f) ||
                fail(message("kv_keep must be a share above 0 and up to 1, got %s", value)));
    }
    if (is_any(key, "score", "kv_score")) {
        return parse_score(value, config->score);
    }
    return fail(
        message("unknown cache setting '%s'; possible: kv_type, kv_group, kv_tail, kv_sinks, kv_swa_type, "
                "kv_scale_group, kv_lookup, kv_threshold, kv_min_tokens, kv_max_tokens, kv_min_context, kv_layers, "
                "kv_alignment, kv_calibration, kv_hierarchical, kv_span_pool, kv_keep, kv_score",
                key));
}

bool kvfold_config_check(const kvfold_config * config) {
    const kvfold_config c = resolve(*config);
    if (c.type != KVFOLD_TYPE_FP4 && !has_lookup(c.type)) {
        return fail(message("kv_type %d is unknown; possible: fp4, fp4_csa2, fp4_csa2_ced", int(c.type)));
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
    if (!check_scale_group(c.scale_group)) {
        return false;
    }
    if (c.type != KVFOLD_TYPE_FP4_CSA2_CED && eviction_setting(c) != nullptr) {
        return fail(message("%s has no effect with kv_type %s; it needs fp4_csa2_ced", eviction_setting(c),
                            kvfold_type_name(c.type)));
    }
    if (c.type == KVFOLD_TYPE_FP4_CSA2_CED && !(c.keep > 0.0f && c.keep <= 1.0f)) {
        return fail(message("kv_keep must be a share above 0 and up to 1, got %g", double(c.keep)));
    }
    if (!has_lookup(c.type)) {
        const char * given = lookup_setting(c);
        return given == nullptr || fail(message("%s has no effect with kv_type %s; it needs fp4_csa2 or fp4_csa2_ced",
                                                given, kvfold_type_name(c.type)));
    }
    if (!(0.0f <= c.lookup_min && c.lookup_min <= c.lookup_max && c.lookup_max <= 1.0f)) {
        return fail(message("kv_lookup must be a share above 0 and up to 1, or two of them, got %g,%g",
                            double(c.lookup_min), double(c.lookup_max)));
    }
    if (!(c.threshold <= 1.0f)) {
        return fail(message("kv_threshold must be from 0 to 1, got %g", double(c.threshold)));
    }
    if (c.min_tokens > 65535) {
        return fail(message("kv_min_tokens must be from 0 to 65535 tokens, got %d", c.min_tokens));
    }
    if (!check_max_tokens(c.max_tokens) || !check_span_pool(c.span_pool)) {
        return false;
    }
    if (c.max_tokens > 0 && c.max_tokens < std::max(c.group, c.min_tokens)) {
        return fail(message("kv_max_tokens %d is less than %s %d", c.max_tokens,
                            c.max_tokens < c.group ? "kv_group" : "kv_min_tokens",
                            c.max_tokens < c.group ? c.group : c.min_tokens));
    }
    if (int(c.hierarchical) < 0 || int(c.hierarchical) > int(KVFOLD_HIERARCHICAL_ON)) {
        return fail(message("kv_hierarchical %d is unknown; possible: off, auto, on", int(c.hierarchical)));
    }
    if (c.hierarchical == KVFOLD_HIERARCHICAL_ON && c.lookup_max >= 1.0f) {
        return fail("kv_hierarchical on has no effect with a kv_lookup of 1: everything is read; possible: auto, off");
    }
    std::vector<LayerRule> rules;
    return layer_rules(c, {}, 0, rules);
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
    g_default = config != nullptr ? resolve(*config) : unset_config(KVFOLD_TYPE_NONE);
    return true;
}

kvfold_config kvfold_active_config(void) {
    if (!t_scopes.empty()) {
        return t_scopes.back();
    }
    std::lock_guard<std::mutex> lock(g_default_mutex);
    return g_default;
}
