// Runs a grid of Metal threads on one CPU thread, in a child process.
//
// Threadgroups run one after another; the threads of one are fibers. A fiber runs until
// it meets a SIMD function or a barrier, then the next one runs. A child process,
// because a wild access must end the kernel and not the test session.
#include "runtime.hpp"

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__linux__)
#define MSL_UCONTEXT 1
#endif
#ifdef MSL_UCONTEXT
#include <ucontext.h>
#endif

namespace msl {
namespace {

enum class State { runnable, at_simd, at_barrier, finished };

#ifdef MSL_UCONTEXT
using Context = ucontext_t;
#else
using Context = void*; // the saved stack pointer
#endif

struct Fiber {
  Context context;
  char* stack;
  State state;
  Meeting kind;
  int line;
  int turn; // which of the SIMD group's two exchanges comes next
  Position self;
};

constexpr size_t kStack = 256 * 1024;
constexpr size_t kPage = 16 * 1024; // a multiple of every page size in use

// State of the child process: one launch per child.
Launch* current_launch;
Entry entry_point;
Fiber* fibers;
Fiber* running;
Context scheduler;
Exchange (*exchanges)[2]; // per SIMD group; two, as a lane may run one meeting ahead
alignas(64) char shared_memory[kMaxShared];
size_t shared_used;
uint32_t random_state;

uint32_t random_below(uint32_t n) { // xorshift32
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state % n;
}

// The order in which n equal things take their turn.
void fill_order(uint32_t* order, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i)
    order[i] = current_launch->order == 1 ? n - 1 - i : i;
  if (current_launch->order == 2)
    for (uint32_t i = n; i > 1; --i) {
      uint32_t j = random_below(i), t = order[i - 1];
      order[i - 1] = order[j];
      order[j] = t;
    }
}

void run_body();

#ifdef MSL_UCONTEXT
void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
void prepare(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, run_body, 0);
}
#else
extern "C" void msl_switch(void** save, void* load); // callee-saved registers only
asm(R"(.text
.globl msl_switch
.hidden msl_switch
.type msl_switch, @function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch, .-msl_switch
)");
void switch_context(Context& from, Context& to) { msl_switch(&from, to); }
void prepare(Fiber& fiber) {
  // As if run_body had been called: six registers, its address, no return address.
  void** top = reinterpret_cast<void**>(fiber.stack + kStack) - 2;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(run_body);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context = top;
}
#endif

void pause(State state, int line) {
  running->state = state;
  running->line = line;
  switch_context(running->context, scheduler);
}

void run_body() {
  entry_point(current_launch->buffers, running->self);
  pause(State::finished, 0);
}

void on_signal(int number, siginfo_t* info, void*) {
  current_launch->signal = number;
  current_launch->fault = info->si_addr;
  if (running) memcpy(current_launch->thread, running->self.thread_position_in_grid, 12);
  _exit(1);
}

void catch_signals() {
  stack_t alternative{};
  alternative.ss_size = 64 * 1024;
  alternative.ss_sp = malloc(alternative.ss_size);
  sigaltstack(&alternative, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGABRT, SIGALRM})
    sigaction(number, &action, nullptr);
  alarm(current_launch->seconds);
}

struct Count {
  uint32_t simd = 0, barrier = 0, finished = 0;
  bool same = true; // all that wait do so at one place
  const Fiber* waiting = nullptr;
};

Count count(uint32_t first, uint32_t end, State state) {
  Count c;
  for (uint32_t i = first; i < end; ++i) {
    const Fiber& f = fibers[i];
    c.simd += f.state == State::at_simd;
    c.barrier += f.state == State::at_barrier;
    c.finished += f.state == State::finished;
    if (f.state != state) continue;
    if (!c.waiting) c.waiting = &f;
    c.same = c.same && f.line == c.waiting->line && f.kind == c.waiting->kind;
  }
  return c;
}

