// Checks the CUDA operations against plain CPU code and times them, without ggml or a model.
//
// usage: harness [check] [quick] [time] [profile] ...
//   check    every operation over many shapes, against a double-precision reference (attention), byte by byte (fold, store), or
//            against the CPU's (check-lookup: look-up alone; check-score: scores and query statistics alone; check-sampled: scores from
//            kept queries; check-receive: what a second reading asks); then the quick ones with far rows that have a scale for 32 or 64 channels (check-32, check-64: all of it with those)
//   quick    the same over few shapes, for compute-sanitizer
//   time     decode, fold, prefill over depths; the far rows of a layer are random, layers rotate so that caches do not help
//            (time-decode, time-lookup, time-fold, time-score, time-sampled, time-prefill: one of them, prefill with the second reading; time-scales: a few of each with a scale
//            for 16, 32 and 64 channels)
//   profile  a few decode launches at 64K for a profiler; profile-short: at 256; profile-lookup: look-ups at 64K
// Exit status 1 when a check failed.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "format/fp4_codec.h"
#include "ops/attend_launch.cuh"
#include "ops/cell_lists.h"
#include "ops/kv_ops.h"
#include "ops/kv_ops_cuda.h"
#include "ops/kv_score.h"
#include "ops/thread_team.h"

using namespace kvfold;

#define CHECK_CUDA(x)                                                                                                  \
    do {                                                                                                               \
        const cudaError_t e_ = (x);                                                                                    \
        if (e_ != cudaSuccess) {                                                                                       \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));                            \
            std::exit(2);                                                                                              \
        }                                                                                                              \
    } while (0)

namespace {

using Rng = std::mt19937;

int uniform(Rng & rng, int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(rng); }

float normal(Rng & rng) { return std::normal_distribution<float>(0.0f, 1.0f)(rng); }

template <typename T>
class DeviceArray {
  public:
    DeviceArray() = default;
    explicit DeviceArray(size_t n) { resize(n); }
    explicit DeviceArray(const std::vector<T> & host) {
        resize(host.size());
        upload(host);
    }
    DeviceArray(const DeviceArray &)             = delete;
    DeviceArray & operator=(const DeviceArray &) = delete;
    DeviceArray(DeviceArray && o) noexcept : data_(o.data_), n_(o.n_) { o.data_ = nullptr; }
    ~DeviceArray() { cudaFree(data_); }

