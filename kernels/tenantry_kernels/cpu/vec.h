// Vectors of floats by the compiler's vector extension: the same source is AVX-512, AVX2 or whatever is there.
//
// Rows are read two vectors at a time in a *fixed permuted order* (`load2`): for bf16, the even elements and then the
// odd ones, since one shift and one mask make floats of them. All arithmetic between rows that were read so is right,
// and `store2` puts things back in place.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include "spin.h"
#include "table.h"

namespace tenantry {
namespace TENANTRY_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
constexpr int P = 2 * W;  // elements of a pair of vectors

typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));

TENANTRY_INLINE V splat(float value) { return value - V{}; }  // x - 0 is x: folded to a broadcast

TENANTRY_INLINE float to_float(float value) { return value; }
TENANTRY_INLINE float to_float(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

TENANTRY_INLINE void from_float(float value, float& out) { out = value; }
TENANTRY_INLINE void from_float(float value, Bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

TENANTRY_INLINE U loadu(const void* p) {
  U out;
  std::memcpy(&out, p, sizeof(U));
  return out;
}

TENANTRY_INLINE V load1(const float* p) {
  V out;
  std::memcpy(&out, p, sizeof(V));
  return out;
}
TENANTRY_INLINE void store1(float* p, V v) { std::memcpy(p, &v, sizeof(V)); }

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;

// To each sum the products of two bf16, one after the other; denormal values count as zero.
TENANTRY_INLINE V add_pairs(V sum, U a, U b) { return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool kPairs = false;
#endif

TENANTRY_INLINE void load2(const float* p, V& a, V& b) {
  a = load1(p);
  b = load1(p + W);
}
TENANTRY_INLINE void load2(const Bf16* p, V& a, V& b) {
  const U bits = loadu(p);
  a = (V)(bits << 16);
  b = (V)(bits & 0xffff0000u);
}

// One of the two vectors of load2.
template <int H>
TENANTRY_INLINE V load_half(const float* p) {
  return load1(p + H * W);
}
template <int H>
TENANTRY_INLINE V load_half(const Bf16* p) {
  return H == 0 ? (V)(loadu(p) << 16) : (V)(loadu(p) & 0xffff0000u);
}

TENANTRY_INLINE U round_bits(V v) {  // nearest even, in the upper half; NaN stays NaN
  const U bits = (U)v;
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const U nan = (U)(v != v);
  return (rounded & ~nan) | (nan & 0x7fc00000u);
}
TENANTRY_INLINE void store2(float* p, V a, V b) {
  store1(p, a);
  store1(p + W, b);
}
TENANTRY_INLINE void store2(Bf16* p, V a, V b) {
  const U bits = (round_bits(a) >> 16) | (round_bits(b) & 0xffff0000u);
  std::memcpy(p, &bits, sizeof(U));
}

// What load2 gave of T, in the order of the elements.
TENANTRY_INLINE void in_order(const float*, V&, V&) {}
TENANTRY_INLINE void in_order(const Bf16*, V& even, V& odd) {
#if defined(__AVX512F__)
  I low, high;
  for (int lane = 0; lane < W; ++lane) {
    low[lane] = lane / 2 + lane % 2 * W;
    high[lane] = low[lane] + W / 2;
  }
  const V first = __builtin_shuffle(even, odd, low), second = __builtin_shuffle(even, odd, high);
#else  // two steps, each one instruction of AVX2
  const V near = __builtin_shuffle(even, odd, I{0, 8, 1, 9, 4, 12, 5, 13});
  const V far = __builtin_shuffle(even, odd, I{2, 10, 3, 11, 6, 14, 7, 15});
  const V first = __builtin_shuffle(near, far, I{0, 1, 2, 3, 8, 9, 10, 11});
  const V second = __builtin_shuffle(near, far, I{4, 5, 6, 7, 12, 13, 14, 15});
#endif
  even = first;
  odd = second;
}

// The other way round: elements in their order as load2 would give them of T.
TENANTRY_INLINE void in_pairs(const float*, V&, V&) {}
TENANTRY_INLINE void in_pairs(const Bf16*, V& first, V& second) {
  I even, odd;
  for (int lane = 0; lane < W; ++lane) {
    even[lane] = 2 * lane;
    odd[lane] = 2 * lane + 1;
  }
  const V low = __builtin_shuffle(first, second, even), high = __builtin_shuffle(first, second, odd);
  first = low;
  second = high;
}

// A pair of T's order as elements of Out.
template <typename T>
TENANTRY_INLINE void store_pair(T* p, V a, V b, const T*) {
  store2(p, a, b);
}
TENANTRY_INLINE void store_pair(float* p, V a, V b, const Bf16* order) {
  in_order(order, a, b);
  store2(p, a, b);
}

// A pair at `p` of which only `count` elements exist; the rest reads as zero and is not written.
template <typename T>
TENANTRY_INLINE void load2(const T* p, int64_t count, V& a, V& b) {
  if (count >= P) return load2(p, a, b);
  T padded[P] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  load2(padded, a, b);
}
template <typename T>
TENANTRY_INLINE void store2(T* p, int64_t count, V a, V b) {
  if (count >= P) return store2(p, a, b);
  T padded[P];
  store2(padded, a, b);
  std::memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
}

// P neighbours of a row, to be multiplied with those of another.
template <typename T>
struct Piece {
  V low, high;

  static TENANTRY_INLINE Piece load(const T* p) {
    Piece out;
    load2(p, out.low, out.high);
    return out;
  }
};

template <typename T>
TENANTRY_INLINE V add_products(V sum, const Piece<T>& a, const Piece<T>& b) {
  sum += a.low * b.low;
  sum += a.high * b.high;
  return sum;
}

#if defined(__AVX512BF16__)
template <>
struct Piece<Bf16> {
  U pairs;

  static TENANTRY_INLINE Piece load(const Bf16* p) { return {loadu(p)}; }
};

TENANTRY_INLINE V add_products(V sum, const Piece<Bf16>& a, const Piece<Bf16>& b) {
  return add_pairs(sum, a.pairs, b.pairs);
}
#endif

// Of which only `count` elements exist; the rest counts as zero.
template <typename T>
TENANTRY_INLINE Piece<T> piece(const T* p, int64_t count) {
  T padded[P] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return Piece<T>::load(padded);
}

// Halves the blocks of B lanes of a and b by adding their two halves; blocks of a and b alternate in the result.
template <int B>
TENANTRY_INLINE V fold(V a, V b) {
  I low, high;
  for (int lane = 0; lane < W; ++lane) {
    const int block = lane / (B / 2);
    low[lane] = (block % 2) * W + block / 2 * B + lane % (B / 2);
    high[lane] = low[lane] + B / 2;
  }
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// Lane i of the result is the sum of v[i]'s lanes.
template <int N = W>
TENANTRY_INLINE V sums(V* v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    for (int i = 0; i < N / 2; ++i) v[i] = fold<N>(v[i], v[i + N / 2]);
    return sums<N / 2>(v);
  }
}

template <int B = W>
TENANTRY_INLINE float sum(V v) {
  if constexpr (B == 1) return v[0];
  else return sum<B / 2>(fold<B>(v, v));
}

TENANTRY_INLINE V greater(V a, V b) { return a > b ? a : b; }

template <int B = W>
TENANTRY_INLINE float greatest_of(V v) {
  if constexpr (B == 1) {
    return v[0];
  } else {
    I other;
    for (int lane = 0; lane < W; ++lane) other[lane] = (lane + B / 2) % W;
    return greatest_of<B / 2>(greater(v, __builtin_shuffle(v, other)));
  }
}

// e^x for x <= 88: range reduction and a polynomial (coefficients of Cephes' expf), within 2 ulp; 0 below -87.
TENANTRY_INLINE V exp(V x) {
  const V low = splat(-87.0f), high = splat(88.0f);
  const I under = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const V magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V shifted = x * 1.44269504088896341f + magic;
  const V n = shifted - magic;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  const I power = ((I)shifted - (I)magic + 127) << 23;
  y = y * (V)power;
  return under ? V{} : y;
}

TENANTRY_INLINE int64_t pairs(int64_t width) { return (width + P - 1) / P; }

}  // namespace TENANTRY_ISA
}  // namespace tenantry
