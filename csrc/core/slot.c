/* SPDX-License-Identifier: Apache-2.0 */
/* slot.c: claiming, asking after and sweeping slots; fork.
 *
 * A byte lock belongs to an open file description and ends with its last reference:
 * here a mapping, which no program closes by accident.  From the open to the close of
 * its descriptor a fork would hand the description to a child, whose life would then
 * prolong the lock; that stretch is bracketed by ckv_slot_fork_block().  Several
 * threads may be inside at once and one thread more than once, so it is a count and not
 * a mutex.
 *
 * Lock order: fork block, sweep mutex.  Nobody waits for a byte lock.
 */
#include "slot.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "entry.h"
#include "event.h"

/* ---- fork ----------------------------------------------------------------------- */

static pthread_mutex_t fork_mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t fork_unblocked = PTHREAD_COND_INITIALIZER;
static unsigned fork_blocks;
static bool fork_handlers_set;
static ckv_atomic_u64
    *fork_canary; /* 1, and 0 in a child of the process that made it */

static pthread_mutex_t sweep_mutex = PTHREAD_MUTEX_INITIALIZER; /* S1 */

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&fork_mutex); /* cannot fail: a plain, static mutex */
    while (fork_blocks > 0) {
        (void)pthread_cond_wait(&fork_unblocked, &fork_mutex);
    }
}

static void
after_fork_in_parent(void)
{
    (void)pthread_mutex_unlock(&fork_mutex);
}

static void
after_fork_in_child(void)
{
    if (fork_canary != NULL) {
        ckv_store_relaxed_u64(fork_canary, 0); /* where the kernel does not wipe it */
    }
    /* The waiters that the condition remembers did not come along. */
    fork_unblocked = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    (void)pthread_mutex_unlock(&fork_mutex);
}

void
ckv_slot_fork_block(void)
{
    (void)pthread_mutex_lock(&fork_mutex);
    fork_blocks++;
    (void)pthread_mutex_unlock(&fork_mutex);
}

void
ckv_slot_fork_unblock(void)
{
    (void)pthread_mutex_lock(&fork_mutex);
    CKV_CHECK(fork_blocks > 0);
    fork_blocks--;
    if (fork_blocks == 0) {
        (void)pthread_cond_broadcast(&fork_unblocked);
    }
    (void)pthread_mutex_unlock(&fork_mutex);
}

/* Makes a page that reads 1 here and 0 in a child.  Never unmapped: volumes point to
 * it.  Requires: fork_mutex. */
static int
make_canary(void)
{
    void *page = NULL;
    const int result = ckv_os.map(NULL, CKV_PAGE_BYTES, PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, &page);
    if (result < 0) {
        return result;
    }
    /* Without it the handler still sees every fork() of the C library. */
    (void)ckv_os.wipe_on_fork(page, CKV_PAGE_BYTES);
    fork_canary = page;
    ckv_store_relaxed_u64(fork_canary, 1);
    return 0;
}

enum ckv_status
ckv_slot_prepare_process(struct ckv_volume *volume, struct ckv_error *error)
{
    int result = 0;
    (void)pthread_mutex_lock(&fork_mutex);
    if (!fork_handlers_set) {
        result =
            -pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        fork_handlers_set = result == 0;
    }
    /* In a child the canary of the parent stays 0 for the volumes that came along. */
    if (result == 0 &&
        (fork_canary == NULL || ckv_load_relaxed_u64(fork_canary) == 0)) {
        result = make_canary();
    }
    volume->fork_canary = fork_canary;
    (void)pthread_mutex_unlock(&fork_mutex);
    if (result < 0) {
        return ckv_fail(error, CKV_E_NO_MEMORY, -result,
            "no memory for the fork guard");
    }
    return CKV_OK;
}

/* ---- byte locks ----------------------------------------------------------------- */

struct slot_locks { /* a description with the byte of one slot, per present file */
    int fds[CKV_PATHS_MAX];
};

static void
release_locks(const struct ckv_volume *volume, struct slot_locks *locks)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (locks->fds[i] >= 0) {
            /* Never unlocked: what has been mapped through it keeps the lock. */
            (void)ckv_os.close_file(locks->fds[i]);
            locks->fds[i] = -1;
        }
    }
}

/* Locks the byte of `slot` in every present file, without waiting.  0, -EAGAIN when
 * another has one of them, -errno.  Requires: fork is blocked. */
