/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of pin.h. */

bool ckv_pin(struct ckv_volume *volume, uint32_t entry, uint64_t live_state);
void ckv_unpin(struct ckv_volume *volume, uint32_t entry);
bool ckv_pin_populated(struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
bool ckv_pin_populated_before(
    struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
void ckv_pin_set_populated(
    struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
