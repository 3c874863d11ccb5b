/* SPDX-License-Identifier: Apache-2.0 */
/* cache.c: handles; clear.
 *
 * Clearing raises the clear sequence of the namespace in the region: from then on every
 * entry with a sequence up to it is dead for every lookup, at the price of one store.
 * The cursor collects the pages later.  It is durable when the record of the namespace
 * is on the medium: copy (clear_count & 3) of four is written, so that two that clear
 * at once, or one that is killed in the middle, leave the other copies whole; the
 * largest count counts.
 */
#include "cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "announce.h"
#include "entry.h"
#include "event.h"
#include "sha256.h"

#define CACHE_MAGIC UINT64_C(0x43414348a5a5f00d)

enum {
    KEY_MAX = 65535,
    CLEAR_ROUNDS_MAX = 8 /* under a stream of puts the count may stay a few short */
};

/* ---- the options of a reader ------------------------------------------------------ */

static void
free_options(struct ckv_options *options)
{
    union {
        const void *in;
        void *out;
    } pointer;
    for (size_t i = 0; options->paths != NULL && i < options->path_count; i++) {
        pointer.in = options->paths[i].path;
        free(pointer.out);
    }
    pointer.in = options->paths;
    free(pointer.out);
    pointer.in = options->shm_directory;
    free(pointer.out);
    options->paths = NULL;
    options->shm_directory = NULL;
}

static bool
copy_options(struct ckv_options *target, const struct ckv_options *source)
{
    *target = *source;
    target->namespace_data = NULL;
    target->namespace_length = 0;
    target->shm_directory = NULL;
    struct ckv_path *paths = calloc(source->path_count, sizeof *paths);
    target->paths = paths;
    if (paths == NULL) {
        return false;
    }
    for (size_t i = 0; i < source->path_count; i++) {
        paths[i].capacity_bytes = source->paths[i].capacity_bytes;
        paths[i].path = strdup(source->paths[i].path);
        if (paths[i].path == NULL) {
            return false;
        }
    }
    if (source->shm_directory != NULL) {
        target->shm_directory = strdup(source->shm_directory);
        return target->shm_directory != NULL;
    }
    return true;
}

/* H2.  Asked of the handle: a reader's volume may be exchanged meanwhile. */
static bool
forked(const struct ckv_cache *cache)
{
    return ckv_load_relaxed_u64(cache->fork_canary) == 0;
}

/* ---- open and close --------------------------------------------------------------- */

static void
tag_of(const struct ckv_options *options, uint8_t tag[16])
{
    memset(tag, 0, 16);
    if (options->namespace_length > 0) {
        uint8_t digest[32];
        ckv_sha256(options->namespace_data, options->namespace_length, digest);
        memcpy(tag, digest, 16);
    }
}

void
ckv_options_init(struct ckv_options *options)
{
    *options = (struct ckv_options){.create = true, .write_behind = true};
}

enum ckv_status
ckv_open(const struct ckv_options *options, struct ckv_cache **result,
    struct ckv_error *error)
{
    if (options->namespace_length > KEY_MAX) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "namespace of %zu bytes; at most 65535 are allowed",
            options->namespace_length);
    }
    struct ckv_cache *cache = calloc(1, sizeof *cache);
    if (cache == NULL ||
        (options->mode == CKV_MODE_READ && !copy_options(&cache->options, options))) {
        if (cache != NULL) {
            free_options(&cache->options);
        }
        free(cache);
        return ckv_fail(error, CKV_E_NO_MEMORY, ENOMEM, "no memory for a handle");
    }
    cache->magic = CACHE_MAGIC;
    cache->verify = options->verify;
    cache->read_only = options->mode == CKV_MODE_READ;
    tag_of(options, cache->namespace_tag);
    (void)pthread_rwlock_init(&cache->swap, NULL); /* cannot fail with defaults */
    (void)pthread_mutex_init(&cache->strings_lock, NULL); /* likewise */
    const enum ckv_status status = ckv_volume_open(options, cache->namespace_tag,
        &cache->volume, &cache->namespace_index, error);
    if (status != CKV_OK) {
        (void)pthread_rwlock_destroy(&cache->swap);
        free_options(&cache->options);
        free(cache);
        return status;
    }
    cache->fork_canary = cache->volume->fork_canary;
    *result = cache;
    return CKV_OK;
}

