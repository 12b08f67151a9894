// Scores of far cells on the device (kv_score.h), in three launches, because each needs numbers about all cells:
//
// 1. sum_summaries   sums of the summaries, each once for every far member, by slices; how many far cells there are
// 2. read_rows       the direction of the mean key and the query statistics become vectors in shared memory; then, for every cell
//                    and KV head, the cosine, the size of the value and the logits of the query heads go to scratch, and what the
//                    block's cells add up to
// 3. write_scores    from these sums and what is kept of each cell, the scores
//
// All sums have an order of their own, so that a repetition gives the same scores.
#pragma once

#include "ops/attend_params.cuh"
#include "ops/decode_rows.cuh"
#include "ops/kv_score.h"
#include "ops/warp.cuh"

namespace kvfold {
namespace device {

struct ScoreParams {
    const uint32_t * far_k;
    const uint32_t * far_v;
    const uint32_t * summary;
    const uint32_t * far_bits;
    const float *    queries;  // null: none
    const float *    before;   // null: none; may be `scores`
    float *          scores;
    float *          part;       // [kSumSlices][n_head_kv][head_dim] sums of summaries
    int32_t *        count;      // [kSumSlices] far cells
    float *          cosine;     // [n_head_kv][n_kv], of far cells only, as the next two
    float *          size;       // [n_head_kv][n_kv]
    float *          logit;      // [n_head][n_kv], base 2
    float *          part_size;  // [n_split][n_head_kv] sums of sizes
    float2 *         part_ml;    // [n_split][n_head] maximum of logits, sum of 2^(logit - maximum)
    int32_t          n_head_kv;
    int32_t          n_head;
    int32_t          gqa;
    int32_t          n_kv;
    int32_t          n_groups;
    int32_t          group_shift;
    int32_t          n_split;
    float            scale;
    float            softcap;
    int32_t          scale_shift;  // this and the next as in AttendParams
    const uint8_t *  far_k_scales;
    const uint8_t *  far_v_scales;
};

constexpr int kSumSlices = 16, kSumWarps = 8, kScoreThreads = 256;

__device__ __forceinline__ bool has_queries(const ScoreParams & p) {
    return p.queries != nullptr && __ldg(p.queries) > 0.0f;
}

__device__ __forceinline__ float2 to_floats(uint32_t halves) {
    return __half22float2(*reinterpret_cast<const half2 *>(&halves));
}

// Channel of the i-th value of a row, in the order in which fp4_pairs() gives them.
__device__ __forceinline__ int pair_order_channel(int i) {
    return word_channel(i >> 3) + pair_channel(i >> 1 & 3) + 2 * (i & 1);
}

// Where a word of values is in a row, and the selector of its scale, which is in the word of scales before.
__device__ __forceinline__ int      value_word(int word) { return (word >> 3) * kBlockWords + 1 + (word & 7); }
__device__ __forceinline__ int      scale_word(int word) { return (word >> 3) * kBlockWords; }
__device__ __forceinline__ uint32_t scale_select(int word) { return scale_selector(word >> 1 & 3); }

// The scale of a word of values, times 2^8, out of its word of scales.
__device__ __forceinline__ float scale_value(uint32_t scales, int word) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(scale_pair(scales, scale_select(word)))));
}

// The values of a word with its scale, times kFp4Unit.
__device__ __forceinline__ void scaled_values(float (&x)[8], uint32_t word, float scale) {
    const Pairs pairs = fp4_pairs(word);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float2 y = to_floats(pairs.p[j]);
        x[2 * j]       = y.x * scale;
        x[2 * j + 1]   = y.y * scale;
    }
}

// Sum of the squares of the values of a word without their scale, times 4. A table gives the doubles of the values' sizes.
__device__ __forceinline__ uint32_t sum_of_squares(uint32_t word) {
    const uint32_t sizes = word & 0x77777777u;
    const uint32_t a     = __byte_perm(0x03020100u, 0x0C080604u, sizes),
                   b     = __byte_perm(0x03020100u, 0x0C080604u, sizes >> 16);
    return __dp4a(a, a, __dp4a(b, b, 0u));
}

// --- 1 ---------------------------------------------------------------------------------------------------------------

