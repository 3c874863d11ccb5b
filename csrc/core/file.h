/* SPDX-License-Identifier: Apache-2.0 */
/* file.h: one volume file: find it safely, create it, read and write its metadata.
 *
 * Safety of the path (all refusals are sentences with the remedy):
 *   P1  the directory is resolved ("~", relative, symlinks); the final component is
 *       opened with O_NOFOLLOW and must be a regular file with one link, opened without
 *       blocking on a FIFO; a hard-linked file is accepted with a warning.
 *   P2  the directory and the file belong to us or root, and the directory is not
 *       writable by others unless sticky; unless allow_shared_directory.
 *   P3  network and FUSE file systems are refused unless allow_network_fs, ones that
 *       cannot reserve space unless allow_sparse; overlayfs is a warning.
 *   P4  a file without our magic, of another version, byte order or page size is never
 *       altered (CKV_E_FORMAT names found and expected), also not by RECREATE.
 *
 * Descriptors: `data_fd` reads and writes; it never owns a lock.  Locks are bytes far
 * past the end of the file, each owned by a description of its own (slot.h).
 */
#ifndef CKV_FILE_H
#define CKV_FILE_H

#include <pthread.h>

#include "geometry.h"
#include "os.h"

#define CKV_OPEN_LOCK_BYTE (UINT64_C(1) << 62)        /* while opening or rebuilding */
#define CKV_SLOT_LOCK_BYTE ((UINT64_C(1) << 62) + 64) /* + slot: held for life */

#define CKV_GATE_OFFSET (2u * CKV_PAGE_BYTES)
#define CKV_NOTE_OFFSET (3u * CKV_PAGE_BYTES)

#define CKV_LARGE_FAULT_BYTES UINT64_C(0x200000) /* a huge page (os.h, large_faults) */

enum { CKV_READ_ENDS = 8 }; /* readers in stored order that are told apart */

struct ckv_window {         /* a read-only mapping of one chunk of the data area */
    ckv_atomic_u64 address; /* 0 until first use; then kept until the file is closed */
    ckv_atomic_u64 pins;    /* views of this process inside */
    ckv_atomic_u64 touched_bytes; /* since its page tables were last dropped */
    ckv_atomic_u64 large; /* 1: a fault reads a huge page (os.h, large_faults) */
};

struct ckv_file {
    char *path;  /* resolved */
    int data_fd; /* -1 for a missing member */
    bool present;
    bool created; /* by this open */
    uint64_t device, inode;
    struct ckv_file_system file_system;
    struct ckv_geometry geometry;
    struct ckv_file_header header; /* as read; fields other than ids may be stale */
    ckv_atomic_u64 header_generation;
    ckv_atomic_u64 durable_header;  /* ckv_file_header_name() of one that surely is on
                                    * the medium, or 0 */
    const struct ckv_record *table; /* PROT_READ mapping, entry_count records */
    const void *head;               /* PROT_READ mapping of pages 0..3 */
    struct ckv_window *windows;     /* one per chunk of 1 GiB of the data area */
    uint32_t window_count;
    ckv_atomic_u64 lost_pages;   /* of head and table, replaced by zeros (guard.h) */
    ckv_atomic_u64 *window_note; /* set before the first ckv_file_data(): windows are
                                    guarded and count there; NULL: they are not */
    ckv_atomic_u64 direct_fd;    /* of ckv_file_direct(), + 1; 0: not asked for yet */
    ckv_atomic_u64 read_ends[CKV_READ_ENDS]; /* where first reads ended lately */
    ckv_atomic_u64 read_end_next;            /* which of them is replaced next */
    pthread_mutex_t header_lock; /* of the threads of this process in write_header */
    uint32_t first_entry;        /* number of its entry 0 in the set */
    uint32_t first_stripe;
    uint64_t first_granule;
};

/* What helps against this errno of a call on a file, "; do this", or "". */
const char *ckv_file_remedy(int os_errno);

/* Resolves a path as the user gave it ("~", relative); *resolved is malloc'd.  The
 * directory must exist; the file need not. */
