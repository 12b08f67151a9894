// What the patched llama.cpp sources call. Every function does nothing, or says so by its result, for a cache or context that
// is not kvfold's: with no kv type set the runtime behaves as it always did.
#pragma once

#include <cstdint>
#include <memory>

#include "llama-kv-cache.h"

struct llama_context;
struct llama_context_params;
struct llama_model;
struct llm_graph_context;
class llama_io_read_i;
class llama_io_write_i;

// Lives in llama_init_from_model(): takes the active configuration if the context asks for it, checks model and parameters,
// and is what the caches constructed inside see. `ok()` is false after a refusal (logged, and in kvfold_last_error()).
class kvfold_context_scope {
  public:
    kvfold_context_scope(const llama_model & model, llama_context_params & params);
    ~kvfold_context_scope();
    kvfold_context_scope(const kvfold_context_scope &)             = delete;
    kvfold_context_scope & operator=(const kvfold_context_scope &) = delete;

    bool ok() const { return ok_; }

  private:
    bool ok_     = true;
    bool active_ = false;
};

// Friend of llama_kv_cache: the hooks inside it.
namespace kvfold {

// Prints a line where the start-up line of contexts goes.
void say(const std::string & line);

}  // namespace kvfold

struct kvfold_access {
    // First statement of the constructor: may change the row types (sliding windows), where rows live, and the number of cells.
    static void ctor_begin(llama_kv_cache & kv, ggml_type & type_k, ggml_type & type_v, bool & offload,
                           uint32_t & kv_size);
    // After a layer got its root tensors and before they get memory: ggml has no type for rows of some scale groups.
    static void layer_added(llama_kv_cache & kv);
    // Once the root tensors exist.
    static void attach(llama_kv_cache & kv);

    // After a micro-batch got its cells for good.
    static void applied(llama_kv_cache & kv, const llama_kv_cache::slot_info & sinfo, const llama_ubatch & ubatch,
                        uint32_t n_kv);

    static llama_kv_cache::slot_info find_slot(const llama_kv_cache & kv, const llama_ubatch & ubatch);

    // Cells of micro-batches that find no place as the cache is, should evictions make room for them: they are chosen later, by
    // `place`. Empty when they cannot.
    static llama_kv_cache::slot_info_vec_t prepare(llama_kv_cache & kv, const std::vector<llama_ubatch> & ubatches);
    // Chooses those of a micro-batch whose turn it is; evicts. False (see kvfold_last_error()) when there is no room after all.
    static bool place(llama_kv_cache & kv, llama_kv_cache::slot_info & slots, const llama_ubatch & ubatch);

    // The cache write of a layer: remembers the rows for the attention node, returns them.
    static ggml_tensor * cpy_k(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * k_cur, int32_t il);
    static ggml_tensor * cpy_v(const llama_kv_cache & kv, ggml_context * ctx, ggml_tensor * v_cur, int32_t il);

    // Our nodes of the graph that is being built rotate keys, queries and values; llama.cpp need not.
    static bool rotates(const llama_kv_cache & kv);

    static void refuse_shift(const char * what);

    static void state_write(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq_id);
    static void state_read(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq_id);

    // The context's cache with FP4 rows, or null.
    static llama_kv_cache * folding_cache(const llama_context & ctx);

    static kvfold_cache &   extension(llama_kv_cache & kv) { return *kv.kvfold; }
    static llama_kv_cells & cells(llama_kv_cache & kv) { return kv.v_cells[0]; }

    // kvfold_kept(), kvfold_evicted(), kvfold_prefix_usable(), kvfold_pin()
    static int32_t kept(const llama_context & ctx, llama_seq_id seq);
    static int32_t evicted(const llama_context & ctx, llama_seq_id seq, llama_pos end);
    static bool    is_usable(const llama_context & ctx, llama_seq_id seq, llama_pos end);
    static bool    pin(llama_context & ctx, llama_seq_id seq, llama_pos begin, llama_pos end);

    static bool   stats(const llama_context & ctx, struct kvfold_stats & out);
    static size_t alignment(const llama_context & ctx, struct kvfold_alignment * out, size_t room);
    // Prints the start-up line; the context's cache knows from now on whose it is.
    static void announce(const llama_context & ctx);
};

// Attention over a kvfold cache; null when `k` is a view of somebody else's cache.
ggml_tensor * kvfold_build_attn(const llm_graph_context & g, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_b,
                                ggml_tensor * kq_mask, ggml_tensor * sinks, ggml_tensor * v_mla, float kq_scale,
                                int il);
