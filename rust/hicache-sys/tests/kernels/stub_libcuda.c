/* A driver that does nothing and writes down every call: one line each, to the file that STUB_LOG names.
 *
 * STUB_VERSION  CUDA that it claims, 12090 unless set; entries newer than it stay unused.
 * STUB_REFUSE   images that begin with one of these letters get CUDA_ERROR_NO_BINARY_FOR_GPU.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "segment_plan.h"

static void note(const char *format, ...) {
  FILE *log = fopen(getenv("STUB_LOG"), "a");
  va_list list;
  va_start(list, format);
  vfprintf(log, format, list);
  va_end(list);
  fputc('\n', log);
  fclose(log);
}

int cuInit(unsigned flags) { return (int)flags; }
int cuDriverGetVersion(int *version) {
  const char *text = getenv("STUB_VERSION");
  *version = text ? atoi(text) : 12090;
  return 0;
}
/* Asked for by NVRTC, which takes no for an answer but not its absence. */
int cuGetExportTable(const void **table, const void *id) { return table && id ? 500 : 1; }
int cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  const char *capability = getenv("STUB_CAPABILITY");
  const int number = capability ? atoi(capability) : 90;
  *value = attribute == 75 ? number / 10 : attribute == 76 ? number % 10 : attribute == 97 ? 232448 : device;
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = NULL;
  return 0;
}
int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  note("push %p", context);
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  *context = NULL;
  note("pop");
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  *context = (void *)0xc0;
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }

static int load(const char *call, void **handle, const char *image) {
  const char *refuse = getenv("STUB_REFUSE");
  const int refused = refuse && strchr(refuse, image[0]) != NULL;
  note("%s %.8s%s%s", call, image, refused ? " refused" : "", (uintptr_t)image % 8 ? " misaligned" : "");
  *handle = (void *)0x11b;
  return refused ? 209 : 0;
}
int cuLibraryLoadData(void **handle, const void *image, int *a, void **b, unsigned c, int *d, void **e, unsigned f) {
  return a || b || c || d || e || f ? 1 : load("library", handle, image);
}
int cuModuleLoadData(void **handle, const void *image) { return load("module", handle, image); }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
  *kernel = strdup(name);
  return library == (void *)0x11b ? 0 : 1;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  return cuLibraryGetKernel(function, module, name);
}
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  note("attribute %s %d %d device %d", (char *)kernel, attribute, value, device);
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  note("attribute %s %d %d", (char *)function, attribute, value);
  return 0;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **params, void **extra) {
  char what[256];
  if (extra != NULL) return 1;
  if (strcmp(function, "hicache_index_check") == 0) {
    snprintf(what, sizeof what, "%#llx %u %u %u %#llx %#llx", *(unsigned long long *)params[0],
             *(unsigned *)params[1], *(unsigned *)params[2], *(unsigned *)params[3],
             *(unsigned long long *)params[4], *(unsigned long long *)params[5]);
  } else {
    const SegmentPlan *plan = params[0];
    int len = snprintf(what, sizeof what, "abi %u segments %u error %#llx last run %u lanes %u", plan->abi,
                       plan->segments, plan->error, plan->segment[plan->segments - 1].run_bytes,
                       1u << plan->segment[plan->segments - 1].lanes_log2);
    if (strcmp(function, "hicache_segment_copy_bulk") == 0)
      snprintf(what + len, sizeof what - len, " shape %u %u", ((unsigned *)params[1])[0], ((unsigned *)params[1])[1]);
  }
  note("launch %s grid %u %u %u block %u %u %u shared %u stream %#lx: %s", (char *)function, gx, gy, gz, bx, by, bz,
       shared, (unsigned long)stream, what);
  return 0;
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  note("copy %#lx %#lx %zu stream %#lx", to, from, bytes, (unsigned long)stream);
  return 0;
}
int cuMemcpyBatchAsync(const uint64_t *to, const uint64_t *from, const size_t *bytes, size_t count, const int *order,
                       const size_t *first, size_t attributes, size_t *failed, void *stream) {
  (void)failed;
  note("batch %zu order %d first %#lx %#lx %zu stream %#lx", count, order[0], to[0], from[0], bytes[0],
       (unsigned long)stream);
  return attributes == 1 && first[0] == 0 ? 0 : 1;
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  note("wait stream %#lx event %#lx", (unsigned long)stream, (unsigned long)event);
  return (int)flags;
}
int cuStreamIsCapturing(void *stream, int *status) {
  *status = stream == (void *)0xcab;
  return 0;
}
int cuEventCreate(void **event, unsigned flags) {
  static uintptr_t next = 0xe0;
  *event = (void *)next++;
  return flags == 2 ? 0 : 1;
}
int cuEventRecord(void *event, void *stream) {
  note("record event %#lx stream %#lx", (unsigned long)event, (unsigned long)stream);
  return 0;
}
/* Nothing is done before there is a file named as the log with ".done" behind it. */
int cuEventQuery(void *event) {
  char name[4096];
  snprintf(name, sizeof name, "%s.done", getenv("STUB_LOG"));
  FILE *done = fopen(name, "r");
  (void)event;
  if (done == NULL) return 600;
  fclose(done);
  return 0;
}
int cuEventSynchronize(void *event) {
  note("synchronize event %#lx", (unsigned long)event);
  return 0;
}
int cuStreamSynchronize(void *stream) {
  note("synchronize %#lx", (unsigned long)stream);
  return 0;
}
int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned flags) {
  *address = (uint64_t)host + 0x1000000;
  return (int)flags;
}
int cuEventDestroy_v2(void *event) {
  (void)event;
  return 0;
}
