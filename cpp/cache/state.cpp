// State of a kvfold cache: a header and one payload, checked as a whole before anything is changed.
//
// Payload: for every saved group `GroupRecord` followed by its members' sequence ids; what was compacted, of the sequence or of all,
// unless nothing was ever dropped; then for every layer
//   summaries and spreads of the saved groups, far K rows, far V rows (all members of all groups; rows that are not in use are
//   zero, so that nothing of another sequence leaves through a file), then near K and V rows in order of the near members.
// Far rows whose values and scales lie apart in memory (LayerMemory::far_k) do so here: all values, then all scales.
// Groups keep their offsets, so decoded rows and results are bit-identical after a restore, wherever the groups land.
#include "cache/state.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cache/cell_groups.h"
#include "cache/config.h"
#include "cache/fingerprint.h"
#include "cache/hooks.h"
#include "cache/kvfold_cache.h"
#include "llama-impl.h"
#include "llama-io.h"

namespace kvfold {

namespace {

enum MemberState : uint8_t { kAbsent = 0, kFar = 1, kNear = 2 };

struct Member {
    llama_pos                 pos   = -1;
    uint8_t                   state = kAbsent;
    llama_kv_cell_ext         ext;
    llama_kv_cells::seq_set_t seqs;
};

struct GroupRecord {
    uint32_t            index = 0;  // where it sits in this cache; not saved
    std::vector<Member> members;
};

class Writer {
  public:
    template <typename T>
    void put(const T & value) {
        put(&value, sizeof(value));
    }

    void put(const void * data, size_t size) {
        const auto * bytes = static_cast<const unsigned char *>(data);
        out.insert(out.end(), bytes, bytes + size);
    }

    std::vector<unsigned char> out;
};

class Reader {
  public:
    explicit Reader(const std::vector<unsigned char> & data) : data_(data) {}

    template <typename T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof(T)), sizeof(T));
        return value;
    }

    const unsigned char * take(size_t size) {
        if (size > data_.size() - at_) {
            throw std::runtime_error("kvfold: the state is shorter than it says");
        }
        const unsigned char * p = data_.data() + at_;
        at_ += size;
        return p;
    }

    size_t rest() const { return data_.size() - at_; }

  private:
    const std::vector<unsigned char> & data_;
    size_t                             at_ = 0;
};

uint64_t checksum(StateHeader header, const std::vector<unsigned char> & payload) {
    header.checksum = 0;
    return hash_bytes(payload.data(), payload.size(), hash_bytes(&header, sizeof(header)));
}

// Maximal runs of consecutive group indices in a list, as (first position in the list, length): one transfer each.
std::vector<std::pair<size_t, size_t>> runs(const std::vector<GroupRecord> & groups) {
    std::vector<std::pair<size_t, size_t>> out;
    for (size_t i = 0; i < groups.size(); ++i) {
        if (!out.empty() && groups[i].index == groups[i - 1].index + 1) {
            out.back().second += 1;
        } else {
            out.emplace_back(i, 1);
        }
    }
    return out;
}

// Of a whole cache, or one of them: the first, and the one behind the last.
std::pair<size_t, size_t> sequences_of(const kvfold_cache & cache, llama_seq_id seq_id) {
    const size_t n     = cache.compacted.size();
    const size_t first = std::min(n, size_t(std::max(0, seq_id)));
    return {first, seq_id < 0 ? n : std::min(n, first + 1)};
}

// Bytes of one layer's rows.
struct RowSizes {
    RowSizes(const kvfold_cache & cache, const CacheLayer & layer)
        : layout(cache.side_layout(layer)), far(layer.far_k->nb[1]), near(layer.near->nb[1]),
          spread(size_t(layer.n_head_kv) * sizeof(ggml_fp16_t)) {
        if (layer.scale_group != kFp4ScaleGroup) {
            const size_t values = size_t(layer.n_head_kv) * size_t(layer.head_dim) / 2;
            parts               = {{0, values}, {values, far - values}};
        } else {
            parts = {{0, far}};
        }
    }

    // What a far row consists of: for each part, the rows of all cells lie one behind the other.
    struct Part {
        size_t before;  // bytes that the parts before it have of a row
        size_t bytes;
    };

    SideLayout        layout;
    size_t            far;  // all parts
    size_t            near;
    size_t            spread;
    std::vector<Part> parts;
};

// Calls use(offset in the rows of `n_saved` cells, offset in those of all `n_cells`, bytes) for each part of the far rows of `count`
// cells, which are the ones from `saved` and from `cell` on.
template <typename Use>
void for_far_parts(const RowSizes & size, size_t n_saved, size_t saved, size_t n_cells, size_t cell, size_t count,
                   Use && use) {
    for (const RowSizes::Part & part : size.parts) {
        use(part.before * n_saved + saved * part.bytes, part.before * n_cells + cell * part.bytes, count * part.bytes);
    }
}