static void
free_strings(struct ckv_cache *cache)
{
    while (cache->strings != NULL) {
        struct ckv_string *first = cache->strings;
        cache->strings = first->next;
        free(first);
    }
}

const char *
ckv_cache_keep(struct ckv_cache *cache, const char *text)
{
    (void)pthread_mutex_lock(&cache->strings_lock); /* cannot fail: never taken twice */
    struct ckv_string *kept = cache->strings;
    while (kept != NULL && strcmp(kept->text, text) != 0) {
        kept = kept->next;
    }
    const size_t length = strlen(text) + 1;
    if (kept == NULL && (kept = malloc(sizeof *kept + length)) != NULL) {
        memcpy(kept->text, text, length);
        kept->next = cache->strings;
        cache->strings = kept;
    }
    (void)pthread_mutex_unlock(&cache->strings_lock); /* cannot fail: we hold it */
    return kept != NULL ? kept->text : "";
}

void
ckv_close(struct ckv_cache **pointer)
{
    struct ckv_cache *cache = *pointer;
    if (cache == NULL) {
        return;
    }
    CKV_CHECK(cache->magic == CACHE_MAGIC);
    *pointer = NULL;
    if (!forked(cache)) { /* H2: in a child only our memory is ours */
        ckv_store_ordered_u32(&cache->closing, 1);
        while (ckv_load_ordered_u64(&cache->calls) != 0) { /* H1 */
            ckv_os.sleep_ns(50000);
        }
        ckv_volume_release(cache->volume);
        (void)pthread_rwlock_destroy(&cache->swap);
    }
    free_strings(cache);
    free_options(&cache->options);
    cache->magic = 0;
    free(cache);
}

/* Opens the set anew when its region began another life. */
static enum ckv_status
exchange_volume(struct ckv_cache *cache, struct ckv_error *error)
{
    (void)pthread_rwlock_wrlock(&cache->swap);
    enum ckv_status status = CKV_OK;
    if (!ckv_volume_current(cache->volume)) {
        struct ckv_volume *fresh = NULL;
        uint8_t index = 0;
        status = ckv_volume_open(&cache->options, cache->namespace_tag, &fresh, &index,
            error);
        if (status == CKV_OK) {
            ckv_volume_release(cache->volume);
            cache->volume = fresh;
            cache->namespace_index = index;
        }
    }
    (void)pthread_rwlock_unlock(&cache->swap);
    return status;
}

enum ckv_status
ckv_cache_begin(struct ckv_cache *cache, bool writes, struct ckv_error *error)
{
    CKV_CHECK(cache != NULL && cache->magic == CACHE_MAGIC);
    if (CKV_UNLIKELY(forked(cache))) {
        return ckv_fail(error, CKV_E_FORKED, 0,
            "this cache was opened before fork(); open it again in the child process");
    }
    ckv_add_ordered_u64(&cache->calls, 1);
    if (CKV_UNLIKELY(ckv_load_ordered_u32(&cache->closing) != 0)) {
        ckv_add_ordered_u64(&cache->calls, (uint64_t)-1);
        return ckv_fail(error, CKV_E_CLOSED, 0, "the cache is closed");
    }
    if (CKV_UNLIKELY(cache->read_only)) {
        enum ckv_status status = CKV_OK;
        if (writes) {
            status = ckv_fail(error, CKV_E_READ_ONLY, 0,
                "the cache is open for reading only; open it with mode=\"rw\"");
        } else {
            (void)pthread_rwlock_rdlock(&cache->swap);
            while (status == CKV_OK && !ckv_volume_current(cache->volume)) {
                (void)pthread_rwlock_unlock(&cache->swap);
                status = exchange_volume(cache, error);
                (void)pthread_rwlock_rdlock(&cache->swap);
            }
            if (status != CKV_OK) {
                (void)pthread_rwlock_unlock(&cache->swap);
            }
        }
        if (status != CKV_OK) {
            ckv_add_ordered_u64(&cache->calls, (uint64_t)-1);
            return status;
        }
    }
    return CKV_OK;
}

void
ckv_cache_end(struct ckv_cache *cache)
{
    if (cache->read_only) {
        (void)pthread_rwlock_unlock(&cache->swap);
    }
    ckv_add_ordered_u64(&cache->calls, (uint64_t)-1);
}

