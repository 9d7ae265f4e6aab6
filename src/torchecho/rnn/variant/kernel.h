// LSTM variants over the steps of a chunk: layer normalisation, peepholes, coupled gates, zoneout, dropout of h.
//
// With G gates (4, or 3 when f = 1 - i), m the dropout of h and z the zoneout of a step:
//   gates = W_ih x + W_hh (m h') + bias, or norm_x * normal(W_ih x) + norm_h * normal(W_hh (m h')) + bias,
//   plus peepholes of c' into i and f, and of the new c into o;
//   new c = f c' + i g;  new h = o tanh(norm_c * normal(new c) + shift_c), projected if there is a projection;
//   c, h = z c' + (1 - z) new c, the same for h
// Normalisation needs whole rows, so the product of a step and the rest of it are two sweeps with a meeting between.
#pragma once

#include <cmath>

#include "../cpp/steps.h"

namespace torchecho {

constexpr float kEpsilon = 1e-5f;  // torch.nn.LayerNorm's default

// What forward and backward share; null pointers stand for what a variant has not.
struct VariantCell {
  int64_t hidden, gates;          // H, G
  const float* norm_x;            // [G H]
  const float* norm_h;            // [G H]
  const float* bias;              // [G H] of normalised gates
  const float* norm_c;            // [H]
  const float* shift_c;           // [H]
  const float* peephole;          // [3 H] of i, f, o; [2 H] of i, o when coupled
  const float* drop;              // [B, P]
  const uint8_t* zone_c;          // [rows, H] in chunk order
  const uint8_t* zone_h;          // [rows, P] in chunk order
  const float* zone;              // 2 numbers: the zoneout of c and of h where there is no mask
  int64_t output;                 // P: what h has (H without projection)

