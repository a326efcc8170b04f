// The plugin over the CUDA runtime: fills the table of device_runtime.h. The same source serves HIP
// and the emulated device (reduce/gpu.h).
#include <atomic>
#include <cstring>

#include "reduce/cuda.h"
#include "reduce/gpu.h"
#include "transport/device_runtime.h"

#if !defined(MPIDP_EMULATED) && !defined(__HIP_PLATFORM_AMD__)
#include <cuda.h>
#define MPIDP_DRIVER_QUERIES 1
#endif

namespace mpidp {
namespace {

static_assert(sizeof(IpcMemoryHandle) == sizeof(cudaIpcMemHandle_t), "handles are passed as bytes");
static_assert(sizeof(IpcEventHandle) == sizeof(cudaIpcEventHandle_t),
              "handles are passed as bytes");

constexpr int kMostDevices = 64;

// A failed call also leaves its error behind for the next cudaGetLastError(); clear it, so that no
// other library of the process finds it.
int checked(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) (void)cudaGetLastError();
  return static_cast<int>(status);
}

cudaStream_t stream_of(DeviceStream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(DeviceEvent event) { return static_cast<cudaEvent_t>(event); }

const char* error_string(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

int device_count(int* count) {
  *count = 0;
  return checked(cudaGetDeviceCount(count));
}
int get_device(int* device) { return checked(cudaGetDevice(device)); }
int set_device(int device) { return checked(cudaSetDevice(device)); }

int device_info(int device, DeviceInfo* info) {
  cudaDeviceProp found;
  static_assert(sizeof(found.name) >= sizeof(info->name), "cut to what fits");
  const int status = checked(cudaGetDeviceProperties(&found, device));
  if (status != kDeviceOk) return status;
  *info = DeviceInfo{};
  std::memcpy(info->name, found.name, sizeof(info->name) - 1);
#if defined(__HIP_PLATFORM_AMD__)
  // HIP of before 5.5 has no uuid; the place on the bus tells devices of one host apart as well.
  const int place[] = {found.pciDomainID, found.pciBusID, found.pciDeviceID};
  std::memcpy(info->uuid, place, sizeof(place));
#else
  static_assert(sizeof(found.uuid) == sizeof(info->uuid), "16 bytes");
  std::memcpy(info->uuid, &found.uuid, sizeof(info->uuid));
#endif
  info->multiprocessors = found.multiProcessorCount;
  info->compute_capability = 10 * found.major + found.minor;
  info->memory_bytes = found.totalGlobalMem;
  return kDeviceOk;
}

int can_access_peer(int device, int peer, int* can) {
  return checked(cudaDeviceCanAccessPeer(can, device, peer));
}

int enable_peer_access(int peer) {
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return kDeviceOk;
  }
  return checked(status);
}

#if defined(MPIDP_DRIVER_QUERIES)

// The driver's own function, found through the runtime: libcuda is never linked.
using GetAttributes = CUresult (*)(unsigned int, CUpointer_attribute*, void**, CUdeviceptr);

GetAttributes driver_query() {
  static const GetAttributes query = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &found,
                                                                12000, cudaEnableDefault, &result);
#else
    const cudaError_t status =
        cudaGetDriverEntryPoint("cuPointerGetAttributes", &found, cudaEnableDefault, &result);
#endif
    const bool usable = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    if (status != cudaSuccess) (void)cudaGetLastError();
    return usable ? reinterpret_cast<GetAttributes>(found) : nullptr;
  }();
  return query;
}

void classify_range(const void* pointer, PointerInfo* info) {
  const GetAttributes query = driver_query();
  if (query == nullptr) return;
  CUdeviceptr base = 0;
  std::size_t size = 0;
  unsigned long long id = 0;
  CUmemoryPool pool = nullptr;
  int capable = 0;
  CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                  CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID,
                                  CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
                                  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE};
  void* places[] = {&base, &size, &id, &pool, &capable};
  constexpr unsigned kWanted = sizeof(wanted) / sizeof(*wanted);
  const auto address = reinterpret_cast<CUdeviceptr>(pointer);
  if (query(kWanted, wanted, places, address) != CUDA_SUCCESS) return;
  info->base = reinterpret_cast<void*>(base);
  info->size = size;
  info->allocation_id = id;
  info->exportable = capable != 0 && pool == nullptr && base != 0 ? 1 : 0;
}

