// Scores of many rows (a query and a head) for all keys of one KV head, on tensor cores, a tile of keys at a time: what operations need
// that ask how attention is spread over the cells. CUDA's counterpart of row_scores.h.
//
// A block has 16 rows a warp, in registers. The words of the next tile are on their way while one is multiplied. Nothing is kept of the
// scores: who wants to look at them twice goes through the tiles twice.
#pragma once

#include "ops/attend_prefill.cuh"
#include "ops/decode_rows.cuh"

namespace kvfold {
namespace device {

template <int D>
struct KeyTile {
    static constexpr int keys      = D == 256 ? 32 : 64;
    static constexpr int fragments = keys / 8;
    static constexpr int warps = 8, threads = 32 * warps, rows = 16 * warps;
    static constexpr int words  = D / 8;                   // of a key
    static constexpr int part   = keys * words / threads;  // keys of which a thread brings a word
    static constexpr int stride = D + 8;  // halves of a shared key; the padding spreads keys over banks
    static_assert(part >= 2 && part % 2 == 0, "a summary is read for two cells");
};

template <int D>
struct KeyStages {
    static constexpr int n = 2;
    __align__(16) half keys[n][KeyTile<D>::keys * KeyTile<D>::stride];
};

// Keys of far cells 0 .. n - 1, or the summaries of groups 0 .. n - 1, of one KV head.
template <int D, bool SUMMARIES>
class FarKeyTiles {
    using S = KeyTile<D>;

    // Where a thread's word of rows is, and the byte of its scale.
    struct Place {
        const uint32_t * values;
        const uint8_t *  scales;
        int64_t          value_step;  // words from one row to the next
        int64_t          scale_step;  // bytes

        __device__ __forceinline__ void load(int row, uint32_t & value, uint32_t & scale) const {
            value = load_word(values + row * value_step);
            scale = load_byte(scales + row * scale_step);
        }
    };

  public:
    __device__ __forceinline__ FarKeyTiles(const AttendParams & p, int head, int n)
        : n_(n), word_(threadIdx.x % S::words), first_(threadIdx.x / S::words * S::part), group_shift_(p.group_shift),
          summaries_(blocks(p, p.summary, head)), rows_(summaries_) {
        if (SUMMARIES) {
            return;
        }
        if (p.scale_shift == kFineShift) {
            rows_ = blocks(p, p.far_k, head);
        } else {
            const int n_scales = D >> p.scale_shift;
            rows_ = {p.far_k + head * S::words + word_,
                     p.far_k_scales + head * n_scales + (word_ >> (p.scale_shift - 3)), int64_t(p.n_head_kv) * S::words,
                     int64_t(p.n_head_kv) * n_scales};
        }
    }

    // Starts loading this thread's part of a tile.
    __device__ __forceinline__ void request(int tile) {
#pragma unroll
        for (int i = 0; i < S::part; ++i) {
            const int key = min(tile * S::keys + first_ + i, n_ - 1);
            rows_.load(key, value_[i], scale_[i]);
            if (!SUMMARIES && i % 2 == 0) {
                summaries_.load(key >> group_shift_, sum_value_[i / 2], sum_scale_[i / 2]);
            }
        }
    }

    __device__ __forceinline__ void store(half * to) const {
#pragma unroll
        for (int i = 0; i < S::part; ++i) {
            Pairs key = decode_word(value_[i], scale_pair(scale_[i], scale_selector(0)));
            if (!SUMMARIES) {
                key = add_pairs(decode_word(sum_value_[i / 2], scale_pair(sum_scale_[i / 2], scale_selector(0))), key);
            }
            store_pairs(to + (first_ + i) * S::stride + 8 * word_, key);
        }
    }

  private:
    // Rows of blocks that begin with their four scales.
    __device__ __forceinline__ Place blocks(const AttendParams & p, const uint32_t * base, int head) const {
        const uint32_t * block = base + head * FarRows<D>::words + (word_ >> 3) * kBlockWords;
        const int64_t    step  = int64_t(p.n_head_kv) * FarRows<D>::words;
        return {block + 1 + (word_ & 7), reinterpret_cast<const uint8_t *>(block) + (word_ >> 1 & 3), step, 4 * step};
    }

    int      n_;
    int      word_;
    int      first_;  // key of the tile
    int      group_shift_;
    Place    summaries_;
    Place    rows_;
    uint32_t value_[S::part], scale_[S::part], sum_value_[S::part / 2], sum_scale_[S::part / 2];
};

// Keys of exact cells, in the order of their list; zeros for entries that pad it. They are few: nothing is loaded ahead.
template <int D>
class ExactKeyTiles {
    using S = KeyTile<D>;

  public:
    __device__ __forceinline__ ExactKeyTiles(const AttendParams & p, int head)
        : p_(p), head_(head), word_(threadIdx.x % S::words), first_(threadIdx.x / S::words * S::part) {}

    __device__ __forceinline__ void request(int tile) { tile_ = tile; }

    __device__ __forceinline__ void store(half * to) const {
#pragma unroll 1
        for (int i = 0; i < S::part; ++i) {
            const int entry = tile_ * S::keys + first_ + i, src = entry < p_.n_exact ? p_.exact[entry].y : kSrcHidden;
            Pairs     key{};
            if (src >= 0) {
                const half * row = p_.near_k + (int64_t(src) * p_.n_head_kv + head_) * D + word_channel(word_);
                key              = pairs_of([row](int channel) { return __half2float(row[channel]); });
            } else if (src <= kSrcCurrentBase) {
                const float * row =
                    p_.cur_k + (kSrcCurrentBase - src) * p_.cur_k_stride + head_ * D + word_channel(word_);
                key = pairs_of([row](int channel) { return row[channel]; });
            }
            store_pairs(to + (first_ + i) * S::stride + 8 * word_, key);
        }
    }

