/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of policy.h. */

struct ckv_volume;

struct ckv_offer {
    uint64_t life;
    ...;
};

bool ckv_policy_admits(struct ckv_volume *volume, uint64_t hash, uint32_t pages,
    struct ckv_offer *offer);