#elif defined(MPIDP_EMULATED)

void classify_range(const void* pointer, PointerInfo* info) {
  bool exportable = false;
  emulated::range_of(pointer, &info->base, &info->size, &info->allocation_id, &exportable);
  info->exportable = exportable ? 1 : 0;
}

#else

// HIP: without a range there is no offset into the exported allocation, so nothing is exported.
void classify_range(const void*, PointerInfo*) {}

#endif

int classify(const void* pointer, PointerInfo* info) {
  *info = PointerInfo{MemoryKind::kHost, -1, nullptr, 0, 0, 0};
  cudaPointerAttributes found;
  const cudaError_t status = cudaPointerGetAttributes(&found, pointer);
  if (status == cudaErrorInvalidValue) {  // before CUDA 11: memory that CUDA does not know
    (void)cudaGetLastError();
    return kDeviceOk;
  }
  if (status != cudaSuccess) return checked(status);
#if defined(__HIP_PLATFORM_AMD__)
  const bool device = found.memoryType == hipMemoryTypeDevice;
  const bool pinned = found.memoryType == hipMemoryTypeHost;
  const bool managed = found.isManaged != 0;
#else
  const bool device = found.type == cudaMemoryTypeDevice;
  const bool pinned = found.type == cudaMemoryTypeHost;
  const bool managed = found.type == cudaMemoryTypeManaged;
#endif
  info->kind = managed  ? MemoryKind::kManaged
               : device ? MemoryKind::kDevice
               : pinned ? MemoryKind::kPinned
                        : MemoryKind::kHost;
  if (device || managed) info->device = found.device;
  if (device && !managed) classify_range(pointer, info);
  return kDeviceOk;
}

int allocate(void** pointer, std::size_t nbytes) { return checked(cudaMalloc(pointer, nbytes)); }
int release(void* pointer) { return checked(cudaFree(pointer)); }
int allocate_pinned(void** pointer, std::size_t nbytes) {
  return checked(cudaHostAlloc(pointer, nbytes, cudaHostAllocPortable));
}
int release_pinned(void* pointer) { return checked(cudaFreeHost(pointer)); }

