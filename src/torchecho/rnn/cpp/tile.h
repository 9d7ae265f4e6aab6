// One register tile of a matrix product: a few rows by a few vectors of columns.
//
// A panel is up to four neighbouring vectors of `kLanes` columns of the right operand. A right operand with its rows in
// memory is read where it is. The transpose of such a matrix is packed: row k of all vectors of a panel lies in one
// piece, and the panel that starts at vector v of a matrix of K rows begins at v * K * kLanes. In pairs (pairs.h) both
// operands have half the depth.
#pragma once

#include <algorithm>
#include <array>

#include "pairs.h"

namespace torchecho {

constexpr int kMostVectors = 4;                                // in a panel of gates
constexpr int kMostColumns = kRegisters == 32 ? 4 : 3;         // vectors in a panel of columns: what fits the registers
constexpr int kMostRows = 8;     // in a tile
constexpr int64_t kRowBlock = 96;  // rows that one thread takes at a time
// Rows of a panel that go into one sum before it is added to the total. Short sums round less, and a short piece of a
// panel stays in the cache. Where the depth is time, terms have one sign more often, and the sums are shorter still.
constexpr int64_t kDepth = 256;
constexpr int64_t kTimeDepth = 128;
constexpr int64_t kRowsAhead = 16;  // of a panel, that are asked for before they are read

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

// Row k of a panel is at[k * stride].
struct Panel {
  const float* at;
  int64_t stride;
};

// A place for the product: element (i, j) at[i * stride + j].
struct Target {
  float* at;
  int64_t stride;
};

// target[R, V * kLanes] = left[R, depth] * panel[depth, V * kLanes], added to what is there if `accumulate`. The first tile
// that multiplies a panel asks for rows of it early (`Asks`), because they come from a distant cache.
template <class Terms, bool Asks, int R, int V>
void multiply_tile(Left left, Panel panel, int64_t depth, Target target, bool accumulate) {
  Floats sums[R][V];
  const float* rows[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    rows[i] = left.at + i * left.row_stride;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[i][v] = Floats{};
  }
  int64_t at = 0;
  const float* right_row = panel.at;
  for (int64_t k = 0; k < depth; k++, at += left.depth_stride, right_row += panel.stride) {
    Floats right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      right[v] = load(right_row + v * kLanes);
      if (Asks) __builtin_prefetch(right_row + kRowsAhead * panel.stride + v * kLanes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      const float x = rows[i][at];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[i][v] = Terms::add(sums[i][v], x, right[v]);
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

using TileFunction = void (*)(Left, Panel, int64_t, Target, bool);

constexpr int rows_that_fit(int vectors) {
  return std::min(kMostRows, (kRegisters == 32 ? 24 : 12) / vectors);
}

template <class Terms, bool Asks, int V>
constexpr std::array<TileFunction, kMostRows> tiles_of_width() {
  return {multiply_tile<Terms, Asks, 1, V>, multiply_tile<Terms, Asks, 2, V>, multiply_tile<Terms, Asks, 3, V>,
          multiply_tile<Terms, Asks, 4, V>, multiply_tile<Terms, Asks, 5, V>, multiply_tile<Terms, Asks, 6, V>,
          multiply_tile<Terms, Asks, 7, V>, multiply_tile<Terms, Asks, 8, V>};
}

template <class Terms, bool Asks>
TileFunction tile_function(int64_t rows, int64_t vectors) {
  static constexpr std::array<std::array<TileFunction, kMostRows>, kMostVectors> functions = {
      tiles_of_width<Terms, Asks, 1>(), tiles_of_width<Terms, Asks, 2>(), tiles_of_width<Terms, Asks, 3>(),
      tiles_of_width<Terms, Asks, 4>()};
  return functions[vectors - 1][rows - 1];
}

// The function for one of the tiles that multiply a panel, the first of which is 0.
template <class Terms>
TileFunction tile_function(int64_t tile, int64_t rows, int64_t vectors) {
  return tile ? tile_function<Terms, false>(rows, vectors) : tile_function<Terms, true>(rows, vectors);
}

// Ask for a part of the next piece of a left operand with its columns in memory: they may lie so far apart that neither
// the processor foresees them nor the nearest cache holds them together.
inline void fetch_columns(Left left, int64_t rows, int64_t depth, const Split& tiles, int64_t tile) {
  const Split columns = {depth, tiles.parts};
  for (int64_t k = columns.begin(tile); k < columns.begin(tile + 1); k++)
    for (int64_t i = 0; i < rows; i += kLanes) __builtin_prefetch(left.at + k * left.depth_stride + i, 0, 2);
}

// target[rows, vectors * kLanes] (+)= left[rows, depth] * panel, in tiles of as many rows as fit the registers.
inline void multiply_panel(Left left, int64_t rows, Panel panel, int64_t vectors, int64_t depth, Target target,
                           bool accumulate) {
  const Split tiles = split_at_most(rows, rows_that_fit(vectors));
  const int64_t most = left.depth_stride == 1 ? kDepth : kTimeDepth;
  int64_t k = 0;
  do {  // once even without depth, so that the target is written
    const int64_t piece = std::min(most, depth - k), next = std::min(most, depth - k - piece);
    const Left beyond = {left.at + (k + piece) * left.depth_stride, left.row_stride, left.depth_stride};
    for (int64_t tile = 0; tile < tiles.parts; tile++) {
      const int64_t i = tiles.begin(tile), n = tiles.begin(tile + 1) - i;
      if (left.row_stride == 1) fetch_columns(beyond, rows, next, tiles, tile);
      const Left here = {left.at + i * left.row_stride + k * left.depth_stride, left.row_stride, left.depth_stride};
      tile_function<ByFloats>(tile, n, vectors)(here, {panel.at + k * panel.stride, panel.stride}, piece,
                                {target.at + i * target.stride, target.stride}, accumulate || k > 0);
    }
    k += piece;
  } while (k < depth);
}

}  // namespace torchecho
