// The math library of Metal, three times: metal::, metal::precise::, metal::fast::.
// All three are the CPU's own functions; Apple's fast variants round less well.
#pragma once
#include "types.hpp"

namespace metal {

#define MSL_UNARY(name, expression)                                              \
  inline float name(float x) { return expression; }                              \
  inline half name(half v) { float x = v; return half(float(expression)); }      \
  inline bfloat name(bfloat v) { float x = v; return bfloat(float(expression)); }\
  template <class T, int N> vec<T, N> name(vec<T, N> v) {                        \
    for (int i = 0; i < N; ++i) v[i] = name(v[i]);                               \
    return v;                                                                    \
  }
#define MSL_BINARY(name, expression)                                             \
  inline float name(float x, float y) { return expression; }                     \
  inline half name(half v, half w) { float x = v, y = w; return half(expression); } \
  inline bfloat name(bfloat v, bfloat w) {                                       \
    float x = v, y = w;                                                          \
    return bfloat(expression);                                                   \
  }                                                                              \
  template <class T, int N> vec<T, N> name(vec<T, N> v, vec<T, N> w) {           \
    for (int i = 0; i < N; ++i) v[i] = name(v[i], w[i]);                         \
    return v;                                                                    \
  }
#define MSL_MATH                                                                 \
  MSL_UNARY(exp, ::expf(x)) MSL_UNARY(exp2, ::exp2f(x)) MSL_UNARY(log, ::logf(x))\
  MSL_UNARY(exp10, ::powf(10.0f, x)) MSL_UNARY(log2, ::log2f(x))                 \
  MSL_UNARY(log10, ::log10f(x)) MSL_UNARY(sqrt, ::sqrtf(x))                      \
  MSL_UNARY(rsqrt, 1.0f / ::sqrtf(x)) MSL_UNARY(sin, ::sinf(x))                  \
  MSL_UNARY(cos, ::cosf(x)) MSL_UNARY(tan, ::tanf(x)) MSL_UNARY(sinh, ::sinhf(x))\
  MSL_UNARY(cosh, ::coshf(x)) MSL_UNARY(tanh, ::tanhf(x))                        \
  MSL_UNARY(floor, ::floorf(x)) MSL_UNARY(ceil, ::ceilf(x))                      \
  MSL_UNARY(rint, ::rintf(x)) MSL_UNARY(round, ::roundf(x))                      \
  MSL_UNARY(trunc, ::truncf(x)) MSL_UNARY(fabs, ::fabsf(x))                      \
  MSL_BINARY(pow, ::powf(x, y)) MSL_BINARY(powr, ::powf(x, y))                   \
  MSL_BINARY(fmod, ::fmodf(x, y)) MSL_BINARY(divide, x / y)                      \
  MSL_BINARY(fmax, ::fmaxf(x, y)) MSL_BINARY(fmin, ::fminf(x, y))                \
  MSL_BINARY(copysign, ::copysignf(x, y)) MSL_BINARY(atan2, ::atan2f(x, y))      \
  inline float fma(float a, float b, float c) { return ::fmaf(a, b, c); }        \
  inline half fma(half a, half b, half c) { return half(::fmaf(a, b, c)); }      \
  template <class T, int N> vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {\
    for (int i = 0; i < N; ++i) a[i] = fma(a[i], b[i], c[i]);                    \
    return a;                                                                    \
  }
MSL_MATH
namespace precise { MSL_MATH }
namespace fast { MSL_MATH }
#undef MSL_MATH
#undef MSL_BINARY
#undef MSL_UNARY

// One type on both sides, as the text must say for Apple's compiler too.
template <class T> T max(T a, T b) { return a < b ? b : a; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T, int N> vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = max(a[i], b[i]);
  return a;
}
template <class T, int N> vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = min(a[i], b[i]);
  return a;
}
template <class T> T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> T select(T no, T yes, bool which) { return which ? yes : no; }
template <class T> T abs(T x) { return x < T(0) ? T(-x) : x; }
template <class T> T sign(T x) { return T(float(x > T(0)) - float(x < T(0))); }
template <class T> T mix(T a, T b, T t) { return T(a + (b - a) * t); }
template <class T> T saturate(T x) { return clamp(x, T(0), T(1)); }
template <class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
  T sum = T(a[0] * b[0]);
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return std::isinf(x); }
inline bool isfinite(float x) { return std::isfinite(x); }
inline int popcount(uint x) { return __builtin_popcount(x); }
inline int clz(uint x) { return x ? __builtin_clz(x) : 32; }
inline int ctz(uint x) { return x ? __builtin_ctz(x) : 32; }

template <class T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static half infinity() { return half(INFINITY); }
  static half max() { return half(65504.0f); }
  static half lowest() { return half(-65504.0f); }
};
template <> struct numeric_limits<bfloat> {
  static bfloat infinity() { return bfloat(INFINITY); }
  static bfloat max() { return bfloat(3.38953139e38f); }
  static bfloat lowest() { return bfloat(-3.38953139e38f); }
};
using std::conditional_t;
using std::enable_if_t;
using std::is_same_v;

} // namespace metal