enum ckv_status
ckv_cache_identify(const struct ckv_cache *cache, const struct ckv_key *key,
    struct ckv_identity *identity, struct ckv_error *error)
{
    if (CKV_UNLIKELY(key->length == 0 || key->length > KEY_MAX)) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "a key of %zu bytes; keys have 1 to 65535 bytes", key->length);
    }
    memcpy(identity->namespace_tag, cache->namespace_tag, 16);
    identity->namespace_index = cache->namespace_index;
    identity->digested = key->length != 32;
    if (identity->digested) {
        ckv_sha256(key->data, key->length, identity->key);
    } else {
        memcpy(identity->key, key->data, 32);
    }
    identity->hash = ckv_index_hash(cache->volume, identity->namespace_tag,
        identity->key, identity->digested);
    return CKV_OK;
}

/* ---- clear ------------------------------------------------------------------------ */

static int
write_clear_record(const struct ckv_file *file, uint32_t index,
    const struct ckv_namespace_record *record)
{
    const uint64_t copy = record->clear_count & (CKV_NAMESPACE_COPIES - 1);
    const uint64_t offset = file->geometry.namespaces_offset +
                            (index * CKV_NAMESPACE_COPIES + copy) * sizeof *record;
    const int result = ckv_os_write_all(file->data_fd, record, sizeof *record, offset);
    return result < 0 ? result : ckv_os_sync(file->data_fd);
}

/* Makes the clear sequence durable in every usable file. */
static enum ckv_status
persist_clear(struct ckv_volume *volume, uint32_t index, struct ckv_error *error)
{
    struct ckv_namespace *space = &volume->region.namespaces[index];
    uint64_t written = 0;
    uint32_t rounds = 0;
    uint32_t took = 0; /* files that have it */
    do {
        took = 0;
        struct ckv_namespace_record record = {0};
        memcpy(record.tag, space->tag, sizeof record.tag);
        record.clear_count = ckv_add_ordered_u64(&space->clear_count, 1) + 1;
        record.clear_sequence = ckv_load_ordered_u64(&space->clear_sequence);
        record.seal = ckv_seal_of(&record, offsetof(struct ckv_namespace_record, seal));
        written = record.clear_sequence;
        for (uint32_t i = 0; i < volume->file_count; i++) {
            struct ckv_file *file = &volume->files[i];
            if (!ckv_volume_file_usable(volume, file)) {
                continue;
            }
            CKV_POINT("clear.record");
            const int result = write_clear_record(file, index, &record);
            if (result < 0) {
                ckv_volume_fail_path(volume, file, "clearing a namespace", -result);
                return ckv_fail(error, CKV_E_OS, -result,
                    "the blocks are gone for every process, but %s could not record "
                    "it: "
                    "they may come back after a power cut",
                    file->path);
            }
            took++;
        }
        /* Twice at least: a late write of a process that was stopped then hits one copy
         * of the newest clear only.  And again when another clear meanwhile has a
         * larger sequence: the last writer has the largest. */
    } while (++rounds < 2 || ckv_load_ordered_u64(&space->clear_sequence) != written);
    if (took == 0) {
        return ckv_fail(error, CKV_E_OS, EIO,
            "the blocks are gone for every process, but no path is in use that could "
            "record "
            "it: they may come back");
    }
    return CKV_OK;
}

enum ckv_status
ckv_cache_clear(struct ckv_cache *cache, uint64_t *removed, struct ckv_error *error)
{
    struct ckv_volume *volume = cache->volume;
    struct ckv_namespace *space = &volume->region.namespaces[cache->namespace_index];
    static const uint8_t no_key[32];
    CKV_POINT("clear.begin");
    *removed = 0;
    ckv_announce_begin(volume);
    uint64_t sequence;
    int round = 0;
    do {
        sequence = ckv_load_ordered_u64(&volume->region.header->sequence);
        ckv_raise_u64(&space->clear_sequence, sequence); /* W5 */
        *removed += ckv_total_reset(&space->entries);
        (void)ckv_total_reset(&space->bytes);
        CKV_POINT("clear.counted");
        ckv_event_record(volume, CKV_EVENT_CLEARED, cache->namespace_tag, no_key,
            false); /* A3 */
    } while (ckv_load_ordered_u64(&volume->region.header->sequence) != sequence &&
             ++round < CLEAR_ROUNDS_MAX);
    if (round == CLEAR_ROUNDS_MAX) {
        ckv_event_record_gap(volume); /* A3 */
    }
    ckv_announce_end(volume);
    return persist_clear(volume, cache->namespace_index, error);
}
