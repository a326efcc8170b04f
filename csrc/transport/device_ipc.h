// GPU memory of the ranks of one node, mapped into each other by CUDA IPC, and the events that
// order their work. The ranks may use different GPUs or share one.
//
// No kernel ever waits for another process's kernel: two processes that share a GPU take turns on
// it, so such a kernel would wait for ever. The order is: a rank records its event, all meet on the
// host, every rank makes its stream wait for the others' events. A wait captures the record that
// was made before it, which is why the hosts must meet in between.
//
// An allocation is exported once, under a number that its owner chooses; the numbers travel in the
// entry message, and the handles only when a number is new to the others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "transport/device_runtime.h"
#include "transport/node_group.h"

namespace mpidp {

class DeviceIpc {
 public:
  // Gathers `nbytes` of every rank of the group, in its order, with a deadline.
  using Exchange = std::function<void(const void* mine, void* all, std::size_t nbytes)>;

  // Two sets of events alternate from collective to collective.
  static constexpr int kSets = 2;
  static constexpr int kMaxRanks = kMaxDevicePointers;

  // Works on the calling thread's device, by `stream`. The group must not be larger than kMaxRanks.
  DeviceIpc(NodeGroup& group, DeviceStream stream, Exchange exchange);
  ~DeviceIpc();
  DeviceIpc(const DeviceIpc&) = delete;
  DeviceIpc& operator=(const DeviceIpc&) = delete;

  // Collective: opens the peers' events and proves with data, read and written by a kernel and by
  // copies, that their memory can be reached. Returns empty on every rank, or on every rank why
  // not.
  std::string connect(double timeout);

  // What the peers need in order to find [pointer, pointer + nbytes); generation 0 where it cannot
  // be exported. Local, before the entry.
  Location locate(const void* pointer, std::int64_t nbytes);
  // Whether a rank named memory whose handle this group has not exchanged; the same on all ranks.
  bool is_news(int peer, const Location& location) const {
    return location.generation > peers_[static_cast<std::size_t>(peer)].highest;
  }
  // Collective, where there are news: exchanges the handles and maps the memory.
  void exchange_news(double timeout);
  // Whether all ranks can reach it; the same on all ranks.
  bool reachable(int peer, const Location& location) const;
  char* resolve(int peer, const Location& location);

  void record_ready(int set);
  void wait_ready(int set);  // of all peers
  void record_done(int set);
  void wait_done(int set);

  // Once no peer uses this rank's memory any more, and `stream` is idle.
  void release();

 private:
  struct Export {
    std::uint32_t number = 0;
    void* base = nullptr;
    std::uint64_t size = 0;
  };
  struct Offer {
    std::uint32_t number = 0;
    std::uint32_t reserved = 0;
    IpcMemoryHandle handle{};
  };
  static constexpr int kOffers = 4;
  static constexpr int kRetired = 32;
  struct News {
    std::int32_t num_offers = 0;
    std::int32_t num_retired = 0;
    std::int32_t more = 0;
    std::int32_t reserved = 0;
    Offer offers[kOffers];
    std::uint32_t retired[kRetired] = {};
  };
  struct Peer {
    DeviceEvent ready[kSets] = {};
    DeviceEvent done[kSets] = {};
    std::uint32_t highest = 0;              // number whose handle was exchanged
    std::set<std::uint32_t> refused;        // which some rank could not open
    std::map<std::uint32_t, char*> mapped;  // by number
  };

  bool all_agree(bool mine, double timeout);
  void export_events();
  std::string open_events();
  std::string probe(double timeout);
  bool read_probes(const std::vector<char*>& bases, char* scratch, double timeout);
  void write_probes(const std::vector<char*>& bases, const char* mine);
  bool check_written(const char* mine, double timeout);
  void finish_stream(double timeout);
  News collect_news();
  bool open_offers(const std::vector<News>& all);
  void close_retired(const std::vector<News>& all, double timeout);
  std::string agree_on_reason(const std::string& mine);

  NodeGroup& group_;
  DeviceStream stream_;
  Exchange exchange_;
  DeviceEvent idle_ = nullptr;  // not shared: for the host's own waits
  DeviceEvent ready_[kSets] = {};
  DeviceEvent done_[kSets] = {};
  std::vector<Peer> peers_;
  std::map<std::uint64_t, Export> exports_;  // by allocation
  std::vector<Offer> pending_;               // exported, not yet offered
  std::uint32_t next_number_ = 1;
};

}  // namespace mpidp
