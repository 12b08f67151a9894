// kv_fold: groups of exact rows become a summary key, FP4 key differences and FP4 values.
//
// Work is spread over (planned group, KV head) and (span, KV head) pairs. They touch disjoint bytes, and what spans are made of was
// folded before, so the threads never meet.
//
// A plan entry without a group (negative index) or without any present member is padding and leaves memory as it is.

#include <algorithm>

#include "format/fp4_codec.h"
#include "ops/kv_ops.h"
#include "ops/rotate.h"

namespace kvfold {

namespace {

// One KV head of one layer, with everything that addressing needs.
struct Head {
    const FoldArgs & a;
    SideLayout       side;
    int32_t          index;

    Head(const FoldArgs & args, int32_t h) : a(args), side(side_layout(args.mem)), index(h) {}

    Fp4Row     far_row(uint8_t * far, int64_t cell) const { return kvfold::far_row(far, a.mem, cell, index); }
    Fp4Block * summary(int64_t group) const { return group_summary(a.mem, group, index); }
    uint8_t *  spread(int64_t group) const { return number(side.spread_offset, group); }

    // As that of a group, elsewhere.
    Fp4Block * span_summary(int64_t span) const {
        return reinterpret_cast<Fp4Block *>(reinterpret_cast<uint8_t *>(summary(span)) + side.span_offset);
    }
    uint8_t * span_spread(int64_t span) const { return number(side.span_spread_offset, span); }

