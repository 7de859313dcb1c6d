// The emulated GPU: thread blocks whose threads are fibers of one CPU thread, their shared memory, and everything they wait for.
//
// A fiber runs until it has to wait; then the next one runs, in an order that is the same every time (Schedule). Asynchronous work is done as
// late as the waits allow: a copy arrives when its waiter asks for it (cp.async, bulk groups) or when nobody can go on (TMA loads), and so a
// wgmma is computed. Shared memory starts as NaN, and so are the destination of a copy in flight and the accumulators of a pending
// product: a missing wait is seen in the result. Where the emulator can tell, it says so in words instead and the launch fails:
//   deadlock (with who waits where) - addresses outside the block's shared memory or misaligned - reads of shared memory that a copy has yet
//   to fill - writes of what a wgmma or store has yet to read - shared memory that two warps use, one of them writing, with no barrier between
//   (order.cpp) - wgmma and copies reading what was written without fence.proxy.async, and flat copies after an acquire or before a release
//   without one - wgmma without wgmma.fence - lanes of a warp in different operations - barriers whose users disagree or that are left half
//   full - more arrivals than a barrier expects - tensor copies all outside a tensor that begins before its data - acquiring loads of what
//   nothing has cleared - of a kernel that was launched early: flat copies, semaphores and reductions before one of the block's threads has
//   waited for the kernel before; the end of a block without that wait, unless its threads returned before they met or used shared memory, as
//   those do that have nothing to do; the end of all of them without it (tensor copies and plain loads may come earlier: of inputs; acquiring
//   loads, too, where the kernel before let this one begin when it had waited itself: then they give what is there, or zero, all of a kernel or
//   by lot, and of the blocks that ask in this way those have to wait that got a zero for it) - in clusters of two blocks, copies and arrivals
//   that reach a peer which has ended or, as far as barriers tell, may have; mbarriers of the peer that no barrier says are initialised.
// Warps of the second block of a cluster are counted from 16 on.
// Not emulated: the memory model beyond that (what an acquire or another fence lets one see), register limits, larger clusters, operations of
// part of a warp, wgmma operands without swizzle, time, kernels that overlap (plain loads and stores that come too early go unnoticed). What one
// block of a cluster tells the other through global memory is not known to the other's check for races.
// Memory is host memory, so device pointers are host pointers. Nothing here knows attention.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <string>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulator {

constexpr int kLanes = 32, kWarpsPerGroup = 4, kMaxThreads = 1024;
constexpr uint32_t kDynamicBase = 1024;       // shared address of dynamic shared memory: as on Hopper, where the system keeps 1 KB
constexpr uint32_t kStaticBase = 256 * 1024;  // of __shared__ variables
constexpr uint32_t kStaticBytes = 64 * 1024;
constexpr uint32_t kWindowBytes = kStaticBase + kStaticBytes;
constexpr uint32_t kGranule = 16;  // bytes of shared memory whose state is kept together

// ---- The GPUs one can pretend to have, by device index ----
struct Device {
  int compute_capability;  // 10 * major + minor
  int multiprocessors;     // few, so that small problems make persistent kernels walk; two have more, so that they split keys
  int shared_bytes;        // per block, opted in
};
inline constexpr Device kDevices[] = {{90, 3, 232448},  {80, 3, 166912},  {86, 3, 101376}, {90, 16, 232448},
                                      {90, 48, 232448}, {120, 3, 101376}, {75, 3, 65536}};
inline constexpr int kDeviceCount = 7;

// ---- Launching ----

// Order in which the warps that can run do. 0: ascending, and a thread goes on until it has to wait; 1: descending, the newest copy lands
// first, and who has told others to go on (an arrival) waits until they can no longer; more: random, that being the seed. `resident` thread blocks run at once, started in order. Results must not depend on it.
struct Schedule {
  uint32_t seed = 0;
  int resident = 1;
};
extern Schedule schedule;

// Runs every block of a grid. Empty when all went well, else what went wrong. `kernel` takes its arguments by reference.
// `early`: as if the kernel before might still run (programmatic stream serialisation). `cluster`: blocks of one, 1 or 2, which run together.
std::string run(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t dynamic_bytes, bool early = false, int cluster = 1);

// Waiting for the kernel before, and what must come after it.
void wait_for_kernel_before();
void check_kernel_before(const char* access);
void let_next_kernel_begin();
bool reads_of_the_past(const int32_t* semaphore);  // before that wait: as if the kernel before had not changed it yet

