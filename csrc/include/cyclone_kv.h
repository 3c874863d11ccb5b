/* SPDX-License-Identifier: Apache-2.0 */
/* cyclone_kv.h: the public C interface of the cyclone_kv storage engine.
 *
 * A cache keeps blocks (a key, a payload of up to 1 GiB, an optional user header) in
 * volume files of fixed size, one per path.  Old blocks are overwritten in place when
 * room is needed.  Any number of threads in up to 64 processes may use one volume at the
 * same time.  docs/architecture.md says how; docs/failure-model.md says what survives.
 *
 * Conventions
 *   - Sizes are bytes unless the name says otherwise.  Keys and namespaces are bytes.
 *   - A function that can fail returns enum ckv_status: 0 is success, positive is an
 *     expected outcome (a miss, a refused store), negative is an error.  `error` may be
 *     NULL; otherwise it is filled in when the result is negative.
 *   - All functions may be called from any thread at the same time, except that
 *     ckv_close() must not race with another call that was given the same pointer.
 *   - A handle opened before fork() answers CKV_E_FORKED in the child.
 */
#ifndef CYCLONE_KV_H
#define CYCLONE_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define CKV_API        __attribute__((visibility("default")))
#define CKV_MUST_CHECK __attribute__((warn_unused_result))
#else
#define CKV_API
#define CKV_MUST_CHECK
#endif

/* X(name, value, text).  The only list of statuses. */
#define CKV_STATUSES(X)                                                                \
    X(CKV_OK, 0, "success")                                                            \
    X(CKV_MISS, 1, "no such block")                                                    \
    X(CKV_PRESENT, 2, "the block was already stored")                                  \
    X(CKV_BUSY, 3, "every stripe stayed locked for too long")                          \
    X(CKV_NO_RUN, 4, "no run of pages without pinned blocks is long enough")           \
    X(CKV_NOT_ADMITTED, 5, "the admission policy refused the block")                   \
    X(CKV_IN_FLIGHT, 6, "the key is being stored by another thread or process")        \
    X(CKV_FAILED_PATH, 7, "every path that could take the block has failed")           \
    X(CKV_IO_FAILED, 8, "the block could not be read or written")                      \
    X(CKV_SHORT_BUFFER, 9, "the buffer is smaller than the block")                     \
    X(CKV_E_INVALID, -1, "invalid argument")                                           \
    X(CKV_E_OS, -2, "a system call failed")                                            \
    X(CKV_E_NO_MEMORY, -3, "out of memory")                                            \
    X(CKV_E_FORMAT, -4, "not a volume that this version can read")                     \
    X(CKV_E_MISMATCH, -5, "the volume has another geometry")                           \
    X(CKV_E_UNSAFE_PATH, -6, "the path is not safe to use")                            \
    X(CKV_E_TIMEOUT, -7, "another process kept the volume locked")                     \
    X(CKV_E_CLOSED, -8, "the cache is closed")                                         \
    X(CKV_E_FORKED, -9, "the cache was opened before fork()")                          \
    X(CKV_E_TOO_LARGE, -10, "the block can never fit")                                 \
    X(CKV_E_NO_SLOT, -11, "64 processes have the volume open")                         \
    X(CKV_E_NO_NAMESPACE, -12, "the volume already has 256 namespaces")                \
    X(CKV_E_READ_ONLY, -13, "the cache is open for reading only")                      \
    X(CKV_E_NO_SPACE, -14, "the file system is too full")                              \
    X(CKV_E_UNSUPPORTED, -15, "the file system or platform cannot do this")            \
    X(CKV_E_MISSING_PATH, -16, "a member of the set of paths is missing")

enum ckv_status {
#define X(name, value, text) name = (value),
    CKV_STATUSES(X)
#undef X
};

struct ckv_error {
    enum ckv_status status;
    int os_errno;   /* 0 when no system call was involved */
    char text[512]; /* one sentence that names the value and the remedy */
};

/* Returns a constant string. */
CKV_API const char *ckv_status_text(enum ckv_status status);

struct ckv_cache;       /* one handle; many may share one volume */
struct ckv_lease;       /* a pinned block */
struct ckv_reservation; /* a block being produced in place */

