// What happened before what, to notice shared memory that two warps use with no barrier between them: vector clocks of warps (Fidge, Mattern),
// told at arrivals and learnt at waits. A granule remembers its last write and who has read it since. Lanes of a warp count as one: what
// they do to each other is not looked at. A product is one of all four warps: when one has waited for it, it has read for all of them, and all
// have issued it. CUTLASS counts on that, too, where one thread of a warpgroup gives its operands back. A copy to the peer reads and writes on
// its own behalf: whoever has waited at its mbarrier knows that it is over, and what the one knew who asked for it.
#include <algorithm>

#include "state.h"

namespace emulator {

namespace {

Warp& own_warp() { return self().block->warps[self().warp]; }

size_t index_of(const Block& block, const Granule& granule) { return &granule - block.granules.data(); }

void check_write(const Granule& granule, uint32_t address, const char* verb) {
  if (granule.written > own_warp().clock[granule.written_by])
    fail("a race: warp %d %s shared address 0x%x, which %s wrote, with no barrier between", warp_slot(), verb, address,
         name_of(granule.written_by).c_str());
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

Moment now() { return {warp_slot(), own_warp().clock[warp_slot()]}; }

Moment next_copy_to_peer(uint32_t mbarrier) {
  Block& block = *self().block;
  return {kFirstCopySlot + block.rank() * kCopySlots + static_cast<int>(mbarrier / 8 % kCopySlots), ++block.copies_to_peer};
}

bool is_known(Moment moment) { return moment.time <= own_warp().clock[moment.slot]; }

std::string name_of(int slot) {
  if (slot >= kFirstCopySlot) return slot < kFirstCopySlot + kCopySlots ? "a copy of the first block" : "a copy of the second block";
  return slot < kMaxWarps ? "warp " + std::to_string(slot) : "a product of warpgroup " + std::to_string(slot - kMaxWarps);
}

void note_visit(Block& block, Moment moment) { block.visits[moment.slot] = moment.time; }

void check_visits(const Block& block) {
  Clock known = {};
  for (const Warp& warp : block.warps) join(known, warp.clock);
  for (size_t i = 0; i < known.size(); ++i) {
    if (block.visits[i] > known[i])
      fail("the block ends, and no barrier has told it that %s is done with its shared memory", name_of(i).c_str());
  }
}

void note_read(Block& block, const Granule& granule, uint32_t address, Moment moment) {
  check_write(granule, address, "reads");
  block.reads[index_of(block, granule)][moment.slot] = moment.time;
}

void note_product(Block& block, const Granule& granule, uint32_t address, uint64_t number) {
  check_write(granule, address, "reads");
  block.reads[index_of(block, granule)][group_slot()] = number + 1;
}

void learn_products(uint64_t count) {
  uint32_t& known = own_warp().clock[group_slot()];
  known = std::max(known, static_cast<uint32_t>(count));
}

void note_write(Block& block, Granule& granule, uint32_t address, Moment moment) {
  check_write(granule, address, "writes");
  Clock& reads = block.reads[index_of(block, granule)];
  const Clock& known = own_warp().clock;
  for (int i = 0; i < static_cast<int>(known.size()); ++i) {
    if (reads[i] > known[i])
      fail("a race: warp %d writes shared address 0x%x, which %s reads, with no barrier between", warp_slot(), address, name_of(i).c_str());
  }
  reads = {};
  granule.written = moment.time;
  granule.written_by = moment.slot;
}

}  // namespace emulator
