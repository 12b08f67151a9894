// Attention of a few queries over many cells: one block works on one KV head, one share ("split") of the cells and all
// query heads of the group, on tensor cores, with the FP4 rows decoded in registers.
//
// Every warp walks over tiles of 32 cells with its own online softmax; the warps of a block, then the splits, are merged
// by their maxima and sums. Scores are computed transposed, keys in the 16-row dimension of the mma and the columns
// (query, head of the group) in its 8-column dimension, because there are few columns. Score tiles become the B operand of the
// value product by an 8x8 transpose.
//
// Far rows come tile by tile, as their bits in AttendArgs::far_bits say. Summaries are an extra score tile whose rows are handed
// to the keys of their groups by shuffles. Rows are copied to shared memory ahead of time: the keys of the next tile as soon as
// those of this one are done with, the values likewise. In a sparse attention a tile holds the cells of the next few groups on the
// list of the query and KV head, and a block has one query; where the list is made by the same kernel, the block attends the piece of it
// that it has made (select_device.cuh). The exact cells are a list of their own, 16 a unit of work, and go to the warps that have the
// fewest tiles.
#pragma once

#include "ops/attend_merge.cuh"
#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"
#include "ops/launch.cuh"
#include "ops/select_device.cuh"
#include "ops/warp.cuh"

#include <type_traits>

namespace kvfold {
namespace device {

constexpr int kDecodeTile = 32;  // cells a warp handles at a time

// Warps a block, which fills a multiprocessor: as many as there are registers, or shared memory, for. `nb`: blocks of 8 columns;
// `small`: with 64 KiB of shared memory; `wide`: there are many tiles, so that more warps are worth a little more set-up.
__host__ __device__ constexpr int decode_warps(int dim, int nb, bool small, bool wide) {
    return dim == 64 ? (nb == 1 ? 16 : 12) : dim == 256 ? (small ? 4 : 8) : (nb == 1 && !small) ? (wide ? 16 : 12) : 8;
}

// Current rows that a warp has room for in shared memory.
constexpr int kSharedRows = 16;

template <int D, int NB, int WARPS>
struct DecodeShape {
    static constexpr int key_words   = D / 32;  // of a key row, a thread
    static constexpr int value_words = D / 64;  // of a value row, a thread
    static constexpr int row_words   = D / kFp4BlockValues * kBlockWords;
    static constexpr int columns     = 8 * NB;
    static constexpr int warps       = WARPS;
    static constexpr int threads     = 32 * warps;
    // are there registers to load keys and values of near rows together?
    static constexpr bool early_values = warps <= 12;
    static constexpr int  q_stride =
        D + 8;  // halves of a query in shared memory; the padding spreads queries over banks
    static constexpr int acc_stride = D + 4;  // floats of a column in shared memory, likewise
    static constexpr int q_words    = columns * q_stride / 2;
    static constexpr int far_stride = FarRows<D>::stride;

    // Dynamic shared memory, words: the queries, then each warp's tile (keys, values, summaries), or what merging needs.
    static constexpr int tile_words(int group) { return (2 * kDecodeTile + kDecodeTile / group) * far_stride; }
    static constexpr int merge_words = warps * 8 * acc_stride + 8 * D;
    static_assert(kSharedRows * D / 2 + 1 <= tile_words(32), "current rows take the place of a tile");
    static constexpr int shared_bytes(int group) {
        return 4 * (q_words + (warps * tile_words(group) > merge_words ? warps * tile_words(group) : merge_words));
    }
};

// --- softmax ---------------------------------------------------------------------------------------------------------

// Running maximum and sum of the two columns a thread sees in each block of 8; the sum is of its own rows only.
template <int NB>
struct Softmax {
    float m[NB][2];
    float l[NB][2];
};

// Raising the maximum costs shuffles and a pass over the accumulators, so it waits until a score exceeds it by this much;
// weights then reach 2^8, which neither f16 nor the f32 sums mind.
constexpr float kLazyMax = 8.0f;

template <int NB, int MT>
__device__ __forceinline__ void raise_max(Softmax<NB> & sm, float (&o)[NB][MT][4], const float (&top)[NB][2]) {
    bool over = false;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        over |= top[nb][0] > sm.m[nb][0] + kLazyMax || top[nb][1] > sm.m[nb][1] + kLazyMax;
    }
    if (!__any_sync(~0u, over)) {
        return;
    }
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float x = warp_reduce<4>(fmaxf(top[nb][c], sm.m[nb][c]), Max{});
            const float f = exp2_fast(sm.m[nb][c] - x);
            sm.m[nb][c]   = x;
            sm.l[nb][c] *= f;
#pragma unroll
            for (int mt = 0; mt < MT; ++mt) {
                o[nb][mt][c] *= f;
                o[nb][mt][c + 2] *= f;
            }
        }
    }
}