    void resize(size_t n) {
        cudaFree(data_);
        data_ = nullptr;
        n_    = n;
        CHECK_CUDA(cudaMalloc(&data_, std::max<size_t>(n * sizeof(T), 256)));
    }
    void upload(const std::vector<T> & host) {
        CHECK_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> download() const {
        std::vector<T> host(n_);
        CHECK_CUDA(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    T * get() const { return data_; }

  private:
    T *    data_ = nullptr;
    size_t n_    = 0;
};

CudaDevice the_device() {
    cudaDeviceProp p{};
    CHECK_CUDA(cudaGetDeviceProperties(&p, 0));
    return {p.multiProcessorCount, 10 * p.major + p.minor};
}

void parallel_for(int n, const std::function<void(int)> & f) {
    const int                n_threads = std::max(1u, std::thread::hardware_concurrency());
    std::atomic<int>         next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < std::min(n, n_threads); ++i) {
        threads.emplace_back([&] {
            for (int j; (j = next++) < n;) {
                f(j);
            }
        });
    }
    for (auto & t : threads) {
        t.join();
    }
}

// An operation of the CPU.
template <typename Args>
void on_host(size_t (*scratch)(const Args &, int), void (*op)(const Args &, const Threads &), const Args & args,
             int n_threads = 1) {
    run_on_threads(n_threads, scratch(args, n_threads), [&](const Threads & t) { op(args, t); });
}

constexpr int kHostThreads = 8;

// --- a layer on the host and on the device ---------------------------------------------------------------------------

int scale_group = kFp4ScaleGroup;  // of the layers that are made

struct Layer {
    int                   n_head_kv, dim, group, n_cells, n_near, n_rows;
    std::vector<uint8_t>  far_k, far_v, side;
    std::vector<uint16_t> near_k, near_v;
    std::vector<float>    cur_k, cur_v;  // [n_rows][n_head_kv * dim + pad]
    int                   cur_stride;

    int blocks() const { return dim / kFp4BlockValues; }

    LayerMemory memory() {
        return {n_head_kv,    dim,          group,       n_cells,       n_near,        0,
                far_k.data(), far_v.data(), side.data(), near_k.data(), near_v.data(), scale_group};
    }
    // Of far_k: memory ends at a multiple of 4 bytes.
    size_t far_bytes() const { return (size_t(n_cells) * n_head_kv * far_row_bytes(dim, scale_group) + 3) / 4 * 4; }
    Fp4Row far_row(std::vector<uint8_t> & far, int cell, int head) {
        return kvfold::far_row(far.data(), memory(), cell, head);
    }
    // What nobody may read: all bits set, which is NaN or a huge scale.
    void poison(int cell) {
        for (int h = 0; h < n_head_kv; ++h) {
            fp4_fill_row(far_row(far_k, cell, h), 0xFF, dim, scale_group);
            fp4_fill_row(far_row(far_v, cell, h), 0xFF, dim, scale_group);
        }
    }
    CurrentRows current() const { return {cur_k.data(), cur_v.data(), cur_stride, cur_stride, n_rows}; }
};

struct DeviceLayer {
    DeviceArray<uint8_t>  far_k, far_v, side;
    DeviceArray<uint16_t> near_k, near_v;
    DeviceArray<float>    cur_k, cur_v;
    LayerMemory           mem;
    CurrentRows           cur;

    explicit DeviceLayer(Layer & l)
        : far_k(l.far_k), far_v(l.far_v), side(l.side), near_k(l.near_k), near_v(l.near_v), cur_k(l.cur_k),
          cur_v(l.cur_v) {
        mem = {l.n_head_kv, l.dim,       l.group,    l.n_cells,    l.n_near,     0,
               far_k.get(), far_v.get(), side.get(), near_k.get(), near_v.get(), scale_group};
        cur = {cur_k.get(), cur_v.get(), l.cur_stride, l.cur_stride, l.n_rows};
    }
};

void random_blocks(Rng & rng, Fp4Block * b, size_t n, int scale_lo, int scale_hi) {
    for (size_t i = 0; i < n; ++i) {
        for (auto & s : b[i].scale) {
            s = uint8_t(uniform(rng, scale_lo, scale_hi));
        }
        for (auto & q : b[i].quant) {
            q = uint8_t(rng());
        }
    }
}

void random_rows(Rng & rng, Layer & l, std::vector<uint8_t> & far, int scale_lo, int scale_hi) {
    far.resize(l.far_bytes());
    for (auto & x : far) {
        x = uint8_t(rng());
    }
    for (int i = 0; i < l.n_cells * l.n_head_kv; ++i) {
        const Fp4Row row = l.far_row(far, i / l.n_head_kv, i % l.n_head_kv);
        for (int s = 0; s < l.dim / scale_group; ++s) {
            const int a_block                                     = kFp4BlockValues / scale_group;
            row.scale[s / a_block * row.scale_step + s % a_block] = uint8_t(uniform(rng, scale_lo, scale_hi));
        }
    }
}

Layer random_layer(Rng & rng, int n_head_kv, int dim, int group, int n_cells, int n_near, int n_rows) {
    Layer l{};
    l.n_head_kv = n_head_kv, l.dim = dim, l.group = group, l.n_near = n_near, l.n_rows = n_rows;
    l.n_cells               = (n_cells + group - 1) / group * group;
    l.cur_stride            = n_head_kv * dim + 4 * uniform(rng, 0, 3);
    const size_t row_blocks = size_t(n_head_kv) * l.blocks();
    // keys of about 1, differences of about 0.25, values of about 1: scale codes of 2^-3 .. 2^-1 and below
    random_rows(rng, l, l.far_k, 0xA0, 0xA8);
    random_rows(rng, l, l.far_v, 0xA8, 0xB4);
    const SideLayout s = side_layout(n_head_kv, dim, l.n_cells / group, 0);
    l.side.assign(s.bytes, 0);
    random_blocks(rng, reinterpret_cast<Fp4Block *>(l.side.data()), size_t(l.n_cells / group) * row_blocks, 0xA8, 0xB0);
    auto fill_half = [&](std::vector<uint16_t> & x) {
        x.resize(size_t(n_near) * n_head_kv * dim);
        for (auto & h : x) {
            h = f16_encode(normal(rng));
        }
    };
    fill_half(l.near_k);
    fill_half(l.near_v);
    auto fill_float = [&](std::vector<float> & x) {
        x.resize(size_t(n_rows) * l.cur_stride);
        for (auto & f : x) {
            f = normal(rng);
        }
    };
    fill_float(l.cur_k);
    fill_float(l.cur_v);
    return l;
}

// --- attention -------------------------------------------------------------------------------------------------------

struct Case {
    int         dim, group, n_head_kv, gqa, n_q, n_kv;
    std::string sources;  // far, tail, mixed, near
    std::string mask;     // none, causal, sequences, bias
    float       softcap = 0.0f;
    bool        sinks   = false;
    bool        rotate  = false;
};

const char * const kSources[] = {"far", "tail", "mixed", "near"};
const char * const kMasks[]   = {"none", "causal", "sequences", "bias"};

template <typename T>
T one_of(Rng & rng, const std::vector<T> & choices) {
    return choices[size_t(uniform(rng, 0, int(choices.size()) - 1))];
}

// Anything but the head size, with as many queries as one of `n_qs`. Not rotated.
Case random_case(Rng & rng, int dim, const std::vector<int> & n_qs) {
    Case c{};
    c.dim       = dim;
    c.group     = 2 << uniform(rng, 0, 4);
    c.n_head_kv = uniform(rng, 1, 4);
    c.gqa       = one_of<int>(rng, {1, 2, 3, 4, 5, 7, 8, 16});
    c.n_q       = one_of(rng, n_qs);
    c.n_kv      = std::max(one_of<int>(rng, {1, 31, 32, 64, 100, 256, 1000, 2048, 4100, 9000}), c.n_q);
    c.sources   = kSources[uniform(rng, 0, 3)];
    if (c.sources == "near") {
        c.n_kv = std::max(std::min(c.n_kv, 150), c.n_q);
    }
    c.mask    = kMasks[uniform(rng, 0, 3)];
    c.softcap = uniform(rng, 0, 3) == 0 ? 30.0f : 0.0f;
    c.sinks   = uniform(rng, 0, 3) == 0;
    while (c.n_kv > 2 * c.n_q && double(c.n_q) * c.n_head_kv * c.gqa * c.n_kv * c.dim > 1e9) {
        c.n_kv /= 2;  // the reference is slow
    }
    return c;
}

Rotation rotation_of(bool rotate, int dim) { return rotate ? Rotation{dim, 64} : Rotation{0, 0}; }

// Rotates every `n` of `count` values: Hadamard matrix in natural order times n^-1/2.
void rotate_values(float * x, size_t count, int n) {
    if (n == 0) {
        return;
    }
    const float f = 1.0f / std::sqrt(float(n));
    for (size_t base = 0; base < count; base += n) {
        for (int h = 1; h < n; h *= 2) {
            for (int i = 0; i < n; ++i) {
                if ((i & h) == 0) {
                    const float a = x[base + i], b = x[base + i + h];
                    x[base + i]     = a + b;
                    x[base + i + h] = a - b;
                }
            }
        }
        for (int i = 0; i < n; ++i) {
            x[base + i] *= f;
        }
    }
}

// The lists of an attention's cells on the device; a few entries pad the list of exact ones.
struct DeviceCells {
    DeviceArray<uint32_t>  far_bits;
    DeviceArray<ExactCell> exact;
    int                    n_exact;

    DeviceCells(const std::vector<int32_t> & cell_src, int padding) {
        CellLists lists = cell_lists(cell_src.data(), int32_t(cell_src.size()));
        lists.exact.resize(lists.exact.size() + padding, {0, kSrcHidden});
        n_exact = int(lists.exact.size());
        far_bits.resize(lists.far_bits.size());
        far_bits.upload(lists.far_bits);
        exact.resize(lists.exact.size());
        exact.upload(lists.exact);
    }
    void tell(AttendArgs & a) const { a.far_bits = far_bits.get(), a.exact = exact.get(), a.n_exact = n_exact; }
};

struct Inputs {
    std::vector<int32_t>  cell_src;
    std::vector<uint16_t> mask;
    int                   mask_stride = 0;
    std::vector<float>    q;
    std::vector<float>    sinks;
};

constexpr uint16_t kHalfMinusInf = 0xFC00;

// Sources and masks of a case; what no query may see is poisoned in `l`.
Inputs make_inputs(Rng & rng, const Case & c, Layer & l) {
    Inputs in;
    in.cell_src.assign(c.n_kv, kSrcFar);
    const int n_cur = std::min(c.n_q, c.n_kv);
    if (c.sources == "tail" || c.sources == "near") {
        const int first_near = c.sources == "near" ? 0 : std::max(0, c.n_kv - n_cur - 100);
        int       row        = 0;
        for (int i = 0; i < c.n_kv; ++i) {
            if (i >= c.n_kv - n_cur) {
                in.cell_src[i] = src_current(i - (c.n_kv - n_cur));
            } else if ((i >= first_near || i < 4) && row < l.n_near) {
                in.cell_src[i] = row++;
            }
        }
    } else if (c.sources == "mixed") {
        for (int i = 0; i < c.n_kv; ++i) {
            const int kind = uniform(rng, 0, 9);
            in.cell_src[i] = kind < 5   ? kSrcFar
                             : kind < 7 ? uniform(rng, 0, l.n_near - 1)
                             : kind < 8 ? src_current(uniform(rng, 0, n_cur - 1))
                                        : kSrcHidden;
        }
        for (int i = 64; i + 64 <= c.n_kv; i += 256) {  // some whole tiles of one kind
            const int32_t src = uniform(rng, 0, 1) ? kSrcFar : kSrcHidden;
            std::fill(in.cell_src.begin() + i, in.cell_src.begin() + i + 64, src);
        }
    } else {  // far, with a few hidden cells when there is room
        for (int i = 0; i < c.n_kv / 50; ++i) {
            in.cell_src[uniform(rng, 0, c.n_kv - 1)] = kSrcHidden;
        }
    }
    in.mask_stride = (c.n_kv + 63) / 64 * 64;
    if (c.mask != "none") {
        in.mask.assign(size_t(c.n_q) * in.mask_stride, 0x7E00);  // NaN where nobody may look
        for (int i = 0; i < c.n_q; ++i) {
            for (int k = 0; k < c.n_kv; ++k) {
                bool     seen  = true;
                uint16_t value = 0;
                if (c.mask == "causal") {
                    seen = k <= c.n_kv - c.n_q + i;
                } else if (c.mask == "sequences") {
                    seen = (k / 40) % 3 == i % 3 && i != c.n_q / 2;  // one query sees nothing
                } else {
                    seen  = uniform(rng, 0, 7) != 0;
                    value = f16_encode(0.5f * normal(rng));
                }
                seen &= in.cell_src[k] != kSrcHidden;
                in.mask[size_t(i) * in.mask_stride + k] = seen ? value : kHalfMinusInf;
            }
        }
    }
    in.q.resize(size_t(c.n_q) * c.n_head_kv * c.gqa * c.dim);
    for (auto & x : in.q) {
        x = normal(rng);
    }
    if (c.sinks) {
        in.sinks.resize(c.n_head_kv * c.gqa);
        for (auto & x : in.sinks) {
            x = 3.0f * normal(rng);
        }
    }
    // poison
    std::vector<char> near_used(l.n_near), group_used(l.n_cells / l.group);
    const size_t      row_blocks = size_t(l.n_head_kv) * l.blocks();
    for (int i = 0; i < l.n_cells; ++i) {
        const int32_t src = i < c.n_kv ? in.cell_src[i] : kSrcHidden;
        if (src >= 0) {
            near_used[src] = 1;
        }
        if (src == kSrcFar) {
            group_used[i / l.group] = 1;
        } else {
            l.poison(i);
        }
    }
    for (size_t g = 0; g < group_used.size(); ++g) {
        if (!group_used[g]) {
            std::memset(&l.side[g * row_blocks * sizeof(Fp4Block)], 0xFF, row_blocks * sizeof(Fp4Block));
        }
    }
    const size_t row = size_t(l.n_head_kv) * l.dim;
    for (int i = 0; i < l.n_near; ++i) {
        if (!near_used[i]) {
            std::fill_n(l.near_k.begin() + i * row, row, uint16_t(0x7E00));
            std::fill_n(l.near_v.begin() + i * row, row, uint16_t(0x7E00));
        }
    }
    return in;
}

// Plain attention in double precision, from the definition in kv_ops.h.
// `read`: for each query and KV head which groups' far rows it may read; null: all.
std::vector<float> reference(const Case & c, Layer & l, const Inputs & in, float scale,
                             const std::vector<std::vector<char>> * read = nullptr) {
    const int          n_head = c.n_head_kv * c.gqa, dim = c.dim;
    std::vector<float> out(size_t(c.n_q) * n_head * dim);
    std::vector<float> all_k(size_t(c.n_head_kv) * c.n_kv * dim), all_v(all_k.size());
    parallel_for(c.n_head_kv, [&](int h) {
        float *      k = &all_k[size_t(h) * c.n_kv * dim], *v = &all_v[size_t(h) * c.n_kv * dim];
        const size_t row = size_t(c.n_head_kv) * dim, head_blocks = l.blocks();
        for (int i = 0; i < c.n_kv; ++i) {
            float *       ki = &k[size_t(i) * dim], *vi = &v[size_t(i) * dim];
            const int32_t src = in.cell_src[i];
            if (src == kSrcFar) {
                const Fp4Row kr = l.far_row(l.far_k, i, h), vr = l.far_row(l.far_v, i, h);
                Fp4Block *   sum =
                    reinterpret_cast<Fp4Block *>(l.side.data()) + (size_t(i / c.group) * c.n_head_kv + h) * head_blocks;
                const Fp4Row sr{sum->scale, sum->quant, sizeof(Fp4Block), sizeof(Fp4Block)};
                const auto   decode = [](const Fp4Row & row, int d, int channels, float * to) {
                    fp4_decode_16(scale_decode(row.scale[d / 64 * row.scale_step + d % 64 / channels]),
                                  row.quant + d / 64 * row.quant_step + d % 64 / 2, to);
                };
                for (int d = 0; d < dim; d += 16) {
                    float s[16];
                    decode(kr, d, scale_group, ki + d);
                    decode(sr, d, kFp4ScaleGroup, s);
                    decode(vr, d, scale_group, vi + d);
                    for (int j = 0; j < 16; ++j) {
                        ki[d + j] += s[j];
                    }
                }
            } else if (src >= 0) {
                for (int d = 0; d < dim; ++d) {
                    ki[d] = f16_decode(l.near_k[src * row + h * dim + d]);
                    vi[d] = f16_decode(l.near_v[src * row + h * dim + d]);
                }
            } else if (src_is_current(src)) {
                for (int d = 0; d < dim; ++d) {
                    ki[d] = l.cur_k[size_t(src_current_row(src)) * l.cur_stride + h * dim + d];
                    vi[d] = l.cur_v[size_t(src_current_row(src)) * l.cur_stride + h * dim + d];
                }
            }
        }
    });
    parallel_for(c.n_head_kv * c.n_q, [&](int item) {
        const int           h = item / c.n_q, i = item % c.n_q;
        const float *       k = &all_k[size_t(h) * c.n_kv * dim], *v = &all_v[size_t(h) * c.n_kv * dim];
        std::vector<double> s(c.n_kv), acc(dim);
        {
            for (int g = 0; g < c.gqa; ++g) {
                const int     head = h * c.gqa + g;
                const float * q    = &in.q[(size_t(i) * n_head + head) * dim];
                double        top  = in.sinks.empty() ? -INFINITY : in.sinks[head];
                for (int j = 0; j < c.n_kv; ++j) {
                    s[j] = -INFINITY;
                    if (in.cell_src[j] == kSrcHidden ||
                        (read && in.cell_src[j] == kSrcFar && !(*read)[i * c.n_head_kv + h][j / c.group])) {
                        continue;
                    }
                    const float m = in.mask.empty() ? 0.0f : f16_decode(in.mask[size_t(i) * in.mask_stride + j]);
                    if (m == -INFINITY) {
                        continue;
                    }
                    float lanes[8] = {};
                    for (int d = 0; d < dim; d += 8) {
                        for (int e = 0; e < 8; ++e) {
                            lanes[e] += q[d + e] * k[size_t(j) * dim + d + e];
                        }
                    }
                    double x = 0;
                    for (float y : lanes) {
                        x += y;
                    }
                    x *= scale;
                    if (c.softcap != 0.0f) {
                        x = c.softcap * std::tanh(x / c.softcap);
                    }
                    s[j] = x + m;
                    top  = std::max(top, s[j]);
                }
                double sum = in.sinks.empty() ? 0.0 : std::exp(in.sinks[head] - top);
                std::fill(acc.begin(), acc.end(), 0.0);
                for (int j = 0; j < c.n_kv; ++j) {
                    if (s[j] == -INFINITY) {
                        continue;
                    }
                    const double w = std::exp(s[j] - top);
                    sum += w;
                    for (int d = 0; d < dim; ++d) {
                        acc[d] += w * v[size_t(j) * dim + d];
                    }
                }
                for (int d = 0; d < dim; ++d) {
                    out[(size_t(i) * n_head + head) * dim + d] = sum > 0 ? float(acc[d] / sum) : 0.0f;
                }
            }
        }
    });
    return out;
}

struct Errors {
    double whole, worst_row;
};

Errors compare(const std::vector<float> & got, const std::vector<float> & want, int dim) {
    double e2 = 0, w2 = 0, worst = 0;
    for (size_t i = 0; i < want.size(); i += dim) {
        double e = 0, w = 0;
        for (int d = 0; d < dim; ++d) {
            const double x = double(got[i + d]) - want[i + d];
            e += x * x;
            w += double(want[i + d]) * want[i + d];
        }
        e2 += e, w2 += w;
        worst = std::max(worst, w > 0 ? std::sqrt(e / w) : (e > 0 ? INFINITY : 0.0));
        if (!(e >= 0)) {
            worst = INFINITY;  // NaN
        }
    }
    return {w2 > 0 && e2 >= 0 ? std::sqrt(e2 / w2) : (e2 == 0 ? 0.0 : INFINITY), worst};
}

// Queries and weights are rounded to f16 (2^-11 = 5e-4), which errors of single scores of about 1 inherit; sums of many
// values cancel more than their errors do, hence the room. A wrong row or channel shows as an error of order 1.
constexpr double kTolerance = 4e-3;

int n_failed = 0;

void check_attend(Rng & rng, const Case & c, const CudaDevice & device) {
    const int n_near = 160, n_head = c.n_head_kv * c.gqa;
    Layer     l  = random_layer(rng, c.n_head_kv, c.dim, c.group, c.n_kv, n_near, std::max(1, std::min(c.n_q, c.n_kv)));
    Inputs    in = make_inputs(rng, c, l);
    const float scale = 1.0f / std::sqrt(float(c.dim));
    // what the rows are rotated to is what the operation is told; the result is rotated back
    const Rotation rot   = rotation_of(c.rotate, c.dim);
    Layer          plain = l;
    for (size_t r = 0; r + plain.cur_stride <= l.cur_k.size(); r += plain.cur_stride) {
        rotate_values(&plain.cur_k[r], size_t(c.n_head_kv) * c.dim, rot.k);
        rotate_values(&plain.cur_v[r], size_t(c.n_head_kv) * c.dim, rot.v);
    }
    Inputs rotated = in;
    rotate_values(rotated.q.data(), rotated.q.size(), rot.k);
    auto want = reference(c, plain, rotated, scale);
    rotate_values(want.data(), want.size(), rot.v);

    DeviceLayer           d(l);
    const DeviceCells     cells(in.cell_src, 5);
    DeviceArray<uint16_t> mask(in.mask);
    DeviceArray<float>    q(in.q), sinks(in.sinks), out(std::vector<float>(want.size(), NAN));
    AttendArgs            a{};
    a.mem = d.mem, a.cur = d.cur, a.rot = rot, a.n_kv = c.n_kv;
    cells.tell(a);
    a.q = q.get(), a.q_stride_query = int64_t(n_head) * c.dim, a.q_stride_head = c.dim, a.n_q = c.n_q,
    a.n_head = n_head;
    a.mask = in.mask.empty() ? nullptr : mask.get(), a.mask_stride = in.mask_stride;
    a.sinks = in.sinks.empty() ? nullptr : sinks.get();
    a.scale = scale, a.softcap = c.softcap, a.out = out.get();
    const size_t         scratch_bytes = kv_attend_cuda_scratch(a, device);
    DeviceArray<uint8_t> scratch(std::vector<uint8_t>(scratch_bytes, 0xFF));
    kv_attend_cuda(a, device, scratch.get(), nullptr);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    const Errors e    = compare(out.download(), want, c.dim);
    const bool   good = e.whole < kTolerance && e.worst_row < 8 * kTolerance;
    n_failed += !good;
    std::printf("%s attend%s head %3d m %2d kv-heads %d gqa %2d n_q %3d n_kv %5d %-5s mask %-9s cap %2.0f sinks %d: "
                "error %.1e, worst row %.1e\n",
                good ? "ok  " : "FAIL", c.rotate ? " rotated" : "", c.dim, c.group, c.n_head_kv, c.gqa, c.n_q, c.n_kv,
                c.sources.c_str(), c.mask.c_str(), c.softcap, c.sinks, e.whole, e.worst_row);
    std::fflush(stdout);
}

// The lists of a look-up on the host, without their padding.
std::vector<std::vector<int32_t>> unpack_lists(const std::vector<int32_t> & packed, int n, int capacity) {
    std::vector<std::vector<int32_t>> lists;
    for (int i = 0; i < n; ++i) {
        const int32_t * list = &packed[i * group_list_stride(capacity)];
        lists.emplace_back(list + 1, list + 1 + std::min(std::max(list[0], 0), capacity));
    }
    return lists;
}

// The CPU's attention over the device's lists, with what stands in for the rest. All memory is the host's.
std::vector<float> attend_sparse_on_cpu(const SparseAttendArgs & a, size_t n_out) {
    std::vector<float> out(n_out, NAN);
    SparseAttendArgs   args = a;
    args.attend.out         = out.data();
    on_host(kv_attend_sparse_scratch, kv_attend_sparse, args);
    return out;
}

// The largest difference of estimates of unread mass: as a share of what a head attends to, where their size is beside the point.
double unread_error(const std::vector<float> & got, const std::vector<float> & want) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        if (got[i] != want[i]) {  // (both may be -inf)
            worst = std::max(worst, double(std::fabs(got[i] - want[i])));
        }
    }
    return worst;
}

// kv_select against the CPU's, then kv_attend_sparse with the device's lists against the reference, then both as one operation, which
// must choose the same. `stands_in`: with SelectArgs::unread, and then the attention is compared with the CPU's.
void check_lookup(Rng & rng, Case c, const LookupBudget & budget, bool stands_in, const CudaDevice & device) {
    const int        n_head = c.n_head_kv * c.gqa, n_near = 160;
    Layer            l     = random_layer(rng, c.n_head_kv, c.dim, c.group, c.n_kv, n_near, std::min(c.n_q, c.n_kv));
    Inputs           in    = make_inputs(rng, c, l);
    const float      scale = 1.0f / std::sqrt(float(c.dim));
    const SideLayout side  = side_layout(c.n_head_kv, c.dim, l.n_cells / c.group, 0);
    for (size_t i = 0; i < size_t(l.n_cells / c.group) * c.n_head_kv; ++i) {
        const uint16_t x = f16_encode(0.2f * std::fabs(normal(rng)));
        std::memcpy(&l.side[side.spread_offset + 2 * i], &x, 2);
    }
    const Rotation rot      = rotation_of(c.rotate, c.dim);
    const int      n_groups = (c.n_kv + c.group - 1) / c.group, capacity = n_groups, n_lists = c.n_q * c.n_head_kv;

    CellLists  cells_host = cell_lists(in.cell_src.data(), c.n_kv);
    SelectArgs a{};
    a.rot = rot, a.n_kv = c.n_kv, a.q_stride_query = int64_t(n_head) * c.dim, a.q_stride_head = c.dim, a.n_q = c.n_q;
    a.n_head = n_head, a.mask_stride = in.mask_stride, a.scale = scale, a.softcap = c.softcap, a.budget = budget;
    a.capacity = capacity;

    SelectArgs            host = a;
    std::vector<int32_t>  selected(n_lists * group_list_stride(capacity), -1);
    std::vector<uint64_t> counted(2, 0);
    host.mem = l.memory(), host.far_bits = cells_host.far_bits.data(), host.q = in.q.data();
    host.mask = in.mask.empty() ? nullptr : in.mask.data(), host.selected = selected.data();
    host.counters = counted.data();
    std::vector<float> unread_host(size_t(c.n_q) * n_head, NAN);
    host.unread = stands_in ? unread_host.data() : nullptr;
    on_host(kv_select_scratch, kv_select, host);
    const auto want = unpack_lists(selected, n_lists, capacity);

    DeviceLayer           d(l);
    const DeviceCells     cells(in.cell_src, 5);
    DeviceArray<uint16_t> mask(in.mask);
    DeviceArray<float>    q(in.q), sinks(in.sinks);
    DeviceArray<int32_t>  lists(std::vector<int32_t>(n_lists * group_list_stride(capacity), -1));
    DeviceArray<uint64_t> counters(std::vector<uint64_t>(2, 0));
    a.mem = d.mem, a.far_bits = cells.far_bits.get(), a.q = q.get(), a.mask = in.mask.empty() ? nullptr : mask.get();
    a.selected = lists.get(), a.counters = counters.get();
    DeviceArray<float> unread(unread_host.size());
    a.unread = stands_in ? unread.get() : nullptr;
    DeviceArray<uint8_t> scratch(std::vector<uint8_t>(kv_select_cuda_scratch(a, device), 0xFF));
    kv_select_cuda(a, device, scratch.get(), nullptr);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    const auto got = unpack_lists(lists.download(), n_lists, capacity);
    // Scores differ in the last bits, so groups on the edge of a bin may change places; the number of groups must agree but
    // for a bin when the threshold decides.
    size_t                         n_want = 0, n_other = 0, unordered = 0, counts = 0;
    std::vector<std::vector<char>> read;
    for (int i = 0; i < n_lists; ++i) {
        std::vector<int32_t> both;
        std::set_intersection(want[i].begin(), want[i].end(), got[i].begin(), got[i].end(), std::back_inserter(both));
        n_want += want[i].size();
        n_other += want[i].size() + got[i].size() - 2 * both.size();
        counts += budget.threshold == 0.0f && want[i].size() != got[i].size();
        read.emplace_back(n_groups, 0);
        for (size_t k = 0; k < got[i].size(); ++k) {
            unordered += got[i][k] < 0 || got[i][k] >= n_groups || (k > 0 && got[i][k] <= got[i][k - 1]);
            if (got[i][k] >= 0 && got[i][k] < n_groups) {
                read[i][got[i][k]] = 1;
            }
        }
    }
    const auto   counters_got = counters.download();
    const double drift        = std::fabs(double(counters_got[1]) - double(counted[1]));
    const bool   good_select  = unordered == 0 && counts == 0 && double(n_other) <= 0.02 * double(n_want) + 4.0 &&
                                counters_got[0] == counted[0] && drift <= 0.02 * double(counted[1]) + 4.0;
    const auto   unread_got   = stands_in ? unread.download() : std::vector<float>();
    // lists that differ by a group on an edge leave that much more or less
    const double unread_off  = stands_in && n_other == 0 ? unread_error(unread_got, unread_host) : 0.0;
    const bool   good_unread = unread_off < 0.02;

    // what is not on the list is poisoned: nobody may read it
    std::vector<char> any(n_groups, 0);
    for (const auto & r : read) {
        for (int g = 0; g < n_groups; ++g) {
            any[g] |= r[g];
        }
    }
    for (int cell = 0; cell < c.n_kv; ++cell) {
        if (!any[cell / c.group]) {
            l.poison(cell);
        }
    }
    Layer plain = l;
    for (size_t r = 0; r + plain.cur_stride <= l.cur_k.size(); r += plain.cur_stride) {
        rotate_values(&plain.cur_k[r], size_t(c.n_head_kv) * c.dim, rot.k);
        rotate_values(&plain.cur_v[r], size_t(c.n_head_kv) * c.dim, rot.v);
    }
    Inputs rotated = in;
    rotate_values(rotated.q.data(), rotated.q.size(), rot.k);
    auto out_want = reference(c, plain, rotated, scale, &read);
    rotate_values(out_want.data(), out_want.size(), rot.v);
    if (stands_in && can_stand_in(c.dim, c.gqa)) {
        const std::vector<int32_t> chosen = lists.download();
        SparseAttendArgs           on_cpu{};
        on_cpu.attend.mem = l.memory(), on_cpu.attend.cur = l.current(), on_cpu.attend.rot = rot;
        on_cpu.attend.n_kv = c.n_kv, on_cpu.attend.far_bits = cells_host.far_bits.data();
        on_cpu.attend.exact = cells_host.exact.data(), on_cpu.attend.n_exact = int32_t(cells_host.exact.size());
        on_cpu.attend.q = in.q.data(), on_cpu.attend.q_stride_query = a.q_stride_query;
        on_cpu.attend.q_stride_head = a.q_stride_head, on_cpu.attend.n_q = c.n_q, on_cpu.attend.n_head = n_head;
        on_cpu.attend.mask = host.mask, on_cpu.attend.mask_stride = a.mask_stride;
        on_cpu.attend.sinks = in.sinks.empty() ? nullptr : in.sinks.data(), on_cpu.attend.scale = scale;
        on_cpu.attend.softcap = c.softcap, on_cpu.selected = chosen.data(), on_cpu.capacity = capacity;
        on_cpu.unread = unread_got.data();
        out_want      = attend_sparse_on_cpu(on_cpu, out_want.size());
    }
    DeviceLayer        poisoned(l);
    DeviceArray<float> out(std::vector<float>(out_want.size(), NAN));
    SparseAttendArgs   s{};
    s.attend.mem = poisoned.mem, s.attend.cur = poisoned.cur, s.attend.rot = rot, s.attend.n_kv = c.n_kv;
    cells.tell(s.attend);
    s.attend.q = a.q, s.attend.q_stride_query = a.q_stride_query, s.attend.q_stride_head = a.q_stride_head;
    s.attend.n_q = c.n_q, s.attend.n_head = n_head, s.attend.mask = a.mask, s.attend.mask_stride = a.mask_stride;
    s.attend.sinks = in.sinks.empty() ? nullptr : sinks.get(), s.attend.scale = scale, s.attend.softcap = c.softcap;
    s.attend.out = out.get(), s.selected = lists.get(), s.capacity = capacity, s.unread = a.unread;
    DeviceArray<uint8_t> more(std::vector<uint8_t>(kv_attend_sparse_cuda_scratch(s, device), 0xFF));
    kv_attend_sparse_cuda(s, false, device, more.get(), nullptr);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    const Errors e           = compare(out.download(), out_want, c.dim);
    const bool   good_attend = e.whole < kTolerance && e.worst_row < 8 * kTolerance;

    // several times in a row: what blocks count must be as before after every launch
    DeviceArray<int32_t> lists_again(std::vector<int32_t>(n_lists * group_list_stride(capacity), -1));
    DeviceArray<float>   out_again(std::vector<float>(out_want.size(), NAN));
    counters.upload(std::vector<uint64_t>(2, 0));
    SelectArgs       again = a;
    SparseAttendArgs both  = s;
    again.mem = poisoned.mem, again.selected = lists_again.get(), both.selected = lists_again.get();
    both.attend.out = out_again.get();
    DeviceArray<uint8_t> scratch_again(std::vector<uint8_t>(kv_select_attend_cuda_scratch(again, both, device), 0xFF));
    constexpr int        n_again = 3;
    for (int i = 0; i < n_again; ++i) {
        kv_select_attend_cuda(again, both, device, scratch_again.get(), nullptr);
    }
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    const Errors e_again       = compare(out_again.download(), out_want, c.dim);
    const auto   counted_again = counters.download();
    const bool   same = unpack_lists(lists_again.download(), n_lists, capacity) == got &&
                        counted_again[0] == n_again * counters_got[0] && counted_again[1] == n_again * counters_got[1];
    const bool   good_again = same && e_again.whole < kTolerance && e_again.worst_row < 8 * kTolerance;
    n_failed += !good_select + !good_unread + !good_attend + !good_again;
    std::printf("%s look-up%s head %3d m %2d kv-heads %d gqa %2d n_q %2d n_kv %5d %-5s mask %-9s cap %2.0f sinks %d "
                "share %.2f-%.2f "
                "threshold %.1f: %zu of %zu groups differ, counts %zu, order %zu, counters %llu/%llu want %llu/%llu; "
                "%s off by %.1e; attention error %.1e, worst row %.1e; together with %d multiprocessors: %s, error "
                "%.1e, worst row %.1e\n",
                good_select && good_unread && good_attend && good_again ? "ok  " : "FAIL", c.rotate ? " rotated" : "",
                c.dim, c.group, c.n_head_kv, c.gqa, c.n_q, c.n_kv, c.sources.c_str(), c.mask.c_str(), c.softcap,
                c.sinks, budget.lookup_min, budget.lookup_max, budget.threshold, n_other, n_want, counts, unordered,
                (unsigned long long) counters_got[1], (unsigned long long) counters_got[0],
                (unsigned long long) counted[1], (unsigned long long) counted[0], stands_in ? "unread" : "nothing",
                unread_off, e.whole, e.worst_row, device.n_sm, same ? "same choice" : "ANOTHER CHOICE", e_again.whole,
                e_again.worst_row);
    std::fflush(stdout);
}

void check_lookup_all(bool quick, const CudaDevice & device) {
    Rng          rng(7);
    const char * sources[] = {"far", "tail", "mixed"};
    const char * masks[]   = {"none", "causal", "sequences"};
    for (int i = 0; i < (quick ? 8 : 120); ++i) {
        Case c{};
        c.dim                           = 64 << uniform(rng, 0, 2);
        c.group                         = 2 << uniform(rng, 0, 3);
        c.n_head_kv                     = uniform(rng, 1, 8);
        const int gqas[]                = {1, 2, 3, 4, 5, 8, 16};
        c.gqa                           = gqas[uniform(rng, 0, c.dim == 256 ? 5 : 6)];
        c.n_q                           = std::min(uniform(rng, 0, 1) ? 1 : uniform(rng, 2, 8), 16 / c.gqa);
        const int n_kvs[]               = {20, 256, 1000, 2048, 4100, 9000, 33000};
        c.n_kv                          = n_kvs[uniform(rng, 0, quick ? 2 : 6)];
        c.sources                       = sources[uniform(rng, 0, 2)];
        c.mask                          = masks[c.n_q == 1 ? 0 : uniform(rng, 0, 2)];
        c.softcap                       = uniform(rng, 0, 3) == 0 ? 30.0f : 0.0f;
        c.sinks                         = uniform(rng, 0, 3) == 0;
        c.rotate                        = uniform(rng, 0, 1) == 0;
        const float        shares[][2]  = {{0.1f, 0.2f}, {0.2f, 0.2f}, {0.02f, 0.9f}, {0.0f, 0.0f}, {1.0f, 1.0f}};
        const float        thresholds[] = {0.0f, 0.3f, 0.5f};
        const auto &       share        = shares[uniform(rng, 0, 4)];
        const LookupBudget budget{share[0], share[1], thresholds[uniform(rng, 0, 2)], uniform(rng, 0, 2) * 128,
                                  uniform(rng, 0, 3) == 0 ? uniform(rng, 1, 600) : 0};
        // as many blocks a list as a smaller device would have
        const int n_sm = uniform(rng, 0, 2) == 0 ? uniform(rng, 1, device.n_sm) : device.n_sm;
        check_lookup(rng, c, budget, uniform(rng, 0, 1) == 0, {n_sm, device.arch});
    }
}

// The bound that the documentation gives, far beyond the sizes in use.
void check_scratch() {
    size_t most = 0;
    for (int dim : {64, 128, 256}) {
        for (int n_head_kv : {1, 8, 64}) {
            for (int gqa : {1, 4, 16}) {
                for (int n_q : {1, 17, 512, 4096}) {
                    AttendArgs a{};
                    a.mem.head_dim  = dim;
                    a.mem.n_head_kv = n_head_kv;
                    a.mem.group     = 4;
                    a.mem.n_cells = a.n_kv = 1 << 18;
                    a.n_head               = n_head_kv * gqa;
                    a.n_q = a.cur.n_rows = n_q;
                    most                 = std::max(most, kv_attend_cuda_scratch(a, {200, 90}));
                }
            }
        }
    }
    const bool ok = most <= size_t(64) << 20;
    std::printf("%s scratch: at most %.1f MiB\n", ok ? "ok  " : "FAIL", double(most) / (1 << 20));
    n_failed += !ok;
}

void check_attend_all(bool quick, const CudaDevice & device) {
    Rng               rng(1);
    std::vector<Case> cases;
    for (int dim : {64, 128, 256}) {
        for (int group : {2, 4, 8, 16, 32}) {
            for (const char * s : kSources) {
                const bool near = std::string(s) == "near";
                cases.push_back({dim, group, 2, 4, 1, near ? 150 : 1024 + 33, s, "none"});
                cases.push_back({dim, group, 2, 2, 3, near ? 130 : 700, s, "causal"});
            }
        }
    }
    for (int i = 0; i < 120; ++i) {
        Case c   = random_case(rng, 64 << uniform(rng, 0, 2), {1, 1, 2, 4, 7, 16, 17, 33, 64, 100, 200});
        c.rotate = c.n_q * c.gqa <= 16 && uniform(rng, 0, 1) == 0;
        cases.push_back(c);
    }
    for (int dim : {64, 128, 256}) {  // many splits, long rows of the merge
        cases.push_back({dim, 4, 8, 4, 1, dim == 256 ? 20000 : 40000, "tail", "none"});
        cases.push_back({dim, 4, 8, 4, 1, dim == 256 ? 20000 : 40000, "tail", "none", 0.0f, false, true});
        cases.push_back({dim, 4, 2, 4, 1, 20, "near", "none", 0.0f, true, true});
        cases.push_back({dim, 4, 2, 1, 16, 500, "tail", "causal", 0.0f, false, true});
        cases.push_back({dim, 8, 2, 8, 4, 20000, "mixed", "sequences"});
        cases.push_back({dim, 4, 2, 4, 128, 3000, "tail", "causal"});
        cases.push_back({dim, 4, 5, 4, 200, 2500, "mixed", "causal"});
    }
    for (size_t i = 0; i < cases.size(); ++i) {
        if (!quick || i % 12 == 5) {
            if (quick) {
                cases[i].n_kv = std::max(cases[i].n_q, std::min(cases[i].n_kv, 700));
            }
            check_attend(rng, cases[i], device);
        }
    }
    // what Turing would run: less shared memory, no prefill kernel for head size 256
    const CudaDevice turing{device.n_sm, 75};
    for (int dim : {64, 128, 256}) {
        check_attend(rng, {dim, 4, 2, 4, 1, 1000, "tail", "none", 0.0f, false, true}, turing);
        check_attend(rng, {dim, 4, 2, 4, 40, 1000, "mixed", "causal"}, turing);
    }
    // and what a device without the instructions of Hopper would
    const CudaDevice ampere{device.n_sm, 80};
    for (int dim : {64, 128}) {
        check_attend(rng, {dim, 4, 2, 4, 40, 1000, "mixed", "causal"}, ampere);
        check_attend(rng, {dim, 4, 3, 4, 200, 2500, "tail", "causal"}, ampere);
        check_attend(rng, {dim, 8, 2, 3, 70, 3001, "mixed", "sequences", 20.0f, true}, ampere);
    }
    // KV heads in turns, of 3 and 2
    for (int arch : {device.arch, 80}) {
        for (int dim : {64, 128, 256}) {
            const CudaDevice small{device.n_sm, arch, size_t(2) * 130 * dim * sizeof(half) * 3};
            check_attend(rng, {dim, 4, 5, 3, 130, 1000, "tail", "causal"}, small);
            check_attend(rng, {dim, 4, 5, 1, 20, 3000, "mixed", "causal"}, small);
        }
    }
    check_scratch();
}

// --- fold and store --------------------------------------------------------------------------------------------------

template <typename T>
size_t count_differences(const std::vector<T> & a, const std::vector<T> & b) {
    size_t         n  = 0;
    const uint8_t *pa = reinterpret_cast<const uint8_t *>(a.data()), *pb = reinterpret_cast<const uint8_t *>(b.data());
    for (size_t i = 0; i < a.size() * sizeof(T); ++i) {
        n += pa[i] != pb[i];
    }
    return n;
}

void store_reference(Layer & l, const std::vector<int32_t> & dst) {
    const size_t row = size_t(l.n_head_kv) * l.dim;
    for (int r = 0; r < l.n_rows; ++r) {
        for (size_t i = 0; i < row && dst[r] >= 0; ++i) {
            l.near_k[dst[r] * row + i] = f16_encode(l.cur_k[size_t(r) * l.cur_stride + i]);
            l.near_v[dst[r] * row + i] = f16_encode(l.cur_v[size_t(r) * l.cur_stride + i]);
        }
    }
}

// `together`: kv_commit_cuda instead of fold, then store.
void check_fold(Rng & rng, int dim, int group, int n_groups, int capacity, bool together) {
    const int            n_rows = together ? 16 : 40;
    const Rotation       rot    = rotation_of(together && group != 8, dim);
    Layer                l      = random_layer(rng, uniform(rng, 1, 4), dim, group, group * (n_groups + 5), 64, n_rows);
    std::vector<int32_t> plan(size_t(capacity) * (1 + group), 7);  // padding is never looked at
    for (float & x : l.cur_k) {                                    // a wide range, zeros too
        x *= uniform(rng, 0, 9) == 0 ? 0.0f : std::exp2(float(uniform(rng, -12, 6)));
    }
    std::vector<int> order(n_groups + 5);
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = int(i);
    }
    std::shuffle(order.begin(), order.end(), rng);
    for (int i = 0; i < n_groups; ++i) {
        plan[size_t(i) * (1 + group)] = order[i];
        for (int j = 0; j < group; ++j) {
            const int kind                        = uniform(rng, 0, 7);
            plan[size_t(i) * (1 + group) + 1 + j] = kind < 3   ? uniform(rng, 0, l.n_near - 1)
                                                    : kind < 5 ? src_current(uniform(rng, 0, l.n_rows - 1))
                                                    : kind < 7 ? kSrcFar
                                                               : kSrcHidden;
        }
    }
    std::vector<int32_t> dst(l.n_rows);
    std::vector<int>     rows(l.n_near);
    for (int i = 0; i < l.n_near; ++i) {
        rows[i] = i;
    }
    std::shuffle(rows.begin(), rows.end(), rng);
    for (int r = 0; r < l.n_rows; ++r) {
        dst[r] = uniform(rng, 0, 2) == 0 ? -1 : rows[r];
    }

