/* kvfold: FP4 KV caches for llama.cpp. The public C API.
 *
 * A context is a kvfold context when a configuration is active while llama_init_from_model() runs and both cache types are
 * GGML_TYPE_NVFP4. The configuration comes from the calling thread's scope (kvfold_scope_push/pop) or, without one, from the
 * process default (kvfold_set_default); llama.cpp's own structs do not change.
 *
 * Functions return false, or NULL, on failure and leave one sentence in kvfold_last_error(). Nothing here aborts.
 */
#ifndef KVFOLD_H
#define KVFOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32) && !defined(__MINGW32__)
#define KVFOLD_API __declspec(dllexport)
#else
#define KVFOLD_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_context;
struct llama_model;

#define KVFOLD_VERSION "0.1.0"

enum kvfold_type {
    KVFOLD_TYPE_NONE         = 0, /* not a kvfold cache */
    KVFOLD_TYPE_FP4          = 1,
    KVFOLD_TYPE_FP4_CSA2     = 2,
    KVFOLD_TYPE_FP4_CSA2_CED = 3, /* fp4_csa2 in less memory than its context needs: tokens are evicted */
};

/* Type of the key/value rows of sliding-window layers, which kvfold never takes below 8 bits. */
enum kvfold_swa_type {
    KVFOLD_SWA_F16  = 0,
    KVFOLD_SWA_Q8_0 = 1,
};

/* By what tokens are evicted; of several, by the sum of the ranks. */
enum kvfold_score {
    KVFOLD_SCORE_KEYDIFF = 1,  /* keys like the others go first */
    KVFOLD_SCORE_VNORM   = 2,  /* small values go first */
    KVFOLD_SCORE_ATTN    = 4,  /* tokens go first that queries as of late would hardly attend to */
    KVFOLD_SCORE_RECENT  = 8,  /* the oldest go first */
    KVFOLD_SCORE_SNAPKV  = 16, /* tokens go first that the last queries hardly attend to */
    KVFOLD_SCORE_ENTROPY = 32, /* the same for windows of queries, heads that are sure counting more */
    KVFOLD_SCORE_RECONSTRUCT =
        64, /* of kvfold_compact only: tokens go first that the text does not need to be said again */
};

/* Whether look-ups of full layers first look at summaries of 128 tokens, and then only at the groups of the best. */
enum kvfold_hierarchical {
    KVFOLD_HIERARCHICAL_OFF  = 0,
    KVFOLD_HIERARCHICAL_AUTO = 1, /* beyond 65536 tokens, where groups are more than span_pool */
    KVFOLD_HIERARCHICAL_ON   = 2, /* wherever groups are more than span_pool */
};

#define KVFOLD_LAYERS_SIZE 1024

/* What `kvfold calibrate` has found for a model: defaults of look-ups, which explicit settings go before. */
struct kvfold_calibration {
    uint64_t model; /* kvfold_model_fingerprint() of the model, which no other may use; 0: there is no calibration */
    int32_t  group;
    float    lookup_min;
    float    lookup_max;
    float    threshold;
    int32_t  min_tokens;
    char     layers[KVFOLD_LAYERS_SIZE];
};

struct kvfold_config {
    enum kvfold_type     type;
    int32_t              group; /* tokens that share a summary key; 0: the type's default (fp4 32, fp4_csa2 4) */
    int32_t              tail;  /* most recent tokens of a sequence that stay exact, >= 1 */
    int32_t              sinks; /* first tokens of a sequence that stay exact, >= 0 */
    enum kvfold_swa_type swa_type;
    int32_t              scale_group; /* channels of a folded row that share a scale: 16, 32, 64; 0: 16 */

    /* Look-up (fp4_csa2): in long contexts, decoding reads those groups of the far tier that matter, not all. */
    float   lookup_min;  /* share of the groups that is read at least, 0 .. 1; lookup_max 0: both at their defaults */
    float   lookup_max;  /* and at most; 1: all are read always */
    float   threshold;   /* share of the estimated attention that may stay unread between them; < 0: default */
    int32_t min_tokens;  /* far tokens that are read at least, 0 .. 65535; < 0: default */
    int32_t max_tokens;  /* and at most, by a query and KV head, up to 65535; 0: no bound */
    int32_t min_context; /* shorter sequences are read whole; < 0: 4096, with layers on a GPU all are */
    char    layers[KVFOLD_LAYERS_SIZE]; /* what each layer does, see kvfold_config_set; empty: auto */
    bool    alignment; /* compare every look-up with attention over everything, see kvfold_get_alignment; slow */
    enum kvfold_hierarchical  hierarchical;
    int32_t                   span_pool;   /* groups that are left to choose from, 1 .. 262144; 0: 16384 */
    struct kvfold_calibration calibration; /* takes the place of the defaults of group, look-up and layers */

