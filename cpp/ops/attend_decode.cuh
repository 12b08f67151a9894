// Attention of a few queries over many cells: one block works on one KV head, one share ("split") of the cells and all
// query heads of the group, on tensor cores, with the FP4 rows decoded in registers.
//
// Every warp walks over tiles of 32 cells with its own online softmax; the warps of a block, then the splits, are merged
// by their maxima and sums. Scores are computed transposed, keys in the 16-row dimension of the mma and the columns
// (query, head of the group) in its 8-column dimension, because there are few columns. The order of the channels in a dot
// product is free: each thread takes one contiguous piece of a key row, and the queries are permuted to match. Score tiles
// become the B operand of the value product by an 8x8 transpose; value words of two keys are interleaved before decoding, so
// that pairs run along keys.
//
// A tile without near or current rows takes the fast path. Its summaries are an extra score tile whose rows are handed to the
// keys of their groups by shuffles. Any other tile is first written to shared memory as f16 rows, 16 at a time.
#pragma once

#include "ops/attend_params.cuh"

namespace kvfold {
namespace device {

constexpr int kDecodeWarps = 4;
constexpr int kDecodeTile  = 32;  // cells a warp handles at a time

// Blocks a multiprocessor is meant to hold; registers are limited accordingly. `nb`: blocks of 8 columns.
#ifndef KVFOLD_DECODE_BLOCKS
#define KVFOLD_DECODE_BLOCKS 4
#endif
__host__ __device__ constexpr int decode_blocks_sm(int dim, int nb) {
    return dim == 256 ? 2 : nb == 1 ? KVFOLD_DECODE_BLOCKS : 3;
}

template <int D, int NB>
struct DecodeShape {
    static constexpr int key_words   = D / 32;  // of a key row, a thread
    static constexpr int value_words = D / 64;  // of a value row, a thread
    static constexpr int row_words   = D / kFp4BlockValues * kBlockWords;
    static constexpr int columns     = 8 * NB;
    static constexpr int stage_row   = D + 8;  // halves; the padding spreads rows over banks
    static constexpr int stage_bytes = kDecodeWarps * 16 * stage_row * 2;
    static constexpr int merge_bytes = kDecodeWarps * 8 * D * 4;
    static constexpr int shared      = stage_bytes > merge_bytes ? stage_bytes : merge_bytes;
};

// --- far rows in registers -------------------------------------------------------------------------------------------

// A thread's share of a row: words t * W .. t * W + W - 1 and their scales, the first in the low byte.
template <int W>
struct RowWords {
    uint32_t w[W];
    uint32_t scales;
};

// Where that share is in any row: the word of scales, how far from it the values are, the bits before the first scale.
template <int W>
struct RowPlace {
    int        scales, values, shift;
    __device__ __forceinline__ explicit RowPlace(int t)
        : scales(t * W / 8 * kBlockWords), values(1 + (t * W & 7)), shift(8 * ((t * W / 2) & 3)) {}
};

// `scales`: that word of the row.
template <int W>
__device__ __forceinline__ RowWords<W> load_row(const uint32_t * scales, const RowPlace<W> & place) {
    const uint32_t * values = scales + place.values;
    RowWords<W>      k;
    k.scales = load_word(scales) >> place.shift;
#pragma unroll
    for (int i = 0; i < W; ++i) {
        k.w[i] = load_word(values + i);
    }
    return k;
}

// s[nb] += rows `lo` (mma rows 0..7) and `hi` (8..15; taken as zero without HI) times the queries.
template <int W, int NB, bool HI>
__device__ __forceinline__ void key_scores(float (&s)[NB][4], const RowWords<W> & lo, const RowWords<W> & hi,
                                           const uint32_t (&q)[NB][W][4]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        const uint32_t sl = scale_pair(lo.scales >> (8 * (w / 2))),
                       sh = HI ? scale_pair(hi.scales >> (8 * (w / 2))) : 0u;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const uint32_t a0 = mul_half2(fp4_pair(lo.w[w] << (8 * j)), sl);
            const uint32_t a2 = mul_half2(fp4_pair(lo.w[w] << (8 * j + 4)), sl);
            const uint32_t a1 = HI ? mul_half2(fp4_pair(hi.w[w] << (8 * j)), sh) : 0u;
            const uint32_t a3 = HI ? mul_half2(fp4_pair(hi.w[w] << (8 * j + 4)), sh) : 0u;
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(s[nb], a0, a1, a2, a3, q[nb][w][2 * j], q[nb][w][2 * j + 1]);
            }
        }
    }
}

