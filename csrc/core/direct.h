/* SPDX-License-Identifier: Apache-2.0 */
/* direct.h: reads pinned blocks around the page cache, checked.
 *
 * For blocks that nobody has read lately and that are not in memory (the rule is in
 * direct.c).  Bytes of a direct read never lie in the page cache, so each is verified
 * whatever the policy says.  It is an attempt: a block that is not `sound` afterwards is
 * to be read in the plain way, which also says what is wrong with it.
 */
#ifndef CKV_DIRECT_H
#define CKV_DIRECT_H

#include "index.h"

struct ckv_direct_block {
    const struct ckv_found *found; /* pinned, until the plan is finished */
    const struct ckv_read *read;   /* its targets hold the payload */
    bool sound; /* out: payload and header agreed; the targets have the payload */
    uint32_t segments; /* of this block in the plan, from first_segment on */
    uint32_t first_segment;
};

struct ckv_direct_plan;

enum ckv_way {        /* to read a block */
    CKV_WAY_UNKNOWN,  /* by read calls; nobody looked what is in memory */
    CKV_WAY_MEMORY,   /* all of it was in memory a moment ago */
    CKV_WAY_BUFFERED, /* by read calls, with the kernel's readahead */
    CKV_WAY_FILL,     /* bring it into the page cache first (mapped.h) */
    CKV_WAY_DIRECT    /* around the page cache */
};

/* How a pinned block is to be read, as part of a call that copies `call_bytes`.  Notes
 * where the block ends, so that a reader in stored order is known at the next block. */
enum ckv_way ckv_direct_way(struct ckv_volume *volume, const struct ckv_found *found,
    uint64_t call_bytes);

/* Cuts the extents of the blocks, which it sorts by place, into pieces.  NULL: no
 * memory; none of them is sound. */
struct ckv_direct_plan *ckv_direct_plan(struct ckv_volume *volume,
    struct ckv_direct_block *blocks, size_t count);
size_t ckv_direct_pieces(const struct ckv_direct_plan *plan);
/* Reads a piece and copies it to the targets; each once, from any thread. */
void ckv_direct_read(struct ckv_direct_plan *plan, size_t piece);
/* After every piece: says which blocks are sound, and frees the plan. */
void ckv_direct_finish(struct ckv_direct_plan **plan);

#endif /* CKV_DIRECT_H */
