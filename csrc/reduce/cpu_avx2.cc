// The kernels for x86-64 CPUs with AVX2 and F16C.
#include "reduce/cpu_kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

namespace mpidp {
namespace avx2 {

void reduce(const ReduceArgs& args);

}  // namespace avx2

namespace {

bool cpu_has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace

const CpuKernels* avx2_kernels() {
  static constexpr CpuKernels kKernels{"avx2", avx2::reduce};
  static const bool supported = __builtin_cpu_supports("avx2") && cpu_has_f16c();
  return supported ? &kKernels : nullptr;
}

}  // namespace mpidp

// Everything above runs on any CPU; everything below needs the instruction set.
// GCC's pragma stays open because templates are instantiated at the end of the
// file.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define MPIDP_KERNELS_NAMESPACE avx2
#define MPIDP_VECTOR_BYTES 32
#define MPIDP_KERNELS_AVX2 1
#include "reduce/cpu_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace mpidp {

const CpuKernels* avx2_kernels() { return nullptr; }

}  // namespace mpidp

#endif