  int64_t width() const { return gates * hidden; }
  int64_t forget() const { return hidden; }
  int64_t input() const { return (gates - 2) * hidden; }
  int64_t out() const { return (gates - 1) * hidden; }
  bool coupled() const { return gates == 3; }
  bool is_normalised() const { return norm_h; }
  const float* peephole_out() const { return peephole + (gates - 2) * hidden; }
};

TORCHECHO_INLINE Floats first_only(Floats x, int64_t lanes) {
  if (lanes < kLanes)
    for (int64_t lane = std::max<int64_t>(lanes, 0); lane < kLanes; lane++) x[lane] = 0.0f;
  return x;
}

TORCHECHO_INLINE float sum_lanes(Floats x) {
  float parts[kLanes];
  store(parts, x);
  for (int width = kLanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; lane++) parts[lane] += parts[lane + width];
  return parts[0];
}

TORCHECHO_INLINE Floats zone_of(const uint8_t* mask, int64_t at, float constant, int64_t lanes) {
  if (!mask) return all(constant);
  Floats zone{};
  if (lanes >= kLanes)
    for (int lane = 0; lane < kLanes; lane++) zone[lane] = static_cast<float>(mask[at + lane]);
  else
    for (int64_t lane = 0; lane < lanes; lane++) zone[lane] = static_cast<float>(mask[at + lane]);
  return zone;
}

struct Statistics {
  float mean, scale;
};

// Sum of term(u, lanes) over all vectors of a row, in four sums of which none waits for another.
template <class Term>
TORCHECHO_INLINE float sum_row(int64_t count, Term term) {
  Floats sums[4] = {};
  int64_t u = 0;
  for (; u + 4 * kLanes <= count; u += 4 * kLanes)
    for (int part = 0; part < 4; part++) sums[part] += term(u + part * kLanes, static_cast<int64_t>(kLanes));
  for (; u < count; u += kLanes) sums[0] += term(u, count - u);
  return sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Mean and 1 / standard deviation, in two sweeps so that a large mean costs no digits.
inline Statistics statistics(const float* x, int64_t count) {
  const float many = static_cast<float>(count);
  const float mean = sum_row(count, [&](int64_t u, int64_t lanes) { return load(x + u, lanes); }) / many;
  const float squares = sum_row(count, [&](int64_t u, int64_t lanes) {
    const Floats d = first_only(load(x + u, lanes) - all(mean), lanes);
    return d * d;
  });
  return {mean, 1.0f / std::sqrt(squares / many + kEpsilon)};
}

TORCHECHO_INLINE Floats normal(const float* row, Statistics found, int64_t u, int64_t lanes) {
  return (load(row + u, lanes) - all(found.mean)) * all(found.scale);
}

// What the gates of a row are made of: both products, and their statistics where they are normalised.
struct VariantSums {
  const float *inputs, *product;
  Statistics of_inputs, of_product;
};

struct VariantGates {
  Floats i, f, g, o, made;  // activated; `made` is the new c
};

TORCHECHO_INLINE VariantGates variant_gates(const VariantCell& k, const VariantSums& row, Floats before, int64_t u) {
  const int64_t lanes = k.hidden - u;
  const auto sum = [&](int64_t gate) {
    const int64_t at = gate + u;
    if (!k.is_normalised()) return load(row.inputs + at, lanes) + load(row.product + at, lanes);
    const Floats bias = k.bias ? load(k.bias + at, lanes) : Floats{};
    return normal(row.inputs, row.of_inputs, at, lanes) * load(k.norm_x + at, lanes) + bias +
           normal(row.product, row.of_product, at, lanes) * load(k.norm_h + at, lanes);
  };
  VariantGates gates;
  gates.i = sum(0);
  if (k.peephole) gates.i += load(k.peephole + u, lanes) * before;
  gates.i = sigmoid(gates.i);
  if (k.coupled()) {
    gates.f = all(1.0f) - gates.i;
  } else {
    gates.f = sum(k.forget());
    if (k.peephole) gates.f += load(k.peephole + k.hidden + u, lanes) * before;
    gates.f = sigmoid(gates.f);
  }
  gates.g = hyperbolic_tangent(sum(k.input()));
  gates.made = gates.f * before + gates.i * gates.g;
  gates.o = sum(k.out());
  if (k.peephole) gates.o += load(k.peephole_out() + u, lanes) * gates.made;
  gates.o = sigmoid(gates.o);
  return gates;
}

TORCHECHO_INLINE void store_gates(const VariantCell& k, const VariantGates& gates, float* to, int64_t u) {
  const int64_t lanes = k.hidden - u;
  store(to + u, gates.i, lanes);
  if (!k.coupled()) store(to + k.forget() + u, gates.f, lanes);
  store(to + k.input() + u, gates.g, lanes);
  store(to + k.out() + u, gates.o, lanes);
}

struct VariantForward {
  Steps steps;
  VariantCell cell;
  const float* recurrent;  // panels of W_hh^T, gates side by side; unused when rebuilding
  float* inputs;           // [rows, G H] in chunk order: W_ih x; if nothing is normalised with the bias, then the gates
  float* product;          // W_hh (m h'): [rows, G H] in chunk order if `whole`, else [B, G H] scratch
  int64_t whole;
  Statistics* statistics;  // [rows, 2] in chunk order: of both products; or null
  float* scratch;          // [threads, G H]: the gates of a row, if normalised
  float* c;                // [B, H]: c before the chunk, then after it
  float* cells;            // [rows, H] in chunk order, or null
  float* h;                // [B, P]: h before the chunk, then after it; null when rebuilding
  float* dropped;          // [B, P]: m h; `h` itself without dropout
  float* y;
  int64_t y_stride;
  const float* projection;  // panels of W_hr^T, or null
  float* unprojected;       // [B, H] scratch if projected
};

// Gates, and the new c (to `fresh`, if h is wanted) and c of one row.
inline void variant_cell(const VariantForward& s, int64_t row, int64_t b, const VariantSums& sums, float* gates,
                         float* fresh) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  float* cell = s.c + b * H;
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats before = load(cell + u, lanes);
    const VariantGates found = variant_gates(k, sums, before, u);
    store_gates(k, found, gates, u);
    if (fresh) store(fresh + u, found.made, lanes);
    const Floats z = zone_of(k.zone_c, row * H + u, k.zone[0], lanes), c = z * before + (all(1.0f) - z) * found.made;
    store(cell + u, c, lanes);
    if (s.cells) store(s.cells + row * H + u, c, lanes);
  }
}

// Take a new h over, or the old one, or some of both.
TORCHECHO_INLINE void variant_keep(const VariantForward& s, int64_t row, int64_t b, int64_t u, Floats made, float* y) {
  const VariantCell& k = s.cell;
  const int64_t P = k.output, lanes = P - u;
  const Floats z = zone_of(k.zone_h, row * P + u, k.zone[1], lanes);
  const Floats h = z * load(s.h + b * P + u, lanes) + (all(1.0f) - z) * made;
  store(y + u, h, lanes);
  store(s.h + b * P + u, h, lanes);
  if (k.drop) store(s.dropped + b * P + u, h * load(k.drop + b * P + u, lanes), lanes);
}

