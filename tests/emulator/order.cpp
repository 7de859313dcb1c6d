// What happened before what, to notice shared memory that two warps use with no barrier between them: vector clocks of warps (Fidge, Mattern),
// told at arrivals and learnt at waits. A granule remembers its last write and who has read it since. Lanes of a warp count as one: what
// they do to each other is not looked at. A product is one of all four warps: when one has waited for it, it has read for all of them, and all
// have issued it. CUTLASS counts on that, too, where one thread of a warpgroup gives its operands back.
#include <algorithm>

#include "state.h"

namespace emulator {

namespace {

Warp& own_warp() { return self().block->warps[self().warp]; }

size_t index_of(const Block& block, const Granule& granule) { return &granule - block.granules.data(); }

void check_write(const Granule& granule, uint32_t address, const char* verb) {
  if (granule.written > own_warp().clock[granule.written_by])
    fail("a race: warp %d %s shared address 0x%x, which warp %d wrote, with no barrier between", warp_slot(), verb, address,
         granule.written_by);
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void tell(Clock& clock) {
  Warp& warp = own_warp();
  join(clock, warp.clock);
  ++warp.clock[warp_slot()];
}

void complete(Teller& teller) {
  join(teller.complete, teller.told);
  teller.told = {};
}

void learn(const Clock& clock) { join(own_warp().clock, clock); }

uint32_t now() { return own_warp().clock[warp_slot()]; }

void note_read(Block& block, const Granule& granule, uint32_t address) {
  check_write(granule, address, "reads");
  block.reads[index_of(block, granule)][warp_slot()] = now();
}

void note_product(Block& block, const Granule& granule, uint32_t address, uint64_t number) {
  check_write(granule, address, "reads");
  block.reads[index_of(block, granule)][group_slot()] = number + 1;
}

void learn_products(uint64_t count) {
  uint32_t& known = own_warp().clock[group_slot()];
  known = std::max(known, static_cast<uint32_t>(count));
}

void note_write(Block& block, Granule& granule, uint32_t address) {
  check_write(granule, address, "writes");
  Clock& reads = block.reads[index_of(block, granule)];
  const Clock& known = own_warp().clock;
  for (int i = 0; i < static_cast<int>(known.size()); ++i) {
    if (reads[i] > known[i])
      fail("a race: warp %d writes shared address 0x%x, which %s %d reads, with no barrier between", warp_slot(), address,
           i < kMaxWarps ? "warp" : "a product of warpgroup", i < kMaxWarps ? i : i - kMaxWarps);
  }
  reads = {};
  granule.written = now();
  granule.written_by = warp_slot();
}

}  // namespace emulator
