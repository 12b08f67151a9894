#include "ops/rotate.h"

#include <utility>

#include "ops/simd.h"

namespace kvfold {

namespace {

using Lanes = std::make_index_sequence<kLanes>;

// One stage inside a vector, H < kLanes: a lane and the one H further become their sum and their difference.
template <int H, size_t... I>
inline VFloat butterfly_lanes(VFloat v, std::index_sequence<I...>) {
#if defined(__clang__)
    const VFloat other = __builtin_shufflevector(v, v, int(I ^ H)...);
#else
    const VFloat other = __builtin_shuffle(v, VInt{int(I ^ H)...});
#endif
    const VInt sign = {(I & H ? INT32_MIN : 0)...};  // a - b is a + (-b), also to the bit
    return other + VFloat(VInt(v) ^ sign);
}

inline VFloat butterfly_vector(VFloat v) {
    v = butterfly_lanes<1>(v, Lanes{});
    v = butterfly_lanes<2>(v, Lanes{});
#if defined(__AVX__)
    v = butterfly_lanes<4>(v, Lanes{});
#endif
#if defined(__AVX512F__)
    v = butterfly_lanes<8>(v, Lanes{});
#endif
    return v;
}

template <int N>
void rotate_blocks(const float * from, float * to, int64_t n) {
    constexpr int vectors = N / kLanes;
    for (int64_t at = 0; at < n; at += N) {
        VFloat v[vectors];
#pragma GCC unroll 64
        for (int i = 0; i < vectors; ++i) {
            v[i] = butterfly_vector(v_load(from + at + i * kLanes));
        }
#pragma GCC unroll 8
        for (int h = 1; h < vectors; h *= 2) {
#pragma GCC unroll 64
            for (int i = 0; i < vectors; ++i) {
                if ((i & h) == 0) {
                    const VFloat a = v[i], b = v[i + h];
                    v[i]     = a + b;
                    v[i + h] = a - b;
                }
            }
        }
        const VFloat scale = v_set(rotation_scale(N));
#pragma GCC unroll 64
        for (int i = 0; i < vectors; ++i) {
            v_store(to + at + i * kLanes, v[i] * scale);
        }
    }
}

}  // namespace

void rotate_row(const float * from, float * to, int64_t n, int32_t size) {
    switch (size) {
    case 0:
        if (to != from) {
            memcpy(to, from, size_t(n) * sizeof(float));
        }
        break;
    case 64:
        rotate_blocks<64>(from, to, n);
        break;
    case 128:
        rotate_blocks<128>(from, to, n);
        break;
    default:
        rotate_blocks<256>(from, to, n);
        break;
    }
}

}  // namespace kvfold
