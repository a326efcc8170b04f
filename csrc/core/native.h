// The MPI library's own collectives: the baseline, and the fallback.
#pragma once

#include <mpi.h>

#include "common/wait.h"
#include "core/call.h"

namespace mpidp {

// Runs the call by the non-blocking form of MPI's collective, polled so that
// the deadline holds. The caller has applied the scale. float16 and bfloat16,
// which MPI lacks, and min and max of floating types, whose NaNs MPI leaves
// open, use this library's kernels as MPI operators. Throws
// InvalidArgumentError where an MPI before version 4 cannot express the count.
class NativeCollectives {
 public:
  explicit NativeCollectives(MPI_Comm comm);
  ~NativeCollectives();
  NativeCollectives(const NativeCollectives&) = delete;
  NativeCollectives& operator=(const NativeCollectives&) = delete;

  void run(const Call& call, int rank, int world_size, const WaitPolicy& policy);

 private:
  struct Arithmetic {
    MPI_Datatype type = MPI_DATATYPE_NULL;
    MPI_Op op = MPI_OP_NULL;
  };
  Arithmetic arithmetic(DType dtype, Op op);

  MPI_Comm comm_;
  MPI_Datatype half_ = MPI_DATATYPE_NULL;  // two opaque bytes
  MPI_Op custom_[kNumDTypes][kNumOps];
};

// Polls until the request is complete. Throws CollectiveTimeoutError after
// `timeout` seconds.
void wait_request(MPI_Request& request, double timeout, const WaitPolicy& policy);

}  // namespace mpidp
