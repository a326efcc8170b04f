// The kernels for x86-64 CPUs with AVX-512 (F, BW, DQ and VL: every one since
// Skylake-SP).
#include "reduce/cpu_kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace mpidp {
namespace avx512 {

void reduce(const ReduceArgs& args);

}  // namespace avx512

const CpuKernels* avx512_kernels() {
  static constexpr CpuKernels kKernels{"avx512", avx512::reduce};
  static const bool supported =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &kKernels : nullptr;
}

}  // namespace mpidp

// As in cpu_avx2.cc. AVX-512F brings half conversion and fused multiply-add of
// its own; cpu_body.h keeps the latter out.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define MPIDP_KERNELS_NAMESPACE avx512
#define MPIDP_VECTOR_BYTES 64
#define MPIDP_KERNELS_AVX512 1
#include "reduce/cpu_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace mpidp {

const CpuKernels* avx512_kernels() { return nullptr; }

}  // namespace mpidp

#endif
