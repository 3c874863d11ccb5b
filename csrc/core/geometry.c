/* SPDX-License-Identifier: Apache-2.0 */
#include "geometry.h"

#include <string.h>

#include "admission.h"
#include "hit_density.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)

enum { HEAD_PAGES = 4, STRIPES_MAX = 256 };

/* Stripes are failure domains, not parallelism: payload is written outside locks. */
static uint32_t
default_stripe_count(uint64_t capacity_bytes)
{
    if (capacity_bytes < 256 * MIB) {
        return 1;
    }
    return capacity_bytes < TIB ? 4 : 8;
}

uint32_t
ckv_geometry_granule(uint64_t capacity_bytes, uint64_t expected_object_bytes)
{
    if (expected_object_bytes == 0) {
        return capacity_bytes > 4 * TIB ? (uint32_t)MIB : (uint32_t)(64 * 1024);
    }
    uint64_t granule = CKV_PAGE_BYTES;
    while (granule < MIB && granule * 2 <= expected_object_bytes) {
        granule *= 2;
    }
    return (uint32_t)granule;
}

/* Places the areas one after the other (G3). */
static void
lay_out(struct ckv_geometry *geometry)
{
    geometry->namespaces_offset = (uint64_t)HEAD_PAGES * CKV_PAGE_BYTES;
    geometry->checkpoint_offset =
        geometry->namespaces_offset +
        ckv_align_up((uint64_t)CKV_NAMESPACES_MAX * CKV_NAMESPACE_COPIES *
                         sizeof(struct ckv_namespace_record),
            CKV_PAGE_BYTES);
    geometry->checkpoint_bytes =
        CKV_PAGE_BYTES + ckv_align_up(geometry->entry_count, CKV_PAGE_BYTES) +
        ckv_align_up((uint64_t)ckv_admission_ghost_words(geometry->entry_count) *
                         sizeof(uint32_t),
            CKV_PAGE_BYTES);
    geometry->table_offset =
        geometry->checkpoint_offset + 2 * geometry->checkpoint_bytes;
    geometry->table_bytes =
        ckv_align_up((uint64_t)geometry->entry_count * sizeof(struct ckv_record),
            CKV_PAGE_BYTES);
    /* Large pages of the page cache want the data to begin on their border. */
    const uint64_t alignment = geometry->data_bytes >= 256 * MIB ? 2 * MIB : 64 * 1024;
    geometry->data_offset =
        ckv_align_up(geometry->table_offset + geometry->table_bytes, alignment);
    geometry->file_bytes = geometry->data_offset + geometry->data_bytes;
}

enum ckv_status
ckv_geometry_plan(uint64_t capacity_bytes, uint32_t stripe_count,
    uint64_t expected_object_bytes, struct ckv_geometry *geometry,
    struct ckv_error *error)
{
    if (capacity_bytes < CKV_CAPACITY_MIN_BYTES ||
        capacity_bytes > CKV_CAPACITY_MAX_BYTES) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "capacity of %llu bytes is outside 16 MiB to 8 TiB a path; use several "
            "paths "
            "for more",
            (unsigned long long)capacity_bytes);
    }
    if (stripe_count > STRIPES_MAX ||
        (stripe_count != 0 &&
            capacity_bytes / stripe_count < CKV_CAPACITY_MIN_BYTES / 4)) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "%u stripes make no sense for %llu bytes: at most 256, of at least 4 MiB "
            "each; "
            "0 chooses by capacity",
            stripe_count, (unsigned long long)capacity_bytes);
    }
    if (expected_object_bytes != 0 && expected_object_bytes < CKV_PAGE_BYTES) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "expected object size of %llu bytes is below a page of 4096 bytes; every "
            "block "
            "takes whole pages",
            (unsigned long long)expected_object_bytes);
    }
    *geometry = (struct ckv_geometry){0};
    geometry->stripe_count =
        stripe_count != 0 ? stripe_count : default_stripe_count(capacity_bytes);
    geometry->granule_bytes =
        ckv_geometry_granule(capacity_bytes, expected_object_bytes);
    geometry->stripe_bytes = ckv_align_down(capacity_bytes / geometry->stripe_count,
        geometry->granule_bytes);
    geometry->data_bytes = geometry->stripe_bytes * geometry->stripe_count; /* G1 */
    const uint64_t stripe_entries = geometry->stripe_bytes / geometry->granule_bytes;
    if (stripe_entries * geometry->stripe_count > UINT32_C(1) << 30) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "an expected object size of %llu bytes needs more than 2^30 table entries "
            "for "
            "%llu bytes; raise it",
            (unsigned long long)expected_object_bytes,
            (unsigned long long)capacity_bytes);
    }
    geometry->stripe_entries = (uint32_t)stripe_entries;
    geometry->entry_count = geometry->stripe_entries * geometry->stripe_count; /* G2 */
    lay_out(geometry);
    return CKV_OK;
}

