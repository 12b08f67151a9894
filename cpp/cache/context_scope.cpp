// Which contexts use kvfold, and the refusals that come before any memory is taken.
#include "cache/context_scope.h"

#include "cache/calibration.h"
#include "cache/config.h"
#include "cache/eviction.h"
#include "cache/graph_nodes.h"
#include "cache/hooks.h"
#include "ggml-cpp.h"
#include "llama-arch.h"
#include "llama-impl.h"
#include "llama-model.h"

namespace kvfold {

namespace {

thread_local const kvfold_config * t_building = nullptr;
thread_local kvfold_config         t_building_config;
thread_local uint32_t              t_building_n_seq_max = 1;

// Architectures that keep a compressed or indexed cache of their own.
bool has_own_cache(llm_arch arch) {
    switch (arch) {
    case LLM_ARCH_MINIMAX_M3:
    case LLM_ARCH_GLM_DSA:
    case LLM_ARCH_DEEPSEEK32:
    case LLM_ARCH_DEEPSEEK4:
    case LLM_ARCH_GLM5_NEXT:
    case LLM_ARCH_HY_V4:
    case LLM_ARCH_DOTS3NOTE:
    case LLM_ARCH_DFLASH:
    case LLM_ARCH_QWEN4EXP:
        return true;
    default:
        return false;
    }
}

bool has_no_cache(llm_arch arch) {
    switch (arch) {
    case LLM_ARCH_BERT:
    case LLM_ARCH_JINA_BERT_V2:
    case LLM_ARCH_JINA_BERT_V3:
    case LLM_ARCH_NOMIC_BERT:
    case LLM_ARCH_NOMIC_BERT_MOE:
    case LLM_ARCH_NEO_BERT:
    case LLM_ARCH_EUROBERT:
    case LLM_ARCH_WAVTOKENIZER_DEC:
    case LLM_ARCH_MODERN_BERT:
    case LLM_ARCH_GEMMA_EMBEDDING:
    case LLM_ARCH_DREAM:
    case LLM_ARCH_LLADA:
    case LLM_ARCH_LLADA_MOE:
    case LLM_ARCH_RND1:
        return true;
    default:
        return llm_arch_is_recurrent(arch);
    }
}

}  // namespace

bool check_model(const kvfold_config & config, const llama_model & model) {
    const char *          type    = kvfold_type_name(config.type);
    const llama_hparams & hparams = model.hparams;
    const char *          arch    = llm_arch_name(model.arch);

    if (has_no_cache(model.arch)) {
        return fail(message("kv_type %s: architecture '%s' has no key/value cache", type, arch));
    }
    if (hparams.is_mla() || has_own_cache(model.arch)) {
        return fail(message("kv_type %s: architecture '%s' has a compressed cache of its own (%s); use no kv type",
                            type, arch, hparams.is_mla() ? "MLA" : "indexed or compressed keys"));
    }
    if (hparams.use_alibi) {
        return fail(message(
            "kv_type %s: architecture '%s' uses ALiBi position biases, which FP4 attention does not have", type, arch));
    }
    if (model.arch == LLM_ARCH_T5 || model.arch == LLM_ARCH_GROK) {
        return fail(message("kv_type %s: attention of architecture '%s' cannot run as flash attention", type, arch));
    }
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        // Sliding-window layers keep rows of an upstream type, recurrent layers have none.
        if (!hparams.has_kv(il) || hparams.is_swa(il) || hparams.is_recr(il) || hparams.n_head_kv(il) == 0) {
            continue;
        }
        const uint32_t k = hparams.n_embd_head_k(il);
        const uint32_t v = hparams.n_embd_head_v(il);
        if (k != v) {
            return fail(
                message("kv_type %s: keys of %u and values of %u channels a head differ (layer %u); they must be equal",
                        type, k, v, il));
        }
        if (k != 64 && k != 128 && k != 256) {
            return fail(
                message("kv_type %s: head size %u (layer %u) does not fit; possible: 64, 128, 256", type, k, il));
        }
    }
    return check_calibration(config.calibration, model);
}

const kvfold_config * building_config() { return t_building; }

uint32_t building_n_seq_max() { return t_building_n_seq_max; }

}  // namespace kvfold

using namespace kvfold;

bool kvfold_model_check(const kvfold_config * config, const llama_model * model) {
    return check_model(*config, *model);
}

kvfold_context_scope::kvfold_context_scope(const llama_model & model, llama_context_params & params) {
    const kvfold_config config = kvfold_active_config();
    // Drafts, multi-token heads and contexts with other row types are not meant.
    if (config.type == KVFOLD_TYPE_NONE || params.type_k != GGML_TYPE_NVFP4 || params.type_v != GGML_TYPE_NVFP4 ||
        params.ctx_type != LLAMA_CONTEXT_TYPE_DEFAULT || params.ctx_other != nullptr) {
        return;
    }

    ok_ = check_model(config, model);
    if (ok_ && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
        ok_ = fail(message("kv_type %s needs flash attention, but flash_attn is off; possible: on, auto",
                           kvfold_type_name(config.type)));
    }
    if (ok_ && model.split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        ok_ = fail(message("kv_type %s: split mode 'tensor' is not possible; use 'layer' or 'none'",
                           kvfold_type_name(config.type)));
    }
    if (!ok_) {
        LLAMA_LOG_ERROR("kvfold: %s\n", kvfold_last_error());
        return;
    }

    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    // One stream: groups keep sequences apart, which a unified cache of single cells would not.
    params.kv_unified = true;
    if (evicts(config)) {
        // Room is made for one micro-batch at a time.
        const uint32_t n_ctx   = params.n_ctx != 0 ? params.n_ctx : model.hparams.n_ctx_train;
        const uint32_t largest = largest_ubatch(config, GGML_PAD(n_ctx, 256), std::max(1u, params.n_seq_max));
        params.n_ubatch        = std::min(params.n_ubatch != 0 ? params.n_ubatch : params.n_batch, largest);
    }

    t_building_config    = config;
    t_building_n_seq_max = std::max(1u, params.n_seq_max);
    t_building           = &t_building_config;
    active_              = true;
}

kvfold_context_scope::~kvfold_context_scope() {
    if (active_) {
        t_building = nullptr;
    }
}
