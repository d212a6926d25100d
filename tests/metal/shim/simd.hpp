// SIMD-group functions, barriers and atomics. Each function is a meeting of all lanes;
// reductions add in the order of an ascending butterfly (lane distance 1, 2, 4, 8, 16).
#pragma once
#include "pointers.hpp"

#define MSL_HERE int line = __builtin_LINE()

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };

inline void threadgroup_barrier(mem_flags, MSL_HERE) { msl::wait_for_threadgroup(line); }
inline void simdgroup_barrier(mem_flags, MSL_HERE) {
  msl::meet("", 1, msl::Meeting::barrier, line);
}

} // namespace metal

namespace msl {

template <class T> T poison() { // for lanes that do not exist
  T value;
  memset(&value, 0xff, sizeof value);
  if constexpr (std::is_integral_v<T>) value = T(0xdeadbeef);
  return value;
}

template <class T> const Exchange& meet(const T& x, Meeting kind, int line) {
  static_assert(sizeof(T) <= kMaxValue, "too large for a SIMD function");
  return meet(&x, sizeof x, kind, line);
}

template <class T> T brought(const Exchange& e, int lane) {
  if (lane < 0 || lane >= e.lanes) return poison<T>();
  T value;
  memcpy(&value, e.value[lane], sizeof value);
  return value;
}

template <class T, class F> T reduce(const T& x, Meeting kind, int line, F combine) {
  const Exchange& e = meet(x, kind, line);
  T values[kLanes];
  for (int i = 0; i < e.lanes; ++i) values[i] = brought<T>(e, i);
  for (int d = 1; d < e.lanes; d *= 2)
    for (int i = 0; i + d < e.lanes; i += 2 * d)
      values[i] = combine(values[i], values[i + d]);
  return values[0];
}

template <class T> T prefix_sum(const T& x, Meeting kind, int line, int end) {
  const Exchange& e = meet(x, kind, line);
  T sum = T(0);
  for (int i = 0; i < end; ++i) sum = T(sum + brought<T>(e, i));
  return sum;
}

} // namespace msl

namespace metal {

using msl::Meeting;

#define MSL_REDUCE(name, kind, expression)                             \
  template <class T> T name(T x, MSL_HERE) {                           \
    return msl::reduce(x, Meeting::kind, line,                         \
                       [](T a, T b) -> T { return T(expression); });   \
  }
MSL_REDUCE(simd_sum, sum, a + b)
MSL_REDUCE(simd_product, product, a * b)
MSL_REDUCE(simd_max, max, a < b ? b : a)
MSL_REDUCE(simd_min, min, b < a ? b : a)
MSL_REDUCE(simd_and, bit_and, a & b)
MSL_REDUCE(simd_or, bit_or, a | b)
MSL_REDUCE(simd_xor, bit_xor, a ^ b)
#undef MSL_REDUCE

#define MSL_SHUFFLE(name, kind, source)                                \
  template <class T> T name(T x, uint n, MSL_HERE) {                   \
    const msl::Exchange& e = msl::meet(x, Meeting::kind, line);        \
    return msl::brought<T>(e, source);                                 \
  }
MSL_SHUFFLE(simd_shuffle, shuffle, int(n))
MSL_SHUFFLE(simd_shuffle_xor, shuffle_xor, msl::lane() ^ int(n))
MSL_SHUFFLE(simd_shuffle_down, shuffle_down, msl::lane() + int(n))
MSL_SHUFFLE(simd_shuffle_up, shuffle_up, msl::lane() - int(n))
MSL_SHUFFLE(simd_broadcast, broadcast, int(n))
#undef MSL_SHUFFLE

template <class T> T simd_broadcast_first(T x, MSL_HERE) {
  return simd_broadcast(x, 0, line);
}
template <class T> T simd_prefix_inclusive_sum(T x, MSL_HERE) {
  return msl::prefix_sum(x, Meeting::inclusive_sum, line, msl::lane() + 1);
}
template <class T> T simd_prefix_exclusive_sum(T x, MSL_HERE) {
  return msl::prefix_sum(x, Meeting::exclusive_sum, line, msl::lane());
}
inline bool simd_any(bool x, MSL_HERE) { return simd_or(int(x), line); }
inline bool simd_all(bool x, MSL_HERE) { return simd_and(int(x), line); }
inline bool simd_is_first() { return msl::lane() == 0; }

// Atomics: the fibers of one CPU thread cannot interrupt each other.
enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T value; };
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;

} // namespace metal

namespace msl {
template <class T> T& target(metal::atomic<T>* p) { return p->value; }
template <class T, class S> T& target(const ptr<metal::atomic<T>, S>& p) {
  count(p.owner(), p.raw(), sizeof *p.raw(), true);
  return const_cast<metal::atomic<T>*>(p.operator->())->value; // counts the read
}
} // namespace msl

namespace metal {

template <class P> auto atomic_load_explicit(P p, memory_order) { return msl::target(p); }
template <class P, class V> void atomic_store_explicit(P p, V v, memory_order) {
  msl::target(p) = v;
}
#define MSL_FETCH(name, expression)                                    \
  template <class P, class V>                                          \
  auto atomic_fetch_##name##_explicit(P p, V operand, memory_order) {  \
    auto& a = msl::target(p);                                          \
    auto old = a;                                                      \
    decltype(old) b = operand;                                         \
    a = expression;                                                    \
    return old;                                                        \
  }
MSL_FETCH(add, a + b)
MSL_FETCH(sub, a - b)
MSL_FETCH(max, a < b ? b : a)
MSL_FETCH(min, b < a ? b : a)
MSL_FETCH(or, a | b)
MSL_FETCH(and, a & b)
#undef MSL_FETCH

} // namespace metal