// Value rows are shared out the same way, over the 8 values of r: words r * W ...
// Channel of the `index`-th (0 .. D/8 - 1) value accumulated by threads of quad r.
template <int D>
__device__ __forceinline__ int value_channel(int r, int index) {
    const int word = r * (D / 64) + index / 8, nibble = index % 8;
    return (word >> 1) * 16 + 4 * (word & 1) + (nibble >> 1) + 8 * (nibble & 1);
}

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
            float x = fmaxf(top[nb][c], sm.m[nb][c]);
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
            }
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

// --- rows of any kind, through shared memory -------------------------------------------------------------------------

// A lane's share of a row in natural order: channels lane * D/32 ..., as halves.
template <int D>
struct Slice {
    static constexpr int words = D / 64;
    uint32_t             w[words];
};

// The same share of a far row, undecoded.
template <int D>
struct FarSlice {
    static constexpr int words = D == 256 ? 2 : 1;
    uint32_t             w[words];
    uint32_t             scale;
};

template <int D>
__device__ __forceinline__ FarSlice<D> load_far_slice(const uint32_t * row, int lane) {
    const int channel = lane * (D / 32), sub = channel >> 4, word = D == 256 ? 2 * sub : 2 * sub + ((channel >> 2) & 1);
    const uint32_t * block = row + (word >> 3) * kBlockWords;
    FarSlice<D>      f;
    f.scale = load_word(block) >> (8 * (sub & 3));
#pragma unroll
    for (int i = 0; i < FarSlice<D>::words; ++i) {
        f.w[i] = load_word(block + 1 + (word & 7) + i);
    }
    return f;
}

// Decoded, times kFp4Unit.
template <int D>
__device__ __forceinline__ Slice<D> decode_far_slice(const FarSlice<D> & f, int lane) {
    const int      channel = lane * (D / 32);
    const bool     high    = channel & 8;
    const uint32_t scale   = scale_pair(f.scale);
    Slice<D>       s;
#pragma unroll
    for (int i = 0; i < FarSlice<D>::words; ++i) {
        const uint32_t x    = high ? f.w[i] : f.w[i] << 4;
        const uint32_t odd  = mul_half2(fp4_pair(x), scale);       // bytes 1, 3
        const uint32_t even = mul_half2(fp4_pair(x << 8), scale);  // bytes 0, 2
        const uint32_t lo = __byte_perm(even, odd, 0x5410), hi = __byte_perm(even, odd, 0x7632);
        if (D == 64) {
            s.w[0] = channel & 2 ? hi : lo;
        } else {
            s.w[2 * i]                         = lo;
            s.w[(2 * i + 1) % Slice<D>::words] = hi;
        }
    }
    return s;
}

__device__ __forceinline__ uint32_t add_keys(uint32_t summary, uint32_t difference) {
    const float2 a = __half22float2(*reinterpret_cast<const half2 *>(&summary));
    const float2 b = __half22float2(*reinterpret_cast<const half2 *>(&difference));
    return pack_half2((a.x + b.x) * kFp4Inverse, (a.y + b.y) * kFp4Inverse);
}

