/* The segment plan: what one launch moves. Plain C without includes, read by nvcc, NVRTC and a host compiler alike.
 *
 * The same structures are in rust/hicache-sys/src/segment_plan.rs; sizes and offsets are asserted on both sides, and a
 * test compares them. A change of either raises SEGMENT_PLAN_ABI, so that an image made for another plan is refused.
 *
 * A plan is a list of segments. A segment moves items * groups runs of run_bytes bytes. On each of its two sides the run
 * of item i and group g begins at
 *
 *     base + page * page_stride + slot * slot_stride + g * group_stride
 *
 * where page and slot follow from the item by index_kind:
 *
 *     TOKEN     v = index[i]               page = v / page_size   slot = v % page_size   0 <= v < limit, in tokens
 *     PAGE      v = index[i / page_size]   page = v               slot = i % page_size   0 <= v < limit, in pages
 *     IDENTITY                             page = i / page_size   slot = i % page_size   no index
 *
 * A negative v is padding: the item is skipped. A v at or past the limit: the item is skipped and bit `segment` of *error
 * is set. Each side decides by itself; an item is skipped when either side skips it.
 *
 *         item            source                                destination
 *      0 1 2 3 4 5   index: 7 2            page_size 3       index: 21 22 23 6 7 8      page_size 3
 *      `-----v-----'  PAGE: page 7 slots 0 1 2                TOKEN: page 7 slots 0 1 2
 *         items             page 2 slots 0 1 2                       page 2 slots 0 1 2
 */
#ifndef HICACHE_SEGMENT_PLAN_H
#define HICACHE_SEGMENT_PLAN_H

#define SEGMENT_PLAN_ABI 1u
#define SEGMENT_PLAN_MAX_SEGMENTS 16

#define SEGMENT_INDEX_TOKEN 0u
#define SEGMENT_INDEX_PAGE 1u
#define SEGMENT_INDEX_IDENTITY 2u

typedef unsigned char hicache_u8;
typedef unsigned short hicache_u16;
typedef unsigned int hicache_u32;
typedef int hicache_i32;
typedef unsigned long long hicache_u64;
typedef long long hicache_i64;

/* One side of a segment; addresses are absolute, strides in bytes and of either sign. */
typedef struct SegmentSide {
  hicache_u64 base;         /* address of the run of page 0, slot 0, group 0 */
  hicache_i64 page_stride;  /* from one page to the next */
  hicache_i64 slot_stride;  /* from one slot of a page to the next */
  hicache_i64 group_stride; /* from one group to the next */
  hicache_u64 index;        /* address of the index vector, 0 for IDENTITY */
  hicache_u32 limit;        /* indices are below it, at most 2^31; tokens for TOKEN, pages for PAGE */
  hicache_u32 page_size;    /* slots of a page, 1 to 2^31 - 1 */
  hicache_u32 page_magic;   /* n / page_size = mulhi(2 * n, page_magic) >> page_shift, for n < 2^31 */
  hicache_u32 page_shift;
  hicache_u32 index_kind;  /* SEGMENT_INDEX_* */
  hicache_u32 index_bytes; /* 4 or 8: signed integers of that size */
} SegmentSide;

typedef struct Segment {
  SegmentSide source;
  SegmentSide destination;
  hicache_u32 items;      /* items * groups < 2^31 */
  hicache_u32 groups;     /* runs of an item, at least 1 */
  hicache_u32 run_bytes;  /* contiguous on both sides, 1 to 2^31 - 1 */
  hicache_u32 lanes_log2; /* 2^lanes_log2 threads share a run, 0 to 5 */
} Segment;

typedef struct SegmentPlan {
  hicache_u32 abi;      /* SEGMENT_PLAN_ABI */
  hicache_u32 segments; /* used entries of `segment` */
  hicache_u64 error;    /* address of a u32 that the device can write, or 0 */
  Segment segment[SEGMENT_PLAN_MAX_SEGMENTS];
} SegmentPlan;

#if defined(__cplusplus)
#define HICACHE_STATIC_ASSERT(condition) static_assert(condition, #condition)
#else
#define HICACHE_STATIC_ASSERT(condition) _Static_assert(condition, #condition)
#endif
HICACHE_STATIC_ASSERT(sizeof(hicache_u32) == 4 && sizeof(hicache_u64) == 8);
HICACHE_STATIC_ASSERT(sizeof(SegmentSide) == 64);
HICACHE_STATIC_ASSERT(sizeof(Segment) == 144);
HICACHE_STATIC_ASSERT(sizeof(SegmentPlan) == 2320);

#endif
