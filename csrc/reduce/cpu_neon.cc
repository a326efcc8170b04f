// The kernels for 64-bit Arm, where NEON and half conversion are part of the
// architecture.
#include "reduce/cpu_kernels.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define MPIDP_KERNELS_NAMESPACE neon
#define MPIDP_VECTOR_BYTES 16
#define MPIDP_KERNELS_NEON 1
#include "reduce/cpu_body.h"

namespace mpidp {

const CpuKernels* neon_kernels() {
  static constexpr CpuKernels kKernels{"neon", neon::reduce};
  return &kKernels;
}

}  // namespace mpidp

#else

namespace mpidp {

const CpuKernels* neon_kernels() { return nullptr; }

}  // namespace mpidp

#endif
