// How each dtype is loaded, combined and stored, in vectors. Part of cpu_body.h: see there for the
// rules, above all that no inline function of the standard library is called.
//
// An element class E has: Acc, the accumulator of one vector of elements; Scalar, what scales and
// divisors are rounded to; kItemBytes of one element and kBytes of one vector in memory; kVectors,
// the vectors of a block; kReal, whether scales and divisors apply; load, store, scale, divide.
#pragma once

#include <cstdint>

#if defined(__FAST_MATH__)
#error "mpidp promises the same bits on every CPU: build it without -ffast-math"
#endif

#define MPIDP_INLINE inline __attribute__((always_inline))

namespace mpidp {
namespace MPIDP_KERNELS_NAMESPACE {
namespace {

constexpr int kVectorBytes = MPIDP_VECTOR_BYTES;
constexpr int kFloatLanes = kVectorBytes / 4;

template <class T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(sizeof(T) * kLanes)));
};

template <class T>
using Vector = typename VectorOf<T, kVectorBytes / static_cast<int>(sizeof(T))>::Type;
using Words = Vector<std::uint32_t>;                                 // 32-bit lanes
using Halves = typename VectorOf<std::uint16_t, kFloatLanes>::Type;  // as many 16-bit lanes

// The builtin, because memcpy could be fortified into an inline function. Lengths that are
// constants become one move, whatever the alignment.
template <class V>
MPIDP_INLINE V load_vector(const unsigned char* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
MPIDP_INLINE void store_vector(unsigned char* to, V value) {
  __builtin_memcpy(to, &value, sizeof(V));
}

MPIDP_INLINE void copy_small(unsigned char* to, const unsigned char* from, std::int64_t nbytes) {
  __builtin_memcpy(to, from, static_cast<std::size_t>(nbytes));
}

template <class To, class From>
MPIDP_INLINE To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

// A product that passes through here cannot be contracted with a following sum into a fused
// multiply-add, which rounds once where the other builds round twice. Costs no instruction.
template <class V>
MPIDP_INLINE V rounded(V product) {
#if defined(__AVX512F__)
  asm("" : "+v"(product));
#elif defined(__SSE2__)
  asm("" : "+x"(product));
#elif defined(__aarch64__)
  asm("" : "+w"(product));
#else
  asm("" : "+m"(product));
#endif
  return product;
}

// ---- operators ---------------------------------------------------------------------------------

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

// IEEE 754-2019 minimum and maximum: NaN if either is NaN, and -0 < +0, so that neither the order
// of the terms nor the algorithm shows in the bits. Equal values differ at most in the sign of a
// zero: OR of their bits has the sign of the smaller, AND that of the larger.
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

// ---- elements ----------------------------------------------------------------------------------

template <class T>
struct Integer {
  using Acc = Vector<T>;
  using Scalar = double;
  static constexpr int kItemBytes = sizeof(T);
  static constexpr int kBytes = kVectorBytes;
  static constexpr int kVectors = 4;
  static constexpr bool kReal = false;
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

// The upper half of a float32. Rounded to nearest even by adding just under half of the last place
// kept, and the rest when that place is odd; a NaN is cut instead, and stays one.
struct BFloat16 : Arithmetic<float> {
  static constexpr int kItemBytes = 2;
  static constexpr int kBytes = 2 * kFloatLanes;
  static constexpr int kVectors = 4;
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    return bits_of<Acc>(__builtin_convertvector(load_vector<Halves>(from), Words) << 16);
  }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) {
    const Words bits = bits_of<Words>(acc);
    const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = (bits >> 16) | 0x40u;
    store_vector(to, __builtin_convertvector(acc != acc ? nan : nearest, Halves));
  }
};

