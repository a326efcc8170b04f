// Registered memory: pages of this process that the other processes of the node
// can map.
//
// Every process has one registry. Memory comes in segments, each an anonymous
// memfd: it has no name, so a crash leaves nothing behind; it is private to the
// user, since a peer reaches it only through /proc/<pid>/fd, which the kernel
// guards; and it does not count against /dev/shm. A ledger, itself a memfd,
// lists the live segments, so that peers can map them when they first meet a
// pointer into one, with no handshake.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace mpidp {

// A place in a process's registered memory, meaningful to its peers.
struct Location {
  std::uint32_t segment = 0;
  std::uint32_t generation = 0;  // 0: not registered
  std::uint64_t offset = 0;      // bytes
};

inline constexpr int kMaxSegments = 4096;

struct LedgerEntry {
  std::atomic<std::uint32_t> generation;  // 0 while the entry is free
  std::int32_t fd;
  std::uint64_t nbytes;
};

struct Ledger {
  std::uint64_t magic;  // random; told to peers through MPI, so that they know
                        // they mapped us
  LedgerEntry entries[kMaxSegments];
};

// What a process tells its peers so that they can map its ledger.
struct ProcessId {
  std::int64_t pid = 0;
  std::int32_t ledger_fd = -1;
  std::uint64_t magic = 0;
};

// Another process's registered memory, as mapped here. Mappings are made on
// first use and cached.
class PeerMemory {
 public:
  // Throws Error(kMpidp) where the kernel refuses; the caller then falls back
  // to MPI.
  explicit PeerMemory(const ProcessId& id);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Thread-safe: communicators that share a peer resolve on their own progress threads.
  char* resolve(const Location& location) {
    if (location.segment < static_cast<std::uint32_t>(kMaxSegments)) {
      const Mapping& mapping = mapped_[location.segment];
      // Acquire: whoever sees the generation sees the base that belongs to it.
      if (mapping.generation.load(std::memory_order_acquire) == location.generation) {
        return mapping.base + location.offset;
      }
    }
    return resolve_slowly(location);
  }

 private:
  struct Mapping {
    std::atomic<std::uint32_t> generation{0};
    char* base = nullptr;
    std::size_t nbytes = 0;
  };
  char* resolve_slowly(const Location& location);
  void unmap_dead();

  std::int64_t pid_;
  const Ledger* ledger_ = nullptr;
  std::mutex mutex_;  // held by who changes mapped_
  // Of fixed size, so that it never moves under a reader.
  std::unique_ptr<Mapping[]> mapped_{new Mapping[kMaxSegments]};
};

// This process's registered memory. Thread-safe.
class MemoryRegistry {
 public:
  // Never destroyed: arrays may outlive every static object at interpreter
  // exit.
  static MemoryRegistry& instance();

  ProcessId process_id();
  // Zeroed memory whose pages are reserved; 64-byte aligned, page aligned from
  // a page upwards. Throws std::bad_alloc where the pages cannot be had.
  void* allocate(std::size_t nbytes);
  void release(void* pointer);
  // Where [pointer, pointer + nbytes) lies, or generation 0 when it is not
  // wholly registered.
  Location locate(const void* pointer, std::size_t nbytes);
  // In a forked child the memory is the parent's: forget it without touching
  // it.
  void disown_after_fork();

 private:
  struct Segment {
    std::uint32_t index = 0;
    std::uint32_t generation = 0;
    int fd = -1;
    char* base = nullptr;
    std::size_t nbytes = 0;
    std::map<std::size_t, std::size_t> free_blocks;  // offset -> bytes
    std::map<std::size_t, std::size_t> used_blocks;
  };
  MemoryRegistry() = default;
  void ensure_ledger();
  Segment* create_segment(std::size_t nbytes);
  void destroy_segment(Segment* segment);
  Segment* segment_of(const void* pointer);

  std::mutex mutex_;
  Ledger* ledger_ = nullptr;
  int ledger_fd_ = -1;
  std::uint32_t next_generation_ = 1;
  std::map<const char*, std::unique_ptr<Segment>> segments_;  // by base address
  Segment* last_hit_ = nullptr;
};

}  // namespace mpidp
