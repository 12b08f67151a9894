// Attention of many queries: the usual online-softmax kernel on tensor cores, whose key and value tiles are decoded from FP4
// on the way to shared memory. Nothing of the cache is ever written out as f16.
//
// One block has 16 * WARPS columns (query, head of the group) of one KV head and walks over tiles of BC cells. While a tile is
// worked on, the words of the next are on their way to registers; they are decoded into the other shared buffer afterwards.
// Near and current rows take the same road without the prefetch, since there are few. Where there are few columns the cells
// are split over blocks and merged as in decoding.
#pragma once

#include "ops/prefill_tile.cuh"

namespace kvfold {
namespace device {

template <int D_, int BC_, int WARPS_>
struct PrefillShape {
    static constexpr int  D = D_, BC = BC_, WARPS = WARPS_;
    static constexpr int  rows = 16 * WARPS, threads = 32 * WARPS;
    static constexpr int  stride       = D + 8;  // halves of a shared row; the padding spreads rows over banks
    static constexpr int  stages       = D == 256 ? 1 : 2;
    static constexpr bool q_shared     = D == 256;  // queries in shared memory instead of registers
    static constexpr int  tile_halves  = BC * stride;
    static constexpr int  shared_bytes = (stages * 2 * tile_halves + (q_shared ? rows * stride : 0)) * 2;
};

// Four 8x8 matrices of halves; `row` is the address of this lane's row (lanes 8 i .. 8 i + 7 give matrix i).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], const half * row) {
    const uint32_t at = uint32_t(__cvta_generic_to_shared(row));
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at));
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at));
    }
}

// grid: x block of columns, y KV head, z split of the cells. Dynamic shared memory: S::shared_bytes.
template <class S>
__global__ void __launch_bounds__(S::threads, 1) attend_prefill(const __grid_constant__ AttendParams p) {
    constexpr int     D = S::D, BC = S::BC, NS = BC / 8, NO = D / 8, KS = D / 16;
    extern __shared__ __align__(16) half shared_rows[];
    __shared__ int                       shared_src[2][BC];
    __shared__ int                       flags[3];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int head = blockIdx.y, row0 = blockIdx.x * S::rows;
    const int n_tiles = (p.n_kv + BC - 1) / BC, per = (n_tiles + p.n_split - 1) / p.n_split;
    const int tile0 = blockIdx.z * per, tile1 = min(n_tiles, tile0 + per);

    const ScoreRows rows(p, head, row0 + warp * 16, lane);
    half *          q_rows = shared_rows + S::stages * 2 * S::tile_halves;
    uint32_t        q[S::q_shared ? 1 : KS][4];
    rows.load_queries<D>(p, lane, [&](int i, int w, uint32_t pair) {
        if constexpr (S::q_shared) {
            const int row = warp * 16 + (lane >> 2) + 8 * i;
            *reinterpret_cast<uint32_t *>(q_rows + row * S::stride + 8 * w + 2 * (lane & 3)) = pair;
        } else {
            q[w / 2][2 * (w & 1) + i] = pair;
        }
    });

    TileLoader<D, BC, S::rows, S::threads> loader(p, head, row0, threadIdx.x);

    auto decode = [&](int tile, int stage, int flag_slot) {
        half *    keys = shared_rows + stage * 2 * S::tile_halves;
        const int flag =
            loader.decode(tile, shared_src[stage], [&](int cell, int word, const Pairs & k, const Pairs & v) {
                store_pairs(keys + cell * S::stride + 8 * word, k);
                store_pairs(keys + S::tile_halves + cell * S::stride + 8 * word, v);
            });
        const bool any_masked = __any_sync(~0u, flag & kTileMasked), any_seen = __any_sync(~0u, flag & kTileSeen);
        if (lane == 0) {
            atomicOr(&flags[flag_slot], (any_masked ? kTileMasked : 0) | (any_seen ? kTileSeen : 0));
        }
    };

    OnlineSoftmax<D> sums;

    auto attend = [&](int tile, int stage, bool masked) {
        const half * keys = shared_rows + stage * 2 * S::tile_halves, *values = keys + S::tile_halves;
        float        s[NS][4] = {};
        const half * key_row  = keys + ((lane >> 4) * 8 + (lane & 7)) * S::stride + ((lane >> 3) & 1) * 8;
#pragma unroll
        for (int ks = 0; ks < KS; ++ks) {
            uint32_t a[4];
            if constexpr (S::q_shared) {
                load_matrices<false>(a, q_rows + (warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7)) * S::stride +
                                            16 * ks + (lane >> 4) * 8);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] = q[ks][i];
                }
            }
#pragma unroll
            for (int n = 0; n < NS / 2; ++n) {
                uint32_t b[4];
                load_matrices<false>(b, key_row + 16 * n * S::stride + 16 * ks);
                mma_16x8x16(s[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma_16x8x16(s[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
        finish_scores(p, p.score_scale * kFp4Inverse, s);
        if (masked) {
            rows.mask_scores(p, lane, tile * BC, shared_src[stage], s);
        }
        sums.weigh(s);
        const half * value_row = values + (((lane >> 3) & 1) * 8 + (lane & 7)) * S::stride + (lane >> 4) * 8;
#pragma unroll
        for (int k = 0; k < BC / 16; ++k) {
            const uint32_t a0 = pack_half2(s[2 * k][0], s[2 * k][1]), a1 = pack_half2(s[2 * k][2], s[2 * k][3]);
            const uint32_t a2 = pack_half2(s[2 * k + 1][0], s[2 * k + 1][1]),
                           a3 = pack_half2(s[2 * k + 1][2], s[2 * k + 1][3]);
#pragma unroll
            for (int n = 0; n < NO / 2; ++n) {
                uint32_t b[4];
                load_matrices<true>(b, value_row + 16 * k * S::stride + 16 * n);
                mma_16x8x16(sums.o[2 * n], a0, a1, a2, a3, b[0], b[1]);
                mma_16x8x16(sums.o[2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
    };

    if (threadIdx.x < 3) {
        flags[threadIdx.x] = 0;
    }
    if (tile0 < tile1) {
        loader.request(tile0);
    }
    __syncthreads();
    if (tile0 < tile1) {
        decode(tile0, 0, 0);
        loader.request(min(tile0 + 1, tile1 - 1));
    }
    __syncthreads();
    // Between two barriers every warp attends one tile and decodes the next. Half of the warps, two of them on every scheduler
    // of the multiprocessor, decode first, so that the tensor cores and the other pipelines are busy at the same time.
    // Flags rotate over three slots: the one of this tile is read, the next is being set, the one after is cleared.
    const bool decode_first = S::stages == 2 && (warp & 4) != 0;
    for (int tile = tile0, slot = 0; tile < tile1; ++tile) {
        const int stage = S::stages == 2 ? (tile - tile0) & 1 : 0, next_slot = slot == 2 ? 0 : slot + 1;
        const int flag = flags[slot];
        if (threadIdx.x == 0) {
            flags[next_slot == 2 ? 0 : next_slot + 1] = 0;
        }
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            if ((turn == 0) != decode_first) {
                if (flag & kTileSeen) {
                    attend(tile, stage, flag & kTileMasked);
                }
            } else {
                if (S::stages == 1) {
                    __syncthreads();
                }
                if (tile + 1 < tile1) {
                    decode(tile + 1, S::stages == 2 ? stage ^ 1 : 0, next_slot);
                    loader.request(min(tile + 2, tile1 - 1));
                }
            }
        }
        __syncthreads();
        slot = next_slot;
    }
    sums.write(p, rows, lane, blockIdx.z);
}

}  // namespace device
}  // namespace kvfold
