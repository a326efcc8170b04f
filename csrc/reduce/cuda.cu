// Multi-source reduction on a GPU: every element is loaded from each source once, combined in a
// register in rank order, and stored to each destination once. Bound by memory.
#include "reduce/cuda.h"
#include "reduce/cuda_elements.h"

namespace mpidp {
namespace gpu {
namespace {

constexpr int kPackBytes = 16;

enum class Finish : std::int32_t { kNone, kMultiply, kDivide };

struct ReduceArguments {
  const void* sources[kMaxDevicePointers];
  void* destinations[kMaxDevicePointers];
  double scales[kMaxDevicePointers];
  std::int64_t num_head;   // elements before the first pack: all of them where packs cannot be
  std::int64_t num_packs;  // of 16 bytes
  std::int64_t num_tail;   // elements after the last
  double factor;
  std::int32_t num_sources, num_destinations;
  Finish finish;
  bool has_scales;
};

template <class E, int kItems>
struct alignas(kItems * sizeof(typename E::Value)) Items {
  typename E::Value value[kItems];
};

template <class E, class O, int kItems>
MPIDP_DEVICE void reduce_items(const ReduceArguments& args, std::int64_t element) {
  using Pack = Items<E, kItems>;
  using Value = typename E::Value;
  typename E::Acc acc[kItems];
#pragma unroll 1
  for (int s = 0; s < args.num_sources; ++s) {
    const Value* source = device_address(static_cast<const Value*>(args.sources[s]));
    const Pack pack = *reinterpret_cast<const Pack*>(source + element);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      typename E::Acc term = E::load(pack.value[i]);
      if constexpr (E::kReal) {
        if (args.has_scales) {
          term = E::scale(term, static_cast<typename E::Scalar>(args.scales[s]));
        }
      }
      acc[i] = s == 0 ? term : O::combine(acc[i], term);
    }
  }
  Pack result;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if constexpr (E::kReal) {
      const auto factor = static_cast<typename E::Scalar>(args.factor);
      if (args.finish == Finish::kMultiply) acc[i] = E::scale(acc[i], factor);
      if (args.finish == Finish::kDivide) acc[i] = E::divide(acc[i], factor);
    }
    result.value[i] = E::store(acc[i]);
  }
  for (int d = 0; d < args.num_destinations; ++d) {
    Value* destination = device_address(static_cast<Value*>(args.destinations[d]));
    *reinterpret_cast<Pack*>(destination + element) = result;
  }
}

template <class E, class O>
MPIDP_KERNEL reduce_kernel(MPIDP_PARAMETER ReduceArguments args) {
  constexpr int kItems = kPackBytes / static_cast<int>(sizeof(typename E::Value));
  for (std::int64_t i = global_thread(); i < args.num_packs; i += num_threads()) {
    reduce_items<E, O, kItems>(args, args.num_head + i * kItems);
  }
  for (std::int64_t i = global_thread(); i < args.num_head + args.num_tail; i += num_threads()) {
    reduce_items<E, O, 1>(args, i < args.num_head ? i : i + args.num_packs * kItems);
  }
}

std::int64_t misalignment(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) % kPackBytes);
}

bool has_exact_reciprocal(float value) {
  const auto bits = bits_of<std::uint32_t>(value);
  const std::uint32_t exponent = (bits >> 23) & 0xffu;
  return (bits & 0x7fffffu) == 0 && exponent >= 1 && exponent <= 253;
}

bool has_exact_reciprocal(double value) {
  const auto bits = bits_of<std::uint64_t>(value);
  const std::uint64_t exponent = (bits >> 52) & 0x7ffu;
  return (bits & 0xfffffffffffffu) == 0 && exponent >= 1 && exponent <= 2045;
}

struct Target {
  cudaStream_t stream;
  int multiprocessors;
};

