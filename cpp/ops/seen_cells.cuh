// What queries see: scores of all cells, far and exact, for the rows of a block, and what is made of them for an Alignment. For operations that
// look at an attention from beside (kv_receive.cu, kv_align.cu). Rows and queries come rotated.
//
// grid of the kernels: x block of KeyTile::rows rows, y KV head
#pragma once

#include "ops/attend_launch.cuh"
#include "ops/kv_align.h"
#include "ops/row_scores_device.cuh"

namespace kvfold {
namespace device {

// The rows of a warp, and their scores for all cells that anybody sees.
template <int D>
class SeenCells {
    using S = KeyTile<D>;

  public:
    const ScoreRows rows;

    __device__ __forceinline__ SeenCells(const AttendParams & p, KeyStages<D> & shared)
        : rows(p, blockIdx.y, blockIdx.x * S::rows + (threadIdx.x >> 5) * 16, threadIdx.x & 31), p_(p), shared_(shared),
          lane_(threadIdx.x & 31) {
        rows.load_queries<D>(p, lane_, [&](int i, int w, uint32_t pair) { q_[w / 2][2 * (w & 1) + i] = pair; });
    }

    // The key of a tile that value n, e of a fragment is about.
    __device__ __forceinline__ int key(int n, int e) const { return 8 * n + 2 * (lane_ & 3) + e; }

    // use(first cell, stage, scores) with scores of far cells; after(first cell, stage) as in walk_tiles().
    template <class Use, class After>
    __device__ __forceinline__ void walk_far(const Use & use, const After & after) {
        FarKeyTiles<D, false> keys(p_, blockIdx.y, p_.n_kv);

        const int  n_tiles = (p_.n_kv + S::keys - 1) / S::keys;
        const auto next    = [&](int tile) {
            do {
                ++tile;
            } while (tile < n_tiles && !has_far(tile));
            return tile;
        };
        walk(
            keys, n_tiles, next, [&](int tile, int key) { return far_cell(tile * S::keys + key); },
            [&](int tile, int stage, auto & s) { use(tile * S::keys, stage, s); },
            [&](int tile, int stage) { after(tile * S::keys, stage); });
    }

    // use(scores) with scores of exact cells.
    template <class Use>
    __device__ __forceinline__ void walk_exact(const Use & use) {
        ExactKeyTiles<D> keys(p_, blockIdx.y);

        const auto cell_of = [&](int tile, int key) {
            const int  entry = tile * S::keys + key;
            const int2 x     = entry < p_.n_exact ? p_.exact[entry] : make_int2(0, kSrcHidden);
            return x.y == kSrcHidden ? -1 : x.x;
        };
        walk(
            keys, (p_.n_exact + S::keys - 1) / S::keys, [](int tile) { return tile + 1; }, cell_of,
            [&](int, int, auto & s) { use(s); }, [](int, int) {});
    }

    // Sinks join the sums, those of some keys too if `some`. (Base 2, as sums of scores are.)
    __device__ __forceinline__ void add_sinks(RowSums & sums, bool some = false) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (p_.sinks != nullptr && sums.sees(i)) {
                sums.add_sink(i, p_.sinks[rows.q_head[i]] * kLog2E, some);
            }
        }
    }

  private:
    __device__ __forceinline__ bool has_far(int tile) const {
        uint32_t bits = 0;
#pragma unroll
        for (int word = 0; word < S::keys / 32; ++word) {
            const int cell = tile * S::keys + 32 * word;
            bits |= cell < p_.n_kv ? __ldg(p_.far_bits + cell / 32) : 0u;
        }
        return bits != 0;
    }

    // Itself, or -1.
    __device__ __forceinline__ int far_cell(int cell) const {
        return cell < p_.n_kv && (__ldg(p_.far_bits + cell / 32) >> (cell % 32) & 1u) != 0 ? cell : -1;
    }

    // cell_of(tile, key): -1 for a key that nobody sees.
    template <class Keys, class Next, class CellOf, class Use, class After>
    __device__ __forceinline__ void walk(Keys & keys, int n_tiles, const Next & next, const CellOf & cell_of,
                                         const Use & use, const After & after) {
        walk_tiles<D>(
            keys, shared_, n_tiles, q_, lane_, next,
            [&](int tile, int stage, float (&s)[S::fragments][4]) {
                finish_scores(p_, p_.score_scale * kFp4Inverse, s);
#pragma unroll
                for (int n = 0; n < S::fragments; ++n) {
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int cell = cell_of(tile, key(n, e));
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            s[n][2 * i + e] = seen(i, cell, s[n][2 * i + e]);
                        }
                    }
                }
                use(tile, stage, s);
            },
            after);
    }

    // What the query of row i makes of a score.
    __device__ __forceinline__ float seen(int i, int cell, float score) const {
        if (cell < 0 || !rows.exists[i]) {
            return -INFINITY;
        }
        const float x = p_.mask != nullptr ? __half2float(p_.mask[rows.query[i] * p_.mask_stride + cell]) : 0.0f;
        return x == -INFINITY ? x : score + x * kLog2E;
    }

    const AttendParams & p_;
    KeyStages<D> &       shared_;
    RowOperands<D>       q_;
    int                  lane_;
};

// Adds what a block has found to sums of Alignment [n_head]. kept [ROWS]: of each row which share of the attention is left; negative: it sees
// nothing. The whole block calls. Blocks add up in any order, in double precision.
template <int ROWS, int THREADS>
__device__ __forceinline__ void add_to_alignments(const float * kept, int gqa, Alignment * sums) {
    const int row0 = blockIdx.x * ROWS;
    __syncthreads();
    for (int j = threadIdx.x; j < gqa; j += THREADS) {
        Alignment sum{};
        for (int row = (j + gqa - row0 % gqa) % gqa; row < ROWS; row += gqa) {
            if (kept[row] > 0.0f) {
                const double x = kept[row], divergence = x < 1.0 ? -log(x) : 0.0;  // never -0: see the maximum
                sum.queries += 1.0;
                sum.recalled += x;
                sum.divergence += divergence;
                sum.largest = fmax(sum.largest, divergence);
            }
        }
        Alignment & to = sums[blockIdx.y * gqa + j];
        atomicAdd(&to.queries, sum.queries);
        atomicAdd(&to.recalled, sum.recalled);
        atomicAdd(&to.divergence, sum.divergence);
        atomicMax(reinterpret_cast<unsigned long long *>(&to.largest),
                  static_cast<unsigned long long>(__double_as_longlong(sum.largest)));
    }
}

}  // namespace device

template <int D>
dim3 row_blocks(const AttendArgs & a) {
    return dim3(ceil_div(a.n_q * (a.n_head / a.mem.n_head_kv), device::KeyTile<D>::rows), a.mem.n_head_kv);
}

}  // namespace kvfold
