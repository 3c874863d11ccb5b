/* SPDX-License-Identifier: Apache-2.0 */
#include "index.h"

#include <string.h>

#include "entry.h"
#include "slot.h"

#define SEQUENCE_MASK UINT64_C(0xfffff)

/* Times that two buckets may change under one search.  Only memory that somebody
 * scribbles in gets there; then the answer is a miss, or no room. */
enum { ROUNDS_MAX = 10000 };

#define SETTLE_WAIT_NS  UINT64_C(1000000000)
#define SETTLE_SLICE_NS UINT64_C(5000000)

struct pair { /* the two candidate buckets of a hash */
    struct ckv_bucket *buckets[2];
    uint64_t tag; /* 1..4095, so that no slot word is 0 */
};

__extension__ typedef unsigned __int128 wide;

static uint64_t
fold(uint64_t a, uint64_t b)
{
    const wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t
ckv_index_hash(const struct ckv_volume *volume, const uint8_t namespace_tag[16],
    const uint8_t key[32], bool digested)
{
    /* Keys are digests already as a rule, but a user may choose them: a secret keeps
     * anybody from aiming at one bucket.  It stays the same in all lives of the set, so
     * that a checkpoint may name keys by their hash. */
    uint64_t words[6];
    memcpy(words, namespace_tag, 16);
    memcpy(words + 2, key, 32);
    const uint64_t secret = volume->hash_key;
    uint64_t hash = fold(words[0] ^ UINT64_C(0x9e3779b97f4a7c15),
        words[1] ^ secret ^ (digested ? UINT64_C(0xd1b54a32d192ed03) : 0));
    hash ^= fold(words[2] ^ UINT64_C(0xa0761d6478bd642f), words[3] ^ secret);
    hash ^= fold(words[4] ^ secret, words[5] ^ UINT64_C(0xe7037ed1a0b428db));
    return fold(hash ^ secret, UINT64_C(0x8ebc6af09c88c6e3));
}

/* Half of a hash as a number below `count`. */
static uint64_t
scale(uint64_t hash, uint64_t count)
{
    return (hash >> 32) * count >> 32;
}

static struct pair
pair_of(const struct ckv_volume *volume, uint64_t hash)
{
    const uint64_t count = volume->region.layout.bucket_count;
    const uint64_t first = scale(hash << 32, count);
    uint64_t second = scale(hash * UINT64_C(0x9e3779b97f4a7c15), count);
    if (second == first) {
        second = first + 1 < count ? first + 1 : 0;
    }
    const uint64_t tag = hash >> 52;
    return (struct pair){
        .buckets = {&volume->region.buckets[first], &volume->region.buckets[second]},
        .tag = tag == 0 ? 1 : tag,
    };
}

static uint64_t
word_of(uint64_t tag, uint32_t entry, uint64_t sequence)
{
    return tag << 52 | (sequence & SEQUENCE_MASK) << 32 | entry;
}

void
ckv_index_prefetch(const struct ckv_volume *volume, uint64_t hash)
{
    const struct pair pair = pair_of(volume, hash);
    __builtin_prefetch(pair.buckets[0]);
    __builtin_prefetch(pair.buckets[1]);
}

/* Whether the state of the entry of a slot word is LIVE with the sequence of the word. */
static bool
is_live(uint64_t state, uint64_t word)
{
    return ckv_state_kind(state) == CKV_STATE_LIVE &&
           (ckv_state_sequence(state) & SEQUENCE_MASK) == (word >> 32 & SEQUENCE_MASK);
}

/* The LIVE state that a slot word stands for, or 0 when it stands for none (I1). */
static uint64_t
live_state_of(struct ckv_volume *volume, uint64_t word)
{
    const uint32_t entry = (uint32_t)word;
    if (entry >= volume->region.layout.entry_count) {
        return 0;
    }
    const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]); /* R1 */
    return is_live(state, word) ? state : 0;
}

static bool
same_identity(const struct ckv_record *record, const struct ckv_identity *identity)
{
    return memcmp(record->key, identity->key, 32) == 0 &&
           memcmp(record->namespace_tag, identity->namespace_tag, 16) == 0 &&
           ((record->flags & CKV_RECORD_DIGESTED) != 0) == identity->digested;
}

/* Looks at one slot; true when it holds a live entry of the identity. */
static bool
match(struct ckv_volume *volume, const struct ckv_identity *identity, uint64_t word,
    struct ckv_found *found)
{
    const uint64_t state = live_state_of(volume, word);
    if (state == 0 || !ckv_entry_read(volume, (uint32_t)word, state, &found->record) ||
        !same_identity(&found->record, identity)) {
        return false;
    }
    found->hash = identity->hash;
    found->entry = (uint32_t)word;
    found->state = state;
    return true;
}