// Scores of 16 keys -> weights as the B operand of the value product.
template <int NB>
__device__ __forceinline__ void weigh(Softmax<NB> & sm, const float (&s)[NB][4], uint32_t (&b)[NB][2]) {
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        const float p0 = exp2_fast(s[nb][0] - sm.m[nb][0]), p1 = exp2_fast(s[nb][1] - sm.m[nb][1]);
        const float p2 = exp2_fast(s[nb][2] - sm.m[nb][0]), p3 = exp2_fast(s[nb][3] - sm.m[nb][1]);
        sm.l[nb][0] += p0 + p2;
        sm.l[nb][1] += p1 + p3;
        b[nb][0] = transpose_8x8(pack_half2(p0, p1));
        b[nb][1] = transpose_8x8(pack_half2(p2, p3));
    }
}

// --- masks -----------------------------------------------------------------------------------------------------------

// Which cells of a tile are far, and what the first query says about cell `lane` of it, on their way.
struct TileRequest {
    uint32_t far;
    uint16_t mask;
};

__device__ __forceinline__ TileRequest request_tile(const AttendParams & p, int tile, int query0, int lane) {
    TileRequest r{0, 0};
    if (tile >= 0) {
        r.far = __ldg(p.far_bits + tile);
        if (p.mask && tile * 32 + lane < p.n_kv) {
            r.mask = __half_as_ushort(__ldg(p.mask + query0 * p.mask_stride + tile * 32 + lane));
        }
    }
    return r;
}

// What the queries of a block see of the far rows of a tile.
struct TileSight {
    uint32_t far;   // bit of each cell that some query sees
    bool     flat;  // the queries agree which cells are seen, and nothing is added to scores
};

__device__ __forceinline__ TileSight tile_sight(const AttendParams & p, const TileRequest & request, int tile,
                                                int query0, int query1, int lane) {
    TileSight s{request.far, true};
    if (p.mask) {
        bool seen = false, flat = true;
        if (request.far >> lane & 1u) {
            seen      = request.mask != 0xFC00u;
            bool zero = (request.mask & 0x7FFFu) == 0;
            for (int i = query0 + 1; i <= query1; ++i) {
                const uint16_t m = __half_as_ushort(p.mask[i * p.mask_stride + tile * 32 + lane]);
                zero &= (m & 0x7FFFu) == 0;
                seen |= m != 0xFC00u;
            }
            flat = zero || !seen;
        }
        s.far  = __ballot_sync(~0u, seen);
        s.flat = __all_sync(~0u, flat);
    }
    return s;
}

// A score after the mask, for a column (query, head of the group) of the KV head. `none`: the cell has no part in this;
// `flat`: as in TileSight. Columns from n_columns on have scores of 0, and see what the last query before them sees.
__device__ __forceinline__ float mask_score(const AttendParams & p, float score, int cell, bool none, bool flat,
                                            int column, int n_columns) {
    if (none) {
        return -INFINITY;
    }
    if (flat) {
        return score;
    }
    const float m = __half2float(p.mask[column_query(p, min(column, n_columns - 1)) * p.mask_stride + cell]);
    return m == -INFINITY ? m : column < n_columns ? score + m * kLog2E : score;
}

// --- near and current rows -------------------------------------------------------------------------------------------

// The rows of a small micro-batch, in shared memory as halves and rotated, for all warps.
constexpr int kFewRows = 2;
template <int D>
struct FewRows {
    half k[kFewRows][D], v[kFewRows][D];
};

// All of them, by the last warps first: queries keep the others busy. Can be read after a barrier.
template <int D, int WARPS>
__device__ __forceinline__ void rotate_few(const AttendParams & p, int head, FewRows<D> & to) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int i = WARPS - 1 - warp; i < 2 * p.n_current; i += WARPS) {
        const int     row    = i / 2;
        const bool    is_key = i % 2 == 0;
        const float * from   = is_key ? p.cur_k + row * p.cur_k_stride : p.cur_v + row * p.cur_v_stride;
        rotate_current<D>(is_key ? to.k[row] : to.v[row], from + head * D, 0, 1, is_key ? p.rot_k : p.rot_v, lane);
    }
}

