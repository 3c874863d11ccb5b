/* SPDX-License-Identifier: Apache-2.0 */
/* oracle.c: what was stored, what may be read, what may be overwritten.
 *
 * Each put has a version of its own, and its payload says which.  A stamp orders what the
 * oracle compares: begins and ends of calls, and deaths.
 *
 *   N1  What is read is one version of the key that was asked for, whole.
 *   N2  Nobody writes to pages that a view holds, that are LIVE, or that somebody else
 *       has reserved.
 *   N3  A version that ended before a later put, remove or clear of its key began is not
 *       seen once that one has returned.  A version whose put was acknowledged, and which
 *       is LIVE and in the index before and after a lookup, is found by it.  So is the
 *       key of such a version if nothing was removed for good meanwhile.
 *       What durability.md leaves open is counted as revived and is no finding: in the
 *       next life of the region a version whose put began before a clear that ended by a
 *       death may be there.
 *
 * The oracle looks at the shared region with plain loads, between two steps, when nobody
 * else runs: what it sees is a true state.
 */
#include "simulation.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { VERSIONS_MAX = 1 << 14, HELD_MAX = 256, MAGIC_SHIFT = 32 };

#define PAYLOAD_MAGIC UINT64_C(0x5ca1ab1e)

struct version {
    uint32_t key;
    uint32_t length;
    uint32_t header_length;
    uint64_t start;
    uint64_t end; /* NEVER while it is being put */
    enum ckv_status status;
    bool cut; /* its put ended by a death */
    const struct process *process;
};

static struct version versions[VERSIONS_MAX];
static uint32_t version_count;
static uint64_t gone[KEYS_MAX];
static uint64_t clear_cut; /* the last clear that ended by a death */
static uint64_t rebuilt;   /* the last life of the region began */
static struct held held[HELD_MAX];

uint32_t key_count, space_count;

static struct {
    uint8_t name[32];
    size_t length;
    uint8_t digest[32]; /* as in the record */
    uint8_t tag[16];
} keys[KEYS_MAX];

static struct {
    uint32_t key;
    uint32_t version;
} truth[KEYS_MAX];
static uint32_t truth_count;

/* ---- keys and payloads ------------------------------------------------------------ */

void
oracle_begin(void)
{
    space_count = 1 + (uint32_t)draw(SPACES_MAX);
    key_count = space_count * (1 + (uint32_t)draw_scale(KEYS_MAX / SPACES_MAX - 1));
    for (uint32_t key = 0; key < key_count; key++) {
        const uint32_t space = key_space(key);
        keys[key].length = key / space_count % 2 == 0 ? 32 : 5;
        for (size_t i = 0; i < keys[key].length; i++) {
            keys[key].name[i] = (uint8_t)(17 * (key / space_count) + i);
        }
        memcpy(keys[key].digest, keys[key].name, 32);
        if (keys[key].length != 32) {
            plan->engines[0].sha256(keys[key].name, keys[key].length, keys[key].digest);
        }
        if (space > 0) {
            uint8_t digest[32];
            plan->engines[0].sha256("other", 5, digest);
            memcpy(keys[key].tag, digest, 16);
        }
    }
}

struct ckv_key
oracle_key(uint32_t key)
{
    return (struct ckv_key){.data = keys[key].name, .length = keys[key].length};
}

uint32_t
key_space(uint32_t key)
{
    return key % space_count;
}

static uint64_t
payload_word(uint32_t version, uint64_t index)
{
    if (index == 0) {
        return PAYLOAD_MAGIC << MAGIC_SHIFT | version;
    }
    return (version * UINT64_C(0x9e3779b97f4a7c15)) ^ (index << 40 | index);
}

uint32_t
version_begin(uint32_t key, uint32_t length, uint32_t header_length)
{
    if (version_count == VERSIONS_MAX) {
        finding("too many versions for the simulation");
    }
    versions[version_count] = (struct version){.key = key,
        .length = length,
        .header_length = header_length,
        .start = ++stamp,
        .end = NEVER,
        .process = current->process};
    return version_count++;
}

