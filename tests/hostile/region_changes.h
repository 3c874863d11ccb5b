/* SPDX-License-Identifier: Apache-2.0 */
/* region_changes.h: changes of words of a shared region that is in use.
 *
 * The words are those that the engine acts on: states, masks, places, links, the page map,
 * buckets, stripes with their locks, cursors and holes, hints, events, slots, namespaces,
 * the sequence, admission, chains and what was learned about them.
 */
#ifndef CKV_TESTS_REGION_CHANGES_H
#define CKV_TESTS_REGION_CHANGES_H

#include "hostile.h"

struct region { /* a mapping of our own */
    uint8_t *base;
    size_t bytes;
    struct ckv_region_layout layout;
    struct ckv_geometry geometry; /* of file 0 */
};

static struct region region;

struct area {
    uint64_t offset;
    uint64_t element; /* bytes */
    uint64_t count;
    uint64_t width; /* of the words inside */
};

static void
map_region(unsigned template_number)
{
    struct ckv_geometry geometries[FILES_MAX];
    const struct template_set *set = &templates[template_number];
    uint32_t events = 0;
    char path[300];
    for (unsigned i = 0; i < set->file_count; i++) {
        struct ckv_file_header header;
        memcpy(&header, set->files[i].content, sizeof header);
        need(ckv_geometry_read(&header, &geometries[i], NULL) == CKV_OK, "geometry");
        events = header.event_capacity;
    }
    region.geometry = geometries[0];
    need(ckv_region_layout_plan(geometries, set->file_count, events, setting.eviction,
             &region.layout, NULL) == CKV_OK,
        "plan the region");
    (void)snprintf(path, sizeof path, "%s-shm", setting.paths[0]);
    const int fd = open(path, O_RDWR | O_CLOEXEC);
    need(fd >= 0, "open the region");
    region.bytes = region.layout.region_bytes;
    region.base = mmap(NULL, region.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    need(region.base != MAP_FAILED, "map the region");
    (void)close(fd);
}

static struct area
some_area(struct input *input)
{
    const struct ckv_region_layout *layout = &region.layout;
    const uint64_t entries = layout->entry_count;
    const uint64_t stripes = layout->stripe_count;
    const uint64_t heads = sizeof(struct ckv_stripe) - CKV_HOLES_MAX * 8;
    if (setting.eviction == CKV_EVICTION_PREFIX && take8(input) % 2 == 0) {
        switch (take8(input) % 6) {
        case 0:
            return (struct area){layout->chains_offset, 8, entries, 8};
        case 1:
            return (struct area){layout->chains_offset, 8, entries, 4};
        case 2:
            return (struct area){layout->lives_offset, 8, entries, 8};
        case 3:
            return (struct area){layout->leaves_offset, 8, layout->granule_count / 64,
                8};
        case 4:
            return (struct area){layout->density_offset,
                sizeof(struct ckv_density_head), 1, 4};
        default:
            return (struct area){layout->density_offset, 4,
                ckv_density_bytes(layout->entry_count) / 4, 4};
        }
    }
    switch (take8(input) % 27) {
    case 0:
        return (struct area){0, sizeof(struct ckv_region_header), 1, 8};
    case 1:
        return (struct area){offsetof(struct ckv_region_header, sequence), 8, 1, 8};
    case 2:
        return (struct area){offsetof(struct ckv_region_header, event_head), 8, 1, 8};
    case 3:
        return (struct area){layout->slots_offset, sizeof(struct ckv_slot),
            take8(input) % 2 == 0 ? 2 : CKV_PROCESSES_MAX, 8};
    case 4:
        return (struct area){layout->namespaces_offset, sizeof(struct ckv_namespace),
            take8(input) % 2 == 0 ? 3 : CKV_NAMESPACES_MAX, 8};
    case 5:
        return (struct area){layout->paths_offset, sizeof(struct ckv_shared_path), 2,
            4};
    case 6:
    case 7:
    case 8:
        return (struct area){layout->stripes_offset, heads, 1, 4};
    case 9:
        return (struct area){layout->stripes_offset +
                                 (take8(input) % stripes) * sizeof(struct ckv_stripe),
            sizeof(struct ckv_stripe), 1, 4};
    case 10: /* hole counts and cursors of all stripes */
        return (struct area){layout->stripes_offset +
                                 offsetof(struct ckv_stripe, cursor_page),
            sizeof(struct ckv_stripe), stripes, 4};
    case 11:
        return (struct area){layout->hints_offset, sizeof(struct ckv_hint), CKV_HINTS,
            8};
    case 12:
        return (struct area){layout->events_offset, sizeof(struct ckv_shared_event),
            layout->event_capacity, 8};
    case 13:
    case 14:
        return (struct area){layout->buckets_offset, sizeof(struct ckv_bucket),
            layout->bucket_count, 8};
    case 15:
    case 16:
        return (struct area){layout->states_offset, 8, entries, 8};
    case 17:
        return (struct area){layout->masks_offset, 8, entries, 8};
    case 18:
        return (struct area){layout->places_offset, 8, entries, 4};
    case 19:
        return (struct area){layout->links_offset, 4, entries, 4};
    case 20:
        return (struct area){layout->page_map_offset, 4, layout->granule_count, 4};
    case 21:
        return (struct area){layout->heats_offset, 1, entries, 1};
    case 22:
        return (struct area){layout->owners_offset, 1, entries, 1};
    case 23:
        return (struct area){layout->admission_offset,
            sizeof(struct ckv_admission_head), 1, 8};
    case 24:
        return (struct area){layout->admission_offset, 4,
            ckv_admission_bytes(layout->entry_count) / 4, 4};
    default:
        return (struct area){layout->marks_offset, 4, entries, 4};
    }
}

static uint64_t
load(uint64_t offset, uint64_t width)
{
    uint64_t value = 0;
    switch (width) {
    case 1:
        return __atomic_load_n(region.base + offset, __ATOMIC_RELAXED);
    case 4:
        value = __atomic_load_n((uint32_t *)(void *)(region.base + offset),
            __ATOMIC_RELAXED);
        return value;
    default:
        return __atomic_load_n((uint64_t *)(void *)(region.base + offset),
            __ATOMIC_RELAXED);
    }
}

static void
store(uint64_t offset, uint64_t width, uint64_t value)
{
    switch (width) {
    case 1:
        __atomic_store_n(region.base + offset, (uint8_t)value, __ATOMIC_RELAXED);
        break;
    case 4:
        __atomic_store_n((uint32_t *)(void *)(region.base + offset), (uint32_t)value,
            __ATOMIC_RELAXED);
        break;
    default:
        __atomic_store_n((uint64_t *)(void *)(region.base + offset), value,
            __ATOMIC_RELAXED);
        break;
    }
}

/* A word of the area; rather one that is in use. */
static uint64_t
some_word(const struct area *area, struct input *input)
{
    const uint64_t inside =
        take_below(input, area->element / area->width) * area->width;
    const uint64_t first = area->offset + inside;
    uint64_t used = 0;
    for (uint64_t i = 0; i < area->count; i++) {
        used += load(first + i * area->element, area->width) != 0;
    }
    if (used == 0 || one_in(input, 8)) {
        return first + take_below(input, area->count) * area->element;
    }
    uint64_t wanted = take_below(input, used);
    for (uint64_t i = 0; i < area->count; i++) {
        if (load(first + i * area->element, area->width) != 0 && wanted-- == 0) {
            return first + i * area->element;
        }
    }
    return first;
}

/* What fits its place, but is not true. */
static uint64_t
plausible(struct input *input, uint64_t present)
{
    const uint32_t slot = (uint32_t)take_below(input, 3);
    const uint32_t entry = (uint32_t)take_below(input, region.layout.entry_count);
    const uint64_t slot_at =
        region.layout.slots_offset + slot * sizeof(struct ckv_slot);
    const uint32_t incarnation = (uint32_t)load(slot_at, 4);
    switch (take8(input) % 12) {
    case 0:
        return ckv_owner_word(slot, incarnation);
    case 1:
        return ckv_owner_word(slot, incarnation + 1);
    case 2:
    case 3:
        return ckv_state_owned((enum ckv_state_kind)(take8(input) % 8), slot,
            incarnation);
    case 4:
        return ckv_state_live(take8(input));
    case 5:
        return entry;
    case 6:
        return entry + 1;
    case 7:
        return present + 1;
    case 8:
        return present - 1;
    case 9:
        return present ^ UINT64_C(1) << take8(input) % 64;
    case 10:
        return load(region.layout.states_offset + entry * UINT64_C(8), 8);
    default:
        return load(region.layout.places_offset + entry * UINT64_C(8), 4);
    }
}

static void
change_region(struct input *input)
{
    const struct area area = some_area(input);
    const uint64_t offset = some_word(&area, input);
    const uint64_t present = load(offset, area.width);
    const uint64_t value =
        one_in(input, 2) ? plausible(input, present) : take_evil(input);
    if (!one_in(input, 12)) {
        store(offset, area.width, value);
        return;
    }
    /* The same word of every element. */
    const uint64_t inside = (offset - area.offset) % area.element;
    const bool used_alone = one_in(input, 2);
    for (uint64_t i = 0; i < area.count; i++) {
        const uint64_t at = area.offset + i * area.element + inside;
        if (!used_alone || load(at, area.width) != 0) {
            store(at, area.width, value);
        }
    }
}

#endif /* CKV_TESTS_REGION_CHANGES_H */
