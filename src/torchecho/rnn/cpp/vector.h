// Vectors of floats in the widest registers that the compiler was told of, from one source for every processor:
// GCC's and Clang's vector extensions become AVX-512, AVX2, SSE2 or NEON instructions.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace torchecho {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));

#define TORCHECHO_INLINE inline __attribute__((always_inline))

TORCHECHO_INLINE Floats all(float value) { return value - Floats{}; }

TORCHECHO_INLINE Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

TORCHECHO_INLINE void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }

// Read the first `lanes` lanes and set the others to zero, or write no others; memory beyond them is not touched.
#if defined(__AVX512F__)
TORCHECHO_INLINE __mmask16 first_lanes(int64_t lanes) {
  return static_cast<__mmask16>(lanes >= kLanes ? 0xffffu : (1u << lanes) - 1);
}
TORCHECHO_INLINE Floats load(const float* from, int64_t lanes) {
  return _mm512_maskz_loadu_ps(first_lanes(lanes), from);
}
TORCHECHO_INLINE void store(float* to, Floats v, int64_t lanes) { _mm512_mask_storeu_ps(to, first_lanes(lanes), v); }
#elif defined(__AVX2__)
TORCHECHO_INLINE __m256i first_lanes(int64_t lanes) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TORCHECHO_INLINE Floats load(const float* from, int64_t lanes) {
  return lanes >= kLanes ? load(from) : Floats(_mm256_maskload_ps(from, first_lanes(lanes)));
}
TORCHECHO_INLINE void store(float* to, Floats v, int64_t lanes) {
  if (lanes >= kLanes) return store(to, v);
  _mm256_maskstore_ps(to, first_lanes(lanes), v);
}
#else
TORCHECHO_INLINE Floats load(const float* from, int64_t lanes) {
  if (lanes >= kLanes) return load(from);
  Floats v{};
  for (int64_t lane = 0; lane < lanes; lane++) v[lane] = from[lane];
  return v;
}
TORCHECHO_INLINE void store(float* to, Floats v, int64_t lanes) {
  if (lanes >= kLanes) return store(to, v);
  for (int64_t lane = 0; lane < lanes; lane++) to[lane] = v[lane];
}
#endif

TORCHECHO_INLINE Floats as_floats(Ints v) {
  Floats out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

TORCHECHO_INLINE Ints as_ints(Floats v) {
  Ints out;
  std::memcpy(&out, &v, sizeof out);
  return out;
}

// The nearest bfloat16, of two equally near the even one; a NaN stays one.
TORCHECHO_INLINE Floats to_bfloat16(Floats x) {
  typedef uint32_t Bits __attribute__((vector_size(kLanes * 4)));
  Bits bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  Floats nearest;
  std::memcpy(&nearest, &bits, sizeof nearest);
  return x == x ? nearest : x;
}

// What is stored of x by a layer of bfloat16, or by one of float32.
TORCHECHO_INLINE Floats as_stored(Floats x, int64_t is_bfloat16) { return is_bfloat16 ? to_bfloat16(x) : x; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TORCHECHO_SHUFFLES
#endif
#endif

#ifdef TORCHECHO_SHUFFLES
// Exchange the lanes of `a` whose number has bit D with those of `b` whose number has not.
template <int D, int... J>
TORCHECHO_INLINE void exchange(Floats& a, Floats& b, std::integer_sequence<int, J...>) {
  const Floats low = __builtin_shufflevector(a, b, ((J & D) ? J - D + kLanes : J)...);
  b = __builtin_shufflevector(a, b, ((J & D) ? J + kLanes : J + D)...);
  a = low;
}

template <int D>
TORCHECHO_INLINE void transpose_by(Floats (&rows)[kLanes]) {
  if constexpr (D > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      if (!(i & D)) exchange<D>(rows[i], rows[i + D], std::make_integer_sequence<int, kLanes>());
    transpose_by<D / 2>(rows);
  }
}

// Transpose a square of kLanes by kLanes.
TORCHECHO_INLINE void transpose(Floats (&rows)[kLanes]) { transpose_by<kLanes / 2>(rows); }
#else
TORCHECHO_INLINE void transpose(Floats (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; i++)
    for (int j = 0; j < i; j++) {
      const float above = rows[j][i];
      rows[j][i] = rows[i][j];
      rows[i][j] = above;
    }
}
#endif

// Written so that a NaN stays one: every comparison with it is false.
TORCHECHO_INLINE Floats clamp(Floats x, float low, float high) {
  x = x < all(low) ? all(low) : x;
  return x > all(high) ? all(high) : x;
}

struct Exponential {
  Floats scale;     // 2^n
  Floats fraction;  // e^r - 1, where x = n ln 2 + r and |r| <= ln(2) / 2
};

// Split e^x into 2^n (1 + fraction), for |x| <= 87.
TORCHECHO_INLINE Exponential split_exp(Floats x) {
  // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits of the sum.
  const Floats rounder = all(12582912.0f);
  Floats shifted = x * all(1.44269504f) + rounder;
  Floats n = shifted - rounder;
  Floats r = x - n * all(0.693359375f);
  r = r + n * all(2.12194440e-4f);
  // Minimax fit of (e^r - 1 - r) / r^2, relative error of e^r - 1 below 2e-8.
  Floats q = all(1.3950725551694632e-3f);
  q = q * r + all(8.369024842977524e-3f);
  q = q * r + all(4.166620224714279e-2f);
  q = q * r + all(1.66665181517601e-1f);
  q = q * r + all(0.5f);
  Ints power = (as_ints(shifted) - as_ints(rounder) + 127) << 23;
  return {as_floats(power), r * r * q + r};
}

TORCHECHO_INLINE Floats sigmoid(Floats x) {
  Exponential e = split_exp(clamp(-x, -87.0f, 87.0f));
  return all(1.0f) / (e.scale * e.fraction + (e.scale + all(1.0f)));
}

// tanh x = (e^2x - 1) / (e^2x + 1); the numerator keeps its relative accuracy near 0, where n = 0.
TORCHECHO_INLINE Floats hyperbolic_tangent(Floats x) {
  Exponential e = split_exp(clamp(x + x, -20.0f, 20.0f));
  Floats numerator = e.scale * e.fraction + (e.scale - all(1.0f));
  return numerator / (numerator + all(2.0f));
}

}  // namespace torchecho