void
version_fill(uint32_t version, uint8_t *data)
{
    const uint32_t length = versions[version].length;
    for (uint32_t at = 0; at < length; at += 8) {
        const uint64_t word = payload_word(version, at / 8);
        memcpy(data + at, &word, length - at < 8 ? length - at : 8);
    }
}

uint32_t
version_header(uint32_t version, uint8_t *data)
{
    for (uint32_t i = 0; i < versions[version].header_length; i++) {
        data[i] = (uint8_t)(version + i);
    }
    return versions[version].header_length;
}

void
version_end(uint32_t version, enum ckv_status status)
{
    struct version *ended = &versions[version];
    ended->end = ++stamp;
    ended->status = status;
    trace("put of version %u, key %u: %d", version, ended->key, (int)status);
    mix(UINT64_C(1) << 40 | (uint64_t)version << 8 | (uint8_t)status);
    if (status == CKV_OK) {
        stored++;
        key_gone(ended->key, ended->start);
    }
}

void
key_gone(uint32_t key, uint64_t start)
{
    gone[key] = start > gone[key] ? start : gone[key];
}

void
space_gone(uint32_t space, uint64_t start)
{
    for (uint32_t key = 0; key < key_count; key++) {
        if (key_space(key) == space) {
            key_gone(key, start);
        }
    }
}

/* Whether a version must not be seen by a call that began when `gone_before` was
 * known. */
static bool
is_gone(const struct version *version, uint64_t gone_before)
{
    if (version->start < clear_cut && version->end < rebuilt) {
        return false; /* revived */
    }
    return version->end < gone_before;
}

/* ---- what lies in the region ------------------------------------------------------ */

struct live {
    uint32_t entry;
    uint64_t state;
    uint64_t sequence;
    uint32_t version; /* VERSIONS_MAX: none */
};

static bool
cleared(const struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    const uint8_t owner = volume->region.owners[entry];
    return sequence <= volume->region.namespaces[owner].clear_sequence;
}

static struct ckv_file *
file_of(struct ckv_volume *volume, uint32_t entry)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        struct ckv_file *file = &volume->files[i];
        if (entry - file->first_entry < file->geometry.entry_count) {
            return file;
        }
    }
    return NULL;
}

/* Whether a bucket names this life of the entry. */
static bool
indexed(const struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    for (uint64_t b = 0; b < volume->region.layout.bucket_count; b++) {
        for (int s = 0; s < CKV_BUCKET_SLOTS; s++) {
            const uint64_t word = volume->region.buckets[b].slots[s];
            if (word != 0 && (uint32_t)word == entry &&
                (word >> 32 & 0xfffff) == (sequence & 0xfffff)) {
                return true;
            }
        }
    }
    return false;
}

static uint32_t
version_at(const struct ckv_file *file, uint32_t first_page)
{
    uint64_t word = 0;
    const off_t at =
        (off_t)(file->geometry.data_offset + (uint64_t)first_page * CKV_PAGE_BYTES);
    if (pread(file->data_fd, &word, sizeof word, at) != sizeof word ||
        word >> MAGIC_SHIFT != PAYLOAD_MAGIC || (uint32_t)word >= version_count) {
        return VERSIONS_MAX;
    }
    return (uint32_t)word;
}

/* Live blocks of a key, at most `limit`. */
static uint32_t
live_of(struct ckv_volume *volume, uint32_t key, struct live *found, uint32_t limit)
{
    uint32_t count = 0;
    for (uint32_t e = 0; e < volume->region.layout.entry_count && count < limit; e++) {
        const uint64_t state = volume->region.states[e];
        const uint64_t sequence = ckv_state_sequence(state);
        if (ckv_state_kind(state) != CKV_STATE_LIVE || cleared(volume, e, sequence)) {
            continue;
        }
        const struct ckv_file *file = file_of(volume, e);
        const struct ckv_record *record = &file->table[e - file->first_entry];
        if (record->sequence == sequence && record->seal != 0 &&
            memcmp(record->key, keys[key].digest, 32) == 0 &&
            memcmp(record->namespace_tag, keys[key].tag, 16) == 0) {
            found[count++] = (struct live){.entry = e,
                .state = state,
                .sequence = sequence,
                .version = version_at(file, record->first_page)};
        }
    }
    return count;
}

