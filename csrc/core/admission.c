/* SPDX-License-Identifier: Apache-2.0 */
#include "admission.h"

enum {
    EPOCH_BITS = 12, /* of a ghost word */
    POSITION_BITS = 20,
    FINGERPRINT_BITS = 30,
    HEAT_BITS = 2, /* of a place in a ring */
    HEAT_MASK = 3,
    HEAT_MAX = 2,
    STEPS_MAX = 256, /* of a hand; the tier's cursor has the same bound */
    DECAY_PART = 8   /* a decision forgets this part: half a ring of requests each, so
                      * that the time constant is four rings */
};

#define EPOCH_MASK    ((1u << EPOCH_BITS) - 1)
#define POSITION_MASK ((1u << POSITION_BITS) - 1)
#define AGE_NEVER     (EPOCH_MASK + 1) /* of an empty word */

/* Multipliers of three hashes that have nothing to do with each other. */
#define MIX_GHOST       UINT64_C(0x9e3779b97f4a7c15)
#define MIX_FINGERPRINT UINT64_C(0xd1b54a32d192ed03)
#define MIX_SHADOW      UINT64_C(0xa0761d6478bd642f)

/* ---- sizes (A2) ------------------------------------------------------------------ */

static uint32_t
ring_max_of(uint32_t entry_count)
{
    const uint64_t part = entry_count >> CKV_ADMISSION_SAMPLE_SHIFT;
    return (uint32_t)ckv_align_up(ckv_max_u64(CKV_ADMISSION_RING_MIN,
                                      ckv_min_u64(part, CKV_ADMISSION_RING_MAX - 32)),
        32);
}

/* Half as many again as there are keys, so that few buckets are full before the window
 * is over. */
static uint64_t
ghost_words(uint64_t keys)
{
    return ckv_align_up(keys + keys / 2 + 1, CKV_ADMISSION_WAYS);
}

uint32_t
ckv_admission_ghost_words(uint32_t entry_count)
{
    return (uint32_t)ghost_words(entry_count);
}

uint64_t
ckv_admission_bytes(uint32_t entry_count)
{
    const uint64_t ring = ring_max_of(entry_count);
    const uint64_t words = ghost_words(entry_count) + CKV_ADMISSION_TOUCHED +
                           2 * (ring + 2 * ring) + ghost_words(ring);
    return sizeof(struct ckv_admission_head) + words * sizeof(ckv_atomic_u32);
}

void
ckv_admission_attach(struct ckv_admission_memory *admission, void *memory,
    uint32_t entry_count)
{
    const uint32_t ring = ring_max_of(entry_count);
    struct ckv_admission_head *head = memory;
    ckv_atomic_u32 *at = (void *)((char *)memory + sizeof *head);
    *admission = (struct ckv_admission_memory){
        .head = head,
        .entry_count = entry_count,
        .ring_max = ring,
        .ghost = {.words = at,
            .clock = &head->ghost_clock,
            .buckets = (uint32_t)(ghost_words(entry_count) / CKV_ADMISSION_WAYS)},
    };
    at += ghost_words(entry_count);
    admission->shadow_ghost = (struct ckv_ghost){.words = at,
        .clock = &head->shadow_clock,
        .buckets = (uint32_t)(ghost_words(ring) / CKV_ADMISSION_WAYS)};
    at += ghost_words(ring);
    for (int i = 0; i < 2; i++) {
        admission->shadows[i] = (struct ckv_shadow){.index = at,
            .ring = at + 2 * ring,
            .hand = &head->hands[i],
            .misses = &head->misses[i]};
        at += 3 * ring;
    }
    admission->touched = at;
}

uint32_t
ckv_admission_capacity(const struct ckv_admission_memory *admission)
{
    const uint32_t blocks = ckv_load_relaxed_u32(&admission->head->capacity);
    return blocks < admission->entry_count ? blocks : admission->entry_count;
}

