/* SPDX-License-Identifier: Apache-2.0 */
/* cache.h: one handle: a namespace and a checking policy over a shared volume.
 *
 *   H1  `calls` counts calls inside the engine; close marks the handle first and then
 *       waits for them, so that no call meets a volume that is gone.
 *   H2  A handle that came through fork() refuses everything and touches nothing shared.
 *   H3  A reader without a slot exchanges its volume when a new life of the region began
 *       (`swap` is held for reading during each call, for writing during the exchange).
 */
#ifndef CKV_CACHE_H
#define CKV_CACHE_H

#include "index.h"

struct ckv_string { /* what ckv_get_info() hands out lives as long as the handle */
    struct ckv_string *next;
    char text[];
};

struct ckv_cache {
    uint64_t magic;
    struct ckv_volume *volume;
    const ckv_atomic_u64 *fork_canary; /* that of the volume; outlives it */
    uint8_t namespace_tag[16];
    uint8_t namespace_index;
    enum ckv_verify verify;
    bool read_only;
    ckv_atomic_u64 calls;
    ckv_atomic_u32 closing;
    pthread_rwlock_t swap;
    pthread_mutex_t strings_lock;
    struct ckv_string *strings;
    struct ckv_options options; /* of a reader, to open anew: owns paths and strings */
};

/* Brackets every call.  CKV_E_CLOSED, CKV_E_FORKED, CKV_E_READ_ONLY (when `writes`). */
enum ckv_status ckv_cache_begin(struct ckv_cache *cache, bool writes,
    struct ckv_error *error) CKV_MUST_CHECK;
void ckv_cache_end(struct ckv_cache *cache);

/* A copy of `text` that is valid while the handle is open; "" without memory. */
const char *ckv_cache_keep(struct ckv_cache *cache, const char *text);

/* Turns a key of the user into what is compared.  CKV_E_INVALID for an impossible one. */
enum ckv_status ckv_cache_identify(const struct ckv_cache *cache,
    const struct ckv_key *key, struct ckv_identity *identity,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Removes every block of the namespace.  See cache.c for what makes it durable. */
enum ckv_status ckv_cache_clear(struct ckv_cache *cache, uint64_t *removed,
    struct ckv_error *error) CKV_MUST_CHECK;

#endif /* CKV_CACHE_H */
