// Shared memory and the copies into and out of it.
#include <string.h>

#include <algorithm>

#include "state.h"
#include "tensor_map.h"

namespace emulator {

uint64_t bank_conflicts, tensor_bytes;

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every floating-point format

bool inside(const Block& block, uint32_t address, uint32_t bytes) {
  return (address >= kDynamicBase && address + bytes <= kDynamicBase + block.dynamic_bytes) ||
         (address >= kStaticBase && address + bytes <= kStaticBase + block.static_bytes);
}

unsigned char* checked(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment) {
  if (address % alignment != 0) fail("shared address 0x%x must be aligned to %u bytes", address, alignment);
  if (!inside(block, address, bytes))
    fail("shared address 0x%x (%u bytes) is outside the %u bytes of the block, which start at 0x%x", address, bytes, block.dynamic_bytes,
         kDynamicBase);
  return block.window + address;
}

template <typename F>
void for_granules(Block& block, uint32_t address, uint32_t bytes, const F& f) {
  for (uint32_t i = address / kGranule; i < (address + bytes + kGranule - 1) / kGranule; ++i) f(block.granules[i]);
}

void check_readers(const Granule& granule, uint32_t address) {
  if (granule.readers > 0) fail("shared address 0x%x is written while a wgmma or copy that reads it has not been waited for", address);
}

// The destination of a load: NaN until it arrives, and nobody else's business.
void start_filling(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment, Moment moment = now()) {
  memset(checked(block, address, bytes, alignment), kPoison, bytes);
  for_granules(block, address, bytes, [&](Granule& granule) {
    if (granule.filling) fail("a copy to shared address 0x%x while another one that fills it is in flight", address);
    check_readers(granule, address);
    note_write(block, granule, address, moment);
    granule = {true, 0, 0, 0, granule.written_by, granule.written};
  });
}

// The source of a store: nobody may write it until it has been read.
void start_reading(Block& block, uint32_t address, uint32_t bytes, uint32_t alignment, Moment moment = now()) {
  shared_bytes(address, bytes, alignment, Access::kAsyncRead);
  for_granules(block, address, bytes, [&](Granule& granule) {
    note_read(block, granule, address, moment);
    ++granule.readers;
  });
}

void end_reading(Block& block, uint32_t address, uint32_t bytes) {
  for_granules(block, address, bytes, [&](Granule& granule) {
    --granule.readers;
    note_read(block, granule, address);
  });
}

void end_filling(Block& block, uint32_t address, uint32_t bytes) {
  for_granules(block, address, bytes, [](Granule& granule) { granule.filling = false; });
}

const TensorMap& map_of(const void* pointer, int rank) {
  const TensorMap& map = *static_cast<const TensorMap*>(pointer);
  if (map.mark != TensorMap::kMark) fail("no tensor map at the address given to a tensor copy");
  if (map.rank != rank) fail("a %d-dimensional copy with a tensor map of %d dimensions", rank, map.rank);
  return map;
}

template <typename T>
void add(unsigned char* destination, const unsigned char* source) {
  T a, b;
  memcpy(&a, destination, sizeof a), memcpy(&b, source, sizeof b);
  a += b;
  memcpy(destination, &a, sizeof a);
}

void add_element(Element element, unsigned char* destination, const unsigned char* source) {
  if (element == Element::kFloat32) return add<float>(destination, source);
  uint16_t a, b;
  memcpy(&a, destination, 2), memcpy(&b, source, 2);
  a = element == Element::kFloat16 ? to_half(from_half(a) + from_half(b)) : to_bfloat16(from_bfloat16(a) + from_bfloat16(b));
  memcpy(destination, &a, 2);
}

// Calls f(shared address, host address or null when outside the tensor) for every element of a box.
template <typename F>
void for_box(const TensorMap& map, const Copy& copy, const F& f) {
  uint32_t position[5] = {}, shared = copy.shared;
  const uint32_t row_bytes = map.swizzle == 0 ? 16 : 16u << map.swizzle;
  do {
    bool row_inside = true;
    unsigned char* row = map.base;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t coordinate = static_cast<int64_t>(copy.coordinates[i]) + position[i];
      row_inside = row_inside && coordinate >= 0 && coordinate < static_cast<int64_t>(map.sizes[i]);
      row += coordinate * map.strides[i];
    }
    for (uint32_t column = 0; column < map.box[0]; ++column, shared += map.element_bytes) {
      const int64_t coordinate = static_cast<int64_t>(copy.coordinates[0]) + column;
      const bool is_inside = row_inside && coordinate >= 0 && coordinate < static_cast<int64_t>(map.sizes[0]);
      f(map.swizzle == 0 ? shared : swizzled(shared, row_bytes), is_inside ? row + coordinate * map.element_bytes : nullptr);
    }
    int i = 1;
    for (; i < map.rank && ++position[i] == map.box[i]; ++i) position[i] = 0;
    if (i == map.rank) return;
  } while (true);
}

