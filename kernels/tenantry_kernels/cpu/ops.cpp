// Bindings: checks of what could write out of bounds, then work split over threads by cost.
#include <torch/library.h>

#include "shared.h"

namespace tenantry {
namespace {

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

at::Tensor linear(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias,
                  bool wide) {
  check_linear(x, panels, out, bias);
  at::Tensor y = at::empty({x.size(0), out}, wide ? x.options().dtype(at::kFloat) : x.options());
  const int64_t rows = x.size(0), in = x.size(1);
  if (rows == 0) return y;
  const at::Tensor floats = widened(x);
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    const auto run = [&](auto kernel, const auto& call) {
      const Blocks blocks(rows, in, panels.size(0), out);
      Team::get().run(blocks.count(), blocks.threads, [&](int64_t number) {
        blocks.block(number, [&](int64_t r0, int64_t r1, int64_t p0, int64_t p1) { kernel(call, r0, r1, p0, p1); });
      });
    };
    if (wide) run(kernels<T>().gemm_wide, product<T, float>(x, floats, panels, out, bias, y));
    else run(kernels<T>().gemm, product<T, T>(x, floats, panels, out, bias, y));
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
  m.impl("paged_attention", tenantry::paged_attention);
  m.impl("rope_and_kv_write", tenantry::rope_and_kv_write);
  m.impl("rms_norm", tenantry::rms_norm);
  m.impl("qk_norm", tenantry::qk_norm);
  m.impl("silu_and_mul", tenantry::silu_and_mul);
}
