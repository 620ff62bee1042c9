// Bindings: checks of what could write out of bounds, then work split over threads by cost.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>  // at::get_num_threads
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "table.h"
#include "team.h"

namespace tenantry {
namespace {

const Table& table() {
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

std::vector<float>& scratch() {
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

std::string isa() { return table().name; }

at::Tensor pack(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "`weight` must be [out, in] and contiguous");
  const int64_t out = weight.size(0), in = weight.size(1), count = (out + table().panel - 1) / table().panel;
  at::Tensor panels = at::empty({count, in, table().panel}, weight.options());
  by_dtype(weight, [&](auto t) {
    using T = decltype(t);
    share(count, in * table().panel, [&](int64_t begin, int64_t end) {
      kernels<T>().pack(data<const T>(weight), out, in, data<T>(panels), begin, end);
    });
  });
  return panels;
}

void check_linear(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && x.scalar_type() == panels.scalar_type(),
              "`x` must be [tokens, in] with contiguous rows and the weight's dtype");
  TORCH_CHECK(panels.size(1) == x.size(1) && panels.size(2) == table().panel && panels.size(0) * table().panel >= out,
              "`x` must have ", panels.size(1), " columns, not ", x.size(1));
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == out && bias->is_contiguous()),
              "`bias` must be float32 [out]");
}

// x in float: rows are read many times, so bf16 is widened once.
at::Tensor widened(const at::Tensor& x) {
  if (x.scalar_type() == at::kFloat) return x;
  at::Tensor floats = at::empty({x.size(0), x.size(1)}, x.options().dtype(at::kFloat));
  share(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      kernels<Bf16>().widen(data<const Bf16>(x) + r * x.stride(0), data<float>(floats) + r * x.size(1), x.size(1));
  });
  return floats;
}

// Calls f(row_begin, row_end, panel_begin, panel_end) for all blocks of a product; `group` = panels of one block.
template <typename F>
void blocks_of(int64_t rows, int64_t in, int64_t out, int64_t count, int64_t group, const F& f) {
  constexpr int64_t kRows = 96;  // that stay in the second-level cache while panels pass
  const int64_t blocks = (rows + kRows - 1) / kRows, groups = (count + group - 1) / group;
  const int64_t threads = rows * in * out < 100'000 ? 1 : at::get_num_threads();
  Team::get().run(blocks * groups, threads, [&](int64_t item) {
    const int64_t block = item / groups, p = item % groups * group;
    f(rows * block / blocks, rows * (block + 1) / blocks, p, std::min(count, p + group));
  });
}

template <typename T, typename Out>
Gemm<T, Out> product(const at::Tensor& floats, const at::Tensor& panels, int64_t out,
                     const std::optional<at::Tensor>& bias, at::Tensor& y) {
  return {data<const float>(floats), floats.stride(0), floats.size(0), floats.size(1), out, data<const T>(panels),
          bias ? data<const float>(*bias) : nullptr, data<Out>(y), out, 0};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias,
                  bool wide) {
  check_linear(x, panels, out, bias);
  at::Tensor y = at::empty({x.size(0), out}, wide ? x.options().dtype(at::kFloat) : x.options());
  const int64_t rows = x.size(0), in = x.size(1);
  if (rows == 0) return y;
  const at::Tensor floats = widened(x);
  const int64_t group = rows < 8 || rows > 48 ? 4 : 2;  // some 10 microseconds of work
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, const auto& call) {
      blocks_of(rows, in, out, panels.size(0), group,
                [&](int64_t r0, int64_t r1, int64_t p0, int64_t p1) { kernel(call, r0, r1, p0, p1); });
    };
    if (wide) run(kernels<T>().gemm_wide, product<T, float>(floats, panels, out, bias, y));
    else run(kernels<T>().gemm, product<T, T>(floats, panels, out, bias, y));
  });
  return y;
}

// A step's adapters, as segments.py lays them out.
struct Adapters {
  const at::Tensor &starts, &adapter, &ranks, &scales, &first, &rows;
};

