/* A file layer that holds one read, for a store that is tested as it is shipped.
 *
 *     cc -O2 -shared -fPIC -o slow_read.so slow_read.c -ldl
 *     LD_PRELOAD=./slow_read.so SLOW_READ_CONTROL=/some/path python ...
 *
 * While SLOW_READ_CONTROL does not exist, everything is as without it. When somebody makes that file, the next read
 * that fits takes it away, makes SLOW_READ_CONTROL.held, and is held: for SLOW_READ_SECONDS (20), or until there is a
 * file SLOW_READ_CONTROL.go. Then it is carried out, into the memory that it was given, and the .held file goes. Each
 * making of the file holds one read.
 *
 * A read fits when the file's path ends in SLOW_READ_SUFFIX (".seg"), and it asks for SLOW_READ_MIN_BYTES (1) or more.
 * With SLOW_READ_WRITES set, writes are held instead.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

static const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : otherwise;
}

static int ends_in(const char *text, const char *end)
{
    size_t length = strlen(text), tail = strlen(end);
    return length >= tail && strcmp(text + length - tail, end) == 0;
}

/* Whether the descriptor's file is one of those that are slow. */
static int fits(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return ends_in(path, setting("SLOW_READ_SUFFIX", ".seg"));
}

static void make(const char *path)
{
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (fd >= 0)
        close(fd);
}

static void hold(const char *control)
{
    char held[4096], go[4096];
    snprintf(held, sizeof held, "%s.held", control);
    snprintf(go, sizeof go, "%s.go", control);
    struct timespec start, now, step = {0, 10 * 1000 * 1000};
    double seconds = atof(setting("SLOW_READ_SECONDS", "20"));
    make(held);
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        nanosleep(&step, NULL);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (access(go, F_OK) != 0 &&
             (double)(now.tv_sec - start.tv_sec) + (double)(now.tv_nsec - start.tv_nsec) / 1e9 < seconds);
    unlink(held);
}

static void look(int fd, size_t bytes, int is_write)
{
    const char *control = getenv("SLOW_READ_CONTROL");
    if (control == NULL || access(control, F_OK) != 0)
        return;
    if ((getenv("SLOW_READ_WRITES") != NULL) != is_write)
        return;
    if (bytes < (size_t)atoll(setting("SLOW_READ_MIN_BYTES", "1")) || !fits(fd))
        return;
    /* Of several at once, one takes the file away. */
    if (unlink(control) == 0)
        hold(control);
}

static size_t total(const struct iovec *vectors, int count)
{
    size_t bytes = 0;
    for (int index = 0; index < count; index++)
        bytes += vectors[index].iov_len;
    return bytes;
}

/* The libc's own function of this name. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define PLAIN(name, pointer, is_write)                                                  \
    ssize_t name(int fd, pointer buffer, size_t bytes, off_t offset)                    \
    {                                                                                   \
        look(fd, bytes, is_write);                                                      \
        return NEXT(name)(fd, buffer, bytes, offset);                                   \
    }

#define VECTORED(name, is_write)                                                        \
    ssize_t name(int fd, const struct iovec *vectors, int count, off_t offset)          \
    {                                                                                   \
        look(fd, total(vectors, count), is_write);                                      \
        return NEXT(name)(fd, vectors, count, offset);                                  \
    }

#define WITH_FLAGS(name, is_write)                                                      \
    ssize_t name(int fd, const struct iovec *vectors, int count, off_t offset, int flags) \
    {                                                                                   \
        look(fd, total(vectors, count), is_write);                                      \
        return NEXT(name)(fd, vectors, count, offset, flags);                           \
    }

PLAIN(pread, void *, 0)
PLAIN(pread64, void *, 0)
PLAIN(pwrite, const void *, 1)
PLAIN(pwrite64, const void *, 1)
VECTORED(preadv, 0)
VECTORED(preadv64, 0)
VECTORED(pwritev, 1)
VECTORED(pwritev64, 1)
WITH_FLAGS(preadv2, 0)
WITH_FLAGS(preadv64v2, 0)
WITH_FLAGS(pwritev2, 1)
WITH_FLAGS(pwritev64v2, 1)
