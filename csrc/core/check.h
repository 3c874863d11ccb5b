/* SPDX-License-Identifier: Apache-2.0 */
/* check.h: the verifier: walks everything, proves every invariant, can repair. */
#ifndef CKV_CHECK_H
#define CKV_CHECK_H

#include "volume.h"

enum ckv_status ckv_check(struct ckv_volume *volume, bool repair,
    int (*progress)(void *context, uint64_t done, uint64_t total), void *context,
    struct ckv_verify_report *report, struct ckv_error *error) CKV_MUST_CHECK;

/* Verifies every entry of a failed file; true when it is sound and back in use. */
bool ckv_check_recover_file(struct ckv_volume *volume, struct ckv_file *file);

#endif /* CKV_CHECK_H */
