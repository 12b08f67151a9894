// A number that two models share only by being the same model, for refusing a state of another one.
#pragma once

#include <cstddef>
#include <cstdint>

struct llama_model;

namespace kvfold {

// FNV-1a over 8-byte words (and the rest by bytes): quick enough for whole states, good enough against accidents.
uint64_t hash_bytes(const void * data, size_t size, uint64_t seed = 0xcbf29ce484222325ull);

// Over description, metadata (general.*), layer shapes and the first bytes of token embeddings and norms; never 0, and the same
// whichever devices hold the model.
uint64_t model_fingerprint(const llama_model & model);

}  // namespace kvfold
