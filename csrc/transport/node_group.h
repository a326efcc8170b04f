// The ranks of one communicator that share a node, and how they meet in shared
// memory.
//
// Every rank owns a control block in its registered memory; the others map it.
// All waiting goes through one primitive, the sync point: a rank arrives
// (publishes the number of the sync point, with a small message) and waits
// until every rank of the group has arrived at it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/wait.h"
#include "reduce/reduce.h"
#include "transport/shared_memory.h"

namespace mpidp {

// What a rank says at the entry of a collective, beside the fact that it has
// arrived.
struct EntryMessage {
  std::uint64_t fingerprint = 0;  // hash; ranks that disagree raise
  double scale = 1.0;
  Location input;   // generation 0: not registered
  Location output;  // likewise
};

inline constexpr std::int64_t kPayloadBytes = 32;

// One cache line: the arrival flag and the message travel in one transfer. Two
// of them alternate. Rank r may overwrite the line of sync point s at s + 2
// only, which it reaches only after every rank arrived at s + 1, that is, after
// every rank finished reading s.
struct alignas(64) SyncLine {
  std::atomic<std::uint32_t> step;      // sync point that this rank has reached
  std::atomic<std::uint32_t> sleepers;  // ranks asleep on `step`
  std::uint64_t fingerprint;
  double scale;
  // The input itself where it is that short, for it travels with the flag; else where input and
  // output lie: two Locations.
  char payload[kPayloadBytes];
  // Not 0: this rank cannot go on, and all raise. Also set after the arrival, by a rank that gives
  // up waiting: so a late rank learns at once that it is too late.
  std::atomic<std::uint32_t> status;
  std::uint32_t reserved;
};
static_assert(sizeof(SyncLine) == 64 && kPayloadBytes == 2 * sizeof(Location));

// Enough of a call to tell the user what differed.
struct Fingerprint {
  std::uint64_t sequence = 0;
  std::int64_t count = 0;
  std::int32_t root = 0;
  std::uint8_t collective = 0;
  std::uint8_t op = 0;
  std::uint8_t dtype = 0;
  std::uint8_t device = 0;
  std::uint8_t algorithm = 0;
  std::uint8_t deterministic = 0;
  std::uint16_t reserved = 0;

  // Of everything but the sequence number, which cannot differ.
  std::uint64_t hash() const;
};

struct ControlBlock {
  SyncLine lines[2];
  Fingerprint details[2];  // by sync point, read on mismatch only
  Location staging;        // of this rank, once it has one
};

struct NodeGroupSettings {
  double timeout = 600.0;
  std::int64_t inline_bytes = 0;  // of one mailbox
  std::int64_t slot_bytes = 0;    // of one staging slot, before division over the ranks
  int spin_us = -1;
  std::int32_t stores = -1;  // a Stores; -1: choose_stores() measures
  // Ranks that share this group's cores: more than the group where several nodes, such as
  // containers, are one machine.
  int machine_ranks = 1;
};

class NodeGroup {
 public:
  // What a rank needs of another to map its control block; exchanged through
  // MPI.
  struct Card {
    ProcessId process;
    Location control;
    std::int32_t global_rank = 0;
    std::int32_t stores = -1;      // what this process found best before; -1: nothing yet
    std::uint64_t cores[16] = {};  // affinity mask
  };

  explicit NodeGroup(const NodeGroupSettings& settings);
  ~NodeGroup();
  NodeGroup(const NodeGroup&) = delete;
  NodeGroup& operator=(const NodeGroup&) = delete;

  Card card(int global_rank);
  // Maps the peers. Throws where one cannot be mapped; probe() then tells
  // whether all could.
  void connect(const std::vector<Card>& cards, int my_index);
  // A group of this rank alone.
  void connect_alone(int global_rank);
  // Writes a pattern, and checks the peers' after a barrier that the caller
  // provides in between.
  void write_probe();
  bool check_probe() const;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int global_rank(int peer) const { return global_ranks_[static_cast<std::size_t>(peer)]; }
  std::int64_t inline_bytes() const { return settings_.inline_bytes; }

  // Two steps of a sync point. The second throws CollectiveTimeoutError or
  // RankFailedError naming the missing, and MemoryError's cause when a peer
  // reported a status.
  void arrive(std::uint32_t status = 0);
  void wait(double timeout);
  // As wait(), but hands back the statuses instead of throwing for them.
  std::uint32_t wait_status(double timeout);
  void sync(double timeout) {
    arrive();
    wait(timeout);
  }

