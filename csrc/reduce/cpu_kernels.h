// What one instruction set offers: the seam between the dispatcher and the
// builds of the kernels.
#pragma once

#include <cstdint>

#include "reduce/reduce.h"

namespace mpidp {

struct CpuKernels {
  const char* name;
  // Takes arguments that reduce() has checked: count > 0, an op that the dtype
  // has.
  void (*reduce)(const ReduceArgs& args);
};

// Each is null where the build's architecture lacks it or where this CPU cannot
// run it.
const CpuKernels* baseline_kernels();
const CpuKernels* avx2_kernels();
const CpuKernels* avx512_kernels();
const CpuKernels* neon_kernels();

}  // namespace mpidp
