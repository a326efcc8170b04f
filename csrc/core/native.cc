#include "core/native.h"

#include <limits>

#include "common/check_mpi.h"
#include "reduce/reduce.h"

namespace mpidp {
namespace {

constexpr int kNapUs = 50;

#if MPI_VERSION >= 4
#define MPIDP_LARGE(function) function##_c
using MpiCount = MPI_Count;
#else
#define MPIDP_LARGE(function) function
using MpiCount = int;
#endif

MpiCount mpi_count(std::int64_t count) {
  if (count > static_cast<std::int64_t>(std::numeric_limits<MpiCount>::max())) {
    throw Error(ErrorKind::kInvalidValue, "algorithm \"mpi\" cannot send " + std::to_string(count) +
                                              " elements through this MPI (it has int counts): use "
                                              "algorithm=\"ring\"");
  }
  return static_cast<MpiCount>(count);
}

template <DType dtype, Op op>
void combine(void* in, void* in_and_out, int* count, MPI_Datatype*) {
  const void* sources[2] = {in, in_and_out};
  void* destinations[1] = {in_and_out};
  ReduceArgs args;
  args.sources = sources;
  args.num_sources = 2;
  args.destinations = destinations;
  args.num_destinations = 1;
  args.count = *count;
  args.dtype = dtype;
  args.op = op;
  reduce(args);
}

template <DType dtype>
MPI_User_function* combiner(Op op) {
  switch (op) {
    case Op::kSum:
    case Op::kMean:
      return combine<dtype, Op::kSum>;
    case Op::kProd:
      return combine<dtype, Op::kProd>;
    case Op::kMin:
      return combine<dtype, Op::kMin>;
    case Op::kMax:
      return combine<dtype, Op::kMax>;
  }
  return nullptr;
}

MPI_User_function* combiner(DType dtype, Op op) {
  switch (dtype) {
    case DType::kFloat16:
      return combiner<DType::kFloat16>(op);
    case DType::kBFloat16:
      return combiner<DType::kBFloat16>(op);
    case DType::kFloat32:
      return combiner<DType::kFloat32>(op);
    case DType::kFloat64:
      return combiner<DType::kFloat64>(op);
    case DType::kInt8:
      return combiner<DType::kInt8>(op);
    case DType::kInt16:
      return combiner<DType::kInt16>(op);
    case DType::kUInt8:
      return combiner<DType::kUInt8>(op);
    case DType::kUInt16:
      return combiner<DType::kUInt16>(op);
    default:
      return nullptr;
  }
}

MPI_Datatype mpi_type(DType dtype, MPI_Datatype half) {
  switch (dtype) {
    case DType::kBool:
      return MPI_C_BOOL;
    case DType::kInt8:
      return MPI_INT8_T;
    case DType::kInt16:
      return MPI_INT16_T;
    case DType::kInt32:
      return MPI_INT32_T;
    case DType::kInt64:
      return MPI_INT64_T;
    case DType::kUInt8:
      return MPI_UINT8_T;
    case DType::kUInt16:
      return MPI_UINT16_T;
    case DType::kUInt32:
      return MPI_UINT32_T;
    case DType::kUInt64:
      return MPI_UINT64_T;
    case DType::kFloat16:
    case DType::kBFloat16:
      return half;
    case DType::kFloat32:
      return MPI_FLOAT;
    case DType::kFloat64:
      return MPI_DOUBLE;
    case DType::kComplex64:
      return MPI_C_FLOAT_COMPLEX;
    case DType::kComplex128:
      return MPI_C_DOUBLE_COMPLEX;
  }
  return MPI_BYTE;
}

MPI_Op builtin(DType dtype, Op op) {
  if (dtype == DType::kBool) {
    return op == Op::kSum || op == Op::kMax ? MPI_LOR : MPI_LAND;
  }
  switch (op) {
    case Op::kSum:
    case Op::kMean:
      return MPI_SUM;
    case Op::kProd:
      return MPI_PROD;
    case Op::kMin:
      return MPI_MIN;
    case Op::kMax:
      return MPI_MAX;
  }
  return MPI_SUM;
}

}  // namespace

NativeCollectives::NativeCollectives(MPI_Comm comm) : comm_(comm) {
  for (auto& row : custom_) {
    for (MPI_Op& op : row) op = MPI_OP_NULL;
  }
}

NativeCollectives::~NativeCollectives() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized != 0) return;
  for (auto& row : custom_) {
    for (MPI_Op& op : row) {
      if (op != MPI_OP_NULL) MPI_Op_free(&op);
    }
  }
  if (half_ != MPI_DATATYPE_NULL) MPI_Type_free(&half_);
}

