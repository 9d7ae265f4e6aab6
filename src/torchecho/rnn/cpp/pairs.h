// Pairs of numbers rounded to bfloat16: one element of 32 bits holds two neighbours along the depth of a product. Products
// of two such numbers are exact in float32, in which AVX-512's BF16 instructions add them up: on some processors at twice
// the rate of floats (pairs_speed.cpp).
#pragma once

#include "vector.h"

namespace torchecho {

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;

// Element l: first[l], then second[l].
TORCHECHO_INLINE Floats paired(Floats first, Floats second) {
  const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
  const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
  return (Floats)_mm512_or_epi32(low, _mm512_slli_epi32(high, 16));
}

// The first `count` floats as pairs of neighbours, 0 beyond them; memory beyond them is not touched.
TORCHECHO_INLINE Floats load_pairs(const float* from, int64_t count) {
  const Floats low = load(from, count), high = count > kLanes ? load(from + kLanes, count - kLanes) : Floats{};
  return (Floats)_mm512_cvtne2ps_pbh(high, low);
}

// sum + the products of the pair that `x` holds with those of `right`.
TORCHECHO_INLINE Floats add_products(Floats sum, float x, Floats right) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(x), (__m512bh)right);
}
#else
constexpr bool kHasPairs = false;  // and nothing asks for any of these

TORCHECHO_INLINE Floats paired(Floats first, Floats) { return first; }
TORCHECHO_INLINE Floats load_pairs(const float* from, int64_t count) { return load(from, count); }
TORCHECHO_INLINE Floats add_products(Floats sum, float, Floats) { return sum; }
#endif

// What a product multiplies: floats, or pairs.
struct ByFloats {
  static TORCHECHO_INLINE Floats add(Floats sum, float x, Floats right) { return sum + x * right; }
};
struct ByPairs {
  static TORCHECHO_INLINE Floats add(Floats sum, float x, Floats right) { return add_products(sum, x, right); }
};

}  // namespace torchecho
