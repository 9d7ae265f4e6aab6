// LSTM variants over the steps of a chunk: layer normalisation, peepholes, coupled gates, zoneout, dropout of h.
//
// With G gates (4, or 3 when f = 1 - i), m the dropout of h and z the zoneout of a step:
//   gates = a + norm_h * normal(W_hh (m h')), plus peepholes of c' into i and f, and of the new c into o
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
  const float* norm_h;            // [G H]
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

// Normalise a row in place and return 1 / standard deviation.
inline float normalise(float* x, int64_t count) {
  const Statistics found = statistics(x, count);
  for (int64_t u = 0; u < count; u += kLanes)
    store(x + u, (load(x + u, count - u) - all(found.mean)) * all(found.scale), count - u);
  return found.scale;
}

struct VariantForward {
  Steps steps;
  VariantCell cell;
  const float* recurrent;  // panels of W_hh^T, gates side by side; unused when rebuilding
  float* gates;            // [rows, G H] in chunk order: a; receives the activations
  float* product;          // W_hh (m h'), then normalised: [rows, G H] in chunk order if `whole`, else [B, G H] scratch
  int64_t whole;
  float* scales;           // [rows] in chunk order: 1 / standard deviation of the product; or null
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
inline void variant_gates(const VariantForward& s, int64_t row, int64_t b, const float* product, float* fresh) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  float *gates = s.gates + row * k.width(), *cell = s.c + b * H;
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const auto sum = [&](int64_t gate) {
      const Floats r = load(product + gate + u, lanes);
      return load(gates + gate + u, lanes) + (k.norm_h ? r * load(k.norm_h + gate + u, lanes) : r);
    };
    const Floats before = load(cell + u, lanes);
    Floats i = sum(0), f{}, o = sum(k.out());
    if (k.peephole) i += load(k.peephole + u, lanes) * before;
    i = sigmoid(i);
    if (k.coupled()) {
      f = all(1.0f) - i;
    } else {
      f = sum(k.forget());
      if (k.peephole) f += load(k.peephole + H + u, lanes) * before;
      f = sigmoid(f);
      store(gates + k.forget() + u, f, lanes);
    }
    const Floats g = hyperbolic_tangent(sum(k.input())), made = f * before + i * g;
    if (k.peephole) o += load(k.peephole_out() + u, lanes) * made;
    store(gates + u, i, lanes);
    store(gates + k.input() + u, g, lanes);
    store(gates + k.out() + u, sigmoid(o), lanes);
    if (fresh) store(fresh + u, made, lanes);
    const Floats z = zone_of(k.zone_c, row * H + u, k.zone[0], lanes), c = z * before + (all(1.0f) - z) * made;
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

// The new h of one row, from the new c that `y` holds; if it is to be projected, `y` is scratch that receives it.
inline void variant_output(const VariantForward& s, int64_t row, int64_t b, float* y) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  const Statistics found = k.norm_c ? statistics(y, H) : Statistics{};
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    Floats c = load(y + u, lanes);
    if (k.norm_c) c = (c - all(found.mean)) * all(found.scale) * load(k.norm_c + u, lanes);
    if (k.shift_c) c += load(k.shift_c + u, lanes);
    const Floats made = load(s.gates + row * k.width() + k.out() + u, lanes) * hyperbolic_tangent(c);
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
inline void variant_row(const VariantForward& s, int64_t t, int64_t b) {
  const VariantCell& k = s.cell;
  const int64_t row = s.steps.row_in_chunk(t) + b, width = k.width();
  float* product = s.product + (s.whole ? row : b) * width;
  if (k.norm_h) {
    const float scale = normalise(product, width);
    if (s.scales) s.scales[row] = scale;
  }
  float* own = s.projection ? s.unprojected + b * k.hidden : s.y + (s.steps.offsets[t] + b) * s.y_stride;
  float* y = s.h ? own : nullptr;
  variant_gates(s, row, b, product, y);
  if (y) variant_output(s, row, b, y);
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
      team.share(n, [&](int64_t b) { variant_row(s, t, b); });
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
      for (int64_t b = first; b < std::min(last, s.steps.rows(t)); b++) variant_row(s, t, b);
    }
  });
}

// The normalisation of the input's products W_ih x of a chunk, before their shift is added.
struct VariantInput {
  int64_t rows, width, threads;
  float* product;     // [rows, width]; becomes normal(product)
  const float* norm;  // [width]
  const float* bias;  // [width], or null
  float* scales;      // [rows]: receives 1 / standard deviation; or null
  float* gates;       // [rows, width]: receives norm * normal(product) + bias; may be `product`
};

inline void variant_input(const VariantInput& s) {
  with_team(s.threads, [&](const Team& team) {
    team.share(s.rows, [&](int64_t row) {
      float* product = s.product + row * s.width;
      const float scale = normalise(product, s.width);
      if (s.scales) s.scales[row] = scale;
      for (int64_t u = 0; u < s.width; u += kLanes) {
        const int64_t lanes = s.width - u;
        const Floats bias = s.bias ? load(s.bias + u, lanes) : Floats{};
        store(s.gates + row * s.width + u, load(product + u, lanes) * load(s.norm + u, lanes) + bias, lanes);
      }
    });
  });
}

}  // namespace torchecho