/* ---- removals --------------------------------------------------------------------- */

static uint64_t removals; /* that nothing replaces, begun so far */

void
oracle_at_point(const char *name)
{
    current->condemns = false;
    if (strcmp(name, "rebuild.begin") == 0) {
        rebuilt = ++stamp;
    } else if (strcmp(name, "put.locked") == 0) {
        current->chooses = true;
    } else if (strcmp(name, "stripe.unlock") == 0) {
        current->chooses = false;
    } else if (strcmp(name, "index.crowded") == 0) {
        current->crowds = true;
    } else if (strcmp(name, "kill.condemn") == 0) {
        const bool puts = current->operation != NULL &&
                          (strncmp(current->operation, "put", 3) == 0 ||
                              strcmp(current->operation, "reserve") == 0);
        current->condemns = !puts || current->chooses || current->crowds;
        current->crowds = false;
        removals += current->condemns;
    } else if (strcmp(name, "clear.begin") == 0) {
        removals++;
    }
}

/* Whether nobody is between the decision to remove a block for good and the removal. */
static bool
nobody_removes(void)
{
    for (uint32_t i = 0; i < task_count; i++) {
        if (tasks[i].process->alive && tasks[i].state != TASK_DONE &&
            (tasks[i].condemns || (tasks[i].operation != NULL &&
                                      strcmp(tasks[i].operation, "clear") == 0))) {
            return false;
        }
    }
    return true;
}

/* Whether no newer version is on its way, which might be gone already when it kills the
 * older one. */
static bool
nobody_puts(uint32_t key)
{
    for (uint32_t i = 0; i < version_count; i++) {
        if (versions[i].key == key && versions[i].end == NEVER) {
            return false;
        }
    }
    return true;
}

/* ---- lookups ---------------------------------------------------------------------- */

void
look_begin(struct look *look, struct ckv_volume *volume, uint32_t key)
{
    struct live live[8];
    *look = (struct look){.key = key,
        .start = ++stamp,
        .gone = gone[key],
        .steady = nobody_removes() && nobody_puts(key),
        .removals = removals};
    const uint32_t count = volume != NULL ? live_of(volume, key, live, 8) : 0;
    for (uint32_t i = 0; i < count; i++) {
        const bool acknowledged = live[i].version != VERSIONS_MAX &&
                                  versions[live[i].version].end != NEVER &&
                                  versions[live[i].version].status == CKV_OK;
        if (acknowledged && indexed(volume, live[i].entry, live[i].sequence)) {
            look->entries[look->count] = live[i].entry;
            look->states[look->count++] = live[i].state;
        }
    }
}

void
look_hit(const struct look *look, const uint8_t *data, size_t length, uint32_t *version)
{
    uint64_t word = 0;
    hits++;
    memcpy(&word, data, length < sizeof word ? length : sizeof word);
    if (word >> MAGIC_SHIFT != PAYLOAD_MAGIC || (uint32_t)word >= version_count) {
        finding("N1: key %u: bytes that nobody stored (%016llx)", look->key,
            (unsigned long long)word);
    }
    const uint32_t number = (uint32_t)word;
    const struct version *read = &versions[number];
    if (read->key != look->key) {
        finding("N1: key %u: bytes of key %u", look->key, read->key);
    }
    if (read->length != length) {
        finding("N1: key %u: version %u with %zu bytes instead of %u", look->key,
            number, length, read->length);
    }
    for (size_t at = 0; at < length; at += 8) {
        const uint64_t wanted = payload_word(number, at / 8);
        if (memcmp(data + at, &wanted, length - at < 8 ? length - at : 8) != 0) {
            finding("N1: key %u: version %u is torn at byte %zu of %zu", look->key,
                number, at, length);
        }
    }
    if (is_gone(read, look->gone)) {
        finding("N3: key %u: version %u, which ended at %llu, after a later put, "
                "remove or clear that began at %llu",
            look->key, number, (unsigned long long)read->end,
            (unsigned long long)look->gone);
    }
    trace("key %u: version %u", look->key, number);
    mix(UINT64_C(2) << 40 | number);
    if (version != NULL) {
        *version = number;
    }
}

