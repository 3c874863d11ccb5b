/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of io_pool.h. */

struct ckv_io_pool;

enum ckv_status ckv_io_pool_new(
    uint32_t threads, struct ckv_io_pool **pool, struct ckv_error *error);
void ckv_io_pool_run(struct ckv_io_pool *pool, size_t count,
    void (*run)(void *context, size_t index), void *context);
void ckv_io_pool_free(struct ckv_io_pool **pool);
