// kvfold_compact(): a text that is in the cache is read a second time, and what it does not need for that is dropped.
// kvfold_compact_alignment(): it is read a third time instead, to see what would be missed.
//
// A reading goes on behind the text, a part of it at a time, one micro-batch each; every part is removed before the next one. Such a
// micro-batch reads the cache but folds and stores nothing, so what is exact stays exact. Parts overlap by a few tokens, for something
// to go on from.
#include <algorithm>
#include <atomic>
#include <map>

#include "cache/config.h"
#include "cache/eviction.h"
#include "cache/hooks.h"
#include "cache/kvfold_cache.h"
#include "cache/reconstruct.h"
#include "cache/scoring.h"
#include "llama-context.h"
#include "llama-model.h"
#include "ops/kv_align.h"

namespace {

constexpr uint32_t kOverlap   = 8;
constexpr uint32_t kLeastPart = 64;   // tokens, the overlap included
constexpr uint32_t kMostPart  = 512;  // the second reading shall see whole stretches of text, in bounded room

// A text in a cache, and what is to be kept of it.
struct Text {
    llama_context &                  ctx;
    kvfold_cache &                   cache;
    llama_kv_cells &                 cells;
    llama_seq_id                     seq;
    const std::vector<llama_token> & tokens;
    float                            keep;

    llama_pos end() const { return llama_pos(tokens.size()); }
};

bool refuse(const std::string & reason) { return kvfold::fail("compact: " + reason); }

bool is_possible(const Text & t) {
    if (!(t.keep > 0.0f && t.keep <= 1.0f)) {
        return refuse(kvfold::message("keep must be a share above 0 and up to 1, got %g", double(t.keep)));
    }
    if (t.seq < 0 || t.seq >= llama_seq_id(t.cache.n_seq_max)) {
        return refuse(kvfold::message("sequence %d does not exist; possible: 0 to %u", t.seq, t.cache.n_seq_max - 1));
    }
    if (t.tokens.empty() || t.cells.seq_pos_min(t.seq) != 0 || t.cells.seq_pos_max(t.seq) != t.end() - 1) {
        return refuse(kvfold::message("%d tokens were given, sequence %d holds positions %d to %d", t.end(), t.seq,
                                      t.cells.seq_pos_min(t.seq), t.cells.seq_pos_max(t.seq)));
    }
    return true;
}

// While it lives, the micro-batches of a cache are of a further reading, and every layer has memory for what its cells receive or, with
// `dropped` (bits of cells), for what its heads would lose.
class Reading {
  public:
    Reading(const Text & text, const std::vector<uint32_t> & dropped) : cache_(text.cache) {
        std::map<ggml_backend_buffer_type_t, ggml_context_ptr> contexts;  // every layer's is where its rows are
        for (auto & layer : cache_.layers) {
            auto & ctx = contexts[ggml_backend_buffer_get_type(layer.far_k->buffer)];
            if (!ctx) {
                ctx.reset(ggml_init({ggml_tensor_overhead() * (cache_.layers.size() + 1), nullptr, true}));
            }
            if (dropped.empty()) {
                layer.received = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, cache_.n_cells, layer.n_head_kv);
                continue;
            }
            const int64_t heads = text.ctx.get_model().hparams.n_head(uint32_t(layer.il));
            layer.received      = kvfold::new_alignment(ctx.get(), heads);
            if (cache_.dropped == nullptr) {  // other devices get a copy of it with every graph
                cache_.dropped = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, int64_t(dropped.size()));
            }
        }
        for (auto & [buft, ctx] : contexts) {
            ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
            if (!buffer) {
                return;
            }
            ggml_backend_buffer_clear(buffer.get(), 0);
            memory_.emplace_back(std::move(ctx), std::move(buffer));
        }
        if (!dropped.empty()) {
            ggml_backend_tensor_set(cache_.dropped, dropped.data(), 0, dropped.size() * sizeof(uint32_t));
        }
        static std::atomic<uint32_t> count{0};
        cache_.second_pass = ++count;
    }
    ~Reading() {
        cache_.second_pass = 0;
        cache_.dropped     = nullptr;
        for (auto & layer : cache_.layers) {
            layer.received = nullptr;
        }
    }
    Reading(const Reading &)             = delete;
    Reading & operator=(const Reading &) = delete;

    bool ok() const { return cache_.second_pass != 0; }

    // What the cells have received from every KV head of every layer.
    std::vector<std::vector<float>> received() const {
        std::vector<std::vector<float>> all;
        for (const auto & layer : cache_.layers) {
            for (int32_t head = 0; head < layer.n_head_kv; ++head) {
                std::vector<float> & one   = all.emplace_back(cache_.n_cells);
                const size_t         bytes = one.size() * sizeof(float);
                ggml_backend_tensor_get(layer.received, one.data(), size_t(head) * bytes, bytes);
            }
        }
        return all;
    }

    // What the heads of a layer would have lost since the last call, together.
    kvfold::Alignment take_losses(const kvfold::CacheLayer & layer) const {
        kvfold::Alignment sum{};
        for (const kvfold::Alignment & head : kvfold::read_alignment(layer.received)) {
            sum.add(head);
        }
        ggml_backend_tensor_memset(layer.received, 0, 0, ggml_nbytes(layer.received));
        return sum;
    }

  private:
    kvfold_cache &                                                    cache_;
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> memory_;
};

