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

// The sums of a block: rows of pairs in load2's order, as B's rows are read, so that nothing is put in order on the way.
template <typename T>
struct Sums {
  float* at;
  int64_t top, first, stride;  // the row and the column (a panel's first) of y that they begin with; floats of a row

  TENANTRY_INLINE float* pair(int64_t row, int64_t column) const { return at + (row - top) * stride + column - first; }

  TENANTRY_INLINE void put(int64_t row, int64_t column, V low, V high) const { store2(pair(row, column), low, high); }

  TENANTRY_INLINE void add(int64_t row, int64_t column, V low, V high) const {
    float* to = pair(row, column);
    store1(to, load1(to) + low);
    store1(to + W, load1(to + W) + high);
  }

  // The same where a module begins within a pair.
  void add_astride(int64_t row, int64_t column, int64_t count, V low, V high) const {
    float values[P];
    in_order(static_cast<const T*>(nullptr), low, high);
    store2(values, low, high);
    for (int64_t j = 0; j < std::min<int64_t>(count, P); ++j) {
      const int64_t within = (column + j - first) % P;
      pair(row, column + j - within)[sizeof(T) == 2 ? within % 2 * W + within / 2 : within] += values[j];
    }
  }
};

template <typename T>
void gemm_lora(const GemmLora<T>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end,
               std::vector<float>& scratch) {
  const Gemm<T, T>& base = call.base;
  const int64_t first = panel_begin * P, last = std::min(panel_end * P, base.out), stride = (panel_end - panel_begin) * P;
  const Block block{row_begin, row_end, first, last};
  scratch.resize(std::max(scratch.size(), static_cast<size_t>((row_end - row_begin) * stride)));
  const Sums<T> sums{scratch.data(), row_begin, first, stride};
  RowsAhead<T> ahead(call, block, pauses_of(base, row_end - row_begin, panel_begin, panel_end));
  gemm_ahead(base, row_begin, row_end, panel_begin, panel_end,
             [&](int64_t row, int64_t column, V low, V high) { sums.put(row, column, low, high); }, ahead);
  spin_until([&] { return call.shrinking->load(std::memory_order_acquire) == 0; });  // others are at the last of it
  for (int64_t i = 0; i < call.count; ++i) {
    const LoraTask& task = call.tasks[i];
    const Block::Part part = block.part(task);
    if (part.empty()) continue;
    if (task.column % P == 0) {
      expand_block(call.lora, task, part.token, part.tokens, part.begin, part.end,
                   [&](int64_t token, int64_t column, V low, V high) {
                     sums.add(task.token + token, task.column + column, low, high);
                   });
    } else {
      expand_block(call.lora, task, part.token, part.tokens, part.begin, part.end,
                   [&](int64_t token, int64_t column, V low, V high) {
                     sums.add_astride(task.token + token, task.column + column, part.end - column, low, high);
                   });
    }
  }
  const ToRows<T, T> to_rows{base};
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t column = first; column < last; column += P) {
      const float* pair = sums.pair(row, column);
      to_rows(row, column, load1(pair), load1(pair + W));
    }
}

}  // namespace TENANTRY_ISA
}  // namespace tenantry