    DeviceLayer          d(l);
    DeviceArray<int32_t> plan_d(plan), dst_d(dst), count_d(std::vector<int32_t>{n_groups, 42});
    const SideLayout     side = side_layout(l.n_head_kv, dim, l.n_cells / group, 0);
    FoldArgs             a{d.mem, d.cur, rot, plan_d.get(), capacity, nullptr, 0};
    StoreArgs            s{d.mem, d.cur, rot, dst_d.get()};
    const Epoch          epoch{count_d.get() + 1, reinterpret_cast<int32_t *>(d.side.get() + side.epoch_offset)};
    if (together) {
        kv_commit_cuda({{a, s, epoch.to}}, count_d.get(), epoch.from, nullptr);
    } else {
        kv_fold_cuda(a, count_d.get(), nullptr);
        kv_store_cuda(s, epoch, nullptr);
    }
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());

    for (int r = 0; r < n_rows; ++r) {
        rotate_values(&l.cur_k[size_t(r) * l.cur_stride], size_t(l.n_head_kv) * dim, rot.k);
        rotate_values(&l.cur_v[size_t(r) * l.cur_stride], size_t(l.n_head_kv) * dim, rot.v);
    }
    FoldArgs ref{l.memory(), l.current(), {0, 0}, plan.data(), n_groups, nullptr, 0};
    on_host(kv_fold_scratch, kv_fold, ref);
    store_reference(l, dst);
    const int32_t plan_number = 42;
    std::memcpy(l.side.data() + side.epoch_offset, &plan_number, sizeof(plan_number));

    // the spread is a sum whose order is not prescribed: one unit in the last place is granted
    auto   got_side = d.side.download();
    size_t n_spread = 0;
    for (size_t i = side.spread_offset; i + 1 < side.spread_offset + size_t(l.n_cells / group) * l.n_head_kv * 2;
         i += 2) {
        uint16_t x, y;
        std::memcpy(&x, &got_side[i], 2);
        std::memcpy(&y, &l.side[i], 2);
        n_spread += std::abs(int(x) - int(y)) > 1;
        std::memcpy(&got_side[i], &y, 2);
    }
    const size_t bad[] = {count_differences(d.far_k.download(), l.far_k),
                          count_differences(d.far_v.download(), l.far_v), count_differences(got_side, l.side), n_spread,
                          count_differences(d.near_k.download(), l.near_k) +
                              count_differences(d.near_v.download(), l.near_v)};
    const bool   good  = bad[0] + bad[1] + bad[2] + bad[3] + bad[4] == 0;
    n_failed += !good;
    std::printf("%s %s head %3d m %2d groups %3d: wrong bytes in keys %zu values %zu side %zu spreads %zu pool %zu\n",
                good ? "ok  " : "FAIL", together ? "commit" : "fold+store", dim, group, n_groups, bad[0], bad[1],
                bad[2], bad[3], bad[4]);
}