struct ckv_key {
    const void *data;
    size_t length; /* 1 to 65 535 bytes; 32 bytes are used as they are */
};

struct ckv_segment { /* a piece of a payload, to be read by the engine */
    const void *data;
    size_t length;
};

struct ckv_target { /* a piece of a destination, to be written by the engine */
    void *data;
    size_t length;
};

/* ---- opening ------------------------------------------------------------------ */

enum ckv_mode { CKV_MODE_READ_WRITE = 0, CKV_MODE_READ = 1 };
enum ckv_verify { CKV_VERIFY_ONCE = 0, CKV_VERIFY_ALWAYS = 1, CKV_VERIFY_NEVER = 2 };
/* Which blocks a full tier takes in: all; those whose key was refused or evicted not long
 * ago; or whichever of the two would have missed less lately. */
enum ckv_admission {
    CKV_ADMISSION_ALWAYS = 0,
    CKV_ADMISSION_SECOND_TOUCH = 1,
    CKV_ADMISSION_ADAPTIVE = 2
};
/* Which block a full tier overwrites: the next cold one; or the least promising of those
 * that no stored block of the same prefix needs, with an admission of its own. */
enum ckv_eviction { CKV_EVICTION_CLOCK = 0, CKV_EVICTION_PREFIX = 1 };
enum ckv_on_mismatch { CKV_MISMATCH_RAISE = 0, CKV_MISMATCH_RECREATE = 1 };

struct ckv_path {
    const char *path;        /* of the volume file; resolved by the engine */
    uint64_t capacity_bytes; /* of this path; 0 takes an existing volume as it is */
};

struct ckv_options {
    const struct ckv_path *paths; /* one per device */
    size_t path_count;            /* 1 to CKV_PATHS_MAX */
    enum ckv_mode mode;
    enum ckv_verify verify;
    enum ckv_on_mismatch on_mismatch;
    enum ckv_admission admission; /* of the first handle of a process, for all */
    enum ckv_eviction
        eviction; /* of the first process that opens the volume, for all */
    uint64_t expected_object_bytes; /* 0: one table entry per 64 KiB of capacity */
    uint32_t stripe_count;          /* per path; 0 chooses by capacity */
    uint32_t file_mode;             /* permission bits of created files; 0 means 0600 */
    bool create;                    /* create what is missing */
    bool degraded;                  /* open although members of the set are missing */
    bool allow_shared_directory;    /* accept a directory that others can write to */
    bool allow_network_fs;          /* accept NFS, FUSE and the like */
    bool allow_sparse;              /* accept a file system that cannot reserve space */
    bool sigbus_guard; /* turn undeliverable pages of views into counted zeros */
    bool write_behind; /* start write-back of each block when it is stored */
    const char *shm_directory;  /* NULL: beside the first volume file */
    const void *namespace_data; /* NULL or length 0: the default namespace */
    size_t namespace_length;    /* at most 65 535 bytes */
    uint32_t open_timeout_ms;   /* wait for a live creator; 0 means 10 000 */
    uint32_t sync_interval_ms;  /* background sync; 0 means 30 000, UINT32_MAX never */
    uint32_t io_threads;        /* of the batch calls; 0 means 4 */
    uint64_t page_table_budget_bytes; /* of data mappings; 0 means 64 MiB */
    uint32_t event_capacity; /* of the event ring; 0 means 16 384; power of two */
};

enum { CKV_PATHS_MAX = 16, CKV_PROCESSES_MAX = 64, CKV_NAMESPACES_MAX = 256 };

/* Fills in the defaults named above (write_behind and create are true). */
CKV_API void ckv_options_init(struct ckv_options *options);

/* Opens a cache.  On success *cache is owned by the caller and ends with ckv_close().
 * A warning (overlayfs, a volume rebuilt degraded) is reported through the log. */
CKV_API enum ckv_status ckv_open(const struct ckv_options *options,
    struct ckv_cache **cache, struct ckv_error *error) CKV_MUST_CHECK;

/* Ends the handle and clears *cache: refuses new calls, waits for those in flight.
 * Leases stay valid; what they use is kept until the last of them is released. */
CKV_API void ckv_close(struct ckv_cache **cache);

