// kv_align: softmax sums over all cells and over those that are read, by definition.
//
// A thread takes whole KV heads: a row is decoded once for all queries and heads that look at it.

#include "ops/kv_align.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "format/fp4_codec.h"
#include "ops/rotate.h"

namespace kvfold {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// log of a sum of exponentials
struct LogSum {
    double top = -kInfinity;
    double sum = 0.0;

    void add(double x) {
        if (x > top) {
            sum = sum * std::exp(top - x) + 1.0;
            top = x;
        } else if (x > -kInfinity) {
            sum += std::exp(x - top);
        }
    }
    double value() const { return top + std::log(sum); }
};

class HeadAlignment {
  public:
    HeadAlignment(const SparseAttendArgs & args, int32_t kv_head)
        : args_(args), a_(args.attend), head_(kv_head), gqa_(a_.n_head / a_.mem.n_head_kv), dim_(a_.mem.head_dim),
          q_(size_t(a_.n_q * gqa_ * dim_)), all_(size_t(a_.n_q * gqa_)), read_(all_.size()) {
        for (int32_t i = 0; i < a_.n_q; ++i) {
            for (int32_t j = 0; j < gqa_; ++j) {
                rotate_row(a_.q + i * a_.q_stride_query + (head_ * gqa_ + j) * a_.q_stride_head,
                           &q_[size_t((i * gqa_ + j) * dim_)], dim_, a_.rot.k);
            }
        }
    }

    void run(Alignment * sums) {
        far_cells();
        exact_cells();
        for (int32_t r = 0; r < a_.n_q * gqa_; ++r) {
            const int32_t head = head_ * gqa_ + r % gqa_;
            LogSum &      all = all_[size_t(r)], &read = read_[size_t(r)];
            if (all.sum == 0.0) {
                continue;
            }
            if (a_.sinks != nullptr) {
                all.add(double(a_.sinks[head]));
                read.add(double(a_.sinks[head]));
            }
            // Rounding may leave a little more in the part than in the whole.
            const double lost = std::max(0.0, all.value() - read.value());
            sums[head].add({1.0, std::exp(-lost), lost, lost});
        }
    }

  private:
    void far_cells() {
        const LayerMemory & mem = a_.mem;
        const int32_t       n   = (a_.n_kv + mem.group - 1) / mem.group;
        std::vector<float>  summary(static_cast<size_t>(dim_)), key(static_cast<size_t>(dim_));
        std::vector<char>   listed(size_t(a_.n_q) * size_t(n));
        for (int32_t i = 0; i < a_.n_q; ++i) {
            const int32_t * list =
                args_.selected + (int64_t(i) * mem.n_head_kv + head_) * group_list_stride(args_.capacity);
            for (int32_t k = 0; k < list[0]; ++k) {
                listed[size_t(i) * size_t(n) + size_t(list[1 + k])] = 1;
            }
        }
        int32_t decoded = -1;
        for (int32_t cell = 0; cell < a_.n_kv; ++cell) {
            if ((a_.far_bits[cell / 32] >> (cell % 32) & 1u) == 0) {
                continue;
            }
            const int32_t group = cell / mem.group;
            if (group != decoded) {
                decoded = group;
                fp4_decode_row(group_summary(mem, group, head_), summary.data(), dim_);
            }
            fp4_decode_row(far_row(mem.far_k, mem, cell, head_), key.data(), dim_, mem.scale_group);
            for (size_t d = 0; d < key.size(); ++d) {
                key[d] += summary[d];
            }
            add(cell, key.data(), [&](int32_t i) { return listed[size_t(i) * size_t(n) + size_t(group)] != 0; });
        }
    }

    void exact_cells() {
        std::vector<float> key(static_cast<size_t>(dim_));
        for (int32_t e = 0; e < a_.n_exact; ++e) {
            const int32_t src = a_.exact[e].src;
            if (src == kSrcHidden) {
                continue;
            }
            if (src_is_current(src)) {
                rotate_row(a_.cur.k + src_current_row(src) * a_.cur.k_stride + head_ * dim_, key.data(), dim_,
                           a_.rot.k);
            } else {
                f16_decode_row(a_.mem.near_k + (int64_t(src) * a_.mem.n_head_kv + head_) * dim_, key.data(), dim_);
            }
            add(a_.exact[e].cell, key.data(), [](int32_t) { return true; });
        }
    }

    // A key for every query that sees its cell; is_read(query).
    template <typename IsRead>
    void add(int32_t cell, const float * key, const IsRead & is_read) {
        for (int32_t i = 0; i < a_.n_q; ++i) {
            const double bias = a_.mask != nullptr ? double(f16_decode(a_.mask[i * a_.mask_stride + cell])) : 0.0;
            if (bias == -kInfinity) {
                continue;
            }
            for (int32_t r = i * gqa_; r < (i + 1) * gqa_; ++r) {
                const float * q     = &q_[size_t(r * dim_)];
                float         score = 0.0f;
                for (int32_t d = 0; d < dim_; ++d) {
                    score += q[d] * key[d];
                }
                score *= a_.scale;
                if (a_.softcap != 0.0f) {
                    score = a_.softcap * std::tanh(score / a_.softcap);
                }
                all_[size_t(r)].add(double(score) + bias);
                if (is_read(i)) {
                    read_[size_t(r)].add(double(score) + bias);
                }
            }
        }
    }

    const SparseAttendArgs & args_;
    const AttendArgs &       a_;
    int32_t                  head_, gqa_, dim_;
    std::vector<float>       q_;           // [n_q][gqa][head_dim], rotated
    std::vector<LogSum>      all_, read_;  // [n_q][gqa]
};

}  // namespace

void kv_align(const SparseAttendArgs & a, Alignment * sums, const Threads & t) {
    for (int32_t h = t.ith; h < a.attend.mem.n_head_kv; h += t.nth) {
        HeadAlignment(a, h).run(sums);
    }
}

}  // namespace kvfold
