/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of geometry.h, as far as the tests need them. */

#define CKV_CAPACITY_MIN_BYTES ...
#define CKV_CAPACITY_MAX_BYTES ...

struct ckv_region_layout {
    uint64_t region_bytes;
    uint64_t slots_offset;
    uint64_t namespaces_offset;
    uint64_t paths_offset;
    uint64_t stripes_offset;
    uint64_t hints_offset;
    uint64_t events_offset;
    uint64_t buckets_offset;
    uint64_t states_offset;
    uint64_t masks_offset;
    uint64_t places_offset;
    uint64_t marks_offset;
    uint64_t links_offset;
    uint64_t page_map_offset;
    uint64_t heats_offset;
    uint64_t owners_offset;
    uint64_t admission_offset;
    uint64_t chains_offset;
    uint64_t lives_offset;
    uint64_t leaves_offset;
    uint64_t density_offset;
    uint64_t bucket_count;
    uint64_t granule_count;
    uint32_t entry_count;
    uint32_t stripe_count;
    uint32_t event_capacity;
    uint32_t path_count;
};

struct ckv_geometry {
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

enum ckv_status ckv_geometry_plan(uint64_t capacity_bytes, uint32_t stripe_count,
    uint64_t expected_object_bytes, struct ckv_geometry *geometry,
    struct ckv_error *error);

enum ckv_status ckv_geometry_read(const struct ckv_file_header *header,
    struct ckv_geometry *geometry, struct ckv_error *error);
void ckv_geometry_write(
    const struct ckv_geometry *geometry, struct ckv_file_header *header);
uint64_t ckv_geometry_payload_max(const struct ckv_geometry *geometry);
bool ckv_geometry_extent_valid(
    const struct ckv_geometry *geometry, uint32_t first_page, uint32_t pages);
uint32_t ckv_geometry_stripe_pages(const struct ckv_geometry *geometry);

enum ckv_status ckv_region_layout_plan(const struct ckv_geometry *geometries,
    uint32_t path_count, uint32_t event_capacity, enum ckv_eviction eviction,
    struct ckv_region_layout *layout, struct ckv_error *error);
