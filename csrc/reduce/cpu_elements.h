// How each dtype is loaded, combined and stored, in vectors. Part of
// cpu_body.h: see there for the rules, above all that no inline function of the
// standard library is called.
//
// An element class E has: Acc, the accumulator of one vector of elements;
// Scalar, what scales and divisors are rounded to; kItemBytes of one element
// and kBytes of one vector in memory; kVectors, the vectors of a block; kReal,
// whether scales and divisors apply; load, store, combine, scale, divide.
#pragma once

#include <cstdint>

#include "reduce/cpu_vectors.h"

namespace mpidp {
namespace MPIDP_KERNELS_NAMESPACE {
namespace {

struct Sum {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a + b;
  }
};

struct Product {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a * b;
  }
};

struct Min {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a < b ? a : b;
  }
};

struct Max {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a > b ? a : b;
  }
};

struct And {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a & b;
  }
};

struct Or {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    return a | b;
  }
};

// IEEE 754-2019 minimum and maximum: NaN if either is NaN, and -0 < +0, so that
// neither the order of the terms nor the algorithm shows in the bits. Equal
// values differ at most in the sign of a zero: OR of their bits has the sign of
// the smaller, AND that of the larger.
struct FloatMin {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    using Bits = decltype(a < b);
    const A equal = bits_of<A>(bits_of<Bits>(a) | bits_of<Bits>(b));
    return a == b ? equal : (((a < b) | (a != a)) ? a : b);
  }
};

struct FloatMax {
  template <class A>
  static MPIDP_INLINE A combine(A a, A b) {
    using Bits = decltype(a < b);
    const A equal = bits_of<A>(bits_of<Bits>(a) & bits_of<Bits>(b));
    return a == b ? equal : (((a > b) | (a != a)) ? a : b);
  }
};

template <class T>
struct Integer {
  using Acc = Vector<T>;
  using Scalar = double;
  static constexpr int kItemBytes = sizeof(T);
  static constexpr int kBytes = kVectorBytes;
  static constexpr int kVectors = 4;
  static constexpr bool kReal = false;
  template <class O>
  static MPIDP_INLINE Acc combine(Acc a, Acc b) {
    return O::combine(a, b);
  }
  static MPIDP_INLINE Acc load(const unsigned char* from) { return load_vector<Acc>(from); }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) { store_vector(to, acc); }
};

// Any nonzero byte is true on the way in; only 0 and 1 come out.
struct Bool : Integer<std::uint8_t> {
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    const Acc one = Acc{} + std::uint8_t{1};
    return bits_of<Acc>(load_vector<Acc>(from) != Acc{}) & one;
  }
};

template <class T>
struct Arithmetic {
  using Acc = Vector<T>;
  using Scalar = T;
  static constexpr bool kReal = true;
  template <class O>
  static MPIDP_INLINE Acc combine(Acc a, Acc b) {
    return O::combine(a, b);
  }
  static MPIDP_INLINE Acc scale(Acc acc, T factor) { return rounded(acc * factor); }
  static MPIDP_INLINE Acc divide(Acc acc, T divisor) { return acc / divisor; }
};

template <class T>
struct Floating : Arithmetic<T> {
  using Acc = Vector<T>;
  static constexpr int kItemBytes = sizeof(T);
  static constexpr int kBytes = kVectorBytes;
  static constexpr int kVectors = 4;
  static MPIDP_INLINE Acc load(const unsigned char* from) { return load_vector<Acc>(from); }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) { store_vector(to, acc); }
};

// 16-bit elements in float32 accumulators, two vectors of them to a vector in
// memory.
struct Paired {
  using Acc = Pair;
  using Scalar = float;
  static constexpr int kItemBytes = 2;
  static constexpr int kBytes = kVectorBytes;
  static constexpr int kVectors = 2;
  static constexpr bool kReal = true;
  template <class O>
  static MPIDP_INLINE Acc combine(Acc a, Acc b) {
    return {O::combine(a.low, b.low), O::combine(a.high, b.high)};
  }
  static MPIDP_INLINE Acc scale(Acc acc, float factor) {
    return {rounded(acc.low * factor), rounded(acc.high * factor)};
  }
  static MPIDP_INLINE Acc divide(Acc acc, float divisor) {
    return {acc.low / divisor, acc.high / divisor};
  }
};

struct BFloat16 : Paired {
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    return widen_bfloat16(load_vector<Words>(from));
  }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) {
    store_vector(to, narrow_bfloat16(acc));
  }
};

#if defined(MPIDP_HARDWARE_FLOAT16)
struct Float16 : Arithmetic<float> {
  static constexpr int kItemBytes = 2;
  static constexpr int kBytes = kVectorBytes / 2;
  static constexpr int kVectors = 4;
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    return widen_float16(load_vector<Halves>(from));
  }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) {
    store_vector(to, narrow_float16(acc));
  }
};
#else
struct Float16 : Paired {
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    const Words words = load_vector<Words>(from);
    return {widen_float16(words & 0xffffu), widen_float16(words >> 16)};
  }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) {
    store_vector(to, narrow_float16(acc.low) | (narrow_float16(acc.high) << 16));
  }
};
#endif

// One complex number: only products come here, one element at a time. Products
// of infinities are NumPy's, the plain formula, and not those of C's Annex G.
template <class T>
struct Complex {
  struct Acc {
    T real;
    T imag;
    friend MPIDP_INLINE Acc operator*(Acc a, Acc b) {
      return {rounded(a.real * b.real) - rounded(a.imag * b.imag),
              rounded(a.real * b.imag) + rounded(a.imag * b.real)};
    }
  };
  using Scalar = T;
  static constexpr int kItemBytes = 2 * sizeof(T);
  static constexpr int kBytes = kItemBytes;
  static constexpr int kVectors = 4;
  static constexpr bool kReal = true;
  template <class O>
  static MPIDP_INLINE Acc combine(Acc a, Acc b) {
    return O::combine(a, b);
  }
  static MPIDP_INLINE Acc load(const unsigned char* from) { return load_vector<Acc>(from); }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) { store_vector(to, acc); }
  static MPIDP_INLINE Acc scale(Acc acc, T factor) {
    return {rounded(acc.real * factor), rounded(acc.imag * factor)};
  }
  static MPIDP_INLINE Acc divide(Acc acc, T divisor) {
    return {acc.real / divisor, acc.imag / divisor};
  }
};

// True for powers of two whose reciprocal is a normal number: a zero mantissa,
// and an exponent away from both ends.
MPIDP_INLINE bool has_exact_reciprocal(float value) {
  const auto bits = bits_of<std::uint32_t>(value);
  const std::uint32_t exponent = (bits >> 23) & 0xffu;
  return (bits & 0x7fffffu) == 0 && exponent >= 1 && exponent <= 253;
}

MPIDP_INLINE bool has_exact_reciprocal(double value) {
  const auto bits = bits_of<std::uint64_t>(value);
  const std::uint64_t exponent = (bits >> 52) & 0x7ffu;
  return (bits & 0xfffffffffffffu) == 0 && exponent >= 1 && exponent <= 2045;
}

}  // namespace
}  // namespace MPIDP_KERNELS_NAMESPACE
}  // namespace mpidp
