// What the parts of the emulator (machine.cpp, memory.cpp, wgmma.cpp) share: the state of a thread, a warp and a thread block.
#pragma once
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "machine.h"

namespace emulator {

struct Block;

// How much of what each warp did is known: of warp i, what it did until its time [i], which goes on at each of its arrivals. Behind the warps,
// of each warpgroup: how many of its products are complete; and of the copies to the peer that complete at one mbarrier, or at some that share
// a slot: the number of the newest that has. The second block of a cluster has the second half of each.
constexpr int kMaxWarps = kMaxThreads / kLanes, kMaxGroups = kMaxWarps / kWarpsPerGroup, kCopySlots = 8;
constexpr int kFirstCopySlot = kMaxWarps + kMaxGroups;
using Clock = std::array<uint32_t, kFirstCopySlot + 2 * kCopySlots>;

// Of a warp, or a copy to the peer: where in a Clock, and what its number there is.
struct Moment {
  int slot = 0;
  uint32_t time = 0;
};

// A copy whose bytes have not moved yet.
struct Copy {
  enum Kind { kCpAsync, kTensorLoad, kTensorStore, kTensorAdd, kBulkLoad, kBulkStore, kBulkAddFloats, kFromPeer, kStoreOfPeer } kind;
  uint32_t shared;   // address
  const void* host;  // address, or the tensor map
  uint32_t bytes;
  uint32_t valid_bytes;  // cp.async: the rest is zero
  uint32_t mbarrier;     // of loads by the copy engine
  std::array<int, 5> coordinates;
  std::vector<unsigned char> read;   // of stores: the bytes, once they have been read
  Moment moment = {};                // who has asked for it and when; kFromPeer, kStoreOfPeer: its own
  Block* source = nullptr;           // kFromPeer: whose shared memory is read
  uint32_t source_address = 0;       // and where
  std::shared_ptr<Clock> told = {};  // kFromPeer: what the one knew who asked for it
};

// Accumulators of the 128 threads of a warpgroup between the first product that uses them and the wait that completes the last.
struct Chain {
  int n;
  std::vector<float> d;  // 64 x n
};

struct IssuedProduct {
  Product product;
  std::shared_ptr<Chain> chain;
  bool starts_chain;
  int threads;                        // that have issued it
  std::vector<uint32_t> a_registers;  // 128 x 4
  Clock told;                         // by its warps when they issued it
};

struct Warpgroup {
  std::deque<IssuedProduct> products;
  uint64_t first = 0;   // number of products.front(): older ones are computed
  Clock complete = {};  // what was told for these
};

struct PendingAccumulators {
  float* d;
  std::shared_ptr<Chain> chain;
  uint64_t last;  // number of the last product that adds to them
};

// Of barriers `where` is the id, of mbarriers the address (`what`: the parity), of products the warpgroup (how many have to be done), of memory
// the address (the value that was there).
struct Wait {
  enum Kind { kNothing, kWarp, kBarrier, kMbarrier, kProducts, kMemory, kOthers, kCluster, kFinished } kind = kNothing;
  uint64_t where = 0, what = 0;
};

struct Fiber : Thread {
  Context context;
  Block* block;
  Wait wait;
  Wait seen;  // what wait_for_change read last
  uint32_t proxy_epoch;
  std::vector<Copy> copies;  // cp.async of the group that is open
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<Copy> bulk_copies;  // stores by the copy engine, likewise
  std::deque<std::vector<Copy>> bulk_groups;
  bool acquired, copied;                // since the last fence between ordinary accesses to global memory and flat copies
  uint64_t products;                    // issued
  std::deque<uint64_t> product_groups;  // products issued when each pending group was closed
  bool fenced;                          // wgmma.fence since the last wait
  std::vector<PendingAccumulators> accumulators;
  uint64_t cluster_generation;  // 1 + the one that it arrived in at the barrier of the cluster; 0: in none
};

struct Warp {
  uint32_t runnable, arrived;
  const char* operation;  // what the arrived lanes wait to do together
  void* arguments[kLanes];
  Clock clock;
  uint64_t products;  // issued
};

// What those know who have arrived at a barrier, and what those who wait learn when all have, from this and earlier generations.
struct Teller {
  Clock told = {}, complete = {};
};

struct NamedBarrier : Teller {
  int arrived = 0, threads = 0;
  uint64_t generation = 0;
};

struct MbarrierTeller : Teller {
  Moment initialised;
};

// State of one granule of shared memory.
struct Granule {
  bool filling;           // a copy in flight will write it
  uint16_t readers;       // wgmma and stores in flight that will read it
  uint16_t writer;        // 1 + thread that wrote it by ordinary stores, 0: none
  uint32_t writer_epoch;  // and when: dirty until that thread's next fence.proxy.async
  uint16_t written_by;    // slot: the last write of any kind
  uint32_t written;       // and when; 0: none
};

struct Block {
  uint3 index;
  int live;                  // threads that have not finished
  bool after_kernel_before;  // which has ended: known from its launch or since a thread waited for it
  bool asked;                // a semaphore, before that was known
  bool told_to_wait;         // by one: the kernel before had not come so far
  bool busy;                 // some thread has met others or used shared memory
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> barriers;
  std::vector<Warpgroup> groups;
  unsigned char* window = nullptr;  // kWindowBytes of shared memory
  char* stacks = nullptr;           // of all threads
  std::vector<Granule> granules;
  std::vector<Clock> reads;                      // of a granule since its last write: when it was read, and by what product or copy
  std::map<uint32_t, MbarrierTeller> mbarriers;  // by address
  uint32_t dynamic_bytes, static_bytes;
  std::map<std::string, uint32_t> static_variables;
  std::vector<Copy> loads;  // in flight
  Block* peer;              // the other of a cluster, or null
  NamedBarrier cluster;     // in the first of a cluster: the barrier of both
  uint32_t copies_to_peer;  // asked for
  Clock visits;             // the last arrivals of the peer and copies from and to it: have to be known before the end
  int rank() const { return peer != nullptr ? index.x % 2 : 0; }
};

inline Fiber& self() { return *static_cast<Fiber*>(current); }

// Of the running warp and its warpgroup, in a Clock.
inline int warp_slot() { return self().block->rank() * (kMaxWarps / 2) + self().warp; }
inline int group_slot() { return kMaxWarps + warp_slot() / kWarpsPerGroup; }

void wait(Wait::Kind kind, uint64_t where, uint64_t what = 0);  // until woken
void wake(Block& block, Wait::Kind kind, uint64_t where);

void mbarrier_complete_bytes(Block& block, const Copy& copy);

// The block that an address of map_to_rank() is in, or an mbarrier, and the address there.
Block& peer_of(uint32_t mapped_address);
Block& peer_of_mbarrier(uint32_t mapped_address);
uint32_t unmapped(uint32_t mapped_address);

// Order of what warps do to shared memory (order.cpp).
void join(Clock& clock, const Clock& other);
void tell(Clock& clock);         // at an arrival: what this warp knows
void complete(Teller& teller);   // at the last
void learn(const Clock& clock);  // at the end of a wait
Moment now();
Moment next_copy_to_peer(uint32_t mbarrier);
bool is_known(Moment moment);
std::string name_of(int slot);
void note_visit(Block& block, Moment moment);
void check_visits(const Block& block);  // at its end
void note_read(Block& block, const Granule& granule, uint32_t address, Moment moment = now());
void note_product(Block& block, const Granule& granule, uint32_t address, uint64_t number);  // of this warpgroup
void learn_products(uint64_t count);                                                         // that so many are complete
void note_write(Block& block, Granule& granule, uint32_t address, Moment moment = now());

void perform(Block& block, const Copy& copy);  // the bytes move now
bool finish_products(Block& block);            // those that some warpgroup waits for, if any
void finish_copies(Fiber& fiber);              // at the end of a thread
void reset_shared_memory(Block& block);

}  // namespace emulator
