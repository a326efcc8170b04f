// A GPU on the host, for tests: the part of the CUDA runtime that mpidp uses, as CUDA promises it
// and no better.
//
// - A stream is a thread that runs late: before some operations it sleeps, by a seeded random
//   choice (MPIDP_EMULATED_SEED). Streams are ordered by events alone.
// - Device memory lies at addresses that fault when host code touches them; only kernels and copies
//   know where it really is.
// - Memory and event handles work between processes, not inside one.
// - Everything that must be given back is counted, and faults can be injected
// (mpidp_emulated_set_fault).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

using cudaError_t = int;
inline constexpr cudaError_t cudaSuccess = 0;
inline constexpr cudaError_t cudaErrorInvalidValue = 1;
inline constexpr cudaError_t cudaErrorMemoryAllocation = 2;
inline constexpr cudaError_t cudaErrorNoDevice = 100;
inline constexpr cudaError_t cudaErrorInvalidDevice = 101;
inline constexpr cudaError_t cudaErrorDeviceUninitialized = 201;
inline constexpr cudaError_t cudaErrorMapBufferObjectFailed = 205;
inline constexpr cudaError_t cudaErrorInvalidResourceHandle = 400;
inline constexpr cudaError_t cudaErrorNotReady = 600;
inline constexpr cudaError_t cudaErrorLaunchOutOfResources = 701;
inline constexpr cudaError_t cudaErrorPeerAccessAlreadyEnabled = 704;
inline constexpr cudaError_t cudaErrorNotSupported = 801;

namespace emulated {
struct Stream;
struct Event;
}  // namespace emulated
using cudaStream_t = emulated::Stream*;
using cudaEvent_t = emulated::Event*;

struct cudaIpcMemHandle_t {
  unsigned char reserved[64];
};
struct cudaIpcEventHandle_t {
  unsigned char reserved[64];
};
struct cudaDeviceProp {
  char name[256];
  unsigned char uuid[16];
  std::size_t totalGlobalMem;
  int multiProcessorCount;
  int major, minor;
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered,
  cudaMemoryTypeHost,
  cudaMemoryTypeDevice,
  cudaMemoryTypeManaged
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventBlockingSync = 1;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline constexpr unsigned cudaEventInterprocess = 4;
inline constexpr unsigned cudaHostAllocPortable = 1;
inline constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;

const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);
cudaError_t cudaMalloc(void** pointer, std::size_t nbytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaHostAlloc(void** pointer, std::size_t nbytes, unsigned flags);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t nbytes,
                            cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* destination, int byte, std::size_t nbytes, cudaStream_t stream);
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base);
cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void* base);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle);

namespace emulated {

// Of the kernel that this thread runs.
std::int64_t this_thread();
std::int64_t threads_of_launch();
// Where the memory at a device address (or in pinned memory) is. Ends the process, with a message,
// for any other address: on a GPU that is an illegal access.
void* translate(const void* pointer);
cudaError_t launch(std::function<void()> kernel, int blocks, cudaStream_t stream);
void range_of(const void* pointer, void** base, std::uint64_t* size, std::uint64_t* id,
              bool* exportable);

// Shared by the parts of the emulation.
bool fault(const char* name);
void count(const char* name, int by);
// Queues `operation`; on the default stream where `stream` is null. False: no such stream.
bool enqueue(cudaStream_t stream, std::function<void()> operation);
void drain(cudaStream_t stream);
// Until every stream of the process is idle, or `seconds` have passed.
void drain_all(double seconds);
int current_device();
int num_devices();
void nap();
// A file descriptor of `pid`, opened here; -1 where that file is not the one with this inode.
int open_foreign(int pid, int fd, std::uint64_t inode);
std::uint64_t inode_of(int fd);

}  // namespace emulated

// For tests, through ctypes. Faults: out_of_memory, ipc_export, ipc_open, ipc_event_open,
// ipc_garbage, not_exportable, launch, drop_own_waits, drop_peer_waits. Counters: allocations,
// pinned, streams, events, mappings, opened_events.
extern "C" {
int mpidp_emulated_set_fault(const char* name, long on);
long mpidp_emulated_counter(const char* name);
}