  private:
    // In the order, and times the unit, of decoded words.
    template <class Value>
    static __device__ __forceinline__ Pairs pairs_of(const Value & value) {
        Pairs x;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int channel = pair_channel(j);
            x.p[j]            = pack_half2(kFp4Unit * value(channel), kFp4Unit * value(channel + 2));
        }
        return x;
    }

    const AttendParams & p_;
    int                  head_;
    int                  word_;
    int                  first_;
    int                  tile_ = 0;
};

// A warp's rows as operands: q[word / 2][2 * (word % 2) + i] is the pair lane % 4 of a word of row lane / 4 + 8 * i.
template <int D>
using RowOperands = uint32_t[D / 16][4];

// Dot products of the warp's rows with the keys of a tile, times kFp4Unit: s[n][2 * i + e] is that of row lane / 4 + 8 * i and key
// 8 * n + 2 * (lane % 4) + e.
template <int D>
__device__ __forceinline__ void multiply_rows(float (&s)[KeyTile<D>::fragments][4], const half * keys,
                                              const RowOperands<D> & q, int lane) {
    using S           = KeyTile<D>;
    const half * from = keys + ((lane >> 4) * 8 + (lane & 7)) * S::stride + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks) {
#pragma unroll
        for (int n = 0; n < S::fragments; n += 2) {
            uint32_t b[4];
            load_matrices<false>(b, from + 8 * n * S::stride + 16 * ks);
            mma_16x8x16(s[n], q[ks][0], q[ks][1], q[ks][2], q[ks][3], b[0], b[1]);
            mma_16x8x16(s[n + 1], q[ks][0], q[ks][1], q[ks][2], q[ks][3], b[2], b[3]);
        }
    }
}

// Goes through the tiles next(-1), next of that, .. below `end`. For each, every warp calls use(tile, stage, s) with the dot products of
// its rows, and when all have done so, after(tile, stage); two tiles have different stages if one follows the other. The whole block calls.
template <int D, class Keys, class Next, class Use, class After>
__device__ __forceinline__ void walk_tiles(Keys & keys, KeyStages<D> & shared, int end, const RowOperands<D> & q,
                                           int lane, const Next & next, const Use & use, const After & after) {
    int tile = next(-1), stage = 0;
    if (tile < end) {
        keys.request(tile);
        keys.store(shared.keys[0]);
    }
    __syncthreads();
    while (tile < end) {
        const int following = next(tile);
        if (following < end) {
            keys.request(following);
        }
        float s[KeyTile<D>::fragments][4] = {};
        multiply_rows<D>(s, shared.keys[stage], q, lane);
        use(tile, stage, s);
        if (following < end) {
            keys.store(shared.keys[stage ^ 1]);
        }
        __syncthreads();
        after(tile, stage);
        tile = following;
        stage ^= 1;
    }
}

// Softmax sums of a thread's two rows over the keys that it has (a quarter of them, until merge()), base 2.
struct RowSums {
    float m[2]    = {kNoScore, kNoScore};
    float all[2]  = {0.0f, 0.0f};
    float some[2] = {0.0f, 0.0f};

    // Hidden scores are -inf. is_some(i, n, e): is the key one of those that row i adds up by themselves, too?
    template <int N, class IsSome>
    __device__ __forceinline__ void add(const float (&s)[N][4], const IsSome & is_some) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float top = m[i];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                top = fmaxf(top, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            }
            rescale(i, top);
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float x = exp2_fast(s[n][2 * i + e] - top);
                    all[i] += x;
                    some[i] += is_some(i, n, e) ? x : 0.0f;
                }
            }
        }
    }

    // Those of the four threads of a row together.
    __device__ __forceinline__ void merge() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            rescale(i, warp_reduce<1, 4>(m[i], Max{}));
            all[i]  = warp_reduce<1, 4>(all[i], Sum{});
            some[i] = warp_reduce<1, 4>(some[i], Sum{});
        }
    }

    __device__ __forceinline__ bool sees(int i) const { return m[i] > kNoScore; }

    // A logit that joins the denominator.
    __device__ __forceinline__ void add_sink(int i, float sink, bool is_some) {
        rescale(i, fmaxf(m[i], sink));
        const float x = exp2_fast(sink - m[i]);
        all[i] += x;
        some[i] += is_some ? x : 0.0f;
    }

  private:
    __device__ __forceinline__ void rescale(int i, float top) {
        const float f = exp2_fast(m[i] - top);
        m[i]          = top;
        all[i] *= f;
        some[i] *= f;
    }
};

// x[2 * n + e], of key 8 * n + 2 * (lane % 4) + e in rows of this lane, put together over all rows of the warp: x[0] and x[1] become those
// of n = lane / 4 % N. The whole warp calls.
template <int N, class Op>
__device__ __forceinline__ void reduce_rows(float (&x)[2 * N], int lane, const Op & op) {
#pragma unroll
    for (int d = 4; d >= N; d /= 2) {
#pragma unroll
        for (int i = 0; i < 2 * N; ++i) {
            x[i] = op(x[i], __shfl_xor_sync(~0u, x[i], 4 * d));
        }
    }
#pragma unroll
    for (int d = N / 2; d > 0; d /= 2) {
        const bool high = (lane >> 2 & d) != 0;
#pragma unroll
        for (int i = 0; i < 2 * d; ++i) {
            const float a = x[i], b = x[2 * d + i], mine = high ? b : a, other = high ? a : b;
            x[i] = op(mine, __shfl_xor_sync(~0u, other, 4 * d));
        }
    }
}

}  // namespace device
}  // namespace kvfold