/* Places of a shadow, the unused one with it: the same part of the capacity as of the
 * keys.  At least 2. */
static uint32_t
ring_size(const struct ckv_admission_memory *admission)
{
    const uint64_t part =
        (uint64_t)ckv_load_relaxed_u32(&admission->head->sample_mask) + 1;
    const uint64_t places = ckv_admission_capacity(admission) / part + 1;
    return (uint32_t)ckv_max_u64(2, ckv_min_u64(places, admission->ring_max));
}

void
ckv_admission_resize(struct ckv_admission_memory *admission, uint64_t blocks)
{
    struct ckv_admission_head *head = admission->head;
    const uint64_t before = ckv_admission_capacity(admission);
    const uint64_t distance = blocks > before ? blocks - before : before - blocks;
    blocks = ckv_min_u64(blocks, admission->entry_count);
    if (blocks == 0 || distance <= before / 16) {
        return;
    }
    uint32_t shift = 0;
    while (blocks >> shift > admission->ring_max ||
           (shift < CKV_ADMISSION_SAMPLE_SHIFT &&
               blocks >> (shift + 1) >= CKV_ADMISSION_SAMPLE_MIN)) {
        shift++;
    }
    ckv_store_relaxed_u32(&head->sample_mask, (1u << shift) - 1);
    CKV_POINT("admission.resize");
    ckv_store_relaxed_u32(&head->capacity, (uint32_t)blocks);
}

/* ---- ghosts ---------------------------------------------------------------------- */

static ckv_atomic_u32 *
ghost_bucket(const struct ckv_ghost *ghost, uint64_t mixed)
{
    const uint64_t bucket = (mixed >> 32) * ghost->buckets >> 32;
    return &ghost->words[bucket * CKV_ADMISSION_WAYS];
}

static uint32_t
ghost_tag(uint64_t mixed)
{
    const uint32_t tag = (uint32_t)mixed >> EPOCH_BITS;
    return tag != 0 ? tag : 1;
}

/* Insertions of an epoch. */
static uint32_t
epoch_length(uint32_t capacity)
{
    return capacity / CKV_ADMISSION_GHOST_EPOCHS + 1;
}

/* Epochs since a word was written.  One from before 4 096 epochs looks young again for
 * the length of a window, if nothing has taken its place in all that time. */
static uint32_t
age_of(uint32_t word, uint32_t epoch)
{
    return word == 0 ? AGE_NEVER : (epoch - word) & EPOCH_MASK;
}

static bool
ghost_knows(const struct ckv_ghost *ghost, uint64_t mixed, uint32_t capacity)
{
    const uint32_t epoch = (uint32_t)(ckv_load_relaxed_u64(ghost->clock) >> 32);
    const ckv_atomic_u32 *bucket = ghost_bucket(ghost, mixed);
    const uint32_t tag = ghost_tag(mixed);
    for (int i = 0; i < CKV_ADMISSION_WAYS; i++) {
        const uint32_t word = ckv_load_relaxed_u32(&bucket[i]);
        if (word >> EPOCH_BITS == tag) {
            return age_of(word, epoch) <= capacity / epoch_length(capacity);
        }
    }
    return false;
}

/* Counts an insertion; returns its epoch. */
static uint32_t
ghost_tick(const struct ckv_ghost *ghost, uint32_t capacity)
{
    uint64_t now = ckv_add_relaxed_u64(ghost->clock, 1) + 1;
    const uint32_t epoch = (uint32_t)(now >> 32);
    if ((uint32_t)now >= epoch_length(capacity)) {
        /* Where others have counted meanwhile, they end the epoch. */
        (void)ckv_cas_ordered_u64(ghost->clock, &now, (uint64_t)(epoch + 1) << 32);
    }
    return epoch;
}

