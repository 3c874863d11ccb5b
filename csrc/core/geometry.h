/* SPDX-License-Identifier: Apache-2.0 */
/* geometry.h: options to offsets and counts; pure arithmetic, every step checked.
 *
 *   G1  data_bytes = stripe_count * stripe_bytes <= the capacity asked for; stripe_bytes
 *       is a multiple of the granule.
 *   G2  entry_count = stripe_count * stripe_entries; entry n belongs to stripe
 *       n / stripe_entries.
 *   G3  the areas of a file follow each other without overlap, each starts on a page, and
 *       file_bytes is where the data area ends.
 */
#ifndef CKV_GEOMETRY_H
#define CKV_GEOMETRY_H

#include "format.h"

#ifndef CKV_CAPACITY_MIN_BYTES /* the simulation has smaller volumes */
#define CKV_CAPACITY_MIN_BYTES (UINT64_C(16) << 20)
#endif
#define CKV_CAPACITY_MAX_BYTES (UINT64_C(8) << 40)
#define CKV_EVENT_CAPACITY_MAX (1u << 24)

struct ckv_geometry { /* of one file */
    uint64_t file_bytes;
    uint64_t namespaces_offset;
    uint64_t checkpoint_offset;
    uint64_t checkpoint_bytes;
    uint64_t table_offset;
    uint64_t table_bytes;
    uint64_t data_offset;
    uint64_t data_bytes;
    uint64_t stripe_bytes;
    uint32_t stripe_count;
    uint32_t stripe_entries;
    uint32_t entry_count;
    uint32_t granule_bytes;
};

/* Derives the geometry of a new file.  `stripe_count` and `expected_object_bytes` may
 * be 0.  CKV_E_INVALID names the value that makes no sense. */
enum ckv_status ckv_geometry_plan(uint64_t capacity_bytes, uint32_t stripe_count,
    uint64_t expected_object_bytes, struct ckv_geometry *geometry,
    struct ckv_error *error) CKV_MUST_CHECK;

/* Bytes of data area per table entry for such objects; 0 takes the default. */
uint32_t ckv_geometry_granule(uint64_t capacity_bytes, uint64_t expected_object_bytes);

/* Takes the geometry out of a header and proves G1..G3 and all bounds; CKV_E_FORMAT. */
enum ckv_status ckv_geometry_read(const struct ckv_file_header *header,
    struct ckv_geometry *geometry, struct ckv_error *error) CKV_MUST_CHECK;

void ckv_geometry_write(const struct ckv_geometry *geometry,
    struct ckv_file_header *header);

/* The largest payload + header that every stripe can take (F3). */
uint64_t ckv_geometry_payload_max(const struct ckv_geometry *geometry);

/* Whether an extent lies inside one stripe and one chunk (F3). */
bool ckv_geometry_extent_valid(const struct ckv_geometry *geometry, uint32_t first_page,
    uint32_t pages);

static inline uint32_t
ckv_geometry_stripe_pages(const struct ckv_geometry *geometry)
{
    return (uint32_t)(geometry->stripe_bytes / CKV_PAGE_BYTES);
}

/* ---- shared region --------------------------------------------------------------- */

struct ckv_region_layout {
    uint64_t region_bytes;
    uint64_t slots_offset;      /* struct ckv_slot[64] */
    uint64_t namespaces_offset; /* struct ckv_namespace[256] */
    uint64_t paths_offset;      /* struct ckv_shared_path[CKV_PATHS_MAX] */
    uint64_t stripes_offset;    /* struct ckv_stripe of all paths, in order */
    uint64_t hints_offset;      /* struct ckv_hint[CKV_HINTS] */
    uint64_t events_offset;     /* struct ckv_shared_event[event_capacity] */
    uint64_t buckets_offset;    /* struct ckv_bucket[bucket_count] */
    uint64_t states_offset;     /* u64 per entry */
    uint64_t masks_offset;      /* u64 per entry: bit s is set while slot s has a pin */
    uint64_t places_offset;     /* struct ckv_place per entry */
    uint64_t marks_offset;      /* u32 per entry: low bits of the verified sequence */
    uint64_t links_offset;      /* u32 per entry: next + 1 that starts in the granule */
    uint64_t page_map_offset;   /* u32 per granule: first entry + 1 that starts in it */
    uint64_t heats_offset;      /* u8 per entry: 0..2 */
    uint64_t owners_offset;     /* u8 per entry: index of its namespace */
    uint64_t admission_offset;  /* see admission.h */
    uint64_t chains_offset;  /* u64 per entry, see prefix.h; from here on only there */
    uint64_t lives_offset;   /* u64 per entry, likewise */
    uint64_t leaves_offset;  /* a bit per granule, likewise */
    uint64_t density_offset; /* see hit_density.h */
    uint64_t bucket_count;   /* at least 2; load at most one half */
    uint64_t granule_count;  /* of all paths */
    uint32_t entry_count;    /* of all paths */
    uint32_t stripe_count;   /* of all paths */
    uint32_t event_capacity;
    uint32_t path_count;
};

/* A pure function of the geometries, so that all processes agree. */
enum ckv_status ckv_region_layout_plan(const struct ckv_geometry *geometries,
    uint32_t path_count, uint32_t event_capacity, enum ckv_eviction eviction,
    struct ckv_region_layout *layout, struct ckv_error *error) CKV_MUST_CHECK;

#endif /* CKV_GEOMETRY_H */
