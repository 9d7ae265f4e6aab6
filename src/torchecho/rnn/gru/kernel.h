// GRU over the steps of a chunk: r, z = gates; n = tanh(x_n + r h_n); h = n + z (h' - n), where h_n = W_hn h' + b_hn.
#pragma once

#include "../cpp/steps.h"

namespace torchecho {

struct GruForward {
  Steps steps;
  int64_t hidden;
  const float* inputs;     // [rows, 3H] in chunk order: W_ih x + b_ih, and b_hh in r and z
  const float* recurrent;  // panels of W_hh^T, gates side by side
  const float* bias_n;     // [H] b_hn, or null
  float* gates;            // [rows, 4H] in chunk order: receives h_n, r, z, n; or null
  const float* h0;         // [B, H]
  float* y;
  int64_t y_stride;
  int64_t is_bfloat16;     // whether h is rounded to what is stored
};

TORCHECHO_INLINE void store_three(float* to, int64_t H, Floats a, Floats b, Floats c, int64_t lanes) {
  store(to, a, lanes);
  store(to + H, b, lanes);
  store(to + 2 * H, c, lanes);
}

inline void gru_step(const Team& team, const GruForward& s, int64_t t) {
  const int64_t H = s.hidden, n = s.steps.rows(t), continuing = s.steps.continuing(t), row0 = s.steps.row_in_chunk(t);
  const float* before = continuing ? s.y + s.steps.offsets[s.steps.before(t)] * s.y_stride : nullptr;
  const Segment segments[2] = {{0, continuing, before, s.y_stride}, {continuing, n, s.h0 + continuing * H, H}};
  step_products(team, t, segments, packed_for(s.recurrent, s.is_bfloat16), H, H, 3,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t, const float* sums) {
    const int64_t u = vector * kLanes, lanes = H - u;
    const Floats bias = s.bias_n ? load(s.bias_n + u, lanes) : Floats{};
    for (int64_t b = row; b < row + rows; b++, sums += 3 * kLanes) {
      const float* x = s.inputs + (row0 + b) * 3 * H + u;
      const float* h_before = b < continuing ? before + b * s.y_stride : s.h0 + b * H;
      const Floats r = sigmoid(load(x, lanes) + load(sums)), z = sigmoid(load(x + H, lanes) + load(sums + kLanes));
      const Floats hn = load(sums + 2 * kLanes) + bias;
      const Floats m = hyperbolic_tangent(load(x + 2 * H, lanes) + r * hn);
      const Floats h = m + z * (load(h_before + u, lanes) - m);
      store(s.y + (s.steps.offsets[t] + b) * s.y_stride + u, as_stored(h, s.is_bfloat16), lanes);
      if (!s.gates) continue;
      float* gates = s.gates + (row0 + b) * 4 * H + u;
      store_three(gates, H, hn, r, z, lanes);
      store(gates + 3 * H, m, lanes);
    }
  });
  team.meet();
}

inline void gru_forward(const GruForward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < s.steps.num_in_chunk(); i++) gru_step(team, s, s.steps.nth(i));
  });
}

// The gates lie so that the gradients of both sides of the cell are neighbours: those of the hidden sides h_n, r, z in the
// first three, those of the inputs r, z, n in the last three.
struct GruBackward {
  Steps steps;
  int64_t hidden;
  const float* gates;         // [rows, 4H] in chunk order: h_n, r, z, n; or null
  Rows dgates;                // [rows, 4H] in chunk order: if there are no gates, h_n, and r, z and x_n before activation;
                              // receives the gradients of h_n, r, z and n before activation
  Right recurrent;            // rows n, r, z of W_hh
  const float* h0;            // [B, H]
  const float* y;
  int64_t y_stride;
  const float* dy;            // [rows, H] in chunk order
  int64_t dy_stride;
  float* dh;                  // [B, H]: what reaches h past the gates, after the chunk, then before it
  float* dgates_after;        // [B, 4H] of the step after the chunk, then of the first of it
  float* dgates_start;        // [B, 4H]: of the first step of each row
  int64_t is_bfloat16;        // whether rebuilt gates are rounded to what would have been stashed
};

struct GruGates {
  Floats r, z, n, hn;
};

TORCHECHO_INLINE GruGates gru_gates(const GruBackward& s, int64_t row, int64_t u) {
  const int64_t H = s.hidden, lanes = H - u;
  const float* g = (s.gates ? s.gates + row * 4 * H : s.dgates.row(row)) + u;
  const Floats four[4] = {load(g, lanes), load(g + H, lanes), load(g + 2 * H, lanes), load(g + 3 * H, lanes)};
  if (s.gates) return {four[1], four[2], four[3], four[0]};
  const Floats hn = four[0], r = sigmoid(four[1]), z = sigmoid(four[2]), n = hyperbolic_tangent(four[3] + r * hn);
  const int64_t rounds = s.is_bfloat16;
  return {as_stored(r, rounds), as_stored(z, rounds), as_stored(n, rounds), as_stored(hn, rounds)};
}

inline void gru_step_backward(const Team& team, const GruBackward& s, int64_t t, bool last) {
  const int64_t H = s.hidden, n = s.steps.rows(t), row0 = s.steps.row_in_chunk(t);
  const int64_t continued = s.steps.continued(t), continuing = s.steps.continuing(t);
  const float* before = continuing ? s.y + s.steps.offsets[s.steps.before(t)] * s.y_stride : nullptr;
  const Segment segments[2] = {continued_rows(s.steps, t, last, s.dgates, s.dgates_after, 4 * H), {continued, n, nullptr, 0}};
  step_products(team, t, segments, s.recurrent, 3 * H, H, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    const Floats one = all(1.0f);
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) {
        const int64_t u = v * kLanes, lanes = H - u;
        float* carried = s.dh + b * H + u;
        const Floats dh = load(sums) + load(carried, lanes) +
                          load(s.dy + (row0 + b) * s.dy_stride + u, lanes);
        const GruGates g = gru_gates(s, row0 + b, u);
        const Floats h = load((b < continuing ? before + b * s.y_stride : s.h0 + b * H) + u, lanes);
        const Floats dn = dh * (one - g.z) * (one - g.n * g.n), dz = dh * (h - g.n) * (g.z * (one - g.z));
        const Floats dr = dn * g.hn * (g.r * (one - g.r)), dhn = dn * g.r;
        store(carried, dh * g.z, lanes);
        float* dgates = s.dgates.row(row0 + b) + u;
        store_three(dgates, H, dhn, dr, dz, lanes);
        store(dgates + 3 * H, dn, lanes);
        if (b >= continuing) store_three(s.dgates_start + b * 4 * H + u, H, dhn, dr, dz, lanes);
      }
  });
  team.meet();
}

inline void gru_backward(const GruBackward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < s.steps.num_in_chunk(); i++) gru_step_backward(team, s, s.steps.nth_backward(i), i == 0);
    keep_first_step(team, s.steps, s.dgates, 4 * s.hidden, s.dgates_after);
  });
}

}  // namespace torchecho