// grid: x KV head, y slice. A thread has one word of the rows of every so many groups.
template <int D>
__global__ void __launch_bounds__(32 * kSumWarps) sum_summaries(const __grid_constant__ ScoreParams p) {
    constexpr int      words = D / 8, slots = 32 * kSumWarps / words;  // rows the block reads at a time
    __shared__ float   sums[slots][D];
    __shared__ int32_t counts[kSumWarps];
    const int          word = threadIdx.x % words, slot = threadIdx.x / words, head = blockIdx.x;
    const int64_t      row1   = int64_t(p.n_head_kv) * FarRows<D>::words;
    const uint32_t *   row    = p.summary + head * FarRows<D>::words;
    float              sum[8] = {};
    int32_t            n      = 0;
#pragma unroll 4
    for (int g = blockIdx.y * slots + slot; g < p.n_groups; g += kSumSlices * slots) {
        uint32_t       full;
        const uint32_t bits = group_bits(p, g, full);
        if (bits == 0) {
            continue;  // its summary may be anything
        }
        const float scale = scale_value(load_word(row + g * row1 + scale_word(word)), word);
        float       x[8];
        scaled_values(x, load_word(row + g * row1 + value_word(word)), scale);
        n += __popc(bits);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[i] += float(__popc(bits)) * x[i];
        }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sums[slot][pair_order_channel(8 * word + i)] = sum[i];
    }
    n = warp_reduce(word == 0 ? n : 0, Sum{});
    if (threadIdx.x % 32 == 0) {
        counts[threadIdx.x / 32] = n;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += 32 * kSumWarps) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < slots; ++i) {
            total += sums[i][d];
        }
        p.part[(blockIdx.y * int64_t(p.n_head_kv) + head) * D + d] = total * kFp4Inverse;
    }
    if (head == 0 && threadIdx.x == 0) {
        int32_t total = 0;
#pragma unroll
        for (int i = 0; i < kSumWarps; ++i) {
            total += counts[i];
        }
        p.count[blockIdx.y] = total;
    }
}

// --- 2 ---------------------------------------------------------------------------------------------------------------

// A warp has 32 cells at a time. Thread t (lane % 4), r (lane / 4) reads words t * W .. t * W + W - 1 of the cells 4 r + i, i < 4, which
// have one summary (two with m = 2). Cell 4 r + i is row r + 8 i in shared memory, because of the banks. QC: query heads a block handles.
template <int D, int QC>
struct RowsShape {
    static constexpr int warps   = 4;
    static constexpr int threads = 32 * warps;
    static constexpr int words   = D / 32;  // W
    // Floats of a vector for each t. Four more than it has channels, so that the four t read different banks.
    static constexpr int piece   = 8 * words + 4;
    static constexpr int vector  = 4 * piece;
    static constexpr int vectors = 1 + 2 * QC;  // direction of the mean key, then mean and variance of each query head
    static constexpr int rows    = 32 * FarRows<D>::stride;  // words of the rows of 32 cells

    __host__ __device__ static constexpr int warp_words(int group_shift) {
        return 2 * rows + (32 >> group_shift) * FarRows<D>::stride;
    }
    static constexpr int shared_bytes(int group_shift) {
        return 4 * (vectors * vector + warps * warp_words(group_shift));
    }
    static_assert(4 * (vectors * vector + warps * (2 * rows + rows / 2)) <= 63 * 1024, "more than Turing has");
};

// Where the i-th value of a vector is.
template <int W>
__device__ __forceinline__ int vector_place(int i) {
    return i + 4 * (i / (8 * W));
}

// What a thread adds up of its four cells, over its part of the channels.
template <int QC>
struct KeySums {
    float square[4], along[4];         // k . k, k . mean
    float mean[QC][4], spread[QC][4];  // of each query head: k . mean, k^2 . variance
};

// Of x[i], a sum over the four threads of a row for each i, thread t gets that of i = t.
__device__ __forceinline__ float quad_sum(const float (&x)[4], int t) {
    const bool  odd = t & 1, high = t & 2;
    const float a = (odd ? x[1] : x[0]) + __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1);
    const float b = (odd ? x[3] : x[2]) + __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    return (high ? b : a) + __shfl_xor_sync(~0u, high ? a : b, 2);
}

