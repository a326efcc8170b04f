// The kernels of the CUDA part, as functions that queue them on a stream. Each returns 0 or an
// error code of the runtime; kNotSupported for a combination that has no kernel.
#pragma once

#include "reduce/gpu.h"
#include "transport/device_runtime.h"

namespace mpidp {
namespace gpu {

int reduce(const DeviceReduceArgs& args, cudaStream_t stream, int multiprocessors);
int pack(const DevicePiece* pieces, int num_pieces, cudaStream_t stream, int multiprocessors);
// Between the floating dtypes.
int cast(const void* source, DType from, void* destination, DType to, std::int64_t count,
         cudaStream_t stream, int multiprocessors);
int quantize(const float* source, std::int8_t* codes, float* scales, std::int64_t count,
             std::int32_t block, cudaStream_t stream, int multiprocessors);
int dequantize(const std::int8_t* codes, const float* scales, float* destination,
               std::int64_t count, std::int32_t block, cudaStream_t stream, int multiprocessors);

}  // namespace gpu
}  // namespace mpidp
