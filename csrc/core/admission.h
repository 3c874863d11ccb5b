/* SPDX-License-Identifier: Apache-2.0 */
/* admission.h: which blocks a full tier takes in: all of them, or those that were asked
 * for twice.
 *
 * Knows hashes of keys and a piece of memory that many threads and processes share; no
 * volumes, no files.  Three parts, in this order:
 *
 *   head     what is decided, and counts            256 bytes
 *   ghost    keys that were refused or evicted      6 bytes an entry
 *   shadows  two small tiers of keys alone          3.75 bytes an entry
 *
 * The ghost answers "was this key refused or evicted within the last `capacity`
 * insertions?"  It is a table of buckets of 16 words, one cache line each:
 *
 *   word  bits 12..31 tag of the key, never 0;  bits 0..11 epoch of its insertion
 *
 * `ghost_clock` counts insertions: bits 32..63 the epoch, which begins anew after 1/256
 * of the capacity, bits 0..31 insertions in it.  A bucket that is full forgets its oldest
 * word.
 *
 * The shadows live through the same requests as the tier, on a sample of the keys and
 * with the same sample of its capacity: one takes in all, the other asks for a second
 * touch by a ghost of its own.  Which misses less decides for the tier.  Each is a ring:
 *
 *   ring[position]  bits 2..31 fingerprint of a key, bits 0..1 heat, 0 to 2; 0 is empty
 *   index           buckets of 16 words that lead from a fingerprint to its position:
 *                   bits 20..31 low bits of the fingerprint, bits 0..19 position; 0 is
 *                   empty (so position 0 is not used)
 *
 *   A1  A word of the index counts only if the ring has that fingerprint at that
 *       position.  So there is nothing to repair: whoever loses a race, or dies between
 *       two stores, leaves a key that is a miss of a shadow, and a place that the hand
 *       comes to.
 *   A2  Sizes come from the number of entries, which each process knows for itself.  What
 *       is read from memory is masked or clamped before it is used as a position, a
 *       divisor or a bound, and each loop has a bound: any content is harmless.
 *   A3  All zeros is a valid beginning: no key known, capacity unknown, admit all.
 *   A4  A request counts once.  A hit counts when the block is read; a miss when its put
 *       comes; a touch at once, and the read that follows it does not (`touched` has the
 *       fingerprints for which it is still to come).  Asking whether a key is there is no
 *       request.
 *
 * No locks.  Nothing is ordered: all accesses are relaxed, but for the additions that
 * claim a position or an insertion.
 */
#ifndef CKV_ADMISSION_H
#define CKV_ADMISSION_H

#include "format.h"

enum {
    CKV_ADMISSION_WAYS = 16,          /* words of a bucket: a cache line */
    CKV_ADMISSION_RING_MIN = 1024,    /* places of a shadow */
    CKV_ADMISSION_RING_MAX = 1 << 20, /* what an index word can name */
    CKV_ADMISSION_TOUCHED = 2048,     /* fingerprints */
    CKV_ADMISSION_SAMPLE_SHIFT = 3,   /* one key in eight is followed */
    CKV_ADMISSION_SAMPLE_MIN = 1024,  /* more, as long as a shadow is smaller */
    CKV_ADMISSION_GHOST_EPOCHS = 256, /* in a capacity of insertions */
    CKV_ADMISSION_SWITCH_PART = 20,   /* by this part fewer misses to refuse: 5 % */
    CKV_ADMISSION_SWITCH_MISSES = 16  /* and by as many at least */
};

enum ckv_access {
    CKV_ACCESS_READ,     /* a block that was found */
    CKV_ACCESS_TOUCH,    /* a block that was found, and whose reader may follow */
    CKV_ACCESS_PUT,      /* a block that is not there and is now offered */
    CKV_ACCESS_PUT_KNOWN /* the same, and it leads to a block of its chain that the
                          * tier's ghost knows: both shadows admit it */
};

struct ckv_ghost {
    ckv_atomic_u32 *words;
    ckv_atomic_u64 *clock;
    uint32_t buckets;
};

struct ckv_shadow {
    ckv_atomic_u32 *ring;
    ckv_atomic_u32 *index;
    ckv_atomic_u32 *hand;
    ckv_atomic_u64 *misses;
};

struct ckv_admission_memory { /* this process's way to the memory; never changes */
    struct ckv_admission_head *head;
    struct ckv_ghost ghost;
    struct ckv_ghost shadow_ghost; /* of shadows[1] */
    struct ckv_shadow shadows[2];  /* admits all; asks for a second touch */
    ckv_atomic_u32 *touched;
    uint32_t entry_count;
    uint32_t ring_max;
};

struct ckv_admission_estimate { /* what the shadows say */
    uint64_t requests;          /* decayed: of the last 4 shadow capacities or so */
    uint64_t misses[2];
    uint64_t switches;
};

/* Bytes that the state for so many entries takes; a multiple of 64. */
uint64_t ckv_admission_bytes(uint32_t entry_count);
/* Words of the ghost for so many entries. */
uint32_t ckv_admission_ghost_words(uint32_t entry_count);

/* `memory` is aligned to 64, has ckv_admission_bytes() of them and is full of zeros
 * before the first use by anybody (A3). */
void ckv_admission_attach(struct ckv_admission_memory *admission, void *memory,
    uint32_t entry_count);

/* Says how many blocks the tier holds when it is full.  Nothing happens while the number
 * is within 1/16 of the one before; else shadows and ghost go on with the new one. */
void ckv_admission_resize(struct ckv_admission_memory *admission, uint64_t blocks);
/* That number; 0 until it is known. */
uint32_t ckv_admission_capacity(const struct ckv_admission_memory *admission);

/* Whether the shadows follow this key. */
static inline bool
ckv_admission_samples(const struct ckv_admission_memory *admission, uint64_t hash)
{
    return (hash & ckv_load_relaxed_u32(&admission->head->sample_mask)) == 0;
}
/* One request for such a key. */
void ckv_admission_access(struct ckv_admission_memory *admission, uint64_t hash,
    enum ckv_access access);
/* Whether the shadows favour asking for a second touch. */
bool ckv_admission_asks_twice(const struct ckv_admission_memory *admission);

/* Whether the ghost knows the key: its put is a second touch. */
bool ckv_admission_knows(const struct ckv_admission_memory *admission, uint64_t hash);
/* A block of this key was refused or evicted. */
void ckv_admission_remember(struct ckv_admission_memory *admission, uint64_t hash);

void ckv_admission_estimate(const struct ckv_admission_memory *admission,
    struct ckv_admission_estimate *estimate);

#endif /* CKV_ADMISSION_H */
