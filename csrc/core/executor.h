// Runs a schedule over a transport.
//
// Steps go in program order, but a step waits only for earlier steps that touch
// the same memory with at least one of the two writing. So segments pipeline by
// themselves: while one is reduced, the next is on the wire.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/wait.h"
#include "core/call.h"
#include "schedule/schedule.h"
#include "transport/transport.h"

namespace mpidp {

class Executor {
 public:
  // `peers` maps the schedule's ranks to the transport's; empty means they are
  // the same.
  Executor(Transport& transport, std::vector<int> peers);

  // Throws CollectiveTimeoutError naming the peers whose messages are
  // outstanding.
  void run(const Schedule& schedule, int rank, int world_size, const Call& call,
           const WaitPolicy& policy);
  // After an error: gives up on what is in flight.
  void abandon();

 private:
  struct Span {
    const char* begin = nullptr;
    const char* end = nullptr;
    bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
  };
  struct Active {
    const Step* step = nullptr;
    Span reads;
    Span reads_too;  // scratch of kReduceOrdered
    Span writes;
    int tag = 0;
    int temporary = -1;  // index into temporaries_, for kReceiveReduce
    Transport::Handle handle = -1;
    bool posted = false;
    bool received = false;  // kReceiveReduce: waits for its reduction only
    bool done = false;
  };

  char* address(BufferId buffer, std::int64_t offset, const Call& call);
  void activate(const Step& step, const Call& call);
  bool blocked(std::size_t index) const;
  bool advance(std::size_t index, const Call& call);
  void reduce_received(const Active& active, const Call& call);
  void reduce_ordered(const Active& active, const Call& call);
  int acquire_temporary(std::int64_t nbytes);
  [[noreturn]] void throw_timeout(const Call& call) const;

  Transport& transport_;
  std::vector<int> peers_;
  int rank_ = 0;
  int world_size_ = 1;
  std::vector<Active> window_;
  std::vector<const void*> ordered_sources_;
  std::vector<int> next_send_tag_, next_receive_tag_;
  std::vector<char> scratch_;
  struct Temporary {
    std::vector<char> bytes;
    bool in_use = false;
  };
  std::vector<Temporary> temporaries_;
  std::int64_t temporary_limit_ = 0;
};

}  // namespace mpidp
