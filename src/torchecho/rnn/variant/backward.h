// Gradients of the LSTM variants over the steps of a chunk, the last first.
#pragma once

#include "kernel.h"

namespace torchecho {

struct VariantBackward {
  Steps steps;
  VariantCell cell;
  Right recurrent;            // W_hh [G H, P]
  const float* gates;         // [rows, G H] in chunk order, activated; unused if normalised, as the next three otherwise
  const float* inputs;        // [rows, G H] in chunk order: W_ih x
  const float* product;       // [rows, G H] in chunk order: W_hh (m h')
  const Statistics* statistics;  // [rows, 2] in chunk order: of both
  const float* cells;         // [rows, H] in chunk order
  const float* cell_before;   // [B, H] before the first step of the chunk
  const float* c0;            // [B, H]
  const float* dy;            // [rows, ...] in chunk order
  int64_t dy_stride;
  float* dh;                  // [B, P]: gradient of h after the chunk but for the product's, then before it
  float* dc;                  // [B, H]: gradient of c after the chunk, then before it
  float* dgates;              // [rows, G H] in chunk order: of the input's product; may be `gates` or `inputs`
  float* dproduct;            // [rows, G H] in chunk order; may be `product`; `dgates` without normalisation
  float* dproduct_after;      // [B, G H] of the step after the chunk, then of the first of it
  float* dproduct_start;      // [B, G H]: of the first step of each row
  float* scratch;             // [threads, (G + 2) H]
  float* sums;                // [threads, (3 G + 5) H]: gradients of norm_x, norm_h, biases, norm_c, shift_c and
                              // peepholes; zeros at first
  const float* projection;    // panels of W_hr, or null
  float* dprojected;          // [rows, P] in chunk order: gradient of the projected new h
  float* unprojected;         // [rows, H] in chunk order: receives the new h before projection
  float* dunprojected;        // [B, H]: its gradient
};

TORCHECHO_INLINE void add_to(float* total, Floats x, int64_t lanes) { store(total, load(total, lanes) + x, lanes); }

// Where the parts of a row lie.
struct VariantRow {
  int64_t row, b;
  VariantSums made_of;
  const float *gates, *before;
  float *slopes, *fresh, *slope;  // gradients of the gates before activation, maybe in their place; the new c; and the
                                  // gradient of its normalised form
  float *norm_x, *norm_h, *bias, *norm_c, *shift_c, *peephole;  // sums
};

// The halves of a normalisation's gradient that every element of a row shares.
struct Means {
  float plain, weighted;
};

// What they are the means of, on the way.
struct MeansSoFar {
  Floats plain{}, weighted{};

  TORCHECHO_INLINE void add(Floats slope, Floats unit) {
    plain += slope;
    weighted += slope * unit;
  }
  Means over(int64_t count) const {
    const float many = static_cast<float>(count);
    return {sum_lanes(plain) / many, sum_lanes(weighted) / many};
  }
};

// Gradient before a normalisation, of that after it, where an element was `unit`.
TORCHECHO_INLINE Floats normal_backward(Floats slope, Floats unit, Means means, float scale) {
  return (slope - all(means.plain) - unit * all(means.weighted)) * all(scale);
}

// Gradient of the new h; leaves that of the h before it in `dh`.
TORCHECHO_INLINE Floats variant_keep_backward(const VariantBackward& s, int64_t row, int64_t b, int64_t u) {
  const VariantCell& k = s.cell;
  const int64_t P = k.output, lanes = P - u;
  const Floats z = zone_of(k.zone_h, row * P + u, k.zone[1], lanes);
  float* dh_at = s.dh + b * P + u;
  const Floats dh = load(dh_at, lanes) + load(s.dy + row * s.dy_stride + u, lanes);
  store(dh_at, z * dh, lanes);
  return (all(1.0f) - z) * dh;
}

// Gradients of the new h of a step before and after its projection.
inline void variant_project_backward(const Team& team, const VariantBackward& s, int64_t t) {
  const int64_t H = s.cell.hidden, P = s.cell.output, n = s.steps.rows(t), row0 = s.steps.row_in_chunk(t);
  team.share(n, [&](int64_t b) {
    for (int64_t u = 0; u < P; u += kLanes)
      store(s.dprojected + (row0 + b) * P + u, variant_keep_backward(s, row0 + b, b, u), P - u);
  });
  team.meet();
  const Segment whole[2] = {{0, n, s.dprojected + row0 * P, P}, {n, n, nullptr, 0}};
  step_products(team, t, whole, {s.projection, kPacked}, P, H, 0,
                [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
    for (int64_t b = row; b < row + rows; b++)
      for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes)
        store(s.dunprojected + b * H + v * kLanes, load(sums), H - v * kLanes);
  });
  team.meet();
}

