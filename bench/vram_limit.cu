// Runs a command on a GPU that seems smaller: device memory is taken until only the given amount is free, held while the
// command runs, and released when it ends.
//
// build:  nvcc -O2 -o vram_limit bench/vram_limit.cu
// usage:  vram_limit [--free GiB (default 8)] -- command [arguments]
//
// The exit status is the command's (128 + n if signal n ended it); 2 if memory could not be taken, 127 if the command
// cannot be started. Uses the first device of CUDA_VISIBLE_DEVICES. What the command's own CUDA context takes (about half a
// GiB) comes out of the free amount, as it does on a real card.
//
// An 8B model in Q4_0 with a context of 65536 tokens in 8 GiB: decodes with fp4_csa2, does not load with f16:
//   python3 bench/synth_gguf.py llama-8b 8b.gguf
//   for t in fp4_csa2 f16; do
//       ./vram_limit --free 8 -- llama-bench -m 8b.gguf -ngl 99 -fa 1 -p 0 -n 64 -d 65472 -r 1 --kv-type $t; echo "$t: $?"
//   done
// (llama-bench makes a context of depth + n = 65536 tokens.)
#include <cuda_runtime.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern char ** environ;

namespace {

constexpr size_t kGiB       = size_t(1) << 30;
constexpr size_t kSmallest  = size_t(2) << 20;  // a page of device memory; smaller chunks take as much
constexpr int    kCannot    = 2;
constexpr int    kNoCommand = 127;  // as a shell says it
constexpr char   kUsage[]   = "usage: vram_limit [--free GiB] -- command [arguments]";

double in_gib(size_t bytes) { return double(bytes) / double(kGiB); }

[[noreturn]] void fail(const char * what, cudaError_t error) {
    std::fprintf(stderr, "vram_limit: %s: %s\n", what, cudaGetErrorString(error));
    std::exit(kCannot);
}

size_t free_memory(size_t & total) {
    size_t            available = 0;
    const cudaError_t error     = cudaMemGetInfo(&available, &total);
    if (error != cudaSuccess) {
        fail("no usable CUDA device", error);
    }
    return available;
}

// Takes memory until at most `target` bytes (and less than a page) are free. Chunks get smaller where large ones do not fit.
size_t take_all_but(size_t target) {
    size_t total = 0;
    size_t chunk = kGiB;
    while (chunk >= kSmallest) {
        const size_t available = free_memory(total);
        if (available < target + kSmallest) {
            break;
        }
        const size_t size   = std::min(chunk, (available - target) / kSmallest * kSmallest);
        void *       memory = nullptr;  // never given back before the end: the process's end does that
        if (cudaMalloc(&memory, size) != cudaSuccess) {
            (void) cudaGetLastError();
            chunk = size / 2;
        }
    }
    return free_memory(total);
}

}  // namespace

int main(int argc, char ** argv) {
    double gib   = 8;
    int    first = 1;
    while (first < argc && std::strcmp(argv[first], "--") != 0) {
        if (std::strcmp(argv[first], "--free") != 0 || first + 1 >= argc) {
            std::fprintf(stderr, "vram_limit: cannot read '%s'; %s\n", argv[first], kUsage);
            return kCannot;
        }
        const char * text = argv[first + 1];
        char *       end  = nullptr;
        gib               = std::strtod(text, &end);
        if (end == text || *end != '\0' || !(gib > 0 && gib < 1e6)) {
            std::fprintf(stderr, "vram_limit: --free '%s': must be a number of GiB above 0\n", text);
            return kCannot;
        }
        first += 2;
    }
    char ** command = argv + first + 1;
    if (first + 1 >= argc) {
        std::fprintf(stderr, "vram_limit: no command; %s\n", kUsage);
        return kCannot;
    }

    const auto   target = size_t(gib * double(kGiB));
    size_t       total  = 0;
    const size_t before = free_memory(total);
    if (before < target) {
        std::fprintf(stderr, "vram_limit: --free %g: only %.2f of %.2f GiB are free\n", gib, in_gib(before),
                     in_gib(total));
        return kCannot;
    }
    const size_t left = take_all_but(target);
    if (left > target + 16 * kSmallest) {
        std::fprintf(stderr, "vram_limit: --free %g: %.2f GiB stay free, the rest cannot be taken\n", gib,
                     in_gib(left));
        return kCannot;
    }
    std::fprintf(stderr, "vram_limit: %.3f of %.2f GiB free, %.2f held back\n", in_gib(left), in_gib(total),
                 in_gib(before - left));

    // The command gets interrupts itself; memory has to be held until it is gone.
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    posix_spawnattr_t attributes;
    sigset_t          defaults;
    posix_spawnattr_init(&attributes);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGINT);
    sigaddset(&defaults, SIGTERM);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    pid_t     child  = 0;
    const int failed = posix_spawnp(&child, command[0], nullptr, &attributes, command, environ);
    if (failed != 0) {
        std::fprintf(stderr, "vram_limit: cannot start '%s': %s\n", command[0], std::strerror(failed));
        return kNoCommand;
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0) {
        if (errno != EINTR) {
            std::perror("vram_limit: waitpid");
            return kCannot;
        }
    }
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}
