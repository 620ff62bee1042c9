// Linear layers: y = x W^T + b, every element one chain of multiply-adds over the inputs, in order. So a row's result
// has the same bits whatever rows are beside it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

template <typename T>
void widen(const T* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// Whether two inputs are multiplied by one instruction, which adds the products of the two one after the other.
template <typename T>
bool in_pairs_of(int64_t in) {
  return kPairs && std::is_same_v<T, Bf16> && in % 2 == 0;
}

// panels[p][k][*]: the P columns of panel p at input k. load2 gives of them what it gives of P neighbours in a row.
// In pairs, panels[p][k / 2][half][*][2]: of inputs k and k + 1 the even columns, then the odd ones, as load2 has them.
template <typename T>
void pack(const T* weight, int64_t out, int64_t in, T* panels, int64_t panel_begin, int64_t panel_end) {
  const bool pairs = in_pairs_of<T>(in);
  for (int64_t p = panel_begin; p < panel_end; ++p) {
    for (int j = 0; j < P; ++j) {
      const int64_t column = p * P + j, at = pairs ? j % 2 * P + j / 2 * 2 : j;
      T* to = panels + p * in * P + at;
      for (int64_t k = 0; k < in; ++k) {
        const T value = column < out ? weight[column * in + k] : T{};
        to[pairs ? k / 2 * 2 * P + k % 2 : k * P] = value;
      }
    }
  }
}

// Where a tile's sums go: into y, whose type may be wider than the weights'.
template <typename T, typename Out>
struct ToRows {
  const Gemm<T, Out>& call;

  TENANTRY_INLINE void operator()(int64_t row, int64_t column, V low, V high) const {
    const int64_t count = std::min<int64_t>(P, call.out - column);
    if (call.bias) {
      V bias[2];
      load2(call.bias + column, count, bias[0], bias[1]);
      in_pairs(static_cast<const T*>(nullptr), bias[0], bias[1]);
      low += bias[0];
      high += bias[1];
    }
    Out* y = call.y + row * call.y_stride + column;
    if (count == P) return store_pair(y, low, high, static_cast<const T*>(nullptr));
    Out whole[P];
    store_pair(whole, low, high, static_cast<const T*>(nullptr));
    std::memcpy(y, whole, static_cast<size_t>(count) * sizeof(Out));
  }
};

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

// R rows times N panels, all sums in registers; `put(row, column, low, high)` takes them in pairs, in load2's order.
// `ahead()` is called now and then: it may ask for memory.
template <int R, int N, typename T, typename Out, typename Put, typename Ahead>
TENANTRY_INLINE void tile(const Gemm<T, Out>& call, int64_t row, int64_t panel, const Put& put, Ahead& ahead) {
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
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) put(row + r, column + n * P, acc[r][n][0], acc[r][n][1]);
}

#if defined(__AVX512BF16__)
// The same for bf16 in pairs of inputs: neither rows nor weights are widened.
template <int R, int N, typename Out, typename Put, typename Ahead>
TENANTRY_INLINE void tile_of_pairs(const Gemm<Bf16, Out>& call, int64_t row, int64_t panel, const Put& put,
                                   Ahead& ahead) {
  const Bf16* x = call.pairs_x + row * call.pairs_stride;
  const Bf16* panels = call.panels + panel * call.in * P;
  const int64_t x_stride = call.pairs_stride, in = call.in, column = panel * P;
  V acc[R][N][2] = {};
  for (int64_t from = 0; from < in; from += kPause) {
    ahead();
    const int64_t to = std::min(in, from + kPause);
    for (int64_t k = from; k < to; k += 2) {
      U w[N][2];
      for (int n = 0; n < N; ++n)
        for (int half = 0; half < 2; ++half) w[n][half] = loadu(panels + (n * in + k) * P + half * P);
      for (int r = 0; r < R; ++r) {
        uint32_t pair;
        std::memcpy(&pair, x + r * x_stride + k, sizeof pair);
        const U value = U{} + pair;
        for (int n = 0; n < N; ++n)
          for (int half = 0; half < 2; ++half) acc[r][n][half] = add_pairs(acc[r][n][half], value, w[n][half]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) put(row + r, column + n * P, acc[r][n][0], acc[r][n][1]);
}
#endif

template <int R, int N, typename T, typename Out, typename Put, typename Ahead>
TENANTRY_INLINE void any_tile(const Gemm<T, Out>& call, int64_t row, int64_t panel, const Put& put, Ahead& ahead) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, Bf16>)
    if (in_pairs_of<T>(call.in)) return tile_of_pairs<R, N>(call, row, panel, put, ahead);
#endif
  tile<R, N>(call, row, panel, put, ahead);
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

template <int R, typename T, typename Out, typename Put, typename Ahead>
void tiles(const Gemm<T, Out>& call, int64_t row, int64_t begin, int64_t end, const Put& put, Ahead& ahead) {
  constexpr int N = panels_of<R, T>();
  int64_t p = begin;
  for (; p + N <= end; p += N) any_tile<R, N>(call, row, p, put, ahead);
  for (; p < end; ++p) any_tile<R, 1>(call, row, p, put, ahead);
}

template <int R, typename T, typename Out, typename Put, typename Ahead>
void tiles_of(const Gemm<T, Out>& call, int64_t rows, int64_t row, int64_t begin, int64_t end, const Put& put,
              Ahead& ahead) {
  if (rows == R) return tiles<R>(call, row, begin, end, put, ahead);
  if constexpr (R > 1) tiles_of<R - 1>(call, rows, row, begin, end, put, ahead);
}

// About how often `ahead` is called.
template <typename T, typename Out>
int64_t pauses_of(const Gemm<T, Out>& call, int64_t rows, int64_t panel_begin, int64_t panel_end) {
  const int64_t tall = (rows + kTileRows - 1) / kTileRows;
  return (panel_end - panel_begin) * tall * ((call.in + kPause - 1) / kPause);
}

template <typename T, typename Out, typename Put, typename Ahead>
void gemm_ahead(const Gemm<T, Out>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
                const Put& put, Ahead& ahead) {
  const int64_t rows = row_end - row_begin, count = (rows + kTileRows - 1) / kTileRows;
  const int64_t step = count > 1 ? 1 : panel_end - panel_begin;  // a panel stays in the cache while its tiles pass
  for (int64_t p = panel_begin; p < panel_end; p += step) {
    if (count > 1 && p + 1 < panel_end) {
      const int64_t panel = call.in * P;
      ahead.next(call.panels + (p + 1) * panel, panel * static_cast<int64_t>(sizeof(T)), pauses_of(call, rows, p, p + 1));
    }
    for (int64_t t = 0; t < count; ++t) {  // tiles of nearly equal height
      const int64_t from = row_begin + rows * t / count, to = row_begin + rows * (t + 1) / count;
      tiles_of<kTileRows>(call, to - from, from, p, p + step, put, ahead);
    }
  }
}

template <typename T, typename Out>
void gemm(const Gemm<T, Out>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
  NextPanel ahead;
  gemm_ahead(call, row_begin, row_end, panel_begin, panel_end, ToRows<T, Out>{call}, ahead);
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
