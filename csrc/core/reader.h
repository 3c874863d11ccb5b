/* SPDX-License-Identifier: Apache-2.0 */
/* reader.h: probe, pin, look again, verify, hand out. */
#ifndef CKV_READER_H
#define CKV_READER_H

#include "entry.h"

struct ckv_lease {
    uint64_t magic;
    struct ckv_volume *volume; /* a reference is held */
    uint32_t entry;
    struct ckv_file *file;
    uint64_t sequence;
    uint64_t state; /* the LIVE word it was pinned under */
    struct ckv_record record;
    uint64_t pinned_bytes;
    const void *data;          /* in the mapping, or `copy` */
    void *copy;                /* malloc'd; NULL when the data is in the mapping */
    struct ckv_window *window; /* whose pins count this lease; NULL for a copy */
    size_t payload_length;
    void *header; /* malloc'd at the first question */
    int fd;       /* of locate(); -1 */
    uint64_t pinned_tick;
    uint64_t media_errors_before;
    struct ckv_lease *previous, *next; /* volume->oldest_lease ... */
};

enum ckv_status ckv_reader_get(struct ckv_volume *volume,
    const struct ckv_identity *identity, enum ckv_verify verify,
    struct ckv_lease **lease, struct ckv_error *error) CKV_MUST_CHECK;
void ckv_reader_release(struct ckv_lease *lease); /* without the volume reference */
/* False when bytes of the view are not those that were stored (sigbus_guard). */
bool ckv_reader_ok(struct ckv_lease *lease);
/* NULL when the device does not deliver it; valid until the release. */
const void *ckv_reader_header(struct ckv_lease *lease, size_t *length);

enum ckv_status ckv_reader_copy(struct ckv_volume *volume,
    const struct ckv_identity *identity, enum ckv_verify verify,
    struct ckv_read *read) CKV_MUST_CHECK;

/* The same for many, by several threads; each read has its status. */
void ckv_reader_copy_many(struct ckv_volume *volume,
    const struct ckv_identity *identities, enum ckv_verify verify,
    struct ckv_read *const *reads, size_t count);

/* Verifies a pinned entry by reading it; sets the mark or kills it.  CKV_OK, CKV_MISS. */
enum ckv_status ckv_reader_verify(struct ckv_volume *volume,
    const struct ckv_found *found) CKV_MUST_CHECK;

/* Checksum of an extent by read calls.  0 or -errno. */
int ckv_reader_checksum(struct ckv_volume *volume, struct ckv_file *file,
    uint64_t data_offset, uint64_t length, uint32_t *crc);

/* Starts reading an entry into the page cache. */
void ckv_reader_advise(struct ckv_volume *volume, const struct ckv_found *found);

#endif /* CKV_READER_H */
