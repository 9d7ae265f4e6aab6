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
constexpr int64_t kRowsAhead = 16;  // of a panel, that are asked for before they are read where nothing asked earlier

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

  Left row(int64_t i) const { return {at + i * row_stride, row_stride, depth_stride}; }
  Left from(int64_t k) const { return {at + k * depth_stride, row_stride, depth_stride}; }
};

// Row k of a panel, so many vectors, is at[k * stride]. Packed, it follows on row k - 1.
struct Panel {
  const float* at;
  int64_t stride;
  int64_t vectors, depth;

  Panel piece(const Split& pieces, int64_t p) const {
    return {at + pieces.begin(p) * stride, stride, vectors, pieces.begin(p + 1) - pieces.begin(p)};
  }
  bool is_packed() const { return stride == vectors * kLanes; }
};

// A place for the product: element (i, j) at[i * stride + j].
struct Target {
  float* at;
  int64_t stride;

  Target row(int64_t i) const { return {at + i * stride, stride}; }
};

// What a tile asks for while it multiplies, because it would come late from a distant cache: nothing; the rows of its
// own panel, kRowsAhead before they are read; its share of what is multiplied next; or the rows of the next tile as well.
enum class Asks { kNothing, kPanel, kNext, kNextAndRows };

struct Ahead {
  const char* next;   // a share of what is multiplied next
  int64_t bytes;      // of it, that each step of the depth asks for
  const float* rows;  // of a left operand, as far apart as this tile's
};

// target[R, V * kLanes] = left[R, depth] * panel of V vectors, added to what is there if `accumulate`.
template <class Terms, Asks kAsks, int R, int V>
void multiply_tile(const Left& left, const Panel& panel, Target target, bool accumulate, const Ahead& ahead) {
  Floats sums[R][V];
  const float* rows[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) {
    rows[i] = left.at + i * left.row_stride;
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[i][v] = Floats{};
  }
  const int64_t depth = panel.depth;
  int64_t at = 0;
  const float* right_row = panel.at;
  const char* next = ahead.next;
  for (int64_t k = 0; k < depth; k++, at += left.depth_stride, right_row += panel.stride) {
    if constexpr (kAsks == Asks::kNextAndRows) {  // a line of each of kMostRows rows, then the next lines
      static_assert(kMostRows == 8);
      __builtin_prefetch(ahead.rows + (k & 7) * left.row_stride + (k >> 3) * kLanes);
    }
    if constexpr (kAsks == Asks::kNext || kAsks == Asks::kNextAndRows) {
      __builtin_prefetch(next, 0, 2);
      next += ahead.bytes;
    }
    Floats right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      right[v] = load(right_row + v * kLanes);
      if (kAsks == Asks::kPanel) __builtin_prefetch(right_row + kRowsAhead * panel.stride + v * kLanes);
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

using TileFunction = void (*)(const Left&, const Panel&, Target, bool, const Ahead&);

constexpr int rows_that_fit(int vectors) {
  return std::min(kMostRows, (kRegisters == 32 ? 24 : 12) / vectors);
}

template <class Terms, Asks kAsks, int V, int... R>
constexpr std::array<TileFunction, kMostRows> tiles_of_width(std::integer_sequence<int, R...>) {
  return {multiply_tile<Terms, kAsks, R + 1, V>...};
}

template <class Terms, Asks kAsks, int... V>
constexpr std::array<std::array<TileFunction, kMostRows>, kMostVectors> tiles(std::integer_sequence<int, V...>) {
  return {tiles_of_width<Terms, kAsks, V + 1>(std::make_integer_sequence<int, rows_that_fit(V + 1)>())...};
}

template <class Terms, Asks kAsks>
TileFunction tile_function(int64_t rows, int64_t vectors) {
  static constexpr auto functions = tiles<Terms, kAsks>(std::make_integer_sequence<int, kMostVectors>());
  return functions[vectors - 1][rows - 1];
}

template <class Terms>
TileFunction tile_function(Asks asks, int64_t rows, int64_t vectors) {
  switch (asks) {
    case Asks::kNothing: return tile_function<Terms, Asks::kNothing>(rows, vectors);
    case Asks::kPanel: return tile_function<Terms, Asks::kPanel>(rows, vectors);
    case Asks::kNext: return tile_function<Terms, Asks::kNext>(rows, vectors);
    case Asks::kNextAndRows: return tile_function<Terms, Asks::kNextAndRows>(rows, vectors);
  }
  __builtin_unreachable();
}

}  // namespace torchecho
