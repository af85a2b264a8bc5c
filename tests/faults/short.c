/* Preloaded into a process: reads and writes of files under SHORT_PATH are cut to SHORT_BYTES, and
   every SHORT_EINTR-th call is interrupted before it does anything. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static int ours(int fd) {
    const char *root = getenv("SHORT_PATH");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (!root || size < 0) return 0;
    path[size] = 0;
    return strncmp(path, root, strlen(root)) == 0;
}

static int interrupted(void) {
    static long calls;
    long every = number("SHORT_EINTR");
    if (!every || __sync_add_and_fetch(&calls, 1) % every) return 0;
    errno = EINTR;
    return 1;
}

static size_t cut(size_t size) {
    size_t most = (size_t)number("SHORT_BYTES");
    return most && size > most ? most : size;
}

#define REAL(name)                    \
    static __typeof__(&name) real;    \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define PLAIN(name, buffer)                                         \
    ssize_t name(int fd, buffer data, size_t size) {                \
        REAL(name);              \
        if (!ours(fd)) return real(fd, data, size);                 \
        return interrupted() ? -1 : real(fd, data, cut(size));      \
    }

#define VECTOR(name)                                                                  \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t at) {          \
        REAL(name);            \
        if (!ours(fd) || !count) return real(fd, parts, count, at);                   \
        struct iovec first = {parts[0].iov_base, cut(parts[0].iov_len)};              \
        return interrupted() ? -1 : real(fd, &first, 1, at);                          \
    }

#define FLAGGED(name)                                                                 \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t at, int how) { \
        REAL(name);       \
        if (!ours(fd) || !count) return real(fd, parts, count, at, how);              \
        struct iovec first = {parts[0].iov_base, cut(parts[0].iov_len)};              \
        return interrupted() ? -1 : real(fd, &first, 1, at, how);                     \
    }

PLAIN(read, void *)
PLAIN(write, const void *)
VECTOR(preadv)
VECTOR(preadv64)
VECTOR(pwritev)
VECTOR(pwritev64)
FLAGGED(preadv2)
FLAGGED(preadv64v2)
FLAGGED(pwritev2)
FLAGGED(pwritev64v2)

int fsync(int fd) {
    REAL(fsync);
    return ours(fd) && interrupted() ? -1 : real(fd);
}

int fallocate(int fd, int mode, off_t at, off_t size) {
    REAL(fallocate);
    return ours(fd) && interrupted() ? -1 : real(fd, mode, at, size);
}
