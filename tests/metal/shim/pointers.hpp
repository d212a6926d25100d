// Pointers that know their address space and their buffer.
//
// `device T*`, `constant T*` and `threadgroup T*` of the Metal text become
// msl::ptr<T, space> (see rewrite.py). Such a pointer does not turn into a plain one or
// into one of another space, so a wrong address space does not compile; each access is
// checked against its buffer. With MSL_COUNT every access is counted as well; reading
// and writing then differ by type: `const T` yields a value, T yields a ref.
#pragma once
#include "runtime.hpp"
#include "types.hpp"

namespace msl {

struct device_space;
struct constant_space;
struct threadgroup_space;

inline void check(const Buffer* buffer, const void* at, size_t bytes, size_t alignment) {
  const char* a = static_cast<const char*>(at);
  if (a < buffer->begin || a + bytes > buffer->end || uintptr_t(a) % alignment)
    bad_access(buffer, at, bytes);
}

inline void count(Buffer* buffer, const void* at, size_t bytes, bool write) {
  if (!buffer->touched) return;
  (write ? buffer->written : buffer->read) += bytes;
  uint8_t* map = buffer->touched + (static_cast<const char*>(at) - buffer->begin);
  for (size_t i = 0; i < bytes; ++i) map[i] |= write ? 2 : 1;
}

// An element that is about to be read or written; only in the counting build.
template <class T> class ref {
  T* at;
  Buffer* buffer;

public:
  ref(T* at, Buffer* buffer) : at(at), buffer(buffer) {}
  operator T() const {
    count(buffer, at, sizeof(T), false);
    return *at;
  }
  T operator=(const T& value) const {
    count(buffer, at, sizeof(T), true);
    return *at = value;
  }
  T operator=(const ref& other) const { return *this = T(other); }
#define MSL_OPERATOR(op) \
  template <class U> T operator op##=(const U& b) const { return *this = T(T(*this) op b); }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
  MSL_OPERATOR(|) MSL_OPERATOR(&) MSL_OPERATOR(^)
#undef MSL_OPERATOR
};

// What `auto x = p[i]` deduces: never a ref.
template <class T> T value(const T& x) { return x; }
template <class T> T value(const ref<T>& x) { return x; }

// One access: T& to use at once, or in the counting build what counts.
template <class T> decltype(auto) access(T* at, Buffer* buffer) {
  check(buffer, at, sizeof(T), alignof(T));
#ifdef MSL_COUNT
  if constexpr (std::is_const_v<T>) {
    count(buffer, at, sizeof(T), false);
    return std::remove_const_t<T>(*at);
  } else {
    return ref<T>(at, buffer);
  }
#else
  return static_cast<T&>(*at);
#endif
}

// ptr<T> derives from ptr<const T>: it converts to it, also where a template deduces T.
template <class T, class Space> class ptr;

template <class T, class Space> class ptr<const T, Space> {
protected:
  const T* at;
  Buffer* buffer;

public:
  using pointer = ptr;
  ptr() = default;
  ptr(std::nullptr_t) : at(nullptr), buffer(nullptr) {}
  ptr(const T* at, Buffer* buffer) : at(at), buffer(buffer) {}
  explicit ptr(Buffer& b) : at(reinterpret_cast<T*>(b.first)), buffer(&b) {}
  template <class U> // a cast in the text, such as to float4 for a wide load
  explicit ptr(const ptr<U, Space>& p) : at((const T*)p.raw()), buffer(p.owner()) {}
  const T* raw() const { return at; }
  Buffer* owner() const { return buffer; }
  decltype(auto) operator*() const { return access(at, buffer); }
  template <class I> decltype(auto) operator[](I i) const { return access(at + i, buffer); }
  const T* operator->() const {
    check(buffer, at, sizeof(T), alignof(T));
    count(buffer, at, sizeof(T), false);
    return at;
  }
  explicit operator bool() const { return at; }
};

template <class T, class Space> class ptr : public ptr<const T, Space> {
  using Const = ptr<const T, Space>;

public:
  using pointer = ptr;
  using Const::Const;
  ptr() = default;
  ptr(T* at, Buffer* buffer) : Const(at, buffer) {}
  T* raw() const { return const_cast<T*>(this->at); }
  decltype(auto) operator*() const { return access(raw(), this->buffer); }
  template <class I> decltype(auto) operator[](I i) const {
    return access(raw() + i, this->buffer);
  }
  T* operator->() const { return const_cast<T*>(Const::operator->()); }
};

template <class I> using if_integral = std::enable_if_t<std::is_integral_v<I>>;
template <class P, class I, class Q = typename P::pointer, class = if_integral<I>>
Q operator+(const P& p, I n) { return Q(p.raw() + n, p.owner()); }
template <class P, class I, class Q = typename P::pointer, class = if_integral<I>>
Q operator+(I n, const P& p) { return Q(p.raw() + n, p.owner()); }
template <class P, class I, class Q = typename P::pointer, class = if_integral<I>>
Q operator-(const P& p, I n) { return Q(p.raw() - n, p.owner()); }
template <class P, class I, class = typename P::pointer>
P& operator+=(P& p, I n) { return p = p + n; }
template <class P, class I, class = typename P::pointer>
P& operator-=(P& p, I n) { return p = p - n; }
template <class P, class = typename P::pointer> P& operator++(P& p) { return p += 1; }
template <class P, class = typename P::pointer> P& operator--(P& p) { return p -= 1; }
template <class P, class = typename P::pointer> P operator++(P& p, int) {
  return (p += 1) - 1;
}
template <class P, class = typename P::pointer> P operator--(P& p, int) {
  return (p -= 1) + 1;
}
#define MSL_OPERATOR(op)                                                            \
  template <class P, class Q, class = typename P::pointer, class = typename Q::pointer> \
  auto operator op(const P& p, const Q& q) { return p.raw() op q.raw(); }
MSL_OPERATOR(-) MSL_OPERATOR(==) MSL_OPERATOR(!=)
MSL_OPERATOR(<) MSL_OPERATOR(>) MSL_OPERATOR(<=) MSL_OPERATOR(>=)
#undef MSL_OPERATOR

// Threadgroup arrays: handles on memory that all threads of the threadgroup share. The
// row of one turns into a pointer, as an array does.
template <class T, size_t N, size_t... Rest> class shared {
  T* at;
  Buffer* buffer;
  static constexpr size_t kStride = (size_t(1) * ... * Rest);

public:
  shared(T* at, Buffer* buffer) : at(at), buffer(buffer) {}
  template <class I> shared<T, Rest...> operator[](I i) const {
    T* row = at + i * kStride;
    if (i < I(0) || size_t(i) >= N) bad_access(buffer, row, sizeof(T) * kStride);
    return {row, buffer};
  }
};

template <class T, size_t N> class shared<T, N> : public ptr<T, threadgroup_space> {
public:
  using ptr<T, threadgroup_space>::ptr;
  template <class I> T& operator[](I i) const {
    if (i < I(0) || size_t(i) >= N) bad_access(this->buffer, this->raw() + i, sizeof(T));
    return this->raw()[i];
  }
};

// The declaration number `id` of threadgroup memory in the text: one place for all
// threads. N... are the array's dimensions, none for a single variable.
template <int id, class T, size_t... N> decltype(auto) threadgroup_memory(const char* name) {
  static char* memory = reserve_shared(sizeof(T) * (size_t(1) * ... * N), alignof(T));
  static char* end = memory + sizeof(T) * (size_t(1) * ... * N);
  static Buffer buffer{name, memory, end, memory, nullptr, 0, 0};
  if constexpr (sizeof...(N) == 0)
    return *reinterpret_cast<T*>(memory);
  else
    return shared<T, N...>(reinterpret_cast<T*>(memory), &buffer);
}

// reinterpret_cast of the text, which may name a class here.
template <class To, class From> To pointer_cast(From from) {
  if constexpr (std::is_class_v<To>)
    return To(from);
  else
    return reinterpret_cast<To>(from);
}

} // namespace msl
