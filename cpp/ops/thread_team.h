// Runs an operation on several threads without ggml: for the Python bindings and the benchmarks.
#pragma once

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "ops/kv_ops.h"

namespace kvfold {

class Barrier {
  public:
    explicit Barrier(int n) : n_(n) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const unsigned               round = round_;
        if (++arrived_ == n_) {
            arrived_ = 0;
            ++round_;
            changed_.notify_all();
        } else {
            changed_.wait(lock, [this, round] { return round != round_; });
        }
    }

  private:
    std::mutex              mutex_;
    std::condition_variable changed_;
    const int               n_;
    int                     arrived_ = 0;
    unsigned                round_   = 0;
};

// Calls op(Threads) `repeats` times on each of `n_threads` threads, all of which finish a round before the next begins.
// The scratch is filled with NaNs first: nothing may depend on what is there. Throws std::bad_alloc.
template <typename Op>
void run_on_threads(int n_threads, size_t scratch_bytes, const Op & op, int repeats = 1) {
    const size_t                                  bytes = (scratch_bytes + 64) / 64 * 64;
    const std::unique_ptr<void, void (*)(void *)> scratch(std::aligned_alloc(64, bytes), std::free);
    if (!scratch) {
        throw std::bad_alloc();
    }
    std::memset(scratch.get(), 0xFF, bytes);

    Barrier    barrier(n_threads);
    const auto wait = [](void * arg) { static_cast<Barrier *>(arg)->wait(); };
    const auto body = [&](int ith) {
        for (int i = 0; i < repeats; ++i) {
            op(Threads{ith, n_threads, wait, &barrier, scratch.get(), bytes});
            barrier.wait();
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < n_threads; ++i) {
        others.emplace_back(body, i);
    }
    body(0);
    for (std::thread & other : others) {
        other.join();
    }
}

}  // namespace kvfold