void
look_header(uint32_t version, const uint8_t *header, size_t length)
{
    const struct version *read = &versions[version];
    if (header == NULL || length != read->header_length) {
        finding("N1: version %u: header of %zu bytes instead of %u", version, length,
            read->header_length);
    }
    for (size_t i = 0; i < length; i++) {
        if (header[i] != (uint8_t)(version + i)) {
            finding("N1: version %u: foreign bytes in its header", version);
        }
    }
}

void
look_miss(const struct look *look, struct ckv_volume *volume, const char *what)
{
    misses++;
    trace("key %u: %s misses", look->key, what);
    if (volume != NULL && look->count > 0 && look->steady &&
        look->removals == removals) {
        finding("N3: key %u: %s misses what was at most replaced", look->key, what);
    }
    mix(UINT64_C(3) << 40 | look->key);
    for (uint32_t i = 0; volume != NULL && i < look->count; i++) {
        const uint32_t entry = look->entries[i];
        const uint64_t state = look->states[i];
        const uint64_t sequence = ckv_state_sequence(state);
        if (volume->region.states[entry] == state &&
            !cleared(volume, entry, sequence) && indexed(volume, entry, sequence)) {
            finding("N3: key %u: %s misses entry %u, sequence %llu, which is live",
                look->key, what, entry, (unsigned long long)sequence);
        }
    }
}

void
look_present(const struct look *look, const char *what)
{
    for (uint32_t i = 0; i < version_count; i++) {
        if (versions[i].key == look->key && !is_gone(&versions[i], look->gone)) {
            mix(UINT64_C(4) << 40 | look->key);
            hits++;
            return;
        }
    }
    finding("N3: key %u: %s finds what was removed", look->key, what);
}

/* ---- views ------------------------------------------------------------------------ */

static uint32_t
path_number(const char *path)
{
    uint32_t number = 0;
    while (number < path_count() && strcmp(path, path_name(number)) != 0) {
        number++;
    }
    return number;
}

struct held *
held_add(struct process *process, struct ckv_lease *lease, uint32_t version,
    const uint8_t *data, size_t length)
{
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        if (held[i].process == NULL) {
            const bool mapped = lease->window != NULL;
            held[i] = (struct held){.process = process,
                .lease = lease,
                .version = version,
                .data = data,
                .length = length,
                .path = path_number(lease->file->path),
                .first_page = lease->record.first_page,
                .pages = mapped ? ckv_record_pages(lease->record.payload_bytes,
                                      lease->record.header_bytes)
                                : 0};
            return &held[i];
        }
    }
    finding("too many views for the simulation");
}

struct held *
held_any(struct process *process)
{
    struct held *mine[HELD_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        if (held[i].process == process && !held[i].busy) {
            mine[count++] = &held[i];
        }
    }
    return count == 0 ? NULL : mine[draw(count)];
}

void
held_check(const struct held *view)
{
    for (size_t at = 0; at < view->length; at += 8) {
        const uint64_t wanted = payload_word(view->version, at / 8);
        const size_t left = view->length - at < 8 ? view->length - at : 8;
        if (memcmp(view->data + at, &wanted, left) != 0) {
            finding("N2: a view of version %u has changed at byte %zu", view->version,
                at);
        }
    }
}

void
held_drop(struct held *view)
{
    view->process = NULL;
}

/* ---- writing ---------------------------------------------------------------------- */

