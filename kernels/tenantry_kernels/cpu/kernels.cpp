// All kernels for one instruction set: compiled once per set, with TENANTRY_ISA as its name.
#include "attend.h"
#include "gemm.h"
#include "gemm_lora.h"
#include "lora.h"
#include "rows.h"
#include "table.h"

#define TENANTRY_NAME_OF(isa) #isa
#define TENANTRY_NAME(isa) TENANTRY_NAME_OF(isa)
#define TENANTRY_TABLE_OF(isa) table_##isa
#define TENANTRY_TABLE(isa) TENANTRY_TABLE_OF(isa)

namespace tenantry {

template <typename T>
static RowKernels<T> kernels() {
  using namespace TENANTRY_ISA;
  return {rms_norm<T>, qk_norm<T>, silu_and_mul<T>, rope_and_kv_write<T>, shrink<T>, expand<T>,
          attend<T>,   widen<T>,   gemm<T, T>,      gemm<T, float>,       gemm_lora<T>,
          pack<T>};
}

const Table& TENANTRY_TABLE(TENANTRY_ISA)() {
  static const Table table{TENANTRY_NAME(TENANTRY_ISA), TENANTRY_ISA::P, TENANTRY_ISA::kPairs, kernels<float>(),
                           kernels<Bf16>()};
  return table;
}

}  // namespace tenantry