template <int D>
__device__ __forceinline__ void store_slice(half * row, int lane, const Slice<D> & s) {
    uint32_t * to = reinterpret_cast<uint32_t *>(row) + lane * Slice<D>::words;
    if constexpr (D == 64) {
        to[0] = s.w[0];
    } else if constexpr (D == 128) {
        *reinterpret_cast<uint2 *>(to) = make_uint2(s.w[0], s.w[1]);
    } else {
        *reinterpret_cast<uint4 *>(to) = make_uint4(s.w[0], s.w[1], s.w[2], s.w[3]);
    }
}

// Writes 16 rows, those of cells cell0 .. cell0 + 15, to `stage`: keys in true units (summary + difference), values times
// kFp4Unit. `src` is the source of cell (cell0 & ~31) + lane; hidden rows become zeros. The whole warp calls.
//
// Not inlined: its loads in flight would otherwise cost registers on the fast path.
template <int D, bool KEYS>
__device__ __forceinline__ void stage_rows(const AttendParams & p, int head, int cell0, int src, half * stage,
                                           int stage_row) {
    constexpr int  batch = D == 256 ? 4 : 8;  // rows whose loads are in flight together
    const int      lane = threadIdx.x & 31, first = cell0 & 16;
    constexpr int  row_words = D / kFp4BlockValues * kBlockWords;
    const half *   pool      = KEYS ? p.near_k : p.near_v;
    const float *  cur       = KEYS ? p.cur_k : p.cur_v;
    const int64_t  cur_row   = KEYS ? p.cur_k_stride : p.cur_v_stride;
    const uint32_t in_pool = __ballot_sync(~0u, src >= 0), in_far = __ballot_sync(~0u, src == kSrcFar);
#pragma unroll 1
    for (int b = 0; b < 16; b += batch) {
        const uint32_t mine = ((1u << batch) - 1u) << (first + b);
        if (in_pool & mine) {
            Slice<D> s[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int row = __shfl_sync(~0u, src, first + b + i);
                if (row >= 0) {
                    const uint32_t * from =
                        reinterpret_cast<const uint32_t *>(pool + (size_t(row) * p.n_head_kv + head) * D) +
                        lane * Slice<D>::words;
                    if constexpr (D == 64) {
                        s[i].w[0] = from[0];
                    } else if constexpr (D == 128) {
                        const uint2 x = *reinterpret_cast<const uint2 *>(from);
                        s[i].w[0] = x.x, s[i].w[1] = x.y;
                    } else {
                        const uint4 x = *reinterpret_cast<const uint4 *>(from);
                        s[i].w[0] = x.x, s[i].w[1] = x.y, s[i].w[2] = x.z, s[i].w[3] = x.w;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (in_pool >> (first + b + i) & 1u) {
#pragma unroll
                    for (int w = 0; w < Slice<D>::words && !KEYS; ++w) {
                        s[i].w[w] = mul_half2(s[i].w[w], 0x24002400u);  // 2^-6
                    }
                    store_slice<D>(stage + (b + i) * stage_row, lane, s[i]);
                }
            }
        }
        if (in_far & mine) {
            FarSlice<D> f[batch], g[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (in_far >> (first + b + i) & 1u) {
                    const int cell = cell0 + b + i;
                    f[i]           = load_far_slice<D>(
                        (KEYS ? p.far_k : p.far_v) + (size_t(cell) * p.n_head_kv + head) * row_words, lane);
                    if (KEYS) {
                        g[i] = load_far_slice<D>(
                            p.summary + (size_t(cell >> p.group_shift) * p.n_head_kv + head) * row_words, lane);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                if (in_far >> (first + b + i) & 1u) {
                    Slice<D> s = decode_far_slice<D>(f[i], lane);
                    if (KEYS) {
                        const Slice<D> base = decode_far_slice<D>(g[i], lane);
#pragma unroll
                        for (int w = 0; w < Slice<D>::words; ++w) {
                            s.w[w] = add_keys(base.w[w], s.w[w]);
                        }
                    }
                    store_slice<D>(stage + (b + i) * stage_row, lane, s);
                }
            }
        }
        if (mine & ~(in_pool | in_far)) {  // current, hidden
#pragma unroll 1
            for (int i = 0; i < batch; ++i) {
                const int row = __shfl_sync(~0u, src, first + b + i);
                if (row >= 0 || row == kSrcFar) {
                    continue;
                }
                Slice<D> s;
#pragma unroll
                for (int w = 0; w < Slice<D>::words; ++w) {
                    s.w[w] = 0;
                    if (row <= kSrcCurrentBase) {
                        const float * from =
                            cur + int64_t(kSrcCurrentBase - row) * cur_row + head * D + lane * (D / 32) + 2 * w;
                        const float f = KEYS ? 1.0f : kFp4Unit;
                        s.w[w]        = pack_half2(from[0] * f, from[1] * f);
                    }
                }
                store_slice<D>(stage + (b + i) * stage_row, lane, s);
            }
        }
    }
    __syncwarp();
}

// The two words that hold channels base .. base+3 of a staged row and the two for base+8 .. base+11, for word `word` of a row.
struct Octet {
    uint32_t a, b, c, d;
};

__device__ __forceinline__ Octet staged_octet(const half * row, int word) {
    const half * from = row + (word >> 1) * 16 + 4 * (word & 1);
    const uint2  x = *reinterpret_cast<const uint2 *>(from), y = *reinterpret_cast<const uint2 *>(from + 8);
    return {x.x, x.y, y.x, y.y};
}

template <int W, int NB>
__device__ __forceinline__ void staged_key_scores(float (&s)[NB][4], const half * stage, int stage_row, int r, int t,
                                                  const uint32_t (&q)[NB][W][4]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        const Octet lo = staged_octet(stage + r * stage_row, t * W + w),
                    hi = staged_octet(stage + (r + 8) * stage_row, t * W + w);
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
            mma_16x8x16(s[nb], __byte_perm(lo.c, lo.d, 0x7632), __byte_perm(hi.c, hi.d, 0x7632),
                        __byte_perm(lo.a, lo.b, 0x7632), __byte_perm(hi.a, hi.b, 0x7632), q[nb][w][0], q[nb][w][1]);
            mma_16x8x16(s[nb], __byte_perm(lo.c, lo.d, 0x5410), __byte_perm(hi.c, hi.d, 0x5410),
                        __byte_perm(lo.a, lo.b, 0x5410), __byte_perm(hi.a, hi.b, 0x5410), q[nb][w][2], q[nb][w][3]);
        }
    }
}

template <int W, int NB>
__device__ __forceinline__ void staged_values(float (&o)[NB][4 * W][4], const half * stage, int stage_row, int r, int t,
                                              const uint32_t (&b)[NB][2]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        Octet k[4];
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            k[u] = staged_octet(stage + (2 * t + (u & 1) + 8 * (u >> 1)) * stage_row, r * W + w);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // nibbles 2i and 2i+1 of the word
            const uint32_t sel = i & 1 ? 0x7632 : 0x5410;
            const uint32_t a0  = i < 2 ? __byte_perm(k[0].a, k[1].a, sel) : __byte_perm(k[0].b, k[1].b, sel);
            const uint32_t a1  = i < 2 ? __byte_perm(k[0].c, k[1].c, sel) : __byte_perm(k[0].d, k[1].d, sel);
            const uint32_t a2  = i < 2 ? __byte_perm(k[2].a, k[3].a, sel) : __byte_perm(k[2].b, k[3].b, sel);
            const uint32_t a3  = i < 2 ? __byte_perm(k[2].c, k[3].c, sel) : __byte_perm(k[2].d, k[3].d, sel);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                mma_16x8x16(o[nb][4 * w + i], a0, a1, a2, a3, b[nb][0], b[nb][1]);
            }
        }
    }
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// What the queries of a block say about the cells of a tile; cell `lane` of it belongs to this lane.
struct TileSight {
    int      src;     // kSrcHidden also for a cell that no query sees
    uint32_t hidden;  // bit of each such cell
    bool     plain;   // every cell is seen by every query, with nothing added to its scores
};