static struct ckv_volume *
volume_of(struct process *process)
{
    for (uint32_t i = 0; i < SPACES_MAX; i++) {
        if (process->caches[i] != NULL) {
            return process->caches[i]->volume;
        }
    }
    return NULL;
}

static bool
overlap(uint64_t first, uint64_t pages, uint64_t other, uint64_t other_pages)
{
    return first < other + other_pages && other < first + pages;
}

/* The dead process that had a slot, or NULL. */
static const struct process *
death_of(const struct ckv_volume *volume, uint32_t slot, uint32_t incarnation)
{
    for (uint32_t i = 1; i <= ENGINES; i++) {
        if (processes[i].died != 0 && processes[i].slot == slot &&
            processes[i].incarnation == incarnation &&
            processes[i].nonce == volume->nonce_seen) {
            return &processes[i];
        }
    }
    return NULL;
}

void
oracle_busy(struct ckv_volume *volume)
{
    for (uint32_t s = 0; s < volume->region.layout.stripe_count; s++) {
        const uint64_t word = volume->region.stripes[s].lock;
        const struct process *dead =
            word == 0 ? NULL
                      : death_of(volume, ckv_owner_slot(word), (uint32_t)(word >> 32));
        if (dead != NULL && dead->died < current->began) {
            finding("N5: busy, since process %u died with the lock of stripe %u",
                dead->number, s);
        }
    }
}

static void
check_entry(struct ckv_volume *volume, uint32_t entry, uint64_t first, uint64_t pages,
    uint32_t *own)
{
    const uint64_t state = volume->region.states[entry];
    const struct ckv_place *place = &volume->region.places[entry];
    if (!overlap(first, pages, place->first_page, place->pages)) {
        return;
    }
    if (ckv_state_kind(state) == CKV_STATE_LIVE) {
        finding("N2: pages %llu to %llu are written, where entry %u is live",
            (unsigned long long)first, (unsigned long long)(first + pages - 1), entry);
    }
    if (ckv_state_kind(state) != CKV_STATE_RESERVED) {
        return;
    }
    if (ckv_state_slot(state) != volume->slot ||
        ckv_state_incarnation(state) != volume->incarnation) {
        if (death_of(volume, ckv_state_slot(state), ckv_state_incarnation(state)) !=
            NULL) {
            return; /* it will not write any more */
        }
        finding("N2: pages %llu to %llu are written, which slot %u has reserved",
            (unsigned long long)first, (unsigned long long)(first + pages - 1),
            ckv_state_slot(state));
    }
    ++*own;
}

void
oracle_writes(uint32_t path, uint64_t offset, uint64_t length)
{
    struct ckv_volume *volume = volume_of(current->process);
    if (volume == NULL) {
        return;
    }
    for (uint32_t f = 0; f < volume->file_count; f++) {
        struct ckv_file *file = &volume->files[f];
        if (file->path == NULL || path_number(file->path) != path ||
            offset < file->geometry.data_offset) {
            continue;
        }
        const uint64_t at = offset - file->geometry.data_offset;
        const uint64_t first = at / CKV_PAGE_BYTES;
        const uint64_t pages = (at + length - 1) / CKV_PAGE_BYTES - first + 1;
        for (uint32_t i = 0; i < HELD_MAX; i++) {
            if (held[i].process != NULL && held[i].path == path && held[i].pages > 0 &&
                overlap(first, pages, held[i].first_page, held[i].pages)) {
                finding("N2: pages %llu to %llu are written, which process %u views",
                    (unsigned long long)first, (unsigned long long)(first + pages - 1),
                    held[i].process->number);
            }
        }
        uint32_t own = 0;
        for (uint32_t e = 0; e < file->geometry.entry_count; e++) {
            check_entry(volume, file->first_entry + e, first, pages, &own);
        }
        if (own != 1) {
            finding("N2: pages %llu to %llu are written, which are reserved %u times",
                (unsigned long long)first, (unsigned long long)(first + pages - 1),
                own);
        }
    }
}

