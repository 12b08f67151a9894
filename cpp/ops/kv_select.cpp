// kv_select: scores groups by their summaries and lists those that are worth reading.
//
// Three phases with barriers between them: queries are rotated and scaled and groups classified; groups are scored, in
// slices of kSlice, each summary decoded once for all rows that want it; then one thread makes the list of each (query,
// KV head). In two levels, two more come before the scores of groups: the same scores of spans, and a pool from those for each
// list. Scores of all groups are kept in scratch; to bound it, many queries are done in several rounds.
//
// A *slot* is a place of the scores: without a pool slot and group are the same, with one it is an entry of the pool.

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/kv_select.h"
#include "ops/rotate.h"
#include "ops/scratch_plan.h"
#include "ops/simd.h"

namespace kvfold {

namespace {

constexpr int32_t kSlice       = 64;       // slots that are scored at a time
constexpr int64_t kScoreFloats = 1 << 20;  // scores of a round, unless one query needs more

constexpr float    kInfinity    = std::numeric_limits<float>::infinity();
constexpr uint16_t kF16MinusInf = 0xFC00;
constexpr float    kNoCandidate = -kInfinity;  // in place of a score
constexpr float    kLargest     = 1e30f;       // scores are clamped to +- this, so that differences are finite

enum GroupState : uint8_t { kEmpty, kPartial, kComplete };

int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

// Groups that matter to a query, whatever it may choose from.
struct Seen {
    int32_t complete;
    int32_t partial;
};

struct Shape {
    int32_t gqa;       // query heads a KV head
    int32_t n_groups;  // the last one may be cut off by n_kv
    int32_t n_slots;   // a multiple of kSlice
    int32_t n_slices;
    int32_t n_spans;  // that lie within n_kv; 0: one level
    int32_t block;    // queries a round
    size_t  q_offset, square_offset, state_offset, span_state_offset, seen_offset, pool_offset, thread_offset,
        thread_bytes, score_offset;
    size_t bytes;

    Shape(const SelectArgs & a, int nth) {
        const int32_t dim = a.mem.head_dim;
        gqa               = a.n_head / a.mem.n_head_kv;
        n_groups          = divide_up(a.n_kv, a.mem.group);
        n_slices          = std::max(1, divide_up(a.pool != nullptr ? a.pool_capacity : n_groups, kSlice));
        n_slots           = n_slices * kSlice;
        n_spans           = a.ready != nullptr ? std::min(a.mem.n_spans, a.n_kv / kSpanCells) : 0;
        block             = int32_t(std::min<int64_t>(a.n_q, kScoreFloats / (int64_t(a.n_head) * n_slots)));
        block             = std::max(1, block);

        const size_t q_rows = size_t(a.n_q) * size_t(a.n_head);
        thread_bytes =
            ScratchPlan::align(size_t(4 * dim + gqa) * sizeof(float) + size_t(kSelectBins + n_slots) * sizeof(int32_t));

        ScratchPlan plan;
        q_offset          = plan.reserve(q_rows * size_t(dim) * sizeof(float));
        square_offset     = plan.reserve(q_rows * sizeof(float));
        state_offset      = plan.reserve(size_t(n_groups));
        span_state_offset = plan.reserve(size_t(n_spans));
        seen_offset       = plan.reserve(size_t(block) * sizeof(Seen));
        pool_offset       = plan.reserve(n_spans > 0 ? size_t(block) * size_t(a.mem.n_head_kv) *
                                                           size_t(group_list_stride(n_groups)) * sizeof(int32_t)
                                                     : 0);
        thread_offset     = plan.reserve(size_t(nth) * thread_bytes);
        score_offset      = plan.reserve(size_t(block) * size_t(a.n_head) * size_t(n_slots) * sizeof(float));
        bytes             = plan.bytes();
    }
};

// What is scored: groups, or spans.
struct Level {
    const uint8_t *  state;    // [n] GroupState
    const Fp4Block * summary;  // [n][n_head_kv][head_dim / 64]
    const uint8_t *  spread;   // f16 [n][n_head_kv]
    int32_t          n;
    int32_t          cells;  // of one
};

// What the phases share.
struct Work {
    const SelectArgs & a;
    const Shape &      shape;
    const Threads &    threads;
    float *            q;           // [n_q][n_head][head_dim], rotated and scaled
    float *            square;      // [n_q][n_head] the squared length of those, times kSpreadWeight
    uint8_t *          state;       // [n_groups] GroupState
    uint8_t *          span_state;  // [n_spans] kComplete: ready
    Seen *             seen;        // [query of the round]
    int32_t *          pools;       // lists [query of the round][n_head_kv][1 + n_groups], in two levels
    float *            score;       // [query of the round][n_head][n_slots]
    float *            decoded;     // [4][head_dim], this thread's
    int32_t *          count;       // [kSelectBins], this thread's
    int32_t *          bins;        // [n_slots], this thread's
    float *            read;        // [gqa], this thread's: probability of what is taken