__device__ __forceinline__ TileSight tile_sight(const AttendParams & p, int cell, int query0, int query1) {
    TileSight s;
    s.src      = cell < p.n_kv ? p.cell_src[cell] : kSrcHidden;
    bool plain = s.src != kSrcHidden;
    if (p.mask && plain) {
        bool seen = false;
        for (int i = query0; i <= query1; ++i) {
            const uint16_t m = __half_as_ushort(p.mask[i * p.mask_stride + cell]);
            plain &= (m & 0x7FFFu) == 0;
            seen |= m != 0xFC00u;
        }
        s.src = seen ? s.src : kSrcHidden;
    }
    s.hidden = __ballot_sync(~0u, s.src == kSrcHidden);
    s.plain  = __all_sync(~0u, plain);
    return s;
}

// A score after the mask, for a column (query, head of the group) of the KV head.
__device__ __forceinline__ float mask_score(const AttendParams & p, float score, int cell, bool hidden, int column) {
    if (hidden || column >= p.n_q * p.gqa) {
        return -INFINITY;
    }
    if (!p.mask) {
        return score;
    }
    const float m = __half2float(p.mask[(column / p.gqa) * p.mask_stride + cell]);
    return m == -INFINITY ? m : score + m * kLog2E;
}

// O^T += V^T W^T for 16 keys whose value words are in registers; `b` are their weights.
template <int W, int NB>
__device__ __forceinline__ void add_values(float (&o)[NB][4 * W][4], const RowWords<W> (&value)[4],
                                           const uint32_t (&b)[NB][2]) {
#pragma unroll
    for (int w = 0; w < W; ++w) {
        uint32_t scale[2];  // of keys 2t, 2t+1 and 2t+8, 2t+9
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            const uint32_t sel = w < 2 ? 0x0400 : 0x0501;  // byte w / 2 of each
            scale[u] = (__byte_perm(value[2 * u].scales, value[2 * u + 1].scales, sel) & 0x00FF00FFu) << 7;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t sel = h ? 0x7632 : 0x5410;
            const uint32_t x   = __byte_perm(value[0].w[w], value[1].w[w], sel);
            const uint32_t y   = __byte_perm(value[2].w[w], value[3].w[w], sel);
#pragma unroll
            for (int e = 0; e < 2; ++e) {  // nibbles 4h + 2e and 4h + 2e + 1
                const uint32_t a0 = mul_half2(fp4_pair(x << (12 - 8 * e)), scale[0]);
                const uint32_t a1 = mul_half2(fp4_pair(x << (8 - 8 * e)), scale[0]);
                const uint32_t a2 = mul_half2(fp4_pair(y << (12 - 8 * e)), scale[1]);
                const uint32_t a3 = mul_half2(fp4_pair(y << (8 - 8 * e)), scale[1]);
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
                    mma_16x8x16(o[nb][4 * w + 2 * h + e], a0, a1, a2, a3, b[nb][0], b[nb][1]);
                }
            }
        }
    }
}