  // The sync point at the entry of a collective. After enter() the peers'
  // messages are readable until this rank arrives at the next sync point but
  // one.
  void arrive_at_entry(const EntryMessage& message, const Fingerprint& detail);
  bool entries_agree() const;
  Fingerprint detail(int peer) const;
  double scale(int peer) const;
  bool has_scales() const;
  // Peer's registered array as mapped here, or null if it is not registered.
  char* input(int peer);
  char* output(int peer);
  bool input_registered(int peer) const {
    return !entry_has_payload_ && location(peer, 0).generation != 0;
  }
  bool output_registered(int peer) const {
    return !entry_has_payload_ && location(peer, 1).generation != 0;
  }
  // What the peer said at the entry, not mapped: for memory that another transport reaches.
  Location input_location(int peer) const { return location(peer, 0); }
  Location output_location(int peer) const { return location(peer, 1); }
  bool all_inputs_registered() const;
  bool all_outputs_registered() const;
  // After a disagreement: makes the ranks' counters equal again.
  void recover(double timeout);

  // Mailboxes: two of inline_bytes() a rank, alternating by collective. An input of kPayloadBytes
  // at most can go into the line of the next entry instead, where mailbox() then finds it.
  void send_with_entry(const void* input, std::int64_t nbytes);
  char* my_mailbox();              // of the collective that is about to be entered
  char* my_mailbox_after_entry();  // of the one that was
  const char* mailbox(int peer) const;

  // Staging: sets of slots; each set has one slot for every owner and one for results. Whether it
  // exists is the same on all ranks; making it is a sync point.
  bool has_staging() const { return slot_bytes_ != 0; }
  void make_staging(double timeout);
  std::int64_t slot_bytes() const { return slot_bytes_; }
  char* slot(int peer, int set, int index) {
    return staging_[static_cast<std::size_t>(peer)] + (set * (size_ + 1) + index) * slot_bytes_;
  }
  char* result_slot(int peer, int set) { return slot(peer, set, size_); }
  // The set that the next staged block goes to; continues over collectives, so that a block never
  // lands where the last but one is still being read. Ordinary stores are faster to slots that
  // were used longer ago (12 against 24 GB/s on an Intel machine with 2 MiB second-level caches).
  int next_set() {
    return static_cast<int>(block_++ %
                            static_cast<std::uint64_t>(stores_ == Stores::kStreaming ? 2 : sets_));
  }

  // How to write what peers read; the same on all ranks. Collective: makes the staging and times
  // each kind of stores with the reading by the next rank.
  void choose_stores(double timeout);
  Stores stores() const { return stores_; }
  // The largest input that goes into the mailbox whole.
  std::int64_t one_shot_bytes() const;

  void use_policy(const WaitPolicy& policy) { policy_ = policy; }
  WaitPolicy policy_for(int threads_per_rank) const;
  bool oversubscribed() const { return std::max(size_, settings_.machine_ranks) > cores_; }

  // Gives the memory back. Only once no peer can look at it any more.
  void release();

 private:
  Location location(int peer, int index) const {
    Location found;
    std::memcpy(&found,
                line(peer, entry_step_).payload + sizeof(found) * static_cast<std::size_t>(index),
                sizeof(found));
    return found;
  }
  static std::int32_t stores_found();
  void take_over_stores(const std::vector<Card>& cards);
  SyncLine& line(int peer, std::uint32_t step) const {
    return blocks_[static_cast<std::size_t>(peer)]->lines[step & 1];
  }
  void publish(std::uint32_t step);
  void wait_for(int peer, std::uint32_t step, double timeout);
  void wait_slowly(int peer, std::uint32_t step, double timeout);
  void give_up();
  [[noreturn]] void throw_gave_up(int peer) const;
  [[noreturn]] void throw_timeout(std::uint32_t step, double timeout) const;
  void check_alive(std::uint32_t step) const;
  std::vector<int> missing(std::uint32_t step) const;

  NodeGroupSettings settings_;
  int rank_ = 0;
  int size_ = 1;
  int cores_ = 1;
  std::uint32_t step_ = 0;
  std::uint32_t entry_step_ = 0;
  std::uint64_t entries_ = 0;
  char payload_[kPayloadBytes] = {};
  bool next_has_payload_ = false, entry_has_payload_ = false;
  std::uint64_t block_ = 0;
  std::int64_t slot_bytes_ = 0;
  int sets_ = 2;
  Stores stores_ = Stores::kStreaming;
  bool stores_known_ = false;  // from the cards
  WaitPolicy policy_;
  ControlBlock* mine_ = nullptr;
  char* my_staging_ = nullptr;
  std::vector<std::shared_ptr<PeerMemory>> peers_;
  std::vector<ControlBlock*> blocks_;
  std::vector<char*> staging_;
  std::vector<int> global_ranks_;
  std::vector<std::int64_t> pids_;
};

}  // namespace mpidp
