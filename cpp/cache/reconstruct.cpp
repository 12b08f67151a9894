#include "cache/reconstruct.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cache/eviction.h"

namespace kvfold {

namespace {

constexpr size_t kNeighbours = 96;  // groups to either side
constexpr size_t kHeadsShare = 4;   // one of so many heads wants a group

// What the heads that want a group most want, on the average: by group.
std::vector<uint64_t> wanted_by_heads(const std::vector<std::vector<float>> & received, size_t n) {
    const size_t          heads = received.size(), top = (heads + kHeadsShare - 1) / kHeadsShare;
    std::vector<uint32_t> ranks(n * heads);  // [n][heads]
    for (size_t h = 0; h < heads; ++h) {
        const std::vector<size_t> order = rank_order(received[h]);
        for (size_t rank = 0; rank < n; ++rank) {
            ranks[order[rank] * heads + h] = uint32_t(rank);
        }
    }
    std::vector<uint64_t> sums(n);
    for (size_t i = 0; i < n; ++i) {
        const auto first = ranks.begin() + std::ptrdiff_t(i * heads), last = first + std::ptrdiff_t(top);
        std::partial_sort(first, last, first + std::ptrdiff_t(heads), std::greater<>());
        sums[i] = std::accumulate(first, last, uint64_t(0));
    }
    return sums;
}

// How many of a group's neighbours have less.
template <typename T>
std::vector<size_t> among_neighbours(const std::vector<T> & score) {
    const size_t        n = score.size(), width = std::min(n, 2 * kNeighbours + 1);
    std::vector<size_t> rank(n);
    for (size_t i = 0; i < n; ++i) {
        // At the ends, as many groups from the other side.
        const size_t first = std::min(i - std::min(i, kNeighbours), n - width);
        const auto   begin = score.begin() + std::ptrdiff_t(first);
        rank[i] =
            size_t(std::count_if(begin, begin + std::ptrdiff_t(width), [&](const T & x) { return x < score[i]; }));
    }
    return rank;
}

}  // namespace

std::vector<size_t> order_by_need(const std::vector<std::vector<float>> & received,
                                  const std::vector<float> &              novelty) {
    const size_t              n     = novelty.size();
    std::vector<size_t>       need  = among_neighbours(wanted_by_heads(received, n));
    const std::vector<size_t> newer = among_neighbours(novelty);
    std::transform(need.begin(), need.end(), newer.begin(), need.begin(), std::plus<>());
    std::vector<size_t> smooth(n);
    for (size_t i = 0; i < n; ++i) {
        smooth[i] = need[i - (i > 0)] + 2 * need[i] + need[i + (i + 1 < n)];
    }
    return rank_order(smooth);
}

}  // namespace kvfold
