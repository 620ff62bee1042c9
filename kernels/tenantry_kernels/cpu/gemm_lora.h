// A linear layer whose rows have adapters: the base's sums and the adapters' meet in floats and are rounded once.
//
// The rows of B that a block of columns needs are asked for during its base product, which takes longer than they take to
// come: memory works for LoRA while the multiply-adds work for the base.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "lora.h"

namespace tenantry {
namespace TENANTRY_ISA {

// Rows of the step and columns of the output, and what of a task lies there.
struct Block {
  int64_t row_begin, row_end, first, last;

  // Tokens of the task and columns of its module; both counted from the task's own.
  struct Part {
    int64_t token, tokens, begin, end;
    bool empty() const { return tokens <= 0 || begin >= end; }
  };
  Part part(const LoraTask& task) const {
    const int64_t from = std::max(row_begin, task.token), to = std::min(row_end, task.token + task.tokens);
    return {from - task.token, to - from, std::max(first, task.column) - task.column,
            std::min(last, task.column + task.width) - task.column};
  }
};

// Asks for the rows of B that a block of rows and columns needs, one at each call.
template <typename T>
class RowsAhead {
 public:
  RowsAhead(const GemmLora<T>& call, const Block& block) : call_(call), block_(block), task_(call.tasks - 1) {
    next_task();
  }

  TENANTRY_INLINE void operator()() {
    if (rank_ == ranks_) {
      if (ranks_ == 0) return;
      next_task();
      if (ranks_ == 0) return;
    }
    const T* row = call_.lora.pool + task_->b_rows[rank_++];
    for (int64_t at = begin_; at < end_; at += kLine) __builtin_prefetch(row + at, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(T);

  void next_task() {
    for (rank_ = ranks_ = 0; ++task_ < call_.tasks + call_.count;) {
      const Block::Part part = block_.part(*task_);
      if (part.empty()) continue;
      begin_ = part.begin;
      end_ = part.end;
      ranks_ = task_->rank;
      return;
    }
    task_ = call_.tasks + call_.count - 1;
  }

  const GemmLora<T>& call_;
  const Block block_;
  const LoraTask* task_;
  int64_t begin_ = 0, end_ = 0, rank_ = 0, ranks_ = 0;
};

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
  RowsAhead<T> ahead(call, block);
  gemm_ahead(wide, 0, row_end - row_begin, panel_begin, panel_end, ahead);
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