bool
ckv_index_find(struct ckv_volume *volume, const struct ckv_identity *identity,
    struct ckv_found *found)
{
    const struct pair pair = pair_of(volume, identity->hash);
    for (int round = 0; round < ROUNDS_MAX; round++) {
        uint64_t versions[2];
        bool any = false;
        for (int b = 0; b < 2; b++) {
            versions[b] = ckv_load_acquire_u64(&pair.buckets[b]->version); /* R2 */
        }
        for (int b = 0; b < 2; b++) {
            for (int s = 0; s < CKV_BUCKET_SLOTS; s++) {
                const uint64_t word = ckv_load_acquire_u64(&pair.buckets[b]->slots[s]);
                struct ckv_found candidate;
                if (word >> 52 == pair.tag &&
                    match(volume, identity, word, &candidate) &&
                    (!any ||
                        candidate.record.sequence > found->record.sequence)) { /* I2 */
                    *found = candidate;
                    any = true;
                }
            }
        }
        if (any) {
            /* Asked of the entry: a reader may have come before its namespace did. */
            const uint8_t owner =
                ckv_load_relaxed_u8(&volume->region.owners[found->entry]);
            found->file = ckv_volume_file_of(volume, found->entry);
            return found->file != NULL && ckv_volume_file_usable(volume, found->file) &&
                   !ckv_entry_cleared(volume, owner, found->record.sequence);
        }
        ckv_fence_acquire();
        CKV_POINT("index.absent");
        if (ckv_load_relaxed_u64(&pair.buckets[0]->version) == versions[0] &&
            ckv_load_relaxed_u64(&pair.buckets[1]->version) == versions[1]) { /* I3 */
            return false;
        }
    }
    return false;
}

/* Whether a slot word leads to a block that was condemned and whose record is not struck
 * yet (E4); then the record, and the state with the slot and incarnation that will do
 * it. */
static bool
unstruck(struct ckv_volume *volume, uint64_t word, struct ckv_record *record,
    uint64_t *state)
{
    const uint32_t entry = (uint32_t)word;
    if (entry >= volume->region.layout.entry_count) {
        return false;
    }
    *state = ckv_load_acquire_u64(&volume->region.states[entry]);
    const enum ckv_state_kind kind = ckv_state_kind(*state);
    const struct ckv_file *file = ckv_volume_file_of(volume, entry);
    /* RESERVED: by a put that has written its record, or one that was given the number of
     * an entry which it has not struck yet. */
    if ((kind != CKV_STATE_DYING && kind != CKV_STATE_RESERVED) || file == NULL ||
        file->table == NULL) {
        return false;
    }
    memcpy(record, &file->table[entry - file->first_entry], sizeof *record);
    return record->seal != 0 &&
           (record->sequence & SEQUENCE_MASK) == (word >> 32 & SEQUENCE_MASK);
}

/* Whether a slot that is not empty may be given away (I1).  Sweeps who has died over
 * it.  A RESERVED entry has no record yet that would say whether the slot is of that put
 * or of an earlier life: it is left alone, which costs a slot until the put is over.
 * One look tells RESERVED from LIVE: between two of them the put may come to its end. */
static bool
stale(struct ckv_volume *volume, uint64_t word)
{
    const uint32_t entry = (uint32_t)word;
    if (entry >= volume->region.layout.entry_count) {
        return true;
    }
    uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
    if (is_live(state, word)) {
        return false;
    }
    struct ckv_record record;
    if (ckv_state_kind(state) != CKV_STATE_RESERVED &&
        !unstruck(volume, word, &record, &state)) {
        return true;
    }
    if (ckv_slot_alive(volume, ckv_state_slot(state), ckv_state_incarnation(state)) ||
        !ckv_slot_sweep(volume, ckv_state_slot(state))) {
        return false;
    }
    return live_state_of(volume, word) == 0; /* it may have stored before it was gone */
}

/* CAS of the first slot of the bucket that is empty (or stale, if `also_stale`). */
static bool
insert_into(struct ckv_volume *volume, struct ckv_bucket *bucket, uint64_t word,
    bool also_stale)
{
    for (int s = 0; s < CKV_BUCKET_SLOTS; s++) {
        uint64_t seen = ckv_load_acquire_u64(&bucket->slots[s]);
        if (seen != 0 && (!also_stale || !stale(volume, seen))) {
            continue;
        }
        if (ckv_cas_ordered_u64(&bucket->slots[s], &seen, word)) {
            CKV_POINT("index.inserted");
            return true;
        }
    }
    return false;
}