// Moves the rows of `groups` between a layer and `buffer` (one direction for each of save and restore).
template <typename Move>
void move_group_rows(const CacheLayer & layer, const RowSizes & size, uint32_t group,
                     const std::vector<GroupRecord> & groups, unsigned char * buffer, Move && move) {
    const size_t summaries = size.layout.summary_row_bytes * groups.size();
    const size_t spreads   = size.spread * groups.size();
    const size_t rows      = size.far * group * groups.size();
    for (const auto & [first, count] : runs(groups)) {
        const size_t g = groups[first].index;
        move(layer.side, buffer + first * size.layout.summary_row_bytes, g * size.layout.summary_row_bytes,
             count * size.layout.summary_row_bytes);
        move(layer.side, buffer + summaries + first * size.spread, size.layout.spread_offset + g * size.spread,
             count * size.spread);
        unsigned char * far = buffer + summaries + spreads;
        for_far_parts(size, group * groups.size(), first * group, size_t(layer.far_k->ne[1]), g * group, count * group,
                      [&](size_t in_buffer, size_t in_layer, size_t bytes) {
                          move(layer.far_k, far + in_buffer, in_layer, bytes);
                          move(layer.far_v, far + rows + in_buffer, in_layer, bytes);
                      });
    }
}

size_t group_bytes(const RowSizes & size, uint32_t group) {
    return size.layout.summary_row_bytes + size.spread + 2 * group * size.far;
}

void get_tensor(const ggml_tensor * t, void * data, size_t offset, size_t size) {
    ggml_backend_tensor_get(t, data, offset, size);
}

void set_tensor(ggml_tensor * t, const void * data, size_t offset, size_t size) {
    ggml_backend_tensor_set(t, data, offset, size);
}

}  // namespace

}  // namespace kvfold

using namespace kvfold;

void kvfold_access::state_write(const llama_kv_cache & kv, llama_io_write_i & io, llama_seq_id seq_id) {
    const kvfold_cache &   cache = *kv.kvfold;
    const llama_kv_cells & cells = kv.v_cells[0];
    const uint32_t         group = cache.group();

    std::vector<GroupRecord> groups;
    std::vector<uint32_t>    near_cells;
    for (uint32_t g = 0; g < cache.n_groups(); ++g) {
        GroupRecord record;
        record.index = g;
        record.members.resize(group);
        bool any = false;
        for (uint32_t j = 0; j < group; ++j) {
            const uint32_t cell = g * group + j;
            if (cells.is_empty(cell) || (seq_id >= 0 && !cells.seq_has(cell, seq_id))) {
                continue;
            }
            Member & m = record.members[j];
            m.pos      = cells.pos_get(cell);
            m.state    = cache.near.row_of(cell) >= 0 ? kNear : kFar;
            m.ext      = cells.ext_get(cell);
            m.seqs     = cells.seq_get_all(cell);
            any        = true;
            if (m.state == kNear) {
                near_cells.push_back(cell);
            }
        }
        if (any) {
            groups.push_back(std::move(record));
        }
    }

    Writer w;
    w.put(uint32_t(groups.size()));
    w.put(uint32_t(near_cells.size()));
    for (const auto & record : groups) {
        for (const Member & m : record.members) {
            w.put(m.pos);
            w.put(m.state);
            w.put(m.ext);
            uint16_t n_seqs = 0;
            if (seq_id < 0) {
                n_seqs = uint16_t(m.seqs.count());  // one sequence's state says nothing about others
            }
            w.put(n_seqs);
            for (uint16_t s = 0; n_seqs > 0 && s < LLAMA_MAX_SEQ; ++s) {
                if (m.seqs.test(s)) {
                    w.put(s);
                }
            }
        }
    }

    const auto [first_seq, end_seq] = sequences_of(cache, seq_id);
    const size_t n_compacted        = cache.has_dropped() ? end_seq - first_seq : 0;
    w.put(uint32_t(n_compacted));
    w.put(cache.compacted.data() + first_seq, n_compacted * sizeof(kvfold_cache::Compacted));

    for (const auto & layer : cache.layers) {
        const RowSizes size(cache, layer);
        const size_t   start = w.out.size();
        w.out.resize(start + group_bytes(size, group) * groups.size());
        move_group_rows(layer, size, group, groups, w.out.data() + start, get_tensor);
        // Rows that are not in use hold whatever was there before.
        const size_t k_rows = start + (size.layout.summary_row_bytes + size.spread) * groups.size();
        const size_t v_rows = k_rows + size.far * group * groups.size();
        for (size_t i = 0; i < groups.size(); ++i) {
            bool any_far = false;
            for (uint32_t j = 0; j < group; ++j) {
                const bool far = groups[i].members[j].state == kFar;
                any_far        = any_far || far;
                if (!far) {
                    for_far_parts(size, group * groups.size(), i * group + j, 0, 0, 1,
                                  [&](size_t at, size_t, size_t bytes) {
                                      std::memset(w.out.data() + k_rows + at, 0, bytes);
                                      std::memset(w.out.data() + v_rows + at, 0, bytes);
                                  });
                }
            }
            if (!any_far) {
                std::memset(w.out.data() + start + i * size.layout.summary_row_bytes, 0, size.layout.summary_row_bytes);
                std::memset(w.out.data() + start + size.layout.summary_row_bytes * groups.size() + i * size.spread, 0,
                            size.spread);
            }
        }

        std::vector<unsigned char> pool(ggml_nbytes(layer.near));
        if (!near_cells.empty()) {
            get_tensor(layer.near, pool.data(), 0, pool.size());
        }
        for (size_t kv_half = 0; kv_half < 2; ++kv_half) {
            for (uint32_t cell : near_cells) {
                w.put(pool.data() + kv_half * layer.near->nb[2] + size_t(cache.near.row_of(cell)) * size.near,
                      size.near);
            }
        }
    }

    StateHeader header{};
    std::memcpy(header.magic, kStateMagic, sizeof(header.magic));
    header.version       = kStateVersion;
    header.kv_type       = int32_t(cache.config.type);
    header.group         = int16_t(cache.config.group);
    header.scale_group   = int16_t(cache.config.scale_group);
    header.n_layers      = uint32_t(cache.layers.size());
    header.fingerprint   = cache.fingerprint;
    header.payload_bytes = w.out.size();
    header.checksum      = checksum(header, w.out);
    io.write(&header, sizeof(header));
    io.write(w.out.data(), w.out.size());
}