// What one call has to do: a task for each segment and module that has a rank.
struct LoraPlan {
  std::vector<LoraTask> tasks;
  int64_t columns = 0;  // of all modules
  int64_t hidden_stride = 0;

  void make(const Adapters& of, int64_t layer, at::IntArrayRef modules, at::IntArrayRef widths) {
    const int64_t layers = of.ranks.size(1), all = of.ranks.size(2);
    const int32_t* border = data<const int32_t>(of.starts);
    const int32_t* slot = data<const int32_t>(of.adapter);
    tasks.clear();
    columns = hidden_stride = 0;
    for (const int64_t m : modules) columns += widths[m];
    for (int64_t s = 0; s < of.adapter.numel(); ++s) {
      if (slot[s] < 0) continue;
      int64_t column = 0, hidden = 0;
      for (const int64_t m : modules) {
        const int64_t at = (slot[s] * layers + layer) * all + m;
        const int64_t rank = data<const int32_t>(of.ranks)[at];
        if (rank > 0) {
          const int64_t* a = data<const int64_t>(of.rows) + data<const int64_t>(of.first)[at];
          tasks.push_back({border[s], border[s + 1] - border[s], rank, data<const float>(of.scales)[at], a, a + rank,
                           column, widths[m], hidden});
          hidden += rank;
        }
        column += widths[m];
      }
      hidden_stride = std::max(hidden_stride, hidden);
    }
  }
};

LoraPlan& lora_plan() {
  thread_local LoraPlan plan;  // its memory is kept from call to call, of which a step makes some hundred
  return plan;
}

// Calls kernel(item) for parts of `unit` of extent(task) and some tokens; other(task) = weights of each.
template <typename Extent, typename Other, typename F>
void lora_items(const LoraPlan& plan, int64_t unit, const Extent& extent, const Other& other, const F& kernel) {
  constexpr int64_t kTokens = 12;
  constexpr int64_t kRead = 5;  // multiply-adds that take as long as one weight from memory
  thread_local std::vector<LoraItem> parts;
  thread_local std::vector<int64_t> cost;
  parts.clear();
  cost.clear();
  for (const LoraTask& task : plan.tasks)
    for (int64_t token = 0; token < task.tokens; token += kTokens)
      for (int64_t at = 0; at < extent(task); at += unit) {
        const int64_t tokens = std::min(kTokens, task.tokens - token), end = std::min(extent(task), at + unit);
        parts.push_back({&task, token, tokens, at, end});
        cost.push_back((end - at) * other(task) * (tokens + kRead));
      }
  share(parts, cost, kernel);
}

// The buffer of shrunk values, filled.
template <typename T>
Lora<T> shrunk(const LoraPlan& plan, const at::Tensor& x, const at::Tensor& pool) {
  thread_local std::vector<float> hidden;
  hidden.resize(std::max(hidden.size(), static_cast<size_t>(x.size(0) * plan.hidden_stride)));
  const Lora<T> call{data<const T>(x), x.stride(0), x.size(1), nullptr, 0,
                     data<const T>(pool), hidden.data(), plan.hidden_stride};
  constexpr int64_t kRanks = 8;
  lora_items(plan, kRanks, [](const LoraTask& task) { return task.rank; },
             [&](const LoraTask&) { return x.size(1); },
             [&](const LoraItem& item) { kernels<T>().shrink(call, item); });
  return call;
}

void check_lora(const at::Tensor& x, const at::Tensor& pool) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && pool.is_contiguous(), "`x` and `pool` must have contiguous rows");
  TORCH_CHECK(x.scalar_type() == pool.scalar_type(), "`x` and `pool` must have one dtype");
}

