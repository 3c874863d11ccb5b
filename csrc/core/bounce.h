/* SPDX-License-Identifier: Apache-2.0 */
/* bounce.h: a few buffers of huge pages that direct reads go through.
 *
 * The memory of callers is scattered over small pages and starts anywhere; direct I/O
 * wants whole sectors, and a device takes far larger requests when the memory behind them
 * is one piece. */
#ifndef CKV_BOUNCE_H
#define CKV_BOUNCE_H

#include "base.h"

#define CKV_BOUNCE_BYTES ((size_t)2 << 20) /* of a buffer, and of a huge page */

struct ckv_bounce_pool;

/* Takes no memory yet for buffers; at most `count` (1 to 16) are made. */
enum ckv_status ckv_bounce_pool_new(uint32_t count, struct ckv_bounce_pool **pool,
    struct ckv_error *error) CKV_MUST_CHECK;

/* A buffer of CKV_BOUNCE_BYTES; waits for one when all are taken.  NULL: there is no
 * memory of huge pages, now or ever.  Who waits must hold none. */
void *ckv_bounce_take(struct ckv_bounce_pool *pool);
void ckv_bounce_give(struct ckv_bounce_pool *pool, void *buffer);

/* False once huge pages were refused: nobody need ask again. */
bool ckv_bounce_usable(struct ckv_bounce_pool *pool);

void ckv_bounce_pool_free(struct ckv_bounce_pool **pool);

#endif /* CKV_BOUNCE_H */
