// The copy kernels. One source for nvcc, NVRTC and, behind host_shim.h, a host compiler: no includes but our own.
//
// All move the runs of a SegmentPlan, see segment_plan.h, from any layout to any other. Device memory, or host memory
// registered with the driver, on either side: restore and backup are the same kernel with the sides swapped. A plan
// may hold segments of several pools, so the target, draft and indexer rows of a layer are one launch.
//
//   before:  the stream has waited for whatever wrote the source, and for whatever still reads the destination
//   reads:   items * groups * run_bytes of each segment, less skipped items, once; the index vectors
//   writes:  as many bytes, each once; *error
//   grid:    any number of blocks; the result does not depend on it, nor on the order of threads
//   needs:   what SegmentPlan::validate (Rust) checks: the kernels trust the plan
#include "segment_plan.h"

#include "segment_walk.h"
#include "segment_bulk.h"

#define HICACHE_REGISTER_THREADS 1024

// Vectors lane, lane + lanes, ... of a run. Four loads are in flight before the first store: the latency of host
// memory is what a block has to hide.
template <typename Vector>
HICACHE_DEVICE void copy_run(hicache_u64 source, hicache_u64 destination, hicache_u32 vectors, hicache_u32 lane,
                             hicache_u32 lanes) {
  const Vector* const from = reinterpret_cast<const Vector*>(source);
  Vector* const to = reinterpret_cast<Vector*>(destination);
  hicache_u32 at = lane;
  for (; at + 3 * lanes < vectors; at += 4 * lanes) {
    const Vector a = load(from + at);
    const Vector b = load(from + at + lanes);
    const Vector c = load(from + at + 2 * lanes);
    const Vector d = load(from + at + 3 * lanes);
    store(to + at, a);
    store(to + at + lanes, b);
    store(to + at + 2 * lanes, c);
    store(to + at + 3 * lanes, d);
  }
  if (at >= vectors) return;
  // Up to three are left.
  const bool second = at + lanes < vectors, third = at + 2 * lanes < vectors;
  const Vector a = load(from + at);
  Vector b = a, c = a;
  if (second) b = load(from + at + lanes);
  if (third) c = load(from + at + 2 * lanes);
  store(to + at, a);
  if (second) store(to + at + lanes, b);
  if (third) store(to + at + 2 * lanes, c);
}

// All runs of one segment, 2^lanes_log2 neighbouring threads for each. The index of a thread's next row is on its way
// while the present one is copied.
template <typename Vector>
HICACHE_DEVICE void copy_segment(const SegmentPlan& plan, hicache_u32 number) {
  const Segment& segment = plan.segment[number];
  const hicache_u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  const hicache_u32 lanes = 1u << segment.lanes_log2, lane = thread & (lanes - 1);
  const hicache_u32 worker = thread >> segment.lanes_log2;
  const hicache_u32 workers = gridDim.x * blockDim.x >> segment.lanes_log2;
  const hicache_u32 rows = segment.items * segment.groups;
  const hicache_u32 vectors = segment.run_bytes / static_cast<hicache_u32>(sizeof(Vector));
  if (worker >= rows) return;
  Row next = load_row(segment, worker, rows);
  for (hicache_u32 r = worker; r < rows; r += workers) {
    const Row row = next;
    next = load_row(segment, r + workers, rows);
    Places places;
    if (find_places(plan, number, row, places))
      copy_run<Vector>(places.source, places.destination, vectors, lane, lanes);
  }
}

template <typename Vector>
HICACHE_DEVICE void copy_plan(const SegmentPlan& plan) {
  for (hicache_u32 number = 0; number < plan.segments; ++number) copy_segment<Vector>(plan, number);
}

// One vector width for the launch: it divides all bases, strides and runs of the plan.
#define HICACHE_SEGMENT_COPY(bytes, Vector)                                           \
  extern "C" __global__ void __launch_bounds__(HICACHE_REGISTER_THREADS, 1)           \
      hicache_segment_copy_v##bytes(const __grid_constant__ SegmentPlan plan) {       \
    copy_plan<Vector>(plan);                                                          \
  }

