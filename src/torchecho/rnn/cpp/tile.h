// One register tile of a matrix product: a few rows by a few vectors of columns, and the packed panels that it reads.
//
// A matrix of K rows and N columns is packed into vectors of `kLanes` columns; up to four neighbouring vectors make a
// panel, in which row k of all its vectors lies in one piece. A panel that starts at vector v begins at v * K * kLanes.
#pragma once

#include <algorithm>
#include <array>

#include "vector.h"

namespace torchecho {

constexpr int kMostVectors = 4;                                // in a panel of gates
constexpr int kMostColumns = kRegisters == 32 ? 4 : 3;         // vectors in a panel of columns: what fits the registers
constexpr int kMostRows = 8;     // in a tile
// Rows of a panel that go into one sum before it is added to the total. Short sums round less, and a short piece of a
// panel stays in the cache. Where the depth is time, terms have one sign more often, and the sums are shorter still.
constexpr int64_t kDepth = 128;
constexpr int64_t kTimeDepth = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `count` things in `parts` parts as equal as they can be.
struct Split {
  int64_t count;
  int64_t parts;
  int64_t begin(int64_t part) const { return count * part / parts; }
};

inline Split split_at_most(int64_t count, int64_t most) { return {count, std::max<int64_t>(1, ceil_div(count, most))}; }

inline Split column_panels(int64_t columns) { return split_at_most(ceil_div(columns, kLanes), kMostColumns); }

// Rows of a left operand: element (i, k) is at[i * row_stride + k * depth_stride].
struct Left {
  const float* at;
  int64_t row_stride;
  int64_t depth_stride;
};

// A place for the product: element (i, j) at[i * stride + j].
struct Target {
  float* at;
  int64_t stride;
};

// target[R, V * kLanes] = left[R, depth] * panel[depth, V * kLanes], added to what is there if `accumulate`.
template <int R, int V>
void multiply_tile(Left left, const float* panel, int64_t depth, Target target, bool accumulate) {
  Floats sums[R][V];
  const float* rows[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    rows[i] = left.at + i * left.row_stride;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[i][v] = Floats{};
  }
  int64_t at = 0;
  for (int64_t k = 0; k < depth; k++, at += left.depth_stride, panel += V * kLanes) {
    Floats right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) right[v] = load(panel + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const float x = rows[i][at];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[i][v] += x * right[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      float* to = target.at + i * target.stride + v * kLanes;
      store(to, accumulate ? sums[i][v] + load(to) : sums[i][v]);
    }
  }
}

using TileFunction = void (*)(Left, const float*, int64_t, Target, bool);

constexpr int rows_that_fit(int vectors) {
  return std::min(kMostRows, (kRegisters == 32 ? 24 : 12) / vectors);
}

template <int V>
constexpr std::array<TileFunction, kMostRows> tiles_of_width() {
  return {multiply_tile<1, V>, multiply_tile<2, V>, multiply_tile<3, V>, multiply_tile<4, V>,
          multiply_tile<5, V>, multiply_tile<6, V>, multiply_tile<7, V>, multiply_tile<8, V>};
}

inline TileFunction tile_function(int64_t rows, int64_t vectors) {
  static constexpr std::array<std::array<TileFunction, kMostRows>, kMostVectors> functions = {
      tiles_of_width<1>(), tiles_of_width<2>(), tiles_of_width<3>(), tiles_of_width<4>()};
  return functions[vectors - 1][rows - 1];
}

// target[rows, vectors * kLanes] (+)= left[rows, depth] * panel, in tiles of as many rows as fit the registers.
inline void multiply_panel(Left left, int64_t rows, const float* panel, int64_t vectors, int64_t depth, Target target,
                           bool accumulate) {
  const Split tiles = split_at_most(rows, rows_that_fit(vectors));
  const int64_t most = left.depth_stride == 1 ? kDepth : kTimeDepth;
  int64_t k = 0;
  do {  // once even without depth, so that the target is written
    const int64_t piece = std::min(most, depth - k);
    for (int64_t tile = 0; tile < tiles.parts; tile++) {
      const int64_t i = tiles.begin(tile), n = tiles.begin(tile + 1) - i;
      const Left here = {left.at + i * left.row_stride + k * left.depth_stride, left.row_stride, left.depth_stride};
      tile_function(n, vectors)(here, panel + k * vectors * kLanes, piece,
                                {target.at + i * target.stride, target.stride}, accumulate || k > 0);
    }
    k += piece;
  } while (k < depth);
}

}  // namespace torchecho