// What a context keeps of a sequence beside the cache with FP4 rows (sliding windows, recurrent states), and its end.
class Rest {
  public:
    explicit Rest(const Text & text) : text_(text) {
        if (dynamic_cast<llama_kv_cache *>(text.ctx.get_memory()) == nullptr) {
            state_.resize(llama_state_seq_get_size_ext(&text.ctx, text.seq, kFlags));
            state_.resize(llama_state_seq_get_data_ext(&text.ctx, state_.data(), state_.size(), text.seq, kFlags));
        }
    }

    bool restore() {
        const bool read = state_.empty() || llama_state_seq_set_data_ext(&text_.ctx, state_.data(), state_.size(),
                                                                         text_.seq, kFlags) != 0;
        return llama_memory_seq_rm(llama_get_memory(&text_.ctx), text_.seq, text_.end(), -1) && read;
    }

  private:
    static constexpr llama_state_seq_flags kFlags = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

    const Text &         text_;
    std::vector<uint8_t> state_;
};

// Reads tokens start .. stop - 1 behind the text. Returns what llama_decode() does.
int32_t read_part(const Text & text, size_t start, size_t stop) {
    const auto  n     = int32_t(stop - start);
    llama_batch batch = llama_batch_init(n, 0, 1);
    for (int32_t i = 0; i < n; ++i) {
        batch.token[i]     = text.tokens[start + size_t(i)];
        batch.pos[i]       = text.end() + i;
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = text.seq;
        batch.logits[i]    = 0;
    }
    batch.n_tokens       = n;
    const int32_t result = llama_decode(&text.ctx, batch);
    llama_batch_free(batch);
    llama_synchronize(&text.ctx);  // what it leaves behind is read and taken away by the host
    return result;
}

// Reads the whole text, and calls use(start, stop) after every part.
template <typename Use>
bool read_again(const Text & text, const Use & use) {
    Rest           rest(text);
    const uint32_t free   = text.cells.size() - text.cells.get_used();
    const uint32_t spare  = 2 * text.cache.group();
    const uint32_t part   = std::min({llama_n_ubatch(&text.ctx), llama_n_batch(&text.ctx), kMostPart,
                                      std::max(kLeastPart, free > spare ? free - spare : 0)});
    const uint32_t before = std::min(kOverlap, part / 2);
    for (size_t first = 0; first < text.tokens.size();) {
        const size_t  start  = first - std::min<size_t>(first, before);
        const size_t  stop   = std::min(text.tokens.size(), start + part);
        const int32_t result = read_part(text, start, stop);
        if (!rest.restore()) {
            return refuse("the context could not be restored after a part of the text");
        }
        if (result == 1) {
            return refuse(
                kvfold::message("the text is read again, %u tokens at a time, for which the cache of %u cells "
                                "has no room beside its %u tokens",
                                part, text.cells.size(), text.cells.get_used()));
        }
        if (result != 0) {
            return refuse("the computation failed or was aborted");
        }
        use(first, stop);
        first = stop;
    }
    return true;
}

// Does every token of the group belong to this sequence alone?
bool is_own(const Text & text, uint32_t g) {
    const uint32_t group = text.cache.group();
    for (uint32_t c = g * group; c < (g + 1) * group; ++c) {
        if (!text.cells.is_empty(c) && (text.cells.seq_count(c) != 1 || !text.cells.seq_has(c, text.seq))) {
            return false;
        }
    }
    return true;
}

