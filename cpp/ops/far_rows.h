// FP4 rows of a layer as the operations read them: row objects, row(i) being channels 16 i .. 16 i + 15. Internal to the .cpp files of
// the operations, like simd.h.
#pragma once

#include "ops/kv_ops.h"
#include "ops/scratch_plan.h"
#include "ops/simd.h"

namespace kvfold {
namespace {

// With a scale for 16 channels: summaries, and far rows unless kv_scale_group says otherwise.
struct FarRow {
    const Fp4Block * from;
    V16 operator()(int i) const { return decode_16(from[i / 4].scale[i % 4], from[i / 4].quant + i % 4 * 8); }
};

// With a scale for 32 or 64 channels. One kind of row for both: the code that reads rows is large, and would be there thrice.
struct CoarseRow {
    const uint8_t * scale;
    const uint8_t * quant;
    int             shift;  // 16-channel pieces a scale, log2

    V16 operator()(int i) const { return decode_16(scale[i >> shift], quant + 8 * i); }
};

// A key of a row, which is the difference, and its decoded summary.
template <typename Row>
struct FarKey {
    Row           difference;
    const float * summary;
    V16           operator()(int i) const { return add_16(load_16(summary + 16 * i), difference(i)); }
};

template <typename Row>
FarKey<Row> far_key(const Row & difference, const float * summary) {
    return {difference, summary};
}

// Channels 16 i .. 16 i + 15 go to `to` + i * stride.
template <int DIM, typename Row>
inline void write_row(const Row & row, float * to, int64_t stride) {
#pragma GCC unroll 16
    for (int i = 0; i < DIM / 16; ++i) {
        store_16(to + i * stride, row(i));
    }
}

// Rows of one KV head lie n_head_kv rows apart, which hardware does not foresee.
inline void prefetch_row(const Fp4Block * row, int64_t blocks) {
    const char *  p     = reinterpret_cast<const char *>(row);
    const int64_t bytes = blocks * int64_t(sizeof(Fp4Block));
    for (int64_t at = 0; at < bytes; at += int64_t(kLine)) {
        __builtin_prefetch(p + at);
    }
    __builtin_prefetch(p + bytes - 1);
}

// Rows of far_k and far_v by kind. `at`: cell * n_head_kv + KV head.
template <int DIM>
struct FarRows {
    static constexpr int64_t blocks = DIM / kFp4BlockValues;

    explicit FarRows(const LayerMemory &) {}

    FarRow row(const uint8_t * far, int64_t at) const {
        return {reinterpret_cast<const Fp4Block *>(far) + at * blocks};
    }
    void prefetch(const uint8_t * far, int64_t at) const {
        prefetch_row(reinterpret_cast<const Fp4Block *>(far) + at * blocks, blocks);
    }
};

template <int DIM>
struct CoarseRows {
    int64_t scales;  // where they begin
    int     shift;

    explicit CoarseRows(const LayerMemory & mem)
        : scales(far_scales_offset(mem)), shift(mem.scale_group == 32 ? 1 : 2) {}

    CoarseRow row(const uint8_t * far, int64_t at) const {
        return {far + scales + at * (DIM / 16 >> shift), far + at * (DIM / 2), shift};
    }
    void prefetch(const uint8_t * far, int64_t at) const {
        const CoarseRow to = row(far, at);
        for (int i = 0; i < DIM / 2; i += int(kLine)) {
            __builtin_prefetch(to.quant + i);
        }
        __builtin_prefetch(to.scale);
    }
};

// Calls use() with the FarRows or CoarseRows of a layer, and returns what it does.
template <int DIM, typename Use>
auto with_far_rows(const LayerMemory & mem, const Use & use) {
    return mem.scale_group == kFp4ScaleGroup ? use(FarRows<DIM>(mem)) : use(CoarseRows<DIM>(mem));
}

}  // namespace
}  // namespace kvfold
