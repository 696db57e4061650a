// The library that the tests load: the kernels behind host_shim.h, and a launch that scrambles their threads.
#include "host_shim.h"

#include "segment_copy.cu"

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

thread_local HostDim threadIdx, blockIdx, blockDim, gridDim;

namespace {

struct Lent {
  uint64_t base, bytes;
  uint32_t access;
  std::vector<bool> written;
};

struct Report {
  uint64_t violations = 0, first_address = 0, rewritten = 0;
  uint32_t first_bytes = 0, first_access = 0;
};

thread_local std::vector<Lent> lent;
thread_local Report report;

Lent* find(uint64_t address, uint64_t bytes, uint32_t access) {
  for (Lent& l : lent)
    if ((l.access & access) && address >= l.base && bytes <= l.bytes && address - l.base <= l.bytes - bytes) return &l;
  return nullptr;
}

template <typename Body>
void launch(uint32_t grid, uint32_t block, uint64_t seed, Body body) {
  std::vector<uint32_t> order(static_cast<size_t>(grid) * block);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(seed);
  if (seed != 0) std::shuffle(order.begin(), order.end(), random);
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  for (const uint32_t thread : order) {
    blockIdx = {thread / block, 0, 0};
    threadIdx = {thread % block, 0, 0};
    body();
  }
}

}  // namespace

bool host_check(uint64_t address, uint64_t bytes, uint64_t alignment, HostAccess access) {
  if (address % alignment == 0 && find(address, bytes, access) != nullptr) return true;
  if (report.violations++ == 0) {
    report.first_address = address;
    report.first_bytes = static_cast<uint32_t>(bytes);
    report.first_access = access;
  }
  return false;
}

void host_written(uint64_t address, uint64_t bytes) {
  Lent* l = find(address, bytes, HOST_DESTINATION);
  for (uint64_t i = address - l->base; i < address - l->base + bytes; ++i) {
    report.rewritten += l->written[i];
    l->written[i] = true;
  }
}

extern "C" {

struct ShimReport {
  uint64_t violations;     /* accesses outside what was lent, or misaligned */
  uint64_t first_address;  /* of the first of them */
  uint32_t first_bytes;
  uint32_t first_access;  /* 1 source, 2 destination, 4 index, 8 error word */
  uint64_t rewritten;     /* bytes written more than once */
};

void shim_lend(uint64_t base, uint64_t bytes, uint32_t access) {
  lent.push_back({base, bytes, access, std::vector<bool>(access & HOST_DESTINATION ? bytes : 0)});
}

// Forgets what was lent and what was recorded.
void shim_reset() {
  lent.clear();
  report = Report();
}

ShimReport shim_report() {
  return {report.violations, report.first_address, report.first_bytes, report.first_access, report.rewritten};
}

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