kvfold::EvictionRules rules_of(const Text & text) {
    kvfold::EvictionRules rules = text.cache.eviction;
    rules.keep                  = text.keep;
    rules.young                 = llama_pos(text.cache.config.tail);
    return rules;
}

// The groups that may go, in the order in which they are to. False: see kvfold_last_error().
bool order_groups(const Text & text, std::vector<uint32_t> & groups) {
    std::vector<std::vector<float>> received;
    {
        Reading reading(text, {});
        if (!reading.ok()) {
            return refuse("not enough memory for the scores");
        }
        if (!read_again(text, [](size_t, size_t) {})) {
            return false;
        }
        received = reading.received();
    }
    text.cache.near.sweep(text.cells);
    groups = kvfold::evictable_groups(text.cells, &text.cache.near, rules_of(text));
    groups.erase(std::remove_if(groups.begin(), groups.end(), [&](uint32_t g) { return !is_own(text, g); }),
                 groups.end());
    const std::vector<float> novelty = kvfold::make_novelty(text.cache, text.cells);
    if (novelty.empty()) {
        return refuse("the scores could not be made");
    }
    const auto by_group = [&](const std::vector<float> & score) {
        return kvfold::group_scores(groups, text.cells, text.cache.group(), score.data());
    };
    for (auto & head : received) {
        head = by_group(head);
    }
    const std::vector<size_t> order = kvfold::order_by_need(received, by_group(novelty));
    groups                          = kvfold::take(groups, order);
    return true;
}

int32_t compact(const Text & text) {
    std::vector<uint32_t> groups;
    if (!is_possible(text) || !order_groups(text, groups)) {
        return -1;
    }
    const uint32_t dropped = kvfold::thin_out(text.cells, rules_of(text), groups);
    text.cache.evicted_tokens += dropped;
    text.cache.evictions += dropped > 0;
    text.cache.compacted[size_t(text.seq)] = {text.end(), kvfold::count_evicted(text.cells, text.seq, text.end())};
    return int32_t(dropped);
}

bool align(const Text & text, kvfold_part_alignment_sink sink, void * user) {
    std::vector<uint32_t> groups;
    if (!is_possible(text) || !order_groups(text, groups)) {
        return false;
    }
    llama_kv_cells thinned = text.cells;
    kvfold::thin_out(thinned, rules_of(text), groups);
    std::vector<uint32_t> dropped((thinned.size() + 31) / 32, 0);
    for (uint32_t c = 0; c < thinned.size(); ++c) {
        dropped[c / 32] |= uint32_t(thinned.is_empty(c) && !text.cells.is_empty(c)) << (c % 32);
    }
    Reading reading(text, dropped);
    if (!reading.ok()) {
        return refuse("not enough memory for the report");
    }
    return read_again(text, [&](size_t start, size_t stop) {
        for (const auto & layer : text.cache.layers) {
            const kvfold::Alignment     x   = reading.take_losses(layer);
            const double                n   = std::max(1.0, x.queries);
            const kvfold_part_alignment row = {layer.il,       int32_t(start),   int32_t(stop),
                                               x.recalled / n, x.divergence / n, x.largest};
            sink(&row, user);
        }
    });
}

llama_kv_cache * find_cache(const llama_context & ctx) {
    llama_kv_cache * kv = kvfold_access::folding_cache(ctx);
    if (kv == nullptr) {
        refuse("needs a kvfold cache; possible kv types: fp4, fp4_csa2, fp4_csa2_ced");
    }
    return kv;
}

}  // namespace

int32_t kvfold_compact(llama_context * ctx, int32_t seq_id, const int32_t * tokens, size_t n_tokens, float keep) {
    llama_kv_cache *               kv = find_cache(*ctx);
    const std::vector<llama_token> all(tokens, tokens + n_tokens);
    return kv != nullptr ? compact({*ctx, kvfold_access::extension(*kv), kvfold_access::cells(*kv), seq_id, all, keep})
                         : -1;
}

bool kvfold_compact_alignment(llama_context * ctx, int32_t seq_id, const int32_t * tokens, size_t n_tokens, float keep,
                              kvfold_part_alignment_sink sink, void * user) {
    llama_kv_cache *               kv = find_cache(*ctx);
    const std::vector<llama_token> all(tokens, tokens + n_tokens);
    return kv != nullptr &&
           align({*ctx, kvfold_access::extension(*kv), kvfold_access::cells(*kv), seq_id, all, keep}, sink, user);
}
