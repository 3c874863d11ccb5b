/* SPDX-License-Identifier: Apache-2.0 */
/* hit_density.h: how many hits a block is worth per access of space that it takes.
 *
 * A block lives from one access to the next.  Lives of sampled keys are followed to their
 * end; how old they were then gives, for each class of blocks, the chance to be hit at
 * each age.  The hit density of a block of age a is
 *
 *     max over e > a of  (hits expected in [a, e)) / (accesses that it stays until then)
 *
 * which is the Gittins index of keeping it.  A cursor overwrites what lies below a
 * threshold that floats so that it passes some eight blocks per block it takes; a block
 * that would lie below it at once is not worth storing.  The module knows keys by their
 * hash alone, and nothing of files, pages or entries.
 *
 *     access --> life word of the entry: class, count, last access
 *       |  \--> ghost (not resident): the same for blocks evicted or refused
 *       \-----> tracker (sampled keys): ended[class][age], dropped[class][age]
 *                                              | every capacity / 4 accesses
 *                                              v
 *     cursor <-- score[class][age] <------- rebuild
 *
 *   D1  Everything lies in one piece of shared memory, and each datum is one word that is
 *       right by itself.  Two writers at once lose an observation; a process that dies
 *       anywhere leaves a word that was written or was not.  There are no locks.
 *   D2  Nothing read from the shared memory is used as an index, a shift or a divisor
 *       unless it was cut to its range: classes below CKV_DENSITY_CLASSES, bins below
 *       CKV_DENSITY_BINS, scores within +-CKV_DENSITY_SCORE_MAX.
 *   D3  A rebuild belongs to whoever moves `due` past the present by CAS, so there is one
 *       in each interval, and one that is never finished is followed by the next.
 *   D4  An access and a score touch at most one cache line of tables and tracker, a look
 *       into the ghost, for blocks that are not resident, four; a rebuild is one pass
 *       over the tracker and 0.2 million steps.
 *   D5  Time is counted in accesses.  Ages are differences of 32 bits: a last access in
 *       the future, which races can make, is age 0.
 *   D6  A sight of a known key less than 1/64 of the capacity of accesses after its last
 *       one is the same access: a lookup and the read that follows count once.
 */
#ifndef CKV_HIT_DENSITY_H
#define CKV_HIT_DENSITY_H

#include "format.h"

enum {
    CKV_DENSITY_BINS = 56, /* two per octave of age: [1, 1.5), [1.5, 2), [2, 3), ... */
    CKV_DENSITY_CLASSES = 88,
    CKV_DENSITY_GROUPS = 7,      /* classes of one access count */
    CKV_DENSITY_WAYS = 8,        /* words of a bucket of the tracker: a cache line */
    CKV_DENSITY_GHOST_WAYS = 32, /* and of the ghost: how long a bucket remembers
                                      * must not differ much from one to the other */
    CKV_DENSITY_SCORE_MAX = 64 << 16 /* scores are logarithms: 2^16 an octave */
};

/* Life word of a block: bits 32..63 the access that was its last, and below
 *   0 used, 1..5 count of accesses, 6..21 depth, 22..23 bucket of the distance from the
 *   end of its request, 24..30 class.
 * 0 stands for no life: a block that nobody accessed since the memory was made. */

struct ckv_density { /* of one process: where the parts lie */
    struct ckv_density_head *head;
    ckv_atomic_u32 *ended;   /* [class][bin]: lives that a hit ended */
    ckv_atomic_u32 *dropped; /* [class][bin]: lives that the tracker lost sight of */
    ckv_atomic_u32 *scores;  /* [class][bin + 1], as signed */
    ckv_atomic_u64 *ghost;   /* buckets of CKV_DENSITY_GHOST_WAYS words */
    ckv_atomic_u64 *tracker; /* buckets of CKV_DENSITY_WAYS words */
    uint32_t ghost_buckets;
    uint32_t tracker_buckets;
};

/* Bytes of shared memory for `block_count` blocks; a multiple of 64. */
uint64_t ckv_density_bytes(uint32_t block_count);

/* Says where the parts lie in `base`; touches nothing. */
void ckv_density_attach(struct ckv_density *density, void *base, uint32_t block_count);

/* Requires: zeros.  Until the first rebuild a block's density is 1 / age: LRU. */
void ckv_density_init(const struct ckv_density *density);

/* Says how many blocks a full tier holds. */
void ckv_density_resize(const struct ckv_density *density, uint64_t blocks);

/* A hit on a resident block.  `from_end` is its distance from the end of the request, or
 * UINT32_MAX where only the block is known: then it keeps the one it had. */
void ckv_density_hit(const struct ckv_density *density, uint64_t hash,
    ckv_atomic_u64 *life, uint32_t from_end);

/* An access to a block that is not resident: the life it begins, carried on from the
 * ghost if it is remembered there.  `depth` blocks of its request come before it,
 * `from_end` after it. */
uint64_t ckv_density_miss(const struct ckv_density *density, uint64_t hash,
    uint32_t depth, uint32_t from_end);

/* Remembers the life of a block that was evicted or refused. */
void ckv_density_remember(const struct ckv_density *density, uint64_t hash,
    uint64_t life);

/* The life of a block that the ghost remembers, or 0. */
uint64_t ckv_density_recall(const struct ckv_density *density, uint64_t hash);

/* Depth of a block with this life; 65 535 stands for more. */
uint32_t ckv_density_depth(uint64_t life);
/* The same life at another depth. */
uint64_t ckv_density_at_depth(uint64_t life, uint32_t depth);
/* A life that begins now, of a block that was accessed `count` times: for entries that an
 * earlier life of the memory knew. */
uint64_t ckv_density_resume(const struct ckv_density *density, uint32_t count);

/* Logarithm of the hit density of a block at the present age. */
int32_t ckv_density_score(const struct ckv_density *density, uint64_t life);

/* At or below it a cursor overwrites a block; below it a put is refused. */
int32_t ckv_density_threshold(const struct ckv_density *density);

/* Whether a block of this life is worth storing.  All are until as many were overwritten
 * as the tier holds: before that little is known. */
bool ckv_density_admits(const struct ckv_density *density, uint64_t life);

/* A cursor took a block after `passed` others; a request had `refused` blocks refused. */
void ckv_density_took(const struct ckv_density *density, uint32_t passed);
void ckv_density_refused(const struct ckv_density *density, uint32_t refused);

/* Whether the caller is the one to rebuild now (D3). */
bool ckv_density_due(const struct ckv_density *density);
/* Computes the scores from what was observed.  About a millisecond per million
 * blocks. */
void ckv_density_rebuild(const struct ckv_density *density);

#endif /* CKV_HIT_DENSITY_H */