// Entries 16 unit .. 16 unit + 15 of the list of exact cells. `few`: null where there are more rows, or they come as halves; then
// `space`: shared memory of the warp, kSharedRows rows of D halves.
template <int D, int NB, int WARPS>
__device__ __forceinline__ void attend_exact(const AttendParams & p, int head, int unit, int column0, int n_columns,
                                             const FewRows<D> * few, half * space, const uint32_t (&q)[NB][D / 32][4],
                                             Softmax<NB> & sm, float (&o)[NB][D / 16][4]) {
    using S          = DecodeShape<D, NB, WARPS>;
    constexpr int KW = S::key_words, VW = S::value_words;
    const int     lane = threadIdx.x & 31, t = lane & 3, r = lane >> 2, at = 16 * unit + (lane & 15);
    const int2    entry = at < p.n_exact ? __ldg(p.exact + at) : make_int2(0, kSrcHidden);
    if (!__any_sync(~0u, entry.y != kSrcHidden)) {
        return;
    }
    const bool    current   = __any_sync(~0u, entry.y <= kSrcCurrentBase);
    const int64_t pool_step = int64_t(p.n_head_kv) * D;
    const bool    shared = p.cur_half_k == nullptr, rotated = few != nullptr;
    ExactRows<D> keys{p.near_k + head * D, shared ? space : p.cur_half_k + head * D, pool_step, shared ? D : pool_step};
    ExactRows<D> values = keys;
    values.pool         = p.near_v + head * D;
    values.current      = shared ? space : p.cur_half_v + head * D;
    if (rotated) {
        keys.current   = few->k[0];
        values.current = few->v[0];
    }
    if (current && shared && !rotated) {
        rotate_current<D>(space, p.cur_k + head * D, p.cur_k_stride, p.n_current, p.rot_k, lane);
        __syncwarp();
    }
    Octet key[2][KW], value[4][VW];
    bool  none[2];
    int   cell[2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
        const int x = __shfl_sync(~0u, entry.y, r + 8 * u);
        cell[u]     = __shfl_sync(~0u, entry.x, r + 8 * u);
        none[u]     = x == kSrcHidden;
        load_exact<D, KW>(key[u], keys, x, t * KW, t & 1);
    }
    if (current && shared && !rotated) {
        __syncwarp();
        rotate_current<D>(space, p.cur_v + head * D, p.cur_v_stride, p.n_current, p.rot_v, lane);
        __syncwarp();
    }
    auto load_values = [&]() {
#pragma unroll
        for (int u = 0; u < 4; ++u) {  // keys 2t, 2t+1, 2t+8, 2t+9
            const int x = __shfl_sync(~0u, entry.y, 2 * t + (u & 1) + 8 * (u >> 1));
            load_exact<D, VW>(value[u], values, x, r * VW, false);
        }
    };
    if constexpr (S::early_values) {
        load_values();
    }
    float s[NB][4] = {};
    exact_key_scores<KW, NB>(s, key[0], key[1], q);
    if constexpr (!S::early_values) {
        load_values();
    }
    finish_scores(p, p.score_scale * kFp4Inverse, s);
    float top[NB][2];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            s[nb][c] = mask_score(p, s[nb][c], cell[c >> 1], none[c >> 1], p.mask == nullptr,
                                  column0 + 8 * nb + 2 * t + (c & 1), n_columns);
        }
        top[nb][0] = fmaxf(s[nb][0], s[nb][2]);
        top[nb][1] = fmaxf(s[nb][1], s[nb][3]);
    }
    raise_max<NB, 4 * VW>(sm, o, top);
    uint32_t b[NB][2];
    weigh<NB>(sm, s, b);
    add_exact_values<VW, NB>(o, value, b);
}

// Asks the first-level cache for so many bytes.
template <int BYTES>
__device__ __forceinline__ void prefetch_row(const void * row) {
#pragma unroll
    for (int i = 0; i < BYTES; i += 128) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(static_cast<const char *>(row) + i));
    }
}

