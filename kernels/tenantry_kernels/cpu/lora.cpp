// Bindings of LoRA: the plan of a step, then one call per layer and group of modules.
#include <torch/library.h>

#include "lora_plan.h"
#include "shared.h"

namespace tenantry {
namespace {

// The plan lives in a tensor's memory, which Python holds and hands to each call.
at::Tensor lora_plan(const at::Tensor& starts, const at::Tensor& adapter, const at::Tensor& ranks,
                     const at::Tensor& scales, const at::Tensor& first, const at::Tensor& rows, at::IntArrayRef modules,
                     at::IntArrayRef ins, at::IntArrayRef widths) {
  const Adapters of{starts, adapter, ranks, scales, first, rows};
  TORCH_CHECK(!modules.empty() && starts.is_contiguous() && adapter.is_contiguous() && ranks.is_contiguous() &&
                  scales.is_contiguous() && first.is_contiguous() && rows.is_contiguous(),
              "`modules` must not be empty and the tables must be contiguous");
  auto* plan = new LoraPlan(of, modules, ins, widths);
  return at::from_blob(plan, {static_cast<int64_t>(sizeof(LoraPlan))}, [](void* made) { delete static_cast<LoraPlan*>(made); },
                       at::TensorOptions().dtype(at::kByte));
}

void check(const LoraPlan& plan, int64_t layer, const at::Tensor& x, const at::Tensor& pool, int64_t columns) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1 && pool.is_contiguous(), "`x` and `pool` must have contiguous rows");
  TORCH_CHECK(x.scalar_type() == pool.scalar_type(), "`x` and `pool` must have one dtype");
  TORCH_CHECK(layer >= 0 && layer < static_cast<int64_t>(plan.layers.size()), "`layer` must be below ",
              plan.layers.size(), ", not ", layer);
  // rows beyond the segments are padding
  TORCH_CHECK(x.size(0) >= plan.tokens && x.size(1) == plan.in, "`x` must be [", plan.tokens, " or more, ", plan.in,
              "], not [", x.size(0), ", ", x.size(1), "]");
  TORCH_CHECK(plan.columns == columns, "`out` must have ", plan.columns, " columns for these modules, not ", columns);
}

// A call whose shrunk values are still to be computed, by `shrink_part`.
template <typename T>
Lora<T> call_of(const LoraPlan& plan, const LoraPlan::Layer& layer, const at::Tensor& x, const at::Tensor& pool) {
  thread_local std::vector<float> hidden;
  hidden.resize(std::max(hidden.size(), static_cast<size_t>(plan.tokens * layer.hidden_stride)));
  return {data<const T>(x), x.stride(0), plan.in, nullptr, 0, data<const T>(pool), hidden.data(), layer.hidden_stride};
}

template <typename T>
void shrink_part(const LoraPlan& plan, const LoraPlan::Layer& layer, const Lora<T>& call, int64_t part) {
  const int64_t* border = plan.borders.data() + layer.part + part;
  const LoraItem* items = plan.items.data() + layer.item;
  for (int64_t i = border[0]; i < border[1]; ++i) kernels<T>().shrink(call, items[i]);
}

void apply_lora(const at::Tensor& x, at::Tensor& out, const at::Tensor& pool, const at::Tensor& boxed, int64_t number) {
  const LoraPlan& plan = LoraPlan::of(boxed);
  check(plan, number, x, pool, out.size(1));
  TORCH_CHECK(out.dim() == 2 && out.stride(1) == 1 && out.scalar_type() == x.scalar_type() && out.size(0) == x.size(0),
              "`out` must have contiguous rows, as many as `x`, and x's dtype");
  const LoraPlan::Layer& layer = plan.layers[static_cast<size_t>(number)];
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    Lora<T> call = call_of<T>(plan, layer, x, pool);
    Team::get().run(layer.parts, at::get_num_threads(), [&](int64_t part) { shrink_part(plan, layer, call, part); });
    call.out = data<T>(out);
    call.out_stride = out.stride(0);
    constexpr int64_t kColumns = 256;
    thread_local std::vector<LoraItem> items;
    thread_local std::vector<int64_t> cost;
    items.clear();
    cost.clear();
    for (int64_t i = layer.task; i < layer.task + layer.tasks; ++i) {
      const LoraTask& task = plan.tasks[static_cast<size_t>(i)];
      LoraPlan::cut(task, task.width, kColumns, task.rank, [&](const LoraItem& item, int64_t its) {
        items.push_back(item);
        cost.push_back(its);
      });
    }
    share(items, cost, [&](const LoraItem& item) { kernels<T>().expand(call, item); });
  });
}

at::Tensor linear_lora(const at::Tensor& x, const at::Tensor& panels, int64_t out, const std::optional<at::Tensor>& bias,
                       const at::Tensor& pool, const at::Tensor& boxed, int64_t number,
                       const std::optional<at::Tensor>& following, int64_t following_number) {
  const LoraPlan& plan = LoraPlan::of(boxed);
  check_linear(x, panels, out, bias);
  check(plan, number, x, pool, out);
  at::Tensor y = at::empty({x.size(0), out}, x.options());
  const int64_t rows = x.size(0);
  if (rows == 0) return y;
  const LoraPlan::Layer& layer = plan.layers[static_cast<size_t>(number)];
  const LoraTask* next = nullptr;
  int64_t next_count = 0, next_in = 0;
  if (following) {
    const LoraPlan& then = LoraPlan::of(*following);
    if (following_number < static_cast<int64_t>(then.layers.size())) {
      const LoraPlan::Layer& its = then.layers[static_cast<size_t>(following_number)];
      next = then.tasks.data() + its.task;
      next_count = its.tasks;
      next_in = then.in;
    }
  }
  const at::Tensor floats = widened(x);
  const Blocks blocks(rows, plan.in, panels.size(0), out);
  by_dtype(x, [&](auto t) {
    using T = decltype(t);
    std::atomic<int64_t> shrinking{layer.parts};
    const GemmLora<T> call{product<T, T>(x, floats, panels, out, bias, y), call_of<T>(plan, layer, x, pool),
                           plan.tasks.data() + layer.task, layer.tasks, &shrinking, next, next_count, next_in};
    const int64_t products = blocks.count();
    Team::get().run(products + layer.parts, blocks.threads, [&](int64_t item) {
      if (item >= products) {
        shrink_part(plan, layer, call.lora, item - products);
        shrinking.fetch_sub(1, std::memory_order_release);
      } else {
        blocks.block(item, [&](int64_t r0, int64_t r1, int64_t p0, int64_t p1) {
          kernels<T>().gemm_lora(call, r0, r1, p0, p1, scratch());
        });
      }
    });
  });
  return y;
}

}  // namespace
}  // namespace tenantry

TORCH_LIBRARY_FRAGMENT(tenantry_cpu, m) {
  m.def("lora_plan(Tensor starts, Tensor adapter, Tensor ranks, Tensor scales, Tensor first, Tensor rows, "
        "int[] modules, int[] ins, int[] widths) -> Tensor");
  m.def("linear_lora(Tensor x, Tensor panels, int out, Tensor? bias, Tensor pool, Tensor plan, int layer, "
        "Tensor? next_plan, int next_layer) -> Tensor");
  m.def("apply_lora(Tensor x, Tensor(a!) out, Tensor pool, Tensor plan, int layer) -> ()");
}

TORCH_LIBRARY_IMPL(tenantry_cpu, CPU, m) {
  m.impl("lora_plan", tenantry::lora_plan);
  m.impl("linear_lora", tenantry::linear_lora);
  m.impl("apply_lora", tenantry::apply_lora);
}