void
oracle_died(struct process *process)
{
    const struct ckv_volume *volume = volume_of(process);
    process->died = ++stamp;
    process->slot = volume != NULL ? volume->slot : CKV_PROCESSES_MAX;
    process->incarnation = volume != NULL ? volume->incarnation : 0;
    process->nonce = volume != NULL ? volume->nonce_seen : 0;
    for (uint32_t i = 0; i < HELD_MAX; i++) {
        if (held[i].process == process) {
            held[i].process = NULL;
        }
    }
    for (uint32_t i = 0; i < task_count; i++) {
        if (tasks[i].process == process && tasks[i].operation != NULL &&
            strcmp(tasks[i].operation, "clear") == 0) {
            clear_cut = ++stamp;
        }
    }
    for (uint32_t i = 0; i < version_count; i++) {
        if (versions[i].process == process && versions[i].end == NEVER) {
            versions[i].end = ++stamp;
            versions[i].status = CKV_MISS;
            versions[i].cut = true;
        }
    }
}

/* ---- everybody dead --------------------------------------------------------------- */

void
truth_take(struct ckv_volume *volume)
{
    truth_count = 0;
    for (uint32_t key = 0; key < key_count; key++) {
        struct live live[8];
        const uint32_t count = live_of(volume, key, live, 8);
        const struct live *newest = NULL;
        for (uint32_t i = 0; i < count; i++) {
            if (newest == NULL || live[i].sequence > newest->sequence) {
                newest = &live[i];
            }
        }
        if (newest != NULL && newest->version != VERSIONS_MAX &&
            versions[newest->version].end != NEVER &&
            versions[newest->version].status == CKV_OK &&
            indexed(volume, newest->entry, newest->sequence)) {
            truth[truth_count].key = key;
            truth[truth_count++].version = newest->version;
        }
    }
}

void
truth_check(struct process *process, bool strict)
{
    for (uint32_t i = 0; i < truth_count; i++) {
        struct look look;
        struct ckv_lease *lease = NULL;
        struct ckv_error error;
        const struct ckv_key name = oracle_key(truth[i].key);
        look_begin(&look, NULL, truth[i].key);
        if (process->engine->get(process->caches[key_space(truth[i].key)], &name,
                &lease, &error) != CKV_OK) {
            finding("N3: key %u: version %u is lost with the death of everybody",
                truth[i].key, truth[i].version);
        }
        size_t length = 0;
        uint32_t version = 0;
        const void *data = process->engine->lease_data(lease, &length);
        look_hit(&look, data, length, &version);
        if (strict && version != truth[i].version) {
            finding("N3: key %u: version %u instead of %u after the end of everybody",
                truth[i].key, version, truth[i].version);
        }
        process->engine->lease_release(&lease);
    }
}

/* ---- accounts --------------------------------------------------------------------- */

static uint64_t
counted(const struct ckv_volume *volume, enum ckv_counter counter)
{
    uint64_t sum = 0;
    for (uint32_t s = 0; s < CKV_PROCESSES_MAX; s++) {
        sum += volume->region.slots[s].counters[counter];
    }
    return sum;
}

static void
agree(const char *what, uint64_t is, uint64_t should, uint64_t leeway)
{
    if (is + leeway < should || should + leeway < is) {
        finding("accounts: %s: %llu, recounted %llu", what, (unsigned long long)is,
            (unsigned long long)should);
    }
}

static void
check_locks(struct ckv_volume *volume)
{
    for (uint32_t s = 0; s < volume->region.layout.stripe_count; s++) {
        const uint64_t word = volume->region.stripes[s].lock;
        if (word != 0 && plan->engines[0].slot_alive(volume, ckv_owner_slot(word),
                             (uint32_t)(word >> 32))) {
            finding("accounts: a living process has left the lock of stripe %u", s);
        }
    }
    for (uint32_t h = 0; h < CKV_HINTS; h++) {
        const uint64_t word = volume->region.hints[h].word;
        const uint32_t slot = (uint32_t)(word >> 32) & 63;
        const uint32_t incarnation = volume->region.slots[slot].incarnation;
        if (word != 0 && (incarnation & 0x3ffffff) == word >> 38 &&
            plan->engines[0].slot_alive(volume, slot, incarnation)) {
            finding("accounts: a living process has left hint %u", h);
        }
    }
}