// Let every lane of a SIMD group run to its next meeting. Returns whether the group can
// go on, that is whether all its lanes met in one SIMD function.
bool step_simdgroup(uint32_t group, uint32_t threads) {
  uint32_t first = group * kLanes;
  uint32_t lanes = threads - first < kLanes ? threads - first : kLanes;
  uint32_t order[kLanes];
  fill_order(order, lanes);
  for (uint32_t i = 0; i < lanes; ++i) {
    running = &fibers[first + order[i]];
    if (running->state == State::runnable) switch_context(scheduler, running->context);
  }
  running = &fibers[first];
  Count c = count(first, first + lanes, State::at_simd);
  if (!c.simd) return false;
  if (c.simd != lanes || !c.same) {
    running = const_cast<Fiber*>(c.waiting);
    fail(c.waiting->line,
         "divergent SIMD function: of the %u lanes of SIMD group %u %u wait here%s, "
         "%u wait at a barrier, %u have returned", lanes, group, c.simd,
         c.same ? "" : " or at another SIMD function", c.barrier, c.finished);
  }
  exchanges[group][c.waiting->turn].lanes = lanes;
  for (uint32_t i = 0; i < lanes; ++i) fibers[first + i].state = State::runnable;
  return true;
}

// Run every SIMD group to the next barrier or to its end: one after another, or in
// small steps at random under the shuffled order.
void run_to_barrier(uint32_t threads) {
  uint32_t left = (threads + kLanes - 1) / kLanes;
  uint32_t order[kMaxThreads / kLanes];
  fill_order(order, left);
  while (left) {
    uint32_t at = current_launch->order == 2 ? random_below(left) : 0;
    if (step_simdgroup(order[at], threads)) continue;
    memmove(order + at, order + at + 1, (--left - at) * sizeof *order);
  }
}

void run_threadgroup(uint32_t threads) {
  memset(shared_memory, 0xff, sizeof shared_memory); // NaN in every float format
  for (;;) {
    run_to_barrier(threads);
    Count c = count(0, threads, State::at_barrier);
    if (!c.barrier) return;
    if (c.barrier != threads || !c.same) {
      running = const_cast<Fiber*>(c.waiting);
      fail(c.waiting->line,
           "divergent threadgroup_barrier: of the %u threads of the threadgroup %u wait "
           "here%s, %u have returned", threads, c.barrier,
           c.same ? "" : " or at another barrier", c.finished);
    }
    for (uint32_t i = 0; i < threads; ++i) fibers[i].state = State::runnable;
  }
}

void set3(uint32_t (&to)[3], uint32_t x, uint32_t y, uint32_t z) {
  to[0] = x, to[1] = y, to[2] = z;
}

// size: of full threadgroups; those at the far edges of the grid are smaller.
uint32_t place_threads(const uint32_t (&at)[3], const uint32_t (&size)[3],
                       const uint32_t (&groups)[3]) {
  const uint32_t* grid = current_launch->grid;
  uint32_t n[3];
  for (int a = 0; a < 3; ++a) {
    uint32_t rest = grid[a] - at[a] * size[a];
    n[a] = rest < size[a] ? rest : size[a];
  }
  uint32_t threads = n[0] * n[1] * n[2], simds = (threads + kLanes - 1) / kLanes;
  for (uint32_t i = 0; i < threads; ++i) {
    uint32_t x = i % n[0], y = i / n[0] % n[1], z = i / (n[0] * n[1]);
    Fiber& f = fibers[i];
    Position& p = f.self;
    set3(p.thread_position_in_threadgroup, x, y, z);
    set3(p.thread_position_in_grid, at[0] * size[0] + x, at[1] * size[1] + y,
         at[2] * size[2] + z);
    set3(p.threadgroup_position_in_grid, at[0], at[1], at[2]);
    set3(p.threads_per_threadgroup, n[0], n[1], n[2]);
    set3(p.dispatch_threads_per_threadgroup, size[0], size[1], size[2]);
    set3(p.threadgroups_per_grid, groups[0], groups[1], groups[2]);
    set3(p.threads_per_grid, grid[0], grid[1], grid[2]);
    set3(p.grid_size, grid[0], grid[1], grid[2]);
    set3(p.grid_origin, 0, 0, 0);
    p.thread_index_in_threadgroup = i;
    p.thread_index_in_simdgroup = i % kLanes;
    p.simdgroup_index_in_threadgroup = i / kLanes;
    p.simdgroups_per_threadgroup = p.dispatch_simdgroups_per_threadgroup = simds;
    p.threads_per_simdgroup = p.thread_execution_width = kLanes;
    p.thread_index_in_quadgroup = i % 4;
    p.quadgroup_index_in_threadgroup = i / 4;
    p.quadgroups_per_threadgroup = p.dispatch_quadgroups_per_threadgroup =
        (threads + 3) / 4;
    f.state = State::runnable;
    f.turn = 0;
    prepare(f);
  }
  return threads;
}

