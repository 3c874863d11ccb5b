/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of volume.h and cache.h, as far as the tests need them. */

struct ckv_region {
    void *base;
    uint64_t bytes;
    struct ckv_region_layout layout;
    char *path;
    struct ckv_region_header *header;
    struct ckv_slot *slots;
    struct ckv_namespace *namespaces;
    struct ckv_shared_path *paths;
    struct ckv_stripe *stripes;
    struct ckv_hint *hints;
    struct ckv_shared_event *events;
    struct ckv_bucket *buckets;
    ckv_atomic_u64 *states;
    ckv_atomic_u64 *masks;
    struct ckv_place *places;
    ckv_atomic_u32 *marks;
    ckv_atomic_u32 *links;
    ckv_atomic_u32 *page_map;
    ckv_atomic_u8 *heats;
    ckv_atomic_u8 *owners;
    struct ckv_admission_memory admission;
    ckv_atomic_u64 *chains;
    ckv_atomic_u64 *lives;
    ckv_atomic_u64 *leaves;
    struct ckv_density density;
    uint64_t device, inode;
    ckv_atomic_u64 lost_pages;
    ...;
};

struct ckv_volume {
    uint64_t magic;
    ckv_atomic_u64 references;
    struct ckv_file files[16];
    uint32_t file_count;
    struct ckv_region region;
    enum ckv_mode mode;
    enum ckv_admission admission;
    enum ckv_eviction eviction;
    uint64_t hash_key;
    uint32_t slot;
    uint32_t incarnation;
    uint64_t owner_word;
    ckv_atomic_u64 *counters;
    ckv_atomic_u64 *pins;
    ckv_atomic_u32 last_stripe;
    ckv_atomic_u64 tick;
    ckv_atomic_u64 moved_bytes;
    ckv_atomic_u64 crowded_reads;
    uint64_t payload_max_bytes;
    uint8_t set_id[16];
    uint64_t nonce_seen;
    uint64_t counters_at_open[64];
    const ckv_atomic_u64 *fork_canary;
    void *anchors[16];
    uint32_t sync_interval_ms;
    ckv_atomic_u64 media_errors;
    ckv_atomic_u64 touched_bytes;
    ...;
};

struct ckv_cache {
    struct ckv_volume *volume;
    uint8_t namespace_tag[16];
    uint8_t namespace_index;
    ...;
};

struct ckv_file *ckv_volume_file_of(struct ckv_volume *volume, uint32_t entry);
bool ckv_volume_file_usable(struct ckv_volume *volume, const struct ckv_file *file);
void ckv_volume_fail_path(
    struct ckv_volume *volume, struct ckv_file *file, const char *what, int os_errno);