void
ckv_geometry_write(const struct ckv_geometry *geometry, struct ckv_file_header *header)
{
    header->file_bytes = geometry->file_bytes;
    header->namespaces_offset = geometry->namespaces_offset;
    header->checkpoint_offset = geometry->checkpoint_offset;
    header->checkpoint_bytes = geometry->checkpoint_bytes;
    header->table_offset = geometry->table_offset;
    header->table_bytes = geometry->table_bytes;
    header->data_offset = geometry->data_offset;
    header->data_bytes = geometry->data_bytes;
    header->stripe_bytes = geometry->stripe_bytes;
    header->stripe_count = geometry->stripe_count;
    header->entry_count = geometry->entry_count;
    header->granule_bytes = geometry->granule_bytes;
}

enum ckv_status
ckv_geometry_read(const struct ckv_file_header *header, struct ckv_geometry *geometry,
    struct ckv_error *error)
{
    const uint32_t granule = header->granule_bytes;
    const bool counts_valid =
        header->data_bytes >= CKV_CAPACITY_MIN_BYTES / 2 &&
        header->data_bytes <= CKV_CAPACITY_MAX_BYTES && header->stripe_count >= 1 &&
        header->stripe_count <= STRIPES_MAX && granule >= CKV_PAGE_BYTES &&
        granule <= MIB && (granule & (granule - 1)) == 0 &&
        header->stripe_bytes >= granule && header->stripe_bytes % granule == 0 &&
        header->stripe_bytes <= CKV_CAPACITY_MAX_BYTES &&
        header->data_bytes == header->stripe_bytes * header->stripe_count &&
        header->entry_count >= header->stripe_count &&
        header->entry_count % header->stripe_count == 0 &&
        header->entry_count == header->data_bytes / granule;
    if (counts_valid) {
        *geometry = (struct ckv_geometry){
            .data_bytes = header->data_bytes,
            .stripe_bytes = header->stripe_bytes,
            .stripe_count = header->stripe_count,
            .stripe_entries = header->entry_count / header->stripe_count,
            .entry_count = header->entry_count,
            .granule_bytes = granule,
        };
        lay_out(geometry);
    }
    if (!counts_valid || geometry->file_bytes != header->file_bytes ||
        geometry->namespaces_offset != header->namespaces_offset ||
        geometry->checkpoint_offset != header->checkpoint_offset ||
        geometry->checkpoint_bytes != header->checkpoint_bytes ||
        geometry->table_offset != header->table_offset ||
        geometry->table_bytes != header->table_bytes ||
        geometry->data_offset != header->data_offset) {
        return ckv_fail(error, CKV_E_FORMAT, 0,
            "the header describes an impossible layout (%llu data bytes, %u stripes, "
            "%u "
            "entries, granule %u)",
            (unsigned long long)header->data_bytes, header->stripe_count,
            header->entry_count, granule);
    }
    return CKV_OK;
}

uint64_t
ckv_geometry_payload_max(const struct ckv_geometry *geometry)
{
    uint64_t smallest = UINT64_MAX;
    for (uint32_t i = 0; i < geometry->stripe_count; i++) {
        const uint64_t begin = i * geometry->stripe_bytes;
        const uint64_t end = begin + geometry->stripe_bytes;
        uint64_t longest = 0;
        for (uint64_t at = begin; at < end;) {
            const uint64_t border =
                ckv_min_u64(ckv_align_down(at, CKV_CHUNK_BYTES) + CKV_CHUNK_BYTES, end);
            longest = ckv_max_u64(longest, border - at);
            at = border;
            if (longest == CKV_CHUNK_BYTES) {
                break;
            }
        }
        smallest = ckv_min_u64(smallest, longest);
    }
    return smallest;
}

