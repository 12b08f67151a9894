#include "cache/lookup.h"

#include <algorithm>
#include <bitset>
#include <cmath>

namespace kvfold {

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
        count.tokens += uint32_t(std::bitset<32>(word).count());
        count.partial_groups += uint32_t(std::bitset<32>(some & ~all & first).count());
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

int32_t list_capacity(const kvfold_config & config, uint32_t n_groups, uint32_t n_seq_max) {
    const auto share = uint32_t(std::ceil(double(config.lookup_max) * n_groups));
    return with_partials(std::max(share, groups_of(config.min_tokens, config.group)), n_groups, n_seq_max);
}

int32_t pool_capacity(const kvfold_config & config, uint32_t n_groups, uint32_t n_seq_max) {
    return with_partials(groups_of(kPoolTokens, config.group), n_groups, n_seq_max);
}

}  // namespace kvfold
