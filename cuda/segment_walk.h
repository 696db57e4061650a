// Where the runs of a segment are: the arithmetic that all kernels share, the same source on device and host.
// Its twin in Rust is rust/hicache-sys/src/segment_plan/cpu.rs.
#ifndef HICACHE_SEGMENT_WALK_H
#define HICACHE_SEGMENT_WALK_H

#include "leaf.h"
#include "segment_plan.h"

#define HICACHE_DEVICE static __device__ __forceinline__

// number / side.page_size for number < 2^31.
HICACHE_DEVICE hicache_u32 page_of(const SegmentSide& side, hicache_u32 number) {
  const hicache_u64 product = static_cast<hicache_u64>(number << 1) * side.page_magic;
  return static_cast<hicache_u32>(product >> 32) >> side.page_shift;
}

// An item's index, loaded early and looked at late; nothing is loaded unless `is_wanted`, nor without an index.
HICACHE_DEVICE IndexWords load_item_index(const SegmentSide& side, hicache_u32 item, bool is_wanted) {
  const hicache_u32 position = side.index_kind == SEGMENT_INDEX_PAGE ? page_of(side, item) : item;
  const hicache_u32 bytes = is_wanted && side.index_kind != SEGMENT_INDEX_IDENTITY ? side.index_bytes : 0;
  return load_index(side.index + static_cast<hicache_u64>(position) * side.index_bytes, bytes);
}

HICACHE_DEVICE hicache_i64 index_value(const IndexWords& words, hicache_u32 bytes) {
  return bytes == 4 ? words.narrow : words.wide;
}

// Whether the side takes part; `past_limit` is set where the index is at or past the limit.
HICACHE_DEVICE bool takes_part(const SegmentSide& side, hicache_i64 index, bool& past_limit) {
  if (side.index_kind == SEGMENT_INDEX_IDENTITY) return true;
  if (index < 0) return false;
  if (index < static_cast<hicache_i64>(side.limit)) return true;
  past_limit = true;
  return false;
}

// Address of the run of `item` and `group`. Sums wrap as addresses do: strides may be negative.
HICACHE_DEVICE hicache_u64 run_address(const SegmentSide& side, hicache_u32 item, hicache_i64 index,
                                       hicache_u32 group) {
  const hicache_u32 number =
      side.index_kind == SEGMENT_INDEX_TOKEN ? static_cast<hicache_u32>(index) : item;
  const hicache_u32 quotient = page_of(side, number);
  const hicache_u32 slot = number - quotient * side.page_size;
  const hicache_u32 page =
      side.index_kind == SEGMENT_INDEX_PAGE ? static_cast<hicache_u32>(index) : quotient;
  return side.base + page * static_cast<hicache_u64>(side.page_stride) +
         slot * static_cast<hicache_u64>(side.slot_stride) +
         group * static_cast<hicache_u64>(side.group_stride);
}

// Row r of a segment, r < items * groups: neighbouring rows are neighbouring items, whose runs are often neighbours in
// memory, within one group.
struct Row {
  hicache_u32 item;
  hicache_u32 group;
  IndexWords source;
  IndexWords destination;
};

// Row r, or a row of no meaning where r is not below `rows`.
HICACHE_DEVICE Row load_row(const Segment& segment, hicache_u32 r, hicache_u32 rows) {
  Row row;
  row.group = segment.groups == 1 ? 0 : r / segment.items;
  row.item = r - row.group * segment.items;
  row.source = load_item_index(segment.source, row.item, r < rows);
  row.destination = load_item_index(segment.destination, row.item, r < rows);
  return row;
}

// Where a row's run is read and written.
struct Places {
  hicache_u64 source;
  hicache_u64 destination;
};

// Whether the row is moved, and if so where. Both sides look at their indices, also where one of them skips the row:
// each reports its own.
HICACHE_DEVICE bool find_places(const SegmentPlan& plan, hicache_u32 number, const Row& row, Places& places) {
  const Segment& segment = plan.segment[number];
  const hicache_i64 from = index_value(row.source, segment.source.index_bytes);
  const hicache_i64 to = index_value(row.destination, segment.destination.index_bytes);
  bool past_limit = false;
  const bool source = takes_part(segment.source, from, past_limit);
  const bool destination = takes_part(segment.destination, to, past_limit);
  if (past_limit && plan.error != 0) atomicOr(reinterpret_cast<hicache_u32*>(plan.error), 1u << number);
  places.source = run_address(segment.source, row.item, from, row.group);
  places.destination = run_address(segment.destination, row.item, to, row.group);
  return source && destination;
}

// The widest vector, in bytes, that divides both bases, all strides in use and the run: 16, 8, 4, 2 or 1.
HICACHE_DEVICE hicache_u32 vector_bytes(const Segment& segment) {
  hicache_u64 bits = segment.run_bytes | 16u;
  const SegmentSide* const sides[2] = {&segment.source, &segment.destination};
  for (int i = 0; i < 2; ++i) {
    bits |= sides[i]->base | static_cast<hicache_u64>(sides[i]->page_stride);
    if (sides[i]->page_size > 1) bits |= static_cast<hicache_u64>(sides[i]->slot_stride);
    if (segment.groups > 1) bits |= static_cast<hicache_u64>(sides[i]->group_stride);
  }
  return static_cast<hicache_u32>(bits & (~bits + 1));
}

#endif
