#include "cli/bench_args.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "cli/settings.h"
#include "kvfold/kvfold.h"

bool kvfold_bench_arg(int argc, char ** argv, int & i, std::vector<ggml_type> & types_k,
                      std::vector<ggml_type> & types_v, bool & invalid) {
    const struct {
        const char * flag;
        const char * key;
    } options[] = {
        {"--kv-type", "kv_type"},
        {"--kv-group", "kv_group"},
        {"--kv-tail", "kv_tail"},
        {"--kv-sinks", "kv_sinks"},
        {"--kv-swa-type", "kv_swa_type"},
        {"--kv-scale-group", "kv_scale_group"},
        {"--kv-lookup", "kv_lookup"},
        {"--kv-threshold", "kv_threshold"},
        {"--kv-min-tokens", "kv_min_tokens"},
        {"--kv-max-tokens", "kv_max_tokens"},
        {"--kv-min-context", "kv_min_context"},
        {"--kv-layers", "kv_layers"},
        {"--kv-hierarchical", "kv_hierarchical"},
        {"--kv-span-pool", "kv_span_pool"},
        {"--kv-calibration", "kv_calibration"},
        {"--kv-keep", "kv_keep"},
        {"--kv-score", "kv_score"},
    };
    for (const auto & option : options) {
        // llama-bench turns underscores into dashes before it gets here for its own options only.
        if (std::strcmp(argv[i], option.flag) != 0) {
            continue;
        }
        if (i + 1 >= argc) {
            std::fprintf(stderr, "error: %s needs a value\n", option.flag);
            invalid = true;
            return true;
        }
        const char * value = argv[++i];
        try {
            if (std::strcmp(option.key, "kv_type") == 0) {
                if (types_k.size() + types_v.size() > 0) {
                    throw std::invalid_argument("--kv-type is given once and not together with -ctk or -ctv");
                }
                ggml_type k = GGML_TYPE_F16;
                ggml_type v = GGML_TYPE_F16;
                kvfold::set_kv_type(value, k, v);
                types_k = {k};
                types_v = {v};
            } else {
                kvfold::set_kv_option(option.key, value);
            }
        } catch (const std::exception & e) {
            std::fprintf(stderr, "error: %s\n", e.what());
            invalid = true;
        }
        return true;
    }
    return false;
}
