// Errors: thrown here, translated to mpidp.errors by the binding, never
// swallowed.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace mpidp {

// Which Python exception an Error becomes (mpidp/errors.py has the tree).
enum class ErrorKind {
  kMpidp,          // MpidpError
  kInvalidBuffer,  // InvalidBufferError
  kInvalidValue,   // InvalidArgumentError: bad algorithm, op, root, timeout
  kMismatch,       // MismatchError
  kTimeout,        // CollectiveTimeoutError
  kRankFailed,     // RankFailedError
  kClosed,         // ClosedError
  kMpi,            // MpiError
  kCuda,           // CudaError
  kInterrupted,    // the exception that a Python signal handler raised
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::vector<int> ranks = {})
      : std::runtime_error(message), kind_(kind), ranks_(std::move(ranks)) {}
  ErrorKind kind() const { return kind_; }
  // Timeout: the ranks that did not arrive. RankFailed: the dead. Mismatch: the
  // odd ones out.
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  ErrorKind kind_;
  std::vector<int> ranks_;
};

}  // namespace mpidp