int create_stream(DeviceStream* stream) {
  int least = 0, greatest = 0;
  const int status = checked(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  if (status != kDeviceOk) return status;
  cudaStream_t made = nullptr;
  const int outcome = checked(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
  *stream = made;
  return outcome;
}
int destroy_stream(DeviceStream stream) { return checked(cudaStreamDestroy(stream_of(stream))); }
int synchronize_stream(DeviceStream stream) {
  return checked(cudaStreamSynchronize(stream_of(stream)));
}

int create_event(DeviceEvent* event, int interprocess) {
  const unsigned flags = cudaEventDisableTiming | cudaEventBlockingSync |
                         (interprocess != 0 ? cudaEventInterprocess : 0u);
  cudaEvent_t made = nullptr;
  const int status = checked(cudaEventCreateWithFlags(&made, flags));
  *event = made;
  return status;
}
int destroy_event(DeviceEvent event) { return checked(cudaEventDestroy(event_of(event))); }
int record_event(DeviceEvent event, DeviceStream stream) {
  return checked(cudaEventRecord(event_of(event), stream_of(stream)));
}
int wait_event(DeviceStream stream, DeviceEvent event) {
  return checked(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}
int query_event(DeviceEvent event, int* done) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  *done = status == cudaSuccess ? 1 : 0;
  if (status == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return kDeviceOk;
  }
  return checked(status);
}
int synchronize_event(DeviceEvent event) { return checked(cudaEventSynchronize(event_of(event))); }

int export_memory(IpcMemoryHandle* handle, void* base) {
  cudaIpcMemHandle_t made;
  const int status = checked(cudaIpcGetMemHandle(&made, base));
  if (status == kDeviceOk) std::memcpy(handle->bytes, &made, sizeof(made));
  return status;
}
int open_memory(void** base, const IpcMemoryHandle* handle) {
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle->bytes, sizeof(given));
  return checked(cudaIpcOpenMemHandle(base, given, cudaIpcMemLazyEnablePeerAccess));
}
int close_memory(void* base) { return checked(cudaIpcCloseMemHandle(base)); }
int export_event(IpcEventHandle* handle, DeviceEvent event) {
  cudaIpcEventHandle_t made;
  const int status = checked(cudaIpcGetEventHandle(&made, event_of(event)));
  if (status == kDeviceOk) std::memcpy(handle->bytes, &made, sizeof(made));
  return status;
}
int open_event(DeviceEvent* event, const IpcEventHandle* handle) {
  cudaIpcEventHandle_t given;
  std::memcpy(&given, handle->bytes, sizeof(given));
  cudaEvent_t opened = nullptr;
  const int status = checked(cudaIpcOpenEventHandle(&opened, given));
  *event = opened;
  return status;
}

int copy(void* destination, const void* source, std::size_t nbytes, DeviceStream stream) {
  if (nbytes == 0) return kDeviceOk;
  return checked(
      cudaMemcpyAsync(destination, source, nbytes, cudaMemcpyDefault, stream_of(stream)));
}
int fill(void* destination, int byte, std::size_t nbytes, DeviceStream stream) {
  if (nbytes == 0) return kDeviceOk;
  return checked(cudaMemsetAsync(destination, byte, nbytes, stream_of(stream)));
}

// Of the current device; asked once for each.
int multiprocessors() {
  static std::atomic<int> known[kMostDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMostDevices) return 1;
  int count = known[device].load(std::memory_order_relaxed);
  if (count == 0) {
    DeviceInfo info;
    if (device_info(device, &info) != kDeviceOk) return 1;
    count = info.multiprocessors;
    known[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

int after_launch(int status) { return checked(static_cast<cudaError_t>(status)); }

int reduce(const DeviceReduceArgs* args, DeviceStream stream) {
  return after_launch(gpu::reduce(*args, stream_of(stream), multiprocessors()));
}
int pack(const DevicePiece* pieces, int num_pieces, DeviceStream stream) {
  return after_launch(gpu::pack(pieces, num_pieces, stream_of(stream), multiprocessors()));
}
int cast(const void* source, DType from, void* destination, DType to, std::int64_t count,
         DeviceStream stream) {
  return after_launch(
      gpu::cast(source, from, destination, to, count, stream_of(stream), multiprocessors()));
}
int quantize(const float* source, std::int8_t* codes, float* scales, std::int64_t count,
             std::int32_t block, DeviceStream stream) {
  return after_launch(
      gpu::quantize(source, codes, scales, count, block, stream_of(stream), multiprocessors()));
}
int dequantize(const std::int8_t* codes, const float* scales, float* destination,
               std::int64_t count, std::int32_t block, DeviceStream stream) {
  return after_launch(gpu::dequantize(codes, scales, destination, count, block, stream_of(stream),
                                      multiprocessors()));
}

#if defined(MPIDP_EMULATED)
constexpr const char* kName = "emulated";
#elif defined(__HIP_PLATFORM_AMD__)
constexpr const char* kName = "hip";
#else
constexpr const char* kName = "cuda";
#endif

const DeviceRuntime table = {
    kDeviceAbi,
    kName,
    error_string,
    device_count,
    get_device,
    set_device,
    device_info,
    can_access_peer,
    enable_peer_access,
    classify,
    allocate,
    release,
    allocate_pinned,
    release_pinned,
    create_stream,
    destroy_stream,
    synchronize_stream,
    create_event,
    destroy_event,
    record_event,
    wait_event,
    query_event,
    synchronize_event,
    export_memory,
    open_memory,
    close_memory,
    export_event,
    open_event,
    copy,
    fill,
    reduce,
    pack,
    cast,
    quantize,
    dequantize,
};

}  // namespace
}  // namespace mpidp

extern "C" __attribute__((visibility("default"))) const mpidp::DeviceRuntime* mpidp_device_runtime(
    std::uint32_t abi) {
  return abi == mpidp::kDeviceAbi ? &mpidp::table : nullptr;
}
