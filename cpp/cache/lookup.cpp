#include "cache/lookup.h"

#include <algorithm>
#include <cmath>

#include "cache/config.h"
#include "ops/kv_ops.h"

namespace kvfold {

namespace {

// Bits that are set. std::bitset calls a function for it on processors of every age, which takes twice as long (14 us at 65536 cells).
inline uint32_t count_bits(uint32_t x) {
    x -= x >> 1 & 0x55555555;
    x = (x & 0x33333333) + (x >> 2 & 0x33333333);
    return ((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24;
}

}  // namespace

FarCount count_far(const std::vector<uint32_t> & far_bits, uint32_t group) {
    uint32_t first = 0;  // bits of the first cells of groups
    for (uint32_t c = 0; c < 32; c += group) {
        first |= 1u << c;
    }
    FarCount count{};
    for (const uint32_t word : far_bits) {
        uint32_t some = word;
        uint32_t all  = word;
        for (uint32_t step = 1; step < group; step *= 2) {
            some |= some >> step;
            all &= all >> step;
        }
        count.tokens += count_bits(word);
        count.partial_groups += count_bits(some & ~all & first);
    }
    return count;
}

uint32_t partial_room(uint32_t n_seq_max) { return 64 + 8 * n_seq_max; }

namespace {

int32_t with_partials(uint32_t groups, uint32_t n_groups, uint32_t n_seq_max) {
    return int32_t(std::min(n_groups, groups + partial_room(n_seq_max)));
}

uint32_t groups_of(int32_t tokens, int32_t group) { return uint32_t((tokens + group - 1) / group); }

}  // namespace

bool exceeds_pool(const kvfold_config & config, int64_t n_kv) {
    return n_kv / config.group > config.span_pool &&
           (config.hierarchical == KVFOLD_HIERARCHICAL_ON ||
            (config.hierarchical == KVFOLD_HIERARCHICAL_AUTO && n_kv > kMinSpanCells));
}

int32_t pool_spans(const kvfold_config & config) { return std::max(1, config.span_pool / (kSpanCells / config.group)); }

uint32_t span_count(const kvfold_config & config, uint32_t n_tokens, uint32_t n_cells) {
    const bool searched = has_lookup(config.type) && config.lookup_max < 1.0f && exceeds_pool(config, n_tokens);
    return searched ? n_cells / uint32_t(kSpanCells) : 0;
}

int32_t list_capacity(const kvfold_config & config, float largest_share, uint32_t n_groups, uint32_t n_seq_max) {
    const auto share = uint32_t(std::ceil(double(largest_share) * n_groups));
    uint32_t   most  = std::max(share, groups_of(config.min_tokens, config.group));
    if (config.max_tokens > 0) {
        most = std::min(most, uint32_t(config.max_tokens / config.group));
    }
    return with_partials(most, n_groups, n_seq_max);
}

int32_t pool_capacity(const kvfold_config & config, uint32_t n_groups, uint32_t n_seq_max) {
    return with_partials(groups_of(kPoolTokens, config.group), n_groups, n_seq_max);
}

}  // namespace kvfold