void check_fold_all(bool quick) {
    Rng rng(2);
    for (int dim : {64, 128, 256}) {
        for (int group : {2, 4, 8, 16, 32}) {
            for (int n : quick ? std::vector<int>{2} : std::vector<int>{0, 1, 3, 40}) {
                check_fold(rng, dim, group, n, n + 3, false);
                check_fold(rng, dim, group, std::min(n, 4), std::min(n, 4) + 1, true);
            }
        }
    }
}

// --- scores ----------------------------------------------------------------------------------------------------------

// Scores are of order 1, and differ by the rounding of sums and of exponentials. A wrong cell or channel shows as an error of order 1.
constexpr double kScoreTolerance = 2e-4;

double largest_difference(const std::vector<float> & got, const std::vector<float> & want, size_t begin, size_t end) {
    double most = 0.0;
    for (size_t i = begin; i < end; ++i) {
        const double e = std::fabs(double(got[i]) - want[i]) / (1.0 + std::fabs(double(want[i])));
        most           = e >= 0.0 ? std::max(most, e) : INFINITY;  // NaN
    }
    return most;
}

// Statistics of queries with some mean and variance in every channel.
std::vector<float> random_statistics(Rng & rng, int n_head, int dim, float weight) {
    std::vector<float> x(size_t(query_stats_size(n_head, dim)), weight);
    for (int i = 0; i < n_head * dim; ++i) {
        const float mean = 0.5f * normal(rng), variance = std::exp2(normal(rng));
        x[1 + i]                = weight * mean;
        x[1 + n_head * dim + i] = weight * (mean * mean + variance);
    }
    return x;
}

struct ScoreCase {
    int         dim, group, n_head_kv, gqa, n_kv;
    std::string holes;    // none, cells, tiles
    std::string queries;  // some, unseen, none
    float       softcap;
    bool        before, in_place;
};

// Far bits of a layer; rows of other cells are poisoned. holes: none, cells, tiles
std::vector<uint32_t> far_with_holes(Rng & rng, Layer & l, int n_kv, const std::string & holes) {
    std::vector<uint32_t> far((n_kv + 31) / 32, 0);
    const size_t          row_blocks = size_t(l.n_head_kv) * l.blocks();
    std::vector<char>     group_used(l.n_cells / l.group, 0);
    for (int i = 0; i < l.n_cells; ++i) {
        const bool hole = holes == "cells"   ? uniform(rng, 0, 2) == 0
                          : holes == "tiles" ? i / 40 % 3 == 1 || uniform(rng, 0, 19) == 0
                                             : false;
        if (i < n_kv && !hole) {
            far[i / 32] |= 1u << (i % 32);
            group_used[i / l.group] = 1;
        } else {  // nobody may look
            l.poison(i);
        }
    }
    for (size_t g = 0; g < group_used.size(); ++g) {
        if (!group_used[g]) {
            std::memset(&l.side[g * row_blocks * sizeof(Fp4Block)], 0xFF, row_blocks * sizeof(Fp4Block));
        }
    }
    return far;
}

