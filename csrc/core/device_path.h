// Collectives on GPU memory: the choice of transport, and the collectives over each.
//
// The ladder, on which all ranks stand on the same rung: CUDA IPC on one node, where a probe with
// data shows that it works and every array of the call can be exported; else staging through pinned
// host memory, where the collective itself is the host's. A communicator works on one GPU a rank;
// several ranks may share one.
//
// All methods but begin() and the descriptions run one at a time, under the context's lock;
// prepare() and execute() on a thread whose device is this one.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/device_order.h"
#include "transport/device_ipc.h"
#include "transport/node_group.h"
#include "transport/staged.h"

namespace mpidp {

enum class DeviceTransport : std::int32_t { kAuto, kStaged };

struct DevicePathSettings {
  DeviceTransport transport = DeviceTransport::kAuto;
  std::int64_t segment_bytes = 0;  // of one pinned slot; 0: built-in
  int rank = 0;
  int world_size = 1;
  bool single_group = false;
};

class DevicePath {
 public:
  using RunOnHost = std::function<void(Call&)>;

  // Local. `device` is the rank's GPU from here on.
  DevicePath(int device, NodeGroup& group, DeviceIpc::Exchange exchange,
             const DevicePathSettings& settings);
  ~DevicePath();
  DevicePath(const DevicePath&) = delete;
  DevicePath& operator=(const DevicePath&) = delete;

  int device() const { return device_; }
  // "undecided" until the first collective, then "local" (one rank), "ipc" or "staged".
  std::string transport() const;
  // Why a higher rung was not taken; empty where it was.
  std::string reason() const;

  // On the caller's thread: records what its stream has queued.
  std::shared_ptr<DeviceOrder> begin(DeviceStream caller) const;
  // Before the entry: what the peers need to know of this rank's arrays.
  void prepare(const Call& call, EntryMessage& message);
  // After it. `run_on_host` runs one call on host memory.
  void execute(const Call& call, const RunOnHost& run_on_host);

  // Blocks until nothing of this rank's is in flight on the GPU.
  void drain(double timeout);
  // Gives everything back, once no peer uses this rank's memory any more.
  void release();

 private:
  enum class Rung { kUndecided, kLocal, kIpc, kStaged };
  struct Segments;

  bool direct(const Call& call) const;
  void decide(const Call& call);
  void read_entry(const Call& call);
  bool can_go_by_ipc(const Call& call);
  void run_alone(const Call& call);
  void run_by_ipc(const Call& call);
  void launch(const Call& call);
  void reduce_chunk(const Call& call, std::int64_t offset, std::int64_t count,
                    const std::vector<char*>& destinations);
  void copy(const Call& call, char* destination, const char* source, std::int64_t count);
  void run_staged(const Call& call, const RunOnHost& run_on_host);
  void finish_empty(const Call& call);

  const int device_;
  NodeGroup& group_;
  DeviceIpc::Exchange exchange_;
  DevicePathSettings settings_;
  std::shared_ptr<EventPool> events_;
  DeviceStream stream_ = nullptr;
  std::unique_ptr<DeviceIpc> ipc_;
  std::unique_ptr<StagedSlots> slots_;
  bool ready_recorded_ = false;
  int set_ = 0;
  // By local rank: what each said at the entry, and where its arrays are mapped here.
  struct Side {
    Location input, output;
    bool reads = false;   // its input is read by others
    bool writes = false;  // its output is written by others
    char* input_here = nullptr;
    char* output_here = nullptr;
    double scale = 1.0;
  };
  std::vector<Side> sides_;

  mutable std::mutex mutex_;  // guards what describes the choice
  Rung rung_ = Rung::kUndecided;
  std::string reason_;
};

}  // namespace mpidp
