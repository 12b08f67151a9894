#include "cli/args.h"

#include <stdexcept>
#include <string>

#include "cli/settings.h"
#include "kvfold/kvfold.h"
#include "log.h"

namespace {

using Handler = void (*)(common_params &, const std::string &);

common_arg option(const char * name, const char * hint, const std::string & help, const char * env, Handler handler) {
    common_arg arg({name}, hint, help, handler);
    arg.set_env(env);
    return arg;
}

}  // namespace

void kvfold_add_args(std::vector<common_arg> & options) {
    for (const auto & arg : options) {
        if (arg.args.empty() || std::string(arg.args[0]) != "-ctk") {
            continue;
        }
        // Programs that know the cache types get ours too.
        options.push_back(
            option("--kv-type", "TYPE",
                   "KV cache type of K and V together: " + kvfold::type_choices() +
                       " (default: f16)\nfp4: FP4 rows, dense; fp4_csa2: the same with a summary every 4 tokens; "
                       "fp4_csa2_ced: the same in less memory, tokens are dropped",
                   "LLAMA_ARG_KV_TYPE", [](common_params & params, const std::string & value) {
                       kvfold::set_kv_type(value, params.cache_type_k, params.cache_type_v);
                       kvfold_set_announcer([](const char * line) { LOG_INF("%s\n", line); });
                   }));
        options.push_back(
            option("--kv-group", "N",
                   "tokens that share a summary key: 2, 4, 8, 16, fp4 also 32 (default: fp4 32, fp4_csa2 4)",
                   "LLAMA_ARG_KV_GROUP",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_group", value); }));
        options.push_back(option(
            "--kv-tail", "N", "most recent tokens of a sequence that stay exact (default: 128)", "LLAMA_ARG_KV_TAIL",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_tail", value); }));
        options.push_back(
            option("--kv-sinks", "N", "first tokens of a sequence that stay exact (default: 4)", "LLAMA_ARG_KV_SINKS",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_sinks", value); }));
        options.push_back(option(
            "--kv-swa-type", "TYPE", "type of sliding-window layers under --kv-type fp4...: f16, q8_0 (default: f16)",
            "LLAMA_ARG_KV_SWA_TYPE",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_swa_type", value); }));
        options.push_back(
            option("--kv-scale-group", "N", "channels of a folded row that share a scale: 16, 32, 64 (default: 16)",
                   "LLAMA_ARG_KV_SCALE_GROUP",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_scale_group", value); }));
        options.push_back(option(
            "--kv-lookup", "SHARE", "fp4_csa2: share of the groups that decoding reads, or MIN,MAX (default: 0.2)",
            "LLAMA_ARG_KV_LOOKUP",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_lookup", value); }));
        options.push_back(
            option("--kv-threshold", "X",
                   "fp4_csa2: share of the attention that may stay unread between MIN and MAX (default: 0.1)",
                   "LLAMA_ARG_KV_THRESHOLD",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_threshold", value); }));
        options.push_back(
            option("--kv-min-tokens", "N", "fp4_csa2: folded tokens that are read at least (default: 256)",
                   "LLAMA_ARG_KV_MIN_TOKENS",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_min_tokens", value); }));
        options.push_back(
            option("--kv-max-tokens", "N",
                   "fp4_csa2: folded tokens that a query reads at most, for each KV head (default: 0, no bound)",
                   "LLAMA_ARG_KV_MAX_TOKENS",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_max_tokens", value); }));
        options.push_back(
            option("--kv-min-context", "N", "fp4_csa2: shorter sequences are read whole (default: 4096, on a GPU all)",
                   "LLAMA_ARG_KV_MIN_CONTEXT",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_min_context", value); }));
        options.push_back(option(
            "--kv-layers", "MODES",
            "fp4_csa2: auto, or what each layer does: dense, full, reuse, reindex, window, as in dense*2,full,reuse*3; "
            "full:0.3 has a share of its own",
            "LLAMA_ARG_KV_LAYERS",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_layers", value); }));
        options.push_back(
            option("--kv-calibration", "FILE",
                   "fp4_csa2: what `kvfold calibrate` found for this model, as defaults of the options above",
                   "LLAMA_ARG_KV_CALIBRATION",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_calibration", value); }));
        options.push_back(option(
            "--kv-hierarchical", "WHEN",
            "fp4_csa2: look at summaries of 128 tokens before those of groups: off, auto (beyond 65536 tokens), on "
            "(default: off)",
            "LLAMA_ARG_KV_HIERARCHICAL",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_hierarchical", value); }));
        options.push_back(option(
            "--kv-span-pool", "N",
            "fp4_csa2: groups that are left to choose from then; it is done where there are more (default: 16384)",
            "LLAMA_ARG_KV_SPAN_POOL",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_span_pool", value); }));
        options.push_back(option(
            "--kv-keep", "SHARE", "fp4_csa2_ced: share of the context that the cache has room for (default: 0.78)",
            "LLAMA_ARG_KV_KEEP",
            [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_keep", value); }));
        options.push_back(
            option("--kv-score", "NAME",
                   "fp4_csa2_ced: which tokens go first: keydiff, vnorm, attn, recent, snapkv, entropy, or several "
                   "(default: keydiff+attn)",
                   "LLAMA_ARG_KV_SCORE",
                   [](common_params &, const std::string & value) { kvfold::set_kv_option("kv_score", value); }));
        return;
    }
}

void kvfold_check_args(const common_params & params) {
    kvfold::check_settings(params.cache_type_k, params.cache_type_v);
}
