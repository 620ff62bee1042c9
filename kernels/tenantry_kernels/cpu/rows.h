// Kernels that take one token at a time: RMSNorm, SwiGLU's gate, rotary embedding with the KV write.
#pragma once

#include <cmath>
#include <cstring>

#include "vec.h"

namespace tenantry {
namespace TENANTRY_ISA {

template <typename T>
void rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight, T* y, int64_t width,
              float eps, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* from = x + row * x_stride;
    V squares = {};
    for (int64_t at = 0; at < width; at += P) {
      V a, b;
      load2(from + at, width - at, a, b);
      if (residual) {
        T* kept = residual + row * residual_stride + at;
        V c, d;
        load2(kept, width - at, c, d);
        store2(kept, width - at, a + c, b + d);
        load2(kept, width - at, a, b);  // what was stored is what is normalised
      }
      squares += a * a + b * b;
    }
    if (residual) from = residual + row * residual_stride;
    const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
    for (int64_t at = 0; at < width; at += P) {
      V a, b, c, d;
      load2(from + at, width - at, a, b);
      load2(weight + at, width - at, c, d);
      store2(y + row * width + at, width - at, a * scale * c, b * scale * d);
    }
  }
}

// Heads of q, then of k, each normalised by itself, in place.
template <typename T>
void qk_norm(T* qkv, const T* q_weight, const T* k_weight, float eps, int64_t heads, int64_t kv_heads,
             int64_t head_dim, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* q = qkv + row * (heads + 2 * kv_heads) * head_dim;
    T* k = q + heads * head_dim;
    rms_norm<T>(q, head_dim, nullptr, 0, q_weight, q, head_dim, eps, 0, heads);
    rms_norm<T>(k, head_dim, nullptr, 0, k_weight, k, head_dim, eps, 0, kv_heads);
  }
}

template <typename T>
void silu_and_mul(const T* gate_up, T* y, int64_t width, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = gate_up + row * 2 * width;
    for (int64_t at = 0; at < width; at += P) {
      V a, b, c, d;
      load2(gate + at, width - at, a, b);
      load2(gate + width + at, width - at, c, d);
      store2(y + row * width + at, width - at, a / (1.0f + exp(-a)) * c, b / (1.0f + exp(-b)) * d);
    }
  }
}

template <typename T>
void rope_and_kv_write(T* qkv, const int64_t* positions, const float* table, T* pool, int64_t page_stride,
                       int64_t v_offset, const int64_t* slots, int64_t heads, int64_t kv_heads, int64_t head_dim,
                       int64_t begin, int64_t end) {
  constexpr int64_t kTokens = 16;  // of a page
  const int64_t half = head_dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    T* vectors = qkv + row * (heads + 2 * kv_heads) * head_dim;
    const float* cosine = table + positions[row] * head_dim;
    const float* sine = cosine + half;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
      T* first = vectors + h * head_dim;
      T* second = first + half;
      for (int64_t i = 0; i < half; ++i) {
        const float a = to_float(first[i]), b = to_float(second[i]);
        from_float(a * cosine[i] - b * sine[i], first[i]);
        from_float(b * cosine[i] + a * sine[i], second[i]);
      }
    }
    if (slots[row] < 0) continue;
    T* page = pool + slots[row] / kTokens * page_stride + slots[row] % kTokens * head_dim;
    const T* k = vectors + heads * head_dim;
    const T* v = k + kv_heads * head_dim;
    const size_t bytes = static_cast<size_t>(head_dim) * sizeof(T);
    for (int64_t h = 0; h < kv_heads; ++h) {
      std::memcpy(page + h * kTokens * head_dim, k + h * head_dim, bytes);
      std::memcpy(page + v_offset + h * kTokens * head_dim, v + h * head_dim, bytes);
    }
  }
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
