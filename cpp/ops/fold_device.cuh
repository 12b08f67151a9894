// Folding one group of one KV head by a thread block, to the bytes that fp4_codec.h prescribes.
//
// This file is compiled with and without fast-math flags (ggml's CUDA backend uses them), so whatever must round as the CPU
// does is written as an instruction.
#pragma once

#include <cuda_fp16.h>

#include "format/fp4_codec.h"
#include "ops/kv_ops.h"

namespace kvfold {
namespace device {

constexpr int kFoldThreads = 256;
constexpr int kFoldLanes   = kFp4Candidates;  // threads that encode 16 channels together, one candidate scale each

enum class FoldPart : int { keys = 0, values = 1 };

struct FoldParams {
    LayerMemory mem;
    CurrentRows cur;
    Rotation    rot;
    uint16_t *  spread;  // f16 [n_groups][n_head_kv]
};

// Dynamic shared memory of fold_group(): rows of the group, mean or decoded summary.
inline size_t fold_shared_bytes(const LayerMemory & mem) {
    return size_t(mem.group + 1) * size_t(mem.head_dim) * sizeof(float);
}

__device__ __forceinline__ float mul_ieee(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float add_ieee(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float fma_ieee(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

__device__ __forceinline__ float magnitude(int n) {
    return n >= 2 ? __uint_as_float((uint32_t(n) << 22) + (126u << 23)) : 0.5f * float(n);
}

// fp4_scale_offset() without a table in memory: two more than the offsets, as nibbles.
constexpr uint32_t                kOffsets = 0x05836172u;
__host__ __device__ constexpr int candidate_offset(int k) { return int(kOffsets >> (4 * k) & 0xFu) - 2; }
static_assert(candidate_offset(0) == fp4_scale_offset(0) && candidate_offset(1) == fp4_scale_offset(1) &&
                  candidate_offset(2) == fp4_scale_offset(2) && candidate_offset(3) == fp4_scale_offset(3) &&
                  candidate_offset(4) == fp4_scale_offset(4) && candidate_offset(5) == fp4_scale_offset(5) &&
                  candidate_offset(6) == fp4_scale_offset(6) && candidate_offset(7) == fp4_scale_offset(7),
              "must follow the codec");

// kFoldLanes neighbouring threads, lane 0..7 each, encode the same 16 * PIECES channels x, which share a scale. Returns the scale
// byte (in all of them) and in `byte` value byte number `lane` of every 16 channels.
template <int PIECES>
__device__ __forceinline__ uint32_t encode_scaled(const float * x, int lane, uint32_t (&byte)[PIECES]) {
    uint32_t top = 0;  // of non-negative floats the greatest has the greatest bits
#pragma unroll
    for (int i = 0; i < 16 * PIECES; ++i) {
        top = max(top, __float_as_uint(fabsf(x[i])));
    }
    const int   c0   = scale_nearest(mul_ieee(__uint_as_float(top), 1.0f / 6.0f));
    const int   code = min(max(c0 + candidate_offset(lane), 1), kScaleMax);
    const float s = scale_decode(uint32_t(code)), r = __fdiv_rn(1.0f, s);
    float       sum = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        float d[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float a = fabsf(x[16 * piece + i]);
            d[i]          = fma_ieee(-magnitude(e2m1_index(mul_ieee(a, r))), s, a);  // the product is exact
        }
        float e[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            e[j] = fma_ieee(d[j + 8], d[j + 8], mul_ieee(d[j], d[j]));
        }
        const float b0 = add_ieee(e[0], e[4]), b1 = add_ieee(e[1], e[5]), b2 = add_ieee(e[2], e[6]),
                    b3   = add_ieee(e[3], e[7]);
        const float mine = add_ieee(add_ieee(b0, b2), add_ieee(b1, b3));
        sum              = piece == 0 ? mine : add_ieee(sum, mine);
    }
    uint32_t error = __float_as_uint(sum);
    uint32_t best  = uint32_t(lane) << 8 | uint32_t(code);  // the first of equals wins
#pragma unroll
    for (int step = 1; step < kFoldLanes; step <<= 1) {
        const uint32_t other_error = __shfl_xor_sync(~0u, error, step), other = __shfl_xor_sync(~0u, best, step);
        if (other_error < error || (other_error == error && other < best)) {
            error = other_error;
            best  = other;
        }
    }
    const uint32_t chosen  = best & 0xFFu;
    const float    inverse = __fdiv_rn(1.0f, scale_decode(chosen));
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const float lo = x[16 * piece + lane], hi = x[16 * piece + lane + 8];
        byte[piece] = uint32_t(e2m1_index(mul_ieee(fabsf(lo), inverse))) | (__float_as_uint(lo) >> 28 & 8u) |
                      (uint32_t(e2m1_index(mul_ieee(fabsf(hi), inverse))) | (__float_as_uint(hi) >> 28 & 8u)) << 4;
        byte[piece] = top == 0 ? 0 : byte[piece];
    }
    return top == 0 ? 0 : chosen;
}

// Channel d of a row with a scale for so many channels.
template <int SCALE_GROUP>
__device__ __forceinline__ float decode_channel(const Fp4Row & row, int d) {
    const int      block = d / kFp4BlockValues, c = d % kFp4BlockValues, i = c % 16;
    const uint32_t byte = row.quant[block * row.quant_step + c / 16 * 8 + (i & 7)];
    return e2m1_decode(i < 8 ? byte & 0xFu : byte >> 4) *
           scale_decode(row.scale[block * row.scale_step + c / SCALE_GROUP]);
}

// The micro-batch's rows of one head, keys or values, rotated: row r at `rows` + r * `stride`.
struct HeadRows {
    const float * rows;
    int64_t       stride;
};

// Folds the keys or the values of one planned group of one head. `entry` is a plan entry in device memory. All threads of the
// block call; the block has kFoldThreads threads. PIECES: of 16 channels that share a scale of a far row.
template <int PIECES>
__device__ __forceinline__ void fold_group(const FoldParams & p, const HeadRows & current, const int32_t * entry,
                                           int head, FoldPart part, float * shared) {
    const LayerMemory & mem = p.mem;
    const int           dim = mem.head_dim, m = mem.group, group = entry[0];
    const int           blocks = dim / kFp4BlockValues;
    const bool          keys   = part == FoldPart::keys;
    float *             rows   = shared;            // [m][dim]
    float *             mean   = shared + m * dim;  // [dim]; later the decoded summary
    if (group < 0) {
        return;
    }
    constexpr int scale_group = 16 * PIECES;
    Fp4Block *    summary = reinterpret_cast<Fp4Block *>(mem.side) + (int64_t(group) * mem.n_head_kv + head) * blocks;
    const Fp4Row  sum_row{summary->scale, summary->quant, sizeof(Fp4Block), sizeof(Fp4Block)};
    const Fp4Row  far = far_row(keys ? mem.far_k : mem.far_v, mem, int64_t(group) * m, head);
    // from the row of a cell to that of the next
    constexpr int block_bytes = sizeof(Fp4Block);
    const int     scale_cell  = mem.n_head_kv * (PIECES == 1 ? blocks * block_bytes : dim / scale_group);
    const int     quant_cell  = mem.n_head_kv * (PIECES == 1 ? blocks * block_bytes : dim / 2);
    const auto    row         = [&](int j) {
        return Fp4Row{far.scale + j * scale_cell, far.quant + j * quant_cell, far.scale_step, far.quant_step};
    };

    int present = 0;
    for (int j = 0; j < m; ++j) {
        present += entry[1 + j] != kSrcHidden;
    }
    if (present == 0) {
        return;
    }
    for (int i = threadIdx.x; i < m * dim; i += kFoldThreads) {
        const int j = i / dim, d = i % dim, src = entry[1 + j];
        float     x = 0.0f;
        if (src >= 0) {
            x = __half2float(
                __ushort_as_half((keys ? mem.near_k : mem.near_v)[(int64_t(src) * mem.n_head_kv + head) * dim + d]));
        } else if (src <= kSrcCurrentBase) {
            x = current.rows[(kSrcCurrentBase - src) * current.stride + d];
        } else if (src == kSrcFar) {
            x = decode_channel<scale_group>(row(j), d);
            if (keys) {
                x = add_ieee(x, decode_channel<kFp4ScaleGroup>(sum_row, d));
            }
        }
        rows[i] = x;
    }
    __syncthreads();

    const int     lane = threadIdx.x % kFoldLanes, team = threadIdx.x / kFoldLanes;
    constexpr int teams = kFoldThreads / kFoldLanes;
    if (keys) {
        const float inverse = __fdiv_rn(1.0f, float(present));
        float       squares = 0.0f;
        for (int d = threadIdx.x; d < dim; d += kFoldThreads) {
            float sum = 0.0f;
            for (int j = 0; j < m; ++j) {
                if (entry[1 + j] != kSrcHidden) {
                    sum = add_ieee(sum, rows[j * dim + d]);
                }
            }
            const float mu = mul_ieee(sum, inverse);
            mean[d]        = mu;
            for (int j = 0; j < m; ++j) {
                if (entry[1 + j] != kSrcHidden) {
                    const float x = rows[j * dim + d] - mu;
                    squares += x * x;
                }
            }
        }
        __shared__ float warp_squares[kFoldThreads / 32];
        for (int step = 16; step > 0; step >>= 1) {
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        if (threadIdx.x % 32 == 0) {
            warp_squares[threadIdx.x / 32] = squares;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            float total = 0.0f;
            for (float x : warp_squares) {
                total += x;
            }
            p.spread[int64_t(group) * mem.n_head_kv + head] =
                f16_encode(fminf(total / (float(present) * float(dim)), 65504.0f));
        }
        // the summary replaces the mean by what it decodes to
        for (int sub = team; sub < (dim / kFp4ScaleGroup + teams - 1) / teams * teams; sub += teams) {
            const bool real = sub < dim / kFp4ScaleGroup;  // shuffles want whole warps: others read what nobody writes
            uint32_t   byte[1];
            const uint32_t scale = encode_scaled<1>(real ? mean + sub * kFp4ScaleGroup : rows, lane, byte);
            __syncwarp();
            if (real) {
                Fp4Block & to                  = summary[sub / 4];
                to.quant[8 * (sub % 4) + lane] = uint8_t(byte[0]);
                if (lane == 0) {
                    to.scale[sub % 4] = uint8_t(scale);
                }
            }
            const float s  = scale_decode(scale);
            const float lo = e2m1_decode(byte[0] & 0xFu) * s, hi = e2m1_decode(byte[0] >> 4) * s;
            if (real) {
                rows[m * dim + sub * kFp4ScaleGroup + lane]     = lo;
                rows[m * dim + sub * kFp4ScaleGroup + lane + 8] = hi;
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < m * dim; i += kFoldThreads) {
            rows[i] = add_ieee(rows[i], -mean[i % dim]);
        }
        __syncthreads();
    }

    const int scales = dim / scale_group, items = m * scales;
    for (int item = team; item < (items + teams - 1) / teams * teams; item += teams) {
        const bool     real = item < items;
        const int      j = real ? item / scales : 0, first = real ? item % scales * scale_group : 0;
        uint32_t       byte[PIECES];
        const uint32_t scale = encode_scaled<PIECES>(rows + j * dim + first, lane, byte);
        if (real) {
            const bool   absent = entry[1 + j] == kSrcHidden;
            const int    block = first / kFp4BlockValues, in_block = first % kFp4BlockValues;
            const Fp4Row to = row(j);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                to.quant[block * to.quant_step + in_block / 2 + 8 * i + lane] = absent ? 0 : uint8_t(byte[i]);
            }
            if (lane == 0) {
                to.scale[block * to.scale_step + in_block / scale_group] = absent ? 0 : uint8_t(scale);
            }
        }
    }
    __syncthreads();  // the shared rows may be used again
}

}  // namespace device
}  // namespace kvfold