// grid: x KV head, y split, z block of 8 * NB columns. Column c of a KV head is query c / gqa, head c % gqa of the group.
template <int D, int NB>
__global__ void __launch_bounds__(32 * kDecodeWarps, decode_blocks_sm(D, NB))
    attend_decode(const __grid_constant__ AttendParams p) {
    using S          = DecodeShape<D, NB>;
    constexpr int KW = S::key_words, VW = S::value_words, MT = 4 * VW;
    __shared__ __align__(16) uint8_t shared[S::shared];
    __shared__ float2                shared_ml[kDecodeWarps][8];

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3, r = lane >> 2;
    const int head = blockIdx.x, split = blockIdx.y, column0 = blockIdx.z * S::columns;
    const int n_columns = p.n_q * p.gqa;

    // queries, permuted like the keys: operand pairs are channels 9,11 | 1,3 | 8,10 | 0,2 of a word
    uint32_t q[NB][KW][4];
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        const int     column = column0 + 8 * nb + r;
        const bool    exists = column < n_columns;
        const int     query  = exists ? column / p.gqa : 0;
        const int     h      = head * p.gqa + (exists ? column - query * p.gqa : 0);
        const float   f      = exists ? p.q_scale : 0.0f;
        const float * from   = p.q + query * p.q_stride_query + h * p.q_stride_head;
#pragma unroll
        for (int w = 0; w < KW; ++w) {
            const int     word = t * KW + w;
            const float * x    = from + (word >> 1) * 16 + 4 * (word & 1);
            q[nb][w][0]        = pack_half2(x[9] * f, x[11] * f);
            q[nb][w][1]        = pack_half2(x[1] * f, x[3] * f);
            q[nb][w][2]        = pack_half2(x[8] * f, x[10] * f);
            q[nb][w][3]        = pack_half2(x[0] * f, x[2] * f);
        }
    }
    const int query0 = column0 / p.gqa, query1 = min(column0 + S::columns - 1, n_columns - 1) / p.gqa;

    float       o[NB][MT][4] = {};
    Softmax<NB> sm;
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
        sm.m[nb][0] = sm.m[nb][1] = kNoScore;
        sm.l[nb][0] = sm.l[nb][1] = 0.0f;
    }

    // Tiles of far rows; the others are noted in `rest`, one bit a turn of the loop (the launch sees to it that 64 suffice).
    const int first = split * kDecodeWarps + warp, step = p.n_split * kDecodeWarps;
    uint64_t  rest    = 0;
    int       turn    = 0;
    const int n_whole = p.n_kv / kDecodeTile;

    const RowPlace<KW> key_place(t);
    const RowPlace<VW> value_place(r);
    const int          row1 = p.n_head_kv * S::row_words, row8 = 8 * row1;  // words
    const size_t       key_step = size_t(step) * kDecodeTile * row1, sum_step = key_step >> p.group_shift;
    const size_t       from     = size_t(first) * kDecodeTile;
    const uint32_t *   at_key   = p.far_k + (from + r) * row1 + head * S::row_words + key_place.scales;
    const uint32_t *   at_value = p.far_v + (from + 2 * t) * row1 + head * S::row_words + value_place.scales;
    const uint32_t *   at_sum   = p.summary +
                                  ((from >> p.group_shift) + min(r, (kDecodeTile >> p.group_shift) - 1)) * row1 +
                                  head * S::row_words + key_place.scales;
    // keys 2t, 2t+1, 2t+8, 2t+9
    auto load_values = [&](RowWords<VW>(&value)[4], const uint32_t * at) {
        value[0] = load_row<VW>(at, value_place);
        value[1] = load_row<VW>(at + row1, value_place);
        value[2] = load_row<VW>(at + row8, value_place);
        value[3] = load_row<VW>(at + row8 + row1, value_place);
    };
    for (int tile = first; tile < n_whole; tile += step, ++turn) {
        const int cell0 = tile * kDecodeTile;

        // Everything is requested before it is known whether the tile is all far: most are.
        RowWords<KW> key[2][2], sum[2];
        RowWords<VW> value[4];
        sum[0] = load_row<KW>(at_sum, key_place);
        if (p.group_shift == 1) {
            sum[1] = load_row<KW>(at_sum + row8, key_place);
        }
        const uint32_t * k = at_key;
#pragma unroll
        for (int i = 0; i < 4; ++i, k += row8) {
            key[i / 2][i % 2] = load_row<KW>(k, key_place);
        }
        const uint32_t * v = at_value;
        load_values(value, v);
        v += 2 * row8;
        at_key += key_step;
        at_value += key_step;
        at_sum += sum_step;
        const TileSight sight = tile_sight(p, cell0 + lane, query0, query1);
        if (__any_sync(~0u, sight.src != kSrcFar && sight.src != kSrcHidden)) {
            rest |= uint64_t(1) << turn;
            continue;
        }
        if (sight.hidden == ~0u) {
            continue;
        }

        float sg[NB][4] = {}, s[2][NB][4];
        if (p.group_shift == 1) {
            key_scores<KW, NB, true>(sg, sum[0], sum[1], q);
        } else {
            key_scores<KW, NB, false>(sg, sum[0], sum[0], q);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int  from0 = (((16 * i + r) >> p.group_shift) & 7) << 2 | t;
            const int  from1 = (((16 * i + r + 8) >> p.group_shift) & 7) << 2 | t;
            const bool upper = i == 1 && p.group_shift == 1;  // groups 8..15
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
                const float g0 = upper ? sg[nb][2] : sg[nb][0], g1 = upper ? sg[nb][3] : sg[nb][1];
                s[i][nb][0] = __shfl_sync(~0u, g0, from0);
                s[i][nb][1] = __shfl_sync(~0u, g1, from0);
                s[i][nb][2] = __shfl_sync(~0u, g0, from1);
                s[i][nb][3] = __shfl_sync(~0u, g1, from1);
            }
            key_scores<KW, NB, true>(s[i], key[i][0], key[i][1], q);
        }
        finish_scores(p, p.score_scale * kFp4Inverse, s[0]);
        finish_scores(p, p.score_scale * kFp4Inverse, s[1]);
        if (!sight.plain) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int j = 16 * i + r + 8 * (c >> 1);
                        s[i][nb][c] = mask_score(p, s[i][nb][c], cell0 + j, sight.hidden >> j & 1u,
                                                 column0 + 8 * nb + 2 * t + (c & 1));
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
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t b[NB][2];
            weigh<NB>(sm, s[i], b);
            if (sight.hidden) {  // a hidden row may decode to NaN, which a weight of zero would not silence
#pragma unroll
                for (int u = 0; u < 4; ++u) {
                    if (sight.hidden >> (16 * i + 2 * t + (u & 1) + 8 * (u >> 1)) & 1u) {
                        value[u].scales = 0;
                    }
                }
            }
            add_values<VW, NB>(o, value, b);
            if (i == 0) {
                load_values(value, v);
            }
        }
    }
    if (first + turn * step == n_whole && n_whole * kDecodeTile < p.n_kv) {
        rest |= uint64_t(1) << turn;  // the last tile is not whole: rows past the end must not be touched
    }

    // Tiles with near or current rows.
    half * stage = reinterpret_cast<half *>(shared) + warp * 16 * S::stage_row;
