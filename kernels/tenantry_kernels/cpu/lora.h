// LoRA on rows that lie anywhere in the pool: shrink (dot products with A's rows), expand (sum of B's rows).
//
// Every value is one chain in a fixed order: over pairs of vectors in shrink, over ranks in expand. Tiles of tokens
// only decide how often a row is read.
#pragma once

#include <algorithm>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

template <int R, int N, typename T>
TENANTRY_INLINE void shrink_tile(const Lora<T>& call, const LoraTask& task, int64_t token, int64_t rank) {
  const T* rows[R];
  const T* xs[N];
  for (int r = 0; r < R; ++r) rows[r] = call.pool + task.a_rows[rank + r];
  for (int n = 0; n < N; ++n) xs[n] = call.x + (task.token + token + n) * call.x_stride;
  V acc[R][N][2] = {};
  const auto step = [&](int64_t at, auto load) {
    V x[N][2];
    for (int n = 0; n < N; ++n) load(xs[n] + at, x[n][0], x[n][1]);
    for (int r = 0; r < R; ++r) {
      V a[2];
      load(rows[r] + at, a[0], a[1]);
      for (int n = 0; n < N; ++n) {
        acc[r][n][0] += x[n][0] * a[0];
        acc[r][n][1] += x[n][1] * a[1];
      }
    }
  };
  int64_t at = 0;
  for (; at + P <= call.in; at += P) step(at, [](const T* p, V& a, V& b) { load2(p, a, b); });
  if (at < call.in) {
    const int64_t count = call.in - at;
    step(at, [count](const T* p, V& a, V& b) { load2(p, count, a, b); });
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      call.hidden[(task.token + token + n) * call.hidden_stride + task.hidden + rank + r] =
          task.scale * sum(acc[r][n][0] + acc[r][n][1]);
}

template <int N, typename T>
void shrink_tokens(const Lora<T>& call, const LoraItem& item, int64_t token) {
  constexpr int R = N == 1 ? 4 : 2;
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

// N tokens times C pairs of columns, the sums over all ranks in registers.
template <int N, int C, typename T>
TENANTRY_INLINE void expand_tile(const Lora<T>& call, const LoraTask& task, int64_t token, int64_t column,
                                 int64_t end) {
  V acc[N][C][2] = {};
  const float* hidden = call.hidden + (task.token + token) * call.hidden_stride + task.hidden;
  const bool whole = column + C * P <= end;
  for (int64_t rank = 0; rank < task.rank; ++rank) {
    const T* b = call.pool + task.b_rows[rank] + column;
    V value[N];
    for (int n = 0; n < N; ++n) value[n] = splat(hidden[n * call.hidden_stride + rank]);
    for (int c = 0; c < C; ++c) {
      V w[2];
      if (whole) load2(b + c * P, w[0], w[1]);
      else load2(b + c * P, std::max<int64_t>(0, end - column - c * P), w[0], w[1]);
      for (int n = 0; n < N; ++n) {
        acc[n][c][0] += value[n] * w[0];
        acc[n][c][1] += value[n] * w[1];
      }
    }
  }
  for (int n = 0; n < N; ++n) {
    T* to = call.out + (task.token + token + n) * call.out_stride + task.column + column;
    for (int c = 0; c < C; ++c) {
      const int64_t count = end - column - c * P;
      if (count <= 0) break;
      V y[2];
      load2(to + c * P, count, y[0], y[1]);
      store2(to + c * P, count, y[0] + acc[n][c][0], y[1] + acc[n][c][1]);
    }
  }
}

template <int N, typename T>
void expand_tokens(const Lora<T>& call, const LoraItem& item, int64_t token) {
  constexpr int C = N == 1 ? 4 : 2;
  for (int64_t column = item.begin; column < item.end; column += C * P)
    expand_tile<N, C>(call, *item.task, token, column, item.end);
}

template <typename T>
void expand(const Lora<T>& call, const LoraItem& item) {
  int64_t n = 0;
  for (; n + 2 <= item.tokens; n += 2) expand_tokens<2>(call, item, item.token + n);
  for (; n < item.tokens; ++n) expand_tokens<1>(call, item, item.token + n);
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
