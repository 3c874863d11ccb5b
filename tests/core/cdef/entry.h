/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of entry.h. */

enum ckv_kill_reason {
    CKV_KILL_EVICT,
    CKV_KILL_CROWD,
    CKV_KILL_REMOVE,
    CKV_KILL_REPLACE,
    CKV_KILL_CORRUPT,
    CKV_KILL_CLEAR,
    ...
};

bool ckv_entry_read(struct ckv_volume *volume, uint32_t entry, uint64_t state,
    struct ckv_record *record);
bool ckv_entry_cleared(
    struct ckv_volume *volume, uint8_t namespace_index, uint64_t sequence);
bool ckv_entry_kill(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason);
bool ckv_entry_condemn(struct ckv_volume *volume, uint32_t entry, uint64_t live_state,
    enum ckv_kill_reason reason);
void ckv_entry_bury(struct ckv_volume *volume, uint32_t entry);
enum ckv_status ckv_entry_publish(struct ckv_volume *volume,
    const struct ckv_identity *identity, uint32_t entry, struct ckv_record *record);
void ckv_entry_abort(struct ckv_volume *volume, uint32_t entry);
bool ckv_entry_verified(struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
void ckv_entry_set_verified(
    struct ckv_volume *volume, uint32_t entry, uint64_t sequence);
void ckv_entry_heat(struct ckv_volume *volume, uint32_t entry, uint8_t amount);
