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

constexpr int64_t kPause = 64;  // inputs between two calls of `ahead`

// Asks for the panel that comes after the one that is computed. A panel is read from memory once and then from the cache,
// tile after tile: asked for all the while, it comes as fast as memory gives, and no tile waits for it.
class NextPanel {
 public:
  void next(const void* begin, int64_t bytes, int64_t pauses) {
    at_ = static_cast<const char*>(begin);
    end_ = at_ + bytes;
    each_ = (bytes / 64 + pauses - 1) / pauses * 64;
  }

  TENANTRY_INLINE void operator()() {
    for (const char* to = std::min(end_, at_ + each_); at_ < to; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t each_ = 0;
};

// R rows times N panels, all sums in registers. `ahead()` is called now and then: it may ask for memory.
template <int R, int N, typename T, typename Out, typename Ahead>
TENANTRY_INLINE void tile(const Gemm<T, Out>& call, int64_t row, int64_t panel, Ahead& ahead) {
  const float* x = call.x + row * call.x_stride;
  const T* panels = call.panels + panel * call.in * P;
  const int64_t x_stride = call.x_stride, in = call.in, column = panel * P;
  V acc[R][N][2] = {};
  for (int64_t from = 0; from < in; from += kPause) {
    ahead();
    const int64_t to = std::min(in, from + kPause);
    for (int64_t k = from; k < to; ++k) {
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
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < N; ++n) {
      const int64_t first = column + n * P;
      const int64_t count = std::min<int64_t>(P, call.out - first);
      Out* y = call.y + (row + r) * call.y_stride + first - call.y_column;
      if (count == P) {
        V low = acc[r][n][0], high = acc[r][n][1];
        if (call.bias) {
          low += load1(call.bias + first);
          high += load1(call.bias + first + W);
        }
        store_in_order(y, low);
        store_in_order(y + W, high);
        continue;
      }
      float sums[P];
      store1(sums, acc[r][n][0]);
      store1(sums + W, acc[r][n][1]);
      for (int64_t j = 0; j < count; ++j) from_float(call.bias ? sums[j] + call.bias[first + j] : sums[j], y[j]);
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

template <int R, typename T, typename Out, typename Ahead>
void tiles(const Gemm<T, Out>& call, int64_t row, int64_t begin, int64_t end, Ahead& ahead) {
  constexpr int N = panels_of<R, T>();
  int64_t p = begin;
  for (; p + N <= end; p += N) tile<R, N>(call, row, p, ahead);
  for (; p < end; ++p) tile<R, 1>(call, row, p, ahead);
}

template <int R, typename T, typename Out, typename Ahead>
void tiles_of(const Gemm<T, Out>& call, int64_t rows, int64_t row, int64_t begin, int64_t end, Ahead& ahead) {
  if (rows == R) return tiles<R>(call, row, begin, end, ahead);
  if constexpr (R > 1) tiles_of<R - 1>(call, rows, row, begin, end, ahead);
}

// About how often `ahead` is called.
template <typename T, typename Out>
int64_t pauses_of(const Gemm<T, Out>& call, int64_t rows, int64_t panel_begin, int64_t panel_end) {
  const int64_t tall = (rows + kTileRows - 1) / kTileRows;
  return (panel_end - panel_begin) * tall * ((call.in + kPause - 1) / kPause);
}

template <typename T, typename Out, typename Ahead>
void gemm_ahead(const Gemm<T, Out>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
                Ahead& ahead) {
  const int64_t rows = row_end - row_begin, count = (rows + kTileRows - 1) / kTileRows;
  const int64_t step = count > 1 ? 1 : panel_end - panel_begin;  // a panel stays in the cache while its tiles pass
  for (int64_t p = panel_begin; p < panel_end; p += step) {
    if (count > 1 && p + 1 < panel_end) {
      const int64_t panel = call.in * P;
      ahead.next(call.panels + (p + 1) * panel, panel * static_cast<int64_t>(sizeof(T)), pauses_of(call, rows, p, p + 1));
    }
    for (int64_t t = 0; t < count; ++t) {  // tiles of nearly equal height
      const int64_t from = row_begin + rows * t / count, to = row_begin + rows * (t + 1) / count;
      tiles_of<kTileRows>(call, to - from, from, p, p + step, ahead);
    }
  }
}

template <typename T, typename Out>
void gemm(const Gemm<T, Out>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  NextPanel ahead;
  gemm_ahead(call, row_begin, row_end, panel_begin, panel_end, ahead);
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