    Work(const SelectArgs & args, const Shape & s, const Threads & t) : a(args), shape(s), threads(t) {
        q       = scratch_at<float>(t, s.q_offset);
        square  = scratch_at<float>(t, s.square_offset);
        state   = scratch_at<uint8_t>(t, s.state_offset);
        score   = scratch_at<float>(t, s.score_offset);
        decoded = scratch_at<float>(t, s.thread_offset + size_t(t.ith) * s.thread_bytes);
        count   = reinterpret_cast<int32_t *>(decoded + 4 * args.mem.head_dim);
        bins    = count + kSelectBins;
        read    = reinterpret_cast<float *>(bins + s.n_slots);

        span_state = scratch_at<uint8_t>(t, s.span_state_offset);
        seen       = scratch_at<Seen>(t, s.seen_offset);
        pools      = scratch_at<int32_t>(t, s.pool_offset);
    }

    Level groups() const {
        const SideLayout side = side_layout(a.mem);
        return {state, reinterpret_cast<const Fp4Block *>(a.mem.side), a.mem.side + side.spread_offset, shape.n_groups,
                a.mem.group};
    }
    Level spans() const {
        const SideLayout side = side_layout(a.mem);
        return {span_state, reinterpret_cast<const Fp4Block *>(a.mem.side + side.span_offset),
                a.mem.side + side.span_spread_offset, shape.n_spans, kSpanCells};
    }

