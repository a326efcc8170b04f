// Packing, casting and the int8 codec on a GPU.
#include "reduce/cuda.h"
#include "reduce/cuda_elements.h"

namespace mpidp {
namespace gpu {
namespace {

constexpr int kPiecesPerLaunch = 64;

struct PackArguments {
  DevicePiece pieces[kPiecesPerLaunch];
  std::int32_t num_pieces;
};

struct alignas(16) Pack {
  std::uint64_t word[2];
};

MPIDP_KERNEL pack_kernel(MPIDP_PARAMETER PackArguments args) {
  for (int p = 0; p < args.num_pieces; ++p) {
    const auto* source = device_address(static_cast<const char*>(args.pieces[p].source));
    auto* destination = device_address(static_cast<char*>(args.pieces[p].destination));
    const std::int64_t nbytes = args.pieces[p].nbytes;
    const bool aligned = ((reinterpret_cast<std::uintptr_t>(source) |
                           reinterpret_cast<std::uintptr_t>(destination)) %
                          sizeof(Pack)) == 0;
    const std::int64_t packs = aligned ? nbytes / static_cast<std::int64_t>(sizeof(Pack)) : 0;
    for (std::int64_t i = global_thread(); i < packs; i += num_threads()) {
      reinterpret_cast<Pack*>(destination)[i] = reinterpret_cast<const Pack*>(source)[i];
    }
    const std::int64_t done = packs * static_cast<std::int64_t>(sizeof(Pack));
    for (std::int64_t i = done + global_thread(); i < nbytes; i += num_threads()) {
      destination[i] = source[i];
    }
  }
}

struct CastArguments {
  const void* source;
  void* destination;
  std::int64_t count;
};

template <class From, class To>
MPIDP_KERNEL cast_kernel(MPIDP_PARAMETER CastArguments args) {
  const auto* source = device_address(static_cast<const typename From::Value*>(args.source));
  auto* destination = device_address(static_cast<typename To::Value*>(args.destination));
  for (std::int64_t i = global_thread(); i < args.count; i += num_threads()) {
    destination[i] = To::store(static_cast<typename To::Acc>(From::load(source[i])));
  }
}

template <class From>
int cast_from(const CastArguments& args, DType to, int blocks, cudaStream_t stream) {
  switch (to) {
    case DType::kFloat16:
      return launch(cast_kernel<From, Float16>, blocks, stream, args);
    case DType::kBFloat16:
      return launch(cast_kernel<From, BFloat16>, blocks, stream, args);
    case DType::kFloat32:
      return launch(cast_kernel<From, Floating<float>>, blocks, stream, args);
    case DType::kFloat64:
      return launch(cast_kernel<From, Floating<double>>, blocks, stream, args);
    default:
      return kNotSupported;
  }
}

struct QuantizeArguments {
  const float* source;
  std::int8_t* codes;
  float* scales;
  std::int64_t count;
  std::int32_t block;
};

constexpr float kLargestCode = 127.0f;

// One thread a block: a block's lines stay in the first-level cache from one element to the next.
MPIDP_KERNEL quantize_kernel(MPIDP_PARAMETER QuantizeArguments args) {
  const float* source = device_address(args.source);
  std::int8_t* codes = device_address(args.codes);
  float* scales = device_address(args.scales);
  const std::int64_t blocks = (args.count + args.block - 1) / args.block;
  for (std::int64_t b = global_thread(); b < blocks; b += num_threads()) {
    const std::int64_t first = b * args.block;
    const std::int64_t past = first + args.block < args.count ? first + args.block : args.count;
    float largest = 0.0f;
    for (std::int64_t i = first; i < past; ++i) {
      const float magnitude = bits_of<float>(bits_of<std::uint32_t>(source[i]) & 0x7fffffffu);
      largest = FloatMax::combine(largest, magnitude);  // a NaN makes the scale so
    }
    const float scale = largest / kLargestCode;
    const bool usable = scale > 0.0f && scale <= 3.40282347e38f;
    for (std::int64_t i = first; i < past; ++i) {
      float code = usable ? rintf(source[i] / scale) : 0.0f;
      code = code > kLargestCode ? kLargestCode : (code < -kLargestCode ? -kLargestCode : code);
      codes[i] = static_cast<std::int8_t>(code);
    }
    scales[b] = scale;
  }
}

struct DequantizeArguments {
  const std::int8_t* codes;
  const float* scales;
  float* destination;
  std::int64_t count;
  std::int32_t block;
};

MPIDP_KERNEL dequantize_kernel(MPIDP_PARAMETER DequantizeArguments args) {
  const std::int8_t* codes = device_address(args.codes);
  const float* scales = device_address(args.scales);
  float* destination = device_address(args.destination);
  for (std::int64_t i = global_thread(); i < args.count; i += num_threads()) {
    destination[i] = static_cast<float>(codes[i]) * scales[i / args.block];
  }
}

}  // namespace

int pack(const DevicePiece* pieces, int num_pieces, cudaStream_t stream, int multiprocessors) {
  for (int first = 0; first < num_pieces; first += kPiecesPerLaunch) {
    PackArguments args = {};
    std::int64_t nbytes = 0;
    for (int p = first; p < num_pieces && p < first + kPiecesPerLaunch; ++p) {
      args.pieces[args.num_pieces++] = pieces[p];
      nbytes += pieces[p].nbytes;
    }
    const std::int64_t threads = nbytes / static_cast<std::int64_t>(sizeof(Pack)) + 1;
    const int status = launch(pack_kernel, blocks_for(threads, multiprocessors), stream, args);
    if (status != kDeviceOk) return status;
  }
  return kDeviceOk;
}

int cast(const void* source, DType from, void* destination, DType to, std::int64_t count,
         cudaStream_t stream, int multiprocessors) {
  if (count == 0) return kDeviceOk;
  const CastArguments args{source, destination, count};
  const int blocks = blocks_for(count, multiprocessors);
  switch (from) {
    case DType::kFloat16:
      return cast_from<Float16>(args, to, blocks, stream);
    case DType::kBFloat16:
      return cast_from<BFloat16>(args, to, blocks, stream);
    case DType::kFloat32:
      return cast_from<Floating<float>>(args, to, blocks, stream);
    case DType::kFloat64:
      return cast_from<Floating<double>>(args, to, blocks, stream);
    default:
      return kNotSupported;
  }
}

int quantize(const float* source, std::int8_t* codes, float* scales, std::int64_t count,
             std::int32_t block, cudaStream_t stream, int multiprocessors) {
  if (block < 1) return kNotSupported;
  if (count == 0) return kDeviceOk;
  return launch(quantize_kernel, blocks_for((count + block - 1) / block, multiprocessors), stream,
                QuantizeArguments{source, codes, scales, count, block});
}

int dequantize(const std::int8_t* codes, const float* scales, float* destination,
               std::int64_t count, std::int32_t block, cudaStream_t stream, int multiprocessors) {
  if (block < 1) return kNotSupported;
  if (count == 0) return kDeviceOk;
  return launch(dequantize_kernel, blocks_for(count, multiprocessors), stream,
                DequantizeArguments{codes, scales, destination, count, block});
}

}  // namespace gpu
}  // namespace mpidp
