// What a second reading of a text says about the first one: how much attention the far cells get from the queries of a micro-batch, by
// KV head and at most (kv_receive), which shows what is needed to say the text again (Kim et al., "KVzip", 2025), and how much of the attention goes to
// cells that could be dropped (kv_lose).
#pragma once

#include "ops/kv_align.h"
#include "ops/kv_ops.h"

namespace kvfold {

// received [mem.n_head_kv][mem.n_cells]: for every KV head h and far cell c,
//   received[h][c] = max(received[h][c], max over queries i that see c, and heads j that read h, of p[i][j][c])
// p is the softmax that attention itself has: over all cells that the query sees, exact ones and sinks included. `attend.out` is not
// used.
struct ReceiveArgs {
    AttendArgs attend;
    float *    received;
};
size_t kv_receive_scratch(const ReceiveArgs & a, int nth);
void   kv_receive(const ReceiveArgs & a, const Threads & t);

// For every query that sees anything, and head: with p as above and L the sum of p over far cells that would be dropped, 1 - L is
// recalled of the attention, and the attention without those cells diverges by -log(1 - L) from what it is with them.
struct LoseArgs {
    AttendArgs       attend;
    const uint32_t * dropped;  // [(n_kv + 31) / 32] bits as in far_bits
    Alignment *      sums;     // [n_head], added to
};
size_t kv_lose_scratch(const LoseArgs & a, int nth);
void   kv_lose(const LoseArgs & a, const Threads & t);

}  // namespace kvfold
