// The one header that the GPU sources include for their runtime: CUDA, HIP, or the emulated device
// of tests/gpu/emulated, which runs the same kernels on the host.
//
// Kernels take one trivially copyable structure, use neither shared memory nor barriers nor warp
// operations, and walk their range with a stride of num_threads(): so the emulation may run a
// launch with as few threads as it likes.
#pragma once

#include <cstdint>

#if defined(MPIDP_EMULATED)
#include "emulated_cuda.h"
#elif defined(__HIP_PLATFORM_AMD__)
#include "reduce/gpu_hip.h"
#else
#include <cuda_runtime.h>
#endif

#if defined(MPIDP_EMULATED)
#define MPIDP_KERNEL inline void
#define MPIDP_DEVICE inline
#define MPIDP_HOST_DEVICE inline
#define MPIDP_PARAMETER const
#else
#define MPIDP_KERNEL __global__ void __launch_bounds__(mpidp::kThreadsPerBlock)
#define MPIDP_DEVICE __device__ __forceinline__
#define MPIDP_HOST_DEVICE __host__ __device__ __forceinline__
#if defined(__HIP_PLATFORM_AMD__)
#define MPIDP_PARAMETER const
#else
// Left in constant memory, where arrays can be indexed without a copy on the stack.
#define MPIDP_PARAMETER const __grid_constant__
#endif
#endif

namespace mpidp {

inline constexpr int kThreadsPerBlock = 256;

#if defined(MPIDP_EMULATED)

MPIDP_DEVICE std::int64_t global_thread() { return emulated::this_thread(); }
MPIDP_DEVICE std::int64_t num_threads() { return emulated::threads_of_launch(); }
// Where the emulation keeps what lies at a device address, which faults when touched.
template <class T>
MPIDP_DEVICE T* device_address(T* pointer) {
  return static_cast<T*>(emulated::translate(pointer));
}

template <class Args>
int launch(void (*kernel)(Args), int blocks, cudaStream_t stream, const Args& args) {
  return emulated::launch([kernel, args] { kernel(args); }, blocks, stream);
}

#else

MPIDP_DEVICE std::int64_t global_thread() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreadsPerBlock + threadIdx.x;
}
MPIDP_DEVICE std::int64_t num_threads() {
  return static_cast<std::int64_t>(gridDim.x) * kThreadsPerBlock;
}
template <class T>
MPIDP_DEVICE T* device_address(T* pointer) {
  return pointer;
}

template <class Args>
int launch(void (*kernel)(Args), int blocks, cudaStream_t stream, const Args& args) {
  void* parameters[] = {const_cast<Args*>(&args)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                          dim3(static_cast<unsigned>(blocks)), dim3(kThreadsPerBlock), parameters,
                          0, stream);
}

#endif

// Blocks for `threads` threads' worth of work: enough to fill the device, and no more.
inline int blocks_for(std::int64_t threads, int multiprocessors) {
  constexpr int kBlocksPerMultiprocessor = 8;  // of 256 threads: 2048, all that one holds
  const std::int64_t wanted = (threads + kThreadsPerBlock - 1) / kThreadsPerBlock;
  const std::int64_t most = static_cast<std::int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
  return static_cast<int>(wanted < 1 ? 1 : (wanted < most ? wanted : most));
}

}  // namespace mpidp