void* map_memory(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (at == MAP_FAILED) fail(0, "out of memory: %zu bytes", bytes);
  return at;
}

void run_grid() {
  uint32_t size[3], groups[3], total = 1;
  for (int a = 0; a < 3; ++a) {
    uint32_t n = current_launch->grid[a], g = current_launch->group[a];
    if (!n || !g) fail(0, "grid and threadgroup must be positive");
    size[a] = g < n ? g : n;
    groups[a] = (n + size[a] - 1) / size[a];
    total *= groups[a];
  }
  uint64_t most = uint64_t(size[0]) * size[1] * size[2];
  if (most > kMaxThreads)
    fail(0, "a threadgroup of %llu threads; at most %d", (unsigned long long)most,
         kMaxThreads);
  fibers = static_cast<Fiber*>(map_memory(most * sizeof(Fiber)));
  exchanges = static_cast<Exchange(*)[2]>(
      map_memory((most + kLanes - 1) / kLanes * sizeof *exchanges));
  char* stacks = static_cast<char*>(map_memory(most * (kStack + kPage)));
  for (uint32_t i = 0; i < most; ++i) {
    char* guard = stacks + i * (kStack + kPage); // stacks grow down into it
    mprotect(guard, kPage, PROT_NONE);
    fibers[i].stack = guard + kPage;
  }
  auto* order = static_cast<uint32_t*>(map_memory(total * sizeof(uint32_t)));
  fill_order(order, total);
  for (uint32_t i = 0; i < total; ++i) {
    uint32_t at[3] = {order[i] % groups[0], order[i] / groups[0] % groups[1],
                      order[i] / (groups[0] * groups[1])};
    run_threadgroup(place_threads(at, size, groups));
  }
}

} // namespace

int lane() { return int(running->self.thread_index_in_simdgroup); }

const Exchange& meet(const void* value, size_t bytes, Meeting kind, int line) {
  Fiber& f = *running;
  Exchange& e = exchanges[f.self.simdgroup_index_in_threadgroup][f.turn];
  memcpy(e.value[lane()], value, bytes);
  f.kind = kind;
  pause(State::at_simd, line);
  f.turn ^= 1;
  return e;
}

void wait_for_threadgroup(int line) {
  running->kind = Meeting::barrier;
  pause(State::at_barrier, line);
}

char* reserve_shared(size_t bytes, size_t alignment) {
  size_t at = (shared_used + alignment - 1) / alignment * alignment;
  if (at + bytes > kMaxShared)
    fail(0, "threadgroup memory of %zu bytes; at most %d", at + bytes, kMaxShared);
  shared_used = at + bytes;
  return shared_memory + at;
}

void fail(int line, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(current_launch->message, sizeof current_launch->message, format, arguments);
  va_end(arguments);
  current_launch->line = line;
  if (running) memcpy(current_launch->thread, running->self.thread_position_in_grid, 12);
  _exit(1);
}

void bad_access(const Buffer* buffer, const void* at, size_t bytes) {
  long long offset = static_cast<const char*>(at) - buffer->begin;
  long long size = buffer->end - buffer->begin;
  if (offset >= 0 && offset + (long long)bytes <= size)
    fail(0, "'%s': %zu bytes at byte %lld are not aligned", buffer->name, bytes, offset);
  fail(0, "'%s' is accessed %s: %zu bytes at byte %lld of %lld (element %lld)",
       buffer->name, offset < 0 ? "before its beginning" : "past its end", bytes, offset,
       size, offset / (long long)bytes);
}

int launch(Entry entry, Launch* launch) {
  current_launch = launch;
  entry_point = entry;
  random_state = launch->seed * 2654435761u + 1;
  if (!random_state) random_state = 1;
  pid_t child = fork();
  if (child < 0) {
    snprintf(launch->message, sizeof launch->message, "fork failed");
    return 1;
  }
  if (!child) {
    catch_signals();
    run_grid();
    _exit(0);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFSIGNALED(status)) launch->signal = WTERMSIG(status);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

} // namespace msl
