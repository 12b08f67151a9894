// How an operation divides its scratch (Threads::scratch).
#pragma once

#include "ops/kv_ops.h"

namespace kvfold {

constexpr size_t kLine = 64;  // bytes of a cache line

// Hands out scratch, in whole cache lines.
class ScratchPlan {
  public:
    static size_t align(size_t n) { return (n + kLine - 1) / kLine * kLine; }

    // Where the next `n` bytes begin.
    size_t reserve(size_t n) {
        const size_t at = bytes_;
        bytes_ += align(n);
        return at;
    }
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
};

template <typename Element>
Element * scratch_at(const Threads & t, size_t offset) {
    return reinterpret_cast<Element *>(static_cast<uint8_t *>(t.scratch) + offset);
}

}  // namespace kvfold
