// Causal attention over paged KV with an online softmax (Milakov and Gimelshein, arXiv 1805.02867), page by page in
// the order of positions. A row's result depends on its position and its keys alone: not on the chunk it came in.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

constexpr int64_t kPage = 16;  // tokens of a page

// The rows of queries that see a page, and its keys and values: in floats, or as they lie in the pool.
template <typename K>
struct Page {
  const float* q;             // [rows, width], as load2 reads
  const K *keys, *values;     // [16, stride]
  int64_t stride, width;
  float *acc, *top, *mass;    // [rows, width], [rows], [rows]: weighted sums, greatest score and sum of weights so far
  const Bf16 *pairs_q, *pairs_keys;  // queries unscaled and keys as they lie, both dense; or null
  float scale;
};

#if defined(__AVX512BF16__)
// As `scores`, by products of pairs.
template <int R, typename K>
TENANTRY_INLINE void scores_of_pairs(const Page<K>& page, int64_t row, float (*weight)[kPage]) {
  constexpr int kKeys = 4;
  const Bf16* q = page.pairs_q + row * page.width;
  V dots[R][W];
  for (int k = 0; k < W; k += kKeys) {
    V acc[R][kKeys] = {};
    for (int64_t c = 0; c < page.width; c += P) {
      U x[R];
      for (int r = 0; r < R; ++r) x[r] = loadu(q + r * page.width + c);
      for (int n = 0; n < kKeys; ++n) {
        const U key = loadu(page.pairs_keys + (k + n) * page.width + c);
        for (int r = 0; r < R; ++r) acc[r][n] = add_pairs(acc[r][n], x[r], key);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < kKeys; ++n) dots[r][k + n] = acc[r][n];
  }
  for (int r = 0; r < R; ++r) store1(weight[r], sums(dots[r]) * page.scale);
}
#endif

// R rows of queries times 16 keys: each score is one chain over the vectors of a row, then one tree over its lanes.
template <int R, typename K>
TENANTRY_INLINE void scores(const Page<K>& page, int64_t row, float (*weight)[kPage]) {
  constexpr int kKeys = 4;
  const float* q = page.q + row * page.width;
  for (int64_t t = 0; t < kPage; t += W) {
    V dots[R][W];
    for (int k = 0; k < W; k += kKeys) {
      V acc[R][kKeys] = {};
      const K* keys = page.keys + (t + k) * page.stride;
      const auto add = [&](int64_t c, auto half) {
        V x[R];
        for (int r = 0; r < R; ++r) x[r] = load1(q + r * page.width + c + half * W);
        for (int n = 0; n < kKeys; ++n) {
          const V key = load_half<half>(keys + n * page.stride + c);
          for (int r = 0; r < R; ++r) acc[r][n] += x[r] * key;
        }
      };
      for (int64_t c = 0; c < page.width; c += P) {
        add(c, std::integral_constant<int, 0>{});
        add(c, std::integral_constant<int, 1>{});
      }
      for (int r = 0; r < R; ++r)
        for (int n = 0; n < kKeys; ++n) dots[r][k + n] = acc[r][n];
    }
    for (int r = 0; r < R; ++r) store1(weight[r] + t, sums(dots[r]));
  }
}

// Makes weights of a row's scores, of which `seen` count; returns by how much what was summed up before shrinks.
TENANTRY_INLINE float soften(float* weight, int64_t seen, float& top, float& mass) {
  for (int64_t t = seen; t < kPage; ++t) weight[t] = -std::numeric_limits<float>::infinity();
  V most = load1(weight);
  for (int64_t t = W; t < kPage; t += W) most = greater(most, load1(weight + t));
  const float greatest = std::max(top, greatest_of(most));
  V total = {};
  for (int64_t t = 0; t < kPage; t += W) {
    const V e = exp(load1(weight + t) - greatest);
    store1(weight + t, e);
    total += e;
  }
  const float shrunk = top == greatest ? 1.0f : exp(splat(top - greatest))[0];  // 0 for the first page
  mass = mass * shrunk + sum(total);
  top = greatest;
  return shrunk;
}

// acc * shrunk + the weighted sum of `seen` rows of values, for R rows, N pairs of vectors wide.
template <int R, int N, typename K>
TENANTRY_INLINE void add_values(const Page<K>& page, int64_t row, int64_t column, const float* shrunk,
                                const float (*weight)[kPage], int64_t seen) {
  float* acc = page.acc + row * page.width + column;
  V sums[R][2 * N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2 * N; ++n) sums[r][n] = load1(acc + r * page.width + n * W) * shrunk[r];
  for (int64_t t = 0; t < seen; ++t) {
    const K* values = page.values + t * page.stride + column;
    for (int n = 0; n < N; ++n) {
      V value[2];
      load2(values + n * P, value[0], value[1]);
      for (int r = 0; r < R; ++r) {
        sums[r][2 * n] += weight[r][t] * value[0];
        sums[r][2 * n + 1] += weight[r][t] * value[1];
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < 2 * N; ++n) store1(acc + r * page.width + n * W, sums[r][n]);
}

// R rows of queries that see the same `seen` keys of the page.
template <int R, typename K>
void see(const Page<K>& page, int64_t row, int64_t seen) {
  alignas(64) float weight[R][kPage];
  float shrunk[R];
#if defined(__AVX512BF16__)
  if (page.pairs_q) scores_of_pairs<R>(page, row, weight);
  else
#endif
    scores<R>(page, row, weight);
  for (int r = 0; r < R; ++r) shrunk[r] = soften(weight[r], seen, page.top[row + r], page.mass[row + r]);
  constexpr int N = R == 1 ? 4 : 2;
  int64_t c = 0;
  for (; c + N * P <= page.width; c += N * P) add_values<R, N>(page, row, c, shrunk, weight, seen);
  for (; c < page.width; c += P) add_values<R, 1>(page, row, c, shrunk, weight, seen);
}

constexpr int64_t kTogether = 3;  // rows of queries that share what is read of a page

// All rows; `seen(row)` = keys of the page that a row sees.
template <typename K, typename Seen>
void see_all(const Page<K>& page, int64_t rows, const Seen& seen) {
  for (int64_t i = 0; i < rows;) {
    if (i + kTogether <= rows && seen(i) > 0 && seen(i) == seen(i + kTogether - 1)) {
      see<kTogether>(page, i, seen(i));
      i += kTogether;
    } else {
      if (seen(i) > 0) see<1>(page, i, seen(i));
      ++i;
    }
  }
}

template <typename T>
void attend(const Attention<T>& call, const AttentionItem& item, std::vector<float>& scratch) {
  const int64_t groups = call.heads / call.kv_heads;
  const int64_t rows = item.rows * groups;
  const int64_t chunks = pairs(call.head_dim), width = chunks * P;
  const float lowest = -std::numeric_limits<float>::infinity();

  scratch.resize(static_cast<size_t>(2 * rows * width + 2 * kPage * width + 2 * rows));
  float* q = scratch.data();           // [rows, width], scaled, permuted as load2 reads
  float* acc = q + rows * width;       // [rows, width]
  float* keys = acc + rows * width;    // [16, width]
  float* values = keys + kPage * width;
  float* top = values + kPage * width; // [rows]: greatest score so far
  float* mass = top + rows;            // [rows]: sum of weights

  Bf16* pairs_q = nullptr;  // where keys can be multiplied as they lie
  if constexpr (kPairs && std::is_same_v<T, Bf16>)
    if (width == call.head_dim) pairs_q = reinterpret_cast<Bf16*>(q);

  for (int64_t i = 0; i < rows; ++i) {
    const T* from = call.q + (item.row + i / groups) * call.q_stride +
                    (item.kv_head * groups + i % groups) * call.head_dim;
    for (int64_t c = 0; c < chunks; ++c) {
      store2(acc + i * width + c * P, V{}, V{});
      if (pairs_q) continue;
      V a, b;
      load2(from + c * P, call.head_dim - c * P, a, b);
      store2(q + i * width + c * P, a * call.scale, b * call.scale);
    }
    if (pairs_q) std::memcpy(pairs_q + i * width, from, static_cast<size_t>(width) * sizeof(Bf16));
    top[i] = lowest;
    mass[i] = 0.0f;
  }

  const int64_t last = item.position + item.rows - 1;  // no row sees beyond it, nor is anything read there
  const int32_t* pages = call.page_tables + item.sequence * call.table_stride;
  for (int64_t begin = 0; begin <= last; begin += kPage) {
    const T* page = call.pool + static_cast<int64_t>(pages[begin / kPage]) * call.page_stride +
                    item.kv_head * kPage * call.head_dim;
    const int64_t present = std::min(kPage, last + 1 - begin);
    const auto seen = [&](int64_t row) { return std::min(present, item.position + row / groups + 1 - begin); };
    const Bf16* pairs_keys = pairs_q ? reinterpret_cast<const Bf16*>(page) : nullptr;
    if (rows <= kTogether && width == call.head_dim) {  // each is read once: from where it lies
      see_all(Page<T>{q, page, page + call.v_offset, width, width, acc, top, mass, pairs_q, pairs_keys, call.scale},
              rows, seen);
      continue;
    }
    if (!pairs_q) std::fill(keys + present * width, keys + kPage * width, 0.0f);
    for (int64_t t = 0; t < present; ++t) {
      for (int64_t c = 0; c < chunks; ++c) {
        V a, b;
        if (!pairs_q) {
          load2(page + t * call.head_dim + c * P, call.head_dim - c * P, a, b);
          store2(keys + t * width + c * P, a, b);
        }
        load2(page + call.v_offset + t * call.head_dim + c * P, call.head_dim - c * P, a, b);
        store2(values + t * width + c * P, a, b);
      }
    }
    see_all(Page<float>{q, keys, values, width, width, acc, top, mass, pairs_q, pairs_keys, call.scale}, rows, seen);
  }

  for (int64_t i = 0; i < rows; ++i) {
    T* to = call.out + ((item.row + i / groups) * call.heads + item.kv_head * groups + i % groups) * call.head_dim;
    const float norm = 1.0f / mass[i];
    for (int64_t c = 0; c < chunks; ++c) {
      V a, b;
      load2(acc + i * width + c * P, a, b);
      store2(to + c * P, call.head_dim - c * P, a * norm, b * norm);
    }
  }
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
