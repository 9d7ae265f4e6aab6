// Elman RNN over the steps of a chunk: h = tanh or relu of (W_ih x + W_hh h' + biases); both derivatives follow from h.
#pragma once

#include "../cpp/steps.h"

namespace torchecho {

struct ElmanForward {
  Steps steps;
  int64_t hidden;
  int64_t relu;            // or tanh
  const float* inputs;     // [rows, H] in chunk order: W_ih x and biases
  const float* recurrent;  // panels of W_hh^T
  const float* h0;         // [B, H]
  float* y;
  int64_t y_stride;
  int64_t is_bfloat16;     // whether h is rounded to what is stored
};

TORCHECHO_INLINE Floats rectified(Floats x) { return x < Floats{} ? Floats{} : x; }

inline void elman_step(const Team& team, const ElmanForward& s, int64_t t) {
  const int64_t H = s.hidden, n = s.steps.rows(t), continuing = s.steps.continuing(t), row0 = s.steps.row_in_chunk(t);
  const float* before = continuing ? s.y + s.steps.offsets[s.steps.before(t)] * s.y_stride : nullptr;
  const Segment segments[2] = {{0, continuing, before, s.y_stride}, {continuing, n, s.h0 + continuing * H, H}};
  step_products(team, t, segments, packed_for(s.recurrent, s.is_bfloat16), H, H, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) {
        const int64_t u = v * kLanes, lanes = H - u;
        const Floats x = load(sums) + load(s.inputs + (row0 + b) * H + u, lanes);
        const Floats h = s.relu ? rectified(x) : hyperbolic_tangent(x);
        store(s.y + (s.steps.offsets[t] + b) * s.y_stride + u, as_stored(h, s.is_bfloat16), lanes);
      }
  });
  team.meet();
}

inline void elman_forward(const ElmanForward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < s.steps.num_in_chunk(); i++) elman_step(team, s, s.steps.nth(i));
  });
}

struct ElmanBackward {
  Steps steps;
  int64_t hidden;
  int64_t relu;
  Right recurrent;             // W_hh
  const float* y;
  int64_t y_stride;
  const float* dy;             // [rows, ...] in chunk order
  int64_t dy_stride;
  const float* dh_last;        // [B, H]: gradient of the last h
  float* dinputs_after;        // [B, H] of the step after the chunk, then of the first of it
  Rows dinputs;                // [rows, H] in chunk order
  float* dinputs_start;        // [B, H]: of the first step of each row
};

inline void elman_step_backward(const Team& team, const ElmanBackward& s, int64_t t, bool last) {
  const int64_t H = s.hidden, n = s.steps.rows(t), row0 = s.steps.row_in_chunk(t);
  const int64_t continued = s.steps.continued(t), continuing = s.steps.continuing(t);
  const Segment segments[2] = {continued_rows(s.steps, t, last, s.dinputs, s.dinputs_after, H), {continued, n, nullptr, 0}};
  step_products(team, t, segments, s.recurrent, H, H, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) {
        const int64_t u = v * kLanes, lanes = H - u, at = s.steps.offsets[t] + b;
        Floats dh = load(sums) + load(s.dy + (row0 + b) * s.dy_stride + u, lanes);
        if (b >= continued) dh += load(s.dh_last + b * H + u, lanes);
        const Floats h = load(s.y + at * s.y_stride + u, lanes);
        const Floats d = s.relu ? (h <= Floats{} ? Floats{} : dh) : dh * (all(1.0f) - h * h);
        store(s.dinputs.row(row0 + b) + u, d, lanes);
        if (b >= continuing) store(s.dinputs_start + b * H + u, d, lanes);
      }
  });
  team.meet();
}

inline void elman_backward(const ElmanBackward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t i = 0; i < s.steps.num_in_chunk(); i++) elman_step_backward(team, s, s.steps.nth_backward(i), i == 0);
    keep_first_step(team, s.steps, s.dinputs, s.hidden, s.dinputs_after);
  });
}

}  // namespace torchecho
