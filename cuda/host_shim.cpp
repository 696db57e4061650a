// The kernels behind host_shim.h, and an entry for each; linked with host_runtime.cpp into the library of the tests.
#include "host_shim.h"

#include "segment_copy.cu"

namespace {

template <typename Body>
void launch(uint32_t grid, uint32_t block, uint64_t seed, const Body& body) {
  host_launch(grid, block, seed, [](const void* arguments) { (*static_cast<const Body*>(arguments))(); }, &body);
}

}  // namespace

extern "C" {

// Runs a kernel; `width` is 16, 8, 4, 2 or 1, 0 for the mixed kernel, 32 for the bulk kernel. Returns 0, or 1 for a
// width that there is not.
int shim_copy(const SegmentPlan* plan, uint32_t width, uint32_t grid, uint32_t block, uint64_t seed,
              uint32_t stage_bytes) {
  switch (width) {
    case 16: launch(grid, block, seed, [=] { hicache_segment_copy_v16(*plan); }); return 0;
    case 8: launch(grid, block, seed, [=] { hicache_segment_copy_v8(*plan); }); return 0;
    case 4: launch(grid, block, seed, [=] { hicache_segment_copy_v4(*plan); }); return 0;
    case 2: launch(grid, block, seed, [=] { hicache_segment_copy_v2(*plan); }); return 0;
    case 1: launch(grid, block, seed, [=] { hicache_segment_copy_v1(*plan); }); return 0;
    case 0: launch(grid, block, seed, [=] { hicache_segment_copy_mixed(*plan); }); return 0;
    case 32: {
      const BulkShape shape = {block < BULK_MAX_LANES ? block : BULK_MAX_LANES, stage_bytes};
      launch(grid, BULK_MAX_LANES, seed, [=] { hicache_segment_copy_bulk(*plan, shape); });
      return 0;
    }
    default: return 1;
  }
}

void shim_index_check(uint64_t index, uint32_t index_bytes, uint32_t count, uint32_t limit, uint32_t* seen,
                      IndexReport* found, uint32_t grid, uint32_t block, uint64_t seed) {
  launch(grid, block, seed, [=] { hicache_index_check(index, index_bytes, count, limit, seen, found); });
}

// Sizes and offsets, for the test that compares them with those of Rust and Python.
uint32_t shim_layout(uint32_t which) {
  const uint32_t layout[] = {
      SEGMENT_PLAN_ABI,
      SEGMENT_PLAN_MAX_SEGMENTS,
      sizeof(SegmentSide),
      sizeof(Segment),
      sizeof(SegmentPlan),
      offsetof(SegmentSide, page_stride),
      offsetof(SegmentSide, slot_stride),
      offsetof(SegmentSide, group_stride),
      offsetof(SegmentSide, index),
      offsetof(SegmentSide, limit),
      offsetof(SegmentSide, page_size),
      offsetof(SegmentSide, page_magic),
      offsetof(SegmentSide, page_shift),
      offsetof(SegmentSide, index_kind),
      offsetof(SegmentSide, index_bytes),
      offsetof(Segment, destination),
      offsetof(Segment, items),
      offsetof(Segment, groups),
      offsetof(Segment, run_bytes),
      offsetof(Segment, lanes_log2),
      offsetof(SegmentPlan, segments),
      offsetof(SegmentPlan, error),
      offsetof(SegmentPlan, segment),
  };
  return which < sizeof layout / sizeof *layout ? layout[which] : 0;
}
}
