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

  // Call `work(item, next)`, in order or backwards; nothing comes next to the last item but itself.
  template <class Work>
  void share_in_order(int64_t items, bool backwards, Work work) const {
    const int64_t begin = items * member / size, end = items * (member + 1) / size;
    const int64_t first = backwards ? end - 1 : begin, last = backwards ? begin : end - 1, step = backwards ? -1 : 1;
    for (int64_t item = first, left = end - begin; left > 0; left--, item += step)
      work(item, item == last ? item : item + step);
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
