// Device and pinned memory, copies, handles, devices, counters and faults.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "emulated_cuda.h"

namespace emulated {
namespace {

constexpr std::size_t kPage = 4096;
constexpr double kFreeWaitSeconds = 1.0;

enum class Kind { kDevice, kOpened, kPinned };

struct Block {
  Kind kind = Kind::kDevice;
  char* real = nullptr;  // where the bytes are; pinned memory: the address itself
  std::size_t nbytes = 0;
  std::size_t mapped = 0;
  int fd = -1;
  int device = 0;
  std::uint64_t id = 0;
  bool exportable = true;
};

struct Table {
  std::shared_mutex mutex;
  std::map<std::uintptr_t, Block> blocks;  // by the address that callers see
  std::uint64_t next_id = 1;

  // The block that holds `pointer`, or null. Call with the mutex held.
  const Block* find(const void* pointer, std::uintptr_t* base) const {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    auto after = blocks.upper_bound(address);
    if (after == blocks.begin()) return nullptr;
    --after;
    if (address >= after->first + std::max<std::size_t>(after->second.nbytes, 1)) return nullptr;
    *base = after->first;
    return &after->second;
  }
};

Table& table() {
  static auto* one = new Table;
  return *one;
}

struct Switches {
  std::mutex mutex;
  std::map<std::string, int> faults, counters;
};

Switches& switches() {
  static auto* one = new Switches;
  return *one;
}

struct MemoryTicket {
  std::int32_t pid, fd;
  std::uint64_t inode, nbytes;
  std::int32_t device;
};

thread_local int device_of_thread = 0;

std::size_t whole_pages(std::size_t nbytes) { return (nbytes + kPage - 1) / kPage * kPage; }

// The bytes for kernels and copies, and an address range beside them that faults.
bool map_device(int fd, std::size_t mapped, Block* block, void** address) {
  void* real = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                    fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (real == MAP_FAILED) return false;
  *address = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*address == MAP_FAILED) {
    munmap(real, mapped);
    return false;
  }
  block->real = static_cast<char*>(real);
  block->mapped = mapped;
  return true;
}

cudaError_t drop(void* address, Kind kind, const char* counter) {
  drain_all(kFreeWaitSeconds);
  Block block;
  {
    const std::lock_guard<std::shared_mutex> lock(table().mutex);
    const auto found = table().blocks.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == table().blocks.end() || found->second.kind != kind) return cudaErrorInvalidValue;
    block = found->second;
    table().blocks.erase(found);
  }
  if (kind != Kind::kPinned) munmap(block.real, block.mapped);
  munmap(address, block.mapped);
  if (block.fd >= 0) close(block.fd);
  count(counter, -1);
  return cudaSuccess;
}

// Null where host code may use the pointer itself.
bool is_device(const void* pointer) {
  std::uintptr_t base = 0;
  const std::shared_lock<std::shared_mutex> lock(table().mutex);
  const Block* block = table().find(pointer, &base);
  return block != nullptr && block->kind != Kind::kPinned;
}

bool is_pageable(const void* pointer) {
  std::uintptr_t base = 0;
  const std::shared_lock<std::shared_mutex> lock(table().mutex);
  return table().find(pointer, &base) == nullptr;
}

char* for_copy(const void* pointer) {
  return static_cast<char*>(is_device(pointer) ? translate(pointer) : const_cast<void*>(pointer));
}

}  // namespace

bool fault(const char* name) {
  const std::lock_guard<std::mutex> lock(switches().mutex);
  return switches().faults[name] != 0;
}

void count(const char* name, int by) {
  const std::lock_guard<std::mutex> lock(switches().mutex);
  switches().counters[name] += by;
}

int current_device() { return device_of_thread; }

int num_devices() {
  const char* text = std::getenv("MPIDP_EMULATED_DEVICES");
  return text == nullptr ? 1 : std::atoi(text);
}

void* translate(const void* pointer) {
  std::uintptr_t base = 0;
  const std::shared_lock<std::shared_mutex> lock(table().mutex);
  const Block* block = table().find(pointer, &base);
  if (block == nullptr) {
    std::fprintf(stderr, "emulated device: illegal access to %p: no device memory is there\n",
                 pointer);
    std::abort();
  }
  return block->real + (reinterpret_cast<std::uintptr_t>(pointer) - base);
}

