// What the fake cuTensorMapEncodeTiled writes into a CUtensorMap and the fake copy engine reads from it.
#pragma once
#include <stdint.h>

namespace emulator {

enum class Element : uint8_t { kFloat16, kBFloat16, kFloat32, kOther };

struct TensorMap {
  static constexpr uint32_t kMark = 0x7e4501ab;
  uint32_t mark;
  uint8_t rank, element_bytes;
  Element element;
  uint8_t swizzle;  // as in CUtensorMapSwizzle: 0 none, 1 = 32 bytes, 2 = 64, 3 = 128
  unsigned char* base;
  uint64_t sizes[5];    // elements, innermost first
  uint64_t strides[5];  // bytes
  uint32_t box[5];
  uint32_t inner_bytes() const { return box[0] * element_bytes; }
  uint32_t box_bytes() const {
    uint32_t bytes = element_bytes;
    for (int i = 0; i < rank; ++i) bytes *= box[i];
    return bytes;
  }
};
static_assert(sizeof(TensorMap) <= 128);

// The swizzle of copy engine and wgmma on a shared address: 16-byte chunks of a row of 32, 64 or 128 bytes are permuted by the row number.
inline uint32_t swizzled(uint32_t address, uint32_t row_bytes) { return address ^ ((address >> 7 & (row_bytes / 16 - 1)) << 4); }

}  // namespace emulator