template <class E, class O>
int reduce_as(const DeviceReduceArgs& given, std::int64_t count, const Target& target) {
  constexpr auto kItemBytes = static_cast<std::int64_t>(sizeof(typename E::Value));
  ReduceArguments args = {};
  args.num_sources = given.num_sources;
  args.num_destinations = given.num_destinations;
  const std::int64_t first = misalignment(given.sources[0]);
  bool alike = first % kItemBytes == 0;
  for (int s = 0; s < given.num_sources; ++s) {
    args.sources[s] = given.sources[s];
    args.scales[s] = given.has_scales ? given.scales[s] : 1.0;
    alike = alike && misalignment(given.sources[s]) == first;
  }
  for (int d = 0; d < given.num_destinations; ++d) {
    args.destinations[d] = given.destinations[d];
    alike = alike && misalignment(given.destinations[d]) == first;
  }
  const std::int64_t head = first == 0 ? 0 : (kPackBytes - first) / kItemBytes;
  if (alike && head < count) {
    args.num_head = head;
    args.num_packs = (count - head) * kItemBytes / kPackBytes;
    args.num_tail = count - head - args.num_packs * (kPackBytes / kItemBytes);
  } else {
    args.num_head = count;
  }
  args.has_scales = given.has_scales;
  args.factor = 1.0;
  if constexpr (E::kReal) {
    if (given.divisor != 1.0) {
      const auto divisor = static_cast<typename E::Scalar>(given.divisor);
      const bool exact = has_exact_reciprocal(divisor);
      args.finish = exact ? Finish::kMultiply : Finish::kDivide;
      args.factor = exact ? 1 / divisor : divisor;
    }
  }
  const std::int64_t threads = args.num_packs + args.num_head + args.num_tail;
  return launch(reduce_kernel<E, O>, blocks_for(threads, target.multiprocessors), target.stream,
                args);
}

template <class E>
int reduce_floating(const DeviceReduceArgs& args, const Target& target) {
  switch (args.op) {
    case Op::kProd:
      return reduce_as<E, Product>(args, args.count, target);
    case Op::kMin:
      return reduce_as<E, FloatMin>(args, args.count, target);
    case Op::kMax:
      return reduce_as<E, FloatMax>(args, args.count, target);
    default:
      return reduce_as<E, Sum>(args, args.count, target);
  }
}

template <class T>
int reduce_complex(const DeviceReduceArgs& args, const Target& target) {
  if (args.op == Op::kProd) return reduce_as<Complex<T>, Product>(args, args.count, target);
  return reduce_as<Floating<T>, Sum>(args, 2 * args.count, target);
}

// Sums and products wrap, which in two's complement is the same for signed and unsigned.
template <class T, class Unsigned>
int reduce_integer(const DeviceReduceArgs& args, const Target& target) {
  switch (args.op) {
    case Op::kProd:
      return reduce_as<Integer<Unsigned>, Product>(args, args.count, target);
    case Op::kMin:
      return reduce_as<Integer<T>, Min>(args, args.count, target);
    case Op::kMax:
      return reduce_as<Integer<T>, Max>(args, args.count, target);
    default:
      return reduce_as<Integer<Unsigned>, Sum>(args, args.count, target);
  }
}

int reduce_bool(const DeviceReduceArgs& args, const Target& target) {
  if (args.op == Op::kProd || args.op == Op::kMin) {
    return reduce_as<Bool, Min>(args, args.count, target);
  }
  return reduce_as<Bool, Max>(args, args.count, target);
}

}  // namespace

int reduce(const DeviceReduceArgs& args, cudaStream_t stream, int multiprocessors) {
  if (args.count == 0) return kDeviceOk;
  if (args.num_sources < 1 || args.num_sources > kMaxDevicePointers || args.num_destinations < 1 ||
      args.num_destinations > kMaxDevicePointers) {
    return kNotSupported;
  }
  const Target target{stream, multiprocessors};
  switch (args.dtype) {
    case DType::kBool:
      return reduce_bool(args, target);
    case DType::kInt8:
      return reduce_integer<std::int8_t, std::uint8_t>(args, target);
    case DType::kInt16:
      return reduce_integer<std::int16_t, std::uint16_t>(args, target);
    case DType::kInt32:
      return reduce_integer<std::int32_t, std::uint32_t>(args, target);
    case DType::kInt64:
      return reduce_integer<std::int64_t, std::uint64_t>(args, target);
    case DType::kUInt8:
      return reduce_integer<std::uint8_t, std::uint8_t>(args, target);
    case DType::kUInt16:
      return reduce_integer<std::uint16_t, std::uint16_t>(args, target);
    case DType::kUInt32:
      return reduce_integer<std::uint32_t, std::uint32_t>(args, target);
    case DType::kUInt64:
      return reduce_integer<std::uint64_t, std::uint64_t>(args, target);
    case DType::kFloat16:
      return reduce_floating<Float16>(args, target);
    case DType::kBFloat16:
      return reduce_floating<BFloat16>(args, target);
    case DType::kFloat32:
      return reduce_floating<Floating<float>>(args, target);
    case DType::kFloat64:
      return reduce_floating<Floating<double>>(args, target);
    case DType::kComplex64:
      return reduce_complex<float>(args, target);
    case DType::kComplex128:
      return reduce_complex<double>(args, target);
  }
  return kNotSupported;
}

}  // namespace gpu
}  // namespace mpidp