// Gradient of o before activation and of the normalised new c; takes the gradient of h over to the step before.
inline Means variant_output_backward(const VariantBackward& s, const VariantRow& r, Statistics found) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  const Floats one = all(1.0f);
  MeansSoFar means;
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats o = load(r.gates + k.out() + u, lanes);
    Floats c = load(r.fresh + u, lanes), unit{};
    if (k.norm_c) {
      unit = normal(r.fresh, found, u, lanes);
      c = unit * load(k.norm_c + u, lanes);
    }
    if (k.shift_c) c += load(k.shift_c + u, lanes);
    const Floats tanh_c = hyperbolic_tangent(c);
    Floats made;
    if (s.projection) {
      made = load(s.dunprojected + r.b * H + u, lanes);
      store(s.unprojected + r.row * H + u, o * tanh_c, lanes);
    } else {
      made = variant_keep_backward(s, r.row, r.b, u);
    }
    Floats slope = made * o * (one - tanh_c * tanh_c);
    if (k.norm_c) {
      add_to(r.norm_c + u, slope * unit, lanes);
      if (k.shift_c) add_to(r.shift_c + u, slope, lanes);
      slope = slope * load(k.norm_c + u, lanes);
      means.add(slope, unit);
    }
    store(r.slope + u, slope, lanes);
    store(r.slopes + k.out() + u, made * tanh_c * (o * (one - o)), lanes);
  }
  return means.over(H);
}

// What the normalisations of both products, one after the other, share of a row.
struct NormalMeans {
  MeansSoFar inputs, product;
};

// Add the gradient of a vector of gates before activation to the sums.
TORCHECHO_INLINE void add_slope(const VariantCell& k, const VariantRow& r, Floats slope, int64_t at, int64_t lanes,
                                NormalMeans& means) {
  add_to(r.bias + at, slope, lanes);
  if (!k.is_normalised()) return;
  const Floats unit_x = normal(r.made_of.inputs, r.made_of.of_inputs, at, lanes);
  const Floats unit_h = normal(r.made_of.product, r.made_of.of_product, at, lanes);
  add_to(r.norm_x + at, slope * unit_x, lanes);
  add_to(r.norm_h + at, slope * unit_h, lanes);
  means.inputs.add(slope * load(k.norm_x + at, lanes), unit_x);
  means.product.add(slope * load(k.norm_h + at, lanes), unit_h);
}

// Gradients of the other gates before activation and of c before the step.
inline NormalMeans variant_gates_backward(const VariantBackward& s, const VariantRow& r, Statistics found, Means of_c) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  const Floats one = all(1.0f);
  NormalMeans means;
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats i = load(r.gates + u, lanes), g = load(r.gates + k.input() + u, lanes);
    const Floats f = k.coupled() ? one - i : load(r.gates + k.forget() + u, lanes);
    const Floats before = load(r.before + u, lanes), fresh = load(r.fresh + u, lanes);
    const Floats z = zone_of(k.zone_c, r.row * H + u, k.zone[0], lanes), d_o = load(r.slopes + k.out() + u, lanes);
    Floats made = load(r.slope + u, lanes);
    if (k.norm_c) made = normal_backward(made, normal(r.fresh, found, u, lanes), of_c, found.scale);
    const Floats dc = load(s.dc + r.b * H + u, lanes);
    made += (one - z) * dc;
    if (k.peephole) made += load(k.peephole_out() + u, lanes) * d_o;
    const Floats d_g = made * i * (one - g * g);
    const Floats d_i = made * (k.coupled() ? g - before : g) * (i * (one - i)), d_f = made * before * (f * (one - f));
    Floats dbefore = z * dc + made * f;
    if (k.peephole) {
      dbefore += load(k.peephole + u, lanes) * d_i;
      add_to(r.peephole + u, d_i * before, lanes);
      add_to(r.peephole + (k.gates - 2) * H + u, d_o * fresh, lanes);
    }
    if (k.peephole && !k.coupled()) {
      dbefore += load(k.peephole + H + u, lanes) * d_f;
      add_to(r.peephole + H + u, d_f * before, lanes);
    }
    store(s.dc + r.b * H + u, dbefore, lanes);
    store_gates(k, {d_i, d_f, d_g, d_o, made}, r.slopes, u);
    add_slope(k, r, d_i, u, lanes, means);
    if (!k.coupled()) add_slope(k, r, d_f, k.forget() + u, lanes, means);
    add_slope(k, r, d_g, k.input() + u, lanes, means);
    add_slope(k, r, d_o, k.out() + u, lanes, means);
  }
  return means;
}