namespace {

[[noreturn]] void refuse(const std::string & reason) {
    kvfold::fail(reason);
    throw std::runtime_error(reason);
}

}  // namespace

void kvfold_access::state_read(llama_kv_cache & kv, llama_io_read_i & io, llama_seq_id seq_id) {
    kvfold_cache & cache = *kv.kvfold;
    auto &         cells = kv.v_cells[0];
    const uint32_t group = cache.group();

    // 1. Read and check everything.
    StateHeader header;
    io.read(&header, sizeof(header));
    if (std::memcmp(header.magic, kStateMagic, sizeof(header.magic)) != 0) {
        refuse(message("the state is not one of a kvfold cache (this context has kv_type %s)",
                       kvfold_type_name(cache.config.type)));
    }
    if (header.version != kStateVersion) {
        refuse(message("the state has format version %u, this build reads %u", header.version, kStateVersion));
    }
    if (header.kv_type != int32_t(cache.config.type) || header.group != cache.config.group) {
        refuse(message("the state is of kv_type %s, group %d; this context has %s, group %d",
                       kvfold_type_name(kvfold_type(header.kv_type)), header.group, kvfold_type_name(cache.config.type),
                       cache.config.group));
    }
    if (header.scale_group != cache.config.scale_group) {
        refuse(message("the state has FP4 rows of kv_scale_group %d; this context has %d", header.scale_group,
                       cache.config.scale_group));
    }
    if (header.fingerprint != cache.fingerprint || header.n_layers != cache.layers.size()) {
        refuse("the state is of another model");
    }
    // No state is larger than the cache itself with its cell records; a damaged length must not be allocated.
    const uint64_t limit =
        cache.far_bytes + cache.side_bytes + cache.near_bytes + uint64_t(cache.n_cells) * (64 + 2 * LLAMA_MAX_SEQ) + 64;
    if (header.payload_bytes > limit) {
        refuse("the state is larger than this context's cache");
    }
    std::vector<unsigned char> payload(header.payload_bytes);
    io.read(payload.data(), payload.size());
    if (checksum(header, payload) != header.checksum) {
        refuse("the state is damaged (checksum)");
    }

    Reader         r(payload);
    const uint32_t n_groups = r.get<uint32_t>();
    const uint32_t n_near   = r.get<uint32_t>();
    if (n_groups > cache.n_groups()) {
        refuse(message("the state needs %u groups of cells, this context has %u", n_groups, cache.n_groups()));
    }
    std::vector<GroupRecord> groups(n_groups);
    uint32_t                 n_near_seen = 0;
    for (auto & record : groups) {
        record.members.resize(group);
        for (Member & m : record.members) {
            m.pos                 = r.get<llama_pos>();
            m.state               = r.get<uint8_t>();
            m.ext                 = r.get<llama_kv_cell_ext>();
            const uint16_t n_seqs = r.get<uint16_t>();
            for (uint16_t s = 0; s < n_seqs; ++s) {
                const uint16_t id = r.get<uint16_t>();
                if (id >= kv.n_seq_max) {
                    refuse(message("the state holds sequence %u, this context has %u", unsigned(id), kv.n_seq_max));
                }
                m.seqs.set(id);
            }
            if (seq_id >= 0) {
                m.seqs.reset();
                m.seqs.set(size_t(seq_id));
            } else if (m.state != kAbsent && n_seqs == 0) {
                refuse("the state is of one sequence, not of a whole context");
            }
            n_near_seen += m.state == kNear;
        }
    }
    std::vector<kvfold_cache::Compacted> compacted(std::min<uint32_t>(r.get<uint32_t>(), LLAMA_MAX_SEQ));
    const size_t                         compacted_bytes = compacted.size() * sizeof(compacted[0]);
    std::memcpy(compacted.data(), r.take(compacted_bytes), compacted_bytes);
    size_t rest = 0;
    for (const auto & layer : cache.layers) {
        const RowSizes size(cache, layer);
        rest += group_bytes(size, group) * n_groups + 2 * n_near * size.near;
    }
    if (n_near_seen != n_near || r.rest() != rest) {
        refuse("the state does not hold what it says");
    }

    // 2. Is there room, counting what the restore itself frees?
    const auto freed = [&](uint32_t cell) {
        return cells.is_empty(cell) || seq_id < 0 || (cells.seq_has(cell, seq_id) && cells.seq_count(cell) == 1);
    };
    uint32_t n_used_rows = 0;
    for (uint32_t cell = 0; cell < cache.n_cells; ++cell) {
        n_used_rows += cache.near.row_of(cell) >= 0 && !freed(cell);
    }
    if (n_near > cache.near.n_rows() - n_used_rows) {
        refuse(message("the state keeps %u tokens exact, this context has room for %u (kv_tail, kv_sinks)", n_near,
                       cache.near.n_rows() - n_used_rows));
    }
    uint32_t next = 0;
    for (auto & record : groups) {
        const auto is_free = [&](uint32_t g) {
            for (uint32_t j = 0; j < group; ++j) {
                if (!freed(g * group + j)) {
                    return false;
                }
            }
            return true;
        };
        while (next < cache.n_groups() && !is_free(next)) {
            ++next;
        }
        if (next == cache.n_groups()) {
            refuse(message("the state needs %u free groups of cells, this context has fewer", n_groups));
        }
        record.index = next++;
    }

    // 3. Nothing fails from here on.
    cache.repair(cells, {});
    cache.plan = {};
    cache.spans.clear();
    if (seq_id < 0) {
        kv.clear(false);
        cache.near.clear();
    } else {
        kv.seq_rm(seq_id, -1, -1);
        cache.near.sweep(cells);
    }

    const auto [first_seq, end_seq] = sequences_of(cache, seq_id);
    cache.restored_gaps             = cache.restored_gaps || !compacted.empty();
    compacted.resize(end_seq - first_seq);
    std::copy(compacted.begin(), compacted.end(), cache.compacted.begin() + ptrdiff_t(first_seq));

    std::vector<std::pair<uint32_t, int32_t>> near_rows;  // cell, row
    for (const auto & record : groups) {
        for (uint32_t j = 0; j < group; ++j) {
            const Member & m    = record.members[j];
            const uint32_t cell = record.index * group + j;
            if (m.state == kAbsent) {
                continue;
            }
            cells.pos_set(cell, m.pos);
            cells.ext_set(cell, m.ext);
            for (llama_seq_id s = 0; s < LLAMA_MAX_SEQ; ++s) {
                if (m.seqs.test(size_t(s))) {
                    cells.seq_add(cell, s);
                }
            }
            if (m.state == kNear) {
                near_rows.emplace_back(cell, cache.near.assign(cell));
            }
        }
    }

    for (const auto & layer : cache.layers) {
        const RowSizes        size(cache, layer);
        const unsigned char * rows = r.take(group_bytes(size, group) * n_groups);
        move_group_rows(layer, size, group, groups, const_cast<unsigned char *>(rows), set_tensor);
        for (size_t kv_half = 0; kv_half < 2; ++kv_half) {
            for (const auto & [cell, row] : near_rows) {
                set_tensor(layer.near, r.take(size.near), kv_half * layer.near->nb[2] + size_t(row) * size.near,
                           size.near);
            }
        }
    }
}
