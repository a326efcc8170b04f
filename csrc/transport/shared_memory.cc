#include "transport/shared_memory.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <string>

#include "common/check.h"

namespace mpidp {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kAlignment = 64;
// Small allocations share segments of this size, so that file descriptors stay
// few.
constexpr std::size_t kPoolBytes = std::size_t{4} << 20;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::string system_error(const std::string& what) { return what + ": " + std::strerror(errno); }

// The first number in a file such as /sys/fs/cgroup/memory.max; -1 if there is
// none ("max").
long long first_number(const char* path) {
  std::FILE* file = std::fopen(path, "re");
  if (file == nullptr) return -1;
  long long value = -1;
  if (std::fscanf(file, "%lld", &value) != 1) value = -1;
  std::fclose(file);
  return value;
}

long long meminfo_available() {
  std::FILE* file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return -1;
  char line[128];
  long long kib = -1;
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    if (std::sscanf(line, "MemAvailable: %lld kB", &kib) == 1) break;
  }
  std::fclose(file);
  return kib < 0 ? -1 : kib * 1024;
}

// fallocate on a memfd succeeds until the kernel has to kill somebody, so look
// before: the node's available memory and the control group's limit both bound
// what can be promised.
bool memory_available(std::size_t nbytes) {
  const auto need = static_cast<long long>(nbytes);
  const long long available = meminfo_available();
  if (available >= 0 && need > available) return false;
  const long long limit = first_number("/sys/fs/cgroup/memory.max");
  const long long used = first_number("/sys/fs/cgroup/memory.current");
  return limit < 0 || used < 0 || need <= limit - used;
}

// A memfd of nbytes with its pages reserved, mapped at *base. Returns the
// descriptor.
int create_memfd(const char* name, std::size_t nbytes, char** base) {
  if (!memory_available(nbytes)) throw std::bad_alloc();
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) {
    throw Error(ErrorKind::kMpidp, system_error("cannot create shared memory (memfd_create)"));
  }
  if (fchmod(fd, 0600) != 0 || fallocate(fd, 0, 0, static_cast<off_t>(nbytes)) != 0) {
    close(fd);
    throw std::bad_alloc();
  }
  void* address = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (address == MAP_FAILED) {
    close(fd);
    throw std::bad_alloc();
  }
  *base = static_cast<char*>(address);
  return fd;
}

void* map_peer_fd(std::int64_t pid, int fd, std::size_t nbytes, int protection) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/fd/%d", static_cast<long long>(pid), fd);
  const int flags = (protection & PROT_WRITE) != 0 ? O_RDWR : O_RDONLY;
  const int opened = open(path, flags | O_CLOEXEC);
  if (opened < 0) return nullptr;
  struct stat status{};
  // A descriptor number reused for something else must not be mapped past its
  // end (SIGBUS).
  if (fstat(opened, &status) != 0 || static_cast<std::size_t>(status.st_size) < nbytes) {
    close(opened);
    return nullptr;
  }
  void* address = mmap(nullptr, nbytes, protection, MAP_SHARED | MAP_POPULATE, opened, 0);
  close(opened);
  return address == MAP_FAILED ? nullptr : address;
}

}  // namespace

PeerMemory::PeerMemory(const ProcessId& id) : pid_(id.pid) {
  void* address = map_peer_fd(id.pid, id.ledger_fd, sizeof(Ledger), PROT_READ);
  if (address == nullptr) {
    throw Error(ErrorKind::kMpidp,
                system_error("cannot map the memory of process " + std::to_string(id.pid)));
  }
  ledger_ = static_cast<const Ledger*>(address);
  if (ledger_->magic != id.magic) {
    munmap(address, sizeof(Ledger));
    throw Error(ErrorKind::kMpidp,
                "process " + std::to_string(id.pid) + " is not visible under its own process id");
  }
}

PeerMemory::~PeerMemory() {
  for (int i = 0; i < kMaxSegments; ++i) {
    if (mapped_[i].base != nullptr) munmap(mapped_[i].base, mapped_[i].nbytes);
  }
  munmap(const_cast<Ledger*>(ledger_), sizeof(Ledger));
}

