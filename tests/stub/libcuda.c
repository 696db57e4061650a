/* A CUDA driver that is none, to test what is asked of one, and when.
 *
 *     cc -O1 -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda.c
 *     STUB_LOG=/some/path LD_LIBRARY_PATH=. python ...
 *
 * Each call is a line of STUB_LOG: its name, and for host memory the bytes and whether the range is mapped then.
 *
 * STUB_INIT          what cuInit returns, such as 100 for no device
 * STUB_REFUSE        number of the registration, from 1, that is refused as out of memory
 * STUB_REFUSE_UNDO   number of the unregistration, from 1, that is refused as an illegal address
 * stub_end()         from now on every call is refused as DEINITIALIZED, as when the process ends
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEINITIALIZED = 4, ILLEGAL_ADDRESS = 700, NOT_REGISTERED = 713 };

enum { MOST = 1024 };
static struct {
    uintptr_t base;
    size_t len;
} registered[MOST];
static int registrations, undone, is_ready, is_over;
static int context;  /* its address is the handle */

static int number(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static int is_mapped(uintptr_t base, size_t len)
{
    static unsigned char pages[1 << 20];
    return len / 4096 < sizeof pages && mincore((void *)base, len, pages) == 0;
}

static void say(const char *what, uintptr_t base, size_t len)
{
    const char *path = getenv("STUB_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log)
        return;
    if (base)
        fprintf(log, "%s %zu %s\n", what, len, is_mapped(base, len) ? "mapped" : "unmapped");
    else
        fprintf(log, "%s\n", what);
    fclose(log);
}

#define ASKED(name)              \
    do {                         \
        say(name, 0, 0);         \
        if (is_over)             \
            return DEINITIALIZED; \
        if (!is_ready)           \
            return NOT_INITIALIZED; \
    } while (0)

void stub_end(void)
{
    is_over = 1;
}

int cuInit(unsigned flags)
{
    int answer = number("STUB_INIT");
    say("cuInit", 0, 0);
    is_ready = answer == 0;
    return answer;
}

int cuDriverGetVersion(int *version)
{
    *version = 12080;
    return 0;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE"
        : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
        : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return *name ? 0 : 1;
}

int cuDeviceGetCount(int *count)
{
    *count = 1;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}

int cuCtxGetCurrent(void **current)
{
    *current = NULL;
    return is_over ? DEINITIALIZED : 0;
}

int cuDevicePrimaryCtxRetain(void **retained, int device)
{
    ASKED("retain");
    *retained = &context;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    ASKED("release");
    return 0;
}

int cuCtxPushCurrent_v2(void *pushed)
{
    return is_over ? DEINITIALIZED : 0;
}

int cuCtxPopCurrent_v2(void **popped)
{
    *popped = &context;
    return is_over ? DEINITIALIZED : 0;
}

int cuMemHostRegister_v2(void *base, size_t len, unsigned flags)
{
    if (is_over || !is_ready)
        return DEINITIALIZED;
    say("register", (uintptr_t)base, len);
    if (++registrations == number("STUB_REFUSE"))
        return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++) {
        if (!registered[i].base) {
            registered[i].base = (uintptr_t)base;
            registered[i].len = len;
            return 0;
        }
    }
    return OUT_OF_MEMORY;
}

int cuMemHostUnregister(void *base)
{
    if (is_over) {
        say("unregister after the end", 0, 0);
        return DEINITIALIZED;
    }
    for (int i = 0; i < MOST; i++) {
        if (registered[i].base == (uintptr_t)base) {
            say("unregister", registered[i].base, registered[i].len);
            if (++undone == number("STUB_REFUSE_UNDO"))
                return ILLEGAL_ADDRESS;
            registered[i].base = 0;
            return 0;
        }
    }
    say("unregister of what is not registered", 0, 0);
    return NOT_REGISTERED;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *base, unsigned flags)
{
    *address = (uintptr_t)base + (1ull << 40);  /* another number than the host's, as it may be */
    return 0;
}