// Two dimensions with one stride: the tensor begins before its data (csrc/sm90/tensor_map.h), where an H200 fails if a box is all outside.
bool begins_before_its_data(const TensorMap& map) {
  for (int i = 1; i < map.rank; ++i) {
    for (int j = 1; j < i; ++j) {
      if (map.strides[i] == map.strides[j] && map.sizes[i] > 1 && map.sizes[j] > 1) return true;
    }
  }
  return false;
}

Copy tensor_copy(Copy::Kind kind, uint32_t shared, const void* pointer, uint32_t mbarrier, const int* coordinates, int rank) {
  const TensorMap& map = map_of(pointer, rank);
  Copy copy{kind, shared, pointer, map.box_bytes(), 0, mbarrier, {}, {}};
  for (int i = 0; i < rank; ++i) copy.coordinates[i] = coordinates[i];
  if (begins_before_its_data(map)) {
    bool is_inside = false;
    for_box(map, copy, [&](uint32_t, const void* element) { is_inside = is_inside || element != nullptr; });
    if (!is_inside) fail("a tensor copy of a box all outside a tensor that begins before its data");
  }
  return copy;
}

}  // namespace

void* dynamic_shared_base(size_t alignment) {
  if (alignment > kDynamicBase) fail("dynamic shared memory aligned to %zu bytes: at most %u", alignment, kDynamicBase);
  return self().block->window + kDynamicBase;
}

void* static_shared_base(const char* variable, size_t bytes, size_t alignment) {
  Block& block = *self().block;
  const auto [entry, is_new] = block.static_variables.try_emplace(variable, 0);
  if (is_new) {
    entry->second = kStaticBase + (block.static_bytes + alignment - 1) / alignment * alignment;
    block.static_bytes = entry->second - kStaticBase + bytes;
    if (block.static_bytes > kStaticBytes) fail("more than %u bytes of __shared__ variables", kStaticBytes);
  }
  return block.window + entry->second;
}

uint32_t shared_address(const void* pointer) {
  const unsigned char* window = self().block->window;
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte < window || byte >= window + kWindowBytes) fail("a pointer that is not to shared memory as a shared address");
  return byte - window;
}

void reset_shared_memory(Block& block) {
  block.static_bytes = 0;
  block.static_variables.clear();
  memset(block.window + kDynamicBase, kPoison, block.dynamic_bytes);
  memset(block.window + kStaticBase, kPoison, kStaticBytes);
  std::fill(block.granules.begin(), block.granules.end(), Granule{});
  std::fill(block.reads.begin(), block.reads.end(), Clock{});
  block.mbarriers.clear();
}

unsigned char* shared_bytes(uint32_t address, uint32_t bytes, uint32_t alignment, Access access, int lane) {
  Block& block = *self().block;
  const Fiber& fiber = block.fibers[self().warp * kLanes + lane];
  unsigned char* memory = checked(block, address, bytes, alignment);
  block.busy = true;
  for_granules(block, address, bytes, [&](Granule& granule) {
    if (granule.filling)
      fail("shared address 0x%x is %s while a copy into it is in flight: a wait is missing", address,
           access == Access::kWrite ? "written" : "read");
    if (access == Access::kWrite) {
      check_readers(granule, address);
      note_write(block, granule, address);
      granule.writer = fiber.index.x + 1;
      granule.writer_epoch = fiber.proxy_epoch;
    } else if (access == Access::kAsyncRead && granule.writer != 0 &&
               granule.writer_epoch == block.fibers[granule.writer - 1].proxy_epoch) {
      fail("wgmma or the copy engine reads shared address 0x%x, which thread %d wrote without a fence.proxy.async after it", address,
           granule.writer - 1);
    }
    if (access == Access::kRead) note_read(block, granule, address);
  });
  return memory;
}

void proxy_fence() { ++self().proxy_epoch; }

void global_proxy_fence() { self().acquired = self().copied = false; }

