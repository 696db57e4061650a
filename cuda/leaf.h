// Loads and stores: the only lines that differ between device and host.
//
// On the device: loads do not fill L1, since a byte is read once; they are not of the read-only kind, since the CPU
// may write the same host page before the next launch. Stores go to L2.
// On the host: host_shim.h provides host_load and host_store, which check every access.
#ifndef HICACHE_LEAF_H
#define HICACHE_LEAF_H

#include "segment_plan.h"

struct __align__(16) Vector16 {
  hicache_u32 x, y, z, w;
};

struct __align__(8) Vector8 {
  hicache_u32 x, y;
};

// An index on its way: one of the two is loaded, of 4 or of 8 bytes, or none of 0 bytes.
struct IndexWords {
  hicache_i32 narrow;
  hicache_i64 wide;
};

#if defined(__CUDA_ARCH__)

static __device__ __forceinline__ Vector16 load(const Vector16* from) {
  Vector16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
static __device__ __forceinline__ void store(Vector16* to, Vector16 v) {
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
static __device__ __forceinline__ Vector8 load(const Vector8* from) {
  Vector8 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
  return v;
}
static __device__ __forceinline__ void store(Vector8* to, Vector8 v) {
  asm volatile("st.global.cg.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
static __device__ __forceinline__ hicache_u32 load(const hicache_u32* from) {
  hicache_u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
static __device__ __forceinline__ void store(hicache_u32* to, hicache_u32 v) {
  asm volatile("st.global.cg.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
static __device__ __forceinline__ hicache_u16 load(const hicache_u16* from) {
  hicache_u16 v;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}
static __device__ __forceinline__ void store(hicache_u16* to, hicache_u16 v) {
  asm volatile("st.global.cg.u16 [%0], %1;" ::"l"(to), "h"(v) : "memory");
}
static __device__ __forceinline__ hicache_u8 load(const hicache_u8* from) {
  hicache_u32 v;
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return static_cast<hicache_u8>(v);
}
static __device__ __forceinline__ void store(hicache_u8* to, hicache_u8 v) {
  asm volatile("st.global.cg.u8 [%0], %1;" ::"l"(to), "r"(static_cast<hicache_u32>(v)) : "memory");
}
// Predicated loads without a branch or a conversion behind them: nothing waits until the value is looked at.
static __device__ __forceinline__ IndexWords load_index(hicache_u64 address, hicache_u32 bytes) {
  IndexWords words = {0, 0};
  asm volatile(
      "{ .reg .pred is_narrow, is_wide;\n"
      "  setp.eq.u32 is_narrow, %2, 4;\n"
      "  setp.eq.u32 is_wide, %2, 8;\n"
      "  @is_narrow ld.global.u32 %0, [%3];\n"
      "  @is_wide ld.global.u64 %1, [%3]; }"
      : "+r"(words.narrow), "+l"(words.wide)
      : "r"(bytes), "l"(address));
  return words;
}

#elif defined(HICACHE_HOST_SHIM)

template <typename Vector>
static inline Vector load(const Vector* from) {
  return host_load(from);
}
template <typename Vector>
static inline void store(Vector* to, Vector v) {
  host_store(to, v);
}
static inline IndexWords load_index(hicache_u64 address, hicache_u32 bytes) {
  IndexWords words = {0, 0};
  if (bytes == 4) words.narrow = host_load_index<hicache_i32>(address);
  if (bytes == 8) words.wide = host_load_index<hicache_i64>(address);
  return words;
}

#else  // The host pass of nvcc looks at the source and runs nothing of it.

template <typename Vector>
static __device__ Vector load(const Vector* from);
template <typename Vector>
static __device__ void store(Vector* to, Vector v);
static __device__ IndexWords load_index(hicache_u64 address, hicache_u32 bytes);

#endif

#endif
