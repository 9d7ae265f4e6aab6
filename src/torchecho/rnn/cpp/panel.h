// Some rows of a left operand times a panel, in tiles of as many rows as fit the registers.
#pragma once

#include "tile.h"

namespace torchecho {

// What surrounds a product of some rows and a panel: the panel that is multiplied next, packed as this one is, or one of
// no vectors; and whether other rows were multiplied before.
struct Visit {
  Panel next;
  bool rows_are_new;
};

// Ask for a part of the next piece of a left operand with its columns in memory: they may lie so far apart that neither
// the processor foresees them nor the nearest cache holds them together.
inline void fetch_columns(Left left, int64_t rows, int64_t depth, const Split& tiles, int64_t tile) {
  const Split columns = {depth, tiles.parts};
  for (int64_t k = columns.begin(tile); k < columns.begin(tile + 1); k++)
    for (int64_t i = 0; i < rows; i += kLanes) __builtin_prefetch(left.at + k * left.depth_stride + i, 0, 2);
}

// What the tiles that multiply a piece of a panel ask for: of what comes next, equal shares.
struct Asking {
  Asks asks;
  const char* next;
  int64_t share_bytes, step_bytes;  // of a tile, of a step of its depth

  static Asking of(const Panel& piece, const Panel& next, bool wants_rows, int64_t tiles) {
    const char* at = reinterpret_cast<const char*>(next.at);
    // Fewer tiles would each have to ask for more than a line at every step.
    const bool is_spread = piece.is_packed() && piece.depth && next.vectors && tiles >= kMostVectors;
    if (!is_spread) return {Asks::kNothing, at, 0, 0};
    const int64_t share = next.depth * next.stride * static_cast<int64_t>(sizeof(float)) / tiles;
    return {wants_rows ? Asks::kNextAndRows : Asks::kNext, at, share, share / piece.depth};
  }
};

// target[rows, vectors * kLanes] (+)= left[rows, depth] * panel, in pieces of the depth that are summed by themselves. An
// element of the depth is what `Terms` multiply at once. `left_of(k, count)` gives a piece of the left operand.
template <class Terms, class LeftOf>
void multiply_pieces(int64_t rows, const Panel& panel, const Split& pieces, Target target, bool accumulate,
                     const Visit& visit, LeftOf left_of) {
  const Split tiles = split_at_most(rows, rows_that_fit(panel.vectors));
  for (int64_t p = 0; p < pieces.parts; p++) {  // once even without depth, so that the target is written
    const bool is_last = p + 1 == pieces.parts;
    const Panel piece = panel.piece(pieces, p), next = is_last ? visit.next.piece(pieces, 0) : panel.piece(pieces, p + 1);
    const Left left = left_of(pieces.begin(p), piece.depth), beyond = left.from(piece.depth);
    const Asking asking = Asking::of(piece, next, visit.rows_are_new && left.depth_stride == 1, tiles.parts);
    for (int64_t tile = 0; tile < tiles.parts; tile++) {
      const int64_t i = tiles.begin(tile), end = tiles.begin(tile + 1);
      if (left.row_stride == 1 && !is_last) fetch_columns(beyond, rows, next.depth, tiles, tile);
      const Asks asks = tile == 0 && asking.asks == Asks::kNothing ? Asks::kPanel : asking.asks;
      const Ahead ahead = {asking.next + asking.share_bytes * tile, asking.step_bytes,
                           end < rows ? left.row(end).at : beyond.at};
      const TileFunction multiply = tile_function<Terms>(asks, end - i, panel.vectors);
      multiply(left.row(i), piece, target.row(i), accumulate || p > 0, ahead);
    }
  }
}

}  // namespace torchecho
