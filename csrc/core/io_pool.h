/* SPDX-License-Identifier: Apache-2.0 */
/* io_pool.h: a few threads that run the pieces of a batch, so that one call keeps the
 * device busy.  Started at first use; the calling thread works too. */
#ifndef CKV_IO_POOL_H
#define CKV_IO_POOL_H

#include "base.h"

struct ckv_io_pool;

enum ckv_status ckv_io_pool_new(uint32_t threads, struct ckv_io_pool **pool,
    struct ckv_error *error) CKV_MUST_CHECK;
/* Calls run(context, i) once for every i < count, from several threads, in rising order
 * of start; returns when all are done.  May be called from many threads at once. */
void ckv_io_pool_run(struct ckv_io_pool *pool, size_t count,
    void (*run)(void *context, size_t index), void *context);
void ckv_io_pool_free(struct ckv_io_pool **pool);

#endif /* CKV_IO_POOL_H */
