/* SPDX-License-Identifier: Apache-2.0 */
/* os.h */

enum ckv_file_system_kind {
    CKV_FS_LOCAL,
    CKV_FS_MEMORY,
    CKV_FS_OVERLAY,
    CKV_FS_NETWORK,
    CKV_FS_FUSE,
    CKV_FS_COW,
    CKV_FS_UNKNOWN,
    ...
};

struct ckv_file_system {
    enum ckv_file_system_kind kind;
    char name[32];
    uint64_t free_bytes;
    ...;
};

enum ckv_advice { CKV_ADVICE_WILL_NEED, CKV_ADVICE_DONT_NEED, CKV_ADVICE_RANDOM, ... };

struct ckv_cached {
    uint64_t pages;
    uint64_t dirty_pages;
    uint64_t evicted_pages;
    uint64_t recent_pages;
};

extern const int ckv_os_direct_flag;

struct ckv_os {
    int (*open_file)(const char *path, int flags, mode_t mode);
    int (*close_file)(int fd);
    int (*stat_file)(int fd, struct stat *result);
    int (*stat_path)(const char *path, struct stat *result);
    int (*lstat_path)(const char *path, struct stat *result);
    int (*file_system)(int fd, struct ckv_file_system *result);
    int (*set_no_cow)(int fd);
    int (*truncate_file)(int fd, uint64_t length);
    int (*allocate)(int fd, uint64_t offset, uint64_t length);
    int (*unlink_path)(const char *path);
    int (*rename_path)(const char *from, const char *to);
    int (*change_mode)(int fd, mode_t mode);
    int (*change_owner)(int fd, uint32_t user, uint32_t group);
    ssize_t (*read_at)(int fd, const struct iovec *iov, int count, uint64_t offset);
    ssize_t (*write_at)(int fd, const struct iovec *iov, int count, uint64_t offset);
    int (*sync_file)(int fd);
    int (*sync_range)(int fd, void *mapped, uint64_t offset, uint64_t length);
    int (*start_write_back)(int fd, uint64_t offset, uint64_t length);
    int (*pending_error)(int fd, uint64_t offset, uint64_t length);
    int (*advise_file)(int fd, uint64_t offset, uint64_t length, enum ckv_advice advice);
    int (*cached)(int fd, uint64_t offset, uint64_t length, struct ckv_cached *result);
    int (*lock_byte)(int fd, uint64_t byte);
    int (*unlock_byte)(int fd, uint64_t byte);
    int (*byte_held)(int fd, uint64_t byte, uint64_t count);
    int (*map)(void *hint, size_t length, int protection, int flags, int fd,
        uint64_t offset, void **result);
    int (*unmap)(void *address, size_t length);
    int (*populate_read)(void *address, size_t length);
    int (*populate_write)(void *address, size_t length);
    int (*large_faults)(void *address, size_t length);
    int (*drop_pages)(void *address, size_t length);
    int (*make_huge)(void *address, size_t length);
    int (*dont_fork)(void *address, size_t length);
    int (*wipe_on_fork)(void *address, size_t length);
    int (*lock_memory)(void *address, size_t length);
    uint64_t (*monotonic_ns)(void);
    uint64_t (*realtime_ns)(void);
    void (*sleep_ns)(uint64_t duration_ns);
    int (*random_bytes)(void *target, size_t length);
    int64_t (*process_id)(void);
    uint32_t (*user_id)(void);
    int (*file_size_limit)(uint64_t *limit_bytes);
    const char *(*program_name)(void);
    int (*resolve_path)(const char *path, char **resolved);
    ...;
};

extern struct ckv_os ckv_os;
extern const struct ckv_os ckv_os_native;

int ckv_os_read_all(int fd, void *target, size_t length, uint64_t offset);
int ckv_os_write_all(int fd, const void *source, size_t length, uint64_t offset);
int ckv_os_readv_all(int fd, struct iovec *iov, int count, uint64_t offset);
int ckv_os_writev_all(int fd, struct iovec *iov, int count, uint64_t offset);
int ckv_os_open(const char *path, int flags, mode_t mode);
