// Runs the kernels as host code: the same segment_copy.cu, thread after thread in an order scrambled by a seed.
//
// For kernels without barriers and shuffles. Every load and store is checked: inside the memory that the test lent for
// it, aligned to its size, and no byte written twice. A bad access is recorded and not done, so that a test reads what
// went wrong instead of a crash; the checks of the sanitizer stand behind it.
#ifndef HICACHE_HOST_SHIM_H
#define HICACHE_HOST_SHIM_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#define HICACHE_HOST_SHIM 1

#define __global__ __attribute__((unused))
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct HostDim {
  unsigned x, y, z;
};
extern thread_local HostDim threadIdx, blockIdx, blockDim, gridDim;

enum HostAccess : uint32_t { HOST_SOURCE = 1, HOST_DESTINATION = 2, HOST_INDEX = 4, HOST_ERROR = 8 };

// True when `bytes` at `address` are lent for `access` and aligned to `alignment`; records a violation otherwise.
bool host_check(uint64_t address, uint64_t bytes, uint64_t alignment, HostAccess access);

// Notes that `bytes` at `address` were written.
void host_written(uint64_t address, uint64_t bytes);

// Calls body(arguments) for each thread of grid * block, in an order drawn by `seed`, or in order for seed 0.
void host_launch(uint32_t grid, uint32_t block, uint64_t seed, void (*body)(const void*), const void* arguments);

template <typename Vector>
Vector host_load(const Vector* from) {
  Vector v{};
  if (host_check(reinterpret_cast<uintptr_t>(from), sizeof(Vector), sizeof(Vector), HOST_SOURCE)) v = *from;
  return v;
}

template <typename Vector>
void host_store(Vector* to, Vector v) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(to);
  if (!host_check(address, sizeof(Vector), sizeof(Vector), HOST_DESTINATION)) return;
  host_written(address, sizeof(Vector));
  *to = v;
}

// A bad index reads as padding.
template <typename Integer>
Integer host_load_index(uint64_t address) {
  if (!host_check(address, sizeof(Integer), sizeof(Integer), HOST_INDEX)) return -1;
  return *reinterpret_cast<const Integer*>(address);
}

// What a bulk copy does: addresses and length are multiples of 16.
inline void host_copy(uint64_t to, uint64_t from, uint32_t bytes) {
  const bool can_read = host_check(from, bytes, 16, HOST_SOURCE) && bytes % 16 == 0;
  if (!host_check(to, bytes, 16, HOST_DESTINATION) || !can_read) return;
  host_written(to, bytes);
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
}

template <typename Integer>
Integer host_update(Integer* word, Integer value) {
  const Integer before = *word;
  *word = value;
  return before;
}

inline unsigned atomicOr(unsigned* word, unsigned bits) {
  if (!host_check(reinterpret_cast<uintptr_t>(word), sizeof *word, sizeof *word, HOST_ERROR)) return 0;
  return host_update(word, *word | bits);
}
inline unsigned atomicAdd(unsigned* word, unsigned more) { return host_update(word, *word + more); }
inline long long atomicMin(long long* word, long long v) { return host_update(word, v < *word ? v : *word); }
inline long long atomicMax(long long* word, long long v) { return host_update(word, v > *word ? v : *word); }

#endif
