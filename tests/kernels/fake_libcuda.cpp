// A driver whose device is this CPU: memory is memory, a launch runs the kernels' own source, thread after thread and
// unchecked. For dry runs of the device check, and for transfers, which find it as libcuda.so.1.
//
// FAKE_LOG        file that gets a line for each call: wait, launch, copy, record
// FAKE_LATE=1     what a stream is given is done when somebody waits for it or asks often, not before; one order for all streams
// FAKE_LATE=streams  likewise, each stream by itself: only what is waited for is done, and what that waits for by events
// FAKE_DUPLICATE  the index check finds its second index changed to the first, as by a stray write
// FAKE_REFUSE     of so many launches of copies one is refused, the last
// FAKE_STUCK      a stream is never done
// FAKE_PAST       likewise each launch its first destination index, beyond the limit
#include "host_shim.h"

#include "segment_copy.cu"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
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

void note(const char* format, ...) {
  const char* path = std::getenv("FAKE_LOG");
  FILE* log = path ? std::fopen(path, "a") : nullptr;
  if (!log) return;
  std::va_list list;
  va_start(list, format);
  std::vfprintf(log, format, list);
  va_end(list);
  std::fputc('\n', log);
  std::fclose(log);
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

std::recursive_mutex lock;
std::map<void*, std::deque<std::function<void()>>> queues;  // given and not done, under FAKE_LATE; by stream, or one
unsigned queries = 0;                      // since something was given
std::map<uintptr_t, size_t> registered;    // host memory that the device reaches
struct Event {
  uint64_t recorded = 0, done = 0;
  void* stream = nullptr;
};

using Guard = std::lock_guard<std::recursive_mutex>;

bool is_by_stream() { return is_set("FAKE_LATE") && std::string(std::getenv("FAKE_LATE")) == "streams"; }

std::deque<std::function<void()>>& queue_of(void* stream) { return queues[is_by_stream() ? stream : nullptr]; }

int submit(void* stream, std::function<void()> work) {
  Guard guard(lock);
  queries = 0;
  if (is_set("FAKE_LATE")) queue_of(stream).push_back(std::move(work));
  else work();
  return 0;
}

void do_one(void* stream) {
  auto& queue = queue_of(stream);
  auto work = std::move(queue.front());
  queue.pop_front();
  work();
}

void do_all(void* stream) {
  Guard guard(lock);
  while (!queue_of(stream).empty()) do_one(stream);
}

void reach(const Event* event, uint64_t number, void* stream) {
  Guard guard(lock);
  while (event->done < number) do_one(stream);
}

size_t pending() {
  size_t sum = 0;
  for (const auto& one : queues) sum += one.second.size();
  return sum;
}

void move_bytes(uint64_t to, uint64_t from, size_t bytes) {
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

}  // namespace

extern "C" {
// Not the driver's: how much of what streams were given is still to be done.
int fake_pending() {
  Guard guard(lock);
  return static_cast<int>(pending());
}

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
int cuDeviceGetCount(int* count) { return give(count, 1); }
int cuCtxGetCurrent(void** context) { return give(context, static_cast<void*>(nullptr)); }
int cuCtxPopCurrent_v2(void** context) { return give(context, static_cast<void*>(nullptr)); }
int cuDevicePrimaryCtxRelease_v2(int) {
  note("release");
  return 0;
}
int cuPointerGetAttribute(void* value, int, uint64_t) { return give(static_cast<int*>(value), 0); }
int cuStreamCreate(void** stream, unsigned) {
  static uintptr_t streams = 0x57;
  return give(stream, reinterpret_cast<void*>(streams++));
}
int cuStreamSynchronize(void* stream) {
  note("synchronize");
  while (is_set("FAKE_STUCK")) sleep(1);
  do_all(stream);
  return 0;
}
int cuStreamIsCapturing(void*, int* status) { return give(status, 0); }
int cuStreamWaitEvent(void* stream, void* handle, unsigned) {
  note("wait stream %p", stream);
  if (!is_by_stream()) return 0;  // one order for all streams
  const Event* event = static_cast<Event*>(handle);
  const uint64_t number = event->recorded;
  void* other = event->stream;
  return submit(stream, [=] { reach(event, number, other); });
}
int cuEventCreate(void** event, unsigned) { return give(event, static_cast<void*>(new Event)); }
int cuEventRecord(void* handle, void* stream) {
  Event* event = static_cast<Event*>(handle);
  const uint64_t number = ++event->recorded;
  event->stream = stream;
  note("record stream %p", stream);
  return submit(stream, [=] { event->done = number; });
}
int cuEventQuery(void* handle) {
  Guard guard(lock);
  const Event* event = static_cast<Event*>(handle);
  if (event->done == event->recorded) return 0;
  // A device gets on by itself, but not while a few calls are made.
  if (++queries % 32 == 0) do_one(event->stream);
  return 600;
}
int cuEventSynchronize(void* handle) {
  const Event* event = static_cast<Event*>(handle);
  reach(event, event->recorded, event->stream);
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }  // what was recorded goes on, and needs it
int cuEventElapsedTime(float* ms, void*, void*) { return give(ms, 1.0f); }
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  return give(address, reinterpret_cast<uint64_t>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)));
}
int cuMemHostRegister_v2(void* base, size_t bytes, unsigned) {
  Guard guard(lock);
  note("register");
  registered[reinterpret_cast<uintptr_t>(base)] = bytes;
  return 0;
}
int cuMemHostUnregister(void* base) {
  Guard guard(lock);
  note("unregister%s", pending() == 0 ? "" : " while the device is at work");
  registered.erase(reinterpret_cast<uintptr_t>(base));
  return 0;
}
int cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  cuMemAlloc_v2(reinterpret_cast<uint64_t*>(address), bytes);
  return cuMemHostRegister_v2(*address, bytes, flags);
}
int cuMemHostGetDevicePointer_v2(uint64_t* device, void* host, unsigned) {
  Guard guard(lock);
  const auto address = reinterpret_cast<uintptr_t>(host);
  auto after = registered.upper_bound(address);
  if (after == registered.begin() || (--after)->first + after->second <= address) return 1;
  return give(device, static_cast<uint64_t>(address));
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  note("copy stream %p", stream);
  return submit(stream, [=] { move_bytes(to, from, bytes); });
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  note("set stream %p", stream);
  return submit(stream, [=] { std::memset(reinterpret_cast<void*>(to), value, bytes); });
}
int cuMemcpyBatchAsync(const uint64_t* to, const uint64_t* from, const size_t* bytes, size_t count, const int*,
                       const size_t*, size_t, size_t*, void* stream) {
  note("batch of %zu stream %p", count, stream);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t there = to[i], here = from[i];
    const size_t size = bytes[i];
    submit(stream, [=] { move_bytes(there, here, size); });
  }
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
                   void* stream, void** arguments, void**) {
  const std::string name = *static_cast<std::string*>(kernel);
  note("launch %s stream %p", name.c_str(), stream);
  if (name == "hicache_index_check") {
    const auto index = *static_cast<hicache_u64*>(arguments[0]);
    const auto bytes = *static_cast<hicache_u32*>(arguments[1]), count = *static_cast<hicache_u32*>(arguments[2]);
    const auto limit = *static_cast<hicache_u32*>(arguments[3]);
    auto* seen = *static_cast<hicache_u32**>(arguments[4]);
    auto* report = *static_cast<IndexReport**>(arguments[5]);
    return submit(stream, [=] {
      auto* indices = reinterpret_cast<long long*>(index);
      if (is_set("FAKE_DUPLICATE") && count > 1) indices[1] = indices[0];
      run(grid, block, [&] { hicache_index_check(index, bytes, count, limit, seen, report); });
    });
  }
  const char* refuse = std::getenv("FAKE_REFUSE");
  static int launches = 0;
  if (refuse && ++launches % std::atoi(refuse) == 0) return 2;
  // The driver copies the arguments before it returns.
  const SegmentPlan plan = *static_cast<const SegmentPlan*>(arguments[0]);
  const std::string copy = "hicache_segment_copy_";
  void (*body)(const SegmentPlan) = nullptr;
  if (name == copy + "v16") body = hicache_segment_copy_v16;
  else if (name == copy + "v8") body = hicache_segment_copy_v8;
  else if (name == copy + "v4") body = hicache_segment_copy_v4;
  else if (name == copy + "v2") body = hicache_segment_copy_v2;
  else if (name == copy + "v1") body = hicache_segment_copy_v1;
  else if (name == copy + "mixed") body = hicache_segment_copy_mixed;
  if (body != nullptr) {
    return submit(stream, [=] {
      if (is_set("FAKE_PAST")) *reinterpret_cast<long long*>(plan.segment[0].destination.index) = 1 << 30;
      run(grid, block, [&] { body(plan); });
    });
  }
  if (name != copy + "bulk") return 500;
  const BulkShape shape = *static_cast<const BulkShape*>(arguments[1]);
  return submit(stream, [=] { run(grid, block, [&] { hicache_segment_copy_bulk(plan, shape); }); });
}
}
