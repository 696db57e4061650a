// A driver whose device is this CPU: memory is memory, a launch runs the kernels' own source, thread after thread and
// unchecked. For dry runs of the device check, which finds it as libcuda.so.1.
#include "host_shim.h"

#include "segment_copy.cu"

#include <cstdlib>
#include <string>

thread_local HostDim threadIdx, blockIdx, blockDim, gridDim;

// A device has no list of what a test lent, and does not look.
bool host_check(uint64_t, uint64_t, uint64_t, HostAccess) { return true; }
void host_written(uint64_t, uint64_t) {}

namespace {

template <typename Body>
void run(uint32_t grid, uint32_t block, const Body& body) {
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  for (uint32_t thread = 0; thread < grid * block; ++thread) {
    blockIdx = {thread / block, 0, 0};
    threadIdx = {thread % block, 0, 0};
    body();
  }
}

template <typename Value>
int give(Value* place, Value value) {
  *place = value;
  return 0;
}

}  // namespace

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) { return give(version, 12090); }
int cuGetErrorName(int, const char** name) { return give(name, static_cast<const char*>("FAKE")); }
int cuDeviceGet(int* device, int) { return give(device, 0); }
int cuDeviceGetName(char* name, int len, int) {
  std::strncpy(name, "the kernels' source on this CPU", len);
  return 0;
}
int cuDeviceGetAttribute(int* value, int number, int) { return give(value, number == 75 ? 9 : number == 76 ? 0 : 4); }
int cuDevicePrimaryCtxRetain(void** context, int) { return give(context, static_cast<void*>(nullptr)); }
int cuCtxPushCurrent_v2(void*) { return 0; }
int cuStreamCreate(void** stream, unsigned) { return give(stream, reinterpret_cast<void*>(0x57)); }
int cuStreamSynchronize(void*) { return 0; }
int cuEventCreate(void** event, unsigned) { return give(event, reinterpret_cast<void*>(0xe0)); }
int cuEventRecord(void*, void*) { return 0; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void*, void*) { return give(ms, 1.0f); }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  return give(address, reinterpret_cast<uint64_t>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned) { return cuMemAlloc_v2(reinterpret_cast<uint64_t*>(address), bytes); }
int cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
  return give(device, reinterpret_cast<uint64_t>(host));
}
int cuMemHostRegister_v2(void*, size_t, unsigned) { return 0; }
int cuMemHostUnregister(void*) { return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void*) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return 0;
}
int cuMemcpyBatchAsync(const uint64_t* to, const uint64_t* from, const size_t* bytes, size_t count, const int*,
                       const size_t*, size_t, size_t*, void* stream) {
  for (size_t i = 0; i < count; ++i) cuMemcpyAsync(to[i], from[i], bytes[i], stream);
  return 0;
}
int cuLibraryLoadData(void** library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  return give(library, reinterpret_cast<void*>(0x11));
}
int cuLibraryGetKernel(void** kernel, void*, const char* name) {
  return give(kernel, static_cast<void*>(new std::string(name)));
}
int cuKernelSetAttribute(int, int, void*, int) { return 0; }
int cuLaunchKernel(void* kernel, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   void*, void** arguments, void**) {
  const std::string& name = *static_cast<std::string*>(kernel);
  const auto& plan = *static_cast<const SegmentPlan*>(arguments[0]);
  const std::string copy = "hicache_segment_copy_";
  if (name == copy + "v16") run(grid, block, [&] { hicache_segment_copy_v16(plan); });
  else if (name == copy + "v8") run(grid, block, [&] { hicache_segment_copy_v8(plan); });
  else if (name == copy + "v4") run(grid, block, [&] { hicache_segment_copy_v4(plan); });
  else if (name == copy + "v2") run(grid, block, [&] { hicache_segment_copy_v2(plan); });
  else if (name == copy + "v1") run(grid, block, [&] { hicache_segment_copy_v1(plan); });
  else if (name == copy + "mixed") run(grid, block, [&] { hicache_segment_copy_mixed(plan); });
  else if (name == copy + "bulk") {
    const BulkShape shape = *static_cast<const BulkShape*>(arguments[1]);
    run(grid, block, [&] { hicache_segment_copy_bulk(plan, shape); });
  } else if (name == "hicache_index_check") {
    run(grid, block, [&] {
      hicache_index_check(*static_cast<hicache_u64*>(arguments[0]), *static_cast<hicache_u32*>(arguments[1]),
                          *static_cast<hicache_u32*>(arguments[2]), *static_cast<hicache_u32*>(arguments[3]),
                          *static_cast<hicache_u32**>(arguments[4]), *static_cast<IndexReport**>(arguments[5]));
    });
  } else return 500;
  return 0;
}
}
