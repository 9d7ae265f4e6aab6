// LSTM over the steps of a chunk: i, f, g, o = gates; c = f c' + i g; h = o tanh(c), or W_hr (o tanh(c)) if projected.
#pragma once

#include "../cpp/steps.h"

namespace torchecho {

enum Keep : int64_t { kKeepNothing = 0, kKeepGates = 1, kKeepInputs = 2 };

// What lies in chunk order begins with the chunk's first row; y with the first row of all.
struct LstmForward {
  Steps steps;
  int64_t hidden, output;   // H, and P: what h has (H without projection)
  float* gates;             // [rows, 4H] in chunk order: inputs and biases; receives what `keep` says
  int64_t keep;
  const float* recurrent;   // panels of W_hh^T, gates side by side
  const float* projection;  // panels of W_hr^T, or null
  float* unprojected;       // [B, H] scratch if projected
  const float* h0;          // [B, P]
  float* cell;              // [B, H]: c before the chunk, then after it
  float* cells;             // [rows, H] in chunk order, or null
  float* y;
  int64_t y_stride;
  int64_t is_bfloat16;      // whether h is rounded to what is stored
};

struct LstmGates {
  Floats i, f, g, o;
};

TORCHECHO_INLINE LstmGates activate(const Floats (&x)[4]) {
  return {sigmoid(x[0]), sigmoid(x[1]), hyperbolic_tangent(x[2]), sigmoid(x[3])};
}

TORCHECHO_INLINE void store_gates(float* to, int64_t hidden, const LstmGates& g, int64_t lanes) {
  store(to, g.i, lanes);
  store(to + hidden, g.f, lanes);
  store(to + 2 * hidden, g.g, lanes);
  store(to + 3 * hidden, g.o, lanes);
}

TORCHECHO_INLINE LstmGates load_gates(const float* from, int64_t hidden, int64_t lanes) {
  return {load(from, lanes), load(from + hidden, lanes), load(from + 2 * hidden, lanes), load(from + 3 * hidden, lanes)};
}

inline void lstm_step(const Team& team, const LstmForward& s, int64_t t) {
  const int64_t H = s.hidden, P = s.output, n = s.steps.rows(t), continuing = s.steps.continuing(t);
  const float* before = continuing ? s.y + s.steps.offsets[s.steps.before(t)] * s.y_stride : nullptr;
  const Segment segments[2] = {{0, continuing, before, s.y_stride}, {continuing, n, s.h0 + continuing * P, P}};
  const int64_t row0 = s.steps.row_in_chunk(t);
  float* out = s.projection ? s.unprojected : s.y + s.steps.offsets[t] * s.y_stride;
  const int64_t out_stride = s.projection ? H : s.y_stride;
  step_products(team, t, segments, packed_for(s.recurrent, s.is_bfloat16), P, H, 4,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t, const float* sums) {
    const int64_t u = vector * kLanes, lanes = H - u;
    for (int64_t b = row; b < row + rows; b++, sums += 4 * kLanes) {
      float* gates = s.gates + (row0 + b) * 4 * H + u;
      Floats x[4];
      for (int v = 0; v < 4; v++) x[v] = load(sums + v * kLanes) + load(gates + v * H, lanes);
      if (s.keep == kKeepInputs) store_gates(gates, H, {x[0], x[1], x[2], x[3]}, lanes);
      const LstmGates g = activate(x);
      if (s.keep == kKeepGates) store_gates(gates, H, g, lanes);
      float* cell = s.cell + b * H + u;
      const Floats c = g.f * load(cell, lanes) + g.i * g.g;
      store(cell, c, lanes);
      if (s.cells) store(s.cells + (row0 + b) * H + u, c, lanes);
      const Floats h = g.o * hyperbolic_tangent(c);
      store(out + b * out_stride + u, s.projection ? h : as_stored(h, s.is_bfloat16), lanes);
    }
  });
  team.meet();
  if (!s.projection) return;
  multiply(team, {{s.unprojected, H, 1}, {s.projection, kPacked}, nullptr, s.y + s.steps.offsets[t] * s.y_stride, s.y_stride, n, H, P, 0});
  team.meet();
  if (s.is_bfloat16) {
    team.share(n, [&](int64_t b) {
      float* h = s.y + (s.steps.offsets[t] + b) * s.y_stride;
      for (int64_t u = 0; u < P; u += kLanes) store(h + u, to_bfloat16(load(h + u, P - u)), P - u);
    });
    team.meet();
  }
}

inline void lstm_forward(const LstmForward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < s.steps.num_in_chunk(); i++) lstm_step(team, s, s.steps.nth(i));
  });
}

struct LstmRebuild {
  Steps steps;
  int64_t hidden;
  Rows gates;                // [rows, 4H] in chunk order: before activation; receives the activations
  const float* cell_before;  // [B, H] before the first step of the chunk
  const float* c0;           // [B, H], for rows that start later
  float* cells;              // [rows, H] in chunk order; receives c; or null
  int64_t is_bfloat16;       // whether the activations are rounded to what would have been stashed
};

