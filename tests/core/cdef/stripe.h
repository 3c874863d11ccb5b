/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of stripe.h and point.h. */

struct ckv_extent {
    uint32_t entry;
    struct ckv_file *file;
    uint32_t first_page;
    uint32_t pages;
    bool hole;
};

enum ckv_status ckv_stripe_reserve(
    struct ckv_volume *volume, uint32_t pages, uint64_t *deadline_ns,
    struct ckv_extent *extent);
void ckv_stripe_link(struct ckv_volume *volume, uint32_t entry);
uint32_t ckv_stripe_next(
    struct ckv_volume *volume, const struct ckv_file *file, uint32_t from, uint32_t to);
bool ckv_stripe_lock(struct ckv_volume *volume, uint32_t stripe, uint64_t timeout_ns);
void ckv_stripe_unlock(struct ckv_volume *volume, uint32_t stripe);

extern void (*ckv_point_hook)(const char *name);
extern void (*ckv_yield_hook)(void);