void range_of(const void* pointer, void** base, std::uint64_t* size, std::uint64_t* id,
              bool* exportable) {
  std::uintptr_t start = 0;
  const std::shared_lock<std::shared_mutex> lock(table().mutex);
  const Block* block = table().find(pointer, &start);
  if (block == nullptr || block->kind == Kind::kPinned) return;
  *base = reinterpret_cast<void*>(start);
  *size = block->nbytes;
  *id = block->id;
  *exportable = block->exportable;
}

std::uint64_t inode_of(int fd) {
  struct stat found{};
  return fstat(fd, &found) == 0 ? static_cast<std::uint64_t>(found.st_ino) : 0;
}

int open_foreign(int pid, int fd, std::uint64_t inode) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened >= 0 && inode_of(opened) != inode) {  // freed, and the descriptor is another file's
    close(opened);
    return -1;
  }
  return opened;
}

}  // namespace emulated

using emulated::Block;
using emulated::Kind;

const char* cudaGetErrorString(cudaError_t status) {
  switch (status) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorDeviceUninitialized:
      return "invalid device context";
    case cudaErrorMapBufferObjectFailed:
      return "mapping of buffer object failed";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchOutOfResources:
      return "too many resources requested for launch";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "unrecognized error code";
  }
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = emulated::num_devices();
  return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}

cudaError_t cudaGetDevice(int* device) {
  *device = emulated::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulated::num_devices()) return cudaErrorInvalidDevice;
  emulated::device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= emulated::num_devices()) return cudaErrorInvalidDevice;
  *properties = cudaDeviceProp{};
  std::snprintf(properties->name, sizeof(properties->name), "emulated device %d", device);
  properties->uuid[15] = static_cast<unsigned char>(device + 1);  // the same in all processes
  properties->totalGlobalMem = std::size_t{1} << 32;
  properties->multiProcessorCount = 2;
  properties->major = 9;
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device == peer ? 0 : 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return peer == emulated::current_device() ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::uintptr_t base = 0;
  const std::shared_lock<std::shared_mutex> lock(emulated::table().mutex);
  const Block* block = emulated::table().find(pointer, &base);
  *attributes = {cudaMemoryTypeUnregistered, -2};
  if (block == nullptr) return cudaSuccess;
  attributes->type = block->kind == Kind::kPinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = block->device;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, std::size_t nbytes) {
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  if (emulated::fault("out_of_memory")) return cudaErrorMemoryAllocation;
  const std::size_t mapped = emulated::whole_pages(nbytes);
  const int fd = memfd_create("mpidp-emulated-memory", MFD_CLOEXEC);
  if (fd < 0) return cudaErrorMemoryAllocation;
  Block block;
  if (ftruncate(fd, static_cast<off_t>(mapped)) != 0 ||
      !emulated::map_device(fd, mapped, &block, pointer)) {
    close(fd);
    *pointer = nullptr;
    return cudaErrorMemoryAllocation;
  }
  block.kind = Kind::kDevice;
  block.nbytes = nbytes;
  block.fd = fd;
  block.device = emulated::current_device();
  block.exportable = !emulated::fault("not_exportable");
  std::memset(block.real, 0xa5, nbytes);  // new memory holds anything
  const std::lock_guard<std::shared_mutex> lock(emulated::table().mutex);
  block.id = emulated::table().next_id++;
  emulated::table().blocks[reinterpret_cast<std::uintptr_t>(*pointer)] = block;
  emulated::count("allocations", 1);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return emulated::drop(pointer, Kind::kDevice, "allocations");
}