HICACHE_SEGMENT_COPY(16, Vector16)
HICACHE_SEGMENT_COPY(8, Vector8)
HICACHE_SEGMENT_COPY(4, hicache_u32)
HICACHE_SEGMENT_COPY(2, hicache_u16)
HICACHE_SEGMENT_COPY(1, hicache_u8)

// Each segment with the widest vector that it allows: an odd sidecar does not slow down the others.
extern "C" __global__ void __launch_bounds__(HICACHE_REGISTER_THREADS, 1)
    hicache_segment_copy_mixed(const __grid_constant__ SegmentPlan plan) {
  for (hicache_u32 number = 0; number < plan.segments; ++number) {
    switch (vector_bytes(plan.segment[number])) {
      case 16: copy_segment<Vector16>(plan, number); break;
      case 8: copy_segment<Vector8>(plan, number); break;
      case 4: copy_segment<hicache_u32>(plan, number); break;
      case 2: copy_segment<hicache_u16>(plan, number); break;
      default: copy_segment<hicache_u8>(plan, number); break;
    }
  }
}

// 32 threads a block. Bases, strides and runs are multiples of 16. Empty below sm_90.
extern "C" __global__ void __launch_bounds__(32, 1)
    hicache_segment_copy_bulk(const __grid_constant__ SegmentPlan plan, const BulkShape shape) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) hicache_u8 stages[];
  __shared__ __align__(8) hicache_u64 barriers[BULK_MAX_LANES * BULK_DEPTH];
  __shared__ hicache_u64 destinations[BULK_MAX_LANES * BULK_DEPTH];
  __shared__ hicache_u32 bytes[BULK_MAX_LANES * BULK_DEPTH];
  if (threadIdx.x >= shape.lanes) return;
  const hicache_u32 first = threadIdx.x * BULK_DEPTH;
  BulkLane lane;
  lane.stage = static_cast<hicache_u32>(__cvta_generic_to_shared(stages)) + first * shape.stage_bytes;
  lane.barrier = static_cast<hicache_u32>(__cvta_generic_to_shared(barriers + first));
  lane.stage_bytes = shape.stage_bytes;
  lane.destinations = destinations + first;
  lane.bytes = bytes + first;
  lane.loaded = 0;
  lane.stored = 0;
  bulk_copy(plan, shape, lane);
#elif defined(HICACHE_HOST_SHIM)
  BulkLane lane;
  if (threadIdx.x < shape.lanes) bulk_copy(plan, shape, lane);
#endif
}

// What an index vector holds. The caller sets `least` to the largest and `most` to the smallest integer, and the counts
// to 0.
typedef struct IndexReport {
  hicache_i64 least; /* of those that are not negative */
  hicache_i64 most;
  hicache_u32 padding;    /* negative ones */
  hicache_u32 past_limit; /* at or past the limit */
  hicache_u32 duplicates; /* within the limit, and met before */
  hicache_u32 reserved;
} IndexReport;
HICACHE_STATIC_ASSERT(sizeof(IndexReport) == 32);

// For debugging: looks at `count` integers of 4 or 8 bytes. `seen` is a bitmap of `limit` bits, zeroed by the caller.
extern "C" __global__ void __launch_bounds__(HICACHE_REGISTER_THREADS, 1)
    hicache_index_check(hicache_u64 index, hicache_u32 index_bytes, hicache_u32 count, hicache_u32 limit,
                        hicache_u32* seen, IndexReport* report) {
  const hicache_u32 threads = gridDim.x * blockDim.x;
  for (hicache_u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    const IndexWords words = load_index(index + static_cast<hicache_u64>(i) * index_bytes, index_bytes);
    const hicache_i64 v = index_value(words, index_bytes);
    if (v < 0) {
      atomicAdd(&report->padding, 1u);
      continue;
    }
    atomicMin(&report->least, v);
    atomicMax(&report->most, v);
    if (v >= static_cast<hicache_i64>(limit)) {
      atomicAdd(&report->past_limit, 1u);
      continue;
    }
    const hicache_u32 bit = 1u << (v % 32);
    if (atomicOr(seen + v / 32, bit) & bit) atomicAdd(&report->duplicates, 1u);
  }
}