static int
take_locks(const struct ckv_volume *volume, uint32_t slot, struct slot_locks *locks)
{
    int result = 0;
    for (uint32_t i = 0; i < CKV_PATHS_MAX; i++) {
        locks->fds[i] = -1;
    }
    for (uint32_t i = 0; result == 0 && i < volume->file_count; i++) {
        const struct ckv_file *file = &volume->files[i];
        if (!file->present) {
            continue;
        }
        const int fd = ckv_file_reopen(file, O_RDWR);
        if (fd < 0) {
            result = fd;
            break;
        }
        locks->fds[i] = fd;
        result = ckv_os_lock_byte(fd, CKV_SLOT_LOCK_BYTE + slot);
        CKV_POINT("slot.locked");
    }
    if (result < 0) {
        release_locks(volume, locks);
        return result == -EACCES ? -EAGAIN : result;
    }
    return 0;
}

/* Whether any process holds the byte of `slot`; 1, 0 or -errno.  A slot is locked in
 * every file, so one is asked. */
static int
byte_held(const struct ckv_volume *volume, uint32_t slot)
{
    int result = -ENOENT;
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (!volume->files[i].present) {
            continue;
        }
        /* The first answer is nearly always enough; a process that opened the set
         * degraded holds the byte of some files only. */
        const int held =
            ckv_os_byte_held(volume->files[i].data_fd, CKV_SLOT_LOCK_BYTE + slot, 1);
        if (held == 1) {
            return 1;
        }
        result = result < 0 && result != -ENOENT ? result : held;
    }
    return result;
}

static void
unmap_anchors(struct ckv_volume *volume)
{
    for (uint32_t i = 0; i < volume->file_count; i++) {
        if (volume->anchors[i] != NULL) {
            (void)ckv_os.unmap(volume->anchors[i], CKV_PAGE_BYTES);
            volume->anchors[i] = NULL;
        }
    }
}

/* Lets one-page mappings take the locks over from the descriptors, which are closed. */
static int
drop_anchors(struct ckv_volume *volume, struct slot_locks *locks)
{
    int result = 0;
    for (uint32_t i = 0; result == 0 && i < volume->file_count; i++) {
        if (locks->fds[i] < 0) {
            continue;
        }
        void *anchor = NULL;
        result = ckv_os.map(NULL, CKV_PAGE_BYTES, PROT_READ, MAP_SHARED, locks->fds[i],
            0, &anchor);
        if (result == 0) {
            volume->anchors[i] = anchor;
            result = ckv_os.dont_fork(anchor, CKV_PAGE_BYTES);
            CKV_POINT("slot.anchored");
        }
    }
    if (result < 0) {
        unmap_anchors(volume);
    }
    release_locks(volume, locks);
    return result;
}

/* ---- sweeping ------------------------------------------------------------------- */

static void
sweep_masks(struct ckv_volume *volume, uint32_t slot)
{
    const uint64_t bit = UINT64_C(1) << slot;
    ckv_atomic_u64 *masks = volume->region.masks;
    const uint32_t count = volume->region.layout.entry_count;
    for (uint32_t entry = 0; entry < count; entry++) {
        if ((ckv_load_relaxed_u64(&masks[entry]) & bit) != 0) {
            CKV_POINT("sweep.mask");
            (void)ckv_and_ordered_u64(&masks[entry], ~bit);
        }
    }
}

/* What the dead owner reserved may have a sealed record already: its last step
 * before the put became visible.  What it condemned has one that is not struck yet
 * (E2). */
static void
bury(struct ckv_volume *volume, uint32_t entry, uint64_t state)
{
    struct ckv_file *file = ckv_volume_file_of(volume, entry);
    if (file != NULL && file->present) {
        CKV_POINT("sweep.strike");
        ckv_entry_strike(volume, file, entry);
    }
    CKV_POINT("sweep.struck");
    const bool reserved = ckv_state_kind(state) == CKV_STATE_RESERVED;
    /* Nobody but the owner or the holder of its byte moves such a state. */
    if (ckv_cas_ordered_u64(&volume->region.states[entry], &state, CKV_STATE_DEAD) &&
        reserved && file != NULL) {
        ckv_add_relaxed_u64(&volume->region.paths[ckv_volume_file_index(volume, file)]
                                .doomed_pages,
            ckv_load_relaxed_u32(&volume->region.places[entry].pages));
    }
}

