// What the bindings share: dtypes, work split over threads by cost, products cut into blocks.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>  // at::get_num_threads

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "table.h"
#include "team.h"

namespace tenantry {

inline const Table& table() {
#if defined(TENANTRY_GENERIC_ONLY)
  return table_generic();
#else
  static const Table& chosen = []() -> const Table& {
    const char* wanted = std::getenv("TENANTRY_CPU_ISA");  // to test the others on one machine
    const std::string name = wanted ? wanted : "";
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
    if (pairs && (name.empty() || name == "avx512bf16")) return table_avx512bf16();
    if (avx512 && (name.empty() || name == "avx512")) return table_avx512();
    if (avx2 && (name.empty() || name == "avx2")) return table_avx2();
    return table_generic();
  }();
  return chosen;
#endif
}

template <typename T>
const RowKernels<T>& kernels() {
  if constexpr (std::is_same_v<T, float>) return table().f32;
  else return table().bf16;
}

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls f<float> or f<Bf16> by the tensor's dtype.
template <typename F>
void by_dtype(const at::Tensor& tensor, F&& f) {
  if (tensor.scalar_type() == at::kFloat) f(float{});
  else if (tensor.scalar_type() == at::kBFloat16) f(Bf16{});
  else TORCH_CHECK(false, "dtype must be float32 or bfloat16, not ", tensor.scalar_type());
}

inline std::vector<float>& scratch() {
  thread_local std::vector<float> buffer;
  return buffer;
}

// Calls f(begin, end) over parts of [0, count), each worth `cost` per element, in multiply-adds or bytes: few parts
// where threads would cost more than they bring, else some per thread, so that a late thread takes fewer.
template <typename F>
void share(int64_t count, int64_t cost, const F& f) {
  if (count <= 0) return;
  constexpr int64_t kPart = 100'000;
  const int64_t threads = at::get_num_threads();
  const int64_t parts = threads < 2 ? 1 : std::clamp<int64_t>(count * cost / kPart, 1, std::min(count, 8 * threads));
  Team::get().run(parts, threads, [&](int64_t part) { f(count * part / parts, count * (part + 1) / parts); });
}

// The same over items of unequal cost: each part is a run of neighbours of nearly equal total.
template <typename Item, typename F>
void share(const std::vector<Item>& items, const std::vector<int64_t>& cost, const F& f) {
  thread_local std::vector<int64_t> sums;
  sums.assign(cost.size() + 1, 0);
  std::vector<int64_t>& before = sums;  // not the thread's own name: other threads read this one
  for (size_t i = 0; i < cost.size(); ++i) before[i + 1] = before[i] + cost[i];
  const auto at = [&](int64_t work) { return std::lower_bound(before.begin(), before.end() - 1, work) - before.begin(); };
  const int64_t total = std::max<int64_t>(before.back(), 1);
  constexpr int64_t kSteps = 1 << 12;  // of the total: borders of parts
  share(kSteps, total / kSteps + 1, [&](int64_t begin, int64_t end) {
    const auto last = end == kSteps ? static_cast<int64_t>(items.size()) : at(total * end / kSteps);
    for (auto i = begin == 0 ? 0 : at(total * begin / kSteps); i < last; ++i) f(items[static_cast<size_t>(i)]);
  });
}

inline void check_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == panels.scalar_type(),
              "`x` must be [tokens, in] with contiguous rows and the weight's dtype");
  TORCH_CHECK(panels.size(1) == x.size(1) && panels.size(2) == table().panel && panels.size(0) * table().panel >= out,
              "`x` must have ", panels.size(1), " columns, not ", x.size(1));
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == out && bias->is_contiguous()),
              "`bias` must be float32 [out]");
}

// x in float: rows are read many times, so bf16 is widened once, unless it is multiplied as it is.
inline at::Tensor widened(const at::Tensor& x) {
  if (x.scalar_type() == at::kFloat || (table().pairs && x.size(1) % 2 == 0)) return x;
  at::Tensor floats = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
  share(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      kernels<Bf16>().widen(data<const Bf16>(x) + r * x.stride(0), data<float>(floats) + r * x.size(1), x.size(1));
  });
  return floats;
}

// How a product is cut into blocks of rows and panels, of panels as many for each thread.
struct Blocks {
  static constexpr int64_t kRows = 96;  // that stay in the second-level cache while panels pass

  int64_t rows, panels, threads, tall, wide;

  // A block of few rows takes many panels: within it each is fetched while the one before is computed.
  Blocks(int64_t rows, int64_t in, int64_t panels, int64_t out)
      : rows(rows), panels(panels), threads(rows * in * out < 100'000 ? 1 : at::get_num_threads()),
        tall((rows + kRows - 1) / kRows), wide((panels + group(rows) - 1) / group(rows)) {
    wide = std::min(panels, (wide + threads - 1) / threads * threads);
  }

  static int64_t group(int64_t rows) { return rows > 48 ? 4 : 16; }

  int64_t count() const { return tall * wide; }

  // Calls f(row_begin, row_end, panel_begin, panel_end) for one of them.
  template <typename F>
  void block(int64_t number, const F& f) const {
    const int64_t row = number / wide, p = number % wide;
    f(rows * row / tall, rows * (row + 1) / tall, panels * p / wide, panels * (p + 1) / wide);
  }
};

// `floats` is what `widened` made of x.
template <typename T, typename Out>
Gemm<T, Out> product(const at::Tensor& x, const at::Tensor& floats, const at::Tensor& panels, int64_t out,
                     const std::optional<at::Tensor>& bias, at::Tensor& y) {
  const bool wide = floats.scalar_type() == at::kFloat;
  return {wide ? data<const float>(floats) : nullptr, floats.stride(0), data<const T>(x), x.stride(0), x.size(0),
          x.size(1), out, data<const T>(panels), bias ? data<const float>(*bias) : nullptr, data<Out>(y), out};
}

}  // namespace tenantry