    /* Eviction (fp4_csa2_ced): the cache has room for a part of n_ctx; when it is full, whole groups of tokens that matter
     * least are dropped. A sequence never keeps less than `keep` of its tokens. */
    float    keep;  /* share of n_ctx, above 0 and up to 1; 0: 0.78 */
    uint32_t score; /* kvfold_score, added up; 0: default */
};

/* What a context's cache holds. Bytes are allocated bytes, everything included. */
struct kvfold_stats {
    struct kvfold_config config;
    uint64_t             bytes; /* allocated: far + side + near + swa, and padding between them */
    uint64_t f16_bytes;  /* what an f16 cache of the same context takes: K and V rows of n_ctx tokens (+ windows) */
    uint64_t far_bytes;  /* FP4 rows */
    uint64_t side_bytes; /* summaries, spreads, plan numbers */
    uint64_t near_bytes; /* exact rows */
    uint64_t swa_bytes;  /* sliding-window layers */
    uint32_t n_cells;    /* physical cells: tokens that fit, plus room for partial groups */
    uint32_t tokens;     /* cells in use */
    uint32_t near_tokens;
    uint64_t folded_tokens; /* tokens folded since the context was made (counted again when folded again) */
    uint64_t folds;         /* groups folded */
    uint64_t
        lookup_visible;    /* groups that look-ups saw, summed over tokens, layers and KV heads, since the last clear */
    uint64_t lookup_read;  /* groups of those that were read */
    uint64_t lookup_steps; /* micro-batches that looked up */
    uint64_t dense_fallbacks; /* micro-batches that were to look up and could not */
    char     backend[64];     /* where attention runs, e.g. "CPU" or "CUDA0" */
    uint64_t evicted_tokens;  /* tokens dropped since the context was made */
    uint64_t evictions;       /* times that groups were scored and dropped */
};

/* How much of the attention look-ups find, of one query head of a layer, over all tokens that looked up since the last clear.
 * Exact attention is the softmax over everything that a token sees; what it reads has a share of that, and the softmax over
 * what is read has a Kullback-Leibler divergence of -log(share) from it, in nats. */
struct kvfold_alignment {
    int32_t  layer; /* of the model */
    int32_t  head;
    uint64_t tokens;
    double   recalled;   /* mean share */
    double   divergence; /* mean */
    double   largest;    /* divergence */
    double   read;       /* share of the groups that look-ups of the layer saw; 0 where it chooses none itself */
};

KVFOLD_API const char * kvfold_version(void);

/* The reason of the last failure on this thread; empty when there was none. Valid until the next call on this thread. */
KVFOLD_API const char * kvfold_last_error(void);

/* "fp4", "fp4_csa2", "fp4_csa2_ced" or "none" */
KVFOLD_API const char * kvfold_type_name(enum kvfold_type type);

/* "auto", "on" or "off" */
KVFOLD_API const char * kvfold_hierarchical_name(enum kvfold_hierarchical hierarchical);

/* "keydiff+attn"; valid until the next call on this thread */
KVFOLD_API const char * kvfold_score_name(uint32_t score);

/* tail 128, sinks 4, the type's default group, f16 windows, look-up as measured best where the type has it */
KVFOLD_API struct kvfold_config kvfold_config_default(enum kvfold_type type);

/* Sets one field from text. Keys, all also with "kv_" before: "type", "group", "tail", "sinks", "swa_type",
 * "scale_group", "lookup" ("0.2" or "0.1,0.2"), "threshold", "min_tokens", "max_tokens", "min_context", "layers", "alignment"
 * ("true" or "false"), "calibration" (path of a file of `kvfold calibrate`, which is read at once), "hierarchical" ("auto", "on" or
 * "off"), "span_pool", "keep", "score" ("keydiff+attn").
 *
 * "layers" is "auto", or a list of modes for the layers that keep the whole context, such as "dense*2,full*10,reuse":
 *   dense    reads everything
 *   full     chooses groups for itself
 *   reuse    reads what the last full or reindex layer chose
 *   reindex  chooses among the best 16384 tokens of the last full layer
 *   window   reads exact rows only
 * full and reindex may have a share of their own, which takes the place of the largest one of "lookup": full:0.3.
 * mode*N stands for N layers, (...)*N repeats a list, and the last entry goes on to the last layer. auto is what a
 * calibration says; without one full, but dense in the first two layers of the model. */
KVFOLD_API bool kvfold_config_set(struct kvfold_config * config, const char * key, const char * value);

/* Whether the configuration makes sense by itself. */
KVFOLD_API bool kvfold_config_check(const struct kvfold_config * config);