static void
sweep_states(struct ckv_volume *volume, uint32_t slot)
{
    const uint32_t count = volume->region.layout.entry_count;
    for (uint32_t entry = 0; entry < count; entry++) {
        const uint64_t state = ckv_load_acquire_u64(&volume->region.states[entry]);
        const enum ckv_state_kind kind = ckv_state_kind(state);
        if ((kind == CKV_STATE_RESERVED || kind == CKV_STATE_DYING) &&
            ckv_state_slot(state) == slot) {
            bury(volume, entry, state);
        }
    }
}

static void
sweep_hints(struct ckv_volume *volume, uint32_t slot)
{
    for (uint32_t i = 0; i < CKV_HINTS; i++) {
        ckv_atomic_u64 *word = &volume->region.hints[i].word;
        uint64_t seen = ckv_load_acquire_u64(word);
        if (seen != 0 && (seen >> 32 & 63u) == slot) {
            CKV_POINT("sweep.hint");
            (void)ckv_cas_ordered_u64(word, &seen,
                0); /* lost: another took the place */
        }
    }
}

/* Requires: the byte of `slot`, the sweep mutex (S1).  May stop between any two steps:
 * the next sweep finds the rest. */
static void
sweep_column(struct ckv_volume *volume, uint32_t slot)
{
    struct ckv_slot *swept = &volume->region.slots[slot];
    CKV_POINT("sweep.begin");
    sweep_states(volume, slot);
    sweep_masks(volume, slot);
    sweep_hints(volume, slot);
    if (ckv_load_ordered_u64(&swept->announcing) != 0) {
        ckv_event_record_gap(volume); /* A4 */
        ckv_store_ordered_u64(&swept->announcing, 0);
    }
    ckv_store_relaxed_u64(&swept->pinned_entries, 0);
    ckv_store_relaxed_u64(&swept->pinned_bytes, 0);
    ckv_store_relaxed_u64(&swept->oldest_pin_ns, 0);
    ckv_store_relaxed_u64(&swept->process_id, 0);
    CKV_POINT("sweep.end");
    if (ckv_exchange_ordered_u32(&swept->unswept, 0) != 0) { /* S2 */
        ckv_bump(volume, CKV_COUNTER_swept_slots, 1);
    }
}

static bool
owns(const struct ckv_volume *volume, uint32_t slot)
{
    return volume->incarnation != 0 && volume->slot == slot;
}

bool
ckv_slot_sweep(struct ckv_volume *volume, uint32_t slot)
{
    if (slot >= CKV_PROCESSES_MAX || owns(volume, slot) ||
        volume->mode == CKV_MODE_READ || ckv_volume_forked(volume)) {
        return false;
    }
    struct slot_locks locks;
    ckv_slot_fork_block();
    (void)pthread_mutex_lock(&sweep_mutex);
    const bool locked = take_locks(volume, slot, &locks) == 0;
    if (locked) {
        sweep_column(volume, slot);
        release_locks(volume, &locks);
    }
    (void)pthread_mutex_unlock(&sweep_mutex);
    ckv_slot_fork_unblock();
    return locked;
}

uint64_t
ckv_slot_sweep_dead(struct ckv_volume *volume, uint64_t mask)
{
    uint64_t respected = mask;
    for (uint64_t left = mask; left != 0; left &= left - 1) {
        const uint32_t slot = (uint32_t)__builtin_ctzll(left);
        if (!owns(volume, slot) && byte_held(volume, slot) == 0 &&
            ckv_slot_sweep(volume, slot)) {
            respected &= ~(UINT64_C(1) << slot);
        }
    }
    return respected;
}

void
ckv_slot_sweep_departed(struct ckv_volume *volume)
{
    uint64_t unswept = 0;
    for (uint32_t slot = 0; slot < CKV_PROCESSES_MAX; slot++) {
        if (ckv_load_acquire_u32(&volume->region.slots[slot].unswept) != 0) {
            unswept |= UINT64_C(1) << slot;
        }
    }
    (void)ckv_slot_sweep_dead(volume, unswept); /* the rest is alive, or being swept */
}

/* ---- owning --------------------------------------------------------------------- */