void check_score(Rng & rng, const ScoreCase & c, const CudaDevice & device) {
    const int                   n_head  = c.n_head_kv * c.gqa;
    Layer                       l       = random_layer(rng, c.n_head_kv, c.dim, c.group, c.n_kv, 1, 1);
    const std::vector<uint32_t> far     = far_with_holes(rng, l, c.n_kv, c.holes);
    const std::vector<float>    queries = random_statistics(rng, n_head, c.dim, c.queries == "unseen" ? 0.0f : 50.0f);
    std::vector<float>          before(size_t(kScoreKinds) * c.n_kv), want(before.size());
    for (float & x : before) {
        x = normal(rng);
    }
    ScoreArgs host{};
    host.sizes = true;
    host.mem = l.memory(), host.far_bits = far.data(), host.n_kv = c.n_kv;
    host.queries = c.queries == "none" ? nullptr : queries.data(), host.n_head = n_head;
    host.scale = 1.0f / std::sqrt(float(c.dim)), host.softcap = c.softcap;
    host.before = c.before ? before.data() : nullptr, host.scores = want.data();
    on_host(kv_score_scratch, kv_score, host);

    DeviceLayer           d(l);
    DeviceArray<uint32_t> far_d(far);
    DeviceArray<float>    queries_d(queries), before_d(before), scores(std::vector<float>(want.size(), NAN));
    ScoreArgs             a = host;
    a.mem = d.mem, a.far_bits = far_d.get(), a.queries = host.queries != nullptr ? queries_d.get() : nullptr;
    a.before = c.before ? before_d.get() : nullptr;
    a.scores = c.in_place ? before_d.get() : scores.get();
    std::vector<float> got[2];
    for (auto & scored : got) {  // twice: nothing may be left over, and sums are made in the same order
        before_d.upload(before);
        const size_t         bytes = kv_score_cuda_scratch(a, device);
        DeviceArray<uint8_t> scratch(std::vector<uint8_t>(bytes, 0xFF));
        kv_score_cuda(a, device, scratch.get(), nullptr);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        scored = c.in_place ? before_d.download() : scores.download();
    }
    double error[kScoreKinds], most = 0.0;
    for (int kind = 0; kind < kScoreKinds; ++kind) {
        error[kind] = largest_difference(got[0], want, size_t(kind) * c.n_kv, size_t(kind + 1) * c.n_kv);
        most        = std::max(most, error[kind]);
    }
    const bool same = std::memcmp(got[0].data(), got[1].data(), want.size() * sizeof(float)) == 0;
    const bool good = most < kScoreTolerance && same;
    n_failed += !good;
    std::printf(
        "%s score head %3d m %2d kv-heads %d gqa %2d n_kv %5d holes %-5s queries %-6s cap %2.0f before %d in place "
        "%d, %3d multiprocessors: error %.1e (novelty %.1e, size %.1e, attention %.1e)%s\n",
        good ? "ok  " : "FAIL", c.dim, c.group, c.n_head_kv, c.gqa, c.n_kv, c.holes.c_str(), c.queries.c_str(),
        c.softcap, c.before, c.in_place, device.n_sm, most, error[kNovelty], error[kSize], error[kAttention],
        same ? "" : ", THE SECOND TIME ANOTHER RESULT");
    std::fflush(stdout);
}

// `rotation`: channels that are rotated together, or 0.
void check_observe(Rng & rng, int dim, int n_head, int n_q, int rotation, int n_layers) {
    const int64_t                   head_stride = dim + 4 * uniform(rng, 0, 1), query_stride = n_head * head_stride + 8;
    std::vector<DeviceArray<float>> q_d, stats_d;
    std::vector<std::vector<float>> want;
    std::vector<ObserveArgs>        layers;
    for (int i = 0; i < n_layers; ++i) {
        std::vector<float> q(size_t(n_q * query_stride));
        for (float & x : q) {
            x = 0.5f + normal(rng);
        }
        want.push_back(random_statistics(rng, n_head, dim, i % 2 == 0 ? 30.0f : 0.0f));
        q_d.emplace_back(q);
        stats_d.emplace_back(want.back());
        ObserveArgs a{{q.data(), query_stride, head_stride, n_q, n_head, dim, rotation}, want.back().data()};
        on_host(kv_observe_scratch, kv_observe, a);
        a.q = q_d.back().get(), a.queries = stats_d.back().get();
        layers.push_back(a);
    }
    kv_observe_cuda(layers, nullptr);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());
    double most = 0.0;
    for (int i = 0; i < n_layers; ++i) {
        most = std::max(most, largest_difference(stats_d[i].download(), want[i], 0, want[i].size()));
    }
    const bool good = most < kScoreTolerance;
    n_failed += !good;
    std::printf("%s observe head %3d heads %2d n_q %3d rotation %3d layers %3d: error %.1e\n", good ? "ok  " : "FAIL",
                dim, n_head, n_q, rotation, n_layers, most);
}

void check_score_all(bool quick, const CudaDevice & device) {
    Rng                    rng(8);
    std::vector<ScoreCase> cases;
    const char *           holes[] = {"none", "cells", "tiles"};
    for (int dim : {64, 128, 256}) {
        for (int gqa : {1, 2, 3, 4, 7, 16}) {
            for (const char * h : holes) {
                const int groups[] = {2, 4, 8, 16, 32}, n_kvs[] = {256, 1000, 2048, 3001};
                cases.push_back({dim, groups[cases.size() % 5], uniform(rng, 1, 3), gqa,
                                 n_kvs[uniform(rng, 0, quick ? 1 : 3)], h, "some", gqa == 2 ? 30.0f : 0.0f,
                                 uniform(rng, 0, 1) == 0, false});
                cases.back().in_place = cases.back().before && uniform(rng, 0, 1) == 0;
            }
        }
        for (const char * q : {"unseen", "none"}) {
            cases.push_back({dim, 4, 2, 5, 700, "cells", q, 0.0f, true, true});
        }
        for (int n_kv : {1, 31, 33, 64, 130}) {  // fewer cells than warps
            cases.push_back(
                {dim, n_kv == 33 ? 32 : 2, 2, 4, n_kv, n_kv > 1 ? "cells" : "none", "some", 0.0f, false, false});
        }
    }
    if (!quick) {
        cases.push_back({128, 4, 8, 4, 20000, "tiles", "some", 0.0f, true, true});
    }
    for (size_t i = 0; i < cases.size(); ++i) {
        if (!quick || i % 8 == 5) {
            // as many blocks as a smaller device would have
            check_score(rng, cases[i], {i % 3 == 0 ? uniform(rng, 1, device.n_sm) : device.n_sm, device.arch});
        }
    }
    for (int dim : {64, 128, 256}) {
        for (int n_q : {1, 2, 7, 16, 33, 512}) {
            check_observe(rng, dim, n_q == 512 ? 8 : uniform(rng, 1, 32), n_q, 0, n_q <= 16 ? 3 : 1);
            check_observe(rng, dim, uniform(rng, 1, 8), n_q, n_q % 2 == 0 ? 64 : dim, 1);
        }
    }
    check_observe(rng, 64, 2, 1, 64, 300);  // more layers than a launch carries
}

// --- scores from kept queries ----------------------------------------------------------------------------------------

