// Linear layers: y = x W^T + b, every element one chain of multiply-adds over the inputs, in order. So a row's result
// has the same bits whatever rows are beside it.
#pragma once

#include <algorithm>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

template <typename T>
void widen(const T* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// panels[p][k][*]: the P columns of panel p at input k, so that load2 gives columns 0..W-1 and W..P-1 in order:
// bf16 columns are interleaved, column j beside column j + W.
template <typename T>
void pack(const T* weight, int64_t out, int64_t in, T* panels, int64_t panel_begin, int64_t panel_end) {
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    for (int j = 0; j < P; ++j) {
      const int place = sizeof(T) == 2 ? (j % W) * 2 + j / W : j;
      const int64_t column = p * P + j;
      T* to = panels + p * in * P + place;
      for (int64_t k = 0; k < in; ++k) to[k * P] = column < out ? weight[column * in + k] : T{};
    }
  }
}

// R rows times N panels, all sums in registers.
template <int R, int N, typename T, typename Out>
TENANTRY_INLINE void tile(const float* x, int64_t x_stride, int64_t in, const T* panels, const float* bias, Out* y, int64_t out,
                          int64_t column) {
  V acc[R][N][2] = {};
  for (int64_t k = 0; k < in; ++k) {
    V w[N][2];
    for (int n = 0; n < N; ++n) load2(panels + (n * in + k) * P, w[n][0], w[n][1]);
    for (int r = 0; r < R; ++r) {
      const V value = splat(x[r * x_stride + k]);
      for (int n = 0; n < N; ++n) {
        acc[r][n][0] += value * w[n][0];
        acc[r][n][1] += value * w[n][1];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      float sums[P];
      store1(sums, acc[r][n][0]);
      store1(sums + W, acc[r][n][1]);
      const int64_t first = column + n * P;
      const int64_t count = std::min<int64_t>(P, out - first);
      for (int64_t j = 0; j < count; ++j)
        from_float(bias ? sums[j] + bias[first + j] : sums[j], y[r * out + first + j]);
    }
  }
}

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kRegisters = 32;
#else
constexpr int kTileRows = 6, kRegisters = 16;
#endif

// Panels at once for R rows: a chain of multiply-adds needs seven others beside it to hide its latency, and sums,
// weights, one value of x and (for bf16) the mask must fit the registers.
template <int R, typename T>
constexpr int panels_of() {
  int n = 4;
  while (n > 1 && 2 * n * (R + (R > 1 && (sizeof(T) == 2 || R < 3))) + 2 > kRegisters) --n;
  return n;
}

template <int R, typename T, typename Out>
void tiles(const float* x, int64_t x_stride, int64_t in, const T* panels, const float* bias, Out* y, int64_t out, int64_t begin,
           int64_t end) {
  constexpr int N = panels_of<R, T>();
  int64_t p = begin;
  for (; p + N <= end; p += N) tile<R, N>(x, x_stride, in, panels + p * in * P, bias, y, out, p * P);
  for (; p < end; ++p) tile<R, 1>(x, x_stride, in, panels + p * in * P, bias, y, out, p * P);
}

template <int R, typename T, typename Out>
void tiles_of(int64_t rows, const float* x, int64_t x_stride, int64_t in, const T* panels, const float* bias, Out* y, int64_t out,
              int64_t begin, int64_t end) {
  if (rows == R) return tiles<R>(x, x_stride, in, panels, bias, y, out, begin, end);
  if constexpr (R > 1) tiles_of<R - 1>(rows, x, x_stride, in, panels, bias, y, out, begin, end);
}

template <typename T, typename Out>
void gemm(const Gemm<T, Out>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  const int64_t rows = row_end - row_begin, count = (rows + kTileRows - 1) / kTileRows;
  const int64_t step = count > 1 ? 1 : panel_end - panel_begin;  // a panel stays in the cache while its tiles pass
  for (int64_t p = panel_begin; p < panel_end; p += step) {
    for (int64_t t = 0; t < count; ++t) {  // tiles of nearly equal height
      const int64_t from = row_begin + rows * t / count, to = row_begin + rows * (t + 1) / count;
      tiles_of<kTileRows>(to - from, call.x + from * call.x_stride, call.x_stride, call.in, call.panels, call.bias,
                          call.y + from * call.out, call.out, p, p + step);
    }
  }
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
