/* SPDX-License-Identifier: Apache-2.0 */
/* guard.h */

enum ckv_status ckv_guard_add(const void *address, uint64_t length, ckv_atomic_u64 *note,
    struct ckv_error *error);
void ckv_guard_remove(const void *address);
bool ckv_guard_ready(void);
int ckv_guard_copy(void *target, const void *source, size_t length);