// Micro-batches of `steps` queries in turn, for layers with both rules.
void check_sample(Rng & rng, int dim, int n_head, const std::vector<int> & steps, int rotation, int n_layers) {
    std::vector<std::vector<uint16_t>> want;
    std::vector<DeviceArray<uint16_t>> got;
    const auto rule_of = [](int layer) { return layer % 2 == 0 ? kWindowQueries : kLastQueries; };
    for (int i = 0; i < n_layers; ++i) {
        want.emplace_back(size_t(1 + rule_of(i).rows) * n_head * dim, 0);
        got.emplace_back(want.back());
    }
    for (int n_q : steps) {
        const int64_t      head_stride = dim + 4 * uniform(rng, 0, 1), query_stride = n_head * head_stride + 8;
        std::vector<float> q(size_t(n_q * query_stride));
        for (float & x : q) {
            x = normal(rng);
        }
        const DeviceArray<float> q_d(q);
        std::vector<SampleArgs>  layers;
        for (int i = 0; i < n_layers; ++i) {
            SampleArgs a{{q.data(), query_stride, head_stride, n_q, n_head, dim, rotation}, rule_of(i), want[i].data()};
            kv_sample(a, {0, 1, nullptr, nullptr, nullptr, 0});
            a.q = q_d.get(), a.samples = got[i].get();
            layers.push_back(a);
        }
        kv_sample_cuda(layers, nullptr);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    size_t bad = 0;
    for (int i = 0; i < n_layers; ++i) {
        bad += count_differences(got[i].download(), want[i]);
    }
    n_failed += bad != 0;
    std::printf("%s sample head %3d heads %2d rotation %3d layers %3d, %zu micro-batches: wrong bytes %zu\n",
                bad == 0 ? "ok  " : "FAIL", dim, n_head, rotation, n_layers, steps.size(), bad);
}

struct SampledCase {
    int          dim, group, n_head_kv, gqa, n_kv;
    SampledScore score;
    std::string  holes;      // as for scores
    int          seen;       // queries so far
    bool         sequences;  // cells of several sequences in turns, with ages of their own
    float        softcap;
    bool         before, in_place;
};

// The largest difference, relative to a value or, where that is more, the mean of all.
double relative_difference(const std::vector<float> & got, const std::vector<float> & want, double mean) {
    double most = 0.0;
    for (size_t i = 0; i < want.size(); ++i) {
        const double e = std::fabs(double(got[i]) - want[i]), size = std::max(mean, std::fabs(double(want[i])));
        most = !(e >= 0.0) ? INFINITY : e > 0.0 ? std::max(most, e / size) : most;
    }
    return most;
}

double mean_size(const std::vector<float> & x) {
    double sum = 0.0;
    for (float y : x) {
        sum += std::fabs(double(y));
    }
    return sum / double(std::max<size_t>(1, x.size()));
}

void check_sampled(Rng & rng, const SampledCase & c, const CudaDevice & device) {
    const int                   n_head = c.n_head_kv * c.gqa;
    Layer                       l      = random_layer(rng, c.n_head_kv, c.dim, c.group, c.n_kv, 1, 1);
    const std::vector<uint32_t> far    = far_with_holes(rng, l, c.n_kv, c.holes);
    const SampleRule            rule   = sample_rule(c.score);
    std::vector<int32_t>        age(c.n_kv);
    for (int i = 0; i < c.n_kv; ++i) {
        age[i] = c.sequences ? (c.n_kv - 1 - i) / 3 + 50 * (i / 16 % 3) : c.n_kv - 1 - i;
    }
    std::vector<uint16_t> samples(size_t(1 + rule.rows) * n_head * c.dim, 0x7E00);
    for (int h = 0; h < n_head; ++h) {
        const int64_t n = c.seen;
        std::memcpy(&samples[size_t(h) * c.dim], &n, sizeof(n));
    }
    const size_t row = size_t(n_head) * c.dim;
    for (int r = 0; r < std::min(rule.rows, (c.seen + rule.every - 1) / rule.every); ++r) {
        for (size_t i = 0; i < row; ++i) {
            samples[(1 + r) * row + i] = f16_encode(2.0f * normal(rng));
        }
    }
    std::vector<float> before(c.n_kv), want(c.n_kv);
    for (float & x : before) {
        x = normal(rng);
    }
    SampledArgs host{};
    host.mem = l.memory(), host.score = c.score, host.far_bits = far.data(), host.age = age.data(), host.n_kv = c.n_kv;
    host.samples = samples.data(), host.n_head = n_head, host.scale = 1.0f / std::sqrt(float(c.dim));
    host.softcap = c.softcap, host.scores = want.data();
    on_host(kv_sampled_scratch, kv_sampled, host, kHostThreads);
    const double mean = mean_size(want);
    for (int i = 0; i < c.n_kv && c.before; ++i) {
        want[i] += before[i];
    }

    DeviceLayer           d(l);
    DeviceArray<uint32_t> far_d(far);
    DeviceArray<int32_t>  age_d(age);
    DeviceArray<uint16_t> samples_d(samples);
    DeviceArray<float>    before_d(before), scores(std::vector<float>(want.size(), NAN));
    SampledArgs           a = host;
    a.mem = d.mem, a.far_bits = far_d.get(), a.age = age_d.get(), a.samples = samples_d.get();
    a.before = c.before ? before_d.get() : nullptr;
    a.scores = c.in_place ? before_d.get() : scores.get();
    std::vector<float> got[2];
    for (auto & scored : got) {  // twice: nothing may be left over, and sums are made in the same order
        before_d.upload(before);
        DeviceArray<uint8_t> scratch(std::vector<uint8_t>(kv_sampled_cuda_scratch(a, device), 0xFF));
        kv_sampled_cuda(a, device, scratch.get(), nullptr);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        scored = c.in_place ? before_d.download() : scores.download();
    }
    const double error = relative_difference(got[0], want, mean);
    const bool   same  = std::memcmp(got[0].data(), got[1].data(), want.size() * sizeof(float)) == 0;
    const bool   good  = error < kScoreTolerance && same;
    n_failed += !good;
    std::printf(
        "%s sampled %-7s head %3d m %2d kv-heads %d gqa %2d n_kv %5d holes %-5s seen %5d sequences %d cap %2.0f "
        "before %d in place %d, %3d multiprocessors: error %.1e (mean score %.2g)%s\n",
        good ? "ok  " : "FAIL", c.score == SampledScore::last ? "last" : "windows", c.dim, c.group, c.n_head_kv, c.gqa,
        c.n_kv, c.holes.c_str(), c.seen, c.sequences, c.softcap, c.before, c.in_place, device.n_sm, error, mean,
        same ? "" : ", THE SECOND TIME ANOTHER RESULT");
    std::fflush(stdout);
}

void check_sampled_all(bool quick, const CudaDevice & device) {
    Rng rng(11);
    for (int dim : {64, 128, 256}) {
        check_sample(rng, dim, 5, {1, 1, 30, 1, 64, 2, 512}, 0, 4);
        check_sample(rng, dim, 3, {16, 1, 7, 40, 100}, dim, 2);
        check_sample(rng, dim, 8, {2000, 1, 1536, 1537}, 64, 2);
    }
    check_sample(rng, 64, 2, {1, 1}, 64, 300);  // more layers than a launch carries
    std::vector<SampledCase> cases;
    const char *             holes[]  = {"none", "cells", "tiles"};
    const int                groups[] = {2, 4, 8, 16, 32}, seens[] = {0, 1, 20, 500, 1535, 5000, 70001};
    for (SampledScore score : {SampledScore::last, SampledScore::windows}) {
        for (int dim : {64, 128, 256}) {
            for (int gqa : {1, 2, 3, 4, 7, 16}) {
                for (const char * h : holes) {
                    const int  n_kvs[] = {256, 1000, 2048, 3001};
                    const bool before  = uniform(rng, 0, 1) == 0;
                    cases.push_back({dim, groups[cases.size() % 5], uniform(rng, 1, 3), gqa,
                                     n_kvs[uniform(rng, 0, quick ? 1 : 3)], score, h, seens[cases.size() % 7],
                                     uniform(rng, 0, 2) == 0, gqa == 2 ? 30.0f : 0.0f, before,
                                     before && uniform(rng, 0, 1) == 0});
                }
            }
            for (int n_kv : {1, 31, 33, 64, 130}) {
                cases.push_back({dim, n_kv == 33 ? 32 : 2, 2, 4, n_kv, score, n_kv > 1 ? "cells" : "none", 5000, false,
                                 0.0f, false, false});
            }
        }
        if (!quick) {
            cases.push_back({128, 4, 8, 4, 20000, score, "tiles", 20000, false, 0.0f, true, true});
        }
    }
    for (size_t i = 0; i < cases.size(); ++i) {
        if (!quick || i % 16 == 5) {
            // as many blocks as a smaller device would have
            check_sampled(rng, cases[i], {i % 3 == 0 ? uniform(rng, 1, device.n_sm) : device.n_sm, device.arch});
        }
    }
}

// --- second readings -------------------------------------------------------------------------------------------------

// Queries are rounded to f16, which moves what a cell gets by a thousandth.
constexpr double kReceiveTolerance = 5e-3;

// The largest difference of means over queries; infinite where the number of queries differs.
double alignment_error(const std::vector<Alignment> & got, const std::vector<Alignment> & want) {
    double most = 0.0;
    for (size_t j = 0; j < want.size(); ++j) {
        const double n = want[j].queries, largest = 1.0 + want[j].largest;
        for (double e : {(got[j].recalled - want[j].recalled) / n, (got[j].divergence - want[j].divergence) / n,
                         (got[j].largest - want[j].largest) / largest}) {
            most = got[j].queries == n && e == e ? std::max(most, std::fabs(e)) : INFINITY;
        }
    }
    return most;
}

// kv_receive, kv_lose and kv_align against the CPU's.
void check_receive(Rng & rng, const Case & c) {
    const int    n_head = c.n_head_kv * c.gqa;
    Layer        l  = random_layer(rng, c.n_head_kv, c.dim, c.group, c.n_kv, 160, std::max(1, std::min(c.n_q, c.n_kv)));
    const Inputs in = make_inputs(rng, c, l);
    const CellLists lists = cell_lists(in.cell_src.data(), c.n_kv);

    AttendArgs host{};
    host.mem = l.memory(), host.cur = l.current(), host.n_kv = c.n_kv;
    host.far_bits = lists.far_bits.data(), host.exact = lists.exact.data(), host.n_exact = int32_t(lists.exact.size());
    host.q = in.q.data(), host.q_stride_query = int64_t(n_head) * c.dim, host.q_stride_head = c.dim;
    host.n_q = c.n_q, host.n_head = n_head, host.mask = in.mask.empty() ? nullptr : in.mask.data();
    host.mask_stride = in.mask_stride, host.sinks = in.sinks.empty() ? nullptr : in.sinks.data();
    host.scale = 1.0f / std::sqrt(float(c.dim)), host.softcap = c.softcap;

    DeviceLayer           d(l);
    const DeviceCells     cells(in.cell_src, 5);
    DeviceArray<uint16_t> mask(in.mask);
    DeviceArray<float>    q(in.q), sinks(in.sinks);
    AttendArgs            a = host;
    a.mem = d.mem, a.cur = d.cur, a.q = q.get(), a.mask = in.mask.empty() ? nullptr : mask.get();
    a.sinks = in.sinks.empty() ? nullptr : sinks.get();
    cells.tell(a);

    std::vector<float> received(size_t(c.n_head_kv) * l.n_cells, 0.0f);
    for (float & x : received) {  // of parts before
        x = uniform(rng, 0, 7) == 0 ? 0.01f * std::fabs(normal(rng)) : 0.0f;
    }
    DeviceArray<float> received_d(received);
    on_host(kv_receive_scratch, kv_receive, ReceiveArgs{host, received.data()}, kHostThreads);
    kv_receive_cuda({a, received_d.get()}, nullptr);

    std::vector<uint32_t> dropped(lists.far_bits.size());
    for (uint32_t & word : dropped) {
        word = rng();
    }
    std::vector<Alignment>      sums(n_head, {3.0, 2.0, 1.0, 0.01});
    const DeviceArray<uint32_t> dropped_d(dropped);
    DeviceArray<Alignment>      sums_d(sums);
    on_host(kv_lose_scratch, kv_lose, LoseArgs{host, dropped.data(), sums.data()}, kHostThreads);
    kv_lose_cuda({a, dropped_d.get(), sums_d.get()}, nullptr);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaDeviceSynchronize());

    const double error = relative_difference(received_d.download(), received, 0.01 / c.n_kv);
    const double lost  = alignment_error(sums_d.download(), sums);

    // Lists of a third of the groups, and of one whose cells the query sees; for a few queries, because the CPU's is slow.
    double missed = 0.0;
    if (double(c.n_q) * n_head * c.n_kv * c.dim < 3e8) {
        const int32_t        n_groups = (c.n_kv + c.group - 1) / c.group;
        const int64_t        stride   = group_list_stride(n_groups);
        const int            n_lists  = c.n_q * c.n_head_kv;
        std::vector<int32_t> selected(size_t(n_lists * stride), -1);
        for (int i = 0; i < n_lists; ++i) {
            const int query = i / c.n_head_kv;
            int       cell  = 0;
            while (cell < c.n_kv - 1 &&
                   (in.cell_src[cell] == kSrcHidden ||
                    (!in.mask.empty() && in.mask[size_t(query) * in.mask_stride + cell] == kHalfMinusInf))) {
                ++cell;
            }
            int32_t * list = &selected[size_t(i * stride)];
            list[0]        = 0;
            for (int32_t g = 0; g < n_groups; ++g) {
                if (g == cell / c.group || uniform(rng, 0, 2) == 0) {
                    list[++list[0]] = g;
                }
            }
        }
        const DeviceArray<int32_t> selected_d(selected);
        std::vector<Alignment>     read(n_head, {3.0, 2.0, 1.0, 0.01});
        DeviceArray<Alignment>     read_d(read);
        run_on_threads(kHostThreads, 0, [&](const Threads & t) {
            kv_align({host, selected.data(), n_groups, nullptr}, read.data(), t);
        });
        kv_align_cuda({a, selected_d.get(), n_groups, nullptr}, read_d.get(), nullptr);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        missed = alignment_error(read_d.download(), read);
    }
    const bool good = error < kReceiveTolerance && lost < kReceiveTolerance && missed < kReceiveTolerance;
    n_failed += !good;
    std::printf("%s receive head %3d m %2d kv-heads %d gqa %2d n_q %3d n_kv %5d %-5s mask %-9s cap %2.0f sinks %d: "
                "error %.1e; lost: error %.1e, missed by lists: error %.1e\n",
                good ? "ok  " : "FAIL", c.dim, c.group, c.n_head_kv, c.gqa, c.n_q, c.n_kv, c.sources.c_str(),
                c.mask.c_str(), c.softcap, c.sinks, error, lost, missed);
    std::fflush(stdout);
}

void check_receive_all(bool quick) {
    Rng               rng(12);
    std::vector<Case> cases;
    for (int i = 0; i < 120; ++i) {
        cases.push_back(random_case(rng, 64 << i % 3, {1, 2, 7, 16, 33, 64, 100, 200, 512}));
    }
    for (int dim : {64, 128, 256}) {  // a part of a text behind it
        cases.push_back({dim, 4, 2, 4, 512, 3000, "tail", "causal"});
    }
    for (size_t i = 0; i < cases.size(); ++i) {
        if (!quick || i % 16 == 5) {
            if (quick) {
                cases[i].n_kv = std::max(cases[i].n_q, std::min(cases[i].n_kv, 700));
            }
            check_receive(rng, cases[i]);
        }
    }
}

// --- timing ----------------------------------------------------------------------------------------------------------