static void
ghost_remember(const struct ckv_ghost *ghost, uint64_t mixed, uint32_t capacity)
{
    const uint32_t epoch = ghost_tick(ghost, capacity);
    ckv_atomic_u32 *bucket = ghost_bucket(ghost, mixed);
    const uint32_t tag = ghost_tag(mixed);
    int oldest = 0;
    uint32_t oldest_age = 0;
    for (int i = 0; i < CKV_ADMISSION_WAYS; i++) {
        const uint32_t word = ckv_load_relaxed_u32(&bucket[i]);
        if (word >> EPOCH_BITS == tag) {
            oldest = i;
            break;
        }
        const uint32_t age = age_of(word, epoch);
        if (age > oldest_age) {
            oldest = i;
            oldest_age = age;
        }
    }
    CKV_POINT("admission.ghost");
    ckv_store_relaxed_u32(&bucket[oldest], tag << EPOCH_BITS | (epoch & EPOCH_MASK));
}

bool
ckv_admission_knows(const struct ckv_admission_memory *admission, uint64_t hash)
{
    return ghost_knows(&admission->ghost, hash * MIX_GHOST,
        ckv_admission_capacity(admission));
}

void
ckv_admission_remember(struct ckv_admission_memory *admission, uint64_t hash)
{
    ghost_remember(&admission->ghost, hash * MIX_GHOST,
        ckv_admission_capacity(admission));
}

/* ---- shadows --------------------------------------------------------------------- */

/* Never 0. */
static uint32_t
fingerprint_of(uint64_t hash)
{
    const uint32_t fingerprint =
        (uint32_t)(hash * MIX_FINGERPRINT >> (64 - FINGERPRINT_BITS));
    return fingerprint != 0 ? fingerprint : 1;
}

static ckv_atomic_u32 *
index_bucket(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, uint32_t fingerprint)
{
    const uint64_t buckets = 2 * (uint64_t)admission->ring_max / CKV_ADMISSION_WAYS;
    const uint64_t bucket = fingerprint * buckets >> FINGERPRINT_BITS;
    return &shadow->index[bucket * CKV_ADMISSION_WAYS];
}

static uint32_t
index_word(uint32_t fingerprint, uint32_t position)
{
    return fingerprint << POSITION_BITS | position;
}

/* Where a fingerprint lies, or 0 (A1). */
static uint32_t
shadow_find(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, uint32_t fingerprint, uint32_t places)
{
    const ckv_atomic_u32 *bucket = index_bucket(admission, shadow, fingerprint);
    for (int i = 0; i < CKV_ADMISSION_WAYS; i++) {
        const uint32_t word = ckv_load_relaxed_u32(&bucket[i]);
        const uint32_t position = word & POSITION_MASK;
        if (word == index_word(fingerprint, position) && position != 0 &&
            position < places &&
            ckv_load_relaxed_u32(&shadow->ring[position]) >> HEAT_BITS == fingerprint) {
            return position;
        }
    }
    return 0;
}

/* Makes a bucket forget a position. */
static void
index_erase(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, uint32_t fingerprint, uint32_t position)
{
    ckv_atomic_u32 *bucket = index_bucket(admission, shadow, fingerprint);
    for (int i = 0; i < CKV_ADMISSION_WAYS; i++) {
        if (ckv_load_relaxed_u32(&bucket[i]) == index_word(fingerprint, position)) {
            ckv_store_relaxed_u32(&bucket[i], 0);
        }
    }
}

/* Whether a word of the bucket leads to a key that is there. */
static bool
index_counts(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, const ckv_atomic_u32 *bucket, uint32_t word,
    uint32_t places)
{
    const uint32_t position = word & POSITION_MASK;
    if (position == 0 || position >= places) {
        return false;
    }
    const uint32_t found = ckv_load_relaxed_u32(&shadow->ring[position]) >> HEAT_BITS;
    return word == index_word(found, position) &&
           index_bucket(admission, shadow, found) == bucket;
}