/* Messages of the engine (first eviction, recovery, failed path).  `sink` may be called
 * from any thread that calls the engine, and from the maintenance thread; NULL drops. */
enum ckv_log_level { CKV_LOG_INFO = 0, CKV_LOG_WARNING = 1 };
CKV_API void ckv_set_log(void (*sink)(void *context, enum ckv_log_level level,
                             const char *text),
    void *context);

/* ---- storing ------------------------------------------------------------------ */

enum ckv_put_flags {
    CKV_PUT_OVERWRITE = 1, /* replace a present block, atomically for readers */
    CKV_PUT_CHAIN = 2,     /* put_many: consecutive blocks of one prefix, head first */
};

struct ckv_item {
    struct ckv_key key;
    const struct ckv_segment *segments; /* read until the call returns */
    size_t segment_count;
    const void *header;     /* user header, stored beside the payload; may be NULL */
    size_t header_length;   /* at most 65 535 bytes */
    enum ckv_status status; /* out: of this item */
};

/* Stores a block.  CKV_OK: stored, every process hits from now on.  CKV_PRESENT: a block
 * of the same lengths was there and is known to be sound, nothing written; one of other
 * lengths, or a damaged one, is replaced as with CKV_PUT_OVERWRITE.  Other positive
 * results: not stored (see their texts).  CKV_NOT_ADMITTED only for a key that is absent
 * from a full volume, with or without CKV_PUT_OVERWRITE.  CKV_E_TOO_LARGE when it could
 * never fit.  Payload bytes that change during the call lead to a miss later, never to
 * a wrong hit. */
CKV_API enum ckv_status ckv_put(struct ckv_cache *cache, struct ckv_item *item,
    uint32_t flags, struct ckv_error *error) CKV_MUST_CHECK;

/* Stores many; never fails for one item.  With CKV_PUT_CHAIN the items are stored tail
 * first, each remembering its predecessor; `parent` (may be NULL) precedes items[0].
 * The result is negative only when no item could be tried. */
