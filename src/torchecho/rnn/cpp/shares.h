// A product of matrices as blocks of rows times panels, shared by a team.
#pragma once

#include <cstring>

#include "columns.h"
#include "team.h"

namespace torchecho {

constexpr int64_t kFewestRows = 5;  // in a block: fewer make poor tiles

// Blocks of rows such that blocks times panels make shares of a team that are as equal as can be.
inline Split row_blocks(const Team& team, int64_t rows, int64_t panels) {
  const Split least = split_at_most(rows, kRowBlock);
  const auto waste = [&](int64_t parts) {
    const int64_t items = parts * panels;
    return static_cast<double>(ceil_div(items, team.size) * team.size - items) / static_cast<double>(items);
  };
  Split best = least;
  for (int64_t parts = least.parts + 1; parts < least.parts + team.size && parts * kFewestRows <= rows; parts++)
    if (waste(parts) < waste(best.parts)) best.parts = parts;
  return best;
}

// The order in which blocks of rows meet panels: each block all panels, or each panel all blocks.
struct Tiling {
  Split blocks, panels;
  int64_t parts;  // vectors of a panel for each of its units: one of each gate
  bool by_rows;

  int64_t panel(int64_t item) const { return by_rows ? item % panels.parts : item / blocks.parts; }
  int64_t block(int64_t item) const { return by_rows ? item / panels.parts : item % blocks.parts; }
  Columns columns(int64_t panel) const {
    const int64_t first = panels.begin(panel);
    return {first * parts, (panels.begin(panel + 1) - first) * parts};
  }
};

// For every block and panel: multiply, then finish(first row, rows, first vector of units, vectors, sums). Without a left
// operand (null) all sums are zeros.
template <class Finish>
void share_product(const Team& team, const Tiling& tiling, bool backwards, Left left, Right right, int64_t depth,
                   int64_t columns, Finish finish) {
  LastRows last;
  team.share_in_order(tiling.blocks.parts * tiling.panels.parts, backwards, [&](int64_t item, int64_t next_item) {
    alignas(64) float sums[kRowBlock * kMostVectors * kLanes];
    const int64_t panel = tiling.panel(item), next_panel = tiling.panel(next_item), block = tiling.block(item);
    const int64_t i = tiling.blocks.begin(block), rows = tiling.blocks.begin(block + 1) - i;
    const Columns here = tiling.columns(panel), next = next_panel == panel ? Columns{} : tiling.columns(next_panel);
    if (left.at) {
      multiply_columns(left.row(i), rows, right, depth, columns, here, next, {sums, here.vectors * kLanes}, last);
    } else {
      std::memset(sums, 0, rows * here.vectors * kLanes * sizeof(float));
    }
    finish(i, rows, here.first / tiling.parts, here.vectors, sums);
  });
}

}  // namespace torchecho