void apply_lora(const at::Tensor& x, at::Tensor& out, const at::Tensor& pool, const at::Tensor& starts,
                const at::Tensor& adapter, const at::Tensor& ranks, const at::Tensor& scales, const at::Tensor& first,
                const at::Tensor& rows, int64_t layer, at::IntArrayRef modules, at::IntArrayRef widths) {
  check_lora(x, pool);
  TORCH_CHECK(out.dim() == 2 && out.stride(1) == 1 && out.scalar_type() == x.scalar_type(),
              "`out` must have contiguous rows and x's dtype");
  LoraPlan& plan = lora_plan();
  plan.make({starts, adapter, ranks, scales, first, rows}, layer, modules, widths);
  TORCH_CHECK(plan.columns == out.size(1), "`out` must have ", plan.columns, " columns, not ", out.size(1));
  if (plan.tasks.empty()) return;
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    Lora<T> call = shrunk<T>(plan, x, pool);
    call.out = data<T>(out);
    call.out_stride = out.stride(0);
    constexpr int64_t kColumns = 256;
    lora_items(plan, kColumns, [](const LoraTask& task) { return task.width; },
               [](const LoraTask& task) { return task.rank; },
               [&](const LoraItem& item) { kernels<T>().expand(call, item); });
  });
}

at::Tensor linear_lora(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias,
                       const at::Tensor& pool, const at::Tensor& starts, const at::Tensor& adapter,
                       const at::Tensor& ranks, const at::Tensor& scales, const at::Tensor& first,
                       const at::Tensor& slots, int64_t layer, at::IntArrayRef modules, at::IntArrayRef widths) {
  check_linear(x, panels, out, bias);
  check_lora(x, pool);
  LoraPlan& plan = lora_plan();
  plan.make({starts, adapter, ranks, scales, first, slots}, layer, modules, widths);
  TORCH_CHECK(plan.columns == out, "the weight must have ", plan.columns, " outputs for these modules, not ", out);
  at::Tensor y = at::empty({x.size(0), out}, x.options());
  const int64_t rows = x.size(0), in = x.size(1), count = panels.size(0);
  if (rows == 0) return y;
  const at::Tensor floats = widened(x);
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    const GemmLora<T> call{product<T, T>(floats, panels, out, bias, y), shrunk<T>(plan, x, pool), plan.tasks.data(),
                           static_cast<int64_t>(plan.tasks.size())};
    const int64_t group = rows < 8 || rows > 48 || count >= 64 ? 4 : 2;
    blocks_of(rows, in, out, count, group, [&](int64_t r0, int64_t r1, int64_t p0, int64_t p1) {
      kernels<T>().gemm_lora(call, r0, r1, p0, p1, scratch());
    });
  });
  return y;
}

void paged_attention(const at::Tensor& q, const at::Tensor& kv, int64_t layer, const at::Tensor& page_tables,
                     const at::Tensor& query_starts, const at::Tensor& context_lens, double scale, at::Tensor& out) {
  TORCH_CHECK(q.dim() == 3 && q.stride(2) == 1 && q.stride(1) == q.size(2) && out.is_contiguous() && out.sizes() == q.sizes(),
              "`q` must be [tokens, heads, head_dim] with contiguous rows, `out` the same and dense");
  TORCH_CHECK(kv.dim() == 6 && kv.is_contiguous() && kv.scalar_type() == q.scalar_type() && kv.size(5) == q.size(2) &&
                  q.size(1) % kv.size(3) == 0,
              "`kv` must be [pages, layers, 2, kv_heads, 16, head_dim] of q's dtype, and heads a multiple of kv_heads");
  TORCH_CHECK(page_tables.scalar_type() == at::kInt && page_tables.stride(1) == 1 &&
                  query_starts.scalar_type() == at::kInt && context_lens.scalar_type() == at::kInt,
              "`page_tables`, `query_starts` and `context_lens` must be int32");
  constexpr int64_t kPage = 16, kRows = 16;
  const int32_t* starts = data<const int32_t>(query_starts);
  const int32_t* lens = data<const int32_t>(context_lens);
  std::vector<AttentionItem> items;
  std::vector<int64_t> cost;
  for (int64_t b = 0; b < context_lens.numel(); ++b) {
    const int64_t rows = starts[b + 1] - starts[b];
    TORCH_CHECK(rows == 0 || (rows <= lens[b] && (lens[b] + kPage - 1) / kPage <= page_tables.size(1)),
                "`context_lens` must cover the sequence's rows and fit its page table");
    for (int64_t h = 0; h < kv.size(3); ++h)
      for (int64_t r = 0; r < rows; r += kRows) {
        const int64_t count = std::min(kRows, rows - r), position = lens[b] - rows + r;
        items.push_back({b, h, starts[b] + r, count, position});
        cost.push_back((position + count) * count * q.size(1) / kv.size(3) * q.size(2) * 2);
      }
  }
  by_dtype(q, [&](auto t) {
    using T = decltype(t);
    const Attention<T> call{data<const T>(q), q.stride(0), data<T>(out), q.size(1), kv.size(3), q.size(2),
                            data<const T>(kv) + layer * kv.stride(1), kv.stride(0), kv.stride(2),
                            data<const int32_t>(page_tables), page_tables.stride(0), static_cast<float>(scale)};
    share(items, cost, [&](const AttentionItem& item) { kernels<T>().attend(call, item, scratch()); });
  });
}