void PeerMemory::unmap_dead() {
  for (int i = 0; i < kMaxSegments; ++i) {
    Mapping& mapping = mapped_[i];
    if (mapping.base == nullptr) continue;
    const std::uint32_t mapped = mapping.generation.load(std::memory_order_relaxed);
    if (ledger_->entries[i].generation.load(std::memory_order_acquire) == mapped) continue;
    // No collective can be using it: the peer freed it, which it does outside of collectives only.
    mapping.generation.store(0, std::memory_order_release);
    munmap(mapping.base, mapping.nbytes);
    mapping.base = nullptr;
  }
}

char* PeerMemory::resolve_slowly(const Location& location) {
  if (location.segment >= static_cast<std::uint32_t>(kMaxSegments)) {
    throw Error(ErrorKind::kMpidp, "a peer named a segment that cannot exist");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  unmap_dead();
  const LedgerEntry& entry = ledger_->entries[location.segment];
  Mapping& mapping = mapped_[location.segment];
  if (entry.generation.load(std::memory_order_acquire) != location.generation) {
    throw Error(ErrorKind::kMpidp, "a peer freed its registered array during a collective");
  }
  if (mapping.base == nullptr) {
    mapping.nbytes = entry.nbytes;
    mapping.base =
        static_cast<char*>(map_peer_fd(pid_, entry.fd, entry.nbytes, PROT_READ | PROT_WRITE));
    if (mapping.base == nullptr) {
      throw Error(ErrorKind::kMpidp,
                  system_error("cannot map registered memory of process " + std::to_string(pid_)));
    }
    mapping.generation.store(location.generation, std::memory_order_release);
  }
  return mapping.base + location.offset;
}

MemoryRegistry& MemoryRegistry::instance() {
  static auto* registry = new MemoryRegistry();
  return *registry;
}

void MemoryRegistry::ensure_ledger() {
  if (ledger_ != nullptr) return;
  char* base = nullptr;
  ledger_fd_ = create_memfd("mpidp-ledger", sizeof(Ledger), &base);
  ledger_ = reinterpret_cast<Ledger*>(base);  // zero pages are a valid empty ledger
  std::random_device random;
  ledger_->magic = (static_cast<std::uint64_t>(random()) << 32) | random();
}

ProcessId MemoryRegistry::process_id() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ensure_ledger();
  return ProcessId{getpid(), ledger_fd_, ledger_->magic};
}

MemoryRegistry::Segment* MemoryRegistry::create_segment(std::size_t nbytes) {
  ensure_ledger();
  std::uint32_t index = 0;
  while (index < static_cast<std::uint32_t>(kMaxSegments) &&
         ledger_->entries[index].generation.load(std::memory_order_relaxed) != 0) {
    ++index;
  }
  if (index == static_cast<std::uint32_t>(kMaxSegments)) {
    throw Error(ErrorKind::kMpidp, "more than " + std::to_string(kMaxSegments) +
                                       " registered segments: free some arrays of comm.empty()");
  }
  auto segment = std::make_unique<Segment>();
  segment->fd = create_memfd("mpidp-registered", nbytes, &segment->base);
  segment->index = index;
  segment->generation = next_generation_++;
  segment->nbytes = nbytes;
  segment->free_blocks[0] = nbytes;
  LedgerEntry& entry = ledger_->entries[index];
  entry.fd = segment->fd;
  entry.nbytes = nbytes;
  // Release: a peer that sees the generation sees the descriptor and the size.
  entry.generation.store(segment->generation, std::memory_order_release);
  Segment* raw = segment.get();
  segments_.emplace(segment->base, std::move(segment));
  return raw;
}

