// KVFOLD_VECTOR_CLONES: a function whose loops are worth having for wider vectors than every processor has; the loader picks.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__)
#define KVFOLD_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KVFOLD_VECTOR_CLONES
#endif