// Activate the gates of a chunk and rebuild its cells if asked to; every member has units of its own, so none waits.
inline void lstm_rebuild(const LstmRebuild& s) {
  const int64_t H = s.hidden, vectors = ceil_div(H, kLanes);
  with_team(s.steps.threads, [&](const Team& team) {
    const int64_t first = vectors * team.member / team.size, last = vectors * (team.member + 1) / team.size;
    for (int64_t step = 0; step < s.steps.num_in_chunk(); step++) {
      const int64_t t = s.steps.nth(step), row0 = s.steps.row_in_chunk(t), continuing = s.steps.continuing(t);
      const float* before = step ? s.cells + s.steps.row_in_chunk(s.steps.before(t)) * H : s.cell_before;
      for (int64_t b = 0; b < s.steps.rows(t); b++)
        for (int64_t v = first; v < last; v++) {
          const int64_t u = v * kLanes, lanes = H - u;
          float* gates = s.gates.row(row0 + b) + u;
          Floats x[4];
          for (int k = 0; k < 4; k++) x[k] = load(gates + k * H, lanes);
          const LstmGates g = activate(x);
          const int64_t rounds = s.is_bfloat16;
          store_gates(gates, H, {as_stored(g.i, rounds), as_stored(g.f, rounds), as_stored(g.g, rounds), as_stored(g.o, rounds)},
                      lanes);
          if (!s.cells) continue;
          const Floats c = load((b < continuing ? before : s.c0) + b * H + u, lanes);
          store(s.cells + (row0 + b) * H + u, g.f * c + g.i * g.g, lanes);
        }
    }
  });
}

struct LstmBackward {
  Steps steps;
  int64_t hidden, output;
  Rows gates;                // [rows, 4H] in chunk order, activated
  const float* cells;        // [rows, H] in chunk order
  const float* cell_before;  // [B, H] before the first step of the chunk
  const float* c0;           // [B, H]
  Right recurrent;           // W_hh
  const float* projection;   // panels of W_hr, or null
  const float* dy;           // [rows, ...] in chunk order
  int64_t dy_stride;
  const float* dh_last;      // [B, P]: gradient of the last h
  float* dcell;              // [B, H]: gradient of c after the chunk, then before it
  float* dgates_after;       // [B, 4H] of the step after the chunk, then of the first of it
  Rows dgates;               // [rows, 4H] in chunk order; may be `gates`
  float* dgates_start;       // [B, 4H]: of the first step of each row
  float* dh;                 // [rows, P] in chunk order: gradient of h, if projected
  float* unprojected;        // [rows, H] in chunk order: o tanh(c), if projected
};

// The pointwise half of a backward step for one vector of units of one row, given the gradient of o tanh(c).
TORCHECHO_INLINE void lstm_unit_backward(const LstmBackward& s, const float* before, int64_t row0, int64_t b, int64_t u,
                                         Floats dm, bool starts) {
  const int64_t H = s.hidden, lanes = H - u, row = row0 + b;
  const LstmGates g = load_gates(s.gates.row(row) + u, H, lanes);
  const Floats one = all(1.0f), tanh_c = hyperbolic_tangent(load(s.cells + row * H + u, lanes));
  float* dcell = s.dcell + b * H + u;
  const Floats dc = load(dcell, lanes) + dm * g.o * (one - tanh_c * tanh_c);
  const LstmGates d = {dc * g.g * (g.i * (one - g.i)), dc * load(before + b * H + u, lanes) * (g.f * (one - g.f)),
                       dc * g.i * (one - g.g * g.g), dm * tanh_c * (g.o * (one - g.o))};
  store(dcell, dc * g.f, lanes);
  store_gates(s.dgates.row(row) + u, H, d, lanes);
  if (starts) store_gates(s.dgates_start + b * 4 * H + u, H, d, lanes);
  if (s.unprojected) store(s.unprojected + row * H + u, g.o * tanh_c, lanes);
}

inline void lstm_step_backward(const Team& team, const LstmBackward& s, int64_t t, bool first, bool last) {
  const int64_t H = s.hidden, P = s.output, n = s.steps.rows(t), row0 = s.steps.row_in_chunk(t);
  const int64_t continued = s.steps.continued(t), continuing = s.steps.continuing(t);
  const float* before = first ? s.cell_before : s.cells + s.steps.row_in_chunk(s.steps.before(t)) * H;
  const Segment segments[2] = {continued_rows(s.steps, t, last, s.dgates, s.dgates_after, 4 * H), {continued, n, nullptr, 0}};
  const auto units = [&](int64_t b, int64_t u, Floats dm) {
    lstm_unit_backward(s, b < continuing ? before : s.c0, row0, b, u, dm, b >= continuing);
  };
  step_products(team, t, segments, s.recurrent, 4 * H, P, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) {
        const int64_t u = v * kLanes, lanes = P - u;
        Floats dh = load(sums) + load(s.dy + (row0 + b) * s.dy_stride + u, lanes);
        if (b >= continued) dh += load(s.dh_last + b * P + u, lanes);
        if (s.projection) store(s.dh + (row0 + b) * P + u, dh, lanes);
        else units(b, u, dh);
      }
  });
  team.meet();
  if (!s.projection) return;
  const Segment whole[2] = {{0, n, s.dh + row0 * P, P}, {n, n, nullptr, 0}};
  step_products(team, t, whole, {s.projection, kPacked}, P, H, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) units(b, v * kLanes, load(sums));
  });
  team.meet();
}

inline void lstm_backward(const LstmBackward& s) {
  const int64_t many = s.steps.num_in_chunk();
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < many; i++) lstm_step_backward(team, s, s.steps.nth_backward(i), i == many - 1, i == 0);
    keep_first_step(team, s.steps, s.dgates, 4 * s.hidden, s.dgates_after);
  });
}

}  // namespace torchecho
