// Steps of a padded or packed sequence in one direction, and the products that each step of it needs.
//
// Row b of step t lies at offsets[t] + b; a step has as many rows as sequences that are that long, longest first.
#pragma once

#include "gemm.h"

namespace torchecho {

struct Steps {
  const int64_t* offsets;  // [num_steps + 1]
  int64_t num_steps;
  int64_t reverse;         // whether the last step is processed first
  int64_t begin, end;      // the steps of this chunk, whichever way they are processed
  int64_t threads;

  int64_t rows(int64_t t) const { return t < 0 || t >= num_steps ? 0 : offsets[t + 1] - offsets[t]; }
  int64_t before(int64_t t) const { return reverse ? t + 1 : t - 1; }
  int64_t after(int64_t t) const { return reverse ? t - 1 : t + 1; }
  // Rows whose sequence already had a step before t; the others start at t.
  int64_t continuing(int64_t t) const { return std::min(rows(t), rows(before(t))); }
  // Rows whose sequence has a step after t; the others end at t.
  int64_t continued(int64_t t) const { return std::min(rows(t), rows(after(t))); }
  int64_t row_in_chunk(int64_t t) const { return offsets[t] - offsets[begin]; }

  int64_t num_in_chunk() const { return end - begin; }
  int64_t nth(int64_t i) const { return reverse ? end - 1 - i : begin + i; }
  int64_t nth_backward(int64_t i) const { return nth(num_in_chunk() - 1 - i); }
};

// Rows in memory, `stride` floats apart.
struct Rows {
  float* at;
  int64_t stride;

  float* row(int64_t i) const { return at + i * stride; }
  Rows from(int64_t i) const { return {row(i), stride}; }
};

// Copy the rows, of so many columns, of the step of a chunk that is processed first: what the backward of the chunk
// before it reads.
inline void keep_first_step(const Team& team, const Steps& steps, Rows chunk, int64_t columns, float* to) {
  const Rows rows = chunk.from(steps.row_in_chunk(steps.nth(0)));
  team.share(steps.rows(steps.nth(0)),
             [&](int64_t b) { std::memcpy(to + b * columns, rows.row(b), columns * sizeof(float)); });
}

// Rows [begin, end) of a step whose left operand lies in one piece; none (null) stands for zeros.
struct Segment {
  int64_t begin, end;
  const float* left;
  int64_t stride;
};

// Whether members share the rows of a step, not the panels. With panels of its own a member reads `rows` rows of the left
// operand, most of them written by others a moment ago; with rows of its own it reads `columns` columns of weights, of which
// it would have left some to others. Measured (docs/kernels.md), the latter is faster with 10 columns a row, not with 24.
inline bool share_rows(const Team& team, int64_t rows, int64_t columns) {
  return rows >= kFewestRows * team.size && 16 * rows >= columns;
}

// Of a backward: the rows of step t whose sequences go on, and what the step after it left, of so many columns: in the
// chunk, or for the last step of that what `keep_first_step` has kept of the chunk after it.
inline Segment continued_rows(const Steps& steps, int64_t t, bool last, Rows chunk, float* kept, int64_t columns) {
  const int64_t continued = steps.continued(t);
  const Rows after = last ? Rows{kept, columns} : chunk.from(steps.row_in_chunk(steps.after(t)));
  return {0, continued, continued ? after.at : nullptr, after.stride};
}

// Multiply the rows of both segments by a right operand of `columns` columns (units, of each of so many gates; none: plain
// columns), and finish as in `share_product`. Every second step t begins with the panels that the step before it ended with:
// of weights that no near cache holds, these are still there.
template <class Finish>
void step_products(const Team& team, int64_t t, const Segment (&segments)[2], Right right, int64_t depth, int64_t columns,
                   int64_t gates, Finish finish) {
  // Panels of gates hold one vector of units of each gate.
  const int64_t parts = gates ? gates : 1, unit_vectors = ceil_div(columns, kLanes);
  const Split panels = gates ? Split{unit_vectors, unit_vectors} : column_panels(columns);
  const bool by_rows = share_rows(team, segments[1].end, parts * columns);
  for (const Segment& segment : segments) {
    const int64_t rows = segment.end - segment.begin;
    if (rows == 0) continue;
    const Tiling tiling = {row_blocks(team, rows, by_rows ? 1 : panels.parts), panels, parts, by_rows};
    share_product(team, tiling, t % 2, {segment.left, segment.stride, 1}, right, depth, columns,
                  [&](int64_t row, int64_t many, int64_t vector, int64_t vectors, const float* sums) {
      finish(segment.begin + row, many, vector, vectors, sums);
    });
  }
}

}  // namespace torchecho
