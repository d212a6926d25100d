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

template <class T, class Space> class ptr {
  T* at;
  Buffer* buffer;
  template <class, class> friend class ptr;
  using Value = std::remove_const_t<T>;

public:
  ptr() = default;
  ptr(std::nullptr_t) : at(nullptr), buffer(nullptr) {}
  ptr(T* at, Buffer* buffer) : at(at), buffer(buffer) {}
  explicit ptr(Buffer& all) : at(reinterpret_cast<T*>(all.begin)), buffer(&all) {}
  operator ptr<const T, Space>() const { return {at, buffer}; }
  template <class U> // a cast in the text, such as to float4 for a wide load
  explicit ptr(const ptr<U, Space>& other) : at((T*)other.at), buffer(other.buffer) {}
  ptr(const ptr&) = default;
  ptr& operator=(const ptr&) = default;

  T* checked() const {
    check(buffer, at, sizeof(T), alignof(T));
    return at;
  }
  T* counted(bool write) const {
    checked();
    count(buffer, at, sizeof(T), write);
    return at;
  }
#ifdef MSL_COUNT
  decltype(auto) operator*() const {
    if constexpr (std::is_const_v<T>)
      return Value(*counted(false));
    else
      return ref<T>(checked(), buffer);
  }
  T* operator->() const { return counted(false); }
#else
  T& operator*() const { return *checked(); }
  T* operator->() const { return checked(); }
#endif
  template <class I> decltype(auto) operator[](I i) const { return *(*this + i); }

  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  friend ptr operator+(ptr p, I n) { return {p.at + n, p.buffer}; }
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  friend ptr operator+(I n, ptr p) { return {p.at + n, p.buffer}; }
  template <class I, class = std::enable_if_t<std::is_integral_v<I>>>
  friend ptr operator-(ptr p, I n) { return {p.at - n, p.buffer}; }
  friend ptrdiff_t operator-(ptr a, ptr b) { return a.at - b.at; }
  template <class I> ptr& operator+=(I n) { return *this = *this + n; }
  template <class I> ptr& operator-=(I n) { return *this = *this - n; }
  ptr& operator++() { return *this += 1; }
  ptr& operator--() { return *this -= 1; }
  ptr operator++(int) { return (*this += 1) - 1; }
  ptr operator--(int) { return (*this -= 1) + 1; }
  friend bool operator==(ptr a, ptr b) { return a.at == b.at; }
  friend bool operator!=(ptr a, ptr b) { return a.at != b.at; }
  friend bool operator<(ptr a, ptr b) { return a.at < b.at; }
  friend bool operator>(ptr a, ptr b) { return a.at > b.at; }
  friend bool operator<=(ptr a, ptr b) { return a.at <= b.at; }
  friend bool operator>=(ptr a, ptr b) { return a.at >= b.at; }
  explicit operator bool() const { return at; }
};

// A threadgroup array: a handle on memory that all threads of the threadgroup share.
template <class T, size_t N, size_t... Rest> class shared {
  T* at;
  Buffer* buffer;
  static constexpr size_t kStride = (size_t(1) * ... * Rest);

public:
  shared(T* at, Buffer* buffer) : at(at), buffer(buffer) {}
  template <class I> decltype(auto) operator[](I i) const {
    T* row = at + i * kStride;
    if (i < I(0) || size_t(i) >= N) bad_access(buffer, row, sizeof(T) * kStride);
    if constexpr (sizeof...(Rest) == 0)
      return static_cast<T&>(*row);
    else
      return shared<T, Rest...>(row, buffer);
  }
  operator ptr<T, threadgroup_space>() const { return {at, buffer}; }
  operator ptr<const T, threadgroup_space>() const { return {at, buffer}; }
  template <class I> ptr<T, threadgroup_space> operator+(I n) const {
    return {at + n * kStride, buffer};
  }
};

// The declaration number `id` of threadgroup memory in the text: one place for all
// threads. N... are the array's dimensions, none for a single variable.
template <int id, class T, size_t... N> decltype(auto) threadgroup_memory(const char* name) {
  static char* memory = reserve_shared(sizeof(T) * (size_t(1) * ... * N), alignof(T));
  static Buffer buffer{name, memory, memory + sizeof(T) * (size_t(1) * ... * N), nullptr,
                       0, 0};
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
