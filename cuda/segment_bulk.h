// The bulk-copy kernel: runs pass through shared memory by 1-D bulk copies, no byte through a register. sm_90 and up.
//
// Each lane of the one warp of a block works by itself, with BULK_DEPTH stages of shared memory and a barrier for each:
//
//     step n:   wait until the store of item n - 4 has read its stage      cp.async.bulk.wait_group.read 1
//               load item n into stage n % 4                               global -> shared, counted by the barrier
//               wait for the load of item n - 2, store it                  shared -> global
//
// so each lane has two loads in flight and the index of the next item besides. An item is a run, or a piece of one
// where a run is longer than a stage. It has not run on a GPU: the chooser takes it only when asked.
#ifndef HICACHE_SEGMENT_BULK_H
#define HICACHE_SEGMENT_BULK_H

#include "segment_walk.h"

#define BULK_DEPTH 4u
#define BULK_LAG 2u
#define BULK_MAX_LANES 32u

// How the kernel is launched: `lanes` of 32 threads work; dynamic shared memory of lanes * BULK_DEPTH * stage_bytes.
typedef struct BulkShape {
  hicache_u32 lanes;
  hicache_u32 stage_bytes; /* a multiple of 128 */
} BulkShape;
HICACHE_STATIC_ASSERT(sizeof(BulkShape) == 8);

// A run, or a piece of a run of `bytes` bytes that begins `offset` bytes behind the run's start.
struct Piece {
  hicache_u64 source;
  hicache_u64 destination;
  hicache_u32 bytes;
};

// Piece p of the run at `places`.
HICACHE_DEVICE Piece piece_of(const Segment& segment, const Places& places, hicache_u32 p, hicache_u32 stage_bytes) {
  const hicache_u32 offset = p * stage_bytes;
  const hicache_u32 left = segment.run_bytes - offset;
  Piece piece;
  piece.source = places.source + offset;
  piece.destination = places.destination + offset;
  piece.bytes = left < stage_bytes ? left : stage_bytes;
  return piece;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

struct BulkLane {
  hicache_u32 stage;          // shared address of the lane's first stage
  hicache_u32 barrier;        // and of its first barrier
  hicache_u32 stage_bytes;
  hicache_u64* destinations;  // of what is in the stages, in shared memory: a local array would be local memory
  hicache_u32* bytes;
  hicache_u32 loaded;
  hicache_u32 stored;
};

HICACHE_DEVICE void bulk_begin(BulkLane& lane) {
  for (hicache_u32 i = 0; i < BULK_DEPTH; ++i)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(lane.barrier + 8 * i) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

HICACHE_DEVICE void bulk_store_oldest(BulkLane& lane) {
  const hicache_u32 stage = lane.stored % BULK_DEPTH, parity = lane.stored / BULK_DEPTH & 1;
  hicache_u32 done = 0;
  while (done == 0)
    asm volatile(
        "{ .reg .pred p;\n"
        "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(lane.barrier + 8 * stage), "r"(parity)
        : "memory");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(lane.destinations[stage]),
               "r"(lane.stage + stage * lane.stage_bytes), "r"(lane.bytes[stage])
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  ++lane.stored;
}

HICACHE_DEVICE void bulk_move(BulkLane& lane, const Piece& piece) {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
  const hicache_u32 stage = lane.loaded % BULK_DEPTH, barrier = lane.barrier + 8 * stage;
  lane.destinations[stage] = piece.destination;
  lane.bytes[stage] = piece.bytes;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(piece.bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   lane.stage + stage * lane.stage_bytes),
               "l"(piece.source), "r"(piece.bytes), "r"(barrier)
               : "memory");
  ++lane.loaded;
  if (lane.loaded - lane.stored > BULK_LAG) bulk_store_oldest(lane);
}

HICACHE_DEVICE void bulk_end(BulkLane& lane) {
  while (lane.stored != lane.loaded) bulk_store_oldest(lane);
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#elif defined(HICACHE_HOST_SHIM)

struct BulkLane {};
HICACHE_DEVICE void bulk_begin(BulkLane&) {}
HICACHE_DEVICE void bulk_move(BulkLane&, const Piece& piece) {
  host_copy(piece.destination, piece.source, piece.bytes);
}
HICACHE_DEVICE void bulk_end(BulkLane&) {}

#endif

#if defined(HICACHE_HOST_SHIM) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)

HICACHE_DEVICE void bulk_copy(const SegmentPlan& plan, const BulkShape& shape, BulkLane& lane) {
  bulk_begin(lane);
  const hicache_u32 worker = blockIdx.x * shape.lanes + threadIdx.x, workers = gridDim.x * shape.lanes;
  for (hicache_u32 number = 0; number < plan.segments; ++number) {
    const Segment& segment = plan.segment[number];
    const hicache_u32 rows = segment.items * segment.groups;
    if (worker >= rows) continue;
    Row next = load_row(segment, worker, rows);
    for (hicache_u32 r = worker; r < rows; r += workers) {
      const Row row = next;
      next = load_row(segment, r + workers, rows);
      Places places;
      if (!find_places(plan, number, row, places)) continue;
      for (hicache_u32 p = 0; p * shape.stage_bytes < segment.run_bytes; ++p)
        bulk_move(lane, piece_of(segment, places, p, shape.stage_bytes));
    }
  }
  bulk_end(lane);
}

#endif

#endif
