/* What the headers take from the system, and atomics.h. */

typedef uint64_t ckv_atomic_u64;
typedef uint32_t ckv_atomic_u32;
typedef uint8_t ckv_atomic_u8;

typedef int... mode_t;

struct iovec {
    void *iov_base;
    size_t iov_len;
};

struct stat {
    int64_t st_size;
    ...;
};

void free(void *memory);