// ---- What a thread sees ----
struct Thread {
  uint3 index;
  uint3 block_index;
  int lane;
  int warp;
};
extern Thread* current;  // the running one
extern dim3 grid_size, block_size;

// Ends the launch with this message, prefixed with the running thread. Does not return.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// ---- Warps: operations of all 32 lanes ----

// Waits until all lanes of the warp are in the same operation with their arguments; one of them then calls perform(arguments of all lanes).
void collective(const char* operation, void* arguments, void (*perform)(void* const (&lanes)[kLanes]));

// ---- Barriers ----
void barrier_arrive(int id, int threads);
void barrier_sync(int id, int threads);  // id 0 with all threads is __syncthreads

void mbarrier_init(uint32_t address, uint32_t count);
void mbarrier_arrive(uint32_t address, uint32_t expected_bytes);
void mbarrier_expect(uint32_t address, uint32_t bytes);
bool mbarrier_completed(uint32_t address, uint32_t parity);
void mbarrier_wait(uint32_t address, uint32_t parity);

// ---- Clusters ----
uint32_t map_to_rank(uint32_t address, uint32_t rank);  // an address that only the next two take
void peer_mbarrier_arrive(uint32_t mapped_address);
void copy_to_peer(uint32_t mapped_destination, uint32_t source, uint32_t bytes, uint32_t mapped_mbarrier);
void store_to_peer(uint32_t mapped_destination, const void* bytes, uint32_t count, uint32_t mapped_mbarrier);
void cluster_arrive();
void cluster_wait();

// After telling others to go on without waiting for them: whether they do before this thread is up to the schedule.
void let_others_run();

// Waits until *address differs from `value` if this thread has seen `value` there before: how spinning ends up in the deadlock check.
void wait_for_change(const int32_t* address);
// After changing what others may wait for.
void announce_change();
// After a red.release, by which a thread says that something is in memory: of what a test watches, keeps a copy (runtime.cpp).
void note_release(const int32_t* word);

// ---- Shared memory ----
void* dynamic_shared_base(size_t alignment);
void* static_shared_base(const char* variable, size_t bytes, size_t alignment);
uint32_t shared_address(const void* pointer);

enum class Access { kRead, kWrite, kAsyncRead, kAsyncWrite };  // async: by wgmma or the copy engine
// Checks the access, by the running thread or another lane of its warp, and gives the host address of `bytes` at a shared address.
unsigned char* shared_bytes(uint32_t address, uint32_t bytes, uint32_t alignment, Access access, int lane = current->lane);
void proxy_fence();  // of the running thread

// The same for global memory and flat copies: fence.proxy.async must stand between what a thread acquires and its next copy, and between copies
// that it has waited for and a release.
void global_proxy_fence();
void note_acquire();
void check_release();

// Pairs of rows of 16 bytes that one ldmatrix or stmatrix found in the same banks, since the library was loaded. Costs time, not results.
extern uint64_t bank_conflicts;

// Bytes that tensor copies brought into shared memory, since the library was loaded.
extern uint64_t tensor_bytes;

// ---- Copies ----
void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t source_bytes);
void cp_async_commit();
void cp_async_wait(int pending);

void tensor_load(uint32_t destination, const void* map, uint32_t mbarrier, const int* coordinates, int rank);
void tensor_store(const void* map, uint32_t source, const int* coordinates, int rank, bool add);
void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier);
void bulk_store(void* destination, uint32_t source, uint32_t bytes, bool add_floats);
void bulk_commit();
void bulk_wait(int pending);       // until they are complete
void bulk_wait_read(int pending);  // until they have been read: what is written to global memory comes at the next bulk_wait

// ---- wgmma ----
struct Product {
  int n;  // D is 64 x n, K is 16
  bool bf16;
  const uint32_t* a_registers;  // 4 of this thread, or null: A is in shared memory
  uint64_t a, b;                // descriptors
  bool accumulate;
  int scale_a, scale_b;
  bool transpose_a, transpose_b;  // true: MN-major
};
void wgmma(float* d, const Product& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);

// ---- Numbers ----
float from_half(uint16_t bits);
uint16_t to_half(float value);
inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, 4);
  return value;
}
inline uint16_t to_bfloat16(float value) {  // round to nearest even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <typename T>
T* dynamic_shared(size_t alignment) {
  return static_cast<T*>(dynamic_shared_base(alignment));
}
template <typename T>
T& static_shared(const char* variable, size_t alignment) {
  return *static_cast<T*>(static_shared_base(variable, sizeof(T), alignment));
}

}  // namespace emulator