static int
empty_slots(const struct ckv_bucket *bucket)
{
    int count = 0;
    for (int s = 0; s < CKV_BUCKET_SLOTS; s++) {
        count += ckv_load_relaxed_u64(&bucket->slots[s]) == 0;
    }
    return count;
}

/* Whether a LIVE entry is a version of the key with this hash. */
static bool
is_version(struct ckv_volume *volume, uint32_t entry, uint64_t state, uint64_t hash)
{
    struct ckv_record record;
    return ckv_entry_read(volume, entry, state, &record) &&
           ckv_index_hash(volume, record.namespace_tag, record.key,
               (record.flags & CKV_RECORD_DIGESTED) != 0) == hash;
}

/* Evicts the coldest entry of the two buckets that may be (see ckv_index_insert); true
 * when a slot may have become free.  It is condemned and struck while the index still
 * leads to it (E4 in entry.h). */
static bool
evict_from(struct ckv_volume *volume, const struct pair *pair, uint64_t hash)
{
    uint64_t victim_word = 0;
    uint64_t victim_state = 0;
    uint8_t least = UINT8_MAX;
    for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
        const uint64_t seen = ckv_load_acquire_u64(&pair->buckets[i / CKV_BUCKET_SLOTS]
                ->slots[i % CKV_BUCKET_SLOTS]);
        if (seen == 0 || stale(volume, seen)) {
            return true;
        }
        const uint32_t entry = (uint32_t)seen;
        const uint64_t state = live_state_of(volume, seen);
        if (state == 0) {
            continue; /* of somebody who is storing, or about to free it */
        }
        const uint8_t heat = ckv_load_relaxed_u8(&volume->region.heats[entry]);
        if (heat < least && ckv_load_ordered_u64(&volume->region.masks[entry]) == 0 &&
            (seen >> 52 != pair->tag || !is_version(volume, entry, state, hash))) {
            victim_word = seen;
            victim_state = state;
            least = heat;
        }
    }
    if (victim_word == 0) {
        return false;
    }
    CKV_POINT("index.crowded");
    if (ckv_entry_kill(volume, (uint32_t)victim_word, victim_state, CKV_KILL_CROWD)) {
        ckv_bump(volume, CKV_COUNTER_bucket_evictions, 1);
    }
    return true;
}

bool
ckv_index_insert(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence)
{
    const struct pair pair = pair_of(volume, hash);
    const uint64_t word = word_of(pair.tag, entry, sequence);
    for (int round = 0; round < ROUNDS_MAX; round++) {
        /* Into the emptier bucket first: at half load no bucket then fills up. */
        const int first = empty_slots(pair.buckets[1]) > empty_slots(pair.buckets[0]);
        if (insert_into(volume, pair.buckets[first], word, false) ||
            insert_into(volume, pair.buckets[1 - first], word, false) ||
            insert_into(volume, pair.buckets[first], word, true) ||
            insert_into(volume, pair.buckets[1 - first], word, true)) {
            return true;
        }
        if (!evict_from(volume, &pair, hash)) {
            return false;
        }
    }
    return false;
}

void
ckv_index_show(struct ckv_volume *volume, uint64_t hash)
{
    const struct pair pair = pair_of(volume, hash);
    for (int b = 0; b < 2; b++) {
        ckv_add_ordered_u64(&pair.buckets[b]->version, 1); /* W2 */
    }
}

bool
ckv_index_fill(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence)
{
    const struct pair pair = pair_of(volume, hash);
    const int emptier = empty_slots(pair.buckets[1]) > empty_slots(pair.buckets[0]);
    struct ckv_bucket *bucket = pair.buckets[emptier];
    for (int s = 0; s < CKV_BUCKET_SLOTS; s++) {
        if (ckv_load_relaxed_u64(&bucket->slots[s]) == 0) {
            ckv_store_relaxed_u64(&bucket->slots[s],
                word_of(pair.tag, entry, sequence));
            return true;
        }
    }
    return false;
}