// Gradients of both products of a row, from those after their normalisation.
inline void variant_products_backward(const VariantBackward& s, const VariantRow& r, const NormalMeans& sums) {
  const VariantCell& k = s.cell;
  const int64_t width = k.width();
  const Means inputs = sums.inputs.over(width), product = sums.product.over(width);
  for (int64_t u = 0; u < width; u += kLanes) {
    const int64_t lanes = width - u;
    const Floats slope = load(r.slopes + u, lanes);
    const auto before = [&](const float* row, Statistics found, const float* norm, Means means) {
      return normal_backward(slope * load(norm + u, lanes), normal(row, found, u, lanes), means, found.scale);
    };
    const Floats dproduct = before(r.made_of.product, r.made_of.of_product, k.norm_h, product);
    const Floats dinputs = before(r.made_of.inputs, r.made_of.of_inputs, k.norm_x, inputs);
    store(s.dproduct + r.row * width + u, dproduct, lanes);
    store(s.dgates + r.row * width + u, dinputs, lanes);
  }
}

// The gates of a row, made again in scratch if they are normalised, and its new c.
inline void variant_restore(const VariantBackward& s, const VariantRow& r) {
  const VariantCell& k = s.cell;
  for (int64_t u = 0; u < k.hidden; u += kLanes) {
    const int64_t lanes = k.hidden - u;
    const Floats before = load(r.before + u, lanes);
    if (k.is_normalised()) {
      const VariantGates found = variant_gates(k, r.made_of, before, u);
      store_gates(k, found, r.slopes, u);
      store(r.fresh + u, found.made, lanes);
    } else {
      const Floats i = load(r.gates + u, lanes);
      const Floats f = k.coupled() ? all(1.0f) - i : load(r.gates + k.forget() + u, lanes);
      store(r.fresh + u, f * before + i * load(r.gates + k.input() + u, lanes), lanes);
    }
  }
}

inline void variant_row_backward(const Team& team, const VariantBackward& s, int64_t t, int64_t b, const float* before) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden, width = k.width(), row = s.steps.row_in_chunk(t) + b;
  float *scratch = s.scratch + team.member * (width + 2 * H), *sums = s.sums + team.member * (3 * width + 5 * H);
  const bool normalised = k.is_normalised();
  VariantSums made_of{};
  if (normalised)
    made_of = {s.inputs + row * width, s.product + row * width, s.statistics[2 * row], s.statistics[2 * row + 1]};
  const VariantRow r = {row, b, made_of,
                        normalised ? scratch : s.gates + row * width, before + b * H,
                        normalised ? scratch : s.dgates + row * width, scratch + width, scratch + width + H,
                        sums, sums + width, sums + 2 * width,
                        sums + 3 * width, sums + 3 * width + H, sums + 3 * width + 2 * H};
  variant_restore(s, r);
  const Statistics found = k.norm_c ? statistics(r.fresh, H) : Statistics{};
  const NormalMeans means = variant_gates_backward(s, r, found, variant_output_backward(s, r, found));
  if (normalised) variant_products_backward(s, r, means);
  if (b >= s.steps.continuing(t))
    std::memcpy(s.dproduct_start + b * width, s.dproduct + row * width, width * sizeof(float));
}

inline void variant_backward(const VariantBackward& s) {
  const int64_t H = s.cell.hidden, P = s.cell.output, width = s.cell.width(), many = s.steps.num_in_chunk();
  const Rows dproduct = {s.dproduct, width};
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t step = 0; step < many; step++) {
      const int64_t t = s.steps.nth_backward(step), continued = s.steps.continued(t);
      const float* before = step < many - 1 ? s.cells + s.steps.row_in_chunk(s.steps.before(t)) * H : s.cell_before;
      const Segment segments[2] = {continued_rows(s.steps, t, step == 0, dproduct, s.dproduct_after, width),
                                   {continued, continued, nullptr, 0}};
      step_products(team, t, segments, s.recurrent, width, P, 0,
                    [&](int64_t row, int64_t rows, int64_t vector, int64_t vectors, const float* sums) {
        for (int64_t b = row; b < row + rows; b++)
          for (int64_t v = vector; v < vector + vectors; v++, sums += kLanes) {
            const int64_t u = v * kLanes, lanes = P - u;
            const Floats d = load(sums);
            add_to(s.dh + b * P + u, s.cell.drop ? d * load(s.cell.drop + b * P + u, lanes) : d, lanes);
          }
      });
      team.meet();
      if (s.projection) variant_project_backward(team, s, t);
      const int64_t continuing = s.steps.continuing(t);
      team.share(s.steps.rows(t), [&](int64_t b) {
        variant_row_backward(team, s, t, b, b < continuing ? before : s.c0);
      });
      team.meet();
    }
    keep_first_step(team, s.steps, dproduct, width, s.dproduct_after);
  });
}

}  // namespace torchecho
