// Compiles the text of a Metal kernel, rewritten by rewrite.py, as C++17 for a CPU.
#pragma once
#include "math.hpp"
#include "pointers.hpp"
#include "runtime.hpp"
#include "simd.hpp"
#include "types.hpp"

namespace msl {
inline uint attribute(uint32_t value) { return value; }
inline uint3 attribute(const uint32_t (&v)[3]) { return uint3(v[0], v[1], v[2]); }
} // namespace msl

using namespace metal;

// Metal has no log1p; MLX puts its own, and this index function, before every kernel.
inline float log1p(float x) { return ::log1pf(x); }
template <class I, class Shape, class Strides>
I elem_to_loc(I element, Shape shape, Strides strides, int ndim) {
  I at = 0;
  for (int i = ndim - 1; i >= 0 && element > 0; --i) {
    at += element % shape[i] * I(strides[i]);
    element /= shape[i];
  }
  return at;
}

// Keywords that rewrite.py leaves: threads' own memory, and constants of the program.
#define thread
#define constant const
#define METAL_FUNC inline