__device__ __forceinline__ float dot4(const float4 & x, const float (&y)[4], float sum) {
    return fmaf(x.x, y[0], fmaf(x.y, y[1], fmaf(x.z, y[2], fmaf(x.w, y[3], sum))));
}

// Vectors in the order of fp4_pairs(), for keys times kFp4Unit. The whole block calls.
template <int D, int QC>
__device__ __forceinline__ void prepare_vectors(const ScoreParams & p, int head, int first_query, int n_queries,
                                                float * vectors, float * warp_values) {
    using S              = RowsShape<D, QC>;
    constexpr int W      = S::words;
    float         square = 0.0f;
    for (int i = threadIdx.x; i < D; i += S::threads) {
        const float * from = p.part + int64_t(head) * D + pair_order_channel(i);
        float         x    = 0.0f;
#pragma unroll
        for (int slice = 0; slice < kSumSlices; ++slice) {
            x += __ldg(from + int64_t(slice) * p.n_head_kv * D);
        }
        vectors[vector_place<W>(i)] = x;
        square += x * x;
    }
    square = warp_reduce(square, Sum{});
    if (threadIdx.x % 32 == 0) {
        warp_values[threadIdx.x / 32] = square;
    }
    __syncthreads();
    square = 0.0f;
#pragma unroll
    for (int i = 0; i < S::warps; ++i) {
        square += warp_values[i];
    }
    const float inverse = square > 0.0f ? rsqrtf(square) : 0.0f;
    for (int i = threadIdx.x; i < D; i += S::threads) {
        vectors[vector_place<W>(i)] *= inverse;
    }
    const float per_query   = n_queries > 0 ? 1.0f / __ldg(p.queries) : 0.0f;
    const float mean_unit   = p.scale * kFp4Inverse * (p.softcap == 0.0f ? kLog2E : 1.0f);
    const float spread_unit = 0.5f * p.scale * p.scale * kFp4Inverse * kFp4Inverse * kLog2E;
    for (int i = threadIdx.x; i < QC * D; i += S::threads) {
        const int j = i / D, k = i % D;
        float     mean = 0.0f, variance = 0.0f;
        if (j < n_queries) {
            const float * from = p.queries + 1 + int64_t(first_query + j) * D + pair_order_channel(k);
            mean               = per_query * __ldg(from);
            variance           = fmaxf(0.0f, per_query * __ldg(from + int64_t(p.n_head) * D) - mean * mean);
        }
        float * to    = vectors + (1 + 2 * j) * S::vector + vector_place<W>(k);
        to[0]         = mean_unit * mean;
        to[S::vector] = spread_unit * variance;
    }
    __syncthreads();
}

// `keys`, `sums`: rows of 32 cells and the summaries of their groups, in shared memory.
template <int D, int QC>
__device__ __forceinline__ void add_keys(KeySums<QC> & s, const uint32_t * keys, const uint32_t * sums, int group_shift,
                                         const float * vectors, bool with_queries, int lane) {
    using S            = RowsShape<D, QC>;
    constexpr int    W = S::words, stride = FarRows<D>::stride;
    const int        t = lane & 3, r = lane >> 2, swap = t & 1 ? W / 2 : 0;
    const bool       two           = group_shift == 1;  // summaries of the four cells
    const uint32_t * key           = keys + r * stride;
    const uint32_t * sum           = sums + ((4 * r) >> group_shift) * stride;
    const int        at_scale      = scale_word(t * W);
    const uint32_t   sum_scales[2] = {sum[at_scale], two ? sum[stride + at_scale] : 0u};
    uint32_t         key_scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        key_scales[i] = key[8 * i * stride + at_scale];
    }