enum ckv_status ckv_file_resolve(const char *path, char **resolved,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Opens (or with options->create makes, empty, O_EXCL) the file under P1..P3 and sets
 * path, data_fd, device, inode, file_system, present; clears every other member.  Reads
 * no content.  Returns CKV_MISS (with path set, present false) when it does not exist
 * and is not to be created.  After an error there is nothing to close. */
enum ckv_status ckv_file_open(const struct ckv_options *options, const char *resolved,
    struct ckv_file *file, struct ckv_error *error) CKV_MUST_CHECK;

/* Closes it again, and removes it if this open created it and nobody has come to use it;
 * for an open that fails before it has the open lock. */
void ckv_file_withdraw(struct ckv_file *file);

/* Takes the open lock through a short-lived description of the same inode; polls until
 * `deadline_ns` (monotonic); on timeout the message quotes the note of the holder.
 * *lock_fd is -1 and the result CKV_OK never together.  Checks after locking that the
 * path still leads to the same inode (else CKV_BUSY: the caller starts again).  On
 * success forks are blocked (slot.h): after closing *lock_fd, which ends the lock, the
 * caller calls ckv_slot_fork_unblock(). */
enum ckv_status ckv_file_lock_open(struct ckv_file *file, uint64_t deadline_ns,
    int *lock_fd, struct ckv_error *error) CKV_MUST_CHECK;

/* CKV_E_TIMEOUT, in words that quote the note of the process with the open lock. */
enum ckv_status ckv_file_fail_locked(const struct ckv_file *file,
    struct ckv_error *error);

/* True when the file has no content yet: up to four whole pages of zeros (a power cut
 * may leave a part of the first write), or a creation that was never finished.  That one
 * is recognised by a note that says "creating" in page 3 and no header that names a
 * region.  Zeros alone prove nothing where more follows: images of disks and optical
 * media begin with pages of them. */
enum ckv_status ckv_file_is_blank(const struct ckv_file *file, bool *blank,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Brings the name of the file to the medium: without this a power cut could take a file
 * that was synced. */
enum ckv_status ckv_file_sync_name(const struct ckv_file *file,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Allocates and lays out a blank file (space first, metadata zeroed, header last).  On
 * failure the file is removed again if this open created it, else left blank.  A file
 * that is not blank is laid out anew only if header.magic is ours, see
 * ckv_file_read_header().
 * Requires: the open lock, and that no process holds a slot. */
enum ckv_status ckv_file_format(struct ckv_file *file,
    const struct ckv_options *options, const struct ckv_geometry *geometry,
    const struct ckv_file_header *identity, struct ckv_error *error) CKV_MUST_CHECK;

/* CKV_E_NO_SPACE when the limit of this process does not let it write as far as the end
 * of the file: puts would evict blocks and then fail. */
enum ckv_status ckv_file_check_limit(const struct ckv_file *file, uint64_t file_bytes,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Removes the file again if this open created it; for an open that fails later on.
 * Requires: the open lock. */
void ckv_file_discard(struct ckv_file *file);

/* Reads the newer valid header copy into file->header and file->geometry (P4).  After
 * CKV_E_FORMAT header.magic is CKV_FORMAT_MAGIC exactly when this is a damaged volume
 * of this version, which may be laid out anew; otherwise 0. */
enum ckv_status ckv_file_read_header(struct ckv_file *file,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Writes file->header with the next generation into the older copy, after the newer one
 * is surely on the medium: of a header that was not, a power cut may leave a part, and
 * both copies would be lost at once.  Callers may race: only ids and layout are
 * authoritative from one writer (the opener); the others are monotone hints
 * (synced_sequence, which never goes back). */
enum ckv_status ckv_file_write_header(struct ckv_file *file,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Brings everything that was written before to the medium: 0 or -errno. */
int ckv_file_sync(struct ckv_file *file);

/* Whether the header that counts now, as the mapping of the head shows it, names the
 * shared region `nonce`.  True also when no copy of it can be believed. */
bool ckv_file_names_region(const struct ckv_file *file, uint64_t nonce);

/* Maps and guards head and table; allocates the window array. */
enum ckv_status ckv_file_map(struct ckv_file *file,
    struct ckv_error *error) CKV_MUST_CHECK;

/* The address of an extent of the data area, mapping its window at first use; NULL when
 * it cannot be mapped. */
const void *ckv_file_data(struct ckv_file *file, uint64_t data_offset);

/* Whether a fault in the mapping of an extent reads a huge page and no more; maps its
 * window at first use. */
bool ckv_file_large_faults(struct ckv_file *file, uint64_t data_offset);

/* A read-only description whose reads go around the page cache, opened at first use and
 * closed with the file; -1 when there is none.  After ckv_file_no_direct() there never
 * will be, though those who have it may go on. */
int ckv_file_direct(struct ckv_file *file);
void ckv_file_no_direct(struct ckv_file *file);
void ckv_file_close_direct(struct ckv_file *file);

/* Writes one record / only its zero seal. 0 or -errno. */
int ckv_file_write_record(const struct ckv_file *file, uint32_t local_entry,
    const struct ckv_record *record);
int ckv_file_strike_record(const struct ckv_file *file, uint32_t local_entry);

/* Error that write-back met since it was last asked for; 0 or -errno. */
int ckv_file_pending_error(const struct ckv_file *file);

/* Whether the folder that `path` lies in is one in which nobody else can exchange what we
 * open by name.  Requires: a slash in `path`. */
enum ckv_status ckv_file_check_directory(const struct ckv_options *options,
    const char *path, struct ckv_error *error) CKV_MUST_CHECK;

/* Whether content of this user is believed: it is root, we, or anybody is. */
bool ckv_file_trusted_owner(const struct ckv_options *options, uint32_t owner);

/* Whether the path still leads to the inode that we have open. */
bool ckv_file_attached(const struct ckv_file *file);

/* Describes this process in the note page (pid, command, what it does).  Does nothing to
 * a file that has no header of ours. */
void ckv_file_write_note(const struct ckv_file *file, const char *doing);

/* Unmaps everything and closes the descriptor. */
void ckv_file_close(struct ckv_file *file);

/* A description of the same inode for a lock, or a read-only one for a user; -errno. */
int ckv_file_reopen(const struct ckv_file *file, int flags);

#endif /* CKV_FILE_H */