// Conversions between float16 and float32. The integer version gives the bits that the x86 and Arm
// instructions give: nearest even, subnormals kept, NaN made quiet with the top of its payload.
#if defined(MPIDP_HALF_F16C)
MPIDP_INLINE Vector<float> widen_half(Halves halves) {
  return bits_of<Vector<float>>(_mm256_cvtph_ps(bits_of<__m128i>(halves)));
}
MPIDP_INLINE Halves narrow_half(Vector<float> values) {
  return bits_of<Halves>(_mm256_cvtps_ph(bits_of<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(MPIDP_HALF_AVX512)
// The zero-masked forms, since GCC 12 warns of an uninitialised value inside the plain ones.
MPIDP_INLINE Vector<float> widen_half(Halves halves) {
  return bits_of<Vector<float>>(_mm512_maskz_cvtph_ps(0xffff, bits_of<__m256i>(halves)));
}
MPIDP_INLINE Halves narrow_half(Vector<float> values) {
  return bits_of<Halves>(
      _mm512_maskz_cvtps_ph(0xffff, bits_of<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(MPIDP_HALF_NEON)
MPIDP_INLINE Vector<float> widen_half(Halves halves) {
  return bits_of<Vector<float>>(vcvt_f32_f16(bits_of<float16x4_t>(halves)));
}
MPIDP_INLINE Halves narrow_half(Vector<float> values) {
  return bits_of<Halves>(vcvt_f16_f32(bits_of<float32x4_t>(values)));
}
#else
MPIDP_INLINE Vector<float> widen_half(Halves halves) {
  using Floats = Vector<float>;
  using Ints = Vector<std::int32_t>;
  const Words half = __builtin_convertvector(halves, Words);
  const Words sign = (half & 0x8000u) << 16;
  const Words magnitude = half & 0x7fffu;
  // Float32 has the same fields, 13 mantissa bits longer, with an exponent biased by 112 more.
  const Words normal = (magnitude << 13) + 0x38000000u;
  const Words special = (magnitude << 13) | 0x7f800000u;
  const Words quiet = special | 0x00400000u;
  // A subnormal is its mantissa times 2^-24, which is normal in float32.
  const Words subnormal =
      bits_of<Words>(__builtin_convertvector(bits_of<Ints>(magnitude), Floats) * 0x1p-24f);
  Words bits = magnitude < 0x400u ? subnormal : normal;
  bits = magnitude >= 0x7c00u ? special : bits;
  bits = magnitude > 0x7c00u ? quiet : bits;
  return bits_of<Floats>(bits | sign);
}
MPIDP_INLINE Halves narrow_half(Vector<float> values) {
  using Floats = Vector<float>;
  const Words bits = bits_of<Words>(values);
  const Words sign = (bits >> 16) & 0x8000u;
  const Words magnitude = bits & 0x7fffffffu;
  // As for bfloat16; a carry out of the mantissa moves the exponent up, at the end to infinity.
  const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below the normal numbers: in 0.5 + x the last place is 2^-24, so that the sum rounds x to a
  // whole number of float16's smallest steps, nearest even, and its mantissa is that number.
  const Words subnormal = bits_of<Words>(bits_of<Floats>(magnitude) + 0.5f) - 0x3f000000u;
  const Words nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  Words half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? Words{} + 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return __builtin_convertvector(half | sign, Halves);
}
#endif

struct Float16 : Arithmetic<float> {
  static constexpr int kItemBytes = 2;
  static constexpr int kBytes = 2 * kFloatLanes;
  static constexpr int kVectors = 4;
  static MPIDP_INLINE Acc load(const unsigned char* from) {
    return widen_half(load_vector<Halves>(from));
  }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) {
    store_vector(to, narrow_half(acc));
  }
};

// One complex number: only products come here, one element at a time. Products of infinities are
// NumPy's, the plain formula, and not those of C's Annex G.
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
  static MPIDP_INLINE Acc load(const unsigned char* from) { return load_vector<Acc>(from); }
  static MPIDP_INLINE void store(unsigned char* to, Acc acc) { store_vector(to, acc); }
  static MPIDP_INLINE Acc scale(Acc acc, T factor) {
    return {rounded(acc.real * factor), rounded(acc.imag * factor)};
  }
  static MPIDP_INLINE Acc divide(Acc acc, T divisor) {
    return {acc.real / divisor, acc.imag / divisor};
  }
};

// True for powers of two whose reciprocal is a normal number: a zero mantissa, and an exponent
// away from both ends.
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