#pragma unroll 2
    for (int w = 0; w < W; ++w) {
        const int     word = t * W + (w ^ swap), at = value_word(word);
        const float * v = vectors + t * S::piece + 8 * (w ^ swap);
        float         y[2][8], scale[4];
        Pairs         x[4];
        scaled_values(y[0], sum[at], scale_value(sum_scales[0], word));
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            y[1][j] = y[0][j];
        }
        if (two) {
            scaled_values(y[1], sum[stride + at], scale_value(sum_scales[1], word));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[i]     = fp4_pairs(key[8 * i * stride + at]);
            scale[i] = scale_value(key_scales[i], word);
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // four channels at a time
            float        k[4][4], squares[4][4];
            const float4 mean = *reinterpret_cast<const float4 *>(v + 4 * h);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float2 a  = to_floats(x[i].p[2 * h + j]);
                    k[i][2 * j]     = fmaf(a.x, scale[i], y[i / 2][4 * h + 2 * j]);
                    k[i][2 * j + 1] = fmaf(a.y, scale[i], y[i / 2][4 * h + 2 * j + 1]);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    squares[i][j] = k[i][j] * k[i][j];
                }
                s.square[i] += squares[i][0] + squares[i][1] + (squares[i][2] + squares[i][3]);
                s.along[i] = dot4(mean, k[i], s.along[i]);
            }
            if (with_queries) {
#pragma unroll
                for (int j = 0; j < QC; ++j) {
                    const float * from = v + (1 + 2 * j) * S::vector + 4 * h;
                    const float4  q    = *reinterpret_cast<const float4 *>(from),
                                  u    = *reinterpret_cast<const float4 *>(from + S::vector);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        s.mean[j][i]   = dot4(q, k[i], s.mean[j][i]);
                        s.spread[j][i] = dot4(u, squares[i], s.spread[j][i]);
                    }
                }
            }
        }
    }
}

// Squares of the 32 rows `values`, likewise, in units of kSquareUnit^2.
constexpr float kSquareUnit = 0x1p-9f;

template <int D>
__device__ __forceinline__ void add_squares(float (&square)[4], const uint32_t * values, int lane) {
    constexpr int W = D / 32, stride = FarRows<D>::stride;
    const int     t = lane & 3, r = lane >> 2, swap = t & 1 ? W / 2 : 0;
#pragma unroll 2
    for (int w = 0; w < W; ++w) {
        const int word = t * W + (w ^ swap);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t * row   = values + (r + 8 * i) * stride;
            const float      scale = scale_value(row[scale_word(word)], word);
            square[i]              = fmaf(scale * scale, float(sum_of_squares(row[value_word(word)])), square[i]);
        }
    }
}

// grid: x KV head, y split, z which QC of its query heads; the first also sees to what is not about queries. Dynamic shared
// memory: the vectors, then for every warp the rows of 32 keys, of 32 values, and of the summaries. COARSE: far rows have a scale for 32
// or 64 channels.
template <int D, int QC, bool COARSE>
__global__ void __launch_bounds__(RowsShape<D, QC>::threads, 4) read_rows(const __grid_constant__ ScoreParams p) {
    using S = RowsShape<D, QC>;
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ float                         warp_values[S::warps];
    __shared__ float2                        warp_ml[S::warps][QC];
    const int                                lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
    const int                                head = blockIdx.x, first_query = head * p.gqa + int(blockIdx.z) * QC;
    const int                                n_queries = has_queries(p) ? min(QC, p.gqa - int(blockIdx.z) * QC) : 0;
    const bool                               first     = blockIdx.z == 0;
    if (!first && n_queries == 0) {
        return;
    }
    float * const vectors = reinterpret_cast<float *>(shared);
    prepare_vectors<D, QC>(p, head, first_query, n_queries, vectors, warp_values);

    uint32_t * const keys  = shared + S::vectors * S::vector + warp * S::warp_words(p.group_shift);
    uint32_t *const values = keys + S::rows, *const sums = values + S::rows;
    const int           n_sums = 32 >> p.group_shift, n_tiles = (p.n_kv + 31) / 32, step = p.n_split * S::warps;
    const int           row1 = p.n_head_kv * FarRows<D>::words, in_row = head * FarRows<D>::words;
    const FarCopy<D>    far_copy(lane);
    const CoarseCopy<D> coarse{lane, p.n_head_kv, head, p.scale_shift};

    // Far cells among the 32 of a tile; 0 where there is no such tile.
    auto far_cells = [&](int tile) {
        const int n = p.n_kv - 32 * tile;
        return n <= 0 ? 0u : __ldg(p.far_bits + tile) & (n < 32 ? (1u << n) - 1 : ~0u);
    };
    // The cell of a row in shared memory; -1: there is none.
    auto cell_of = [&](int tile) {
        return [tile, n_kv = p.n_kv](int j) {
            const int cell = 32 * tile + 4 * (j % 8) + j / 8;
            return cell < n_kv ? cell : -1;
        };
    };
    auto arrived = [&](uint32_t * rows, int tile, bool any) {
        copy_wait<1>();
        if (COARSE && any) {
            coarse.template spread<32>(rows, cell_of(tile));
        }
    };
    auto request_rows = [&](uint32_t * to, const uint32_t * from, const uint8_t * scales, int tile) {
        if constexpr (COARSE) {
            return coarse.template copy<32>(to, from, scales, cell_of(tile));
        }
        const int cell = 32 * tile;
        from += int64_t(cell) * row1 + in_row;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            far_copy.template copy<8>(to + 8 * i * FarRows<D>::stride, from + i * row1, 4 * row1,
                                      (p.n_kv - cell - i + 3) / 4);
        }
    };
    auto request_keys = [&](int tile, uint32_t bits) {
        if (bits != 0) {
            const int group = (32 * tile) >> p.group_shift;
            request_rows(keys, p.far_k, p.far_k_scales, tile);
            far_copy.template copy<32>(sums, p.summary + int64_t(group) * row1 + in_row, row1,
                                       min(n_sums, p.n_groups - group));
        }
        copy_commit();
    };
    auto request_values = [&](int tile, uint32_t bits) {
        if (bits != 0 && first) {
            request_rows(values, p.far_v, p.far_v_scales, tile);
        }
        copy_commit();
    };

    float m[QC], l[QC], size_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < QC; ++j) {
        m[j] = kNoScore;
        l[j] = 0.0f;
    }
    int      tile = blockIdx.y * S::warps + warp;
    uint32_t bits = far_cells(tile);
    request_keys(tile, bits);
    request_values(tile, bits);
