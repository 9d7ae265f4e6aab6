// Gradients of the LSTM variants over the steps of a chunk, the last first.
#pragma once

#include "kernel.h"

namespace torchecho {

struct VariantBackward {
  Steps steps;
  VariantCell cell;
  Right recurrent;            // W_hh [G H, P]
  const float* gates;         // [rows, G H] in chunk order, activated
  const float* normal;        // [rows, G H] in chunk order: the normalised product; null without normalisation
  const float* scales;        // [rows] in chunk order
  const float* input_norm;    // [G H]
  const float* input_normal;  // [rows, G H] in chunk order: the normalised product of the input
  const float* input_scales;  // [rows] in chunk order
  const float* cells;         // [rows, H] in chunk order
  const float* cell_before;   // [B, H] before the first step of the chunk
  const float* c0;            // [B, H]
  const float* dy;            // [rows, ...] in chunk order
  int64_t dy_stride;
  float* dh;                  // [B, P]: gradient of h after the chunk but for the product's, then before it
  float* dc;                  // [B, H]: gradient of c after the chunk, then before it
  float* dgates;              // [rows, G H] in chunk order: of the input's product; may be `gates`
  float* dproduct;            // [rows, G H] in chunk order; may be `normal`; `dgates` without normalisation
  float* dproduct_after;      // [B, G H] of the step after the chunk, then of the first of it
  float* dproduct_start;      // [B, G H]: of the first step of each row
  float* scratch;             // [threads, 2 H]
  float* sums;                // [threads, (3 G + 5) H]: gradients of input_norm, norm_h, biases, norm_c, shift_c and
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
  const float *gates, *before;
  float *dgates, *fresh, *slope;          // `fresh`: the new c; `slope`: the gradient of its normalised form
  float *norm_x, *norm_h, *bias, *norm_c, *shift_c, *peephole;  // sums
};

// The halves of a normalisation's gradient that every element of a row shares.
struct Means {
  float plain, weighted;
};

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
  Floats plain{}, weighted{};
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats o = load(r.gates + k.out() + u, lanes);
    Floats c = load(r.fresh + u, lanes), unit{};
    if (k.norm_c) {
      unit = (c - all(found.mean)) * all(found.scale);
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
      plain += first_only(slope, lanes);
      weighted += first_only(slope * unit, lanes);
    }
    store(r.slope + u, slope, lanes);
    store(r.dgates + k.out() + u, made * tanh_c * (o * (one - o)), lanes);
  }
  return {sum_lanes(plain) / static_cast<float>(H), sum_lanes(weighted) / static_cast<float>(H)};
}

// Gradients of the other gates before activation and of c before the step.
inline void variant_gates_backward(const VariantBackward& s, const VariantRow& r, Statistics found, Means means) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden;
  const Floats one = all(1.0f);
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats i = load(r.gates + u, lanes), g = load(r.gates + k.input() + u, lanes);
    const Floats f = k.coupled() ? one - i : load(r.gates + k.forget() + u, lanes);
    const Floats before = load(r.before + u, lanes), fresh = load(r.fresh + u, lanes);
    const Floats z = zone_of(k.zone_c, r.row * H + u, k.zone[0], lanes), d_o = load(r.dgates + k.out() + u, lanes);
    Floats made = load(r.slope + u, lanes);
    if (k.norm_c) {
      const Floats unit = (fresh - all(found.mean)) * all(found.scale);
      made = (made - all(means.plain) - unit * all(means.weighted)) * all(found.scale);
    }
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
    store(r.dgates + u, d_i, lanes);
    if (!k.coupled()) store(r.dgates + k.forget() + u, d_f, lanes);
    store(r.dgates + k.input() + u, d_g, lanes);
  }
}

// Gradient through a normalisation: of `gradient`, its scale `norm` and the normalised row `unit` to the row before it,
// which may be any of these.
inline void normal_backward(const float* gradient, const float* norm, const float* unit, float scale, int64_t width,
                            float* dnorm, float* to) {
  const auto slope = [&](int64_t u, int64_t lanes) { return load(gradient + u, lanes) * load(norm + u, lanes); };
  const float many = static_cast<float>(width), plain = sum_row(width, slope) / many;
  const float weighted = sum_row(width, [&](int64_t u, int64_t lanes) {
    const Floats x = load(unit + u, lanes), d = load(gradient + u, lanes);
    add_to(dnorm + u, d * x, lanes);
    return d * load(norm + u, lanes) * x;
  }) / many;
  for (int64_t u = 0; u < width; u += kLanes) {
    const int64_t lanes = width - u;
    store(to + u, (slope(u, lanes) - all(plain) - load(unit + u, lanes) * all(weighted)) * all(scale), lanes);
  }
}

inline void variant_row_backward(const Team& team, const VariantBackward& s, int64_t t, int64_t b, const float* before) {
  const VariantCell& k = s.cell;
  const int64_t H = k.hidden, width = k.width(), row = s.steps.row_in_chunk(t) + b;
  float *scratch = s.scratch + team.member * 2 * H, *sums = s.sums + team.member * (3 * width + 5 * H);
  const VariantRow r = {row, b, s.gates + row * width, before + b * H,
                        s.dgates + row * width, scratch, scratch + H,
                        sums, sums + width, sums + 2 * width,
                        sums + 3 * width, sums + 3 * width + H, sums + 3 * width + 2 * H};
  for (int64_t u = 0; u < H; u += kLanes) {
    const int64_t lanes = H - u;
    const Floats i = load(r.gates + u, lanes);
    const Floats f = k.coupled() ? all(1.0f) - i : load(r.gates + k.forget() + u, lanes);
    store(r.fresh + u, f * load(r.before + u, lanes) + i * load(r.gates + k.input() + u, lanes), lanes);
  }
  const Statistics found = k.norm_c ? statistics(r.fresh, H) : Statistics{};
  variant_gates_backward(s, r, found, variant_output_backward(s, r, found));
  for (int64_t u = 0; u < width; u += kLanes) add_to(r.bias + u, load(r.dgates + u, width - u), width - u);
  if (k.norm_h) {
    normal_backward(r.dgates, k.norm_h, s.normal + row * width, s.scales[row], width, r.norm_h, s.dproduct + row * width);
    normal_backward(r.dgates, s.input_norm, s.input_normal + row * width, s.input_scales[row], width, r.norm_x, r.dgates);
  }
  if (b >= s.steps.continuing(t))
    std::memcpy(s.dproduct_start + b * width, s.dproduct + row * width, width * sizeof(float));
}

inline void variant_backward(const VariantBackward& s) {
  const int64_t H = s.cell.hidden, P = s.cell.output, width = s.cell.width(), many = s.steps.num_in_chunk();
  with_team(s.steps.threads, [&](const Team& team) {
    for (int64_t step = 0; step < many; step++) {
      const int64_t t = s.steps.nth_backward(step), continued = s.steps.continued(t);
      const float* after = step ? s.dproduct + s.steps.row_in_chunk(s.steps.after(t)) * width : s.dproduct_after;
      const float* before = step < many - 1 ? s.cells + s.steps.row_in_chunk(s.steps.before(t)) * H : s.cell_before;
      const Segment segments[2] = {{0, continued, after, width}, {continued, continued, nullptr, 0}};
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
    keep_first_step(team, s.steps, s.dproduct, width, s.dproduct_after);
  });
}

}  // namespace torchecho
