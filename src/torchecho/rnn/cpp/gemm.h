// Packing of matrices into panels, and products of whole matrices.
#pragma once

#include "shares.h"

namespace torchecho {

// Pack the transpose of a matrix [parts * columns, depth]: panels of the right operand of left * matrix^T.
// With several parts (gates) a panel holds one vector of each part; with one part, neighbouring vectors. An element is a
// float, or a pair of neighbours along the depth.
inline void pack_transposed(const Team& team, const float* matrix, int64_t stride, int64_t depth, int64_t columns,
                            int64_t parts, int64_t pairs, float* to) {
  const Split panels = parts > 1 ? Split{ceil_div(columns, kLanes), ceil_div(columns, kLanes)} : column_panels(columns);
  const int64_t floats = pairs ? 2 : 1, elements = ceil_div(depth, floats), blocks = ceil_div(elements, kLanes);
  team.share(panels.parts * blocks, [&](int64_t item) {
    const int64_t panel = item / blocks, first = panels.begin(panel), count = panels.begin(panel + 1) - first;
    const int64_t vectors = parts * count, k0 = item % blocks * kLanes, many = std::min<int64_t>(kLanes, elements - k0);
    float* out = to + first * parts * kLanes * elements + k0 * vectors * kLanes;
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t column = (first + v % count) * kLanes;
      Floats square[kLanes];
      for (int64_t lane = 0; lane < kLanes; lane++) {
        const float* row = matrix + (v / count * columns + column + lane) * stride + k0 * floats;
        square[lane] = column + lane >= columns ? Floats{} : pairs ? load_pairs(row, depth - k0 * floats) : load(row, many);
      }
      transpose(square);
      for (int64_t k = 0; k < many; k++) store(out + (k * vectors + v) * kLanes, square[k]);
    }
  });
}

// Pack the rows of a matrix [depth, columns], from row `begin` to the last and then the others: panels of the right operand
// of left * matrix, of elements as above.
inline void pack_rows(const Team& team, const float* matrix, int64_t stride, int64_t depth, int64_t columns, int64_t begin,
                      int64_t pairs, float* to) {
  const Split panels = column_panels(columns);
  const int64_t floats = pairs ? 2 : 1, elements = ceil_div(depth, floats);
  const auto row_of = [&](int64_t k) { return matrix + (k + begin < depth ? k + begin : k + begin - depth) * stride; };
  team.share(panels.parts * elements, [&](int64_t item) {
    const int64_t panel = item / elements, k = item % elements;
    const int64_t first = panels.begin(panel), vectors = panels.begin(panel + 1) - first;
    float* out = to + first * kLanes * elements + k * vectors * kLanes;
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t column = (first + v) * kLanes, lanes = columns - column;
      const Floats row = load(row_of(k * floats) + column, lanes);
      const Floats next = pairs && 2 * k + 1 < depth ? load(row_of(2 * k + 1) + column, lanes) : Floats{};
      store(out + v * kLanes, pairs ? paired(row, next) : row);
    }
  });
}

// Copy a tile of sums out of scratch, where rows are `vectors` whole vectors, adding what is asked for.
inline void copy_out(const float* sums, int64_t rows, int64_t vectors, int64_t columns, const float* bias, float* to,
                     int64_t stride, bool accumulate) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t v = 0; v < vectors; v++) {
      const int64_t lanes = columns - v * kLanes;
      Floats x = load(sums + (i * vectors + v) * kLanes);
      if (bias) x += load(bias + v * kLanes, lanes);
      float* place = to + i * stride + v * kLanes;
      store(place, accumulate ? x + load(place, lanes) : x, lanes);
    }
}

struct Product {
  Left left;          // [rows, depth]
  Right right;        // [depth, columns]
  const float* bias;  // [columns] or null
  float* out;         // [rows, columns]
  int64_t out_stride;
  int64_t rows, depth, columns;
  int64_t accumulate;
};

// out (+)= left * right + bias. Members take rows, so that they share no lines of `out`.
inline void multiply(const Team& team, const Product& p) {
  if (p.rows == 0 || p.columns == 0) return;
  const Split panels = column_panels(p.columns);
  const Tiling tiling = {row_blocks(team, p.rows, panels.parts), panels, 1, true};
  share_product(team, tiling, false, p.left, p.right, p.depth, p.columns,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    const int64_t column = vector * kLanes;
    copy_out(sums, rows, vectors, p.columns - column, p.bias ? p.bias + column : nullptr,
             p.out + row * p.out_stride + column, p.out_stride, p.accumulate);
  });
}

constexpr int64_t kSummedRows = 64;  // in one piece of a sum: of a few columns each, it costs no time to add them often

// to[columns] (+)= the sum of `count` rows.
struct RowSum {
  const float* rows;
  int64_t stride, count, columns;
  float* to;
  int64_t accumulate;
};

inline void sum_rows(const Team& team, const RowSum& s) {
  constexpr int64_t width = 8;  // vectors that a member reads of one row before the next
  team.share(ceil_div(s.columns, width * kLanes), [&](int64_t item) {
    const int64_t first = item * width * kLanes;
    Floats total[width] = {};
    for (int64_t begin = 0; begin < s.count; begin += kSummedRows) {
      Floats piece[width] = {};
      for (int64_t row = begin; row < std::min(s.count, begin + kSummedRows); row++)
        for (int64_t v = 0; v < width; v++) {
          const int64_t u = first + v * kLanes;
          if (u < s.columns) piece[v] += load(s.rows + row * s.stride + u, s.columns - u);
        }
      for (int64_t v = 0; v < width; v++) total[v] += piece[v];
    }
    for (int64_t u = first; u < std::min(s.columns, first + width * kLanes); u += kLanes) {
      const Floats sum = total[(u - first) / kLanes];
      store(s.to + u, s.accumulate ? load(s.to + u, s.columns - u) + sum : sum, s.columns - u);
    }
  });
}

}  // namespace torchecho