// Median time in ms of one replay of a graph that holds what `work` queues.
float time_graph(const std::function<void(cudaStream_t)> & work, int repeats) {
    // one for all: streams that have launched look-ups keep their counters
    static cudaStream_t stream = nullptr;
    if (stream == nullptr) {
        CHECK_CUDA(cudaStreamCreate(&stream));
    }
    work(stream);
    CHECK_CUDA(cudaGetLastError());
    CHECK_CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    work(stream);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t start, stop;
    CHECK_CUDA(cudaEventCreate(&start));
    CHECK_CUDA(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int i = 0; i < repeats + 3; ++i) {
        CHECK_CUDA(cudaEventRecord(start, stream));
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaEventRecord(stop, stream));
        CHECK_CUDA(cudaEventSynchronize(stop));
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

double copy_bandwidth() {
    const size_t         n = size_t(1) << 30;
    DeviceArray<uint8_t> a(n), b(n);
    CHECK_CUDA(cudaMemset(a.get(), 1, n));
    const float ms = time_graph(
        [&](cudaStream_t s) { CHECK_CUDA(cudaMemcpyAsync(b.get(), a.get(), n, cudaMemcpyDeviceToDevice, s)); }, 9);
    return 2.0 * double(n) / ms * 1e3;
}

struct Shape {
    const char * name;
    int          n_layer, n_head_kv, n_head, dim;
};

// As in a conversation: 4 sinks and the last 128 rows near, the rest far. Padded cells are hidden.
std::vector<int32_t> conversation(int n_kv, int n_q, int padding) {
    std::vector<int32_t> src(n_kv, kSrcFar);
    int                  row = 0;
    for (int i = 0; i < n_kv; ++i) {
        const int last = n_kv - padding;
        src[i]         = i >= last                          ? kSrcHidden
                         : i >= last - n_q                  ? src_current(i - (last - n_q))
                         : (i < 4 || i >= last - n_q - 128) ? row++
                                                            : kSrcFar;
    }
    return src;
}

double attend_bytes(const Shape & s, int group, int n_kv) {
    const double summary = double(s.n_head_kv) * s.dim / 64 * sizeof(Fp4Block);
    return n_kv * (2.0 * double(s.n_head_kv) * double(far_row_bytes(s.dim, scale_group)) + summary / group);
}

struct TimedLayers {
    std::vector<DeviceLayer> layers;
    int                      n;

    TimedLayers(const Shape & s, int group, int n_kv, int n_q, size_t budget) {
        Rng          rng(3);
        const size_t bytes = size_t(attend_bytes(s, 4, n_kv));
        n                  = int(std::max<size_t>(3, std::min<size_t>(s.n_layer, budget / bytes)));
        Layer l            = random_layer(rng, s.n_head_kv, s.dim, group, 4096, 160, n_q);
        // the far tier is a repeated pattern: what it holds does not change the time
        const size_t row_blocks = size_t(s.n_head_kv) * l.blocks();
        auto         repeated   = [](const std::vector<uint8_t> & x, size_t begin, size_t from, size_t to) {
            std::vector<uint8_t> all(to);
            for (size_t i = 0; i < to; i += from) {
                std::copy_n(x.begin() + begin, std::min(from, to - i), all.begin() + i);
            }
            return all;
        };
        // values, scales, or blocks that have both
        const size_t row    = size_t(s.n_head_kv) * far_row_bytes(s.dim, scale_group),
                     sums   = row_blocks * sizeof(Fp4Block);
        const size_t values = scale_group == kFp4ScaleGroup ? row : size_t(s.n_head_kv) * s.dim / 2;
        for (auto * far : {&l.far_k, &l.far_v}) {
            std::vector<uint8_t>       all = repeated(*far, 0, 4096 * values, n_kv * values);
            const std::vector<uint8_t> scales =
                repeated(*far, 4096 * values, 4096 * (row - values), n_kv * (row - values));
            all.insert(all.end(), scales.begin(), scales.end());
            *far = all;
        }
        const std::vector<uint8_t> summaries = repeated(l.side, 0, 4096 / group * sums, n_kv / group * sums);
        l.n_cells                            = n_kv;
        l.side.assign(side_layout(s.n_head_kv, s.dim, n_kv / group, 0).bytes, 0);
        std::copy(summaries.begin(), summaries.end(), l.side.begin());
        for (int i = 0; i < n; ++i) {
            layers.emplace_back(l);
        }
    }
};

__global__ void do_nothing() {}

void time_attend(const Shape & s, int group, int n_kv, int n_q, bool all_far, const CudaDevice & device,
                 double bandwidth) {
    TimedLayers          t(s, group, n_kv, n_q, size_t(1) << 30);
    Rng                  rng(4);
    std::vector<int32_t> src =
        all_far ? std::vector<int32_t>(n_kv, kSrcFar) : conversation(n_kv, n_q, n_kv > 512 ? 100 : 1);
    std::vector<uint16_t> mask(size_t(n_q) * n_kv, 0);
    for (int i = 0; i < n_q; ++i) {
        for (int k = 0; k < n_kv; ++k) {
            const bool later = src[k] == kSrcHidden || (src_is_current(src[k]) && src_current_row(src[k]) > i);
            mask[size_t(i) * n_kv + k] = later ? kHalfMinusInf : 0;
        }
    }
    std::vector<float> q(size_t(n_q) * s.n_head * s.dim);
    for (auto & x : q) {
        x = normal(rng);
    }
    const DeviceCells       cells(src, 31);
    DeviceArray<uint16_t>   mask_d(mask);
    DeviceArray<float>      q_d(q), out(q.size());
    std::vector<AttendArgs> args;
    for (auto & l : t.layers) {
        AttendArgs a{};
        a.mem = l.mem, a.cur = l.cur, a.n_kv = n_kv, a.q = q_d.get();
        a.rot = rotation_of(n_q * s.n_head / s.n_head_kv <= 16, s.dim);
        cells.tell(a);
        a.q_stride_query = int64_t(s.n_head) * s.dim, a.q_stride_head = s.dim, a.n_q = n_q, a.n_head = s.n_head;
        a.mask = n_q == 1 ? nullptr : mask_d.get(), a.mask_stride = n_kv, a.scale = 1.0f / std::sqrt(float(s.dim)),
        a.out = out.get();
        args.push_back(a);
    }
    DeviceArray<uint8_t> scratch(kv_attend_cuda_scratch(args[0], device));
    const int            repeats = n_q > 16 ? 3 : 15, launches = n_q > 16 ? 4 : 32;
    const auto           time = [&](bool attends, bool apart) {
        return time_graph(
                   [&](cudaStream_t stream) {
                       for (int i = 0; i < launches; ++i) {
                           if (attends) {
                               kv_attend_cuda(args[i % t.n], device, scratch.get(), stream);
                           }
                           if (apart) {
                               do_nothing<<<1, 32, 0, stream>>>();
                           }
                       }
                   },
                   repeats) /
               launches;
    };
    const float  ms    = time(true, false);
    const double bytes = attend_bytes(s, group, n_kv), flops = 4.0 * n_q * s.n_head * double(s.dim) * n_kv;
    if (n_q <= 16) {
        // Layers one behind the other overlap; in a model other kernels are between them, here one that does nothing.
        const float apart = time(true, true) - time(false, true);
        std::printf("attend %-10s m %2d n_q %2d n_kv %6d %s: %7.1f us a layer, %6.3f ms for %d layers, %5.2f TB/s, "
                    "floor %6.1f us; apart %7.1f us\n",
                    s.name, group, n_q, n_kv, all_far ? "all far" : "talk   ", ms * 1e3, ms * s.n_layer, s.n_layer,
                    bytes / ms * 1e-9, bytes / bandwidth * 1e6, apart * 1e3);
    } else {
        std::printf("attend %-10s m %2d n_q %4d n_kv %6d: %8.1f us a layer, %7.1f ms for %d layers, %5.1f TFLOP/s "
                    "(mask not counted off), scratch %.1f MiB\n",
                    s.name, group, n_q, n_kv, ms * 1e3, ms * s.n_layer, s.n_layer, flops / ms * 1e-9,
                    double(kv_attend_cuda_scratch(args[0], device)) / (1 << 20));
        DeviceArray<float>     received(std::vector<float>(size_t(s.n_head_kv) * n_kv, 0.0f));
        DeviceArray<uint32_t>  dropped(std::vector<uint32_t>((n_kv + 31) / 32, 0x0F0F0F0F));
        DeviceArray<Alignment> sums(std::vector<Alignment>(s.n_head, Alignment{}));
        auto                   timed = [&](const std::function<void(const AttendArgs &, cudaStream_t)> & beside) {
            return 1e3f / launches *
                   time_graph(
                       [&](cudaStream_t stream) {
                           for (int i = 0; i < launches; ++i) {
                               beside(args[i % t.n], stream);
                           }
                       },
                       repeats);
        };
        const float receive =
            timed([&](const AttendArgs & a, cudaStream_t x) { kv_receive_cuda({a, received.get()}, x); });
        const float lose =
            timed([&](const AttendArgs & a, cudaStream_t x) { kv_lose_cuda({a, dropped.get(), sums.get()}, x); });
        std::printf("second reading beside it: receive %8.1f us a layer, lose %8.1f us\n", receive, lose);
    }
    std::fflush(stdout);
}

// Look-up and sparse attention, `share` of the groups, of `most` tokens at most (0: no bound).
void time_lookup(const Shape & s, int group, int n_kv, float share, int most, bool stands_in,
                 const CudaDevice & device) {
    TimedLayers                t(s, group, n_kv, 1, size_t(1) << 30);
    Rng                        rng(6);
    const std::vector<int32_t> src = conversation(n_kv, 1, n_kv > 512 ? 100 : 1);
    std::vector<float>         q(size_t(s.n_head) * s.dim);
    for (auto & x : q) {
        x = normal(rng);
    }
    const int                     capacity = int(share * float(n_kv / group)) + 64;
    const DeviceCells             cells(src, 31);
    DeviceArray<float>            q_d(q), out(q.size()), unread(s.n_head);
    DeviceArray<int32_t>          lists(s.n_head_kv * group_list_stride(capacity));
    DeviceArray<uint64_t>         counters(std::vector<uint64_t>(2, 0));
    std::vector<SelectArgs>       selects;
    std::vector<SparseAttendArgs> attends;
    for (auto & l : t.layers) {
        SelectArgs a{};
        a.mem = l.mem, a.rot = rotation_of(true, s.dim), a.far_bits = cells.far_bits.get(), a.n_kv = n_kv;
        a.q = q_d.get(), a.q_stride_query = int64_t(s.n_head) * s.dim, a.q_stride_head = s.dim, a.n_q = 1;
        a.n_head = s.n_head, a.scale = 1.0f / std::sqrt(float(s.dim)), a.budget = {share, share, 0.0f, 0, most};
        a.selected = lists.get(), a.capacity = capacity, a.counters = counters.get();
        a.unread = stands_in ? unread.get() : nullptr;
        selects.push_back(a);
        SparseAttendArgs b{};
        b.attend.mem = l.mem, b.attend.cur = l.cur, b.attend.rot = a.rot, b.attend.n_kv = n_kv, b.attend.q = a.q;
        cells.tell(b.attend);
        b.attend.q_stride_query = a.q_stride_query, b.attend.q_stride_head = a.q_stride_head, b.attend.n_q = 1;
        b.attend.n_head = s.n_head, b.attend.scale = a.scale, b.attend.out = out.get();
        b.selected = lists.get(), b.capacity = capacity, b.unread = a.unread;
        attends.push_back(b);
    }
    DeviceArray<uint8_t> scratch(std::max(kv_select_attend_cuda_scratch(selects[0], attends[0], device),
                                          kv_attend_cuda_scratch(attends[0].attend, device)));
    using Layer         = std::function<void(int, cudaStream_t)>;
    constexpr int n     = 32;
    auto          timed = [&](const Layer & layer) {
        return 1e3f / n *
               time_graph(
                   [&](cudaStream_t stream) {
                       for (int i = 0; i < n; ++i) {
                           layer(i % t.n, stream);
                       }
                   },
                   15);
    };
    const Layer dense  = [&](int i, cudaStream_t x) { kv_attend_cuda(attends[i].attend, device, scratch.get(), x); };
    const Layer select = [&](int i, cudaStream_t x) { kv_select_cuda(selects[i], device, scratch.get(), x); };
    const Layer sparse = [&](int i, cudaStream_t x) {
        kv_attend_sparse_cuda(attends[i], false, device, scratch.get(), x);
    };
    const Layer both = [&](int i, cudaStream_t x) {
        kv_select_attend_cuda(selects[i], attends[i], device, scratch.get(), x);
    };
    const Layer apart = [&](int i, cudaStream_t x) {
        kv_select_cuda(selects[i], device, scratch.get(), x);
        kv_attend_sparse_cuda(attends[i], true, device, scratch.get(), x);
    };
    const float us[] = {timed(dense), timed(both), timed(apart), timed(select),
                        timed(sparse)};  // the lists of the one before
    std::printf("look-up %-9s m %2d n_kv %6d share %.2f most %5d%s: dense %.1f us, look-up %.1f us a layer (as two "
                "launches %.1f us, "
                "lists alone %.1f us, attention alone %.1f us)\n",
                s.name, group, n_kv, share, most, stands_in ? "" : " nothing stands in", us[0], us[1], us[2], us[3],
                us[4]);
    std::fflush(stdout);
}

void time_fold(const Shape & s, int group, int n_rows) {
    Rng                  rng(5);
    const int            n_groups = std::max(1, n_rows / group);
    Layer                l = random_layer(rng, s.n_head_kv, s.dim, group, std::max(256, n_rows + group), 300, n_rows);
    std::vector<int32_t> plan(size_t(n_groups + 2) * (1 + group), -1), dst(n_rows, -1);
    for (int i = 0; i < n_groups; ++i) {
        plan[size_t(i) * (1 + group)] = i;
        for (int j = 0; j < group; ++j) {
            plan[size_t(i) * (1 + group) + 1 + j] = n_rows >= group ? src_current(i * group + j) : j;
        }
    }
    for (int i = 0; i < std::min(n_rows, 128); ++i) {
        dst[n_rows - 1 - i] = 100 + i;
    }
    DeviceLayer          d(l);
    DeviceArray<int32_t> plan_d(plan), dst_d(dst), count(std::vector<int32_t>{n_groups, 1}),
        none(std::vector<int32_t>{0, 1});
    const SideLayout side = side_layout(l.n_head_kv, l.dim, l.n_cells / group, 0);
    const FoldArgs   f{d.mem, d.cur, {0, 0}, plan_d.get(), n_groups + 2, nullptr, 0};
    const StoreArgs  st{d.mem, d.cur, {0, 0}, dst_d.get()};
    const Epoch      epoch{count.get() + 1, reinterpret_cast<int32_t *>(d.side.get() + side.epoch_offset)};
    constexpr int    n     = 32;
    auto             timed = [&](const std::function<void(cudaStream_t)> & one) {
        return 1e3f / n *
               time_graph(
                   [&](cudaStream_t stream) {
                       for (int i = 0; i < n; ++i) {
                           one(stream);
                       }
                   },
                   9);
    };
    std::printf("fold   %-10s m %2d rows %4d: fold %.1f us, store %.1f us", s.name, group, n_rows,
                timed([&](cudaStream_t x) { kv_fold_cuda(f, count.get(), x); }),
                timed([&](cudaStream_t x) { kv_store_cuda(st, epoch, x); }));
    if (n_rows <= 16) {
        const std::vector<CommitArgs> layers(32, CommitArgs{f, st, epoch.to});  // 32 times the same memory: only timed
        std::printf(", 32 layers at once with a group %.1f us, without %.1f us",
                    timed([&](cudaStream_t x) { kv_commit_cuda(layers, count.get(), epoch.from, x); }),
                    timed([&](cudaStream_t x) { kv_commit_cuda(layers, none.get(), epoch.from, x); }));
        std::printf(", commit with a group %.1f us, without %.1f us",
                    timed([&](cudaStream_t x) { kv_commit_cuda({{f, st, epoch.to}}, count.get(), epoch.from, x); }),
                    timed([&](cudaStream_t x) { kv_commit_cuda({{f, st, epoch.to}}, none.get(), epoch.from, x); }));
    }
    std::printf("\n");
    std::fflush(stdout);
}

// Scores of all far cells, and statistics of queries.
void time_score(const Shape & s, int group, int n_kv, const CudaDevice & device) {
    TimedLayers              t(s, group, n_kv, 1, size_t(1) << 30);
    Rng                      rng(9);
    const DeviceCells        cells(conversation(n_kv, 1, 1), 0);
    const DeviceArray<float> queries(random_statistics(rng, s.n_head, s.dim, 50.0f));
    const DeviceArray<float> scores(std::vector<float>(size_t(kScoreKinds) * n_kv, 0.0f));
    std::vector<ScoreArgs>   args;
    for (auto & l : t.layers) {
        ScoreArgs a{};
        a.mem = l.mem, a.far_bits = cells.far_bits.get(), a.n_kv = n_kv, a.queries = queries.get(), a.n_head = s.n_head;
        a.scale = 1.0f / std::sqrt(float(s.dim)), a.before = scores.get(), a.scores = scores.get();
        args.push_back(a);
    }
    const size_t               bytes = kv_score_cuda_scratch(args[0], device);
    const DeviceArray<uint8_t> scratch(bytes);
    auto                       timed = [&](bool with_queries) {
        for (auto & a : args) {
            a.queries = with_queries ? queries.get() : nullptr;
        }
        return time_graph(
                   [&](cudaStream_t stream) {
                       for (int i = 0; i < s.n_layer; ++i) {
                           kv_score_cuda(args[i % t.n], device, scratch.get(), stream);
                       }
                   },
                   9) /
               float(s.n_layer);
    };
    const float  ms = timed(true), alone = timed(false);
    const double read = attend_bytes(s, group, n_kv);
    std::printf("score  %-10s m %2d n_kv %6d: %7.1f us a layer, %6.3f ms for %d layers; rows %.1f MiB a layer, read at "
                "%.2f TB/s; "
                "scratch %.1f MiB; without queries %.1f us\n",
                s.name, group, n_kv, ms * 1e3, ms * s.n_layer, s.n_layer, read / (1 << 20), read / ms * 1e-9,
                double(bytes) / (1 << 20), alone * 1e3);
    std::fflush(stdout);
}

void time_observe(const Shape & s, int n_q) {
    Rng                             rng(10);
    const DeviceArray<float>        q(std::vector<float>(size_t(n_q) * s.n_head * s.dim, 1.0f));
    std::vector<DeviceArray<float>> stats;
    std::vector<ObserveArgs>        layers;
    for (int i = 0; i < s.n_layer; ++i) {
        stats.emplace_back(random_statistics(rng, s.n_head, s.dim, 50.0f));
        layers.push_back({q.get(), int64_t(s.n_head) * s.dim, s.dim, n_q, s.n_head, s.dim, n_q <= 16 ? s.dim : 0,
                          stats.back().get()});
    }
    const float apart = time_graph(
        [&](cudaStream_t stream) {
            for (const ObserveArgs & a : layers) {
                kv_observe_cuda({a}, stream);
            }
        },
        15);
    const float together = time_graph([&](cudaStream_t stream) { kv_observe_cuda(layers, stream); }, 15);
    std::printf("observe %-9s n_q %3d, %d layers, %.2f MiB of statistics: %.1f us, by one launch %.1f us\n", s.name,
                n_q, s.n_layer,
                double(s.n_layer) * double(query_stats_size(s.n_head, s.dim)) * sizeof(float) / (1 << 20), apart * 1e3,
                together * 1e3);
    std::fflush(stdout);
}

void time_sampled(const Shape & s, int group, int n_kv, SampledScore score, const CudaDevice & device) {
    TimedLayers           t(s, group, n_kv, 1, size_t(1) << 30);
    const DeviceCells     cells(conversation(n_kv, 1, 1), 0);
    std::vector<int32_t>  age(n_kv);
    std::vector<uint16_t> samples(size_t(1 + sample_rule(score).rows) * s.n_head * s.dim, f16_encode(0.5f));
    for (int i = 0; i < n_kv; ++i) {
        age[i] = n_kv - 1 - i;
    }
    for (int h = 0; h < s.n_head; ++h) {
        const int64_t n = n_kv;
        std::memcpy(&samples[size_t(h) * s.dim], &n, sizeof(n));
    }
    const DeviceArray<int32_t>  age_d(age);
    const DeviceArray<uint16_t> samples_d(samples);
    const DeviceArray<float>    scores(std::vector<float>(n_kv, 0.0f));
    std::vector<SampledArgs>    args;
    for (auto & l : t.layers) {
        SampledArgs a{};
        a.mem = l.mem, a.score = score, a.far_bits = cells.far_bits.get(), a.age = age_d.get(), a.n_kv = n_kv;
        a.samples = samples_d.get(), a.n_head = s.n_head, a.scale = 1.0f / std::sqrt(float(s.dim));
        a.before = scores.get(), a.scores = scores.get();
        args.push_back(a);
    }
    const size_t               bytes = kv_sampled_cuda_scratch(args[0], device);
    const DeviceArray<uint8_t> scratch(bytes);
    const float                ms = time_graph(
        [&](cudaStream_t stream) {
            for (int i = 0; i < s.n_layer; ++i) {
                kv_sampled_cuda(args[i % t.n], device, scratch.get(), stream);
            }
        },
        9);
    std::printf("sampled %-7s %-9s m %2d n_kv %6d: %7.1f us a layer, %6.3f ms for %d layers; scratch %.1f MiB\n",
                score == SampledScore::last ? "last" : "windows", s.name, group, n_kv, 1e3f * ms / float(s.n_layer), ms,
                s.n_layer, double(bytes) / (1 << 20));
    std::fflush(stdout);
}

void time_sample(const Shape & s, int n_q) {
    const DeviceArray<float>           q(std::vector<float>(size_t(n_q) * s.n_head * s.dim, 1.0f));
    std::vector<DeviceArray<uint16_t>> samples;
    std::vector<SampleArgs>            layers;
    for (int i = 0; i < s.n_layer; ++i) {
        samples.emplace_back(std::vector<uint16_t>(size_t(1 + kLastQueries.rows) * s.n_head * s.dim, 0));
        layers.push_back({{q.get(), int64_t(s.n_head) * s.dim, s.dim, n_q, s.n_head, s.dim, n_q <= 16 ? s.dim : 0},
                          kLastQueries,
                          samples.back().get()});
    }
    const float apart = time_graph(
        [&](cudaStream_t stream) {
            for (const SampleArgs & a : layers) {
                kv_sample_cuda({a}, stream);
            }
        },
        15);
    const float together = time_graph([&](cudaStream_t stream) { kv_sample_cuda(layers, stream); }, 15);
    std::printf("sample %-9s n_q %3d, %d layers: %.1f us, by one launch %.1f us\n", s.name, n_q, s.n_layer, apart * 1e3,
                together * 1e3);
    std::fflush(stdout);
}

const Shape kLlama8b{"llama-8b", 32, 8, 32, 128}, kLlama1b{"llama-1b", 16, 8, 32, 64},
    kLlama3b{"llama-3b", 28, 8, 24, 128}, kGemma4b{"gemma-4b", 34, 4, 8, 256}, kGqa8{"gqa-8", 32, 8, 64, 128};

void time_decode(const CudaDevice & device) {
    const double bandwidth = copy_bandwidth();
    std::printf("copy %.2f TB/s (read and written)\n", bandwidth * 1e-12);
    for (int group : {4, 32}) {
        for (int n_kv : {256, 2048, 8192, 32768, 33024, 65536, 131072}) {
            time_attend(kLlama8b, group, n_kv, 1, false, device, bandwidth);
        }
    }
    time_attend(kLlama8b, 4, 65536, 1, true, device, bandwidth);
    time_attend(kLlama8b, 2, 65536, 1, false, device, bandwidth);
    for (const Shape & s : {kLlama1b, kLlama3b, kGemma4b, kGqa8}) {
        time_attend(s, 4, 32768, 1, false, device, bandwidth);
        time_attend(s, 4, 65536, 1, false, device, bandwidth);
    }
    for (int n_q : {2, 4, 8, 16}) {
        time_attend(kLlama8b, 4, 32768, n_q, false, device, bandwidth);
    }
}

void time_lookups(const CudaDevice & device) {
    for (int n_kv : {8192, 32768, 65536, 131072}) {
        time_lookup(kLlama8b, 4, n_kv, 0.2f, 0, true, device);
        time_lookup(kLlama8b, 4, n_kv, 0.1f, 0, true, device);
        time_lookup(kLlama8b, 4, n_kv, 0.1f, 0, false, device);
        time_lookup(kLlama8b, 4, n_kv, 0.2f, 4096, true, device);
    }
    time_lookup(kLlama8b, 2, 65536, 0.1f, 0, true, device);
    time_lookup(kLlama1b, 4, 65536, 0.1f, 0, true, device);
    time_lookup(kGemma4b, 4, 65536, 0.1f, 0, true, device);
}

void time_folds() {
    for (int group : {4, 32}) {
        for (int n : {1, 4, 512, 2048}) {
            time_fold(kLlama8b, group, n);
        }
    }
}

void time_scores(const CudaDevice & device) {
    for (int n_kv : {4096, 16384, 65536}) {
        time_score(kLlama8b, 4, n_kv, device);
    }
    for (const Shape & s : {kLlama1b, kGemma4b, kGqa8}) {
        time_score(s, 4, 65536, device);
    }
    for (int n_q : {1, 16, 512}) {
        time_observe(kLlama8b, n_q);
    }
}

void time_scales(const CudaDevice & device, int n) {
    scale_group = n;
    std::printf("scales for %d channels\n", n);
    for (int n_kv : {8192, 65536}) {
        time_attend(kLlama8b, 4, n_kv, 1, false, device, 4e12);
        time_lookup(kLlama8b, 4, n_kv, 0.2f, 0, true, device);
    }
    for (const Shape & s : {kLlama1b, kGemma4b}) {
        time_attend(s, 4, 65536, 1, false, device, 4e12);
        time_attend(s, 4, 32768, 512, false, device, 1.0);
    }
    time_attend(kLlama8b, 4, 32768, 512, false, device, 1.0);
    time_attend(kLlama8b, 4, 32768, 512, false, {device.n_sm, 80}, 1.0);
    time_fold(kLlama8b, 4, 4);
    time_fold(kLlama8b, 4, 512);
    time_score(kLlama8b, 4, 65536, device);
    scale_group = kFp4ScaleGroup;
}

void time_all_sampled(const CudaDevice & device) {
    for (SampledScore score : {SampledScore::last, SampledScore::windows}) {
        for (int n_kv : {4096, 16384, 65536}) {
            time_sampled(kLlama8b, 4, n_kv, score, device);
        }
        for (const Shape & s : {kLlama1b, kGemma4b, kGqa8}) {
            time_sampled(s, 4, 65536, score, device);
        }
    }
    for (int n_q : {1, 16, 512}) {
        time_sample(kLlama8b, n_q);
    }
}

void time_prefill(const CudaDevice & device) {
    for (int n_kv : {2048, 8192, 32768}) {
        time_attend(kLlama8b, 4, n_kv, 512, false, device, 1.0);
    }
    time_attend(kLlama8b, 4, 32768, 2048, false, device, 1.0);
    time_attend(kLlama1b, 4, 32768, 512, false, device, 1.0);
    time_attend(kGemma4b, 4, 32768, 512, false, device, 1.0);
    const CudaDevice ampere{device.n_sm, 80};  // without the instructions of Hopper
    time_attend(kLlama8b, 4, 32768, 512, false, ampere, 1.0);
}

void check_all(bool quick, const CudaDevice & device) {
    check_fold_all(quick);
    check_attend_all(quick, device);
    check_lookup_all(quick, device);
    check_score_all(quick, device);
    check_sampled_all(quick, device);
    check_receive_all(quick);
}

// With a scale for so many channels.
void check_scales(int n, bool quick, const CudaDevice & device) {
    scale_group = n;
    std::printf("scales for %d channels\n", n);
    check_all(quick, device);
    scale_group = kFp4ScaleGroup;
}

}  // namespace

