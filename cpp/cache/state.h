// Saving and restoring kvfold caches. See state.cpp for the format.
#pragma once

#include <cstdint>

namespace kvfold {

constexpr char     kStateMagic[8] = {'K', 'V', 'F', 'O', 'L', 'D', 'S', 'T'};
constexpr uint32_t kStateVersion  = 3;

// First bytes of a cache's state. What follows is `payload_bytes` long and has this checksum.
struct StateHeader {
    char     magic[8];
    uint32_t version;
    int32_t  kv_type;
    int16_t  group;
    int16_t  scale_group;
    uint32_t n_layers;
    uint64_t fingerprint;  // of the model
    uint64_t payload_bytes;
    uint64_t checksum;  // hash_bytes of the header with this field zero, continued over the payload
};
static_assert(sizeof(StateHeader) == 48, "no padding");

}  // namespace kvfold
