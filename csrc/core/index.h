/* SPDX-License-Identifier: Apache-2.0 */
/* index.h: from a key to its entry, without a lock.
 *
 * A key has two candidate buckets of one version and seven slots each.  Insert: CAS of a
 * slot that is empty or stale, while the entry is RESERVED.  Show: the entry becomes LIVE
 * (entry.h), then the versions grow.  Kill: its state leaves LIVE, its record is struck,
 * its slot is zeroed, then the version grows.
 *
 *   I1  A lookup is led only to an entry that is LIVE with the sequence whose low 20 bits
 *       the slot carries.  A slot is stale, and anybody's, unless its entry is LIVE with
 *       that sequence, RESERVED, or condemned with a record that is not struck yet
 *       (entry.h, E4).
 *   I2  Of several live entries of one key the highest sequence is the answer.
 *   I3  "Absent" is answered only after a look through both buckets whose versions did
 *       not change meanwhile: an overwrite makes the new entry LIVE and moves the
 *       versions before it kills the old one.
 *   I4  Every prefix of these steps is harmless, so a killed writer needs no repair: what
 *       it has stored can be found, so whoever stores or removes the key meets it.
 */
#ifndef CKV_INDEX_H
#define CKV_INDEX_H

#include "volume.h"

struct ckv_identity { /* what is compared; all of it is in the record */
    uint8_t namespace_tag[16];
    uint8_t key[32];
    bool digested;
    uint8_t namespace_index;
    uint64_t hash; /* keyed by the set; from ckv_index_hash() */
};

struct ckv_found {
    uint64_t hash; /* of the identity */
    uint32_t entry;
    uint64_t state; /* the LIVE word */
    struct ckv_file *file;
    struct ckv_record record; /* consistent copy of it */
};

uint64_t ckv_index_hash(const struct ckv_volume *volume,
    const uint8_t namespace_tag[16], const uint8_t key[32], bool digested);

/* Starts loading what a lookup of this hash will need. */
void ckv_index_prefetch(const struct ckv_volume *volume, uint64_t hash);

/* Finds the newest live entry; false when there is none (I3).  No pin is taken. */
bool ckv_index_find(struct ckv_volume *volume, const struct ckv_identity *identity,
    struct ckv_found *found);

/* Leads to an entry, RESERVED by the caller, that will get this sequence.  When both
 * buckets are full, the coldest entry in them is evicted (counted in bucket_evictions)
 * that is neither pinned nor an older version of the same key, which must not be missing
 * for a moment; false when there is none. */
bool ckv_index_insert(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence) CKV_MUST_CHECK;

/* Tells lookups under way that an entry of this hash has become LIVE (I3). */
void ckv_index_show(struct ckv_volume *volume, uint64_t hash);

/* The same for a rebuild, which has the region alone: no locked instruction, nothing
 * evicted.  False when both buckets are full; then ckv_index_insert() may make room. */
bool ckv_index_fill(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence);

/* Kills every live entry of the identity but the newest; returns the newest sequence. */
uint64_t ckv_index_keep_newest(struct ckv_volume *volume,
    const struct ckv_identity *identity);

/* The same after a put, whose own sequence counts even if its entry is gone already: an
 * older block must not come to light when the newer one was evicted at once. */
void ckv_index_keep_stored(struct ckv_volume *volume,
    const struct ckv_identity *identity, uint64_t sequence);

/* Kills what lookups pass over because its path has failed, so that recovery does not
 * bring back a block that was removed meanwhile. */
void ckv_index_kill_hidden(struct ckv_volume *volume,
    const struct ckv_identity *identity);

/* Waits until no record of the identity is left that others have condemned and not
 * struck (entry.h, E4); sweeps who has died over it.  Gives up at `*deadline_ns`, which
 * is set at the first wait when it is 0. */
void ckv_index_settle(struct ckv_volume *volume, const struct ckv_identity *identity,
    uint64_t *deadline_ns);

/* Clears the slot of an entry that is no longer LIVE, or has not become it. */
void ckv_index_erase(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence);

/* For verify: whether `entry` can be found in one of its buckets. */
bool ckv_index_holds(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence);

#endif /* CKV_INDEX_H */
