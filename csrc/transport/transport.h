// How bytes get from one rank to another: what the executor needs, and no more.
#pragma once

#include <cstdint>

namespace mpidp {

class Transport {
 public:
  // Names a message in flight; valid until test() returns true for it.
  using Handle = std::int32_t;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // Messages between two ranks with one tag arrive in the order in which they
  // were sent. A message may have any length; the transport cuts it where its
  // wire cannot carry it whole.
  virtual Handle send(const void* data, std::int64_t nbytes, int peer, int tag) = 0;
  virtual Handle receive(void* data, std::int64_t nbytes, int peer, int tag) = 0;
  // True once the message is complete; the handle is then free for reuse.
  virtual bool test(Handle handle) = 0;
  // Gives up on everything in flight, after an error. The memory of a send that
  // MPI cannot cancel must stay readable: the caller keeps it.
  virtual void abandon() = 0;
};

}  // namespace mpidp