// The new h of one row, from its gates and the new c that `y` holds; if it is to be projected, `y` is scratch that
// receives it.
inline void variant_output(const VariantForward& s, int64_t row, int64_t b, const float* gates, float* y) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  const Statistics found = k.norm_c ? statistics(y, H) : Statistics{};
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    Floats c = k.norm_c ? normal(y, found, u, lanes) * load(k.norm_c + u, lanes) : load(y + u, lanes);
    if (k.shift_c) c += load(k.shift_c + u, lanes);
    const Floats made = load(gates + k.out() + u, lanes) * hyperbolic_tangent(c);
    if (s.projection) store(y + u, made, lanes);
    else variant_keep(s, row, b, u, made, y);
  }
}

// Everything after the rows of a projected step: every member waits for the rows of all.
inline void variant_project(const Team& team, const VariantForward& s, int64_t t) {
  const int64_t H = s.cell.hidden, P = s.cell.output, n = s.steps.rows(t), row0 = s.steps.row_in_chunk(t);
  float* y = s.y + s.steps.offsets[t] * s.y_stride;
  multiply(team, {{s.unprojected, H, 1}, {s.projection, kPacked}, nullptr, y, s.y_stride, n, H, P, 0});
  team.meet();
  team.share(n, [&](int64_t b) {
    float* own = y + b * s.y_stride;
    for (int64_t u = 0; u < P; u += kLanes) variant_keep(s, row0 + b, b, u, load(own + u, P - u), own);
  });
  team.meet();
}

// Everything of one row after its product.
inline void variant_row(const Team& team, const VariantForward& s, int64_t t, int64_t b) {
  const VariantCell& k = s.cell;
  const int64_t row = s.steps.row_in_chunk(t) + b, width = k.width();
  float *inputs = s.inputs + row * width, *product = s.product + (s.whole ? row : b) * width, *gates = inputs;
  VariantSums sums = {inputs, product, {}, {}};
  if (k.is_normalised()) {
    sums.of_inputs = statistics(inputs, width), sums.of_product = statistics(product, width);
    if (s.statistics) s.statistics[2 * row] = sums.of_inputs, s.statistics[2 * row + 1] = sums.of_product;
    gates = s.scratch + team.member * width;
  }
  float* own = s.projection ? s.unprojected + b * k.hidden : s.y + (s.steps.offsets[t] + b) * s.y_stride;
  float* y = s.h ? own : nullptr;
  variant_cell(s, row, b, sums, gates, y);
  if (y) variant_output(s, row, b, gates, y);
}

inline void variant_forward(const VariantForward& s) {
  const int64_t H = s.cell.hidden, P = s.cell.output, width = s.cell.width();
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t step = 0; step < s.steps.num_in_chunk(); step++) {
      const int64_t t = s.steps.nth(step), n = s.steps.rows(t);
      float* product = s.product + (s.whole ? s.steps.row_in_chunk(t) * width : 0);
      const Segment segments[2] = {{0, n, s.dropped, P}, {n, n, nullptr, 0}};
      step_products(team, t, segments, {s.recurrent, kPacked}, P, H, s.cell.gates,
                    [&](int64_t row, int64_t rows, int64_t vector, int64_t, const float* sums) {
        const int64_t u = vector * kLanes;
        for (int64_t b = row; b < row + rows; b++)
          for (int64_t gate = 0; gate < s.cell.gates; gate++, sums += kLanes)
            store(product + b * width + gate * H + u, load(sums), H - u);
      });
      team.meet();
      team.share(n, [&](int64_t b) { variant_row(team, s, t, b); });
      team.meet();
      if (s.projection) variant_project(team, s, t);
    }
  });
}

// Gates and cells of a chunk from the products of all its rows: rows have no need of each other.
inline void variant_rebuild(const VariantForward& s) {
  with_team(s.steps.threads, [&](const Team& team) {
    const int64_t most = s.steps.rows(s.steps.begin);
    const int64_t first = most * team.member / team.size, last = most * (team.member + 1) / team.size;
    for (int64_t step = 0; step < s.steps.num_in_chunk(); step++) {
      const int64_t t = s.steps.nth(step);
      for (int64_t b = first; b < std::min(last, s.steps.rows(t)); b++) variant_row(team, s, t, b);
    }
  });
}

}  // namespace torchecho
