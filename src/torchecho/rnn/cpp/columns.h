// Some rows of a left operand times some columns of a right one, whichever way that lies: as rows in memory, packed, or
// packed in pairs, for which the rows of the left operand are rounded and paired.
#pragma once

#include "tile.h"

namespace torchecho {

// Round rows of a left operand to bfloat16 and pair them along the depth, in the order in which they lie in memory.
inline Left pair_left(Left left, int64_t rows, int64_t depth, float* to) {
  const int64_t elements = ceil_div(depth, 2);
  if (left.depth_stride == 1) {
    for (int64_t i = 0; i < rows; i++)
      for (int64_t k = 0; k < depth; k += 2 * kLanes)
        store(to + i * elements + k / 2, load_pairs(left.at + i * left.row_stride + k, depth - k), elements - k / 2);
    return {to, elements, 1};
  }
  for (int64_t k = 0; k < depth; k += 2)
    for (int64_t i = 0; i < rows; i += kLanes) {
      const float* first = left.at + k * left.depth_stride + i;
      const Floats second = k + 1 < depth ? load(first + left.depth_stride, rows - i) : Floats{};
      store(to + k / 2 * rows + i, paired(load(first, rows - i), second), rows - i);
    }
  return {to, 1, rows};
}

constexpr int64_t kPairedDepth = 1024;

// Rows of a left operand in pairs: those that a member of a team multiplied last, since the next panel wants them too.
// At most kRowBlock rows; of a great depth a piece at a time.
struct PairedRows {
  alignas(64) float elements[kHasPairs ? kRowBlock * kPairedDepth / 2 : 1];
  const float* from = nullptr;
  int64_t rows = 0;
  Left whole;

  Left piece(Left left, int64_t count, int64_t depth, int64_t k, int64_t many) {
    if (depth > kPairedDepth)
      return pair_left({left.at + k * left.depth_stride, left.row_stride, left.depth_stride}, count, many, elements);
    if (from != left.at || rows != count) {
      whole = pair_left(left, count, depth, elements);
      from = left.at, rows = count;
    }
    return {whole.at + k / 2 * whole.depth_stride, whole.row_stride, whole.depth_stride};
  }
};

// The same product as of `multiply_panel` with a panel of pairs.
inline void multiply_pairs(Left left, int64_t rows, Panel panel, int64_t vectors, int64_t depth, Target target,
                           PairedRows& paired) {
  const Split tiles = split_at_most(rows, rows_that_fit(vectors));
  const int64_t most = left.depth_stride == 1 ? kDepth : kTimeDepth;
  int64_t k = 0;
  do {  // once even without depth, as there
    const int64_t piece = std::min(most, depth - k);
    const Left here = paired.piece(left, rows, depth, k, piece);
    for (int64_t tile = 0; tile < tiles.parts; tile++) {
      const int64_t i = tiles.begin(tile), n = tiles.begin(tile + 1) - i;
      tile_function<ByPairs>(tile, n, vectors)({here.at + i * here.row_stride, here.row_stride, here.depth_stride},
                                               {panel.at + k / 2 * panel.stride, panel.stride}, ceil_div(piece, 2),
                                               {target.at + i * target.stride, target.stride}, k > 0);
    }
    k += piece;
  } while (k < depth);
}

// The right operand of a product, [depth, columns]: as it lies in memory, or packed (stride kPacked or kPaired).
struct Right {
  const float* at;
  int64_t stride;
};

constexpr int64_t kPacked = 0, kPaired = -1;

// What is packed for a layer: in pairs for one of bfloat16, where there are any.
inline Right packed_for(const float* at, int64_t is_bfloat16) { return {at, is_bfloat16 && kHasPairs ? kPaired : kPacked}; }

// target[rows, vectors * kLanes] = left[rows, depth] * the panel of `right` that starts at vector `first`.
//
// The last vector of rows in memory may reach beyond the matrix in its last rows: those are copied and padded.
inline void multiply_columns(Left left, int64_t rows, Right right, int64_t first, int64_t vectors, int64_t depth,
                             int64_t columns, Target target, PairedRows& paired) {
  if (right.stride == kPaired) {
    const Panel pairs = {right.at + first * kLanes * ceil_div(depth, 2), vectors * kLanes};
    return multiply_pairs(left, rows, pairs, vectors, depth, target, paired);
  }
  if (right.stride == kPacked) {
    const Panel packed = {right.at + first * kLanes * depth, vectors * kLanes};
    return multiply_panel(left, rows, packed, vectors, depth, target, false);
  }
  const Panel panel = {right.at + first * kLanes, right.stride};
  const int64_t here = columns - first * kLanes;
  const int64_t beyond = here < vectors * kLanes ? std::min(depth, ceil_div(kLanes, right.stride)) : 0;
  const int64_t whole = depth - beyond;
  multiply_panel(left, rows, panel, vectors, whole, target, false);
  if (!beyond) return;
  alignas(64) float padded[kLanes * kMostVectors * kLanes];
  for (int64_t k = 0; k < beyond; k++)
    for (int64_t v = 0; v < vectors; v++)
      store(padded + (k * vectors + v) * kLanes, load(panel.at + (whole + k) * panel.stride + v * kLanes, here - v * kLanes));
  const Left last = {left.at + whole * left.depth_stride, left.row_stride, left.depth_stride};
  multiply_panel(last, rows, {padded, vectors * kLanes}, vectors, beyond, target, true);
}

}  // namespace torchecho