#pragma unroll 1
    for (; tile < n_tiles; tile += step) {
        const uint32_t next = far_cells(tile + step);
        const int64_t  cell = 32 * int64_t(tile) + lane;
        const bool     far  = bits >> lane & 1u;
        arrived(keys, tile, bits != 0);
        if (bits != 0) {
            KeySums<QC> s = {};
            add_keys<D, QC>(s, keys, sums, p.group_shift, vectors, n_queries > 0, lane);
            const float square = quad_sum(s.square, t), along = quad_sum(s.along, t);
            if (far && first) {
                p.cosine[int64_t(head) * p.n_kv + cell] = square > 0.0f ? along * rsqrtf(square) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < QC; ++j) {
                float       x = quad_sum(s.mean[j], t);
                const float y = quad_sum(s.spread[j], t);
                if (p.softcap != 0.0f) {  // as finish_scores()
                    x = 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(2.0f * kLog2E / p.softcap * x));
                    x *= kLog2E * p.softcap;
                }
                x += y;
                if (far && j < n_queries) {
                    p.logit[int64_t(first_query + j) * p.n_kv + cell] = x;
                    const float top                                   = fmaxf(m[j], x);
                    l[j] = l[j] * exp2_fast(m[j] - top) + exp2_fast(x - top);
                    m[j] = top;
                }
            }
        }
        __syncwarp();  // everybody has read the keys
        request_keys(tile + step, next);
        arrived(values, tile, bits != 0 && first);
        if (bits != 0 && first) {
            float square[4] = {};
            add_squares<D>(square, values, lane);
            const float size = kSquareUnit * sqrtf(quad_sum(square, t));
            if (far) {
                p.size[int64_t(head) * p.n_kv + cell] = size;
                size_sum += size;
            }
        }
        __syncwarp();
        request_values(tile + step, next);
        bits = next;
    }
    copy_wait<0>();

#pragma unroll
    for (int j = 0; j < QC; ++j) {
        const float top = warp_reduce(m[j], Max{});
        const float sum = warp_reduce(l[j] * exp2_fast(m[j] - top), Sum{});
        if (lane == 0) {
            warp_ml[warp][j] = make_float2(top, sum);
        }
    }
    size_sum = warp_reduce(size_sum, Sum{});
    if (lane == 0) {
        warp_values[warp] = size_sum;
    }
    __syncthreads();
    if (int(threadIdx.x) < n_queries) {
        const int j   = threadIdx.x;
        float     top = kNoScore, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < S::warps; ++i) {
            top = fmaxf(top, warp_ml[i][j].x);
        }
