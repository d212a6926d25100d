// The same Metal text for nvcc: a warp is a SIMD group, a block a threadgroup. Scalars,
// SIMD functions, threadgroup memory and math; no vectors beyond uint3, no atomics.
// Helper functions of the text must be METAL_FUNC, which makes them device functions.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#define CUDA_NO_HALF // the name half is Metal's here
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace msl {

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void narrow(float x, __half& to) { to = __float2half_rn(x); }
__device__ inline void narrow(float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x); }

template <class Raw> struct Small { // rounds after every operation, as on the CPU
  Raw raw;
  Small() = default;
  template <class T, class = decltype(float(T()))> __device__ Small(T x) {
    narrow(float(x), raw);
  }
  __device__ operator float() const { return widen(raw); }
#define MSL_OPERATOR(op)                                                          \
  __device__ friend Small operator op(Small a, Small b) {                         \
    return Small(float(a) op float(b));                                           \
  }                                                                               \
  __device__ friend float operator op(Small a, float b) { return float(a) op b; } \
  __device__ friend float operator op(float a, Small b) { return a op float(b); } \
  template <class T> __device__ Small& operator op##=(T b) {                      \
    return *this = Small(*this op b);                                             \
  }
  MSL_OPERATOR(+) MSL_OPERATOR(-) MSL_OPERATOR(*) MSL_OPERATOR(/)
#undef MSL_OPERATOR
};

struct Arguments {
  void* at[32];
};

// Metal's attributes. Threadgroups are whole: cuda.py sees to it.
__device__ inline uint3 scaled(uint3 a, dim3 b, uint3 c) {
  return {a.x * b.x + c.x, a.y * b.y + c.y, a.z * b.z + c.z};
}
#define MSL_ATTRIBUTE(type, name, value) \
  __device__ inline type name() { return value; }
MSL_ATTRIBUTE(uint3, thread_position_in_threadgroup, threadIdx)
MSL_ATTRIBUTE(uint3, threadgroup_position_in_grid, blockIdx)
MSL_ATTRIBUTE(uint3, thread_position_in_grid, scaled(blockIdx, blockDim, threadIdx))
MSL_ATTRIBUTE(uint3, threads_per_threadgroup, scaled(uint3{}, blockDim, uint3(blockDim)))
MSL_ATTRIBUTE(uint3, threadgroups_per_grid, uint3(gridDim))
MSL_ATTRIBUTE(uint3, threads_per_grid, scaled(uint3(gridDim), blockDim, uint3{}))
MSL_ATTRIBUTE(unsigned, thread_index_in_threadgroup,
              threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
MSL_ATTRIBUTE(unsigned, thread_index_in_simdgroup, thread_index_in_threadgroup() % 32)
MSL_ATTRIBUTE(unsigned, simdgroup_index_in_threadgroup, thread_index_in_threadgroup() / 32)
MSL_ATTRIBUTE(unsigned, simdgroups_per_threadgroup,
              (blockDim.x * blockDim.y * blockDim.z + 31) / 32)
MSL_ATTRIBUTE(unsigned, threads_per_simdgroup, 32)
#undef MSL_ATTRIBUTE

// Copy the buffers over, run once, copy all back. Returns 0, or 1 with a message.
template <class Entry>
int run_on_gpu(Entry entry, void** data, const size_t* sizes, int count, const unsigned* grid,
               const unsigned* block, char* message, int length) {
  Arguments arguments{};
  for (int i = 0; i < count; ++i) {
    cudaMalloc(&arguments.at[i], sizes[i]);
    cudaMemcpy(arguments.at[i], data[i], sizes[i], cudaMemcpyHostToDevice);
  }
  entry<<<dim3(grid[0], grid[1], grid[2]), dim3(block[0], block[1], block[2])>>>(arguments);
  cudaError_t launched = cudaGetLastError(), ran = cudaDeviceSynchronize();
  for (int i = 0; i < count; ++i) {
    cudaMemcpy(data[i], arguments.at[i], sizes[i], cudaMemcpyDeviceToHost);
    cudaFree(arguments.at[i]);
  }
  cudaError_t error = launched != cudaSuccess ? launched : ran;
  snprintf(message, length, "%s", cudaGetErrorString(error));
  return error != cudaSuccess;
}

} // namespace msl

using half = msl::Small<__half>;
using bfloat = msl::Small<__nv_bfloat16>;
using float16_t = half;
using bfloat16_t = bfloat;
using uint = unsigned;

namespace metal {

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

#define MSL_SHUFFLE(name, intrinsic)                                      \
  template <class T> __device__ T name(T x, unsigned n) {                 \
    return T(intrinsic(__activemask(), float(x), n));                     \
  }                                                                       \
  __device__ inline int name(int x, unsigned n) {                         \
    return intrinsic(__activemask(), x, n);                               \
  }                                                                       \
  __device__ inline unsigned name(unsigned x, unsigned n) {               \
    return intrinsic(__activemask(), x, n);                               \
  }
MSL_SHUFFLE(simd_shuffle, __shfl_sync)
MSL_SHUFFLE(simd_broadcast, __shfl_sync)
MSL_SHUFFLE(simd_shuffle_xor, __shfl_xor_sync)
MSL_SHUFFLE(simd_shuffle_down, __shfl_down_sync)
MSL_SHUFFLE(simd_shuffle_up, __shfl_up_sync)
#undef MSL_SHUFFLE

#define MSL_REDUCE(name, expression)                          \
  template <class T> __device__ T name(T a) {                 \
    for (int d = 1; d < 32; d *= 2) {                         \
      T b = simd_shuffle_xor(a, d);                           \
      a = T(expression);                                      \
    }                                                         \
    return a;                                                 \
  }
MSL_REDUCE(simd_sum, a + b)
MSL_REDUCE(simd_product, a * b)
MSL_REDUCE(simd_max, a < b ? b : a)
MSL_REDUCE(simd_min, b < a ? b : a)
#undef MSL_REDUCE
__device__ inline bool simd_any(bool x) { return __any_sync(__activemask(), x); }
__device__ inline bool simd_all(bool x) { return __all_sync(__activemask(), x); }

#define MSL_UNARY(name)                                                  \
  using ::name;                                                          \
  __device__ inline half name(half x) { return ::name(float(x)); }       \
  __device__ inline bfloat name(bfloat x) { return ::name(float(x)); }
#define MSL_MATH                                                         \
  MSL_UNARY(exp) MSL_UNARY(exp2) MSL_UNARY(log) MSL_UNARY(log2)          \
  MSL_UNARY(sqrt) MSL_UNARY(rsqrt) MSL_UNARY(tanh) MSL_UNARY(sin)        \
  MSL_UNARY(cos) MSL_UNARY(floor) MSL_UNARY(ceil) MSL_UNARY(rint)        \
  MSL_UNARY(fabs)                                                        \
  using ::fma;                                                           \
  using ::pow;                                                           \
  __device__ inline float divide(float x, float y) { return x / y; }
MSL_MATH
namespace precise { MSL_MATH }
namespace fast { MSL_MATH }
#undef MSL_MATH
#undef MSL_UNARY
using ::abs;
using ::max;
using ::min;
template <class T> __device__ T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> __device__ T select(T no, T yes, bool which) { return which ? yes : no; }

} // namespace metal

template <class To, class From> __device__ To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
using namespace metal;
#define thread
#define constant const
#define METAL_FUNC __device__ inline
