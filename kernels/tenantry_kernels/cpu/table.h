// What the bindings know of the kernels: plain pointers and ranges, one table of functions per instruction set.
//
// The kernels are compiled once per instruction set, in files that see no ATen header: an inline function of ATen
// compiled for AVX-512 must never be the copy that the linker keeps for every machine.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace tenantry {

struct Bf16 {
  uint16_t bits;
};

// A linear layer. Weights lie in panels of `panel` output columns, all inputs of a panel one after another.
template <typename T, typename Out>
struct Gemm {
  const float* x;    // [rows, in], row stride x_stride; null where `pairs` holds and T is bf16
  int64_t x_stride;
  const T* pairs_x;  // the same in T
  int64_t pairs_stride;
  int64_t rows, in, out;
  const T* panels;   // [ceil(out / panel), in, panel]
  const float* bias; // [out] or null
  Out* y;            // [rows, ...], row stride y_stride
  int64_t y_stride;
};

// One module of one segment in a LoRA call.
struct LoraTask {
  int64_t token, tokens;     // rows of x and out
  int64_t rank;              // true rank
  float scale;
  const int64_t* a_rows;     // [rank] element offsets into the pool
  const int64_t* b_rows;     // [rank]
  int64_t column, width;     // columns of out
  int64_t hidden;            // first column in the buffer of shrunk values
};

// A part of a task: what one thread does in one go.
struct LoraItem {
  const LoraTask* task;
  int64_t token, tokens;     // within the task
  int64_t begin, end;        // shrink: ranks; expand: columns of the module
};

template <typename T>
struct Lora {
  const T* x;
  int64_t x_stride, in;
  T* out;
  int64_t out_stride;
  const T* pool;
  float* hidden;             // [tokens, hidden_stride]: scale * x A^T
  int64_t hidden_stride;
};

// A linear layer and the LoRA of its rows, in one pass over the output.
template <typename T>
struct GemmLora {
  Gemm<T, T> base;
  Lora<T> lora;              // `x` and `out` are not used
  const LoraTask* tasks;
  int64_t count;
  const std::atomic<int64_t>* shrinking;  // parts of `hidden` that are not there yet
  const LoraTask* next;      // tasks of the call that will follow, and its inputs: what to fetch of A
  int64_t next_count, next_in;
};

template <typename T>
struct Attention {
  const T* q;                // [T, heads, head_dim], row stride q_stride
  int64_t q_stride;
  T* out;                    // [T, heads, head_dim], dense
  int64_t heads, kv_heads, head_dim;
  const T* pool;             // first element of K of this layer in page 0
  int64_t page_stride;       // elements from page to page
  int64_t v_offset;          // elements from K to V of a page and layer
  const int32_t* page_tables;
  int64_t table_stride;
  float scale;
};

// Some query rows of one sequence, for the heads that share one KV head.
struct AttentionItem {
  int64_t sequence, kv_head;
  int64_t row, rows;         // rows of q
  int64_t position;          // position of the first row
};

template <typename T>
struct RowKernels {
  void (*rms_norm)(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const T* weight, T* y,
                   int64_t width, float eps, int64_t begin, int64_t end);
  void (*qk_norm)(T* qkv, const T* q_weight, const T* k_weight, float eps, int64_t heads, int64_t kv_heads,
                  int64_t head_dim, int64_t begin, int64_t end);
  void (*silu_and_mul)(const T* gate_up, T* y, int64_t width, int64_t begin, int64_t end);
  void (*rope_and_kv_write)(T* qkv, const int64_t* positions, const float* table, T* pool, int64_t page_stride,
                            int64_t v_offset, const int64_t* slots, int64_t heads, int64_t kv_heads, int64_t head_dim,
                            int64_t begin, int64_t end);
  void (*shrink)(const Lora<T>& call, const LoraItem& item);
  void (*expand)(const Lora<T>& call, const LoraItem& item);
  void (*attend)(const Attention<T>& call, const AttentionItem& item, std::vector<float>& scratch);
  void (*widen)(const T* from, float* to, int64_t count);
  void (*gemm)(const Gemm<T, T>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end);
  void (*gemm_wide)(const Gemm<T, float>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                    int64_t panel_end);
  void (*gemm_lora)(const GemmLora<T>& call, int64_t row_begin, int64_t row_end, int64_t panel_begin,
                    int64_t panel_end, std::vector<float>& scratch);
  void (*pack)(const T* weight, int64_t out, int64_t in, T* panels, int64_t panel_begin, int64_t panel_end);
};

struct Table {
  const char* name;
  int64_t panel;             // output columns of a weight panel
  bool pairs;                // bf16 is multiplied in pairs of inputs, where these are even in number
  RowKernels<float> f32;
  RowKernels<Bf16> bf16;
};

const Table& table_generic();
const Table& table_avx2();
const Table& table_avx512();
const Table& table_avx512bf16();

}  // namespace tenantry