// Asks the first-level cache for the rows of such a unit that are in the near pool, keys by half of the lanes and values by the other.
template <int D>
__device__ __forceinline__ void prefetch_exact(const AttendParams & p, int head, int unit) {
    const int lane = threadIdx.x & 31, at = 16 * unit + (lane & 15);
    const int src = at < p.n_exact ? __ldg(p.exact + at).y : kSrcHidden;
    if (src >= 0) {
        prefetch_row<D * sizeof(half)>((lane < 16 ? p.near_k : p.near_v) + (int64_t(src) * p.n_head_kv + head) * D);
    }
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// Which far cells are attended: all, those of lists, or those of lists that the kernel makes first.
enum class Reads { all, listed, looked_up };

// grid: x KV head, y split, z block of 8 * NB columns, or, unless everything is read, query, whose gqa columns they hold. Column c of
// a KV head is query c / gqa, head c % gqa of the group. `look`: only for Reads::looked_up. COARSE: far rows have a scale for 32 or 64
// channels.
template <int D, int NB, int WARPS, Reads READS, bool COARSE>
__device__ __forceinline__ void decode_block(const AttendParams & p, const SelectParams * look) {
    using S              = DecodeShape<D, NB, WARPS>;
    constexpr int     KW = S::key_words, VW = S::value_words, MT = 4 * VW;
    constexpr bool    SPARSE = READS != Reads::all;
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ float2                        shared_ml[S::warps][8], column_ml[8];
    __shared__ std::conditional_t<READS == Reads::looked_up, LookupShared<WARPS>, char> look_up_shared;
    __shared__ std::conditional_t<READS == Reads::looked_up, char, FewRows<D>> few_rows;

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.x, column0 = blockIdx.z * (SPARSE ? p.gqa : S::columns);
    const int n_columns = SPARSE ? column0 + p.gqa : p.n_q * p.gqa;
    const int query0 = column_query(p, column0), query1 = column_query(p, min(column0 + S::columns, n_columns) - 1);

    // Tiles are dealt out to the warps of all blocks in turn, from the first cells on: the newest cells, whose tiles hold little or nothing
    // that is far, are in the last round then, and do not let a warp with a full share of tiles wait.
    const int32_t * list     = nullptr;
    int             n_listed = 0, n_tiles = (p.n_kv + kDecodeTile - 1) / kDecodeTile;
    const int       all_warps = p.n_split * S::warps, this_warp = warp * p.n_split + int(blockIdx.y);
    // or, when the block has a piece of the list to itself, to its own warps
    const int step = READS == Reads::looked_up ? S::warps : all_warps;
    const int me   = READS == Reads::looked_up ? warp : this_warp;
    // The warp's next tile, or none.
    auto following = [&](int tile) {
        return READS == Reads::looked_up ? tile - step : tile >= 0 && tile + step < n_tiles ? tile + step : -1;
    };

    // The warp's tile in shared memory, and how it gets there. The keys and summaries of a tile are one commit, its values
    // another; keys are requested before values, so there is always one younger commit than the one waited for.
    const int        row1 = p.n_head_kv * S::row_words, in_row = head * S::row_words;  // words
    const int        n_sums = kDecodeTile >> p.group_shift;
    uint32_t * const keys   = shared + S::q_words + warp * (2 * kDecodeTile + n_sums) * S::far_stride;
    uint32_t *const values = keys + kDecodeTile * S::far_stride, *const sums = values + kDecodeTile * S::far_stride;
    const FarCopy<D>    copy(lane);
    const CoarseCopy<D> coarse{lane, p.n_head_kv, head, p.scale_shift};
    const RowPlace<KW>  key_place(t, t & 1);
    const RowPlace<VW>  value_place(r, false);
    // Lane i holds group i of a tile of a sparse attention.
    auto listed = [&](int tile) {
        const int at = tile * n_sums + lane;
        return tile >= 0 && lane < n_sums && at < n_listed ? __ldcg(list + at) : 0;
    };
    auto gathered = [&](int tile, int entry) {
        return GatheredRows<D>{p.group_shift, entry, min(kDecodeTile, (n_listed - tile * n_sums) << p.group_shift)};
    };
    // The cell of row j of a tile; -1: there is none.
    auto cell_of = [&](int tile, int entry) {
        if constexpr (SPARSE) {
            const auto rows = gathered(tile, entry);
            return [rows](int j) {
                const int cell = rows.cell(j);
                return j < rows.n ? cell : -1;
            };
        } else {
            const int cell0 = tile * kDecodeTile, n = p.n_kv - cell0;
            return [cell0, n](int j) { return j < n ? cell0 + j : -1; };
        }
    };
    auto arrived = [&](uint32_t * rows, int tile, int entry) {
        copy_wait<1>();
        if constexpr (COARSE) {
            coarse.template spread<kDecodeTile>(rows, cell_of(tile, entry));
        }
    };
    auto request_keys = [&](int tile, int entry) {
        if (tile >= 0) {
            if constexpr (COARSE) {
                coarse.template copy<kDecodeTile>(keys, p.far_k, p.far_k_scales, cell_of(tile, entry));
            }
            if constexpr (SPARSE) {
                const auto rows = gathered(tile, entry);
                if constexpr (!COARSE) {
                    rows.template copy<kDecodeTile>(copy, keys, p.far_k + in_row, row1);
                }
                rows.copy_summaries(copy, sums, p.summary + in_row, row1, n_sums);
            } else {
                const int64_t cell0 = int64_t(tile) * kDecodeTile;
                const int     n     = p.n_kv - int(cell0);
                if constexpr (!COARSE) {
                    copy.template copy<kDecodeTile>(keys, p.far_k + cell0 * row1 + in_row, row1, n);
                }
                const int        n_used = min(n_sums, (n + (1 << p.group_shift) - 1) >> p.group_shift);
                const uint32_t * from   = p.summary + (cell0 >> p.group_shift) * row1 + in_row;
                copy.template copy<8>(sums, from, row1, n_used);
                if (n_sums > 8) {
                    copy.template copy<8>(sums + 8 * S::far_stride, from + 8 * row1, row1, n_used - 8);
                }
            }
        }
        copy_commit();
    };
    auto request_values = [&](int tile, int entry) {
        if (tile >= 0) {
            if constexpr (COARSE) {
                coarse.template copy<kDecodeTile>(values, p.far_v, p.far_v_scales, cell_of(tile, entry));
            } else if constexpr (SPARSE) {
                gathered(tile, entry).template copy<kDecodeTile>(copy, values, p.far_v + in_row, row1);
            } else {
                const int64_t cell0 = int64_t(tile) * kDecodeTile;
                copy.template copy<kDecodeTile>(values, p.far_v + cell0 * row1 + in_row, row1, p.n_kv - int(cell0));
            }
        }
        copy_commit();
    };
    // The bit of this lane's cell, and what the query says about it.
    auto request_sight = [&](int tile, int entry) {
        if constexpr (SPARSE) {
            TileRequest r{0, 0};
            if (tile >= 0) {
                const auto rows = gathered(tile, entry);
                const int  cell = rows.cell(lane);
                if (lane < rows.n) {
                    r.far  = __ldg(p.far_bits + cell / 32) >> (cell % 32) & 1u;
                    r.mask = p.mask ? __half_as_ushort(__ldg(p.mask + query0 * p.mask_stride + cell)) : uint16_t(0);
                }
            }
            return r;
        } else {
            return request_tile(p, tile, query0, lane);
        }
    };
    auto sight_of = [&](const TileRequest & request, int tile) {
        if constexpr (SPARSE) {
            return TileSight{__ballot_sync(~0u, request.far != 0 && request.mask != 0xFC00u),
                             bool(__all_sync(~0u, (request.mask & 0x7FFFu) == 0 || request.mask == 0xFC00u))};
        } else {
            return tile_sight(p, request, tile, query0, query1, lane);
        }
    };

    uint32_t    q[NB][KW][4];
    float       o[NB][MT][4] = {};
    Softmax<NB> sm;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        sm.m[nb][0] = sm.m[nb][1] = kNoScore;
        sm.l[nb][0] = sm.l[nb][1] = 0.0f;
    }

    const FewRows<D> * few             = nullptr;
    auto               prepare_queries = [&]() {
        if constexpr (READS != Reads::looked_up) {
            if (p.cur_half_k == nullptr && p.n_current <= kFewRows) {
                rotate_few<D, WARPS>(p, head, few_rows);
                few = &few_rows;
            }
        }
        half * q_rows = reinterpret_cast<half *>(shared);
#pragma unroll 1
        for (int j = warp; j < S::columns; j += S::warps) {
            const int column = column0 + j, query = column_query(p, column), h = head * p.gqa + column - query * p.gqa;
            const float * from = p.q + query * p.q_stride_query + h * p.q_stride_head;
            float         x[D / 32];
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                x[i] = column < n_columns ? from[lane + 32 * i] * p.q_scale : 0.0f;
            }
            rotate_row(x, p.rot_k, lane);
            store_query<D>(q_rows + j * S::q_stride, x, lane);
        }
        __syncthreads();
        load_queries<KW>(q, q_rows, S::q_stride, lane);
    };
    // The warp's units of exact cells; the last warps begin, which may have a tile less. Rows of the micro-batch, unless they are few, take
    // the place of the tile, with 8-byte alignment.
    const int first_unit   = all_warps - 1 - this_warp;
    auto      attend_units = [&]() {
        half * const space = reinterpret_cast<half *>(keys + ((keys - shared) & 1));
#pragma unroll 1
        for (int unit = first_unit, n_units = (p.n_exact + 15) / 16; unit < n_units; unit += all_warps) {
            attend_exact<D, NB, WARPS>(p, head, unit, column0, n_columns, few, space, q, sm, o);
        }
    };

    int         tile, after, entry = 0, next_entry = 0;
    bool        all_taken = false;  // by a look-up
    TileRequest request;
    if constexpr (READS == Reads::looked_up) {
        static_assert(S::q_stride == LookupShape<D, NB, WARPS>::q_stride && kPieceCells == kDecodeTile);
        const ListPiece piece = look_up<D, NB, WARPS>(*look, shared, look_up_shared, q);
        list                  = piece.list;
        n_listed              = piece.n;
        n_tiles               = piece.n_tiles;
        all_taken             = piece.all_taken;
        tile                  = n_tiles - 1 - me;
        after                 = tile - step;
        entry                 = listed(tile);
        next_entry            = listed(after);
        request               = request_sight(tile, entry);
        request_keys(tile, entry);
        request_values(tile, entry);
        if (p.stands_in) {
            tell_read<WARPS>(*look, blockIdx.z * p.n_head_kv + head, piece, look_up_shared);
        }
    } else if constexpr (SPARSE) {
        // Where the look-up is what ran before, everything but its result can be read while it is still at work.
        if (!p.after_lookup) {
            wait_for_earlier();
        }
        prepare_queries();
        attend_units();
        __syncwarp();
        if (p.after_lookup) {
            wait_for_earlier();
        }
        list              = p.selected + (int64_t(blockIdx.z) * p.n_head_kv + head) * p.list_stride;
        const int at      = 1 + me * n_sums + lane;
        const int perhaps = lane < n_sums && at < p.list_stride ? __ldcg(list + at) : 0;
        n_listed          = __ldcg(list++);
        n_tiles           = ((n_listed << p.group_shift) + kDecodeTile - 1) / kDecodeTile;
        tile              = me < n_tiles ? me : -1;
        after             = following(tile);
        entry             = at <= n_listed ? perhaps : 0;
        next_entry        = listed(after);
        request           = request_sight(tile, entry);
        request_keys(tile, entry);
        request_values(tile, entry);
    } else {
        // far rows, plan and mask are older than the kernels that may still be running
        tile    = me < n_tiles ? me : -1;
        after   = following(tile);
        request = request_sight(tile, entry);
        request_keys(tile, entry);
        request_values(tile, entry);
        // The near pool is older, too; at the beginning of a context its rows take longer to come than all the rest.
        prefetch_exact<D>(p, head, first_unit);
        wait_for_earlier();
        prepare_queries();
    }

    // Where warps have several tiles, exact cells are attended while the first is on its way, or else all would wait for the few warps that
    // have them. With one tile they are the longest way, and what they need comes while the tile is worked on. (At head size 256 there are
    // too few warps to have tiles on their way meanwhile; and rows of the micro-batch must not take the place of a tile.)
    bool       exact_left = READS != Reads::listed;
    const bool exact_before_tile =
        READS == Reads::all && D < 256 && after >= 0 && (few != nullptr || p.cur_half_k != nullptr);
    for (;; tile = after, after = following(after)) {
        if (tile < 0) {
            copy_wait<0>();
        }
        if (exact_left && (exact_before_tile || tile < 0)) {
            attend_units();
            exact_left = false;
        }
        if (tile < 0) {
            break;
        }
        const int       cell0 = tile * kDecodeTile;
        const TileSight sight = sight_of(request, tile);
        request               = request_sight(after, next_entry);
        const uint32_t others = ~sight.far;
        if (!SPARSE && others == ~0u) {
            copy_wait<0>();  // or else a slow copy could meet the next
            request_keys(after, next_entry);
            request_values(after, next_entry);
            continue;
        }

        float s[2][NB][4] = {}, sg[NB][4] = {}, sg_upper[NB][4] = {};
        arrived(keys, tile, entry);
        tile_scores<D, NB>(s, sg, keys + r * S::far_stride, sums + min(r, n_sums - 1) * S::far_stride, key_place, q);
        if (n_sums > 8) {
            summary_scores<D, NB>(sg_upper, sums + (8 + r) * S::far_stride, key_place, q);
        }
        __syncwarp();
        request_keys(after, next_entry);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int  from0 = (((16 * i + r) >> p.group_shift) & 7) << 2 | t;
            const int  from1 = (((16 * i + r + 8) >> p.group_shift) & 7) << 2 | t;
            const bool upper = i == 1 && p.group_shift == 1;  // groups 8..15
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const float g0 = upper ? sg_upper[nb][0] : sg[nb][0], g1 = upper ? sg_upper[nb][1] : sg[nb][1];
                s[i][nb][0] += __shfl_sync(~0u, g0, from0);
                s[i][nb][1] += __shfl_sync(~0u, g1, from0);
                s[i][nb][2] += __shfl_sync(~0u, g0, from1);
                s[i][nb][3] += __shfl_sync(~0u, g1, from1);
            }
        }
        finish_scores(p, p.score_scale * kFp4Inverse, s[0]);
        finish_scores(p, p.score_scale * kFp4Inverse, s[1]);
        if (others != 0 || !sight.flat) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int j    = 16 * i + r + 8 * (c >> 1);
                        const int cell = SPARSE ? gathered(tile, entry).cell(j) : cell0 + j;
                        s[i][nb][c]    = mask_score(p, s[i][nb][c], cell, others >> j & 1u, sight.flat,
                                                    column0 + 8 * nb + 2 * t + (c & 1), n_columns);
                    }
                }
            }
        }
        float top[NB][2];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            top[nb][0] = fmaxf(fmaxf(s[0][nb][0], s[0][nb][2]), fmaxf(s[1][nb][0], s[1][nb][2]));
            top[nb][1] = fmaxf(fmaxf(s[0][nb][1], s[0][nb][3]), fmaxf(s[1][nb][1], s[1][nb][3]));
        }
        raise_max<NB, MT>(sm, o, top);
        uint32_t b[2][NB][2];
        weigh<NB>(sm, s[0], b[0]);
        weigh<NB>(sm, s[1], b[1]);
        arrived(values, tile, entry);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            add_values<D, NB>(o, values + 16 * i * S::far_stride, others >> (16 * i), t, value_place, b[i]);
        }
        __syncwarp();
        request_values(after, next_entry);
        if constexpr (SPARSE) {
            entry      = next_entry;
            next_entry = listed(following(after));
        }
    }
    __syncthreads();  // what follows uses the memory of the tiles
    let_next_begin();

    // Merge the warps: accumulators are brought to a common maximum, then added up. A column that belongs to
    // nobody has scores of 0, so its weights are 1: where the mean value stands in for something, the first of them is its sum.
    const bool stands_in = SPARSE && p.stands_in;
    const int  n_heads = min(S::columns, n_columns - column0), n_own = n_heads + (stands_in ? 1 : 0);
    const auto part_row = [&](int j, int query, int h) {
        return j < n_heads ? query * p.n_head + h : mean_row(p, query0, head);
    };
    float * const acc  = reinterpret_cast<float *>(shared + S::q_words);  // [warp][column][channel: index, r]
    float * const only = acc + S::warps * 8 * S::acc_stride;              // [column][channel], of the only split
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        const int n_here = min(8, n_own - 8 * nb);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            sm.l[nb][c] = warp_reduce<4>(sm.l[nb][c], Sum{});
        }
        if (r == 0) {
            shared_ml[warp][2 * t]     = make_float2(sm.m[nb][0], sm.l[nb][0]);
            shared_ml[warp][2 * t + 1] = make_float2(sm.m[nb][1], sm.l[nb][1]);
        }
        __syncthreads();