    float * row(int32_t query_of_round, int32_t head) const {
        return score + (int64_t(query_of_round) * a.n_head + head) * shape.n_slots;
    }
    // What a query sees of groups and spans is decided by their first cells.
    bool sees(int32_t query, int64_t cell) const {
        return a.mask == nullptr || a.mask[query * a.mask_stride + cell] != kF16MinusInf;
    }
    // What a list is chosen from, null: all groups. `first` begins the round.
    const int32_t * pool(int32_t first, int32_t query, int32_t kv_head) const {
        if (a.pool != nullptr) {
            return a.pool + (int64_t(query) * a.mem.n_head_kv + kv_head) * group_list_stride(a.pool_capacity);
        }
        return shape.n_spans > 0 ? span_pool(query - first, kv_head) : nullptr;
    }
    int32_t * span_pool(int32_t query_of_round, int32_t kv_head) const {
        return pools + (int64_t(query_of_round) * a.mem.n_head_kv + kv_head) * group_list_stride(shape.n_groups);
    }
};

// --- before the rounds -----------------------------------------------------------------------------------------------

void prepare(const Work & w) {
    const SelectArgs & a    = w.a;
    const int32_t      dim  = a.mem.head_dim;
    const int64_t      rows = int64_t(a.n_q) * a.n_head;
    for (int64_t r = rows * w.threads.ith / w.threads.nth; r < rows * (w.threads.ith + 1) / w.threads.nth; ++r) {
        float * q = w.q + r * dim;
        rotate_row(a.q + r / a.n_head * a.q_stride_query + r % a.n_head * a.q_stride_head, q, dim, a.rot.k);
        float sum = 0.0f;
        for (int32_t d = 0; d < dim; ++d) {
            q[d] *= a.scale;
            sum += q[d] * q[d];
        }
        w.square[r] = kSpreadWeight * sum;
    }
    const int32_t  m    = a.mem.group;
    const uint32_t full = m == 32 ? ~0u : (1u << m) - 1;
    const int64_t  n    = w.shape.n_groups;
    for (int64_t g = n * w.threads.ith / w.threads.nth; g < n * (w.threads.ith + 1) / w.threads.nth; ++g) {
        const int64_t cell = g * m;
        const int64_t left = a.n_kv - cell;  // cells of the group that are there
        uint32_t      bits = a.far_bits[cell / 32] >> (cell % 32) & full;
        if (left < m) {
            bits &= (1u << left) - 1;
        }
        w.state[g] = bits == 0 ? kEmpty : bits == full ? kComplete : kPartial;
    }
    for (int32_t s = w.threads.ith; s < w.shape.n_spans; s += w.threads.nth) {
        w.span_state[s] = (a.ready[s / 32] >> (s % 32) & 1) != 0 ? kComplete : kEmpty;
    }
}

void count_groups(const Work & w, int32_t first, int32_t query) {
    Seen seen{};
    for (int32_t g = 0; g < w.shape.n_groups; ++g) {
        seen.partial += w.state[g] == kPartial ? 1 : 0;
        seen.complete += w.state[g] == kComplete && w.sees(query, int64_t(g) * w.a.mem.group) ? 1 : 0;
    }
    w.seen[query - first] = seen;
}

// --- scores ----------------------------------------------------------------------------------------------------------

struct Candidate {
    int32_t slot;
    int32_t index;  // of the group or span
};

template <int DIM>
const Fp4Block * summary_row(const Level & level, const LayerMemory & mem, int64_t index, int64_t kv_head) {
    return level.summary + (index * mem.n_head_kv + kv_head) * (DIM / kFp4BlockValues);
}

// dot[c] = q . summary c for four decoded summaries.
template <int DIM>
void dot_four(const float * decoded, const float * q, float * dot) {
    V16 sum[4] = {};
#pragma GCC unroll 16
    for (int i = 0; i < DIM; i += 16) {
        const V16 x = load_16(q + i);
        for (int c = 0; c < 4; ++c) {
            sum[c] = fma_16(x, load_16(decoded + c * DIM + i), sum[c]);
        }
    }
    sum_4x16(sum, dot);
}

// kLanes scores; NaN becomes the lowest.
VFloat estimate(const SelectArgs & a, VFloat dot, float square, VFloat spread) {
    const VFloat cap  = v_set(a.softcap);
    const VFloat mean = a.softcap != 0.0f ? cap * v_tanh(dot / cap) : dot;
    const VFloat e    = v_max(mean + v_set(square) * spread, v_set(-kLargest));
    return e < v_set(kLargest) ? e : v_set(kLargest);
}

// Moves what the first `n` slots of a slice hold to the slots of the candidates, which begin at `first_slot`; the others have none.
void spread_out(float * slice, int32_t first_slot, const Candidate * candidates, int32_t n) {
    if (n == kSlice) {
        return;
    }
    int32_t end = kSlice;
    for (int32_t c = n - 1; c >= 0; --c) {  // backwards, because no candidate moves to a lower place
        const int32_t at    = candidates[c].slot - first_slot;
        const float   score = slice[c];
        std::fill(slice + at + 1, slice + end, kNoCandidate);
        slice[at] = score;
        end       = at;
    }
    std::fill(slice, slice + end, kNoCandidate);
}

// Scores in a slice, whose `n` candidates are given, for one KV head and some queries of the round that begins with query `first`.
template <int DIM>
void score(const Work & w, const Level & level, int32_t kv_head, int32_t first, int32_t query_begin, int32_t query_end,
           int32_t slice, const Candidate * candidates, int32_t n) {
    const SelectArgs & a            = w.a;
    const int32_t      head         = kv_head * w.shape.gqa;
    const int32_t      at           = slice * kSlice;
    const auto         for_each_row = [&](const auto & use) {
        for (int32_t i = query_begin; i < query_end; ++i) {
            for (int32_t h = head; h < head + w.shape.gqa; ++h) {
                use(i, int64_t(i) * a.n_head + h, w.row(i - first, h) + at);
            }
        }
    };
    float spread[kSlice] = {};
    for (int32_t c0 = 0; c0 < n; c0 += 4) {
        for (int32_t c = 0; c < std::min(4, n - c0); ++c) {
            const int64_t    index = candidates[c0 + c].index;
            const Fp4Block * from  = summary_row<DIM>(level, a.mem, index, kv_head);
#pragma GCC unroll 16
            for (int i = 0; i < DIM / 16; ++i) {
                store_16(w.decoded + c * DIM + 16 * i,
                         decode_16(from[i / 4].scale[i % 4], from[i / 4].quant + i % 4 * 8));
            }
            uint16_t half;
            memcpy(&half, level.spread + (index * a.mem.n_head_kv + kv_head) * 2, sizeof half);
            spread[c0 + c] = f16_decode(half);
        }
        for_each_row([&](int32_t, int64_t row, float * to) { dot_four<DIM>(w.decoded, w.q + row * DIM, to + c0); });
    }
    for_each_row([&](int32_t query, int64_t row, float * to) {
        for (int32_t c = 0; c < n; c += kLanes) {
            v_store(to + c, estimate(a, v_load(to + c), w.square[row], v_load(spread + c)));
        }
        for (int32_t c = 0; c < n && a.mask != nullptr; ++c) {
            to[c] = w.sees(query, int64_t(candidates[c].index) * level.cells) ? to[c] : kNoCandidate;
        }
        spread_out(to, at, candidates, n);
    });
}

// A slice of a whole level, for everybody.
template <int DIM>
void score_level(const Work & w, const Level & level, int32_t first, int32_t last, int32_t slice) {
    const SelectArgs & a = w.a;
    Candidate          candidates[kSlice];
    int32_t            n   = 0;
    const int32_t      end = std::min(level.n, (slice + 1) * kSlice);
    for (int32_t x = slice * kSlice; x < end; ++x) {
        bool seen = false;
        for (int32_t i = first; level.state[x] == kComplete && i < last && !seen; ++i) {
            seen = w.sees(i, int64_t(x) * level.cells);
        }
        if (seen) {
            __builtin_prefetch(summary_row<DIM>(level, a.mem, x, 0));
            candidates[n++] = {x, x};
        }
    }
    for (int32_t h = 0; h < a.mem.n_head_kv; ++h) {
        score<DIM>(w, level, h, first, first, last, slice, candidates, n);
    }
}

// A slice of the pool of one query and KV head.
template <int DIM>
void score_pool(const Work & w, int32_t first, int32_t query, int32_t kv_head, int32_t slice) {
    const int32_t * pool   = w.pool(first, query, kv_head);
    const Level     groups = w.groups();
    Candidate       candidates[kSlice];
    int32_t         n   = 0;
    const int32_t   end = std::min(pool[0], (slice + 1) * kSlice);
    if (slice * kSlice >= end) {
        return;
    }
    for (int32_t s = slice * kSlice; s < end; ++s) {
        const int32_t g = pool[1 + s];
        if (w.state[g] == kComplete && w.sees(query, int64_t(g) * groups.cells)) {
            __builtin_prefetch(summary_row<DIM>(groups, w.a.mem, g, kv_head));
            candidates[n++] = {s, g};
        }
    }
    score<DIM>(w, groups, kv_head, first, query, query + 1, slice, candidates, n);
}

template <int DIM>
void score_spans(const Work & w, int32_t first, int32_t last) {
    const Level level = w.spans();
    for (int32_t slice = w.threads.ith; slice * kSlice < level.n; slice += w.threads.nth) {
        score_level<DIM>(w, level, first, last, slice);
    }
}

template <int DIM>
void score_round(const Work & w, int32_t first, int32_t last) {
    const Threads & t = w.threads;
    for (int32_t i = first + t.ith; i < last; i += t.nth) {
        count_groups(w, first, i);
    }
    if (w.pool(first, first, 0) == nullptr) {
        for (int32_t slice = t.ith; slice < w.shape.n_slices; slice += t.nth) {
            score_level<DIM>(w, w.groups(), first, last, slice);
        }
        return;
    }
    const int32_t heads = w.a.mem.n_head_kv;
    for (int32_t task = t.ith; task < (last - first) * heads * w.shape.n_slices; task += t.nth) {
        const int32_t slice = task % w.shape.n_slices;
        const int32_t head  = task / w.shape.n_slices % heads;
        score_pool<DIM>(w, first, first + task / w.shape.n_slices / heads, head, slice);
    }
}

// --- lists -----------------------------------------------------------------------------------------------------------

// log x of a positive normal number, relative error of x below 2e-7. Smaller numbers give about -87.
VFloat v_log(VFloat x) {
    x              = v_max(x, v_set(std::numeric_limits<float>::min()));
    const VInt   k = (VInt(x) - 0x3f3504f3) >> 23;  // x = 2^k * y, y in [sqrt(1/2), sqrt(2))
    const VFloat y = VFloat(VInt(x) - (k << 23));
    const VFloat s = (y - v_set(1.0f)) / (y + v_set(1.0f));  // log y = 2 artanh s
    const VFloat z = s * s;
    VFloat       p = v_set(2.0f / 9.0f);
    p              = v_fma(p, z, v_set(2.0f / 7.0f));
    p              = v_fma(p, z, v_set(2.0f / 5.0f));
    p              = v_fma(p, z, v_set(2.0f / 3.0f));
    p              = v_fma(p, z, v_set(2.0f));
    return v_fma(__builtin_convertvector(k, VFloat), v_set(0x1.62e43p-1f), p * s);
}

// log of the sum of exp over the candidates of a row; -inf without any
float log_sum(const float * score, int32_t n) {
    VFloat top = v_set(-kInfinity);
    for (int32_t s = 0; s < n; s += kLanes) {
        top = v_max(top, v_load(score + s));
    }
    const float largest = v_largest(top);
    if (largest == -kInfinity) {
        return largest;
    }
    VFloat sum = {};
    for (int32_t s = 0; s < n; s += kLanes) {
        sum += v_exp(v_load(score + s) - v_set(largest));
    }
    return largest + logf(v_sum(sum));
}

// Bins of the first `slots` slots for a KV head (-1: no candidate), in the thread's memory, and how many there are in each. Its
// rows of scores become probabilities, and total[j], if wanted, the log of the sum of row j before. Returns the number of
// candidates.
int32_t make_bins(const Work & w, int32_t slots, int32_t query_of_round, int32_t kv_head, float * total) {
    std::fill_n(w.count, kSelectBins, 0);
    const int32_t n    = divide_up(slots, kSlice) * kSlice;  // the rest of the last slice has no candidate
    const int32_t gqa  = w.shape.gqa;
    const int32_t head = kv_head * gqa;
    float *       p    = reinterpret_cast<float *>(w.bins);  // log of the sum over heads, until bins take its place

    for (int32_t j = 0; j < gqa; ++j) {
        float *     score = w.row(query_of_round, head + j);
        const float sum   = log_sum(score, n);
        if (total != nullptr) {
            total[j] = sum;
        }
        if (sum == -kInfinity) {
            std::fill_n(w.bins, n, -1);
            return 0;
        }
        for (int32_t s = 0; s < n; s += kLanes) {
            const VFloat x      = v_load(score + s);
            const VFloat e      = v_exp(x - v_set(sum));
            const VFloat before = j > 0 ? v_load(p + s) : x == v_set(kNoCandidate) ? x : VFloat{};
            v_store(score + s, e);
            v_store(p + s, before + e);  // kNoCandidate stays what it is
        }
    }
    VFloat top = v_set(-kInfinity);
    for (int32_t s = 0; s < n; s += kLanes) {
        const VFloat mass = v_load(p + s);
        const VFloat log  = mass == v_set(kNoCandidate) ? mass : v_log(mass);
        v_store(p + s, log);
        top = v_max(top, log);
    }
    // floor(-64 p) by truncating: p is at most the log of the number of heads, far below this offset in bins.
    const VFloat offset     = v_set(64.0f * kBinsPerNat);
    const auto   on_grid    = [offset](VFloat x) { return offset - v_set(float(kBinsPerNat)) * x; };
    const VInt   first      = __builtin_convertvector(on_grid(v_set(v_largest(top))), VInt);
    const VFloat last       = __builtin_convertvector(first + (kSelectBins - 1), VFloat);
    VInt         candidates = {};
    for (int32_t s = 0; s < n; s += kLanes) {
        const VFloat log  = v_load(p + s);
        const VInt   none = log == v_set(kNoCandidate);
        const VFloat x    = on_grid(none ? VFloat{} : log);
        const VInt   bin  = (__builtin_convertvector(x > last ? last : x, VInt) - first) | none;  // -1 is all bits
        memcpy(w.bins + s, &bin, sizeof bin);
        candidates += none + 1;
    }
    int32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) {
        sum += candidates[i];
    }
    for (int32_t s = 0; s < slots; ++s) {
        if (w.bins[s] >= 0) {
            ++w.count[w.bins[s]];
        }
    }
    return sum;
}

int32_t share_of(float share, int32_t visible, int32_t least) {
    return std::max(int32_t(std::min(ceilf(share * float(visible)), float(visible))), least);
}

// How many of the counted candidates are taken.
int32_t budget(const SelectArgs & a, const int32_t * count, int32_t candidates, int32_t visible) {
    const int32_t floor = divide_up(a.budget.min_tokens, a.mem.group);
    const int32_t bound = a.budget.max_tokens > 0 ? a.budget.max_tokens / a.mem.group : candidates;
    const int32_t most  = std::min({candidates, bound, share_of(a.budget.lookup_max, visible, floor)});
    const int32_t least = std::min(most, share_of(a.budget.lookup_min, visible, floor));
    if (least == most || a.budget.threshold <= 0.0f) {
        return most;
    }
    const float step = expf(-1.0f / float(kBinsPerNat));
    float       all  = 0.0f;
    float       mass = 1.0f;
    for (int32_t b = 0; b < kSelectBins; ++b, mass *= step) {
        all += float(count[b]) * mass;
    }
    const float wanted = (1.0f - a.budget.threshold) * all;  // this much is to be read
    float       read   = 0.0f;
    int32_t     taken  = 0;
    mass               = 1.0f;
    for (int32_t b = 0; b < kSelectBins && taken < most; ++b, mass *= step) {
        read += float(count[b]) * mass;
        taken += count[b];
        if (read >= wanted) {
            break;
        }
    }
    return std::min(most, std::max(least, taken));
}

// The bin of the last of the first `k` candidates, and how many of it are among those.
struct Cut {
    int32_t bin;
    int32_t left_out;  // candidates of that bin that are not taken: the lowest groups
};

Cut cut_after(const int32_t * count, int32_t k) {
    int32_t bin = 0, sum = 0;
    while (bin < kSelectBins && sum + count[bin] < k) {
        sum += count[bin++];
    }
    return {bin, bin < kSelectBins ? sum + count[bin] - k : 0};
}

// Walks slots in order and calls use(group, slot) for the first `k` candidates.
template <typename Use>
void for_taken(const int32_t * bins, const int32_t * pool, int32_t n, const int32_t * count, int32_t k,
               const Use & use) {
    if (k <= 0) {
        return;
    }
    Cut cut = cut_after(count, k);
    for (int32_t s = 0; s < n; ++s) {
        if (bins[s] < 0 || bins[s] > cut.bin) {
            continue;
        }
        if (bins[s] == cut.bin && cut.left_out > 0) {
            --cut.left_out;
            continue;
        }
        use(pool != nullptr ? pool[1 + s] : s, s);
    }
}

// The pool of a list: groups of the best spans, and all groups that have no say in which those are.
void choose_spans(const Work & w, int32_t first, int32_t query, int32_t kv_head) {
    const int32_t spans      = w.shape.n_spans;
    const int32_t candidates = make_bins(w, spans, query - first, kv_head, nullptr);
    int32_t *     list       = w.span_pool(query - first, kv_head);
    int32_t       n          = 0;
    int32_t       next       = 0;  // span that has not been looked at
    const auto    add        = [&](int32_t begin, int32_t end) {
        for (int32_t g = begin; g < end; ++g) {
            list[1 + n++] = g;
        }
    };
    const int32_t per_span   = kSpanCells / w.a.mem.group;
    const auto    add_others = [&](int32_t end) {
        for (; next < end; ++next) {
            if (w.span_state[next] != kComplete) {
                add(next * per_span, (next + 1) * per_span);
            }
        }
    };
    for_taken(w.bins, nullptr, spans, w.count, std::min(candidates, w.a.most_spans), [&](int32_t span, int32_t) {
        add_others(span);
        add(span * per_span, (span + 1) * per_span);
    });
    add_others(spans);
    add(spans * per_span, w.shape.n_groups);
    list[0] = n;
}

void list_groups(const Work & w, int32_t first, int32_t query, int32_t kv_head) {
    const SelectArgs & a     = w.a;
    const int64_t      index = int64_t(query) * a.mem.n_head_kv + kv_head;
    const int32_t *    pool  = w.pool(first, query, kv_head);
    const int32_t      slots = std::min(w.shape.n_slots, pool != nullptr ? pool[0] : w.shape.n_groups);

    const int32_t * bins       = w.bins;
    float *         unread     = a.unread != nullptr ? a.unread + index * w.shape.gqa : nullptr;
    const int32_t   candidates = make_bins(w, slots, query - first, kv_head, unread);
    const int32_t   visible    = w.seen[query - first].complete;
    int32_t         partial    = w.seen[query - first].partial;
    const int32_t   k          = std::min(budget(a, w.count, candidates, visible), std::max(0, a.capacity - partial));

    int32_t *  list        = a.selected + index * group_list_stride(a.capacity);
    int32_t    n           = 0;
    int32_t    next        = 0;  // group whose state has not been looked at
    const auto add_partial = [&](int32_t end) {
        for (; next < end && n < a.capacity && partial > 0; ++next) {
            if (w.state[next] == kPartial) {
                list[1 + n++] = next;
                --partial;
            }
        }
    };
    std::fill_n(w.read, w.shape.gqa, 0.0f);
    const float * probability = w.row(query - first, kv_head * w.shape.gqa);
    for_taken(bins, pool, slots, w.count, k, [&](int32_t group, int32_t slot) {
        add_partial(group);
        next          = std::max(next, group);
        list[1 + n++] = group;
        for (int32_t j = 0; j < w.shape.gqa; ++j) {
            w.read[j] += probability[int64_t(j) * w.shape.n_slots + slot];
        }
    });
    add_partial(w.shape.n_groups);
    list[0] = n;

    for (int32_t j = 0; unread != nullptr && j < w.shape.gqa; ++j) {
        // What rounding leaves of 1 when everything has been read is nothing.
        unread[j] =
            k == candidates ? -kInfinity : unread[j] + logf(std::max(0.0f, 1.0f - w.read[j]) * float(a.mem.group));
    }

    if (a.counters != nullptr) {
        __atomic_fetch_add(a.counters, uint64_t(visible), __ATOMIC_RELAXED);
        __atomic_fetch_add(a.counters + 1, uint64_t(k), __ATOMIC_RELAXED);
    }
}

template <int DIM>
void run(const Work & w) {
    const SelectArgs & a       = w.a;
    const Threads &    t       = w.threads;
    const auto         barrier = [&t] {
        if (t.nth > 1) {
            t.barrier(t.barrier_arg);
        }
    };
    prepare(w);
    for (int32_t first = 0; first < a.n_q; first += w.shape.block) {
        const int32_t last          = std::min(a.n_q, first + w.shape.block);
        const int32_t heads         = a.mem.n_head_kv;
        const auto    for_each_list = [&](const auto & make) {
            for (int32_t task = t.ith; task < (last - first) * heads; task += t.nth) {
                make(w, first, first + task / heads, task % heads);
            }
        };
        barrier();
        if (w.shape.n_spans > 0) {
            score_spans<DIM>(w, first, last);
            barrier();
            for_each_list(choose_spans);
            barrier();
        }
        score_round<DIM>(w, first, last);
        barrier();
        for_each_list(list_groups);
    }
}

}  // namespace

size_t kv_select_scratch(const SelectArgs & a, int nth) { return Shape(a, nth).bytes; }

void kv_select(const SelectArgs & a, const Threads & t) {
    const Shape shape(a, t.nth);
    const Work  work(a, shape, t);
    switch (a.mem.head_dim) {
    case 64:
        return run<64>(work);
    case 128:
        return run<128>(work);
    default:
        return run<256>(work);
    }
}

}  // namespace kvfold