/* Whether a model can use it (head size, architecture, calibration). */
KVFOLD_API bool kvfold_model_check(const struct kvfold_config * config, const struct llama_model * model);

/* A number that two models share only by being the same model; never 0. */
KVFOLD_API uint64_t kvfold_model_fingerprint(const struct llama_model * model);

KVFOLD_API bool kvfold_scope_push(const struct kvfold_config * config);
KVFOLD_API void kvfold_scope_pop(void);

/* NULL or type NONE removes it. */
KVFOLD_API bool kvfold_set_default(const struct kvfold_config * config);

/* The configuration that a context made now by this thread would get; type NONE when there is none. */
KVFOLD_API struct kvfold_config kvfold_active_config(void);

/* Who prints the start-up line of a new kvfold context, and how much it looked up when it ends; NULL: llama.cpp's log, at info level. Process-wide. */
typedef void (*kvfold_announcer)(const char * line);
KVFOLD_API void kvfold_set_announcer(kvfold_announcer announcer);

/* False when the context has no kvfold cache. */
KVFOLD_API bool kvfold_get_stats(const struct llama_context * ctx, struct kvfold_stats * stats);

/* Fills `rows`, of which there are `room`, layer by layer; returns how many there are to be had: 0 without the setting. */
KVFOLD_API size_t kvfold_get_alignment(const struct llama_context * ctx, struct kvfold_alignment * rows, size_t room);

/* Positions below `n_pos` that a sequence lacks because they were dropped, also before its state was saved; 0 without a kvfold cache. */
KVFOLD_API int32_t kvfold_evicted(const struct llama_context * ctx, int32_t seq_id, int32_t n_pos);

/* Positions of a sequence that a kvfold cache holds; -1 without one, or when there is no such sequence. */
KVFOLD_API int32_t kvfold_kept(const struct llama_context * ctx, int32_t seq_id);

/* Whether the first `n_pos` positions of a sequence can stand for a text of that length that is to go on differently. Not if
 * a tenth more of them is gone than a sequence so short has to lose: then the text is better processed again. True without
 * a kvfold cache that evicts, and when no more than the youngest tokens, which are never evicted, are taken back. */
KVFOLD_API bool kvfold_prefix_usable(const struct llama_context * ctx, int32_t seq_id, int32_t n_pos);

/* Never evicts positions p0 <= p < p1 of a sequence; p1 < 0 means to its end, an empty range forgets all pins of the sequence.
 * Pins belong to the context and outlive edits of the sequence. False when the context has no cache that evicts. */
KVFOLD_API bool kvfold_pin(struct llama_context * ctx, int32_t seq_id, int32_t p0, int32_t p1);

/* Drops what a text in the cache can do without, down to the share `keep` (above 0, up to 1) of its tokens, to be asked again and
 * again: the text is read a second time, and those groups of tokens go first to which it then pays the least attention. Sequence
 * `seq_id` must hold `tokens`, and nothing else, from position 0 on. What is exact stays (the first tokens and the tail), also pinned
 * ranges and what other sequences share. Nothing of the second reading stays in the cache, but the context's logits are gone.
 *
 * Takes about as long as the first reading, and free cells for a micro-batch (64 tokens at least, or some are evicted before). Any
 * kvfold cache. Returns the number of dropped tokens, or a negative number; the cache is as before then. */
KVFOLD_API int32_t kvfold_compact(struct llama_context * ctx, int32_t seq_id, const int32_t * tokens, size_t n_tokens,
                                  float keep);

/* What kvfold_compact would miss: of the attention of a layer in a part of the text, all heads together, when the text is read once
 * more. Without the tokens that would be dropped attention has a share of what it has with them, and diverges from it
 * (Kullback-Leibler) by -log(share), in nats. */
struct kvfold_part_alignment {
    int32_t layer; /* of the model */
    int32_t start; /* positions start <= p < stop */
    int32_t stop;
    double  recalled;   /* mean share */
    double  divergence; /* mean */
    double  largest;    /* divergence */
};
typedef void (*kvfold_part_alignment_sink)(const struct kvfold_part_alignment * row, void * user);

/* Calls `sink` for every part of the text and every layer, in this order. Arguments and conditions as of kvfold_compact, but nothing is
 * dropped, and it takes twice as long. */
KVFOLD_API bool kvfold_compact_alignment(struct llama_context * ctx, int32_t seq_id, const int32_t * tokens,
                                         size_t n_tokens, float keep, kvfold_part_alignment_sink sink, void * user);

/* What all kvfold caches of this process did, as metrics in Prometheus' text format; empty without one. Valid until the next
 * call on this thread. */
KVFOLD_API const char * kvfold_metrics(void);

#ifdef __cplusplus
}
#endif

#endif
