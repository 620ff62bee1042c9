// A linear layer whose rows have adapters: the base's sums and the adapters' meet in floats and are rounded once.
//
// The rows of B that a block of columns needs are asked for before its base product, which takes longer than they take to
// come: memory works for LoRA while the multiply-adds work for the base.
#pragma once

#include <algorithm>

#include "gemm.h"
#include "lora.h"

namespace tenantry {
namespace TENANTRY_ISA {

// Asks for the rows of B that a block of rows and columns needs, one at each call.
template <typename T>
class RowsAhead {
 public:
  RowsAhead(const GemmLora<T>& call, int64_t row_begin, int64_t row_end, int64_t first, int64_t last)
      : call_(call), row_begin_(row_begin), row_end_(row_end), first_(first), last_(last), task_(call.tasks - 1) {
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
      begin_ = std::max(first_ - task_->column, int64_t{0});
      end_ = std::min(last_ - task_->column, task_->width);
      if (task_->token < row_end_ && row_begin_ < task_->token + task_->tokens && begin_ < end_) {
        ranks_ = task_->rank;
        return;
      }
    }
    task_ = call_.tasks + call_.count - 1;
  }

  const GemmLora<T>& call_;
  const int64_t row_begin_, row_end_, first_, last_;
  const LoraTask* task_;
  int64_t begin_ = 0, end_ = 0, rank_ = 0, ranks_ = 0;
};

template <typename T>
void gemm_lora(const GemmLora<T>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
               std::vector<float>& scratch) {
  const Gemm<T, T>& base = call.base;
  const int64_t first = panel_begin * P, last = std::min(panel_end * P, base.out), stride = (panel_end - panel_begin) * P;
  const auto each = [&](const auto& f) {  // f(task, its rows and its module's columns that lie in this block)
    for (int64_t i = 0; i < call.count; ++i) {
      const LoraTask& task = call.tasks[i];
      const int64_t from = std::max(row_begin, task.token), to = std::min(row_end, task.token + task.tokens);
      const int64_t begin = std::max(first, task.column), end = std::min(last, task.column + task.width);
      if (from < to && begin < end) f(task, from - task.token, to - from, begin - task.column, end - task.column);
    }
  };
  scratch.resize(std::max(scratch.size(), static_cast<size_t>((row_end - row_begin) * stride + P)));
  float* sums = scratch.data();
  const Gemm<T, float> wide{base.x + row_begin * base.x_stride, base.x_stride, row_end - row_begin, base.in, base.out,
                            base.panels, base.bias, sums, stride, first};
  RowsAhead<T> ahead(call, row_begin, row_end, first, last);
  gemm_ahead(wide, 0, row_end - row_begin, panel_begin, panel_end, ahead);
  each([&](const LoraTask& task, int64_t token, int64_t tokens, int64_t begin, int64_t end) {
    expand_block(call.lora, task, token, tokens, begin, end, [&](int64_t n, int64_t column, V low, V high) {
      in_order(static_cast<const T*>(nullptr), low, high);
      float* to = sums + (task.token + n - row_begin) * stride + task.column + column - first;
      V y[2];
      load2(to, end - column, y[0], y[1]);
      store2(to, end - column, y[0] + low, y[1] + high);
    });
  });
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