void note_acquire() { self().acquired = true; }

void check_release() {
  if (self().copied) fail("a release after flat copies to global memory without a fence.proxy.async in between");
}

void perform(Block& block, const Copy& copy) {
  unsigned char* shared = block.window + copy.shared;
  switch (copy.kind) {
    case Copy::kCpAsync:
      memcpy(shared, copy.host, copy.valid_bytes);
      memset(shared + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
      end_filling(block, copy.shared, copy.bytes);
      break;
    case Copy::kTensorLoad: {
      const TensorMap& map = *static_cast<const TensorMap*>(copy.host);
      for_box(map, copy, [&](uint32_t address, const unsigned char* element) {
        if (element != nullptr)
          memcpy(block.window + address, element, map.element_bytes);
        else
          memset(block.window + address, 0, map.element_bytes);
      });
      end_filling(block, copy.shared, copy.bytes);
      mbarrier_complete_bytes(block, copy);
      break;
    }
    case Copy::kTensorStore:
    case Copy::kTensorAdd: {
      const TensorMap& map = *static_cast<const TensorMap*>(copy.host);
      for_box(map, copy, [&](uint32_t address, unsigned char* element) {
        if (element == nullptr) return;
        const unsigned char* source = copy.read.empty() ? block.window + address : copy.read.data() + (address - copy.shared);
        if (copy.kind == Copy::kTensorAdd)
          add_element(map.element, element, source);
        else
          memcpy(element, source, map.element_bytes);
      });
      if (copy.read.empty()) end_reading(block, copy.shared, copy.bytes);
      break;
    }
    case Copy::kBulkLoad:
    case Copy::kStoreOfPeer:
      memcpy(shared, copy.kind == Copy::kBulkLoad ? copy.host : copy.read.data(), copy.bytes);
      end_filling(block, copy.shared, copy.bytes);
      mbarrier_complete_bytes(block, copy);
      break;
    case Copy::kFromPeer:
      memcpy(shared, copy.source->window + copy.source_address, copy.bytes);
      for_granules(*copy.source, copy.source_address, copy.bytes, [](Granule& granule) { --granule.readers; });
      end_filling(block, copy.shared, copy.bytes);
      mbarrier_complete_bytes(block, copy);
      break;
    case Copy::kBulkStore:
    case Copy::kBulkAddFloats: {
      auto* destination = static_cast<unsigned char*>(const_cast<void*>(copy.host));
      const unsigned char* source = copy.read.empty() ? shared : copy.read.data();
      if (copy.kind == Copy::kBulkStore)
        memcpy(destination, source, copy.bytes);
      else
        for (uint32_t i = 0; i < copy.bytes; i += 4) add<float>(destination + i, source + i);
      if (copy.read.empty()) end_reading(block, copy.shared, copy.bytes);
      break;
    }
  }
}

namespace {

void close_group(std::vector<Copy>& open, std::deque<std::vector<Copy>>& groups) {
  groups.push_back(std::move(open));
  open.clear();
}

// The newest first: without a wait in between nothing puts copies in order.
void finish_groups(Block& block, std::deque<std::vector<Copy>>& groups, size_t pending) {
  const size_t done = groups.size() > pending ? groups.size() - pending : 0;
  for (size_t i = done; i > 0; --i) {
    for (const Copy& copy : groups[i - 1]) perform(block, copy);
  }
  groups.erase(groups.begin(), groups.begin() + done);
}

}  // namespace

namespace {

void check_flat_copy() {
  check_kernel_before("cp.async.bulk");
  if (self().acquired) fail("a flat copy after an acquire without a fence.proxy.async in between");
}

}  // namespace

void cp_async(uint32_t destination, const void* source, uint32_t bytes, uint32_t source_bytes) {
  if (reinterpret_cast<uintptr_t>(source) % bytes != 0) fail("cp.async from a global address that is not aligned to %u bytes", bytes);
  Fiber& fiber = self();
  start_filling(*fiber.block, destination, bytes, bytes);
  fiber.copies.push_back({Copy::kCpAsync, destination, source, bytes, source_bytes, 0, {}, {}});
}

void cp_async_commit() { close_group(self().copies, self().copy_groups); }

void cp_async_wait(int pending) { finish_groups(*self().block, self().copy_groups, pending); }

void tensor_load(uint32_t destination, const void* map, uint32_t mbarrier, const int* coordinates, int rank) {
  Block& block = *self().block;
  Copy copy = tensor_copy(Copy::kTensorLoad, destination, map, mbarrier, coordinates, rank);
  start_filling(block, destination, copy.bytes, 128);
  copy.moment = now();
  tensor_bytes += copy.bytes;
  block.loads.push_back(copy);
}

void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t mbarrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
    fail("cp.async.bulk: address and size must be multiples of 16 bytes");
  check_flat_copy();
  Block& block = *self().block;
  start_filling(block, destination, bytes, 16);
  block.loads.push_back({Copy::kBulkLoad, destination, source, bytes, 0, mbarrier, {}, {}, now()});
}

