/* SPDX-License-Identifier: Apache-2.0 */
/* Replaces calls of the C library (LD_PRELOAD) as CKV_SHIM says:
 *
 *   fallocate=<errno>       every fallocate fails
 *   mmap=<errno>            every shared mapping of a file fails
 *   write=<errno>:<n>       the n-th pwrite or pwritev of 64 KiB or more fails
 *   hang=<n>:<fd>           the n-th of them never returns; a byte is written to fd before
 *   fsync=<errno>           every fsync and fdatasync fails
 */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int
failure(const char *call, long *count)
{
    const char *plan = getenv("CKV_SHIM");
    const size_t length = strlen(call);
    *count = 0;
    if (plan == NULL || strncmp(plan, call, length) != 0 || plan[length] != '=') {
        return 0;
    }
    char *end = NULL;
    const int code = (int)strtol(plan + length + 1, &end, 10);
    if (*end == ':') {
        *count = strtol(end + 1, NULL, 10);
    }
    return code;
}

#define NATIVE(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int fallocate(int fd, int mode, off_t offset, off_t length);

int
fallocate(int fd, int mode, off_t offset, off_t length)
{
    long ignored;
    const int code = failure("fallocate", &ignored);
    if (code != 0) {
        errno = code;
        return -1;
    }
    return NATIVE(fallocate)(fd, mode, offset, length);
}

void *
mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    long ignored;
    const int code = failure("mmap", &ignored);
    if (code != 0 && fd >= 0 && (flags & MAP_SHARED) != 0) {
        errno = code;
        return MAP_FAILED;
    }
    return NATIVE(mmap)(address, length, protection, flags, fd, offset);
}

/* Whether this write is the one that fails; sets errno. */
static int
write_fails(size_t length)
{
    static long seen;
    long wanted;
    const int hanging = failure("hang", &wanted);
    if (hanging != 0 && length >= 65536 && ++seen == hanging) {
        if (write((int)wanted, ".", 1) != 1) {
            _exit(99);
        }
        for (;;) {
            pause();
        }
    }
    const int code = failure("write", &wanted);
    if (code != 0 && length >= 65536 && ++seen == wanted) {
        errno = code;
        return 1;
    }
    return 0;
}

ssize_t
pwrite(int fd, const void *data, size_t length, off_t offset)
{
    return write_fails(length) ? -1 : NATIVE(pwrite)(fd, data, length, offset);
}

ssize_t
pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    size_t length = 0;
    for (int i = 0; i < count; i++) {
        length += iov[i].iov_len;
    }
    return write_fails(length) ? -1 : NATIVE(pwritev)(fd, iov, count, offset);
}

int
fsync(int fd)
{
    long ignored;
    const int code = failure("fsync", &ignored);
    if (code != 0) {
        errno = code;
        return -1;
    }
    return NATIVE(fsync)(fd);
}

int
fdatasync(int fd)
{
    long ignored;
    const int code = failure("fsync", &ignored);
    if (code != 0) {
        errno = code;
        return -1;
    }
    return NATIVE(fdatasync)(fd);
}
