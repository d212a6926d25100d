// Metal's scalar and vector types on a CPU. half and bfloat round after every operation.
#pragma once
#ifdef __clang__ // the suffix of 0.5h
#pragma clang diagnostic ignored "-Wreserved-user-defined-literal"
#pragma clang diagnostic ignored "-Wuser-defined-literals"
#endif
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;

namespace msl {

template <class To, class From> To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct HalfFormat { // IEEE binary16
  static uint16_t narrow(float f) {
    uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return sign | 0x7e00 | (a >> 13 & 0x3ff);
    if (a >= 0x477ff000) return sign | 0x7c00;         // rounds to infinity
    if (a < 0x38800000) {                              // subnormal: in units of 2^-24
      float units = std::fabs(f) * 16777216.0f;
      return sign | uint16_t(std::nearbyint(units));
    }
    return sign | uint16_t((a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
  }
  static float widen(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, a = h & 0x7fff;
    if (a >= 0x7c00) return bits<float>(sign | 0x7f800000 | (a & 0x3ff) << 13);
    float value = a < 0x400 ? float(a) / 16777216.0f
                            : bits<float>((a << 13) + 0x38000000);
    return sign ? -value : value;
  }
};

struct BfloatFormat { // the upper half of a float
  static uint16_t narrow(float f) {
    uint32_t u = bits<uint32_t>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static float widen(uint16_t b) { return bits<float>(uint32_t(b) << 16); }
};

template <class Format> struct Small { // a 16-bit float
  uint16_t raw;
  Small() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  constexpr Small(T value) : raw(Format::narrow(float(value))) {}
  template <class F, class = std::enable_if_t<!std::is_same_v<F, Format>>>
  explicit Small(Small<F> other) : Small(float(other)) {}
  operator float() const { return Format::widen(raw); }
  Small operator-() const { return bits<Small>(uint16_t(raw ^ 0x8000)); }
  Small& operator++() { return *this = *this + Small(1.0f); }
// With an integer the result stays small, with a float it is one, as in Metal.
#define MSL_OPERATOR(op)                                                             \
  friend Small operator op(Small a, Small b) { return Small(float(a) op float(b)); } \
  friend float operator op(Small a, float b) { return float(a) op b; }               \
  friend float operator op(float a, Small b) { return a op float(b); }               \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>                \
  friend Small operator op(Small a, I b) { return Small(float(a) op float(b)); }     \
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>                \
  friend Small operator op(I a, Small b) { return Small(float(a) op float(b)); }     \
  template <class T> Small& operator op##=(T b) { return *this = Small(*this op b); }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};

} // namespace msl

using half = msl::Small<msl::HalfFormat>;
using bfloat = msl::Small<msl::BfloatFormat>;
using float16_t = half;
using bfloat16_t = bfloat;
inline half operator""h(long double value) { return half(float(value)); }

namespace msl {
template <class T, int N> struct Fields;
template <class T> struct Fields<T, 2> { T x, y; };
template <class T> struct Fields<T, 3> { T x, y, z, padding; };
template <class T> struct Fields<T, 4> { T x, y, z, w; };
} // namespace msl

template <class T, int N>
struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : msl::Fields<T, N> {
  vec() = default;
  vec(T value) {
    for (int i = 0; i < N; ++i) (*this)[i] = value;
  }
  template <class... A, class = std::enable_if_t<sizeof...(A) == N>> vec(A... each) {
    T values[] = {T(each)...};
    for (int i = 0; i < N; ++i) (*this)[i] = values[i];
  }
  template <class U> explicit vec(const vec<U, N>& other) {
    for (int i = 0; i < N; ++i) (*this)[i] = T(other[i]);
  }
  T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; }
  const T& operator[](int i) const { return reinterpret_cast<const T*>(this)[i]; }
  vec operator-() const { return vec(T(0)) - *this; }
#define MSL_OPERATOR(op)                                                 \
  friend vec operator op(vec a, vec b) {                                 \
    for (int i = 0; i < N; ++i) a[i] = T(a[i] op b[i]);                  \
    return a;                                                            \
  }                                                                      \
  friend vec operator op(vec a, T b) { return a op vec(b); }             \
  friend vec operator op(T a, vec b) { return vec(a) op b; }             \
  vec& operator op##=(vec b) { return *this = *this op b; }              \
  vec& operator op##=(T b) { return *this = *this op vec(b); }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};

#define MSL_VECTORS(T)  \
  using T##2 = vec<T, 2>; \
  using T##3 = vec<T, 3>; \
  using T##4 = vec<T, 4>;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat)
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong)
#undef MSL_VECTORS

template <class To, class From> To as_type(From from) { return msl::bits<To>(from); }
