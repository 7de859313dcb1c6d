// Scheduling and barriers: which thread runs next, what it may wait for, and what a deadlock looks like.
#include "machine.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "state.h"

namespace emulator {

Schedule schedule;
Thread* current;
dim3 grid_size, block_size;

namespace {

constexpr size_t kStackBytes = 128 * 1024, kUsableStackBytes = kStackBytes - 16 * 2240;
constexpr uint64_t kStackMark = 0x57ac4e4d;

// One launch. Kept between launches for its stacks and shared memory.
struct Machine {
  Context host;
  std::vector<std::unique_ptr<Block>> blocks;  // that run, in order of their index
  std::vector<std::unique_ptr<Block>> spare;
  Warp* warp;  // that ran last
  Block* warp_block;
  uint32_t random;
  const void* kernel;
  void** arguments;
  bool early;
  bool waited;              // some block, for the kernel before
  bool let_next_too_early;  // some block let the next kernel begin before it had waited
  bool older_ended;         // the kernel before let this one begin, if early, when the one before itself had ended
  std::string error;

  std::unique_ptr<Block> take_spare() {
    if (spare.empty()) return std::make_unique<Block>();
    std::unique_ptr<Block> block = std::move(spare.back());
    spare.pop_back();
    return block;
  }
  uint32_t draw() {
    random ^= random << 13, random ^= random >> 17, random ^= random << 5;
    return random;
  }
};
Machine machine;

// The ends of the stacks of a block are staggered: at equal offsets their hot parts would share few sets of the caches.
char* stack_end(const Block& block, size_t thread) { return block.stacks + (thread + 1) * kStackBytes - thread % 16 * 2240; }
// Its last word, which shows an overflow when the thread ends. Guard pages would be more mappings than a process may have.
uint64_t& stack_floor(const Block& block, size_t thread) { return *reinterpret_cast<uint64_t*>(block.stacks + thread * kStackBytes); }

Block& first_of_cluster(Block& block) { return block.rank() == 0 ? block : *block.peer; }

// When all threads of both blocks have arrived that have not ended.
void complete_cluster_barrier(Block& block) {
  NamedBarrier& barrier = first_of_cluster(block).cluster;
  if (barrier.arrived == 0 || barrier.arrived < block.live + block.peer->live) return;
  barrier.arrived = 0;
  ++barrier.generation;
  complete(barrier);
  for (Block* each : {&block, block.peer}) wake(*each, Wait::kCluster, 0);
}

void thread_main() {
  // Kernels take their one argument by reference (translate.py), whatever its type.
  reinterpret_cast<void (*)(void*)>(const_cast<void*>(machine.kernel))(machine.arguments[0]);
  Fiber& fiber = self();
  if (stack_floor(*fiber.block, fiber.index.x) != kStackMark) fail("the thread needs more than %zu bytes of stack", kUsableStackBytes);
  if (!fiber.accumulators.empty()) fail("the thread ends before its wgmma have completed");
  finish_copies(fiber);
  if (fiber.cluster_generation != 0) fail("the thread ends before it has waited at the barrier of the cluster");
  --fiber.block->live;
  if (fiber.block->peer != nullptr) complete_cluster_barrier(*fiber.block);
  if (fiber.block->live == 0) {
    if (fiber.block->told_to_wait) check_kernel_before("after a semaphore of the past, the end of the block");
    if (fiber.block->busy && !fiber.block->asked) check_kernel_before("the end of the block");
    check_visits(*fiber.block);
    for (int id = 0; id < 16; ++id) {
      const NamedBarrier& barrier = fiber.block->barriers[id];
      if (barrier.arrived > 0) fail("the block ends with %d of %d arrivals at barrier %d", barrier.arrived, barrier.threads, id);
    }
  }
  wait(Wait::kFinished, 0);
}

void allocate(Block& block) {
  block.window = static_cast<unsigned char*>(aligned_alloc(1024, kWindowBytes));
  block.granules.resize(kWindowBytes / kGranule);
  block.reads.resize(kWindowBytes / kGranule);
  block.fibers.resize(kMaxThreads);
  block.stacks = static_cast<char*>(
      mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (block.window == nullptr || block.stacks == MAP_FAILED) throw std::runtime_error("the emulator got no memory for a thread block");
}

void start(Block& block, unsigned number, size_t dynamic_bytes) {
  if (block.stacks == nullptr) allocate(block);
  const int threads = block_size.x;
  block.index = {number, 0, 0};
  block.live = threads;
  block.after_kernel_before = !machine.early, block.asked = block.told_to_wait = block.busy = false;
  block.warps.assign(threads / kLanes, Warp{});
  block.barriers = {};
  block.groups.assign((block.warps.size() + kWarpsPerGroup - 1) / kWarpsPerGroup, Warpgroup{});
  block.loads.clear();
  block.peer = nullptr;
  block.cluster = {};
  block.copies_to_peer = 0;
  block.visits = {};
  block.dynamic_bytes = dynamic_bytes;
  reset_shared_memory(block);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber = Fiber{};
    fiber.index = {static_cast<unsigned>(i), 0, 0};
    fiber.block_index = block.index;
    fiber.lane = i % kLanes;
    fiber.warp = i / kLanes;
    fiber.block = &block;
    make_context(fiber.context, stack_end(block, i), kUsableStackBytes, thread_main);
    stack_floor(block, i) = kStackMark;
    block.warps[fiber.warp].runnable |= 1u << fiber.lane;
  }
}

const char* describe(const Fiber& fiber, char (&text)[160]) {
  const Block& block = *fiber.block;
  const Warp& warp = block.warps[fiber.warp];
  switch (fiber.wait.kind) {
    case Wait::kWarp:
      snprintf(text, sizeof text, "%s of the warp (%d of %d lanes are there)", warp.operation, __builtin_popcount(warp.arrived), kLanes);
      break;
    case Wait::kBarrier: {
      const NamedBarrier& barrier = block.barriers[fiber.wait.where];
      snprintf(text, sizeof text, "barrier %d (%d of %d threads have arrived)", static_cast<int>(fiber.wait.where), barrier.arrived,
               barrier.threads);
      break;
    }
    case Wait::kMbarrier:
      snprintf(text, sizeof text, "mbarrier at 0x%x, parity %d", static_cast<unsigned>(fiber.wait.where),
               static_cast<int>(fiber.wait.what));
      break;
    case Wait::kProducts:
      snprintf(text, sizeof text, "wgmma number %d, which not all 128 threads have issued",
               static_cast<int>(block.groups[fiber.wait.where].first));
      break;
    case Wait::kMemory:
      snprintf(text, sizeof text, "a change of the value %d in global memory", static_cast<int>(fiber.wait.what));
      break;
    case Wait::kCluster:
      snprintf(text, sizeof text, "the barrier of the cluster (%d of %d threads have arrived)",
               first_of_cluster(*fiber.block).cluster.arrived, fiber.block->live + fiber.block->peer->live);
      break;
    default:
      snprintf(text, sizeof text, "nothing");
  }
  return text;
}

// Who waits where, threads that wait for the same together.
std::string deadlock_report() {
  std::string report = "deadlock:";
  for (const auto& block : machine.blocks) {
    for (size_t first = 0; first < block_size.x;) {
      char text[160], other[160];
      const Fiber& fiber = block->fibers[first];
      size_t last = first + 1;
      describe(fiber, text);
      while (last < block_size.x && block->fibers[last].wait.kind == fiber.wait.kind && !strcmp(text, describe(block->fibers[last], other)))
        ++last;
      if (fiber.wait.kind != Wait::kFinished) {
        char line[256];
        snprintf(line, sizeof line, " block %u: threads %zu-%zu wait for %s;", block->index.x, first, last - 1, text);
        report += line;
      }
      first = last;
    }
  }
  report.pop_back();
  return report;
}

// The next thread of the warp that ran last, else of the first warp in the order of the schedule that can run; null when none can.
Fiber* runnable() {
  if (machine.warp == nullptr || machine.warp->runnable == 0) {
    const size_t warps_per_block = block_size.x / kLanes, count = machine.blocks.size() * warps_per_block;
    const size_t offset = schedule.seed > 1 ? machine.draw() % count : 0;
    machine.warp = nullptr;
    for (size_t i = 0; i < count && machine.warp == nullptr; ++i) {
      const size_t position = schedule.seed == 1 ? count - 1 - i : (i + offset) % count;
      Block& block = *machine.blocks[position / warps_per_block];
      Warp& warp = block.warps[position % warps_per_block];
      if (warp.runnable != 0) machine.warp = &warp, machine.warp_block = &block;
    }
    if (machine.warp == nullptr) return nullptr;
  }
  const int lane = schedule.seed == 1 ? 31 - __builtin_clz(machine.warp->runnable) : __builtin_ctz(machine.warp->runnable);
  return &machine.warp_block->fibers[(machine.warp - machine.warp_block->warps.data()) * kLanes + lane];
}

// Wakes the threads whose wait satisfies done(wait); whether there were any.
template <typename F>
bool wake_if(const F& done) {
  bool any = false;
  for (auto& block : machine.blocks) {
    for (size_t i = 0; i < block_size.x; ++i) {
      Fiber& fiber = block->fibers[i];
      if (!done(fiber.wait)) continue;
      fiber.wait.kind = Wait::kNothing;
      block->warps[fiber.warp].runnable |= 1u << fiber.lane;
      any = true;
    }
  }
  return any;
}

bool notice_changes() {
  return wake_if([](const Wait& wait) {
    return wait.kind == Wait::kMemory && *reinterpret_cast<const int32_t*>(wait.where) != static_cast<int32_t>(wait.what);
  });
}

bool end_courtesy() {
  return wake_if([](const Wait& wait) { return wait.kind == Wait::kOthers; });
}

// Which of `count` things that may happen comes first: the oldest, the newest, any.
size_t choose(size_t count) { return schedule.seed == 0 ? 0 : schedule.seed == 1 ? count - 1 : machine.draw() % count; }

// Calls f(block) for the blocks in the order of the schedule until it returns true; whether it did.
template <typename F>
bool any_block(const F& f) {
  const size_t count = machine.blocks.size(), first = choose(count);
  for (size_t i = 0; i < count; ++i)
    if (f(*machine.blocks[schedule.seed == 1 ? first - i : (first + i) % count])) return true;
  return false;
}

bool land_copy() {
  return any_block([](Block& block) {
    if (block.loads.empty()) return false;
    const auto which = block.loads.begin() + choose(block.loads.size());
    const Copy copy = *which;
    block.loads.erase(which);
    perform(block, copy);
    return true;
  });
}

// Something that lets a thread run when none can: a changed value that was polled, the arrival of a copy, the end of a product; and at last
// those go on who only let others run.
bool make_progress() { return notice_changes() || land_copy() || any_block(finish_products) || end_courtesy(); }

[[noreturn]] void abandon(std::string error) {
  if (current == nullptr) throw std::runtime_error(error);  // between thread blocks
  machine.error = std::move(error);
  switch_context(self().context, machine.host);
  __builtin_unreachable();
}

Fiber& next() {
  for (;;) {
    if (Fiber* fiber = runnable()) return *fiber;
    if (!make_progress()) abandon(deadlock_report());
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[512], where[64];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (current == nullptr)
    where[0] = '\0';
  else
    snprintf(where, sizeof where, "block %u thread %u: ", current->block_index.x, current->index.x);
  abandon(std::string(where) + text);
}

void wait(Wait::Kind kind, uint64_t where, uint64_t what) {
  Fiber& from = self();
  from.wait = {kind, where, what};
  from.block->warps[from.warp].runnable &= ~(1u << from.lane);
  if (kind == Wait::kFinished && from.block->live == 0) {
    switch_context(from.context, machine.host);
    __builtin_unreachable();
  }
  Fiber& to = next();
  if (&to == &from) return;
  current = &to;
  switch_context(from.context, to.context);
}

void let_others_run() {
  if (schedule.seed == 1 || (schedule.seed > 1 && machine.draw() % 2 == 0)) wait(Wait::kOthers, 0);
}

void announce_change() {
  notice_changes();
  let_others_run();
}

void wake(Block& block, Wait::Kind kind, uint64_t where) {
  for (size_t i = 0; i < block_size.x; ++i) {
    Fiber& fiber = block.fibers[i];
    if (fiber.wait.kind != kind || fiber.wait.where != where) continue;
    fiber.wait.kind = Wait::kNothing;
    block.warps[fiber.warp].runnable |= 1u << fiber.lane;
  }
}

namespace {

void begin_clocks(Block& block) {
  for (size_t warp = 0; warp < block.warps.size(); ++warp) block.warps[warp].clock[block.rank() * (kMaxWarps / 2) + warp] = 1;
}

}  // namespace

std::string run(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t dynamic_bytes, bool early, int cluster) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (block.y * block.z != 1 || grid.y * grid.z != 1) return "the emulator has one-dimensional grids and blocks only";
  if (block.x == 0 || block.x > kMaxThreads || block.x % kLanes != 0) return "the emulator wants whole warps, at most 1024 threads";
  if (cluster != 1 && cluster != 2) return "the emulator has clusters of two blocks only";
  if (grid.x % cluster != 0) return "the grid is no multiple of the cluster";
  if (cluster == 2 && block.x > kMaxThreads / 2) return "the emulator wants at most 512 threads in a block of a cluster";
  grid_size = grid, block_size = block;
  machine.kernel = kernel, machine.arguments = arguments, machine.early = early;
  machine.older_ended = !machine.let_next_too_early;
  machine.waited = !early, machine.let_next_too_early = false;
  machine.random = schedule.seed * 2654435761u | 1;
  machine.error.clear();
  unsigned started = 0;
  try {
    for (;;) {
      while (static_cast<int>(machine.blocks.size()) < std::max(1, schedule.resident) && started < grid.x) {
        for (int rank = 0; rank < cluster; ++rank) {
          machine.blocks.push_back(machine.take_spare());
          start(*machine.blocks.back(), started++, dynamic_bytes);
        }
        if (cluster == 2) {
          Block &first = **(machine.blocks.end() - 2), &second = *machine.blocks.back();
          first.peer = &second, second.peer = &first;
        }
        for (int rank = 0; rank < cluster; ++rank) begin_clocks(**(machine.blocks.end() - 1 - rank));
      }
      // Its end says that all kernels before have ended, whatever its blocks had to do.
      if (machine.blocks.empty()) return machine.waited ? "" : "the end of the kernel before griddepcontrol.wait, which was launched early";
      machine.warp = nullptr;
      Fiber& first = next();
      current = &first;
      switch_context(machine.host, first.context);  // until a block is done or something is wrong
      current = nullptr;
      if (!machine.error.empty()) throw std::runtime_error(machine.error);
      for (size_t i = machine.blocks.size(); i-- > 0;) {
        const Block& ended = *machine.blocks[i];
        if (ended.live > 0 || (ended.peer != nullptr && ended.peer->live > 0)) continue;
        machine.spare.push_back(std::move(machine.blocks[i]));
        machine.blocks.erase(machine.blocks.begin() + i);
      }
    }
  } catch (const std::runtime_error& error) {
    for (auto& running : machine.blocks) machine.spare.push_back(std::move(running));
    machine.blocks.clear();
    return error.what();
  }
}

void wait_for_kernel_before() { self().block->after_kernel_before = machine.waited = true; }

void let_next_kernel_begin() {
  if (!self().block->after_kernel_before) machine.let_next_too_early = true;
}

bool reads_of_the_past(const int32_t* semaphore) {
  Block& block = *self().block;
  if (block.after_kernel_before) return false;
  if (!machine.older_ended) check_kernel_before("ld.acquire");
  const unsigned which = (grid_size.x + schedule.seed) % 3;  // the same every time
  const bool past = *semaphore != 0 && (which == 0 || (which == 1 && machine.draw() % 2 == 0));
  block.asked = true, block.told_to_wait |= past;
  return past;
}

void check_kernel_before(const char* access) {
  if (!self().block->after_kernel_before) fail("%s before griddepcontrol.wait, in a kernel that was launched early", access);
}

void collective(const char* operation, void* arguments, void (*perform)(void* const (&lanes)[kLanes])) {
  Fiber& fiber = self();
  Warp& warp = fiber.block->warps[fiber.warp];
  fiber.block->busy = true;
  if (warp.arrived == 0)
    warp.operation = operation;
  else if (warp.operation != operation && strcmp(warp.operation, operation) != 0)
    fail("%s while other lanes of the warp are in %s", operation, warp.operation);
  fiber.seen = {};  // who meets others between two looks at a value does not spin
  warp.arguments[fiber.lane] = arguments;
  warp.arrived |= 1u << fiber.lane;
  if (warp.arrived != 0xffffffffu) return wait(Wait::kWarp, fiber.warp);
  warp.arrived = 0;
  warp.runnable = 0xffffffffu;
  if (perform != nullptr) perform(warp.arguments);
}

namespace {

// Counts this thread in; returns whether the barrier is complete.
bool arrive(NamedBarrier& barrier, int id, int threads) {
  if (id < 0 || id > 15) fail("barrier %d: there are 16", id);
  if (threads <= 0 || threads % kLanes != 0) fail("barrier %d with %d threads: must be whole warps", id, threads);
  if (barrier.arrived > 0 && barrier.threads != threads)
    fail("barrier %d with %d threads, others use it with %d", id, threads, barrier.threads);
  barrier.threads = threads;
  self().block->busy = true;
  tell(barrier.told);
  if (++barrier.arrived < threads) return false;
  barrier.arrived = 0;
  ++barrier.generation;
  complete(barrier);
  wake(*self().block, Wait::kBarrier, id);
  return true;
}

}  // namespace

void barrier_arrive(int id, int threads) {
  arrive(self().block->barriers[id & 15], id, threads);
  let_others_run();
}

void barrier_sync(int id, int threads) {
  NamedBarrier& barrier = self().block->barriers[id & 15];
  if (!arrive(barrier, id, threads)) wait(Wait::kBarrier, id);
  learn(barrier.complete);
}

// ---- mbarrier ----

namespace {

// As it lies in shared memory. NaN bytes are not one.
struct Mbarrier {
  static constexpr uint64_t kMark = 5;
  uint64_t mark : 3, phase : 1, count : 20, pending : 20, bytes_and_bias : 20;
  static constexpr int kBias = 1 << 19;
  int bytes() const { return static_cast<int>(bytes_and_bias) - kBias; }
  void set_bytes(int bytes) { bytes_and_bias = bytes + kBias; }
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& mbarrier_at(Block& block, uint32_t address, bool fresh = false) {
  if (address % 8 != 0) fail("mbarrier at 0x%x: must be aligned to 8 bytes", address);
  if (address < kDynamicBase || address + 8 > kWindowBytes) fail("mbarrier at 0x%x: outside shared memory", address);
  Mbarrier& barrier = *reinterpret_cast<Mbarrier*>(block.window + address);
  if (!fresh && barrier.mark != Mbarrier::kMark) fail("mbarrier at 0x%x was not initialised, or was overwritten", address);
  return barrier;
}

void complete_if_done(Block& block, Mbarrier& barrier, uint32_t address) {
  if (barrier.pending != 0 || barrier.bytes() != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  complete(block.mbarriers[address]);
  wake(block, Wait::kMbarrier, address);
}

void arrive(Block& block, uint32_t address) {
  Mbarrier& barrier = mbarrier_at(block, address);
  if (barrier.pending == 0) fail("mbarrier at 0x%x: more arrivals than the %d of its phase", address, static_cast<int>(barrier.count));
  barrier.pending -= 1;
  tell(block.mbarriers[address].told);
  complete_if_done(block, barrier, address);
  let_others_run();
}

}  // namespace

void mbarrier_init(uint32_t address, uint32_t count) {
  shared_bytes(address, 8, 8, Access::kAsyncRead);  // checks the address
  Mbarrier& barrier = mbarrier_at(*self().block, address, true);
  barrier.mark = Mbarrier::kMark, barrier.phase = 0, barrier.count = barrier.pending = count;
  barrier.set_bytes(0);
  self().block->mbarriers[address].initialised = now();
}

void mbarrier_expect(uint32_t address, uint32_t bytes) {
  Mbarrier& barrier = mbarrier_at(*self().block, address);
  if (barrier.bytes() + static_cast<int>(bytes) >= Mbarrier::kBias) fail("mbarrier at 0x%x expects more than 2^19 bytes", address);
  barrier.set_bytes(barrier.bytes() + bytes);
}

void mbarrier_arrive(uint32_t address, uint32_t expected_bytes) {
  if (expected_bytes > 0) mbarrier_expect(address, expected_bytes);
  arrive(*self().block, address);
}

// ---- Clusters ----

namespace {
constexpr int kRankShift = 24;  // of a mapped address: 1 + the rank
}

uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  const Block& block = *self().block;
  if (block.peer == nullptr) fail("mapa in a kernel that was launched without clusters");
  if (rank != static_cast<uint32_t>(1 - block.rank())) fail("mapa to rank %u, which is not the peer's", rank);
  return (rank + 1) << kRankShift | address;
}

uint32_t unmapped(uint32_t mapped_address) { return mapped_address & ((1u << kRankShift) - 1); }

Block& peer_of(uint32_t mapped_address) {
  if (mapped_address >> kRankShift == 0) fail("0x%x is no address of the cluster: mapa makes one", mapped_address);
  Block& peer = *self().block->peer;
  if (peer.live == 0) fail("shared memory of the peer, which has ended");
  return peer;
}

Block& peer_of_mbarrier(uint32_t mapped_address) {
  Block& peer = peer_of(mapped_address);
  const uint32_t address = unmapped(mapped_address);
  mbarrier_at(peer, address);
  const Moment initialised = peer.mbarriers[address].initialised;
  if (!is_known(initialised))
    fail("a race: mbarrier at 0x%x of the peer, which %s initialised, with no barrier between", address, name_of(initialised.slot).c_str());
  return peer;
}

void peer_mbarrier_arrive(uint32_t mapped_address) {
  Block& peer = peer_of_mbarrier(mapped_address);
  note_visit(peer, now());
  arrive(peer, unmapped(mapped_address));
}

void cluster_arrive() {
  Fiber& fiber = self();
  if (fiber.block->peer == nullptr) fail("the barrier of the cluster in a kernel that was launched without clusters");
  if (fiber.cluster_generation != 0) fail("the thread arrives twice at the barrier of the cluster");
  NamedBarrier& barrier = first_of_cluster(*fiber.block).cluster;
  fiber.cluster_generation = 1 + barrier.generation;
  tell(barrier.told);
  ++barrier.arrived;
  complete_cluster_barrier(*fiber.block);
  let_others_run();
}

void cluster_wait() {
  Fiber& fiber = self();
  if (fiber.cluster_generation == 0) fail("the thread waits at the barrier of the cluster before it arrives");
  const NamedBarrier& barrier = first_of_cluster(*fiber.block).cluster;
  while (barrier.generation < fiber.cluster_generation) wait(Wait::kCluster, 0);
  fiber.cluster_generation = 0;
  learn(barrier.complete);
}

bool mbarrier_completed(uint32_t address, uint32_t parity) {
  if (mbarrier_at(*self().block, address).phase == (parity & 1)) return false;
  learn(self().block->mbarriers[address].complete);
  return true;
}

void mbarrier_wait(uint32_t address, uint32_t parity) {
  while (!mbarrier_completed(address, parity)) wait(Wait::kMbarrier, address, parity);
}

void mbarrier_complete_bytes(Block& block, const Copy& copy) {
  Mbarrier& barrier = mbarrier_at(block, copy.mbarrier);
  barrier.set_bytes(barrier.bytes() - static_cast<int>(copy.bytes));
  Clock& told = block.mbarriers[copy.mbarrier].told;
  told[copy.moment.slot] = std::max(told[copy.moment.slot], copy.moment.time);
  if (copy.told != nullptr) join(told, *copy.told);
  complete_if_done(block, barrier, copy.mbarrier);
}

void wait_for_change(const int32_t* address) {
  Fiber& fiber = self();
  const uint64_t where = reinterpret_cast<uint64_t>(address);
  if (fiber.seen.kind == Wait::kMemory && fiber.seen.where == where && static_cast<int32_t>(fiber.seen.what) == *address)
    wait(Wait::kMemory, where, static_cast<uint32_t>(*address));
  fiber.seen = {Wait::kMemory, where, static_cast<uint32_t>(*address)};
}

// ---- Numbers ----

float from_half(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 0) return copysignf(ldexpf(static_cast<float>(fraction), -24), sign ? -1.f : 1.f);
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;
  if (bits >= 0x477ff000) return sign | 0x7c00;                                                       // rounds to 2^16 or more
  if (bits < 0x38800000) return sign | static_cast<uint16_t>(nearbyintf(fabsf(value) * 16777216.f));  // subnormal: units of 2^-24
  const uint32_t rounded = bits + 0xfff + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>((rounded >> 13) - (112 << 10));
}

}  // namespace emulator
