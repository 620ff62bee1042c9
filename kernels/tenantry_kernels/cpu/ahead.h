// What to ask memory for while a block of a product is computed, some of it at each pause: the rows of B that the block
// is about to need, and its share of the rows of A that the next call begins with.
#pragma once

#include <algorithm>

#include "gemm.h"

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

template <typename T>
constexpr int64_t kLine = 64 / sizeof(T);

// The rows of B under a block.
template <typename T>
class RowsOfB {
 public:
  RowsOfB(const GemmLora<T>& call, const Block& block) : call_(call), block_(block) {
    for (int64_t i = 0; i < call.count; ++i)
      if (!block.part(call.tasks[i]).empty()) left_ += call.tasks[i].rank;
    find();
  }

  int64_t left() const { return left_; }

  void ask() {
    const T* row = call_.lora.pool + call_.tasks[task_].b_rows[rank_];
    for (int64_t at = part_.begin; at < part_.end; at += kLine<T>) __builtin_prefetch(row + at, 0, 2);
    --left_;
    if (++rank_ < call_.tasks[task_].rank) return;
    rank_ = 0;
    ++task_;
    find();
  }

 private:
  void find() {
    for (; task_ < call_.count; ++task_)
      if (part_ = block_.part(call_.tasks[task_]); !part_.empty()) return;
  }

  const GemmLora<T>& call_;
  const Block block_;
  Block::Part part_{};
  int64_t left_ = 0, task_ = 0, rank_ = 0;
};

// Pieces of the rows of A of the next call, as many as the block's columns are of all.
template <typename T>
class RowsOfA {
 public:
  RowsOfA(const GemmLora<T>& call, const Block& block) : call_(call), pieces_((call.next_in + kPiece - 1) / kPiece) {
    if (block.row_begin > 0) return;  // the first block of rows asks for them
    int64_t rows = 0;
    for (int64_t i = 0; i < call.next_count; ++i) rows += call.next[i].rank;
    rank_ = rows * block.first / call.base.out;
    left_ = (rows * block.last / call.base.out - rank_) * pieces_;
    for (; left_ > 0 && rank_ >= call.next[task_].rank; ++task_) rank_ -= call.next[task_].rank;
  }

  int64_t left() const { return left_; }

  void ask() {
    const T* row = call_.lora.pool + call_.next[task_].a_rows[rank_];
    const int64_t begin = piece_ * kPiece, end = std::min(call_.next_in, begin + kPiece);
    for (int64_t at = begin; at < end; at += kLine<T>) __builtin_prefetch(row + at, 0, 2);
    --left_;
    if (++piece_ < pieces_) return;
    piece_ = 0;
    if (++rank_ < call_.next[task_].rank) return;
    rank_ = 0;
    ++task_;
  }

 private:
  static constexpr int64_t kPiece = 6 * kLine<T>;

  const GemmLora<T>& call_;
  int64_t pieces_, left_ = 0, task_ = 0, rank_ = 0, piece_ = 0;
};

// Both, and the next panel of the base.
template <typename T>
class RowsAhead : public NextPanel {
 public:
  RowsAhead(const GemmLora<T>& call, const Block& block, int64_t pauses) : b_(call, block), a_(call, block) {
    b_each_ = (b_.left() + pauses - 1) / pauses;
    a_each_ = (a_.left() + pauses - 1) / pauses;
  }

  void operator()() {
    NextPanel::operator()();
    for (int64_t n = std::min(b_each_, b_.left()); n > 0; --n) b_.ask();
    for (int64_t n = std::min(a_each_, a_.left()); n > 0; --n) a_.ask();
  }

 private:
  RowsOfB<T> b_;
  RowsOfA<T> a_;
  int64_t b_each_, a_each_;
};

}  // namespace TENANTRY_ISA
}  // namespace tenantry