#pragma unroll 1
        for (int j = warp; j < n_here; j += S::warps) {
            const float2 x   = lane < S::warps ? shared_ml[lane][j] : make_float2(kNoScore, 0.0f);
            const float  top = warp_reduce(x.x, Max{}), f = exp2_fast(x.x - top), l = warp_reduce(f * x.y, Sum{});
            if (lane < S::warps) {
                shared_ml[lane][j].x = f;
            }
            if (lane == 0) {
                column_ml[j] = make_float2(top, l);
            }
        }
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int j = 2 * t + c;
            if (j < n_here) {
                const float own = shared_ml[warp][j].x;
                float *     to  = acc + (warp * 8 + j) * S::acc_stride + r;
#pragma unroll
                for (int i = 0; i < MT; ++i) {
                    to[8 * (2 * i)]     = o[nb][i][c] * own;
                    to[8 * (2 * i + 1)] = o[nb][i][c + 2] * own;
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int e = threadIdx.x; e < n_here * D; e += S::threads) {
            const int j = e / D, place = e % D, d = value_channel<D>(place % 8, place / 8);
            float     total = 0.0f;
#pragma unroll
            for (int i = 0; i < S::warps; ++i) {
                total += acc[(i * 8 + j) * S::acc_stride + place];
            }
            if (p.n_split == 1) {
                only[j * D + d] = total;
            } else {
                const int    column = column0 + 8 * nb + j, query = column_query(p, column);
                const int    h     = head * p.gqa + column - query * p.gqa;
                const size_t at    = size_t(blockIdx.y) * p.part_rows + part_row(8 * nb + j, query, h);
                p.part[at * D + d] = total;
                if (place == 0) {
                    p.part_ml[at] = column_ml[j];
                }
            }
        }
        __syncthreads();
        if (p.n_split == 1) {
#pragma unroll 1
            for (int j = warp; j < n_here; j += S::warps) {
                const int column = column0 + 8 * nb + j, query = column_query(p, column);
                float     total[D / 32];
#pragma unroll
                for (int i = 0; i < D / 32; ++i) {
                    total[i] = only[j * D + lane + 32 * i];
                }
                write_output<D>(p, query, head * p.gqa + column - query * p.gqa, total, column_ml[j], lane);
            }
        }
    }
    if (p.n_split == 1) {
        return;
    }
    if (p.arrival_slot < 0) {
        return;
    }

    // The last block of these columns to get here merges the splits.
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        uint32_t * arrivals = &split_arrivals[p.arrival_slot][blockIdx.z * gridDim.x + head];
        last                = atomicInc(arrivals, p.n_split - 1) == p.n_split - 1;  // goes back to 0 by itself
        if (READS == Reads::looked_up && last) {
            leave_meetings(*look, blockIdx.z * gridDim.x + head);
        }
    }
    __syncthreads();
    if (!last) {
        return;
    }
    __threadfence();
    const int shares = max(1, S::warps / n_own);  // warps that share a column
    for (int i = warp; i < shares * n_own; i += S::warps) {
        const int    column = column0 + i % n_own, query = column_query(p, column);
        const int    row = part_row(i % n_own, query, head * p.gqa + column - query * p.gqa);
        const float2 ml  = merge_splits<D>(p, row, p.part_rows, i / n_own, shares, acc + i * D, lane);
        if (lane == 0) {
            (&shared_ml[0][0])[i] = ml;
        }
    }
    __syncthreads();
    const auto add_shares = [&](int j, float (&total)[D / 32]) {
        float l = 0.0f;
        for (int i = j; i < shares * n_own; i += n_own) {
#pragma unroll
            for (int c = 0; c < D / 32; ++c) {
                total[c] += acc[i * D + lane + 32 * c];
            }
            l += (&shared_ml[0][0])[i].y;
        }
        return make_float2((&shared_ml[0][0])[j].x, l);
    };
    for (int j = warp; j < n_heads; j += S::warps) {
        const int column = column0 + j, query = column_query(p, column), h = head * p.gqa + column - query * p.gqa;
        float     total[D / 32] = {};
        float2    ml            = add_shares(j, total);
        if (stands_in) {
            float        mean[D / 32] = {};
            const float2 n            = add_shares(n_heads, mean);
            float        unread;
            if constexpr (READS == Reads::looked_up) {
                unread = unread_mass(*look, blockIdx.z * p.n_head_kv + head, j, look_up_shared.log_sum[j], all_taken);
            } else {
                unread = p.unread[query * p.n_head + h] * kLog2E;
            }
            add_stand_in(total, ml, unread, mean, n.y);
        }
        write_output<D>(p, query, h, total, ml, lane);
    }
}

template <int D, int NB, int WARPS, bool SPARSE, bool COARSE>
__global__ void __launch_bounds__(DecodeShape<D, NB, WARPS>::threads, 1)
    attend_decode(const __grid_constant__ AttendParams p) {
    decode_block<D, NB, WARPS, SPARSE ? Reads::listed : Reads::all, COARSE>(p, nullptr);
}

// Look-up and attention; all blocks must be at work together, and merge in the kernel.
template <int D, int NB, int WARPS>
__global__ void __launch_bounds__(DecodeShape<D, NB, WARPS>::threads, 1)
    attend_looked_up(const __grid_constant__ AttendParams p, const __grid_constant__ SelectParams look) {
    decode_block<D, NB, WARPS, Reads::looked_up, false>(p, &look);
}

}  // namespace device
}  // namespace kvfold
