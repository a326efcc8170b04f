// How each dtype is loaded, combined and stored on a GPU, with the bits of reduce/cpu_elements.h.
//
// An element class E has: Value in memory, Acc the accumulator, Scalar what scales and divisors are
// rounded to, kReal whether they apply; load and store.
#pragma once

#include <cstdint>

#include "reduce/gpu.h"

namespace mpidp {
namespace gpu {

template <class To, class From>
MPIDP_HOST_DEVICE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  union {
    From from;
    To to;
  } both;
  both.from = from;
  return both.to;
}

struct Sum {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    return static_cast<A>(a + b);
  }
};

struct Product {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    return static_cast<A>(a * b);
  }
};

struct Min {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    return a < b ? a : b;
  }
};

struct Max {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    return a > b ? a : b;
  }
};

template <class A>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = std::uint32_t;
};
template <>
struct BitsOf<double> {
  using Type = std::uint64_t;
};

// NaN if either is NaN, and -0 < +0: see reduce/cpu_elements.h.
struct FloatMin {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    using Bits = typename BitsOf<A>::Type;
    if (a == b) return bits_of<A>(static_cast<Bits>(bits_of<Bits>(a) | bits_of<Bits>(b)));
    return a < b || a != a ? a : b;
  }
};

struct FloatMax {
  template <class A>
  static MPIDP_DEVICE A combine(A a, A b) {
    using Bits = typename BitsOf<A>::Type;
    if (a == b) return bits_of<A>(static_cast<Bits>(bits_of<Bits>(a) & bits_of<Bits>(b)));
    return a > b || a != a ? a : b;
  }
};

template <class T>
struct Integer {
  using Value = T;
  using Acc = T;
  using Scalar = double;
  static constexpr bool kReal = false;
  static MPIDP_DEVICE Acc load(Value value) { return value; }
  static MPIDP_DEVICE Value store(Acc acc) { return acc; }
};

// Any nonzero byte is true on the way in; only 0 and 1 come out. With these, min is AND, max is OR.
struct Bool : Integer<std::uint8_t> {
  static MPIDP_DEVICE Acc load(Value value) { return value != 0 ? 1 : 0; }
};

template <class T>
struct Floating {
  using Value = T;
  using Acc = T;
  using Scalar = T;
  static constexpr bool kReal = true;
  static MPIDP_DEVICE Acc load(Value value) { return value; }
  static MPIDP_DEVICE Value store(Acc acc) { return acc; }
  static MPIDP_DEVICE Acc scale(Acc acc, Scalar factor) { return acc * factor; }
  static MPIDP_DEVICE Acc divide(Acc acc, Scalar divisor) { return acc / divisor; }
};

struct BFloat16 : Floating<float> {
  using Value = std::uint16_t;
  static MPIDP_DEVICE float load(Value value) {
    return bits_of<float>(static_cast<std::uint32_t>(value) << 16);
  }
  static MPIDP_DEVICE Value store(float acc) {
    const auto bits = bits_of<std::uint32_t>(acc);
    const std::uint32_t nearest =
        acc != acc ? bits | 0x00400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<Value>(nearest >> 16);
  }
};

// In integers, so that NaN payloads and subnormals are the same everywhere.
struct Float16 : Floating<float> {
  using Value = std::uint16_t;
  static MPIDP_DEVICE float load(Value half) {
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t sign = (half & 0x8000u) << 16;
    std::uint32_t bits = (magnitude << 13) + 0x38000000u;
    if (magnitude < 0x400u) {
      bits = bits_of<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
    } else if (magnitude > 0x7bffu) {
      bits += 0x38000000u;
      if (magnitude > 0x7c00u) bits |= 0x00400000u;
    }
    return bits_of<float>(bits | sign);
  }
  static MPIDP_DEVICE Value store(float acc) {
    const auto bits = bits_of<std::uint32_t>(acc);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
    } else {
      // What is too large is first cut to a value that rounds to infinity.
      const std::uint32_t capped = magnitude > 0x47800000u ? 0x47800000u : magnitude;
      if (magnitude < 0x38800000u) {
        // In 0.5 + x the last place is float16's smallest step.
        half = bits_of<std::uint32_t>(bits_of<float>(capped) + 0.5f) - 0x3f000000u;
      } else {
        half = (capped - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
      }
    }
    return static_cast<Value>(half | sign);
  }
};

// Only products come here: sums and scales of complex numbers are those of their parts. Products of
// infinities are NumPy's, the plain formula.
template <class T>
struct Complex {
  struct alignas(2 * sizeof(T)) Value {
    T real, imag;
    friend MPIDP_DEVICE Value operator*(Value a, Value b) {
      return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    }
  };
  using Acc = Value;
  using Scalar = T;
  static constexpr bool kReal = true;
  static MPIDP_DEVICE Acc load(Value value) { return value; }
  static MPIDP_DEVICE Value store(Acc acc) { return acc; }
  static MPIDP_DEVICE Acc scale(Acc acc, T factor) {
    return {acc.real * factor, acc.imag * factor};
  }
  static MPIDP_DEVICE Acc divide(Acc acc, T divisor) {
    return {acc.real / divisor, acc.imag / divisor};
  }
};

}  // namespace gpu
}  // namespace mpidp
