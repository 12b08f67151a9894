// Which cells a micro-batch gets: cells come in aligned groups of `group`, so that a group holds consecutive positions of one
// set of sequences even when the batches of several sequences interleave.
#pragma once

#include <cstdint>
#include <vector>

#include "llama-batch.h"
#include "llama-kv-cells.h"

namespace kvfold {

// One token to place.
struct TokenRef {
    llama_pos                 pos;
    llama_kv_cells::seq_set_t seqs;
};

// Cells for the tokens, in order, or an empty vector when they do not fit. A token of sequence set S at position p goes
//   1. beside its predecessor: into the group that holds p - 1, when p does not start a new group, the offset p % group is free
//      there and everything in the group belongs to exactly S; a token at the same position as the one placed before it (patches
//      of an image) takes the next free offset of that group;
//   2. else to a wholly free group, at offset p % group;
//   3. else (fragmented cache) to any free cell of a group whose content belongs to exactly S.
// `hint` is the group where the search for a free group starts.
std::vector<uint32_t> place_tokens(const llama_kv_cells & cells, uint32_t group, uint32_t hint,
                                   const std::vector<TokenRef> & tokens);

std::vector<TokenRef> tokens_of(const llama_ubatch & ubatch);

// Cells a cache needs so that `n_ctx` tokens fit whatever the group borders: every sequence but one may leave a group partly
// filled on either side of the place where it branched off.
uint32_t physical_cells(uint32_t n_ctx, uint32_t n_seq_max, uint32_t group);

}  // namespace kvfold
