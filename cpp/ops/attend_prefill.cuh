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

// COARSE: far rows have a scale for 32 or 64 channels.
template <int D_, int BC_, int WARPS_, bool COARSE_>
struct PrefillShape {
    static constexpr int  D = D_, BC = BC_, WARPS = WARPS_;
    static constexpr bool COARSE = COARSE_;
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

// One thread's part in bringing tiles of BC cells to shared memory: one word of some neighbouring rows, keys and values. THREADS
// of them share a tile.
template <int D, int BC, int THREADS, bool COARSE>
struct TileLoader {
    static constexpr int words     = D / 8;                 // of a row
    static constexpr int cells     = BC * words / THREADS;  // of a thread
    static constexpr int row_words = D / kFp4BlockValues * kBlockWords;
    static_assert(cells >= 2 && cells % 2 == 0, "summaries are read for pairs of cells");

    const AttendParams & p;
    int                  head;
    int                  word;
    int                  cell_first;  // of the tile
    uint32_t             scale_select;
    int                  in_row;  // words from the row of KV head 0 to this head's block
    int                  value_at;
    int                  row_step;
    uint32_t             key[cells], key_scale[cells], value[cells], value_scale[cells];
    uint32_t             sum[cells / 2], sum_scale[cells / 2];

    __device__ __forceinline__ TileLoader(const AttendParams & params, int kv_head, int thread)
        : p(params), head(kv_head), word(thread % words), cell_first(thread / words * cells),
          scale_select(scale_selector(word >> 1 & 3)), in_row(kv_head * row_words + (word >> 3) * kBlockWords),
          value_at(1 + (word & 7)), row_step(params.n_head_kv * row_words) {}

    // Starts loading a tile into this thread's registers.
    __device__ __forceinline__ void request(int tile) {
        const int cell0 = tile * BC + cell_first;
#pragma unroll
        for (int i = 0; i < cells; ++i) {
            const int cell = min(cell0 + i, p.n_kv - 1);
            if constexpr (COARSE) {
                const size_t at    = size_t(cell) * p.n_head_kv + head;
                const size_t scale = at * (D >> p.scale_shift) + (word >> (p.scale_shift - 3));
                key_scale[i]       = load_byte(p.far_k_scales + scale);
                key[i]             = load_word(p.far_k + at * words + word);
                value_scale[i]     = load_byte(p.far_v_scales + scale);
                value[i]           = load_word(p.far_v + at * words + word);
            } else {
                const uint32_t * k = p.far_k + size_t(cell) * row_step + in_row;
                const uint32_t * v = p.far_v + size_t(cell) * row_step + in_row;
                key_scale[i]       = load_word(k);
                key[i]             = load_word(k + value_at);
                value_scale[i]     = load_word(v);
                value[i]           = load_word(v + value_at);
            }
            if (i % 2 == 0) {
                const uint32_t * g = p.summary + size_t(cell >> p.group_shift) * row_step + in_row;
                sum_scale[i / 2]   = load_word(g);
                sum[i / 2]         = load_word(g + value_at);
            }
        }
    }

    // Decodes the tile that was requested: store(cell, word, keys, values) for each of this thread's cells, again for those whose rows
    // are not far, of which there are only if `exact`.
    template <class Store>
    __device__ __forceinline__ void decode(int tile, bool exact, const Store & store) const {
#pragma unroll
        for (int i = 0; i < cells; ++i) {
            const uint32_t select = COARSE ? scale_selector(0) : scale_select;
            const Pairs    s      = decode_word(sum[i / 2], scale_pair(sum_scale[i / 2], scale_select));
            const Pairs    k      = decode_word(key[i], scale_pair(key_scale[i], select));
            store(cell_first + i, word, add_pairs(s, k), decode_word(value[i], scale_pair(value_scale[i], select)));
        }
        if (exact) {
#pragma unroll 1
            for (int i = cell_first; i < cell_first + cells; ++i) {
                const int cell = tile * BC + i, from = cell < p.n_kv ? p.cell_src[cell] : kSrcHidden;
                if (from != kSrcFar) {
                    ExactWord k, v;
                    k.load(p, p.near_k, p.cur_half_k, from, head, D, word);
                    v.load(p, p.near_v, p.cur_half_v, from, head, D, word);
                    store(i, word, k.pairs(), v.pairs());
                }
            }
        }
    }
};

// grid: x block of columns, y KV head from head0 on, z split of the cells. Dynamic shared memory: S::shared_bytes.
template <class S>
__global__ void __launch_bounds__(S::threads, 1) attend_prefill(const __grid_constant__ AttendParams p) {
    constexpr int     D = S::D, BC = S::BC, NS = BC / 8, NO = D / 8, KS = D / 16;
    extern __shared__ __align__(16) half shared_rows[];

    const int       lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int       head = p.head0 + blockIdx.y, row0 = blockIdx.x * S::rows;
    const int       n_tiles = (p.n_kv + BC - 1) / BC, per = (n_tiles + p.n_split - 1) / p.n_split;
    const int       tile0 = blockIdx.z * per, tile1 = min(n_tiles, tile0 + per);
    const uint8_t * flags = p.tile_flags + blockIdx.x * n_tiles;

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

    TileLoader<D, BC, S::threads, S::COARSE> loader(p, head, threadIdx.x);

    auto decode = [&](int which, int stage) {
        half * keys = shared_rows + stage * 2 * S::tile_halves;
        loader.decode(which, flags[which] & kTileExact, [&](int cell, int word, const Pairs & k, const Pairs & v) {
            store_pairs(keys + cell * S::stride + 8 * word, k);
            store_pairs(keys + S::tile_halves + cell * S::stride + 8 * word, v);
        });
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
            rows.mask_scores(p, lane, tile * BC, s);
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

    int tile = next_seen(flags, tile0, tile1), next = next_seen(flags, tile + 1, tile1);
    if (tile < tile1) {
        loader.request(tile);
        decode(tile, 0);
        loader.request(min(next, tile1 - 1));
    }
    __syncthreads();
    // Between two barriers every warp attends one tile and decodes the next. Half of the warps, two of them on every scheduler
    // of the multiprocessor, decode first, so that the tensor cores and the other pipelines are busy at the same time.
    const bool decode_first = S::stages == 2 && (warp & 4) != 0;
    for (int stage = 0; tile < tile1; stage ^= S::stages - 1) {
        const bool masked     = flags[tile] & kTileMasked;
        const int  after_next = next_seen(flags, next + 1, tile1);
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            if ((turn == 0) != decode_first) {
                attend(tile, stage, masked);
            } else {
                if (S::stages == 1) {
                    __syncthreads();
                }
                if (next < tile1) {
                    decode(next, stage ^ (S::stages - 1));
                    loader.request(min(after_next, tile1 - 1));
                }
            }
        }
        __syncthreads();
        tile = next;
        next = after_next;
    }
    sums.write(p, rows, lane, blockIdx.z);
}

}  // namespace device
}  // namespace kvfold