int main(int argc, char ** argv) {
    const CudaDevice device = the_device();
    std::printf("device: sm_%d, %d multiprocessors\n", device.arch, device.n_sm);
    for (int i = 1; i < argc; ++i) {
        const std::string what = argv[i];
        if (what == "check" || what == "quick") {
            check_all(what == "quick", device);
            check_scales(32, true, device);
            check_scales(64, true, device);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "check-32" || what == "check-64") {
            check_scales(what == "check-32" ? 32 : 64, false, device);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "check-lookup") {
            check_lookup_all(false, device);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "check-score") {
            check_score_all(false, device);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "check-sampled") {
            check_sampled_all(false, device);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "check-receive") {
            check_receive_all(false);
            std::printf("%s: %d failed\n", what.c_str(), n_failed);
        } else if (what == "time" || what == "time-decode" || what == "time-fold" || what == "time-prefill" ||
                   what == "time-lookup" || what == "time-score" || what == "time-sampled") {
            const auto wanted = [&](const char * part) {
                return what == "time" || what == std::string("time-") + part;
            };
            if (wanted("decode")) {
                time_decode(device);
            }
            if (wanted("lookup")) {
                time_lookups(device);
            }
            if (wanted("fold")) {
                time_folds();
            }
            if (wanted("score")) {
                time_scores(device);
            }
            if (wanted("sampled")) {
                time_all_sampled(device);
            }
            if (wanted("prefill")) {
                time_prefill(device);
            }
        } else if (what == "time-scales") {
            for (int n : {16, 32, 64}) {
                time_scales(device, n);
            }
        } else if (what == "profile" || what == "profile-short") {
            time_attend({"llama-8b", 4, 8, 32, 128}, 4, what == "profile" ? 65536 : 256, 1, false, device, 4e12);
        } else if (what == "profile-lookup") {
            time_lookup({"llama-8b", 4, 8, 32, 128}, 4, 65536, 0.1f, 0, true, device);
        } else {
            std::printf("unknown: %s\n", what.c_str());
            return 2;
        }
    }
    return n_failed != 0;
}