  private:
    // One f16 a head.
    uint8_t * number(size_t offset, int64_t row) const {
        return a.mem.side + offset + 2 * (row * a.mem.n_head_kv + index);
    }
};

// Buffers of one thread.
struct Rows {
    float * k;    // [group][head_dim]
    float * v;    // [group][head_dim]
    float * sum;  // [head_dim]
};

size_t thread_floats(const LayerMemory & mem) {
    const size_t floats = size_t(2 * mem.group + 1) * size_t(mem.head_dim);
    return (floats + 15) / 16 * 16;
}

Rows thread_rows(const FoldArgs & a, const Threads & t) {
    const size_t member = size_t(a.mem.group) * size_t(a.mem.head_dim);
    Rows         rows{};
    rows.k   = static_cast<float *>(t.scratch) + size_t(t.ith) * thread_floats(a.mem);
    rows.v   = rows.k + member;
    rows.sum = rows.v + member;
    return rows;
}

// Reads the exact (or, for far members, decoded) rows of a planned group; all are rotated then. Returns how many members
// are present.
int32_t gather(const Head & head, const int32_t * entry, const Rows & rows) {
    const FoldArgs & a       = head.a;
    const int32_t    dim     = a.mem.head_dim;
    const int64_t    group   = entry[0];
    const int64_t    column  = int64_t(head.index) * dim;
    const int64_t    row     = int64_t(a.mem.n_head_kv) * dim;
    int32_t          present = 0;
    for (int32_t j = 0; j < a.mem.group; ++j) {
        const int32_t src = entry[1 + j];
        float *       k   = rows.k + int64_t(j) * dim;
        float *       v   = rows.v + int64_t(j) * dim;
        if (src == kSrcHidden) {
            continue;
        }
        ++present;
        if (src_is_current(src)) {
            const int64_t r = src_current_row(src);
            rotate_row(a.cur.k + r * a.cur.k_stride + column, k, dim, a.rot.k);
            rotate_row(a.cur.v + r * a.cur.v_stride + column, v, dim, a.rot.v);
        } else if (src == kSrcFar) {
            const int64_t cell = group * a.mem.group + j;
            fp4_decode_row(head.far_row(a.mem.far_k, cell), k, dim, a.mem.scale_group);
            fp4_decode_row(head.summary(group), rows.sum, dim);
            for (int32_t d = 0; d < dim; ++d) {
                k[d] += rows.sum[d];
            }
            fp4_decode_row(head.far_row(a.mem.far_v, cell), v, dim, a.mem.scale_group);
        } else {
            f16_decode_row(a.mem.near_k + src * row + column, k, dim);
            f16_decode_row(a.mem.near_v + src * row + column, v, dim);
        }
    }
    return present;
}

void add_row(const float * row, float * sum, int32_t dim) {
    for (int32_t d = 0; d < dim; ++d) {
        sum[d] += row[d];
    }
}

void scale_row(float * row, float factor, int32_t dim) {
    for (int32_t d = 0; d < dim; ++d) {
        row[d] *= factor;
    }
}

double squared_distance(const float * row, const float * mean, int32_t dim) {
    float lane[8] = {};
    for (int32_t d = 0; d < dim; ++d) {
        lane[d % 8] += (row[d] - mean[d]) * (row[d] - mean[d]);
    }
    double sum = 0.0;
    for (float part : lane) {
        sum += double(part);
    }
    return sum;
}

void put_f16(uint8_t * to, double value) {
    const uint16_t half = f16_encode(float(value));
    memcpy(to, &half, sizeof half);
}

void encode_group(const Head & head, const int32_t * entry, const Rows & rows) {
    const LayerMemory & mem     = head.a.mem;
    const int32_t       dim     = mem.head_dim;
    const int64_t       group   = entry[0];
    const int32_t       present = gather(head, entry, rows);
    if (present == 0) {
        return;
    }
    const auto absent = [entry](int32_t j) { return entry[1 + j] == kSrcHidden; };

    // the mean, added up in member order
    float * mean = rows.sum;
    std::fill_n(mean, dim, 0.0f);
    for (int32_t j = 0; j < mem.group; ++j) {
        if (!absent(j)) {
            add_row(rows.k + int64_t(j) * dim, mean, dim);
        }
    }
    scale_row(mean, 1.0f / float(present), dim);

    double squares = 0.0;
    for (int32_t j = 0; j < mem.group; ++j) {
        if (!absent(j)) {
            squares += squared_distance(rows.k + int64_t(j) * dim, mean, dim);
        }
    }
    put_f16(head.spread(group), squares / (double(present) * double(dim)));

    Fp4Block * summary = head.summary(group);
    fp4_encode_row(mean, summary, dim);
    float * decoded = rows.sum;
    fp4_decode_row(summary, decoded, dim);

    for (int32_t j = 0; j < mem.group; ++j) {
        const int64_t cell  = group * mem.group + j;
        const Fp4Row  far_k = head.far_row(mem.far_k, cell), far_v = head.far_row(mem.far_v, cell);
        if (absent(j)) {
            fp4_fill_row(far_k, 0, dim, mem.scale_group);
            fp4_fill_row(far_v, 0, dim, mem.scale_group);
            continue;
        }
        float * k = rows.k + int64_t(j) * dim;
        for (int32_t d = 0; d < dim; ++d) {
            k[d] -= decoded[d];
        }
        fp4_encode_row(k, far_k, dim, mem.scale_group);
        fp4_encode_row(rows.v + int64_t(j) * dim, far_v, dim, mem.scale_group);
    }
}

void encode_span(const Head & head, int64_t span, const Rows & rows) {
    const LayerMemory & mem   = head.a.mem;
    const int32_t       dim   = mem.head_dim;
    const int32_t       n     = kSpanCells / mem.group;
    const int64_t       first = span * n;
    float *             mean  = rows.sum;
    float *             row   = rows.k;
    std::fill_n(mean, dim, 0.0f);
    for (int64_t g = first; g < first + n; ++g) {
        fp4_decode_row(head.summary(g), row, dim);
        add_row(row, mean, dim);
    }
    scale_row(mean, 1.0f / float(n), dim);

    double within = 0.0, between = 0.0;
    for (int64_t g = first; g < first + n; ++g) {
        uint16_t half;
        memcpy(&half, head.spread(g), sizeof half);
        within += double(f16_decode(half));
        fp4_decode_row(head.summary(g), row, dim);
        between += squared_distance(row, mean, dim);
    }
    put_f16(head.span_spread(span), (within + between / double(dim)) / double(n));
    fp4_encode_row(mean, head.span_summary(span), dim);
}

}  // namespace

size_t kv_fold_scratch(const FoldArgs & a, int nth) { return thread_floats(a.mem) * size_t(nth) * sizeof(float); }

void kv_fold(const FoldArgs & a, const Threads & t) {
    const int32_t heads = a.mem.n_head_kv;
    const Rows    mine  = thread_rows(a, t);
    for (int64_t item = t.ith; item < int64_t(a.n_groups) * heads; item += t.nth) {
        const int32_t * entry = a.plan + item / heads * (1 + a.mem.group);
        if (entry[0] >= 0) {
            encode_group(Head(a, int32_t(item % heads)), entry, mine);
        }
    }
    for (int64_t item = t.ith; item < int64_t(a.n_spans) * heads; item += t.nth) {
        encode_span(Head(a, int32_t(item % heads)), a.spans[item / heads], mine);
    }
}

}  // namespace kvfold
