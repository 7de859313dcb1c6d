// wgmma: products of a warpgroup that run while its threads go on. A product is computed when a thread waits for it and nobody else can go
// on, and reaches the registers of each thread at its wait. Until it is computed, nobody may write the shared memory that it reads.
// PTX ISA: "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
#include <math.h>
#include <string.h>

#include <algorithm>

#include "state.h"
#include "tensor_map.h"

namespace emulator {

namespace {

constexpr int kGroupThreads = 128, kM = 64, kK = 16;

// Where accumulator register i of a thread lies in D.
int row_of(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
int column_of(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

// A matrix descriptor of shared memory, taken apart.
struct Operand {
  uint32_t start, leading, stride, row_bytes;
  bool mn_major;

  Operand(uint64_t descriptor, bool mn_major)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        row_bytes(0),
        mn_major(mn_major) {
    const int mode = descriptor >> 62;
    if (mode == 0) fail("wgmma with an operand that is not swizzled: not emulated");
    row_bytes = 256u >> mode;  // 1 = 128 bytes, 2 = 64, 3 = 32
    if ((descriptor >> 49 & 7) != 0) fail("wgmma descriptor with a base offset: not emulated");
    constexpr uint64_t kFields = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
    if ((descriptor & ~kFields) != 0) fail("wgmma descriptor with bits set outside its fields");
  }

  // Shared address of 8 elements: K-major, row i, k = 8 piece ...; MN-major, i = 8 piece ..., contraction index k.
  uint32_t chunk(int outer, int piece) const {
    uint32_t address;
    if (mn_major) {  // outer = k, piece counts 8 columns
      const uint32_t pieces_per_panel = row_bytes / 16;
      address = start + piece / pieces_per_panel * leading + outer / 8 * stride + outer % 8 * row_bytes + piece % pieces_per_panel * 16;
    } else {  // outer = row, piece counts 8 k
      address = start + outer / 8 * stride + outer % 8 * row_bytes + piece * 16;
    }
    return swizzled(address, row_bytes);
  }

  template <typename F>
  void for_chunks(int extent, const F& f) const {
    const int outer_count = mn_major ? kK : extent, pieces = mn_major ? extent / 8 : kK / 8;
    for (int outer = 0; outer < outer_count; ++outer)
      for (int piece = 0; piece < pieces; ++piece) f(outer, piece, chunk(outer, piece));
  }

  // Checks the memory and keeps others from writing it until read().
  void claim(Block& block, int extent) const {
    for_chunks(extent, [&](int, int, uint32_t address) {
      shared_bytes(address, 16, 16, Access::kAsyncRead);
      ++block.granules[address / kGranule].readers;
    });
  }

  // By each warp that issues the product.
  void note(Block& block, int extent, uint64_t number) const {
    for_chunks(extent, [&](int, int, uint32_t address) { note_product(block, block.granules[address / kGranule], address, number); });
  }

  // matrix[k][i] for i < extent.
  void read(Block& block, int extent, bool bf16, float* matrix) const {
    for_chunks(extent, [&](int outer, int piece, uint32_t address) {
      --block.granules[address / kGranule].readers;
      uint16_t elements[8];
      memcpy(elements, block.window + address, 16);
      for (int e = 0; e < 8; ++e) {
        const float value = bf16 ? from_bfloat16(elements[e]) : from_half(elements[e]);
        if (mn_major)
          matrix[outer * extent + piece * 8 + e] = value;
        else
          matrix[(piece * 8 + e) * extent + outer] = value;
      }
    });
  }
};

void compute(Block& block, const IssuedProduct& issued) {
  const Product& product = issued.product;
  const int n = product.n;
  static float a[kK * kM], b[kK * 256];  // [k][m], [k][n]
  if (product.a_registers != nullptr) {
    for (int thread = 0; thread < kGroupThreads; ++thread) {
      for (int i = 0; i < 8; ++i) {
        const uint16_t bits = issued.a_registers[thread * 4 + i / 2] >> (i % 2 * 16);
        const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, k = thread % 4 * 2 + i / 4 * 8 + i % 2;
        a[k * kM + row] = product.bf16 ? from_bfloat16(bits) : from_half(bits);
      }
    }
  } else {
    Operand(product.a, product.transpose_a).read(block, kM, product.bf16, a);
  }
  Operand(product.b, product.transpose_b).read(block, n, product.bf16, b);
  float* d = issued.chain->d.data();
  const float scale = static_cast<float>(product.scale_a * product.scale_b);
  if (!product.accumulate) std::fill(issued.chain->d.begin(), issued.chain->d.end(), 0.f);
  for (int row = 0; row < kM; ++row) {
    float* __restrict d_row = d + row * n;
    for (int k = 0; k < kK; ++k) {
      const float factor = a[k * kM + row] * scale;
      const float* __restrict b_row = b + k * n;
      for (int column = 0; column < n; ++column) d_row[column] += factor * b_row[column];
    }
  }
}

bool same(const Product& x, const Product& y) {
  return x.n == y.n && x.bf16 == y.bf16 && (x.a_registers == nullptr) == (y.a_registers == nullptr) && x.a == y.a && x.b == y.b &&
         x.accumulate == y.accumulate && x.scale_a == y.scale_a && x.scale_b == y.scale_b && x.transpose_a == y.transpose_a &&
         x.transpose_b == y.transpose_b;
}

}  // namespace

void wgmma(float* d, const Product& product) {
  Fiber& fiber = self();
  Warpgroup& group = fiber.block->groups[fiber.warp / kWarpsPerGroup];
  if (!fiber.fenced) fail("wgmma without a wgmma.fence since the thread last waited for one");
  const uint64_t number = fiber.products++;
  if (number == group.first + group.products.size()) {  // the first thread to issue it
    if (product.a_registers == nullptr) Operand(product.a, product.transpose_a).claim(*fiber.block, kM);
    Operand(product.b, product.transpose_b).claim(*fiber.block, product.n);
    group.products.push_back({product, nullptr, false, 0, {}, {}});
    if (product.a_registers != nullptr) group.products.back().a_registers.resize(kGroupThreads * 4);
  }
  IssuedProduct& issued = group.products[number - group.first];
  if (!same(issued.product, product)) fail("wgmma number %d differs between threads of a warpgroup", static_cast<int>(number));

  Warp& warp = fiber.block->warps[fiber.warp];
  if (number == warp.products) {  // the first lane to issue it
    if (product.a_registers == nullptr) Operand(product.a, product.transpose_a).note(*fiber.block, kM, number);
    Operand(product.b, product.transpose_b).note(*fiber.block, product.n, number);
    tell(issued.told);
    ++warp.products;
  }

  PendingAccumulators* pending = nullptr;
  for (PendingAccumulators& candidate : fiber.accumulators) {
    if (candidate.d == d)
      pending = &candidate;
    else if (candidate.d < d + product.n / 2 && d < candidate.d + candidate.chain->n / 2)
      fail("wgmma on part of the accumulators of a pending one");
  }
  if (issued.threads++ == 0) {
    issued.starts_chain = pending == nullptr;
    issued.chain = pending != nullptr ? pending->chain : std::make_shared<Chain>(Chain{product.n, std::vector<float>(kM * product.n)});
  }
  if (issued.starts_chain != (pending == nullptr) || (pending != nullptr && pending->chain != issued.chain) || issued.chain->n != product.n)
    fail("wgmma number %d uses different accumulators in threads of a warpgroup", static_cast<int>(number));

  const int thread = fiber.index.x % kGroupThreads;
  if (product.a_registers != nullptr) memcpy(&issued.a_registers[thread * 4], product.a_registers, 16);
  if (pending == nullptr) {
    for (int i = 0; i < product.n / 2; ++i) {
      issued.chain->d[row_of(thread, i) * product.n + column_of(thread, i)] = d[i];
      d[i] = NAN;  // nobody's business until the wait
    }
    fiber.accumulators.push_back({d, issued.chain, number});
  } else {
    pending->last = number;
  }
}

void wgmma_fence() { self().fenced = true; }

void wgmma_commit() { self().product_groups.push_back(self().products); }

void wgmma_wait(int pending) {
  Fiber& fiber = self();
  Warpgroup& group = fiber.block->groups[fiber.warp / kWarpsPerGroup];
  fiber.fenced = false;
  uint64_t done = 0;  // products below this number complete
  while (fiber.product_groups.size() > static_cast<size_t>(pending)) {
    done = fiber.product_groups.front();
    fiber.product_groups.pop_front();
  }
  while (group.first < done) wait(Wait::kProducts, fiber.warp / kWarpsPerGroup, done);
  learn_products(done);
  learn(group.complete);
  const int thread = fiber.index.x % kGroupThreads;
  for (size_t p = fiber.accumulators.size(); p-- > 0;) {
    PendingAccumulators& accumulators = fiber.accumulators[p];
    if (accumulators.last >= done) continue;
    const Chain& chain = *accumulators.chain;
    for (int i = 0; i < chain.n / 2; ++i) accumulators.d[i] = chain.d[row_of(thread, i) * chain.n + column_of(thread, i)];
    fiber.accumulators.erase(fiber.accumulators.begin() + p);
  }
}

bool finish_products(Block& block) {
  for (size_t g = 0; g < block.groups.size(); ++g) {
    uint64_t wanted = UINT64_MAX;  // products below this number, by the thread that waits for the fewest
    for (size_t i = g * kGroupThreads; i < std::min<size_t>((g + 1) * kGroupThreads, block_size.x); ++i)
      if (block.fibers[i].wait.kind == Wait::kProducts) wanted = std::min(wanted, block.fibers[i].wait.what);
    Warpgroup& group = block.groups[g];
    if (wanted == UINT64_MAX || group.products.empty() || group.products.front().threads < kGroupThreads) continue;
    for (; group.first < wanted && group.products.front().threads == kGroupThreads; ++group.first) {
      compute(block, group.products.front());
      join(group.complete, group.products.front().told);
      group.products.pop_front();
    }
    wake(block, Wait::kProducts, g);
    return true;
  }
  return false;
}

}  // namespace emulator
