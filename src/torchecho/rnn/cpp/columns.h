// Some rows of a left operand times some columns of a right one, whichever way that lies: as rows in memory, packed, or
// packed in pairs, for which the rows of the left operand are rounded and paired.
#pragma once

#include "panel.h"

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

// Rows of a left operand that a member of a team multiplied last, since the next panel often wants them too; and where
// they are wanted in pairs, these: at most kRowBlock rows, of a great depth a piece at a time.
struct LastRows {
  alignas(64) float elements[kHasPairs ? kRowBlock * kPairedDepth / 2 : 1];
  Left paired;
  const float* at = nullptr;
  int64_t count = 0;

  // Take note of the rows that come now; return whether they are others than the last ones.
  bool change(Left left, int64_t rows) {
    const bool others = at != left.at || count != rows;
    at = left.at, count = rows;
    return others;
  }
};

// The right operand of a product, [depth, columns]: as it lies in memory, or packed (stride kPacked or kPaired).
struct Right {
  const float* at;
  int64_t stride;
};

constexpr int64_t kPacked = 0, kPaired = -1;

// What is packed for a layer: in pairs for one of bfloat16, where there are any.
inline Right packed_for(const float* at, int64_t is_bfloat16) { return {at, is_bfloat16 && kHasPairs ? kPaired : kPacked}; }

// Neighbouring vectors of columns, which make a panel.
struct Columns {
  int64_t first, vectors;
};

inline Panel panel_of(Right right, int64_t depth, Columns columns) {
  if (right.stride > 0) return {right.at + columns.first * kLanes, right.stride, columns.vectors, depth};
  const int64_t elements = right.stride == kPaired ? ceil_div(depth, 2) : depth;
  return {right.at + columns.first * kLanes * elements, columns.vectors * kLanes, columns.vectors, elements};
}

// target[rows, vectors * kLanes] (+)= left[rows, depth] * panel of floats.
inline void multiply_panel(Left left, int64_t rows, const Panel& panel, Target target, bool accumulate, const Visit& visit) {
  const Split pieces = split_at_most(panel.depth, left.depth_stride == 1 ? kDepth : kTimeDepth);
  const auto left_of = [&](int64_t k, int64_t) { return left.from(k); };
  multiply_pieces<ByFloats>(rows, panel, pieces, target, accumulate, visit, left_of);
}

// The same with a panel of pairs.
inline void multiply_pairs(Left left, int64_t rows, const Panel& panel, int64_t depth, Target target, const Visit& visit,
                           LastRows& last) {
  const Split pieces = split_at_most(panel.depth, (left.depth_stride == 1 ? kDepth : kTimeDepth) / 2);
  const bool is_whole = depth <= kPairedDepth;
  if (is_whole && visit.rows_are_new) last.paired = pair_left(left, rows, depth, last.elements);
  const Visit next = {visit.next, false};  // what the tiles read was made a moment ago
  multiply_pieces<ByPairs>(rows, panel, pieces, target, false, next, [&](int64_t k, int64_t count) {
    if (is_whole) return last.paired.from(k);
    return pair_left(left.from(2 * k), rows, std::min(2 * count, depth - 2 * k), last.elements);
  });
}

// target[rows, vectors * kLanes] = left[rows, depth] * some columns of a right operand, `next` being those that come after.
//
// The last vector of rows in memory may reach beyond the matrix in its last rows: those are copied and padded.
inline void multiply_columns(Left left, int64_t rows, Right right, int64_t depth, int64_t columns, Columns here,
                             Columns next, Target target, LastRows& last) {
  Panel panel = panel_of(right, depth, here);
  const Visit visit = {panel_of(right, depth, next), last.change(left, rows)};
  if (right.stride == kPaired) return multiply_pairs(left, rows, panel, depth, target, visit, last);
  if (right.stride == kPacked) return multiply_panel(left, rows, panel, target, false, visit);
  const int64_t width = columns - here.first * kLanes;
  const int64_t beyond = width < here.vectors * kLanes ? std::min(depth, ceil_div(kLanes, right.stride)) : 0;
  const int64_t whole = depth - beyond;
  panel.depth = whole;
  multiply_panel(left, rows, panel, target, false, visit);
  if (!beyond) return;
  alignas(64) float padded[kLanes * kMostVectors * kLanes];
  for (int64_t k = 0; k < beyond; k++)
    for (int64_t v = 0; v < here.vectors; v++)
      store(padded + (k * here.vectors + v) * kLanes,
            load(panel.at + (whole + k) * panel.stride + v * kLanes, width - v * kLanes));
  multiply_panel(left.from(whole), rows, {padded, here.vectors * kLanes, here.vectors, beyond}, target, true, {});
}

}  // namespace torchecho
