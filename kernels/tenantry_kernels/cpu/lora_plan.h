// What LoRA has to do in a step, for one group of modules in all layers: made once, used by a call per layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "table.h"

namespace tenantry {

// A step's adapters, as segments.py lays them out.
struct Adapters {
  const at::Tensor &starts, &adapter, &ranks, &scales, &first, &rows;
};

struct LoraPlan {
  // A run of tasks, of items of shrink and of their parts (runs of items that cost about the same).
  struct Layer {
    int64_t task, tasks, item, part, parts;
    int64_t hidden_stride;
  };

  static constexpr int64_t kTokens = 12;   // of an item at most
  static constexpr int64_t kRanks = 8;     // of an item of shrink at most
  static constexpr int64_t kRead = 5;      // multiply-adds that take as long as one weight from memory
  static constexpr int64_t kPart = 50'000; // multiply-adds: some microseconds
  static constexpr int64_t kParts = 16;    // of a layer at most

  uint64_t magic = kMagic;
  int64_t tokens = 0, in = 0, columns = 0;
  std::vector<Layer> layers;
  std::vector<LoraTask> tasks;
  std::vector<LoraItem> items;
  std::vector<int64_t> borders;  // of parts: items, counted from the layer's first
  at::Tensor rows;               // what the tasks point into

  LoraPlan(const Adapters& of, at::IntArrayRef modules, at::IntArrayRef ins, at::IntArrayRef widths) : rows(of.rows) {
    const auto* border = of.starts.data_ptr<int32_t>();
    const auto* slot = of.adapter.data_ptr<int32_t>();
    const auto* ranks = of.ranks.data_ptr<int32_t>();
    const auto* scales = of.scales.data_ptr<float>();
    const auto* first = of.first.data_ptr<int64_t>();
    const auto* places = of.rows.data_ptr<int64_t>();
    const int64_t segments = of.adapter.numel(), depth = of.ranks.size(1), all = of.ranks.size(2);
    tokens = border[segments];
    in = ins[modules[0]];
    for (const int64_t m : modules) columns += widths[m];
    tasks.reserve(static_cast<size_t>(depth * segments) * modules.size());
    layers.reserve(static_cast<size_t>(depth));
    for (int64_t layer = 0; layer < depth; ++layer) {
      Layer made{static_cast<int64_t>(tasks.size()), 0, 0, 0, 0, 0};
      for (int64_t s = 0; s < segments; ++s) {
        if (slot[s] < 0) continue;
        int64_t column = 0, hidden = 0;
        for (const int64_t m : modules) {
          const int64_t at = (slot[s] * depth + layer) * all + m;
          if (const int64_t rank = ranks[at]; rank > 0) {
            const int64_t* a = places + first[at];
            tasks.push_back({border[s], border[s + 1] - border[s], rank, scales[at], a, a + rank, column, widths[m], hidden});
            hidden += rank;
          }
          column += widths[m];
        }
        made.hidden_stride = std::max(made.hidden_stride, hidden);
      }
      made.tasks = static_cast<int64_t>(tasks.size()) - made.task;
      layers.push_back(made);
    }
    items.reserve(3 * tasks.size());
    std::vector<int64_t> cost;
    for (Layer& layer : layers) share_out(layer, cost);
  }

  // Calls f(item, cost) for the parts of a task: some tokens and `unit` of `extent` (ranks or columns), each of which reads
  // `other` weights.
  template <typename F>
  static void cut(const LoraTask& task, int64_t extent, int64_t unit, int64_t other, const F& f) {
    for (int64_t token = 0; token < task.tokens; token += kTokens)
      for (int64_t at = 0; at < extent; at += unit) {
        const int64_t count = std::min(kTokens, task.tokens - token), end = std::min(extent, at + unit);
        f(LoraItem{&task, token, count, at, end}, (end - at) * other * (count + kRead));
      }
  }

  // The plan behind a tensor that `boxed` made.
  static const LoraPlan& of(const at::Tensor& box) {
    const auto* plan = static_cast<const LoraPlan*>(box.data_ptr());
    TORCH_CHECK(box.scalar_type() == at::kByte && box.numel() == sizeof(LoraPlan) && plan->magic == kMagic,
                "`plan` must come from lora_plan");
    return *plan;
  }

 private:
  static constexpr uint64_t kMagic = 0x7e9a97279a1c0de5;

  void share_out(Layer& layer, std::vector<int64_t>& cost) {
    layer.item = static_cast<int64_t>(items.size());
    cost.clear();
    int64_t total = 0;
    for (int64_t i = layer.task; i < layer.task + layer.tasks; ++i) {
      const LoraTask& task = tasks[static_cast<size_t>(i)];
      cut(task, task.rank, kRanks, in, [&](const LoraItem& item, int64_t its) {
        items.push_back(item);
        cost.push_back(its);
        total += its;
      });
    }
    layer.part = static_cast<int64_t>(borders.size());
    const int64_t each = std::max(kPart, total / kParts);
    int64_t sum = each;
    for (size_t i = 0; i < cost.size(); ++i) {
      if (sum >= each) borders.push_back(static_cast<int64_t>(i)), sum = 0;
      sum += cost[i];
    }
    layer.parts = static_cast<int64_t>(borders.size()) - layer.part;
    borders.push_back(static_cast<int64_t>(cost.size()));
  }
};

}  // namespace tenantry
