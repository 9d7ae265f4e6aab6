// Threads that share work in equal, contiguous parts. Without OpenMP there is one.
#pragma once

#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace torchecho {

struct Team {
  int64_t member;
  int64_t size;

  // Call `work(item)` for this member's part of `items`.
  template <class Work>
  void share(int64_t items, Work work) const {
    for (int64_t item = items * member / size; item < items * (member + 1) / size; item++) work(item);
  }

  // The same, the last item first.
  template <class Work>
  void share_backwards(int64_t items, Work work) const {
    for (int64_t item = items * (member + 1) / size - 1; item >= items * member / size; item--) work(item);
  }

  // Wait until every member has come here.
  void meet() const {
#ifdef _OPENMP
    if (size > 1) {
#pragma omp barrier
    }
#endif
  }
};

template <class Work>
void with_team(int64_t threads, Work work) {
#ifdef _OPENMP
#pragma omp parallel num_threads(static_cast<int>(threads)) if (threads > 1)
  work(Team{omp_get_thread_num(), omp_get_num_threads()});
#else
  (void)threads;
  work(Team{0, 1});
#endif
}

}  // namespace torchecho