bool
ckv_geometry_extent_valid(const struct ckv_geometry *geometry, uint32_t first_page,
    uint32_t pages)
{
    const uint64_t begin = (uint64_t)first_page * CKV_PAGE_BYTES;
    const uint64_t end = begin + (uint64_t)pages * CKV_PAGE_BYTES;
    return pages != 0 && end <= geometry->data_bytes &&
           begin / geometry->stripe_bytes == (end - 1) / geometry->stripe_bytes &&
           begin / CKV_CHUNK_BYTES == (end - 1) / CKV_CHUNK_BYTES;
}

static uint64_t
take(uint64_t *at, uint64_t bytes)
{
    const uint64_t offset = *at;
    *at = ckv_align_up(offset + bytes, CKV_PAGE_BYTES);
    return offset;
}

enum ckv_status
ckv_region_layout_plan(const struct ckv_geometry *geometries, uint32_t path_count,
    uint32_t event_capacity, enum ckv_eviction eviction,
    struct ckv_region_layout *layout, struct ckv_error *error)
{
    uint64_t entries = 0;
    uint64_t granules = 0;
    uint64_t stripes = 0;
    for (uint32_t i = 0; i < path_count; i++) {
        entries += geometries[i].entry_count;
        granules += geometries[i].data_bytes / geometries[i].granule_bytes;
        stripes += geometries[i].stripe_count;
    }
    if (entries > UINT32_C(1) << 31 || path_count > CKV_PATHS_MAX) {
        return ckv_fail(error, CKV_E_INVALID, 0,
            "%llu table entries over all paths are more than 2^31; raise the expected "
            "object size or use fewer paths",
            (unsigned long long)entries);
    }
    const uint64_t buckets =
        ckv_max_u64(2, (entries * 2 + CKV_BUCKET_SLOTS - 1) / CKV_BUCKET_SLOTS);
    *layout = (struct ckv_region_layout){
        .bucket_count = buckets,
        .granule_count = granules,
        .entry_count = (uint32_t)entries,
        .stripe_count = (uint32_t)stripes,
        .event_capacity = event_capacity,
        .path_count = path_count,
    };
    uint64_t at = CKV_PAGE_BYTES; /* the header */
    layout->slots_offset = take(&at, CKV_PROCESSES_MAX * sizeof(struct ckv_slot));
    layout->namespaces_offset =
        take(&at, CKV_NAMESPACES_MAX * sizeof(struct ckv_namespace));
    layout->paths_offset = take(&at, CKV_PATHS_MAX * sizeof(struct ckv_shared_path));
    layout->stripes_offset = take(&at, stripes * sizeof(struct ckv_stripe));
    layout->hints_offset = take(&at, CKV_HINTS * sizeof(struct ckv_hint));
    layout->events_offset = take(&at, event_capacity * sizeof(struct ckv_shared_event));
    layout->buckets_offset = take(&at, buckets * sizeof(struct ckv_bucket));
    layout->states_offset = take(&at, entries * 8);
    layout->masks_offset = take(&at, entries * 8);
    layout->places_offset = take(&at, entries * sizeof(struct ckv_place));
    layout->marks_offset = take(&at, entries * 4);
    layout->links_offset = take(&at, entries * 4);
    layout->page_map_offset = take(&at, granules * 4);
    layout->heats_offset = take(&at, entries);
    layout->owners_offset = take(&at, entries);
    layout->admission_offset = take(&at, ckv_admission_bytes((uint32_t)entries));
    if (eviction == CKV_EVICTION_PREFIX) {
        layout->chains_offset = take(&at, entries * 8);
        layout->lives_offset = take(&at, entries * 8);
        layout->leaves_offset = take(&at, (granules + 63) / 64 * 8);
        layout->density_offset = take(&at, ckv_density_bytes((uint32_t)entries));
    }
    layout->region_bytes = at;
    return CKV_OK;
}
