// What the shim asks of the runtime (runtime.cpp): who am I, wait for the others, fail.
// Knows nothing of Metal's types; compiled once and linked to every kernel.
#pragma once
#include <cstddef>
#include <cstdint>

namespace msl {

constexpr int kLanes = 32;            // threads of a SIMD group
constexpr int kMaxValue = 64;         // bytes a SIMD function can exchange per lane
constexpr int kMaxThreads = 1024;     // threads of a threadgroup
constexpr int kMaxShared = 32 * 1024; // bytes of threadgroup memory, Apple's limit

// One kernel argument. Mirrored by ctypes in run.py; lies in memory that the child
// process shares with its parent, so that the counters come back.
struct Buffer {
  const char* name;
  char* begin;
  char* end;
  char* first; // element; not the lowest address where a stride is negative
  uint8_t* touched; // per byte: 1 read, 2 written; only in the counting build
  uint64_t read;    // bytes
  uint64_t written;
};

struct Launch { // mirrored in run.py
  uint32_t grid[3];
  uint32_t group[3];
  uint32_t order; // 0 ascending, 1 descending, 2 shuffled
  uint32_t seed;
  uint32_t seconds; // before the child is stopped
  int32_t signal;   // that ended the child, 0 for none
  int32_t line;     // of the Metal text, 0 where unknown
  uint32_t thread[3];
  void* fault; // address of a bad access
  char message[512];
  Buffer* buffers;
};

// The attributes a Metal kernel can ask for, under their own names.
struct Position {
  uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3],
      threadgroup_position_in_grid[3], threads_per_threadgroup[3],
      dispatch_threads_per_threadgroup[3], threadgroups_per_grid[3],
      threads_per_grid[3], grid_size[3], grid_origin[3];
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup,
      simdgroup_index_in_threadgroup, simdgroups_per_threadgroup,
      dispatch_simdgroups_per_threadgroup, threads_per_simdgroup,
      thread_execution_width, thread_index_in_quadgroup,
      quadgroup_index_in_threadgroup, quadgroups_per_threadgroup,
      dispatch_quadgroups_per_threadgroup;
};

struct Exchange { // what the lanes of a SIMD group brought to a SIMD function
  alignas(16) char value[kLanes][kMaxValue];
  int lanes; // present: fewer than 32 in the last group of an odd threadgroup
};

enum class Meeting : int { // kinds of rendezvous, for telling two on a line apart
  sum, product, max, min, shuffle, shuffle_xor, shuffle_down, shuffle_up, broadcast,
  inclusive_sum, exclusive_sum, bit_and, bit_or, bit_xor, vote, barrier,
};

int lane();
// Leave a value, wait for every lane of the SIMD group, see all values.
const Exchange& meet(const void* value, size_t bytes, Meeting kind, int line);
void wait_for_threadgroup(int line);
// Memory of this threadgroup, filled with NaN before its first thread runs.
char* reserve_shared(size_t bytes, size_t alignment);
[[noreturn]] void fail(int line, const char* format, ...);
[[noreturn]] void bad_access(const Buffer* buffer, const void* at, size_t bytes);

using Entry = void (*)(Buffer* buffers, const Position& self);
int launch(Entry entry, Launch* launch); // 0, or 1 with launch->message set

} // namespace msl
