/* SPDX-License-Identifier: Apache-2.0 */
/* os_posix.h: what os_posix.c lends to the tables of os_linux.c and os_darwin.c.
 *
 * Nobody else includes it; the contract of each function is that of its member in os.h.
 */
#ifndef CKV_OS_POSIX_H
#define CKV_OS_POSIX_H

#include "os.h"

int ckv_posix_open_file(const char *path, int flags, mode_t mode);
int ckv_posix_close_file(int fd);
int ckv_posix_stat_file(int fd, struct stat *result);
int ckv_posix_stat_path(const char *path, struct stat *result);
int ckv_posix_lstat_path(const char *path, struct stat *result);
int ckv_posix_resolve_path(const char *path, char **resolved);
int ckv_posix_truncate_file(int fd, uint64_t length);
int ckv_posix_unlink_path(const char *path);
int ckv_posix_rename_path(const char *from, const char *to);
int ckv_posix_change_mode(int fd, mode_t mode);
int ckv_posix_change_owner(int fd, uint32_t user, uint32_t group);
ssize_t ckv_posix_read_at(int fd, const struct iovec *iov, int count, uint64_t offset);
ssize_t ckv_posix_write_at(int fd, const struct iovec *iov, int count, uint64_t offset);
int ckv_posix_map(void *hint, size_t length, int protection, int flags, int fd,
    uint64_t offset, void **result);
int ckv_posix_unmap(void *address, size_t length);
int ckv_posix_drop_pages(void *address, size_t length);
int ckv_posix_lock_memory(void *address, size_t length);
uint64_t ckv_posix_monotonic_ns(void);
uint64_t ckv_posix_realtime_ns(void);
void ckv_posix_sleep_ns(uint64_t duration_ns);
int64_t ckv_posix_process_id(void);
uint32_t ckv_posix_user_id(void);
int ckv_posix_file_size_limit(uint64_t *limit_bytes);

/* Byte locks by the given fcntl commands. */
int ckv_posix_set_lock(int fd, int command, short type, uint64_t byte);
int ckv_posix_lock_held(int fd, int command, uint64_t byte, uint64_t count);

#endif /* CKV_OS_POSIX_H */
