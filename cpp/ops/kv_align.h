// kv_align: how much of the attention over everything an attention over lists of groups gets. For reports; slow.
#pragma once

#include <algorithm>

#include "ops/kv_select.h"

namespace kvfold {

// What is added up for every query head, over queries that see anything. With A the mass (softmax sum, sinks included) of all
// cells that a query sees and R that of the cells it reads, R / A of the exact attention is recalled; the distribution over
// what is read, R again 1, has a Kullback-Leibler divergence of log(A / R) from the exact one. Nothing stands in for the rest here.
struct Alignment {
    double queries;
    double recalled;    // sum of R / A
    double divergence;  // sum of log(A / R)
    double largest;     // largest log(A / R)

    void add(const Alignment & other) {
        queries += other.queries;
        recalled += other.recalled;
        divergence += other.divergence;
        largest = std::max(largest, other.largest);
    }
};

// `a.attend.out` and `a.unread` are not used. sums [n_head]: added to.
void kv_align(const SparseAttendArgs & a, Alignment * sums, const Threads & t);

}  // namespace kvfold
