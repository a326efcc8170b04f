// MPI point-to-point transport.
#pragma once

#include <mpi.h>

#include <vector>

#include "transport/transport.h"

namespace mpidp {

class MpiTransport final : public Transport {
 public:
  // Borrows the communicator. A message longer than piece_bytes goes as
  // several: MPI counts are ints.
  MpiTransport(MPI_Comm comm, std::int64_t piece_bytes) : comm_(comm), piece_bytes_(piece_bytes) {}

  Handle send(const void* data, std::int64_t nbytes, int peer, int tag) override;
  Handle receive(void* data, std::int64_t nbytes, int peer, int tag) override;
  bool test(Handle handle) override;
  void abandon() override;

 private:
  struct Message {
    std::vector<MPI_Request> requests;  // one a piece; the storage is reused
    std::size_t first_open = 0;
    bool in_use = false;
    bool is_receive = false;
  };
  Handle acquire();

  MPI_Comm comm_;
  std::int64_t piece_bytes_;
  std::vector<Message> messages_;
};

}  // namespace mpidp
