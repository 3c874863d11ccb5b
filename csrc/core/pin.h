/* SPDX-License-Identifier: Apache-2.0 */
/* pin.h: keep an entry's pages in place while this process uses them.
 *
 * The private word of an entry: bit 0 a lock, bits 1..31 the count of pins, bits 40..63
 * low bits of the sequence whose pages were last populated in this process, bits 32..39
 * low bits of how often 256 MiB had been moved then (mapped.h).  0 -> 1 and
 * 1 -> 0 hold the lock bit over the change of the process's bit in the shared mask;
 * everything else is one CAS on an unlocked word.
 *
 *   N1  While the count is above 0 the bit of our slot in masks[entry] is set.
 *   N2  A pin counts only if the state was still the expected LIVE word *after* the bit
 *       was set; a kill looks at the mask *after* it changed the state.  All four
 *       accesses are sequentially consistent, so at least one side sees the other.
 */
#ifndef CKV_PIN_H
#define CKV_PIN_H

#include "volume.h"

/* Pins `entry` and looks again; false (and no pin) when its state is no longer
 * `live_state`. */
bool ckv_pin(struct ckv_volume *volume, uint32_t entry, uint64_t live_state);

void ckv_unpin(struct ckv_volume *volume, uint32_t entry);

/* Whether this process has populated the pages of this incarnation lately / at all. */
bool ckv_pin_populated(struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
bool ckv_pin_populated_before(struct ckv_volume *volume, uint32_t entry,
    uint64_t sequence);
void ckv_pin_set_populated(struct ckv_volume *volume, uint32_t entry,
    uint64_t sequence);

/* Maps / unmaps the private words. */
enum ckv_status ckv_pin_open(struct ckv_volume *volume,
    struct ckv_error *error) CKV_MUST_CHECK;
void ckv_pin_close(struct ckv_volume *volume);

#endif /* CKV_PIN_H */
