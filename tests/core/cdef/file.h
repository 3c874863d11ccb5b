/* SPDX-License-Identifier: Apache-2.0 */
/* file.h */

#define CKV_OPEN_LOCK_BYTE ...
#define CKV_SLOT_LOCK_BYTE ...
#define CKV_GATE_OFFSET    ...
#define CKV_NOTE_OFFSET    ...

struct ckv_window {
    ckv_atomic_u64 address;
    ckv_atomic_u64 pins;
    ckv_atomic_u64 touched_bytes;
    ckv_atomic_u64 large;
};

struct ckv_file {
    char *path;
    int data_fd;
    bool present;
    bool created;
    uint64_t device, inode;
    struct ckv_file_system file_system;
    struct ckv_geometry geometry;
    struct ckv_file_header header;
    ckv_atomic_u64 header_generation;
    ckv_atomic_u64 durable_header;
    const struct ckv_record *table;
    const void *head;
    struct ckv_window *windows;
    uint32_t window_count;
    ckv_atomic_u64 lost_pages;
    ckv_atomic_u64 *window_note;
    ckv_atomic_u64 direct_fd;
    ckv_atomic_u64 read_ends[8];
    ...;
};

enum ckv_status ckv_file_resolve(
    const char *path, char **resolved, struct ckv_error *error);
enum ckv_status ckv_file_open(const struct ckv_options *options, const char *resolved,
    struct ckv_file *file, struct ckv_error *error);
enum ckv_status ckv_file_lock_open(
    struct ckv_file *file, uint64_t deadline_ns, int *lock_fd, struct ckv_error *error);
enum ckv_status ckv_file_is_blank(
    const struct ckv_file *file, bool *blank, struct ckv_error *error);
enum ckv_status ckv_file_format(struct ckv_file *file, const struct ckv_options *options,
    const struct ckv_geometry *geometry, const struct ckv_file_header *identity,
    struct ckv_error *error);
void ckv_file_discard(struct ckv_file *file);
enum ckv_status ckv_file_read_header(struct ckv_file *file, struct ckv_error *error);
enum ckv_status ckv_file_write_header(struct ckv_file *file, struct ckv_error *error);
int ckv_file_sync(struct ckv_file *file);
enum ckv_status ckv_file_map(struct ckv_file *file, struct ckv_error *error);
const void *ckv_file_data(struct ckv_file *file, uint64_t data_offset);
bool ckv_file_large_faults(struct ckv_file *file, uint64_t data_offset);
int ckv_file_direct(struct ckv_file *file);
void ckv_file_no_direct(struct ckv_file *file);
int ckv_file_write_record(
    const struct ckv_file *file, uint32_t local_entry, const struct ckv_record *record);
int ckv_file_strike_record(const struct ckv_file *file, uint32_t local_entry);
int ckv_file_pending_error(const struct ckv_file *file);
bool ckv_file_attached(const struct ckv_file *file);
void ckv_file_write_note(const struct ckv_file *file, const char *doing);
void ckv_file_close(struct ckv_file *file);
int ckv_file_reopen(const struct ckv_file *file, int flags);

/* Of slot.h: what follows the end of an open lock. */
void ckv_slot_fork_unblock(void);
