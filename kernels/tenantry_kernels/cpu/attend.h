// Causal attention over paged KV with an online softmax (Milakov and Gimelshein, arXiv 1805.02867), page by page in
// the order of positions. A row's result depends on its position and its keys alone: not on the chunk it came in.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

constexpr int64_t kPage = 16;  // tokens of a page

// acc * shrunk + the weighted sum of `seen` rows of values, N vectors wide.
template <int N>
TENANTRY_INLINE void add_values(float* acc, float shrunk, const float* weight, const float* values, int64_t width,
                                int64_t seen) {
  V sums[N];
  for (int n = 0; n < N; ++n) sums[n] = load1(acc + n * W) * shrunk;
  for (int64_t t = 0; t < seen; ++t)
    for (int n = 0; n < N; ++n) sums[n] += weight[t] * load1(values + t * width + n * W);
  for (int n = 0; n < N; ++n) store1(acc + n * W, sums[n]);
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

  for (int64_t i = 0; i < rows; ++i) {
    const T* from = call.q + (item.row + i / groups) * call.q_stride +
                    (item.kv_head * groups + i % groups) * call.head_dim;
    for (int64_t c = 0; c < chunks; ++c) {
      V a, b;
      load2(from + c * P, call.head_dim - c * P, a, b);
      store2(q + i * width + c * P, a * call.scale, b * call.scale);
      store2(acc + i * width + c * P, V{}, V{});
    }
    top[i] = lowest;
    mass[i] = 0.0f;
  }

  const int64_t last = item.position + item.rows - 1;  // no row sees beyond it, nor is anything read there
  const int32_t* pages = call.page_tables + item.sequence * call.table_stride;
  for (int64_t begin = 0; begin <= last; begin += kPage) {
    const T* page = call.pool + static_cast<int64_t>(pages[begin / kPage]) * call.page_stride +
                    item.kv_head * kPage * call.head_dim;
    const int64_t present = std::min(kPage, last + 1 - begin);
    std::fill(keys + present * width, keys + kPage * width, 0.0f);
    for (int64_t t = 0; t < present; ++t) {
      for (int64_t c = 0; c < chunks; ++c) {
        V a, b;
        load2(page + t * call.head_dim + c * P, call.head_dim - c * P, a, b);
        store2(keys + t * width + c * P, a, b);
        load2(page + call.v_offset + t * call.head_dim + c * P, call.head_dim - c * P, a, b);
        store2(values + t * width + c * P, a, b);
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t seen = std::min(present, item.position + i / groups + 1 - begin);
      if (seen <= 0) continue;
      alignas(64) float weight[kPage];
      float greatest = top[i];
      for (int64_t t = 0; t < kPage; t += W) {
        V dots[W] = {};
        for (int64_t c = 0; c < width; c += W) {
          const V x = load1(q + i * width + c);
          for (int k = 0; k < W; ++k) dots[k] += x * load1(keys + (t + k) * width + c);
        }
        store1(weight + t, sums(dots));
      }
      for (int64_t t = 0; t < seen; ++t) greatest = std::max(greatest, weight[t]);
      for (int64_t t = seen; t < kPage; ++t) weight[t] = lowest;
      V total = {};
      for (int64_t t = 0; t < kPage; t += W) {
        const V e = exp(load1(weight + t) - greatest);
        store1(weight + t, e);
        total += e;
      }
      const float shrunk = top[i] == greatest ? 1.0f : exp(splat(top[i] - greatest))[0];  // 0 for the first page
      mass[i] = mass[i] * shrunk + sum(total);
      top[i] = greatest;
      int64_t c = 0;
      for (; c + 4 * P <= width; c += 4 * P) add_values<8>(acc + i * width + c, shrunk, weight, values + c, width, seen);
      for (; c < width; c += P) add_values<2>(acc + i * width + c, shrunk, weight, values + c, width, seen);
    }
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