#pragma unroll
        for (int i = 0; i < S::warps; ++i) {
            sum += warp_ml[i][j].y * exp2_fast(warp_ml[i][j].x - top);
        }
        p.part_ml[int64_t(blockIdx.y) * p.n_head + first_query + j] = make_float2(top, sum);
    }
    if (first && threadIdx.x == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < S::warps; ++i) {
            sum += warp_values[i];
        }
        p.part_size[int64_t(blockIdx.y) * p.n_head_kv + head] = sum;
    }
}

// --- 3 ---------------------------------------------------------------------------------------------------------------

// grid: x cells, kScoreThreads at a time. Dynamic shared memory: a float for every KV head, and one for every query head.
static __global__ void __launch_bounds__(kScoreThreads) write_scores(const __grid_constant__ ScoreParams p) {
    extern __shared__ float totals[];  // 1 / mean size of values (0 where that is 0), log of the sum of exponentials
    const bool              attention = has_queries(p);
    const int               lane = threadIdx.x & 31, n_totals = p.n_head_kv + (attention ? p.n_head : 0);
    int                     n_far = 0;
#pragma unroll
    for (int slice = 0; slice < kSumSlices; ++slice) {
        n_far += __ldg(p.count + slice);
    }
    for (int i = threadIdx.x >> 5; i < n_totals; i += kScoreThreads / 32) {
        float total;
        if (i < p.n_head_kv) {
            float sum = 0.0f;
            for (int split = lane; split < p.n_split; split += 32) {
                sum += __ldg(p.part_size + int64_t(split) * p.n_head_kv + i);
            }
            sum   = warp_reduce(sum, Sum{});
            total = sum > 0.0f ? float(n_far) / sum : 0.0f;
        } else {
            const float2 * from = p.part_ml + i - p.n_head_kv;
            float          top = kNoScore, sum = 0.0f;
            for (int split = lane; split < p.n_split; split += 32) {
                const float2 x = __ldg(from + int64_t(split) * p.n_head);
                const float  m = fmaxf(top, x.x);
                sum            = sum * exp2_fast(top - m) + x.y * exp2_fast(x.x - m);
                top            = m;
            }
            const float m = warp_reduce(top, Max{});
            sum           = warp_reduce(sum * exp2_fast(top - m), Sum{});
            total         = sum > 0.0f ? m + __log2f(sum) : 0.0f;
        }
        if (lane == 0) {
            totals[i] = total;
        }
    }
    __syncthreads();
    const int cell = blockIdx.x * kScoreThreads + threadIdx.x;
    if (cell >= p.n_kv) {
        return;
    }
    float score[kScoreKinds] = {};
    if (__ldg(p.far_bits + cell / 32) >> (cell % 32) & 1u) {
        float novelty = 0.0f, size = 0.0f, mass = 0.0f;
#pragma unroll 4
        for (int h = 0; h < p.n_head_kv; ++h) {
            const float inverse = totals[h];
            novelty += 1.0f - __ldg(p.cosine + int64_t(h) * p.n_kv + cell);
            size += inverse > 0.0f ? __ldg(p.size + int64_t(h) * p.n_kv + cell) * inverse : 1.0f;
        }
        if (attention) {
#pragma unroll 4
            for (int j = 0; j < p.n_head; ++j) {
                mass += exp2_fast(__ldg(p.logit + int64_t(j) * p.n_kv + cell) - totals[p.n_head_kv + j]);
            }
        }
        score[kNovelty]   = novelty / float(p.n_head_kv);
        score[kSize]      = size / float(p.n_head_kv);
        score[kAttention] = float(n_far) * mass / float(p.n_head);
    }
#pragma unroll
    for (int kind = 0; kind < kScoreKinds; ++kind) {
        const int64_t at = int64_t(kind) * p.n_kv + cell;
        p.scores[at]     = score[kind] + (p.before != nullptr ? p.before[at] : 0.0f);
    }
}

}  // namespace device
}  // namespace kvfold
