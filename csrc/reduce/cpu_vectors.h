// Compiler vectors and the conversions of 16-bit floats, for cpu_elements.h.
// Part of cpu_body.h: see there for the rules, above all that no inline
// function of the standard library is called.
#pragma once

#include <cstddef>
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
using Words = Vector<std::uint32_t>;
using Ints = Vector<std::int32_t>;
using Halves = typename VectorOf<std::uint16_t, kFloatLanes>::Type;  // half a vector

// The builtin, because memcpy could be fortified into an inline function.
// Lengths that are constants become one move, whatever the alignment.
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

// A product that passes through here cannot be contracted with a following sum
// into a fused multiply-add, which rounds once where the other builds round
// twice. Costs no instruction.
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

// The two 16-bit halves of every 32-bit lane, each widened to a vector of its
// own: no lane crosses another, so taking a vector of 16-bit elements apart
// costs one shift and one mask, on any CPU.
struct Pair {
  Vector<float> low;   // the elements at even places in memory
  Vector<float> high;  // those at odd places
};

// bfloat16 is the upper half of a float32. Both functions work on the upper
// half of each lane; nearest_bfloat16 leaves rubbish in the lower. Rounded to
// nearest even by adding just under half of the last place kept, and the rest
// when that place is odd; a NaN is cut instead, made quiet.
MPIDP_INLINE Words nearest_bfloat16(Vector<float> values) {
  const Words bits = bits_of<Words>(values);
  const Words nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  return values != values ? bits | 0x00400000u : nearest;
}
MPIDP_INLINE Pair widen_bfloat16(Words words) {
  return {bits_of<Vector<float>>(words << 16), bits_of<Vector<float>>(words & 0xffff0000u)};
}
MPIDP_INLINE Words narrow_bfloat16(Pair pair) {
  return (nearest_bfloat16(pair.low) >> 16) | (nearest_bfloat16(pair.high) & 0xffff0000u);
}

#if defined(MPIDP_KERNELS_AVX2)

#define MPIDP_HARDWARE_FLOAT16 1
MPIDP_INLINE Vector<float> widen_float16(Halves halves) {
  return bits_of<Vector<float>>(_mm256_cvtph_ps(bits_of<__m128i>(halves)));
}
MPIDP_INLINE Halves narrow_float16(Vector<float> values) {
  return bits_of<Halves>(_mm256_cvtps_ph(bits_of<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(MPIDP_KERNELS_AVX512)

// The zero-masked forms, since GCC 12 warns of an uninitialised value inside
// the plain ones.
#define MPIDP_HARDWARE_FLOAT16 1
MPIDP_INLINE Vector<float> widen_float16(Halves halves) {
  return bits_of<Vector<float>>(_mm512_maskz_cvtph_ps(0xffff, bits_of<__m256i>(halves)));
}
MPIDP_INLINE Halves narrow_float16(Vector<float> values) {
  return bits_of<Halves>(
      _mm512_maskz_cvtps_ph(0xffff, bits_of<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(MPIDP_KERNELS_NEON)

#define MPIDP_HARDWARE_FLOAT16 1
MPIDP_INLINE Vector<float> widen_float16(Halves halves) {
  return bits_of<Vector<float>>(vcvt_f32_f16(bits_of<float16x4_t>(halves)));
}
MPIDP_INLINE Halves narrow_float16(Vector<float> values) {
  return bits_of<Halves>(vcvt_f16_f32(bits_of<float32x4_t>(values)));
}

#else

// float16 in integers, with the bits that the x86 and Arm instructions give:
// nearest even, subnormals kept, NaN made quiet with the top of its payload.
// Signed lanes, because SSE2 compares no others; every magnitude is positive.
// `half` has its upper 16 bits clear.
MPIDP_INLINE Vector<float> widen_float16(Words half) {
  const Ints magnitude = bits_of<Ints>(half & 0x7fffu);
  const Words sign = (half & 0x8000u) << 16;
  // Float32 has the same fields, 13 mantissa bits longer, with an exponent
  // biased by 112 more; the topmost exponent, of infinity and NaN, moves by as
  // much again.
  const Ints shifted = (magnitude << 13) + 0x38000000;
  const Ints bias = (magnitude > 0x7bff) & 0x38000000;
  const Ints quiet = (magnitude > 0x7c00) & 0x00400000;
  const Ints normal = (shifted + bias) | quiet;
  // A subnormal is its mantissa times 2^-24, which is normal in float32.
  const Vector<float> subnormal = __builtin_convertvector(magnitude, Vector<float>) * 0x1p-24f;
  const Ints bits = magnitude < 0x400 ? bits_of<Ints>(subnormal) : normal;
  return bits_of<Vector<float>>(bits_of<Words>(bits) | sign);
}
MPIDP_INLINE Words narrow_float16(Vector<float> values) {
  const Ints magnitude = bits_of<Ints>(values) & 0x7fffffff;
  const Words sign = (bits_of<Words>(values) >> 16) & 0x8000u;
  // Rounded as bfloat16 is. A carry out of the mantissa moves the exponent up,
  // at the end to infinity. What is too large is first cut to a value that
  // rounds to infinity.
  const Ints capped = magnitude > 0x47800000 ? Ints{} + 0x47800000 : magnitude;
  const Ints normal = (capped - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below the normal numbers: in 0.5 + x the last place is 2^-24, so that the
  // sum rounds x to a whole number of float16's smallest steps, nearest even,
  // and its mantissa is that number.
  const Ints subnormal = bits_of<Ints>(bits_of<Vector<float>>(capped) + 0.5f) - 0x3f000000;
  const Ints nan = ((magnitude >> 13) & 0x3ff) | 0x7e00;
  const Ints half = magnitude < 0x38800000 ? subnormal : normal;
  return bits_of<Words>(magnitude > 0x7f800000 ? nan : half) | sign;
}

#endif

}  // namespace
}  // namespace MPIDP_KERNELS_NAMESPACE
}  // namespace mpidp
