#include "cache/fingerprint.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "../ggml/src/ggml-backend-impl.h"  // beside llama.cpp's src, not on its include path
#include "llama-model.h"

namespace kvfold {

uint64_t hash_bytes(const void * data, size_t size, uint64_t seed) {
    const auto * bytes = static_cast<const unsigned char *>(data);
    uint64_t     h     = seed;
    size_t       i     = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        std::memcpy(&word, bytes + i, 8);
        h = (h ^ word) * 0x100000001b3ull;
        h ^= h >> 29;  // a word-wise FNV needs its high bits brought back
    }
    for (; i < size; ++i) {
        h = (h ^ bytes[i]) * 0x100000001b3ull;
    }
    return h;
}

uint64_t model_fingerprint(const llama_model & model) {
    const std::string desc = model.desc();
    uint64_t          h    = hash_bytes(desc.data(), desc.size());

    const auto & hparams = model.hparams;
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const uint32_t shape[] = {hparams.n_head(il), hparams.n_head_kv(il), hparams.n_embd_head_k(il),
                                  hparams.n_ff(il)};
        h                      = hash_bytes(shape, sizeof(shape), h);
    }

    // Name, origin, version: fine-tunes share every shape and perhaps most weights.
    for (const auto & [key, value] : std::map<std::string, std::string>(model.gguf_kv.begin(), model.gguf_kv.end())) {
        if (key.rfind("general.", 0) == 0) {
            h = hash_bytes(value.data(), value.size(), hash_bytes(key.data(), key.size(), h));
        }
    }

    // Token embeddings and norms are read because nothing repacks them; where embeddings also serve as the output matrix, that copy
    // may be repacked and cannot be read back. A dry run has no weights and saves no state.
    std::set<std::string> seen;  // a copy on another device says nothing new, and not every device has one
    for (const auto & [name, tensor] : model.tensors_by_name) {
        const bool norm = name.find("norm") != std::string::npos && tensor->ne[1] == 1;
        if (!norm && name != "token_embd.weight") {
            continue;
        }
        const bool readable =
            tensor->buffer != nullptr && tensor->data != nullptr && tensor->buffer->iface.get_tensor != nullptr;
        if (!readable || hparams.no_alloc || !seen.insert(name).second) {
            continue;
        }
        std::vector<unsigned char> head(std::min<size_t>(ggml_nbytes(tensor), 64));
        ggml_backend_tensor_get(tensor, head.data(), 0, head.size());
        h = hash_bytes(head.data(), head.size(), h);
    }
    return h != 0 ? h : 1;
}

}  // namespace kvfold