void MemoryRegistry::destroy_segment(Segment* segment) {
  ledger_->entries[segment->index].generation.store(0, std::memory_order_release);
  // Peers may hold stale mappings until they next sweep; give the pages back
  // now.
  fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
            static_cast<off_t>(segment->nbytes));
  munmap(segment->base, segment->nbytes);
  close(segment->fd);
  if (last_hit_ == segment) last_hit_ = nullptr;
  segments_.erase(segment->base);
}

void* MemoryRegistry::allocate(std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t alignment = nbytes >= kPageBytes ? kPageBytes : kAlignment;
  const std::size_t need = round_up(std::max<std::size_t>(nbytes, 1), kAlignment);
  Segment* home = nullptr;
  std::size_t offset = 0;
  if (need <= kPoolBytes / 4) {
    for (auto& [base, segment] : segments_) {
      if (segment->nbytes != kPoolBytes) continue;
      for (const auto& [start, length] : segment->free_blocks) {
        const std::size_t aligned = round_up(start, alignment);
        if (aligned + need <= start + length) {
          home = segment.get();
          offset = aligned;
          break;
        }
      }
      if (home != nullptr) break;
    }
  }
  if (home == nullptr) {
    home = create_segment(need <= kPoolBytes / 4 ? kPoolBytes : round_up(need, kPageBytes));
    offset = 0;
  }
  // Cut [offset, offset + need) out of the free block that holds it.
  auto block = std::prev(home->free_blocks.upper_bound(offset));
  const std::size_t start = block->first;
  const std::size_t end = start + block->second;
  home->free_blocks.erase(block);
  if (offset > start) home->free_blocks[start] = offset - start;
  if (offset + need < end) home->free_blocks[offset + need] = end - offset - need;
  home->used_blocks[offset] = need;
  std::memset(home->base + offset, 0, need);
  return home->base + offset;
}

MemoryRegistry::Segment* MemoryRegistry::segment_of(const void* pointer) {
  const char* address = static_cast<const char*>(pointer);
  if (last_hit_ != nullptr && address >= last_hit_->base &&
      address < last_hit_->base + last_hit_->nbytes) {
    return last_hit_;
  }
  auto next = segments_.upper_bound(address);
  if (next == segments_.begin()) return nullptr;
  Segment* segment = std::prev(next)->second.get();
  if (address >= segment->base + segment->nbytes) return nullptr;
  last_hit_ = segment;
  return segment;
}

void MemoryRegistry::release(void* pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Segment* segment = segment_of(pointer);
  if (segment == nullptr) return;  // disowned after a fork
  const auto offset = static_cast<std::size_t>(static_cast<char*>(pointer) - segment->base);
  auto used = segment->used_blocks.find(offset);
  if (used == segment->used_blocks.end()) return;
  std::size_t start = offset;
  std::size_t end = offset + used->second;
  segment->used_blocks.erase(used);
  if (segment->used_blocks.empty()) {
    destroy_segment(segment);
    return;
  }
  auto after = segment->free_blocks.lower_bound(start);
  if (after != segment->free_blocks.end() && after->first == end) {
    end += after->second;
    after = segment->free_blocks.erase(after);
  }
  if (after != segment->free_blocks.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == start) {
      start = before->first;
      segment->free_blocks.erase(before);
    }
  }
  segment->free_blocks[start] = end - start;
}

Location MemoryRegistry::locate(const void* pointer, std::size_t nbytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Segment* segment = segment_of(pointer);
  if (segment == nullptr) return Location{};
  const auto offset = static_cast<std::size_t>(static_cast<const char*>(pointer) - segment->base);
  if (offset + nbytes > segment->nbytes) return Location{};
  return Location{segment->index, segment->generation, offset};
}

void MemoryRegistry::disown_after_fork() {
  // The mutex may be held by a thread that does not exist in the child; the
  // child is one thread.
  new (&mutex_) std::mutex();
  for (auto& entry : segments_)
    static_cast<void>(entry.second.release());  // leaked: still mapped, still readable
  segments_.clear();
  last_hit_ = nullptr;
  ledger_ = nullptr;
  ledger_fd_ = -1;
}

}  // namespace mpidp