NativeCollectives::Arithmetic NativeCollectives::arithmetic(DType dtype, Op op) {
  const bool is_half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  const bool is_extremum = op == Op::kMin || op == Op::kMax;
  if (is_half && half_ == MPI_DATATYPE_NULL) {
    MPIDP_MPI_CHECK(MPI_Type_contiguous(2, MPI_BYTE, &half_));
    MPIDP_MPI_CHECK(MPI_Type_commit(&half_));
  }
  Arithmetic arithmetic;
  arithmetic.type = mpi_type(dtype, half_);
  // Sums of short integers saturate in Open MPI 5 where the processor has AVX, and wrap elsewhere.
  const bool is_short = !is_floating(dtype) && dtype != DType::kBool && item_size(dtype) <= 2;
  if (is_half || is_short || (is_floating(dtype) && is_extremum)) {
    MPI_Op& custom = custom_[static_cast<int>(dtype)][static_cast<int>(op)];
    if (custom == MPI_OP_NULL) {
      MPIDP_MPI_CHECK(MPI_Op_create(combiner(dtype, op), 1, &custom));
    }
    arithmetic.op = custom;
  } else {
    arithmetic.op = builtin(dtype, op);
  }
  return arithmetic;
}

void NativeCollectives::run(const Call& call, int rank, int world_size, const WaitPolicy& policy) {
  const Arithmetic how = arithmetic(call.dtype, call.op);
  const MpiCount count = mpi_count(call.count);
  const bool in_place = call.input == call.output;
  const void* input = in_place ? MPI_IN_PLACE : call.input;
  MPI_Request request = MPI_REQUEST_NULL;
  switch (call.collective) {
    case Collective::kAllReduce:
      MPIDP_MPI_CHECK(MPIDP_LARGE(MPI_Iallreduce)(input, call.output, count, how.type, how.op,
                                                  comm_, &request));
      break;
    case Collective::kReduce:
      MPIDP_MPI_CHECK(MPIDP_LARGE(MPI_Ireduce)(rank == call.root ? input : call.input, call.output,
                                               count, how.type, how.op, call.root, comm_,
                                               &request));
      break;
    case Collective::kReduceScatter:
      MPIDP_MPI_CHECK(MPIDP_LARGE(MPI_Ireduce_scatter_block)(call.input, call.output, count,
                                                             how.type, how.op, comm_, &request));
      break;
    case Collective::kAllGather: {
      const char* own_block =
          static_cast<const char*>(call.output) + call.bytes_of(rank * call.count);
      const void* send = call.input == own_block ? MPI_IN_PLACE : call.input;
      MPIDP_MPI_CHECK(MPIDP_LARGE(MPI_Iallgather)(send, count, how.type, call.output, count,
                                                  how.type, comm_, &request));
      break;
    }
    case Collective::kBroadcast:
      MPIDP_MPI_CHECK(
          MPIDP_LARGE(MPI_Ibcast)(call.output, count, how.type, call.root, comm_, &request));
      break;
    case Collective::kAllToAll:
      MPIDP_MPI_CHECK(MPIDP_LARGE(MPI_Ialltoall)(call.input, count, how.type, call.output, count,
                                                 how.type, comm_, &request));
      break;
    case Collective::kBarrier:
      MPIDP_MPI_CHECK(MPI_Ibarrier(comm_, &request));
      break;
  }
  wait_request(request, call.timeout, policy);
  if (call.divisor != 1.0 && call.output != nullptr) {
    const void* source = call.output;
    ReduceArgs args;
    args.sources = &source;
    args.num_sources = 1;
    args.destinations = &call.output;
    args.num_destinations = 1;
    args.count = call.output_count(world_size);
    args.dtype = call.dtype;
    args.op = call.op;
    args.divisor = call.divisor;
    reduce(args);
  }
}

void wait_request(MPI_Request& request, double timeout, const WaitPolicy& policy) {
  const Deadline deadline(timeout);
  const std::int64_t start = now_us();
  for (std::uint32_t round = 0;; ++round) {
    int complete = 0;
    MPIDP_MPI_CHECK(MPI_Test(&request, &complete, MPI_STATUS_IGNORE));
    if (complete != 0) return;
    if (round < policy.spins / 16) continue;
    if (now_us() - start < static_cast<std::int64_t>(policy.poll_us)) {
      yield_core();
      continue;
    }
    sleep_us(kNapUs);
    if (interrupted()) throw Error(ErrorKind::kInterrupted, "interrupted");
    if (deadline.passed()) {
      throw Error(ErrorKind::kTimeout,
                  "MPI's own collective did not complete within " + std::to_string(timeout) + " s");
    }
  }
}

}  // namespace mpidp
