// The kernels with nothing assumed beyond what the compiler targets (SSE2 on
// x86-64).
#include "reduce/cpu_kernels.h"

#define MPIDP_KERNELS_NAMESPACE baseline
#define MPIDP_VECTOR_BYTES 16
#include "reduce/cpu_body.h"

namespace mpidp {

const CpuKernels* baseline_kernels() {
  static constexpr CpuKernels kKernels{"baseline", baseline::reduce};
  return &kKernels;
}

}  // namespace mpidp