/* Kills every live entry of the identity below `sequence` or below another of them. */
static uint64_t
keep_newest(struct ckv_volume *volume, const struct ckv_identity *identity,
    uint64_t sequence)
{
    const struct pair pair = pair_of(volume, identity->hash);
    uint64_t newest = sequence;
    for (int round = 0; round < 2;
        round++) { /* find the newest, then kill the others */
        for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
            const uint64_t word =
                ckv_load_acquire_u64(&pair.buckets[i / CKV_BUCKET_SLOTS]
                        ->slots[i % CKV_BUCKET_SLOTS]);
            struct ckv_found candidate;
            if (word >> 52 != pair.tag || !match(volume, identity, word, &candidate)) {
                continue;
            }
            if (round == 0) {
                newest = ckv_max_u64(newest, candidate.record.sequence);
            } else if (candidate.record.sequence < newest) {
                (void)ckv_entry_kill(volume, candidate.entry, candidate.state,
                    CKV_KILL_REPLACE);
            }
        }
    }
    return newest;
}

uint64_t
ckv_index_keep_newest(struct ckv_volume *volume, const struct ckv_identity *identity)
{
    return keep_newest(volume, identity, 0);
}

void
ckv_index_keep_stored(struct ckv_volume *volume, const struct ckv_identity *identity,
    uint64_t sequence)
{
    (void)keep_newest(volume, identity, sequence);
}

void
ckv_index_kill_hidden(struct ckv_volume *volume, const struct ckv_identity *identity)
{
    const struct pair pair = pair_of(volume, identity->hash);
    for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
        const uint64_t word = ckv_load_acquire_u64(&pair.buckets[i / CKV_BUCKET_SLOTS]
                ->slots[i % CKV_BUCKET_SLOTS]);
        struct ckv_found hidden;
        if (word >> 52 != pair.tag || !match(volume, identity, word, &hidden)) {
            continue;
        }
        const struct ckv_file *file = ckv_volume_file_of(volume, hidden.entry);
        if (file != NULL && !ckv_volume_file_usable(volume, file)) {
            (void)ckv_entry_kill(volume, hidden.entry, hidden.state, CKV_KILL_REMOVE);
        }
    }
}

void
ckv_index_settle(struct ckv_volume *volume, const struct ckv_identity *identity,
    uint64_t *deadline_ns)
{
    const struct pair pair = pair_of(volume, identity->hash);
    for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
        const ckv_atomic_u64 *slot =
            &pair.buckets[i / CKV_BUCKET_SLOTS]->slots[i % CKV_BUCKET_SLOTS];
        uint64_t state;
        for (uint64_t slice = 20000;; slice = ckv_min_u64(slice * 2, SETTLE_SLICE_NS)) {
            const uint64_t word = ckv_load_acquire_u64(slot);
            struct ckv_record record;
            if (word >> 52 != pair.tag || !unstruck(volume, word, &record, &state) ||
                !same_identity(&record, identity)) {
                break;
            }
            const uint64_t now = ckv_os.monotonic_ns();
            if (*deadline_ns == 0) {
                *deadline_ns = now + SETTLE_WAIT_NS;
            }
            if (now >= *deadline_ns) {
                return; /* who should do it is stopped */
            }
            const uint32_t owner = ckv_state_slot(state);
            if (ckv_slot_alive(volume, owner, ckv_state_incarnation(state)) ||
                !ckv_slot_sweep(volume, owner)) {
                ckv_os.sleep_ns(slice);
            }
        }
    }
}

void
ckv_index_erase(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence)
{
    const struct pair pair = pair_of(volume, hash);
    const uint64_t word = word_of(pair.tag, entry, sequence);
    for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
        struct ckv_bucket *bucket = pair.buckets[i / CKV_BUCKET_SLOTS];
        ckv_atomic_u64 *slot = &bucket->slots[i % CKV_BUCKET_SLOTS];
        uint64_t seen = ckv_load_relaxed_u64(slot);
        /* The sequence bits keep a late erase off the slot of a reused entry. */
        if (seen == word && ckv_cas_ordered_u64(slot, &seen, 0)) {
            CKV_POINT("index.erased");
            ckv_add_ordered_u64(&bucket->version, 1); /* W2 */
            return;
        }
    }
}

bool
ckv_index_holds(struct ckv_volume *volume, uint64_t hash, uint32_t entry,
    uint64_t sequence)
{
    const struct pair pair = pair_of(volume, hash);
    const uint64_t word = word_of(pair.tag, entry, sequence);
    for (int i = 0; i < 2 * CKV_BUCKET_SLOTS; i++) {
        if (ckv_load_acquire_u64(&pair.buckets[i / CKV_BUCKET_SLOTS]
                    ->slots[i % CKV_BUCKET_SLOTS]) == word) {
            return true;
        }
    }
    return false;
}