#pragma unroll 1
    for (; rest; rest &= rest - 1) {
        const int       cell0 = (first + (__ffsll(rest) - 1) * step) * kDecodeTile;
        const TileSight sight = tile_sight(p, cell0 + lane, query0, query1);
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
            if ((sight.hidden >> (16 * i) & 0xFFFFu) == 0xFFFFu) {
                continue;
            }
            float s[NB][4] = {}, top[NB][2];
            stage_rows<D, true>(p, head, cell0 + 16 * i, sight.src, stage, S::stage_row);
            staged_key_scores<KW, NB>(s, stage, S::stage_row, r, t, q);
            finish_scores(p, p.score_scale, s);
#pragma unroll
            for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int j = 16 * i + r + 8 * (c >> 1);
                    s[nb][c] =
                        mask_score(p, s[nb][c], cell0 + j, sight.hidden >> j & 1u, column0 + 8 * nb + 2 * t + (c & 1));
                }
                top[nb][0] = fmaxf(s[nb][0], s[nb][2]);
                top[nb][1] = fmaxf(s[nb][1], s[nb][3]);
            }
            raise_max<NB, MT>(sm, o, top);
            uint32_t b[NB][2];
            weigh<NB>(sm, s, b);
            __syncwarp();
            stage_rows<D, false>(p, head, cell0 + 16 * i, sight.src, stage, S::stage_row);
            staged_values<VW, NB>(o, stage, S::stage_row, r, t, b);
            __syncwarp();
        }
    }

    // merge the warps
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int d = 4; d < 32; d <<= 1) {
                sm.l[nb][c] += __shfl_xor_sync(~0u, sm.l[nb][c], d);
            }
        }
        __syncthreads();  // staging, or the previous block of columns, is done with the shared memory
        float * acc = reinterpret_cast<float *>(shared);  // [warp][column][D]
        if (r == 0) {
            shared_ml[warp][2 * t]     = make_float2(sm.m[nb][0], sm.l[nb][0]);
            shared_ml[warp][2 * t + 1] = make_float2(sm.m[nb][1], sm.l[nb][1]);
        }
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                acc[(warp * 8 + 2 * t + (c & 1)) * D + value_channel<D>(r, 2 * mt + (c >> 1))] = o[nb][mt][c];
            }
        }
        __syncthreads();
        for (int e = threadIdx.x; e < 8 * D; e += 32 * kDecodeWarps) {
            const int j = e / D, d = e % D, column = column0 + 8 * nb + j;
            if (column >= n_columns) {
                break;
            }
            float m = kNoScore;
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                m = fmaxf(m, shared_ml[w][j].x);
            }
            float sum = 0.0f, l = 0.0f;