static void
check_overlaps(struct ckv_volume *volume)
{
    const uint32_t count = volume->region.layout.entry_count;
    for (uint32_t a = 0; a < count; a++) {
        for (uint32_t b = a + 1; b < count; b++) {
            const struct ckv_place *of_a = &volume->region.places[a];
            const struct ckv_place *of_b = &volume->region.places[b];
            if (ckv_state_kind(volume->region.states[a]) == CKV_STATE_LIVE &&
                ckv_state_kind(volume->region.states[b]) == CKV_STATE_LIVE &&
                file_of(volume, a) == file_of(volume, b) &&
                overlap(of_a->first_page, of_a->pages, of_b->first_page, of_b->pages)) {
                finding("accounts: entries %u and %u overlap", a, b);
            }
        }
    }
}

void
oracle_accounts(struct ckv_volume *volume, bool deaths)
{
    uint64_t entries[CKV_NAMESPACES_MAX] = {0};
    uint64_t pages[CKV_NAMESPACES_MAX] = {0};
    uint64_t doomed = 0;
    for (uint32_t e = 0; e < volume->region.layout.entry_count; e++) {
        const uint64_t state = volume->region.states[e];
        const uint64_t sequence = ckv_state_sequence(state);
        const uint64_t mask = volume->region.masks[e];
        const uint64_t mine = UINT64_C(1) << volume->slot;
        if ((mask & ~mine) != 0 || (mask != 0 && volume->incarnation != 0)) {
            finding("accounts: entry %u is pinned by nobody (mask %llx)", e,
                (unsigned long long)mask);
        }
        switch (ckv_state_kind(state)) {
        case CKV_STATE_RESERVED:
        case CKV_STATE_DYING:
            finding("accounts: entry %u is left in state %llx", e,
                (unsigned long long)state);
        case CKV_STATE_DEAD:
            doomed += volume->region.places[e].pages;
            break;
        case CKV_STATE_LIVE:
            if (!cleared(volume, e, sequence)) {
                entries[volume->region.owners[e]]++;
                pages[volume->region.owners[e]] += volume->region.places[e].pages;
                if (!indexed(volume, e, sequence)) {
                    finding("accounts: entry %u is live and not in the index", e);
                }
            }
            break;
        case CKV_STATE_FREE:
            break;
        }
    }
    check_locks(volume);
    check_overlaps(volume);
    uint64_t doomed_pages = 0;
    for (uint32_t f = 0; f < volume->file_count; f++) {
        agree("failed paths", volume->region.paths[f].failed, 0, 0);
        doomed_pages += volume->region.paths[f].doomed_pages;
    }
    const uint64_t leeway = deaths ? kills * 4 : 0;
    for (uint32_t n = 0; n < CKV_NAMESPACES_MAX; n++) {
        const struct ckv_namespace *space = &volume->region.namespaces[n];
        agree("entries of a namespace", ckv_total_value(space->entries), entries[n],
            leeway);
        agree("bytes of a namespace", ckv_total_value(space->bytes),
            pages[n] * CKV_PAGE_BYTES, leeway * 16 * CKV_PAGE_BYTES);
    }
    agree("pages of dead blocks", doomed_pages, doomed, leeway * 64);
    agree("corrupt", counted(volume, CKV_COUNTER_corrupt), 0, 0);
    agree("read errors", counted(volume, CKV_COUNTER_read_errors), 0, 0);
    agree("puts_io_failed", counted(volume, CKV_COUNTER_puts_io_failed), 0, 0);
    agree("puts_failed_path", counted(volume, CKV_COUNTER_puts_failed_path), 0, 0);
}