void rope_and_kv_write(at::Tensor& qkv, const at::Tensor& positions, const at::Tensor& angles, at::Tensor& kv,
                       int64_t layer, const at::Tensor& slots, int64_t heads) {
  const int64_t kv_heads = kv.size(3), head_dim = kv.size(5);
  TORCH_CHECK(qkv.is_contiguous() && qkv.dim() == 2 && qkv.size(1) == (heads + 2 * kv_heads) * head_dim,
              "`qkv` must be contiguous [tokens, ", (heads + 2 * kv_heads) * head_dim, "]");
  TORCH_CHECK(kv.is_contiguous() && kv.scalar_type() == qkv.scalar_type(), "`kv` must be contiguous, of qkv's dtype");
  TORCH_CHECK(positions.scalar_type() == at::kLong && slots.scalar_type() == at::kLong && positions.is_contiguous() &&
                  slots.is_contiguous() && positions.numel() == qkv.size(0) && slots.numel() == qkv.size(0),
              "`positions` and `slots` must be int64 [tokens]");
  TORCH_CHECK(angles.scalar_type() == at::kFloat && angles.is_contiguous() && angles.size(2) * 2 == head_dim,
              "`table` must be float32 [positions, 2, head_dim / 2]");
  by_dtype(qkv, [&](auto t) {
    using T = decltype(t);
    share(qkv.size(0), qkv.size(1), [&](int64_t begin, int64_t end) {
      kernels<T>().rope_and_kv_write(data<T>(qkv), data<const int64_t>(positions), data<const float>(angles),
                                     data<T>(kv) + layer * kv.stride(1), kv.stride(0), kv.stride(2),
                                     data<const int64_t>(slots), heads, kv_heads, head_dim, begin, end);
    });
  });
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, std::optional<at::Tensor> residual) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && weight.is_contiguous() && weight.numel() == x.size(1) &&
                  weight.scalar_type() == x.scalar_type(),
              "`x` must be [tokens, hidden] with contiguous rows, `weight` [hidden] of the same dtype");
  TORCH_CHECK(!residual || (residual->sizes() == x.sizes() && residual->stride(1) == 1 &&
                            residual->scalar_type() == x.scalar_type()),
              "`residual` must be like `x`");
  at::Tensor y = at::empty({x.size(0), x.size(1)}, x.options());
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    share(x.size(0), x.size(1), [&](int64_t begin, int64_t end) {
      kernels<T>().rms_norm(data<const T>(x), x.stride(0), residual ? data<T>(*residual) : nullptr,
                            residual ? residual->stride(0) : 0, data<const T>(weight), data<T>(y), x.size(1),
                            static_cast<float>(eps), begin, end);
    });
  });
  return y;
}

