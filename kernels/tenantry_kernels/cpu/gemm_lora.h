// A linear layer whose rows have adapters: the base's sums and the adapters' meet in floats and are rounded once.
//
// What is read of the adapters is asked for during base products (ahead.h), which take longer than it takes to come:
// memory works for LoRA while the multiply-adds work for the base.
#pragma once

#include <algorithm>

#include "ahead.h"
#include "gemm.h"
#include "lora.h"

namespace tenantry {
namespace TENANTRY_ISA {

template <typename T>
void gemm_lora(const GemmLora<T>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
               std::vector<float>& scratch) {
  const Gemm<T, T>& base = call.base;
  const int64_t first = panel_begin * P, last = std::min(panel_end * P, base.out), stride = (panel_end - panel_begin) * P;
  const Block block{row_begin, row_end, first, last};
  scratch.resize(std::max(scratch.size(), static_cast<size_t>((row_end - row_begin) * stride)));
  float* sums = scratch.data();
  const Gemm<T, float> wide{base.x + row_begin * base.x_stride, base.x_stride, row_end - row_begin, base.in, base.out,
                            base.panels, base.bias, sums, stride, first};
  RowsAhead<T> ahead(call, block, pauses_of(wide, wide.rows, panel_begin, panel_end));
  gemm_ahead(wide, 0, row_end - row_begin, panel_begin, panel_end, ahead);
  spin_until([&] { return call.shrinking->load(std::memory_order_acquire) == 0; });  // others are at the last of it
  for (int64_t i = 0; i < call.count; ++i) {
    const LoraTask& task = call.tasks[i];
    const Block::Part part = block.part(task);
    if (part.empty()) continue;
    expand_block(call.lora, task, part.token, part.tokens, part.begin, part.end,
                 [&](int64_t token, int64_t column, V low, V high) {
                   in_order(static_cast<const T*>(nullptr), low, high);
                   float* to = sums + (task.token + token - row_begin) * stride + task.column + column - first;
                   V y[2];
                   load2(to, part.end - column, y[0], y[1]);
                   store2(to, part.end - column, y[0] + low, y[1] + high);
                 });
  }
  for (int64_t row = row_begin; row < row_end; ++row) {
    const float* from = sums + (row - row_begin) * stride;
    T* to = base.y + row * base.y_stride + first;
    int64_t j = 0;
    for (; j + W <= last - first; j += W) store_in_order(to + j, load1(from + j));
    for (; j < last - first; ++j) from_float(from[j], to[j]);
  }
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