/* Takes an empty word of the bucket, one that counts no more, or any. */
static void
index_insert(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, uint32_t fingerprint, uint32_t position,
    uint32_t places)
{
    ckv_atomic_u32 *bucket = index_bucket(admission, shadow, fingerprint);
    int choice = -1;
    for (int i = 0; i < CKV_ADMISSION_WAYS && choice < 0; i++) {
        choice = ckv_load_relaxed_u32(&bucket[i]) == 0 ? i : -1;
    }
    for (int i = 0; i < CKV_ADMISSION_WAYS && choice < 0; i++) {
        const uint32_t word = ckv_load_relaxed_u32(&bucket[i]);
        choice = index_counts(admission, shadow, bucket, word, places) ? -1 : i;
    }
    choice = choice < 0 ? (int)(position % CKV_ADMISSION_WAYS) : choice;
    CKV_POINT("admission.index");
    ckv_store_relaxed_u32(&bucket[choice], index_word(fingerprint, position));
}

/* The place that the hand comes to next, from 1 on. */
static uint32_t
place_at(uint32_t hand, uint32_t places)
{
    return 1 + hand % (places - 1);
}

static uint64_t
shadow_mix(uint32_t fingerprint)
{
    return fingerprint * MIX_SHADOW;
}

/* A clock in place: takes the first place without heat. */
static void
shadow_insert(struct ckv_admission_memory *admission, const struct ckv_shadow *shadow,
    uint32_t fingerprint, uint32_t places)
{
    uint32_t position = 0;
    uint32_t word = 0;
    for (int steps = 0; steps < STEPS_MAX; steps++) {
        position = place_at(ckv_add_relaxed_u32(shadow->hand, 1), places);
        word = ckv_load_relaxed_u32(&shadow->ring[position]);
        if ((word & HEAT_MASK) == 0) {
            break;
        }
        ckv_store_relaxed_u32(&shadow->ring[position], word - 1);
    }
    if (word >> HEAT_BITS != 0) {
        const uint32_t victim = word >> HEAT_BITS;
        index_erase(admission, shadow, victim, position);
        if (shadow == &admission->shadows[1]) {
            ghost_remember(&admission->shadow_ghost, shadow_mix(victim), places);
        }
    }
    CKV_POINT("admission.ring");
    ckv_store_relaxed_u32(&shadow->ring[position], fingerprint << HEAT_BITS);
    index_insert(admission, shadow, fingerprint, position, places);
}

/* True for a hit. */
static bool
shadow_hit(const struct ckv_admission_memory *admission,
    const struct ckv_shadow *shadow, uint32_t fingerprint, uint32_t places)
{
    const uint32_t position = shadow_find(admission, shadow, fingerprint, places);
    if (position == 0) {
        return false;
    }
    const uint32_t word = ckv_load_relaxed_u32(&shadow->ring[position]);
    if (word >> HEAT_BITS == fingerprint && (word & HEAT_MASK) < HEAT_MAX) {
        ckv_store_relaxed_u32(&shadow->ring[position], word + 1);
    }
    return true;
}

/* Whether the second shadow takes a key in: while it has room, and at a second touch. */
static bool
shadow_admits(struct ckv_admission_memory *admission, uint32_t fingerprint,
    uint32_t places)
{
    const struct ckv_shadow *shadow = &admission->shadows[1];
    const uint32_t next = place_at(ckv_load_relaxed_u32(shadow->hand), places);
    const uint64_t mixed = shadow_mix(fingerprint);
    if (ckv_load_relaxed_u32(&shadow->ring[next]) == 0 ||
        ghost_knows(&admission->shadow_ghost, mixed, places)) {
        return true;
    }
    ghost_remember(&admission->shadow_ghost, mixed, places);
    return false;
}

/* ---- decision -------------------------------------------------------------------- */

static void
decay(ckv_atomic_u64 *word)
{
    ckv_add_relaxed_u64(word, -(ckv_load_relaxed_u64(word) / DECAY_PART));
}

/* Every half ring of requests.  To refuse blocks asks for a clear gain, to stop that for
 * any: where the two are close, admitting all is the one that cannot be far wrong. */
