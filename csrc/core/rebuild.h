/* SPDX-License-Identifier: Apache-2.0 */
/* rebuild.h: fill a new region from the tables of the files.
 *
 *   B1  Before the first allocation, no two live entries overlap and no two share an
 *       identity (F4); what lost is struck in its file.
 *   B2  Entries out of bounds, unsealed, below their namespace's clear sequence, or
 *       larger than F3 allows are dropped (counted, not struck unless sealed).
 *   B3  The cursor of a stripe is the end of its newest entry that was not put into a
 *       hole, or of a neighbour ahead that is nearly as new (puts are published in
 *       another order than they are given room); its laps and virtual time start at 0
 *       plus the cursor's position.
 *   B4  The next sequence is above every sequence seen in any file, also in dropped
 *       records and clear records and synced_sequence.
 *   B5  No entry is marked as verified.
 *   B6  Heat and admission come from checkpoints, if they are whole; without them entries
 *       are cold and everything is admitted until the volume evicts.
 *
 * Sequential, O(entries); 25-50 ns an entry is the goal.
 */
#ifndef CKV_REBUILD_H
#define CKV_REBUILD_H

#include "volume.h"

enum ckv_status ckv_rebuild(struct ckv_volume *volume, bool strike,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Writes the heat of every entry, and what admission knows, into the older checkpoint
 * copy of every usable file.  Best effort: 0 or -errno. */
int ckv_checkpoint_write(struct ckv_volume *volume);

#endif /* CKV_REBUILD_H */