#pragma unroll
            for (int w = 0; w < kDecodeWarps; ++w) {
                const float f = exp2_fast(shared_ml[w][j].x - m);
                sum += f * acc[(w * 8 + j) * D + d];
                l += f * shared_ml[w][j].y;
            }
            const int query = column / p.gqa, h = head * p.gqa + column % p.gqa;
            const int row = query * p.n_head + h;
            if (p.n_split == 1) {
                if (p.sinks) {
                    const float sink = p.sinks[h] * kLog2E, top = fmaxf(m, sink);
                    const float f = exp2_fast(m - top);
                    sum *= f;
                    l = l * f + exp2_fast(sink - top);
                }
                p.out[size_t(row) * D + d] = l > 0.0f ? sum * kFp4Inverse / l : 0.0f;
            } else {
                const size_t at    = size_t(split) * p.n_q * p.n_head + row;
                p.part[at * D + d] = sum;
                if (d == 0) {
                    p.part_ml[at] = make_float2(m, l);
                }
            }
        }
    }
}

// One block an output row; warps share the splits.
constexpr int kMergeWarps = 8;

template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps) attend_merge(const AttendParams p) {
    constexpr int     C = D / 32;  // channels a lane
    __shared__ float  acc[kMergeWarps][D];
    __shared__ float2 ml[kMergeWarps];

    const int    lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row = blockIdx.x;
    const size_t rows = size_t(p.n_q) * p.n_head;

    float m = kNoScore;
    for (int i = lane; i < p.n_split; i += 32) {
        m = fmaxf(m, p.part_ml[i * rows + row].x);
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    }
    float sum[C] = {}, l = 0.0f;
#pragma unroll 4
    for (int i = warp; i < p.n_split; i += kMergeWarps) {
        const float2  x    = p.part_ml[i * rows + row];
        const float * from = p.part + (i * rows + row) * D + lane;
        const float   f    = exp2_fast(x.x - m);
        l += f * x.y;
#pragma unroll
        for (int c = 0; c < C; ++c) {
            sum[c] += f * from[32 * c];
        }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
        acc[warp][lane + 32 * c] = sum[c];
    }
    if (lane == 0) {
        ml[warp] = make_float2(m, l);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += 32 * kMergeWarps) {
        float total = 0.0f, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kMergeWarps; ++w) {
            total += acc[w][d];
            weight += ml[w].y;
        }
        if (p.sinks) {
            const float sink = p.sinks[row % p.n_head] * kLog2E, top = fmaxf(m, sink);
            const float f = exp2_fast(m - top);
            total *= f;
            weight = weight * f + exp2_fast(sink - top);
        }
        p.out[size_t(row) * D + d] = weight > 0.0f ? total * kFp4Inverse / weight : 0.0f;
    }
}

}  // namespace device
}  // namespace kvfold