cudaError_t cudaHostAlloc(void** pointer, std::size_t nbytes, unsigned) {
  *pointer = nullptr;
  if (nbytes == 0) return cudaSuccess;
  if (emulated::fault("out_of_memory")) return cudaErrorMemoryAllocation;
  Block block;
  block.kind = Kind::kPinned;
  block.nbytes = nbytes;
  block.mapped = emulated::whole_pages(nbytes);
  void* memory =
      mmap(nullptr, block.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return cudaErrorMemoryAllocation;
  block.real = static_cast<char*>(memory);
  block.device = emulated::current_device();
  *pointer = memory;
  const std::lock_guard<std::shared_mutex> lock(emulated::table().mutex);
  emulated::table().blocks[reinterpret_cast<std::uintptr_t>(memory)] = block;
  emulated::count("pinned", 1);
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  return emulated::drop(pointer, Kind::kPinned, "pinned");
}

cudaError_t cudaMemcpyAsync(void* destination, const void* source, std::size_t nbytes,
                            cudaMemcpyKind, cudaStream_t stream) {
  if (emulated::is_pageable(source)) {
    // Taken before the call returns, so that the caller may overwrite it.
    const auto* bytes = static_cast<const char*>(source);
    auto taken = std::make_shared<std::vector<char>>(bytes, bytes + nbytes);
    const bool known = emulated::enqueue(
        stream, [=] { std::memcpy(emulated::for_copy(destination), taken->data(), nbytes); });
    return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
  }
  const bool known = emulated::enqueue(stream, [=] {
    std::memmove(emulated::for_copy(destination), emulated::for_copy(source), nbytes);
  });
  if (!known) return cudaErrorInvalidResourceHandle;
  // Into pageable memory the copy is done when the call returns.
  if (emulated::is_pageable(destination)) emulated::drain(stream);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* destination, int byte, std::size_t nbytes, cudaStream_t stream) {
  const bool known = emulated::enqueue(
      stream, [=] { std::memset(emulated::translate(destination), byte, nbytes); });
  return known ? cudaSuccess : cudaErrorInvalidResourceHandle;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base) {
  if (emulated::fault("ipc_export")) return cudaErrorNotSupported;
  const std::shared_lock<std::shared_mutex> lock(emulated::table().mutex);
  std::uintptr_t start = 0;
  const Block* block = emulated::table().find(base, &start);
  if (block == nullptr || block->kind != Kind::kDevice || !block->exportable) {
    return cudaErrorInvalidValue;
  }
  const emulated::MemoryTicket ticket{getpid(), block->fd, emulated::inode_of(block->fd),
                                      block->nbytes, block->device};
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &ticket, sizeof(ticket));
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned) {
  *base = nullptr;
  emulated::MemoryTicket ticket;
  std::memcpy(&ticket, &handle, sizeof(ticket));
  if (ticket.pid == getpid()) return cudaErrorDeviceUninitialized;
  if (emulated::fault("ipc_open")) return cudaErrorMapBufferObjectFailed;
  const int fd = emulated::open_foreign(ticket.pid, ticket.fd, ticket.inode);
  if (fd < 0) return cudaErrorMapBufferObjectFailed;
  Block block;
  block.kind = Kind::kOpened;
  block.nbytes = ticket.nbytes;
  block.device = ticket.device;
  block.exportable = false;
  // Peer memory that returns garbage: a mapping of nothing in particular.
  const bool garbage = emulated::fault("ipc_garbage");
  const std::size_t mapped = emulated::whole_pages(ticket.nbytes);
  const bool done = emulated::map_device(garbage ? -1 : fd, mapped, &block, base);
  if (!done || garbage) close(fd);
  if (!done) {
    *base = nullptr;
    return cudaErrorMapBufferObjectFailed;
  }
  if (garbage) std::memset(block.real, 0x5a, mapped);
  block.fd = garbage ? -1 : fd;
  const std::lock_guard<std::shared_mutex> lock(emulated::table().mutex);
  block.id = emulated::table().next_id++;
  emulated::table().blocks[reinterpret_cast<std::uintptr_t>(*base)] = block;
  emulated::count("mappings", 1);
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void* base) {
  return emulated::drop(base, Kind::kOpened, "mappings");
}

extern "C" __attribute__((visibility("default"))) int mpidp_emulated_set_fault(const char* name,
                                                                               long on) {
  const std::lock_guard<std::mutex> lock(emulated::switches().mutex);
  emulated::switches().faults[name] = on != 0 ? 1 : 0;
  return 0;
}

extern "C" __attribute__((visibility("default"))) long mpidp_emulated_counter(const char* name) {
  const std::lock_guard<std::mutex> lock(emulated::switches().mutex);
  return emulated::switches().counters[name];
}