static void
decide(struct ckv_admission_memory *admission, uint32_t requests)
{
    struct ckv_admission_head *head = admission->head;
    const uint32_t now = ckv_load_relaxed_u32(&head->second_touch) & 1;
    const uint64_t current = ckv_load_relaxed_u64(&head->misses[now]);
    const uint64_t other = ckv_load_relaxed_u64(&head->misses[1 - now]);
    const uint64_t margin = now == 0 ? current / CKV_ADMISSION_SWITCH_PART : 0;
    if (other < current && current - other >= CKV_ADMISSION_SWITCH_MISSES &&
        current - other > margin) {
        ckv_store_relaxed_u32(&head->second_touch, 1 - now);
        ckv_add_relaxed_u64(&head->switches, 1);
    }
    CKV_POINT("admission.decide");
    ckv_add_relaxed_u64(&head->requests, requests);
    decay(&head->requests);
    decay(&head->misses[0]);
    decay(&head->misses[1]);
    ckv_add_relaxed_u32(&head->period, 1);
}

/* Whether an access is a request of its own (A4).  A note is good in the period in which
 * it was made and the next. */
static bool
is_request(struct ckv_admission_memory *admission, uint32_t fingerprint,
    enum ckv_access access)
{
    ckv_atomic_u32 *note = &admission->touched[fingerprint % CKV_ADMISSION_TOUCHED];
    const uint32_t period = ckv_load_relaxed_u32(&admission->head->period) & 0xff;
    const uint32_t seen = ckv_load_relaxed_u32(note);
    const uint32_t tag = fingerprint >> 6; /* its 24 bits that do not all say `note` */
    const bool noted = seen >> 8 == tag && ((period - seen) & 0xff) <= 1 && seen != 0;
    if (access == CKV_ACCESS_READ && noted) {
        ckv_store_relaxed_u32(note, 0);
    } else if (access == CKV_ACCESS_TOUCH && !noted) {
        ckv_store_relaxed_u32(note, tag << 8 | period);
    }
    return !noted || access >= CKV_ACCESS_PUT;
}

void
ckv_admission_access(struct ckv_admission_memory *admission, uint64_t hash,
    enum ckv_access access)
{
    struct ckv_admission_head *head = admission->head;
    const uint32_t fingerprint = fingerprint_of(hash);
    if (ckv_admission_capacity(admission) == 0 ||
        !is_request(admission, fingerprint, access)) {
        return;
    }
    const uint32_t places = ring_size(admission);
    for (int i = 0; i < 2; i++) {
        const struct ckv_shadow *shadow = &admission->shadows[i];
        if (shadow_hit(admission, shadow, fingerprint, places)) {
            continue;
        }
        ckv_add_relaxed_u64(shadow->misses, 1);
        if (i == 0 || access == CKV_ACCESS_PUT_KNOWN ||
            shadow_admits(admission, fingerprint, places)) {
            shadow_insert(admission, shadow, fingerprint, places);
        }
    }
    uint32_t samples = ckv_add_relaxed_u32(&head->samples, 1) + 1;
    if (samples >= places / 2 && ckv_cas_ordered_u32(&head->samples, &samples, 0)) {
        decide(admission, samples);
    }
}

bool
ckv_admission_asks_twice(const struct ckv_admission_memory *admission)
{
    return ckv_load_relaxed_u32(&admission->head->second_touch) != 0;
}

void
ckv_admission_estimate(const struct ckv_admission_memory *admission,
    struct ckv_admission_estimate *estimate)
{
    const struct ckv_admission_head *head = admission->head;
    *estimate = (struct ckv_admission_estimate){
        .requests = ckv_load_relaxed_u64(&head->requests),
        .misses = {ckv_load_relaxed_u64(&head->misses[0]),
            ckv_load_relaxed_u64(&head->misses[1])},
        .switches = ckv_load_relaxed_u64(&head->switches),
    };
}
