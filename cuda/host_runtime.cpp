// What stands behind host_shim.h: the memory lent by a test, what was seen, and the order of threads. Apart from the
// kernels, so that it is compiled once for many versions of their source.
#include "host_shim.h"

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

}  // namespace

void host_launch(uint32_t grid, uint32_t block, uint64_t seed, void (*body)(const void*), const void* arguments) {
  std::vector<uint32_t> order(static_cast<size_t>(grid) * block);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(seed);
  if (seed != 0) std::shuffle(order.begin(), order.end(), random);
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  for (const uint32_t thread : order) {
    blockIdx = {thread / block, 0, 0};
    threadIdx = {thread % block, 0, 0};
    body(arguments);
  }
}

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
}
