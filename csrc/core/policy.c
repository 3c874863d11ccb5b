/* SPDX-License-Identifier: Apache-2.0 */
#include "policy.h"

#include "prefix.h"

enum {
    SLACK_PART = 32, /* of the capacity (Y1) */
    FULL_PART = 16,  /* a new reading counts so much of the level of fullness */
    LIVE_SCALE = 64, /* and so much of the number of live blocks */
    LIVE_ENOUGH = 16 /* blocks, before the volume is full, to guess their number */
};

struct content {
    uint64_t blocks;
    uint64_t bytes;
};

/* Live blocks of all namespaces, which are registered in order and stay. */
static struct content
content_of(const struct ckv_volume *volume)
{
    struct content content = {0};
    for (int i = 0; i < CKV_NAMESPACES_MAX; i++) {
        const struct ckv_namespace *space = &volume->region.namespaces[i];
        if (ckv_load_relaxed_u64(&space->used) == 0) {
            break;
        }
        content.blocks += ckv_total_value(ckv_load_relaxed_u64(&space->entries));
        content.bytes += ckv_total_value(ckv_load_relaxed_u64(&space->bytes));
    }
    return content;
}

static uint64_t
capacity_bytes_of(struct ckv_volume *volume)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        bytes += volume->files[i].geometry.data_bytes;
    }
    return bytes;
}

/* Before the first eviction: how many blocks of the kind stored so far will fit. */
static void
guess_capacity(struct ckv_volume *volume, const struct content *content,
    uint64_t capacity_bytes)
{
    if (content->blocks >= LIVE_ENOUGH && content->bytes >= content->blocks) {
        ckv_admission_resize(&volume->region.admission,
            capacity_bytes / (content->bytes / content->blocks));
    }
}

/* Y1.  Also the moment to learn what fits. */
bool
ckv_policy_full(struct ckv_volume *volume, uint32_t pages)
{
    const struct ckv_admission_head *head = volume->region.admission.head;
    const uint64_t full_bytes = ckv_load_relaxed_u64(&head->full_bytes);
    const struct content content = content_of(volume);
    const uint64_t capacity_bytes = capacity_bytes_of(volume);
    if (full_bytes == 0) {
        guess_capacity(volume, &content, capacity_bytes);
        return false;
    }
    const uint64_t slack =
        capacity_bytes / SLACK_PART + 2 * (uint64_t)pages * CKV_PAGE_BYTES;
    return content.bytes + slack >= full_bytes;
}

/* eviction="prefix": a block by itself is a chain of one. */
static bool
promises_enough(struct ckv_volume *volume, uint64_t hash, uint32_t pages,
    struct ckv_offer *offer)
{
    const struct ckv_density *density = &volume->region.density;
    ckv_prefix_learn(volume);
    if (offer->life == 0) {
        offer->life = ckv_density_miss(density, hash, 0, 0);
    }
    if (offer->verdict == CKV_OFFER_OPEN && ckv_policy_full(volume, pages) &&
        !ckv_density_admits(density, offer->life)) {
        offer->verdict = CKV_OFFER_REFUSED;
        ckv_density_refused(density, 1);
    }
    if (offer->verdict == CKV_OFFER_REFUSED) {
        CKV_POINT("policy.refuse");
        ckv_density_remember(density, hash, offer->life);
        return false;
    }
    return true;
}

bool
ckv_policy_admits(struct ckv_volume *volume, uint64_t hash, uint32_t pages,
    struct ckv_offer *offer)
{
    struct ckv_admission_memory *admission = &volume->region.admission;
    if (ckv_prefix_on(volume)) {
        return promises_enough(volume, hash, pages, offer);
    }
    if (volume->admission == CKV_ADMISSION_ALWAYS) {
        return true;
    }
    ckv_policy_found(volume, hash,
        offer->verdict == CKV_OFFER_ADMITTED ? CKV_ACCESS_PUT_KNOWN : CKV_ACCESS_PUT);
    if (ckv_admission_knows(admission, hash)) {
        offer->verdict = CKV_OFFER_ADMITTED; /* Y5 */
    }
    const bool full = ckv_policy_full(volume, pages);
    if (offer->verdict == CKV_OFFER_ADMITTED || !full ||
        (volume->admission == CKV_ADMISSION_ADAPTIVE &&
            !ckv_admission_asks_twice(admission))) {
        return true;
    }
    CKV_POINT("policy.refuse");
    ckv_admission_remember(admission, hash);
    return false;
}

/* Moves a level to a reading by one part of the way; a first reading is the level. */
static void
follow(ckv_atomic_u64 *level, uint64_t reading, uint64_t part_up, uint64_t part_down)
{
    const uint64_t before = ckv_load_relaxed_u64(level);
    const uint64_t after = before == 0        ? reading
                           : reading > before ? before + (reading - before) / part_up
                                              : before - (before - reading) / part_down;
    ckv_store_relaxed_u64(level, after != 0 ? after : 1);
}

static void
learn_capacity(struct ckv_volume *volume)
{
    struct ckv_admission_memory *admission = &volume->region.admission;
    const struct content content = content_of(volume);
    /* Down by slow steps, about a lap: where much was cleared, the cursor evicts here and
     * there until it has come by all the room, and that must not pass for being full. */
    follow(&admission->head->full_bytes, content.bytes, FULL_PART,
        FULL_PART + content.blocks);
    CKV_POINT("policy.full");
    follow(&admission->head->live_sum, content.blocks * LIVE_SCALE, LIVE_SCALE,
        LIVE_SCALE);
    ckv_admission_resize(admission,
        ckv_load_relaxed_u64(&admission->head->live_sum) / LIVE_SCALE);
}

void
ckv_policy_evicted(struct ckv_volume *volume, uint64_t hash, bool by_cursor)
{
    if (volume->admission == CKV_ADMISSION_ALWAYS && !ckv_prefix_on(volume)) {
        return;
    }
    if (by_cursor) {
        learn_capacity(volume);
    }
    if (!ckv_prefix_on(volume)) { /* else in prefix.c, with its life */
        ckv_admission_remember(&volume->region.admission, hash);
    }
}
