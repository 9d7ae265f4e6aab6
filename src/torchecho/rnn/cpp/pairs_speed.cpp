// How fast sums of products of pairs are beside those of floats. An instruction for pairs does twice the work of one for
// floats; some processors take four times as long for it.
#include <algorithm>
#include <chrono>

#include "pairs.h"

namespace torchecho {
namespace {

constexpr int kSums = 12;  // more than are under way at once
constexpr int kSteps = 4096, kRounds = 7;

template <class Terms>
double seconds(const volatile float& factor) {
  const float x = factor;
  const Floats right = all(x);
  Floats sums[kSums] = {};
  const auto start = std::chrono::steady_clock::now();
  for (int step = 0; step < kSteps; step++)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; i++) sums[i] = Terms::add(sums[i], x, right);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  volatile float used = 0.0f;
  for (const Floats& sum : sums) used = used + sum[0];
  return taken.count();
}

}  // namespace
}  // namespace torchecho

extern "C" __attribute__((visibility("default"))) double torchecho_pairs_speed() {
  using namespace torchecho;
  const volatile float factor = 1e-3f;
  double floats = 1.0, pairs = 1.0;
  for (int round = 0; round < kRounds; round++) {  // in turns, so that what else the machine does delays both alike
    floats = std::min(floats, seconds<ByFloats>(factor));
    pairs = std::min(pairs, seconds<ByPairs>(factor));
  }
  return 2.0 * floats / pairs;
}