void qk_norm(at::Tensor& qkv, const at::Tensor& q_weight, const at::Tensor& k_weight, double eps, int64_t heads,
             int64_t kv_heads) {
  const int64_t head_dim = q_weight.numel();
  TORCH_CHECK(qkv.dim() == 2 && qkv.is_contiguous() && qkv.size(1) == (heads + 2 * kv_heads) * head_dim,
              "`qkv` must be contiguous [tokens, ", (heads + 2 * kv_heads) * head_dim, "]");
  TORCH_CHECK(q_weight.is_contiguous() && k_weight.is_contiguous() && k_weight.numel() == head_dim &&
                  q_weight.scalar_type() == qkv.scalar_type() && k_weight.scalar_type() == qkv.scalar_type(),
              "`q_weight` and `k_weight` must be [head_dim] of qkv's dtype");
  by_dtype(qkv, [&](auto t) {
    using T = decltype(t);
    share(qkv.size(0), qkv.size(1), [&](int64_t begin, int64_t end) {
      kernels<T>().qk_norm(data<T>(qkv), data<const T>(q_weight), data<const T>(k_weight), static_cast<float>(eps),
                           heads, kv_heads, head_dim, begin, end);
    });
  });
}

at::Tensor silu_and_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.is_contiguous() && gate_up.size(1) % 2 == 0,
              "`gate_up` must be contiguous [tokens, 2 * ffn]");
  const int64_t width = gate_up.size(1) / 2;
  at::Tensor y = at::empty({gate_up.size(0), width}, gate_up.options());
  by_dtype(gate_up, [&](auto t) {
    using T = decltype(t);
    share(gate_up.size(0), width * 4, [&](int64_t begin, int64_t end) {
      kernels<T>().silu_and_mul(data<const T>(gate_up), data<T>(y), width, begin, end);
    });
  });
  return y;
}

}  // namespace
}  // namespace tenantry

TORCH_LIBRARY(tenantry_cpu, m) {
  m.def("isa() -> str", tenantry::isa);
  m.def("pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor panels, int out, Tensor? bias, bool wide) -> Tensor");
  m.def("linear_lora(Tensor x, Tensor panels, int out, Tensor? bias, Tensor pool, Tensor starts, Tensor adapter, "
        "Tensor ranks, Tensor scales, Tensor first, Tensor rows, int layer, int[] modules, int[] widths) -> Tensor");
  m.def("apply_lora(Tensor x, Tensor(a!) out, Tensor pool, Tensor starts, Tensor adapter, Tensor ranks, Tensor scales, "
        "Tensor first, Tensor rows, int layer, int[] modules, int[] widths) -> ()");
  m.def("paged_attention(Tensor q, Tensor kv, int layer, Tensor page_tables, Tensor query_starts, "
        "Tensor context_lens, float scale, Tensor(a!) out) -> ()");
  m.def("rope_and_kv_write(Tensor(a!) qkv, Tensor positions, Tensor table, Tensor(b!) kv, int layer, Tensor slots, "
        "int heads) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual) -> Tensor");
  m.def("qk_norm(Tensor(a!) qkv, Tensor q_weight, Tensor k_weight, float eps, int heads, int kv_heads) -> ()");
  m.def("silu_and_mul(Tensor gate_up) -> Tensor");
}

TORCH_LIBRARY_IMPL(tenantry_cpu, CPU, m) {
  m.impl("pack", tenantry::pack);
  m.impl("linear", tenantry::linear);
  m.impl("linear_lora", tenantry::linear_lora);
  m.impl("apply_lora", tenantry::apply_lora);
  m.impl("paged_attention", tenantry::paged_attention);
  m.impl("rope_and_kv_write", tenantry::rope_and_kv_write);
  m.impl("rms_norm", tenantry::rms_norm);
  m.impl("qk_norm", tenantry::qk_norm);
  m.impl("silu_and_mul", tenantry::silu_and_mul);
}