CKV_API enum ckv_status ckv_put_many(struct ckv_cache *cache, struct ckv_item *items,
    size_t count, uint32_t flags, const struct ckv_key *parent,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Gives zeroed memory to produce a block in; stored by commit, dropped by abort.  Whether
 * a full volume admits it is decided at commit, as at a put.  Commit
 * needs the handle to be open still; abort does not. */
CKV_API enum ckv_status ckv_reserve(struct ckv_cache *cache,
    const struct ckv_item *item, size_t payload_length,
    struct ckv_reservation **reservation, struct ckv_error *error) CKV_MUST_CHECK;
CKV_API void *ckv_reservation_data(struct ckv_reservation *reservation,
    size_t *payload_length);
CKV_API enum ckv_status ckv_commit(struct ckv_reservation **reservation, uint32_t flags,
    struct ckv_error *error) CKV_MUST_CHECK;
CKV_API void ckv_abort(struct ckv_reservation **reservation);

/* ---- reading ------------------------------------------------------------------ */

/* Pins a block.  CKV_OK: *lease is owned by the caller.  CKV_MISS: absent, evicted,
 * damaged or unreadable; the counters say which. */
CKV_API enum ckv_status ckv_get(struct ckv_cache *cache, const struct ckv_key *key,
    struct ckv_lease **lease, struct ckv_error *error) CKV_MUST_CHECK;

/* The payload: read-only, unchanged and readable until ckv_lease_release(). */
CKV_API const void *ckv_lease_data(const struct ckv_lease *lease,
    size_t *payload_length);
/* The user header; same lifetime. */
CKV_API const void *ckv_lease_header(const struct ckv_lease *lease,
    size_t *header_length);
/* False once a page of it could not be delivered by the device (sigbus_guard). */
CKV_API bool ckv_lease_ok(const struct ckv_lease *lease);
CKV_API void ckv_lease_release(struct ckv_lease **lease);

/* Where a pinned block lies.  `fd` is a read-only descriptor for the caller alone, owned
 * by the lease; reading it at [offset, offset + payload length) gives the payload. */
CKV_API enum ckv_status ckv_locate(struct ckv_cache *cache, const struct ckv_key *key,
    struct ckv_lease **lease, int *fd, uint64_t *offset_bytes,
    struct ckv_error *error) CKV_MUST_CHECK;

struct ckv_read {
    struct ckv_key key;
    const struct ckv_target *targets; /* filled in order; together >= the payload */
    size_t target_count;
    bool exact;              /* their length must be that of the payload */
    uint64_t payload_length; /* out, also with CKV_SHORT_BUFFER */
    enum ckv_status status;  /* out: CKV_OK, CKV_MISS, CKV_SHORT_BUFFER (`exact`: of
                              * another length) */
};

/* Copies a block.  Unless the status is CKV_OK the content of the targets is undefined,
 * but never holds bytes of another key past a failed check. */
CKV_API enum ckv_status ckv_get_into(struct ckv_cache *cache, struct ckv_read *read,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Copies many, on the I/O threads of the volume; never fails for one block. */
CKV_API enum ckv_status ckv_get_many_into(struct ckv_cache *cache,
    struct ckv_read *reads, size_t count, struct ckv_error *error) CKV_MUST_CHECK;

/* From memory alone: no I/O, no lock. */
CKV_API enum ckv_status ckv_contains_many(struct ckv_cache *cache,
    const struct ckv_key *keys, size_t count, bool *present,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Counts the leading keys that are present.  `touch` gives them two passes of the cursor
 * (tail first), so that they are still there when a load follows. */
CKV_API enum ckv_status ckv_longest_prefix(struct ckv_cache *cache,
    const struct ckv_key *keys, size_t count, bool touch, size_t *length,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Starts reading blocks into the page cache; returns how many were found. */
CKV_API enum ckv_status ckv_prefetch(struct ckv_cache *cache,
    const struct ckv_key *keys, size_t count, size_t *found,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Gives present blocks two passes of the cursor, tail first. */
CKV_API enum ckv_status ckv_touch(struct ckv_cache *cache, const struct ckv_key *keys,
    size_t count, size_t *found, struct ckv_error *error) CKV_MUST_CHECK;

/* ---- devices ------------------------------------------------------------------ */

struct ckv_hold; /* a hold on the mapping of the data area, in chunks */

struct ckv_chunk {       /* up to 1 GiB; no block crosses its ends */
    const void *address; /* mapped for reading only, until the hold is released */
    uint64_t length;
};

struct ckv_pin {
    struct ckv_key key;
    struct ckv_lease *lease; /* out: owned by the caller; NULL: not pinned */
    uint64_t payload_length; /* out: of a block that was found */
    enum ckv_status status;  /* out: CKV_OK, CKV_MISS */
};

/* For whoever registers the mapping with a device driver.  Keeps the volume open in this
 * process, as a lease does.  Any thread, but a release must not race with other calls.
 * CKV_E_READ_ONLY in mode CKV_MODE_READ. */
CKV_API enum ckv_status ckv_hold_open(struct ckv_cache *cache, struct ckv_hold **hold,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Chunks of all paths; they are numbered from 0. */
CKV_API size_t ckv_hold_chunks(const struct ckv_hold *hold);
/* The same for all holds on one volume in this process; only to be compared. */
CKV_API const void *ckv_hold_volume(const struct ckv_hold *hold);
/* Maps a chunk at its first use, and keeps it as it is until the release. */
CKV_API enum ckv_status ckv_hold_chunk(struct ckv_hold *hold, size_t index,
    struct ckv_chunk *chunk, struct ckv_error *error) CKV_MUST_CHECK;
/* Brings whole pages of a chunk into memory; CKV_E_OS when the device fails. */
CKV_API enum ckv_status ckv_hold_populate(struct ckv_hold *hold, size_t index,
    uint64_t offset, uint64_t length, struct ckv_error *error) CKV_MUST_CHECK;
/* Says whether ckv_get_selected() takes blocks from a chunk.  None at first. */
CKV_API void ckv_hold_select(struct ckv_hold *hold, size_t index, bool selected);
CKV_API void ckv_hold_release(struct ckv_hold **hold);

/* Pins, as ckv_get() would, those blocks of a batch that lie in selected chunks.  The
 * others are neither pinned nor read nor counted: CKV_OK, their length, and no lease;
 * all are such with `hold` NULL.  A negative result pins nothing. */
CKV_API enum ckv_status ckv_get_selected(struct ckv_cache *cache,
    const struct ckv_hold *hold, struct ckv_pin *pins, size_t count,
    struct ckv_error *error) CKV_MUST_CHECK;

/* ---- removing ----------------------------------------------------------------- */

/* CKV_OK or CKV_MISS.  Durable with the next sync. */
CKV_API enum ckv_status ckv_remove(struct ckv_cache *cache, const struct ckv_key *key,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Removes every block of the handle's namespace; durable when it returns. */
CKV_API enum ckv_status ckv_clear(struct ckv_cache *cache, uint64_t *removed,
    struct ckv_error *error) CKV_MUST_CHECK;

/* ---- care --------------------------------------------------------------------- */

/* Blocks of the handle's namespace. */
CKV_API enum ckv_status ckv_count(struct ckv_cache *cache, uint64_t *entries,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Makes every put that returned before the call durable. */
CKV_API enum ckv_status ckv_sync(struct ckv_cache *cache,
    struct ckv_error *error) CKV_MUST_CHECK;

struct ckv_verify_report {
    uint64_t entries_checked;
    uint64_t bytes_checked;
    uint64_t damaged_payloads; /* checksum differs */
    uint64_t unreadable;       /* the device did not deliver */
    uint64_t structure_faults; /* broken invariants of table, index, page map */
    uint64_t repaired;
    char first_fault[256]; /* empty when there is none */
};
/* Reads every block and proves every invariant.  `progress` may be NULL; a non-zero
 * result of it stops the walk (CKV_OK with what was seen so far).  With `repair`,
 * damaged blocks are removed and volatile structures put right. */
CKV_API enum ckv_status ckv_verify(struct ckv_cache *cache, bool repair,
    int (*progress)(void *context, uint64_t entries_done, uint64_t entries_total),
    void *context, struct ckv_verify_report *report,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Verifies failed paths and puts those back into use that are sound. */
CKV_API enum ckv_status ckv_recover(struct ckv_cache *cache, uint64_t *recovered_paths,
    struct ckv_error *error) CKV_MUST_CHECK;

enum ckv_event_kind {
    CKV_EVENT_STORED = 1,
    CKV_EVENT_REMOVED = 2,
    CKV_EVENT_CLEARED = 3
};
struct ckv_event {
    uint64_t number;           /* starts at 1, grows by one */
    uint8_t namespace_tag[16]; /* which namespace; zeros for the default one */
    uint8_t key[32];           /* as given, or its SHA-256 when `digested` */
    uint8_t kind;              /* enum ckv_event_kind */
    bool digested;
};
#define CKV_EVENTS_FROM_NOW UINT64_MAX
/* Copies events with number > since, of all namespaces, oldest first, without a lock.
 * None for CKV_EVENTS_FROM_NOW, which asks for *last alone.  The last event of a key says
 * whether its block is there now, those before it what was recorded: folded, they end
 * with what is stored.  *lost is the number of events after `since` that are gone, or may
 * have been lost with a process or a path: then list what is there.  *last is what to
 * pass next. */
CKV_API enum ckv_status ckv_events(struct ckv_cache *cache, uint64_t since,
    struct ckv_event *events, size_t capacity, size_t *count, uint64_t *lost,
    uint64_t *last, struct ckv_error *error) CKV_MUST_CHECK;

struct ckv_entry_info {
    uint8_t namespace_tag[16];
    uint8_t key[32];
    bool digested;
    bool verified; /* checked in this life of the shared region */
    uint8_t heat;  /* 0..2: passes of the cursor that it will survive */
    uint32_t path_index;
    uint32_t header_length;
    uint64_t offset_bytes; /* in the volume file */
    uint64_t payload_length;
    uint64_t sequence;
};
/* Walks the live blocks of all namespaces: pass 0 in *cursor first; ends with count 0. */
CKV_API enum ckv_status ckv_list(struct ckv_cache *cache, uint64_t *cursor,
    struct ckv_entry_info *infos, size_t capacity, size_t *count,
    struct ckv_error *error) CKV_MUST_CHECK;

/* X(kind, name, unit, sentence).  The only list of statistics.  "counter" grows for the
 * life of the shared region, "gauge" is a present value. */
#define CKV_STATISTICS(X)                                                              \
    X(counter, lookups, "keys",                                                        \
        "Keys looked up by get, get_into, contains and the like.")                     \
    X(counter, hits, "keys", "Lookups that found a live block.")                       \
    X(counter, misses, "keys", "Lookups that found none.")                             \
    X(counter, puts_stored, "blocks", "Puts that stored a block.")                     \
    X(counter, puts_present, "blocks", "Puts answered by a block already stored.")     \
    X(counter, puts_busy, "blocks", "Puts refused because stripes stayed locked.")     \
    X(counter, puts_no_run, "blocks",                                                  \
        "Puts refused because pins left no run of pages.")                             \
    X(counter, puts_not_admitted, "blocks", "Puts refused by the admission policy.")   \
    X(counter, puts_in_flight, "blocks",                                               \
        "Puts refused because the key was being stored.")                              \
    X(counter, puts_failed_path, "blocks", "Puts refused because paths have failed.")  \
    X(counter, puts_io_failed, "blocks", "Puts that ended in a write error.")          \
    X(counter, evictions, "blocks", "Blocks overwritten to make room.")                \
    X(counter, evicted_bytes, "bytes", "Payload bytes of those blocks.")               \
    X(counter, bucket_evictions, "blocks",                                             \
        "Blocks evicted because index buckets were full.")                             \
    X(counter, entries_exhausted, "blocks",                                            \
        "Puts that evicted for want of a table entry.")                                \
    X(counter, removed, "blocks", "Blocks removed by remove or by a newer version.")   \
    X(counter, payload_bytes_written, "bytes", "Payload bytes of stored blocks.")      \
    X(counter, page_bytes_written, "bytes",                                            \
        "Bytes written to data areas, fill included.")                                 \
    X(counter, payload_bytes_read, "bytes", "Payload bytes handed out or copied.")     \
    X(counter, page_bytes_read, "bytes", "Bytes read from data areas by the engine.")  \
    X(counter, corrupt, "blocks", "Blocks whose checksum failed.")                     \
    X(counter, read_errors, "blocks", "Blocks that the device did not deliver.")       \
    X(counter, short_buffers, "blocks",                                                \
        "Copies refused because the buffer was short, or of another length.")          \
    X(counter, verified_blocks, "blocks", "Blocks whose checksum was verified.")       \
    X(counter, verified_bytes, "bytes", "Payload bytes of those blocks.")              \
    X(counter, holes_filled, "blocks", "Blocks stored into holes behind a cursor.")    \
    X(counter, write_behind_bytes, "bytes",                                            \
        "Bytes whose write-back was started at put.")                                  \
    X(counter, readahead_bytes, "bytes", "Bytes requested ahead of a read.")           \
    X(counter, chains_ignored, "blocks",                                               \
        "Blocks stored in place of others although no run of leaves was found.")       \
    X(counter, lock_waits, "waits", "Times that a stripe lock was not free at once.")  \
    X(counter, lock_successions, "locks",                                              \
        "Stripe locks taken over from dead processes.")                                \
    X(counter, swept_slots, "slots", "Process slots cleaned after a death.")           \
    X(counter, syncs, "syncs", "Successful syncs.")                                    \
    X(counter, sync_failures, "syncs", "Syncs that reported an error.")                \
    X(counter, events_dropped, "events", "Events lost to a full or stalled ring.")     \
    X(counter, media_errors, "pages",                                                  \
        "Pages of views replaced by zeros (sigbus_guard).")                            \
    X(counter, map_failures, "blocks",                                                 \
        "Views served as copies for want of a mapping.")                               \
    X(counter, window_drops, "windows",                                                \
        "Data windows unmapped to return page tables.")                                \
    X(counter, direct_bytes, "bytes",                                                  \
        "Bytes read from data areas around the page cache.")                           \
    X(gauge, admission_asks_twice, "flag",                                             \
        "1 while adaptive admission asks for a second touch.")                         \
    X(gauge, admission_switches, "switches", "Times that it changed its mind.")        \
    X(gauge, admission_capacity, "blocks",                                             \
        "Blocks in a full volume, and keys the ghost remembers; 0 for unknown.")       \
    X(gauge, admission_requests, "requests",                                           \
        "Lately seen by the shadows of adaptive admission.")                           \
    X(gauge, admission_misses_always, "requests",                                      \
        "Of them, misses if all blocks were admitted.")                                \
    X(gauge, admission_misses_second_touch, "requests",                                \
        "Of them, misses if a second touch was asked for.")                            \
    X(gauge, eviction_prefix, "flag", "1 where the volume evicts by prefix.")          \
    X(gauge, density_accesses, "accesses",                                             \
        "Accesses to blocks that eviction by prefix has counted.")                     \
    X(gauge, density_rebuilds, "rebuilds", "Times that it learned from them.")         \
    X(gauge, capacity_bytes, "bytes", "Data area of all paths.")                       \
    X(gauge, entries_max, "entries", "Table entries of all paths.")                    \
    X(gauge, entries, "blocks", "Live blocks.")                                        \
    X(gauge, resident_bytes, "bytes", "Pages held by live blocks.")                    \
    X(gauge, pinned_entries, "blocks", "Blocks pinned by any process.")                \
    X(gauge, pinned_bytes, "bytes", "Pages of those blocks.")                          \
    X(gauge, doomed_bytes, "bytes", "Pages of dead blocks that no put has taken yet.") \
    X(gauge, holes, "holes", "Known holes behind cursors.")                            \
    X(gauge, laps, "laps", "Completed laps, the largest over all stripes.")            \
    X(gauge, longest_pin_seconds, "seconds", "Age of the oldest pin of any process.")  \
    X(gauge, longest_pin_pid, "pid",                                                   \
        "Process that holds it, in its own pid namespace.")                            \
    X(gauge, processes, "processes", "Processes that have the volume open.")           \
    X(gauge, last_sync_age_seconds, "seconds",                                         \
        "Since the last good sync; -1 for none.")                                      \
    X(gauge, failed_paths, "paths", "Paths out of use after an error.")                \
    X(gauge, detached, "paths", "Paths whose file was removed or replaced under us.")  \
    X(gauge, rebuilt_entries, "blocks",                                                \
        "Blocks found when the region was last rebuilt.")                              \
    X(gauge, rebuild_dropped, "blocks", "Table entries dropped by that rebuild.")

struct ckv_stats {
#define X(kind, name, unit, sentence) int64_t name;
    CKV_STATISTICS(X)
#undef X
};

/* `process` counts what this process did since it opened the volume (gauges as in
 * `volume`).  Either may be NULL. */
CKV_API enum ckv_status ckv_get_stats(struct ckv_cache *cache, struct ckv_stats *volume,
    struct ckv_stats *process, struct ckv_error *error) CKV_MUST_CHECK;

struct ckv_path_info {
    const char *path;        /* resolved; valid while the handle is open */
    const char *file_system; /* "ext4", "tmpfs", ... */
    uint64_t file_bytes;
    uint64_t data_bytes;
    uint64_t data_offset_bytes;
    uint32_t stripe_count;
    uint32_t entry_count;
    uint64_t free_bytes; /* of the file system */
    bool failed;
    bool detached;
    bool present; /* false for a member missing from a degraded set */
};
struct ckv_info {
    uint8_t set_id[16];
    uint32_t format_version;
    uint32_t path_count;
    uint64_t payload_max_bytes; /* the largest block that can be stored */
    uint64_t overhead_bytes;    /* header, checkpoint and table of all files */
    uint64_t shm_bytes;
    const char *shm_path;
    const char *crc32c_kernel; /* which implementation runs */
    struct ckv_path_info paths[CKV_PATHS_MAX];
};
CKV_API enum ckv_status ckv_get_info(struct ckv_cache *cache, struct ckv_info *info,
    struct ckv_error *error) CKV_MUST_CHECK;

/* CRC-32C (Castagnoli) of `length` bytes, continuing from `crc` (0 to begin). */
CKV_API uint32_t ckv_crc32c(uint32_t crc, const void *data, size_t length);

#ifdef __cplusplus
}
#endif

#endif /* CYCLONE_KV_H */
