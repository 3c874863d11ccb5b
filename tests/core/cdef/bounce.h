/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of bounce.h. */

#define CKV_BOUNCE_BYTES ...

struct ckv_bounce_pool;

enum ckv_status ckv_bounce_pool_new(
    uint32_t count, struct ckv_bounce_pool **pool, struct ckv_error *error);
void *ckv_bounce_take(struct ckv_bounce_pool *pool);
void ckv_bounce_give(struct ckv_bounce_pool *pool, void *buffer);
bool ckv_bounce_usable(struct ckv_bounce_pool *pool);
void ckv_bounce_pool_free(struct ckv_bounce_pool **pool);
