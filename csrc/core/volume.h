/* SPDX-License-Identifier: Apache-2.0 */
/* volume.h: one set of volume files as this process has it open, and its shared region.
 *
 * One object per set and process, however many handles (cache.h).  It lives until the
 * last handle is closed and the last lease is released.
 *
 *   V1  In read-write mode the process owns slot `slot` with incarnation `incarnation` as
 *       long as the object lives (slot.h).
 *   V2  `pins[e]` is private to the process; bit `slot` of masks[e] is set exactly while
 *       its count is above 0 (pin.h).
 *   V3  Entry numbers run over all files of the set; file f has
 *       [files[f].first_entry, + entry_count).
 */
#ifndef CKV_VOLUME_H
#define CKV_VOLUME_H

#include <pthread.h>

#include "admission.h"
#include "file.h"
#include "hit_density.h"

struct ckv_region { /* the shared region, mapped */
    void *base;
    uint64_t bytes;
    struct ckv_region_layout layout;
    char *path;   /* NULL for a private one (reading alone) */
    int fd;       /* -1, but between ckv_region_create() and ckv_region_publish() */
    bool guarded; /* registered with guard.h */
    uint64_t device, inode;
    ckv_atomic_u64 lost_pages; /* replaced by zeros by the SIGBUS handler */
    struct ckv_region_header *header;
    struct ckv_slot *slots;
    struct ckv_namespace *namespaces;
    struct ckv_shared_path *paths;
    struct ckv_stripe *stripes;
    struct ckv_hint *hints;
    struct ckv_shared_event *events;
    struct ckv_bucket *buckets;
    ckv_atomic_u64 *states;
    ckv_atomic_u64 *masks;
    struct ckv_place *places;
    ckv_atomic_u32 *marks;
    ckv_atomic_u32 *links;
    ckv_atomic_u32 *page_map;
    ckv_atomic_u8 *heats;
    ckv_atomic_u8 *owners;
    struct ckv_admission_memory admission;
    ckv_atomic_u64 *chains; /* this and what follows: NULL unless eviction="prefix" */
    ckv_atomic_u64 *lives;
    ckv_atomic_u64 *leaves;
    struct ckv_density density;
};

struct ckv_bounce_pool;
struct ckv_io_pool;
struct ckv_write_behind;
struct ckv_lease;

struct ckv_volume {
    uint64_t magic;
    ckv_atomic_u64 references; /* handles + leases */
    struct ckv_volume *next;   /* list of the volumes of this process (cache.c) */
    uint8_t set_id[16];
    uint64_t hash_key; /* of the index; secret, and the same in each life of the set */

    struct ckv_file files[CKV_PATHS_MAX];
    uint32_t file_count;
    struct ckv_region region;
    enum ckv_mode mode;
    bool provisional;    /* a reader alone, while somebody else was opening the set */
    uint64_t nonce_seen; /* region_nonce in the headers when this was opened */
    ckv_atomic_u64 private_counters[64]; /* when reading: no slot to count in */

    uint32_t slot;
    uint32_t incarnation;
    uint64_t owner_word;               /* ckv_owner_word(slot, incarnation) */
    void *anchors[CKV_PATHS_MAX];      /* mappings that hold the slot's byte locks */
    const ckv_atomic_u64 *fork_canary; /* 1; reads 0 in a forked child */
    ckv_atomic_u64 *counters;          /* of the slot (or private when reading) */
    uint64_t counters_at_open[64];

    ckv_atomic_u64 *pins; /* private word of each entry (pin.h) */
    pthread_mutex_t leases_lock;
    struct ckv_lease *oldest_lease, *newest_lease; /* in order of creation */
    ckv_atomic_u32 last_stripe; /* that took a put of this process (stripe.c) */
    ckv_atomic_u64 tick; /* seconds of the maintenance thread; lets a pin have an age */
    ckv_atomic_u64 moved_bytes;   /* into the page cache, by this process (mapped.h) */
    ckv_atomic_u64 crowded_reads; /* of blocks that found no room there (direct.c) */

    uint64_t
        payload_max_bytes; /* over all present files: the largest that fits in one */
    struct ckv_write_behind *behind; /* NULL: write-back is left to the kernel */
    enum ckv_admission admission;    /* of this process; always when reading */
    enum ckv_eviction eviction; /* of the region, whatever this process asked for */
    bool sigbus_guard;
    uint32_t sync_interval_ms;
    uint64_t page_table_budget_bytes;
    ckv_atomic_u64 media_errors;         /* pages of views that the guard replaced */
    ckv_atomic_u64 media_errors_counted; /* of them, in the statistics already */
    ckv_atomic_u64 touched_bytes;        /* of all windows (page table budget) */

    struct ckv_io_pool *pool;
    struct ckv_bounce_pool *bounces; /* NULL when reading: no direct reads */
    pthread_t maintenance;
    bool maintenance_runs;
    pthread_mutex_t maintenance_lock;
    pthread_cond_t maintenance_wake;
    bool maintenance_stop;
};

#define CKV_VOLUME_MAGIC UINT64_C(0x564c4d31a5a5f00d)

static inline void
ckv_bump(struct ckv_volume *volume, enum ckv_counter counter, uint64_t amount)
{
    ckv_add_relaxed_u64(&volume->counters[counter], amount);
}

/* Notes that bytes came into the page cache, and so drove out others (mapped.c, X4). */
static inline void
ckv_volume_moved(struct ckv_volume *volume, uint64_t bytes)
{
    ckv_add_relaxed_u64(&volume->moved_bytes, bytes);
}

static inline bool
ckv_volume_forked(const struct ckv_volume *volume)
{
    return ckv_load_relaxed_u64(volume->fork_canary) == 0;
}

/* The file that an entry belongs to, or NULL when `entry` is out of range. */
static inline struct ckv_file *
ckv_volume_file_of(struct ckv_volume *volume, uint32_t entry)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (entry - file->first_entry < file->geometry.entry_count) {
            return file;
        }
    }
    return NULL;
}

static inline uint32_t
ckv_volume_file_index(const struct ckv_volume *volume, const struct ckv_file *file)
{
    return (uint32_t)(file - volume->files);
}

static inline bool
ckv_volume_file_usable(struct ckv_volume *volume, const struct ckv_file *file)
{
    /* Zeros in the place of a lost page of the region could hide the pins of others. */
    return file->present && ckv_load_relaxed_u64(&volume->region.lost_pages) == 0 &&
           ckv_load_acquire_u32(&volume->region
                   .paths[ckv_volume_file_index(volume, file)]
                   .failed) == 0;
}

/* Opens the set, or takes another reference to it if this process has it open already. */
enum ckv_status ckv_volume_open(const struct ckv_options *options,
    const uint8_t namespace_tag[16], struct ckv_volume **volume,
    uint8_t *namespace_index, struct ckv_error *error) CKV_MUST_CHECK;

void ckv_volume_retain(struct ckv_volume *volume);
/* The last release ends the volume in this process: joins, checkpoints, unmaps. */
void ckv_volume_release(struct ckv_volume *volume);

/* Whether the region that this volume was opened with is still the one in use.  Only a
 * reader without a slot can outlive it. */
bool ckv_volume_current(const struct ckv_volume *volume);

/* Takes the path out of use for everybody: its entries are misses, its puts False, none
 * of its pages is overwritten any more.  `what` says which operation met `os_errno`. */
void ckv_volume_fail_path(struct ckv_volume *volume, struct ckv_file *file,
    const char *what, int os_errno);

#endif /* CKV_VOLUME_H */
