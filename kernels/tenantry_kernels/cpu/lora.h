// LoRA on rows that lie anywhere in the pool: shrink (dot products with A's rows), expand (sum of B's rows).
//
// Every value is one chain in a fixed order: over vectors in shrink, over ranks in expand. Tiles of tokens and ranks only
// decide how often a row is read, so a row's result has the same bits in any batch.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

// R ranks times N tokens, one sum in registers for each: eight sums hide the latency of the multiply-adds.
template <int R, int N, typename T>
TENANTRY_INLINE void shrink_tile(const Lora<T>& call, const LoraTask& task, int64_t token, int64_t rank) {
  const T* rows[R];
  const T* xs[N];
  for (int r = 0; r < R; ++r) rows[r] = call.pool + task.a_rows[rank + r];
  for (int n = 0; n < N; ++n) xs[n] = call.x + (task.token + token + n) * call.x_stride;
  V acc[R][N] = {};
  const auto step = [&](int64_t at, auto load) {
    Piece<T> x[N];
    for (int n = 0; n < N; ++n) x[n] = load(xs[n] + at);
    for (int r = 0; r < R; ++r) {
      const Piece<T> a = load(rows[r] + at);
      for (int n = 0; n < N; ++n) acc[r][n] = add_products(acc[r][n], x[n], a);
    }
  };
  int64_t at = 0;
  for (; at + P <= call.in; at += P) step(at, [](const T* p) { return Piece<T>::load(p); });
  if (const int64_t count = call.in - at; count > 0) step(at, [count](const T* p) { return piece(p, count); });
  float* hidden = call.hidden + (task.token + token) * call.hidden_stride + task.hidden + rank;
  if constexpr (R * N == W) {  // all at once: the same additions as one by one
    V flat[W];
    for (int n = 0; n < N; ++n)
      for (int r = 0; r < R; ++r) flat[n * R + r] = acc[r][n];
    float all[W];
    store1(all, task.scale * sums(flat));
    for (int n = 0; n < N; ++n) std::memcpy(hidden + n * call.hidden_stride, all + n * R, R * sizeof(float));
  } else {
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) hidden[n * call.hidden_stride + r] = task.scale * sum(acc[r][n]);
  }
}

template <int N, typename T>
void shrink_tokens(const Lora<T>& call, const LoraItem& item, int64_t token) {
  constexpr int R = N == 1 ? 8 : 4;
  int64_t rank = item.begin;
  for (; rank + R <= item.end; rank += R) shrink_tile<R, N>(call, *item.task, token, rank);
  for (; rank < item.end; ++rank) shrink_tile<1, N>(call, *item.task, token, rank);
}

template <typename T>
void shrink(const Lora<T>& call, const LoraItem& item) {
  int64_t n = 0;
  for (; n + 2 <= item.tokens; n += 2) shrink_tokens<2>(call, item, item.token + n);
  for (; n < item.tokens; ++n) shrink_tokens<1>(call, item, item.token + n);
}

// N tokens times C pairs of columns from `column` on, the sums over all ranks in registers; `add(n, c, low, high)` takes
// each pair of sums. `load(b, c, low, high)` reads the pair c of a row.
template <int N, int C, typename T, typename Load, typename Add>
TENANTRY_INLINE void expand_tile(const Lora<T>& call, const LoraTask& task, int64_t token, int64_t column,
                                 const Load& load, const Add& add) {
  V acc[N][C][2] = {};
  const float* hidden = call.hidden + (task.token + token) * call.hidden_stride + task.hidden;
  for (int64_t rank = 0; rank < task.rank; ++rank) {
    const T* b = call.pool + task.b_rows[rank] + column;
    V w[C][2];
    for (int c = 0; c < C; ++c) load(b + c * P, w[c][0], w[c][1]);
    for (int n = 0; n < N; ++n) {
      const V value = splat(hidden[n * call.hidden_stride + rank]);
      for (int c = 0; c < C; ++c) {
        acc[n][c][0] += value * w[c][0];
        acc[n][c][1] += value * w[c][1];
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) add(token + n, column + c * P, acc[n][c][0], acc[n][c][1]);
}

// Calls `add(token, column, low, high)` for every pair of columns in [begin, end) of the module and all of `tokens`.
template <typename T, typename Add>
TENANTRY_INLINE void expand_block(const Lora<T>& call, const LoraTask& task, int64_t token, int64_t tokens,
                                  int64_t begin, int64_t end, const Add& add) {
  const auto whole = [](const T* b, V& low, V& high) { load2(b, low, high); };
  const auto run = [&](auto n_const, auto c_const) {
    constexpr int N = decltype(n_const)::value, C = decltype(c_const)::value;
    for (; tokens >= N; token += N, tokens -= N) {
      int64_t column = begin;
      for (; column + C * P <= end; column += C * P) expand_tile<N, C>(call, task, token, column, whole, add);
      if constexpr (C > 2)
        for (; column + 2 * P <= end; column += 2 * P) expand_tile<N, 2>(call, task, token, column, whole, add);
      if constexpr (C > 1)
        for (; column + P <= end; column += P) expand_tile<N, 1>(call, task, token, column, whole, add);
      if (const int64_t count = end - column; count > 0)
        expand_tile<N, 1>(call, task, token, column,
                          [count](const T* b, V& low, V& high) { load2(b, count, low, high); }, add);
    }
  };
  run(std::integral_constant<int, 6>{}, std::integral_constant<int, 1>{});
  run(std::integral_constant<int, 2>{}, std::integral_constant<int, 2>{});
  run(std::integral_constant<int, 1>{}, std::integral_constant<int, 4>{});
}

template <typename T>
void expand(const Lora<T>& call, const LoraItem& item) {
  const LoraTask& task = *item.task;
  expand_block(call, task, item.token, item.tokens, item.begin, item.end, [&](int64_t token, int64_t column, V low, V high) {
    T* to = call.out + (task.token + token) * call.out_stride + task.column + column;
    V y[2];
    load2(to, item.end - column, y[0], y[1]);
    store2(to, item.end - column, y[0] + low, y[1] + high);
  });
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
