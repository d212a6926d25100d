// Declarations for clang's front end alone: nothing is run. The address spaces are real
// ones, so the text is judged as Apple's compiler (a clang too) would judge it.
#pragma once
#ifdef __clang__ // the suffix of 0.5h
#pragma clang diagnostic ignored "-Wreserved-user-defined-literal"
#pragma clang diagnostic ignored "-Wuser-defined-literals"
#endif
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

using uint = unsigned int;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using half = _Float16;
using bfloat = __bf16;
using float16_t = half;
using bfloat16_t = bfloat;
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
half operator""h(long double);

#define MSL_VECTORS(T)    \
  using T##2 = vec<T, 2>; \
  using T##3 = vec<T, 3>; \
  using T##4 = vec<T, 4>;
MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat)
MSL_VECTORS(char) MSL_VECTORS(uchar) MSL_VECTORS(short) MSL_VECTORS(ushort)
MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(long) MSL_VECTORS(ulong)
#undef MSL_VECTORS

namespace msl {
template <class T, class... A> T make(A...); // T(a, b, ...) of a vector
}
template <class To, class From> To as_type(From);

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

template <class T> T simd_sum(T);
template <class T> T simd_product(T);
template <class T> T simd_max(T);
template <class T> T simd_min(T);
template <class T> T simd_and(T);
template <class T> T simd_or(T);
template <class T> T simd_xor(T);
template <class T> T simd_shuffle(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_shuffle_up(T, ushort);
template <class T> T simd_broadcast(T, ushort);
template <class T> T simd_broadcast_first(T);
template <class T> T simd_prefix_inclusive_sum(T);
template <class T> T simd_prefix_exclusive_sum(T);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
template <class P> auto atomic_load_explicit(P p, memory_order) -> decltype(+p->value);
template <class P, class V> void atomic_store_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_add_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_sub_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_max_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_min_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_or_explicit(P, V, memory_order);
template <class P, class V> V atomic_fetch_and_explicit(P, V, memory_order);

#define MSL_UNARY(name) \
  float name(float);    \
  half name(half);      \
  bfloat name(bfloat);  \
  template <class T, int N> vec<T, N> name(vec<T, N>);
#define MSL_BINARY(name)       \
  float name(float, float);    \
  half name(half, half);       \
  bfloat name(bfloat, bfloat); \
  template <class T, int N> vec<T, N> name(vec<T, N>, vec<T, N>);
#define MSL_MATH                                                                    \
  MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(exp10) MSL_UNARY(log) MSL_UNARY(log2)    \
  MSL_UNARY(log10) MSL_UNARY(sqrt) MSL_UNARY(rsqrt) MSL_UNARY(sin) MSL_UNARY(cos)   \
  MSL_UNARY(tan) MSL_UNARY(sinh) MSL_UNARY(cosh) MSL_UNARY(tanh) MSL_UNARY(floor)   \
  MSL_UNARY(ceil) MSL_UNARY(rint) MSL_UNARY(round) MSL_UNARY(trunc) MSL_UNARY(fabs) \
  MSL_BINARY(pow) MSL_BINARY(powr) MSL_BINARY(fmod) MSL_BINARY(divide)              \
  MSL_BINARY(fmax) MSL_BINARY(fmin) MSL_BINARY(copysign) MSL_BINARY(atan2)          \
  float fma(float, float, float);                                                   \
  half fma(half, half, half);                                                       \
  template <class T, int N> vec<T, N> fma(vec<T, N>, vec<T, N>, vec<T, N>);
MSL_MATH
namespace precise { MSL_MATH }
namespace fast { MSL_MATH }
#undef MSL_MATH
#undef MSL_BINARY
#undef MSL_UNARY

template <class T> T max(T, T);
template <class T> T min(T, T);
template <class T> T clamp(T, T, T);
template <class T> T select(T, T, bool);
template <class T> T abs(T);
template <class T> T sign(T);
template <class T> T mix(T, T, T);
template <class T> T saturate(T);
template <class T, int N> T dot(vec<T, N>, vec<T, N>);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
int popcount(uint);
int clz(uint);
int ctz(uint);
template <class T> struct numeric_limits : std::numeric_limits<T> {};
#define INFINITY __builtin_inff()
using std::conditional_t;
using std::enable_if_t;
using std::is_same_v;

} // namespace metal

using namespace metal;
float log1p(float);
template <class I, class Shape, class Strides> I elem_to_loc(I, Shape, Strides, int);

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define METAL_FUNC inline
