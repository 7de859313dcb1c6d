// The fake CUDA runtime and driver, and the warp product of mma.sync.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "include/cuda.h"
#include "include/cudaTypedefs.h"
#include "include/cuda_runtime.h"
#include "tensor_map.h"

namespace {

int current_device = 0;
std::string launch_error;
struct Installed {
  int driver = 13000, toolkit = 13000;  // versions of CUDA
  bool ptx = true;                      // for GPUs newer than the machine code
} installed;
std::map<std::pair<const void*, int>, int> allowed_shared_bytes;  // by kernel and device
struct Watched {
  const int32_t* word;
  int32_t value;
  const char* memory;
  size_t bytes;
  std::string then;  // what memory held when a release made that of the word
};
std::vector<Watched> watched;

CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                           const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave,
                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  using emulator::Element;
  emulator::TensorMap result{};
  const uintptr_t address = reinterpret_cast<uintptr_t>(base);  // on one H200, none that lies below 0 is taken
  if (rank < 1 || rank > 5 || address % 16 != 0 || address == 0 || address >> 63 != 0) return CUDA_ERROR_INVALID_VALUE;
  result.mark = emulator::TensorMap::kMark;
  result.rank = rank;
  result.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  result.element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32   ? Element::kFloat32
                   : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ? Element::kFloat16
                                                             : Element::kBFloat16;
  result.swizzle = swizzle;
  result.base = static_cast<unsigned char*>(base);
  for (unsigned i = 0; i < rank; ++i) {
    result.sizes[i] = sizes[i];
    result.strides[i] = i == 0 ? result.element_bytes : strides[i - 1];
    result.box[i] = box[i];
    if (sizes[i] < 1 || sizes[i] > uint64_t{1} << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (strides[i - 1] % 16 != 0 || strides[i - 1] == 0 || strides[i - 1] >= uint64_t{1} << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  const unsigned inner_bytes = result.inner_bytes();
  if (inner_bytes % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  // The hardware takes narrower boxes under a swizzle too; nobody here makes one, so what it does with them is not emulated.
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner_bytes != 16u << swizzle) return CUDA_ERROR_INVALID_VALUE;
  static_assert(sizeof result <= sizeof *map);
  memcpy(map, &result, sizeof result);
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= emulator::kDeviceCount) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = emulator::kDeviceCount;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = installed.driver;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = installed.toolkit;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) {
  if (emulator::kDevices[current_device].compute_capability <= 90) return cudaSuccess;
  if (!installed.ptx) return cudaErrorNoKernelImageForDevice;
  return installed.toolkit > installed.driver ? cudaErrorUnsupportedPtxVersion : cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= emulator::kDeviceCount) return cudaErrorInvalidDevice;
  const emulator::Device& properties = emulator::kDevices[device];
  switch (attribute) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = properties.shared_bytes;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.compute_capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.compute_capability % 10;
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }

const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorLaunchFailure) return launch_error.c_str();
  return error == cudaErrorInvalidDevice ? "invalid device" : "invalid value";
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
  if (bytes > emulator::kDevices[current_device].shared_bytes) return cudaErrorInvalidValue;
  allowed_shared_bytes[{kernel, current_device}] = bytes;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  const int allowed = std::max(48 * 1024, allowed_shared_bytes[{kernel, current_device}]);
  if (config->dynamicSmemBytes > static_cast<size_t>(allowed) || config->gridDim.x == 0) return cudaErrorInvalidValue;
  bool early = false;
  int cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension)
      cluster = attribute.val.clusterDim.x * attribute.val.clusterDim.y * attribute.val.clusterDim.z;
    else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization)
      early = attribute.val.programmaticStreamSerializationAllowed;
  }
  if ((early || cluster > 1) && emulator::kDevices[current_device].compute_capability < 90) return cudaErrorInvalidValue;
  launch_error = emulator::run(kernel, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, early, cluster);
  return launch_error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  if (strcmp(name, "cuTensorMapEncodeTiled") != 0) return cudaErrorInvalidValue;
  *function = reinterpret_cast<void*>(encode_tensor_map);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// For the tests: the order of threads (emulator::Schedule), what is installed, and what the emulator counts.
extern "C" __attribute__((visibility("default"))) void emulator_schedule(uint32_t seed, int resident) {
  emulator::schedule = {seed, resident};
}
extern "C" __attribute__((visibility("default"))) void emulator_install(int driver, int toolkit, int ptx) {
  installed = {driver, toolkit, ptx != 0};
}
// When a red.release makes *word `value`, memory is said to be as it will remain: emulator_watched() counts what was said, and what was not so,
// and forgets all.
extern "C" __attribute__((visibility("default"))) void emulator_watch(const int32_t* word, int32_t value, const char* memory,
                                                                      size_t bytes) {
  watched.push_back({word, value, memory, bytes, {}});
}
extern "C" __attribute__((visibility("default"))) void emulator_watched(int* said, int* wrong) {
  *said = *wrong = 0;
  for (const Watched& each : watched) {
    *said += !each.then.empty();
    *wrong += !each.then.empty() && memcmp(each.then.data(), each.memory, each.bytes) != 0;
  }
  watched.clear();
}
extern "C" __attribute__((visibility("default"))) uint64_t emulator_bank_conflicts() { return emulator::bank_conflicts; }
extern "C" __attribute__((visibility("default"))) uint64_t emulator_tensor_bytes() { return emulator::tensor_bytes; }

void emulator::note_release(const int32_t* word) {
  for (Watched& each : watched)
    if (each.word == word && *word == each.value) each.then.assign(each.memory, each.bytes);
}

namespace emulator::ptx {

void multiply_fragments(void* const (&lanes)[kLanes], bool bf16) {
  const auto number = [bf16](uint32_t pair, int half) {
    const uint16_t element = pair >> (16 * half);
    return bf16 ? from_bfloat16(element) : from_half(element);
  };
  float a[16][16], b[16][8], c[16][8];  // [row][k], [k][column], [row][column]
  for (int lane = 0; lane < kLanes; ++lane) {
    const MmaFragments& fragments = *static_cast<MmaFragments*>(lanes[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + half + i / 2 * 8] = number(fragments.a[i], half);
      for (int i = 0; i < 2; ++i) b[2 * t + half + i * 8][g] = number(fragments.b[i], half);
      for (int i = 0; i < 2; ++i) c[g + i * 8][2 * t + half] = fragments.c[i * 2 + half];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kLanes; ++lane) {
    MmaFragments& fragments = *static_cast<MmaFragments*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) fragments.c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

}  // namespace emulator::ptx
