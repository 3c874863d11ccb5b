/* SPDX-License-Identifier: Apache-2.0 */
#include "pin.h"

#include <errno.h>
#include <sys/mman.h>

enum { MOVED_SHIFT = 28 }; /* 256 MiB */

#define WORD_LOCK       UINT64_C(1)
#define WORD_ONE        UINT64_C(2)
#define WORD_COUNT_MASK UINT64_C(0xfffffffe)

static uint64_t
word_count(uint64_t word)
{
    return (word & WORD_COUNT_MASK) >> 1;
}

/* Takes one pin without looking at the state. */
static void
pin_blindly(struct ckv_volume *volume, uint32_t entry)
{
    ckv_atomic_u64 *pin = &volume->pins[entry];
    for (;;) {
        uint64_t word = ckv_load_relaxed_u64(pin);
        if ((word & WORD_LOCK) != 0) {
            ckv_cpu_relax();
            continue;
        }
        if (word_count(word) != 0) {
            CKV_CHECK(word_count(word) < WORD_COUNT_MASK >> 2);
            if (ckv_cas_ordered_u64(pin, &word, word + WORD_ONE)) {
                return;
            }
            continue;
        }
        if (ckv_cas_ordered_u64(pin, &word, word | WORD_LOCK)) {
            CKV_POINT("pin.first");
            /* N2: before the look at the state, in the one order that all agree on. */
            ckv_or_ordered_u64(&volume->region.masks[entry], UINT64_C(1)
                                                                 << volume->slot);
            ckv_store_ordered_u64(pin, word + WORD_ONE);
            return;
        }
    }
}

bool
ckv_pin(struct ckv_volume *volume, uint32_t entry, uint64_t live_state)
{
    CKV_DCHECK(entry < volume->region.layout.entry_count);
    pin_blindly(volume, entry);
    CKV_POINT("pin.taken");
    if (ckv_load_ordered_u64(&volume->region.states[entry]) == live_state) { /* N2 */
        return true;
    }
    ckv_unpin(volume, entry);
    return false;
}

void
ckv_unpin(struct ckv_volume *volume, uint32_t entry)
{
    ckv_atomic_u64 *pin = &volume->pins[entry];
    for (;;) {
        uint64_t word = ckv_load_relaxed_u64(pin);
        if ((word & WORD_LOCK) != 0) {
            ckv_cpu_relax();
            continue;
        }
        CKV_CHECK(word_count(word) != 0);
        if (word_count(word) > 1) {
            if (ckv_cas_ordered_u64(pin, &word, word - WORD_ONE)) {
                return;
            }
            continue;
        }
        if (ckv_cas_ordered_u64(pin, &word, word | WORD_LOCK)) {
            CKV_POINT("pin.last");
            ckv_and_ordered_u64(&volume->region.masks[entry],
                ~(UINT64_C(1) << volume->slot));
            ckv_store_ordered_u64(pin, word - WORD_ONE);
            return;
        }
    }
}

static uint32_t
populated_now(const struct ckv_volume *volume, uint64_t sequence)
{
    const uint64_t moved = ckv_load_relaxed_u64(&volume->moved_bytes) >> MOVED_SHIFT;
    return (uint32_t)(sequence << 8 | (moved & 0xff));
}

bool
ckv_pin_populated(struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    return ckv_load_relaxed_u64(&volume->pins[entry]) >> 32 ==
           populated_now(volume, sequence);
}

bool
ckv_pin_populated_before(struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    const uint64_t word = ckv_load_relaxed_u64(&volume->pins[entry]);
    return word >> 40 == (sequence & 0xffffff);
}

void
ckv_pin_set_populated(struct ckv_volume *volume, uint32_t entry, uint64_t sequence)
{
    ckv_atomic_u64 *pin = &volume->pins[entry];
    uint64_t word = ckv_load_relaxed_u64(pin);
    for (;;) {
        if ((word & WORD_LOCK) != 0) {
            ckv_cpu_relax();
            word = ckv_load_relaxed_u64(pin);
            continue;
        }
        const uint64_t desired =
            (word & UINT32_MAX) | (uint64_t)populated_now(volume, sequence) << 32;
        if (ckv_cas_ordered_u64(pin, &word, desired)) {
            return;
        }
    }
}

static size_t
pins_length(const struct ckv_volume *volume)
{
    return (size_t)ckv_align_up((uint64_t)volume->region.layout.entry_count *
                                    sizeof(ckv_atomic_u64),
        CKV_PAGE_BYTES);
}

enum ckv_status
ckv_pin_open(struct ckv_volume *volume, struct ckv_error *error)
{
    void *address = NULL;
    const int result = ckv_os.map(NULL, pins_length(volume), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0, &address);
    if (result < 0) {
        return ckv_fail(error, CKV_E_NO_MEMORY, -result,
            "cannot map %zu bytes for the pin words of this process",
            pins_length(volume));
    }
    volume->pins = address;
    return CKV_OK;
}

void
ckv_pin_close(struct ckv_volume *volume)
{
    if (volume->pins != NULL) {
        (void)ckv_os.unmap(volume->pins,
            pins_length(volume)); /* ours, whole: cannot fail */
        volume->pins = NULL;
    }
}