/* Makes the slot ours.  Requires: its byte, the sweep mutex. */
static void
take_over(struct ckv_volume *volume, uint32_t slot)
{
    struct ckv_slot *mine = &volume->region.slots[slot];
    volume->counters = mine->counters;
    if (ckv_load_acquire_u32(&mine->unswept) != 0) {
        sweep_column(volume, slot);
    }
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(volume->counters_at_open); i++) {
        volume->counters_at_open[i] = ckv_load_relaxed_u64(&mine->counters[i]);
    }
    CKV_POINT("slot.swept");
    ckv_store_ordered_u32(&mine->unswept, 1);
    const uint32_t next = ckv_load_relaxed_u32(&mine->incarnation) + 1;
    const uint32_t incarnation = next == 0 ? 1 : next;      /* 0 stands for no owner */
    ckv_store_ordered_u32(&mine->incarnation, incarnation); /* S3 */
    ckv_store_relaxed_u64(&mine->process_id, (uint64_t)ckv_os.process_id());
    ckv_store_relaxed_u64(&mine->opened_ns, ckv_os.realtime_ns());
    volume->slot = slot;
    volume->incarnation = incarnation;
    volume->owner_word = ckv_owner_word(slot, incarnation);
    CKV_POINT("slot.claimed");
}

/* 0, -EAGAIN when the slot has an owner, -errno.  Requires: fork is blocked. */
static int
try_claim(struct ckv_volume *volume, uint32_t slot)
{
    struct slot_locks locks;
    (void)pthread_mutex_lock(&sweep_mutex);
    int result = take_locks(volume, slot, &locks);
    if (result == 0) {
        result = drop_anchors(volume, &locks);
    }
    if (result == 0) {
        take_over(volume, slot);
    }
    (void)pthread_mutex_unlock(&sweep_mutex);
    return result;
}

enum ckv_status
ckv_slot_claim(struct ckv_volume *volume, struct ckv_error *error)
{
    int result = -EAGAIN;
    CKV_CHECK(volume->incarnation == 0);
    ckv_slot_fork_block();
    for (uint32_t slot = 0; result == -EAGAIN && slot < CKV_PROCESSES_MAX; slot++) {
        if (byte_held(volume, slot) != 1) { /* asking is cheaper than trying */
            result = try_claim(volume, slot);
        }
    }
    ckv_slot_fork_unblock();
    if (result == -EAGAIN) {
        return ckv_fail(error, CKV_E_NO_SLOT, 0,
            "%d processes have the volume open, which is all that one volume takes; "
            "close "
            "one of them, or open with mode \"r\"",
            (int)CKV_PROCESSES_MAX);
    }
    if (result < 0) {
        const char *remedy = ckv_file_remedy(-result);
        return ckv_fail(error, CKV_E_OS, -result,
            "no byte of the volume file can be locked for this process: %s%s",
            strerror(-result),
            remedy[0] != '\0' ? remedy
                              : "; its file system must support locks of open file "
                                "descriptions");
    }
    return CKV_OK;
}

void
ckv_slot_leave(struct ckv_volume *volume)
{
    /* In a child the anchors were not inherited and the slot is the parent's. */
    if (volume->incarnation == 0 || ckv_volume_forked(volume)) {
        return;
    }
    struct ckv_slot *mine = &volume->region.slots[volume->slot];
    CKV_POINT("slot.leave");
    ckv_store_relaxed_u64(&mine->process_id, 0);
    ckv_store_relaxed_u64(&mine->opened_ns, 0);
    ckv_store_relaxed_u64(&mine->oldest_pin_ns, 0);
    ckv_store_relaxed_u64(&mine->pinned_entries, 0);
    ckv_store_relaxed_u64(&mine->pinned_bytes, 0);
    ckv_store_ordered_u32(&mine->unswept, 0);
    CKV_POINT("slot.left");
    unmap_anchors(volume); /* the slot is free from here on */
    volume->incarnation = 0;
    volume->owner_word = 0;
}

/* ---- asking --------------------------------------------------------------------- */

int
ckv_slot_any_alive(struct ckv_file *const *files, uint32_t count)
{
    int failure = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (files[i] == NULL || !files[i]->present) {
            continue;
        }
        const int held =
            ckv_os_byte_held(files[i]->data_fd, CKV_SLOT_LOCK_BYTE, CKV_PROCESSES_MAX);
        if (held > 0) {
            return 1;
        }
        failure = held < 0 ? held : failure;
    }
    return failure;
}

bool
ckv_slot_alive(struct ckv_volume *volume, uint32_t slot, uint32_t incarnation)
{
    if (slot >= CKV_PROCESSES_MAX) {
        return false;
    }
    if (owns(volume, slot)) {
        return volume->incarnation == incarnation;
    }
    if (ckv_load_acquire_u32(&volume->region.slots[slot].incarnation) != incarnation) {
        return false; /* S3 */
    }
    return byte_held(volume, slot) != 0;
}
