// A communicator's native half: topology, the entry of every collective, the
// choice of path.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/call.h"
#include "core/device_path.h"
#include "core/direct.h"
#include "core/engine.h"
#include "core/executor.h"
#include "core/native.h"
#include "transport/mpi.h"
#include "transport/node_group.h"

namespace mpidp {

struct Settings {
  double timeout = 600.0;          // seconds
  std::int64_t node_id = -1;       // overrides what MPI says of nodes; -1: it does not
  std::int64_t slot_bytes = 0;     // 0: built-in
  std::int64_t inline_bytes = 0;   // 0: built-in
  std::int64_t segment_bytes = 0;  // 0: built-in
  std::int64_t piece_bytes = 0;    // 0: built-in
  std::int32_t spin_us = -1;       // -1: by load
  std::int32_t shared_memory = 1;  // 0: everything goes through MPI
  std::int32_t stores = -1;        // a Stores; -1: measured
  DeviceTransport device_transport = DeviceTransport::kAuto;
  std::int64_t device_segment_bytes = 0;  // 0: built-in
};

struct Rule {
  std::int64_t limit;  // bytes, inclusive
  Algorithm algorithm;
};

class Context {
 public:
  // Collective. Borrows the communicator, which must be the caller's own
  // duplicate. Rank 0's settings hold for all, but for node_id.
  Context(MPI_Comm comm, const Settings& settings);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  int local_size() const { return local_size_; }
  int node_rank() const { return node_rank_; }
  int num_nodes() const { return num_nodes_; }
  int min_local_size() const { return min_local_size_; }
  int max_local_size() const { return max_local_size_; }
  bool shared_memory() const { return shared_memory_; }
  Stores stores() const { return group_->stores(); }
  bool thread_multiple() const { return thread_multiple_; }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  double timeout() const { return settings_.timeout; }

  void set_rules(Collective collective, std::vector<Rule> rules);
  Algorithm select(Collective collective, std::int64_t nbytes) const;
  // Fills in what the call leaves open, and throws where it cannot be done.
  void resolve(Call& call) const;

  // Blocking. With nothing pending it runs on the calling thread.
  void run(Call& call);
  // Asynchronous. `owners` is handed back by the engine when the collective is
  // done.
  std::shared_ptr<Operation> submit(const Call& call, std::vector<void*> owners);
  Engine& engine() { return engine_; }

  // The GPU side: its rank's device, or -1 while it has none; and DevicePath's descriptions.
  int device_index() const;
  std::string device_transport() const;
  std::string device_reason() const;
  // Makes `device` this rank's; a later call, or array, on another one throws. Local.
  DevicePath& device_path(int device);

  // Collective when `synchronize`: waits for pending work and for the peers.
  // Otherwise local: for interpreter exit and broken communicators; memory that
  // peers may still read is kept.
  // Returns whether all ranks came, and nothing of the communicator is in use any more: only then
  // may the caller free it.
  bool close(bool synchronize);

 private:
  // What a rank says of where it runs; three 64-bit integers to MPI.
  struct NodeKey {
    std::int64_t first_rank;  // of those with which MPI says that it can share memory
    std::int64_t node_id;     // the caller's own division
    std::int64_t machine;
  };
  void find_topology(const std::vector<NodeKey>& node_keys);
  void connect_shared_memory();
  bool all_ranks(bool mine) const;

  void execute(Call& call, bool on_progress_thread);
  void perform(Call& call);
  void perform_on_device(Call& call, bool on_progress_thread);
  void run_on_device(Call& call);
  std::shared_ptr<Operation> submit_on_device(const Call& call, std::vector<void*> owners);
  std::shared_ptr<DeviceOrder> begin_on_device(Call& call);
  bool leave_device();
  int device_of(const Call& call) const;
  Fingerprint fingerprint_of(const Call& call) const;
  void gather_in_group(const void* mine, void* all, std::size_t nbytes);
  void enter(const Call& call, EntryMessage& message, const Fingerprint& detail);
  bool groups_agree(bool mine, std::uint64_t fingerprint, double timeout);
  bool leaders_agree(bool mine, std::uint64_t fingerprint, double timeout);
  [[noreturn]] void throw_mismatch(const Call& call, const Fingerprint& detail);
  std::vector<Fingerprint> gather_details(const Fingerprint& detail, double timeout);
  void dispatch(Call& call, const DirectPath::Plan& plan);
  std::int64_t segment_count(const Call& call, int parties) const;
  void run_schedule(Call& call);
  void run_hierarchical(const Call& call);
  const void* scaled_input(const Call& call);
  const Schedule& cached_schedule(const ScheduleRequest& request);
  bool single_group() const { return num_groups_ == 1; }
  std::string describe(const Call& call) const;

  MPI_Comm comm_;
  Settings settings_;
  int rank_ = 0, world_size_ = 1;
  int local_rank_ = 0, local_size_ = 1;
  int node_rank_ = 0, num_nodes_ = 1;
  int min_local_size_ = 1, max_local_size_ = 1;
  int machine_ranks_ = 0;  // on this kernel, whatever counts as a node
  bool shared_memory_ = false;
  bool thread_multiple_ = false;
  std::atomic<bool> closed_{false};
  std::string broken_;  // why the communicator can no longer be used; empty while it can
  std::uint64_t sequence_ = 0;
  std::vector<Rule> rules_[kNumCollectives];

  // The groups that meet in shared memory: the nodes, or single ranks where
  // that is not possible.
  int group_index_ = 0, num_groups_ = 1;
  std::vector<std::vector<int>> groups_;  // global ranks, in order
  std::unique_ptr<NodeGroup> group_;
  std::unique_ptr<DirectPath> direct_;
  std::unique_ptr<MpiTransport> transport_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Executor> shard_executor_;  // between the owners of one shard, one a node
  std::unique_ptr<NativeCollectives> native_;
  WaitPolicy policy_;
  std::vector<std::pair<ScheduleRequest, std::unique_ptr<Schedule>>> schedules_;
  std::vector<char> scaled_;
  mutable std::mutex device_mutex_;  // guards the pointer; what it points to stays until close()
  std::unique_ptr<DevicePath> device_;
  double device_timeout_ = 0;  // of the collective in hand, for what it exchanges

  std::mutex run_mutex_;  // one collective at a time
  Engine engine_;
};

}  // namespace mpidp
