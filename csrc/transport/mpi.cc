#include "transport/mpi.h"

#include <algorithm>

#include "common/check_mpi.h"

namespace mpidp {

Transport::Handle MpiTransport::acquire() {
  for (std::size_t i = 0; i < messages_.size(); ++i) {
    if (!messages_[i].in_use) {
      messages_[i].in_use = true;
      return static_cast<Handle>(i);
    }
  }
  messages_.emplace_back();
  messages_.back().in_use = true;
  return static_cast<Handle>(messages_.size() - 1);
}

Transport::Handle MpiTransport::send(const void* data, std::int64_t nbytes, int peer, int tag) {
  const Handle handle = acquire();
  Message& message = messages_[static_cast<std::size_t>(handle)];
  message.is_receive = false;
  message.first_open = 0;
  message.requests.clear();
  const char* bytes = static_cast<const char*>(data);
  for (std::int64_t sent = 0; sent < nbytes;) {
    const std::int64_t piece = std::min(piece_bytes_, nbytes - sent);
    message.requests.push_back(MPI_REQUEST_NULL);
    MPIDP_MPI_CHECK(MPI_Isend(bytes + sent, static_cast<int>(piece), MPI_BYTE, peer, tag, comm_,
                              &message.requests.back()));
    sent += piece;
  }
  return handle;
}

Transport::Handle MpiTransport::receive(void* data, std::int64_t nbytes, int peer, int tag) {
  const Handle handle = acquire();
  Message& message = messages_[static_cast<std::size_t>(handle)];
  message.is_receive = true;
  message.first_open = 0;
  message.requests.clear();
  char* bytes = static_cast<char*>(data);
  for (std::int64_t received = 0; received < nbytes;) {
    const std::int64_t piece = std::min(piece_bytes_, nbytes - received);
    message.requests.push_back(MPI_REQUEST_NULL);
    MPIDP_MPI_CHECK(MPI_Irecv(bytes + received, static_cast<int>(piece), MPI_BYTE, peer, tag, comm_,
                              &message.requests.back()));
    received += piece;
  }
  return handle;
}

bool MpiTransport::test(Handle handle) {
  Message& message = messages_[static_cast<std::size_t>(handle)];
  while (message.first_open < message.requests.size()) {
    int complete = 0;
    MPIDP_MPI_CHECK(MPI_Test(&message.requests[message.first_open], &complete, MPI_STATUS_IGNORE));
    if (complete == 0) return false;
    ++message.first_open;
  }
  message.in_use = false;
  return true;
}

void MpiTransport::abandon() {
  // Errors are ignored here: the communicator is given up already.
  for (Message& message : messages_) {
    if (!message.in_use) continue;
    for (std::size_t i = message.first_open; i < message.requests.size(); ++i) {
      MPI_Request& request = message.requests[i];
      if (request == MPI_REQUEST_NULL) continue;
      if (message.is_receive) {
        MPI_Cancel(&request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);  // local for a cancelled receive
      } else {
        MPI_Request_free(&request);
      }
    }
    message.in_use = false;
  }
}

}  // namespace mpidp
