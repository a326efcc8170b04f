// What the library asks of a GPU: one table of functions, filled by a plugin that is loaded on the
// first use of a GPU buffer. mpidp._core itself links no CUDA.
//
// The plugin exports `mpidp_device_runtime(abi)`, which returns the table, or null where it was
// built for another abi. Every function returns 0, or an error code that error_string() explains;
// kOutOfMemory and kNotSupported are the two that callers tell apart. Streams and events are the
// runtime's own handles, so a caller's stream (CuPy's, PyTorch's, JAX's) can be given as it is;
// stream 0 is the legacy default stream. All functions work on the calling thread's device, set by
// set_device(), unless they take one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/types.h"

namespace mpidp {

inline constexpr std::uint32_t kDeviceAbi = 1;

enum DeviceStatus : int { kDeviceOk = 0, kOutOfMemory = 2, kNotSupported = 801 };

using DeviceStream = void*;
using DeviceEvent = void*;

struct DeviceInfo {
  char name[64];
  std::uint8_t uuid[16];
  std::int32_t multiprocessors;
  std::int32_t compute_capability;  // 10 * major + minor
  std::uint64_t memory_bytes;
};

enum class MemoryKind : std::uint32_t { kHost, kPinned, kDevice, kManaged };

struct PointerInfo {
  MemoryKind kind;
  std::int32_t device;          // -1 for host memory
  void* base;                   // of the allocation that holds the pointer; null if unknown
  std::uint64_t size;           // bytes of that allocation
  std::uint64_t allocation_id;  // never used twice in a process: a cache key for IPC handles
  std::int32_t exportable;      // 1: an IPC handle of it can be had (not for pools, VMM, managed)
};

struct IpcMemoryHandle {
  unsigned char bytes[64];
};
struct IpcEventHandle {
  unsigned char bytes[64];
};

inline constexpr int kMaxDevicePointers = 16;

// As ReduceArgs in reduce/reduce.h, with the same arithmetic, bit for bit, on device memory: at
// most 16 sources and 16 destinations. Pointers need only the alignment of an element.
struct DeviceReduceArgs {
  const void* sources[kMaxDevicePointers];
  void* destinations[kMaxDevicePointers];
  double scales[kMaxDevicePointers];
  std::int32_t num_sources, num_destinations;
  std::int64_t count;  // elements
  DType dtype;
  Op op;
  bool has_scales;
  double divisor;  // 1: none
};

// One piece of a pack (gather into one buffer) or unpack (scatter out of it); the list is in host
// memory and is read before the function returns.
struct DevicePiece {
  const void* source;
  void* destination;
  std::int64_t nbytes;
};

struct DeviceRuntime {
  std::uint32_t abi;
  const char* name;  // "cuda" or "emulated"
  const char* (*error_string)(int status);

  int (*device_count)(int* count);
  int (*get_device)(int* device);
  int (*set_device)(int device);
  int (*device_info)(int device, DeviceInfo* info);
  int (*can_access_peer)(int device, int peer, int* can);
  int (*enable_peer_access)(int peer);  // from the calling thread's device; enabled twice is 0
  int (*classify)(const void* pointer, PointerInfo* info);

  int (*allocate)(void** pointer, std::size_t nbytes);  // cudaMalloc: exportable
  int (*release)(void* pointer);
  int (*allocate_pinned)(void** pointer, std::size_t nbytes);
  int (*release_pinned)(void* pointer);

  int (*create_stream)(DeviceStream* stream);  // non-blocking, highest priority
  int (*destroy_stream)(DeviceStream stream);
  int (*synchronize_stream)(DeviceStream stream);
  int (*create_event)(DeviceEvent* event, int interprocess);  // no timing, blocking sync
  int (*destroy_event)(DeviceEvent event);
  int (*record_event)(DeviceEvent event, DeviceStream stream);
  int (*wait_event)(DeviceStream stream, DeviceEvent event);
  int (*query_event)(DeviceEvent event, int* done);
  int (*synchronize_event)(DeviceEvent event);

  int (*export_memory)(IpcMemoryHandle* handle, void* base);
  int (*open_memory)(void** base, const IpcMemoryHandle* handle);
  int (*close_memory)(void* base);
  int (*export_event)(IpcEventHandle* handle, DeviceEvent event);
  int (*open_event)(DeviceEvent* event, const IpcEventHandle* handle);

  // Asynchronous, in stream order, in any direction between host and device memory.
  int (*copy)(void* destination, const void* source, std::size_t nbytes, DeviceStream stream);
  int (*fill)(void* destination, int byte, std::size_t nbytes, DeviceStream stream);

  int (*reduce)(const DeviceReduceArgs* args, DeviceStream stream);
  int (*pack)(const DevicePiece* pieces, int num_pieces, DeviceStream stream);
  int (*cast)(const void* source, DType from, void* destination, DType to, std::int64_t count,
              DeviceStream stream);
  // float32 -> int8 with one float32 scale for each block, and back; the arithmetic of the int8
  // codec (mpidp/reducer/compression/int8.py).
  int (*quantize)(const float* source, std::int8_t* codes, float* scales, std::int64_t count,
                  std::int32_t block, DeviceStream stream);
  int (*dequantize)(const std::int8_t* codes, const float* scales, float* destination,
                    std::int64_t count, std::int32_t block, DeviceStream stream);
};

}  // namespace mpidp

extern "C" const mpidp::DeviceRuntime* mpidp_device_runtime(std::uint32_t abi);