void copy_to_peer(uint32_t mapped_destination, uint32_t source, uint32_t bytes, uint32_t mapped_mbarrier) {
  if (bytes % 16 != 0) fail("cp.async.bulk: the size must be a multiple of 16 bytes");
  Block& block = *self().block;
  peer_of(mapped_destination);
  Block& peer = peer_of_mbarrier(mapped_mbarrier);
  const uint32_t destination = unmapped(mapped_destination), mbarrier = unmapped(mapped_mbarrier);
  const Moment moment = next_copy_to_peer(mbarrier);
  start_reading(block, source, bytes, 16, moment);
  start_filling(peer, destination, bytes, 16, moment);
  note_visit(block, moment), note_visit(peer, moment);
  const auto told = std::make_shared<Clock>();
  tell(*told);
  (*told)[moment.slot] = moment.time;
  peer.loads.push_back({Copy::kFromPeer, destination, nullptr, bytes, 0, mbarrier, {}, {}, moment, &block, source, told});
}

void store_to_peer(uint32_t mapped_destination, const void* bytes, uint32_t count, uint32_t mapped_mbarrier) {
  peer_of(mapped_destination);
  Block& peer = peer_of_mbarrier(mapped_mbarrier);
  const uint32_t destination = unmapped(mapped_destination), mbarrier = unmapped(mapped_mbarrier);
  const Moment moment = next_copy_to_peer(mbarrier);
  start_filling(peer, destination, count, count, moment);
  note_visit(peer, moment);
  const auto* first = static_cast<const unsigned char*>(bytes);
  peer.loads.push_back({Copy::kStoreOfPeer, destination, nullptr, count, 0, mbarrier, {}, {first, first + count}, moment});
}

void tensor_store(const void* map, uint32_t source, const int* coordinates, int rank, bool add) {
  const Copy copy = tensor_copy(add ? Copy::kTensorAdd : Copy::kTensorStore, source, map, 0, coordinates, rank);
  start_reading(*self().block, source, copy.bytes, 128);
  self().bulk_copies.push_back(copy);
}

void bulk_store(void* destination, uint32_t source, uint32_t bytes, bool add_floats) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(destination) % 16 != 0)
    fail("cp.async.bulk: address and size must be multiples of 16 bytes");
  check_flat_copy();
  start_reading(*self().block, source, bytes, 16);
  self().bulk_copies.push_back({add_floats ? Copy::kBulkAddFloats : Copy::kBulkStore, source, destination, bytes, 0, 0, {}, {}});
}

void bulk_commit() { close_group(self().bulk_copies, self().bulk_groups); }

void bulk_wait(int pending) {
  Fiber& fiber = self();
  if (fiber.bulk_groups.size() > static_cast<size_t>(pending)) fiber.copied = true;
  finish_groups(*fiber.block, fiber.bulk_groups, pending);
}

void bulk_wait_read(int pending) {
  Fiber& fiber = self();
  for (size_t i = 0; i + pending < fiber.bulk_groups.size(); ++i) {
    for (Copy& copy : fiber.bulk_groups[i]) {
      if (!copy.read.empty()) continue;
      const unsigned char* source = fiber.block->window + copy.shared;
      copy.read.assign(source, source + copy.bytes);
      end_reading(*fiber.block, copy.shared, copy.bytes);
    }
  }
}

void finish_copies(Fiber& fiber) {
  if (!fiber.bulk_copies.empty()) fail("the thread ends with bulk copies in no group");
  for (const std::vector<Copy>& group : fiber.bulk_groups) {
    for (const Copy& copy : group) {
      if (copy.read.empty()) fail("the thread ends before a bulk copy has read its shared memory");
    }
  }
  finish_groups(*fiber.block, fiber.copy_groups, 0);
  finish_groups(*fiber.block, fiber.bulk_groups, 0);
}

}  // namespace emulator
