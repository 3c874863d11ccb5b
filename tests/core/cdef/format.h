/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of format.h, as far as the tests need them. */

enum ckv_counter {
    CKV_COUNTER_lookups,
    CKV_COUNTER_hits,
    CKV_COUNTER_misses,
    CKV_COUNTER_evictions,
    CKV_COUNTER_bucket_evictions,
    CKV_COUNTER_entries_exhausted,
    CKV_COUNTER_removed,
    CKV_COUNTER_corrupt,
    CKV_COUNTER_holes_filled,
    CKV_COUNTER_lock_successions,
    CKV_COUNTER_swept_slots,
    CKV_COUNTER_events_dropped,
    CKV_COUNTER_COUNT,
    ...
};

#define CKV_PAGE_BYTES  ...
#define CKV_CHUNK_BYTES ...

struct ckv_shared_event {
    ckv_atomic_u64 number;
    ckv_atomic_u64 words[7];
};

struct ckv_region_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ready;
    uint64_t nonce;
    uint8_t set_id[16];
    uint64_t layout_crc;
    uint64_t rebuilt_entries;
    uint64_t rebuild_dropped;
    uint64_t rebuilt_synced_sequence;
    ckv_atomic_u64 sequence;
    ckv_atomic_u64 event_head;
    ...;
};

#define CKV_FORMAT_MAGIC   ...
#define CKV_FORMAT_VERSION ...
#define CKV_ENDIAN_MARK    ...

struct ckv_member {
    uint8_t file_id[16];
    uint64_t data_bytes;
    uint32_t entry_count;
    uint16_t stripe_count;
    uint8_t granule_shift;
    ...;
};

struct ckv_file_header {
    uint64_t magic;
    uint32_t version;
    uint32_t endian_mark;
    uint32_t page_bytes;
    uint32_t stripe_count;
    uint64_t generation;
    uint8_t set_id[16];
    uint8_t file_id[16];
    uint64_t file_bytes;
    uint64_t namespaces_offset;
    uint64_t checkpoint_offset;
    uint64_t checkpoint_bytes;
    uint64_t table_offset;
    uint64_t table_bytes;
    uint64_t data_offset;
    uint64_t data_bytes;
    uint64_t stripe_bytes;
    uint32_t entry_count;
    uint32_t granule_bytes;
    uint32_t event_capacity;
    uint32_t member_count;
    uint32_t member_index;
    uint64_t created_ns;
    uint64_t region_nonce;
    uint64_t synced_sequence;
    struct ckv_member members[16];
    char shm_directory[1024];
    uint32_t seal;
    ...;
};

struct ckv_record {
    uint64_t sequence;
    uint8_t namespace_tag[16];
    uint8_t key[32];
    uint32_t first_page;
    uint32_t payload_bytes;
    uint32_t payload_crc;
    uint32_t header_crc;
    uint16_t header_bytes;
    uint16_t flags;
    uint32_t seal;
};

uint32_t ckv_seal_of(const void *object, size_t bytes_before_seal);

struct ckv_namespace_record {
    uint8_t tag[16];
    uint64_t clear_sequence;
    uint64_t clear_count;
    uint8_t reserved[28];
    uint32_t seal;
};

enum { CKV_RECORD_DIGESTED, CKV_RECORD_HOLE, ... };
enum { CKV_HINTS, CKV_BUCKET_SLOTS, CKV_HOLES_MAX, ... };

void ckv_record_seal(
    struct ckv_record *record, const uint8_t *file_id, uint32_t local_entry);
bool ckv_record_sealed(
    const struct ckv_record *record, const uint8_t *file_id, uint32_t local_entry);

enum ckv_state_kind {
    CKV_STATE_FREE,
    CKV_STATE_RESERVED,
    CKV_STATE_LIVE,
    CKV_STATE_DYING,
    CKV_STATE_DEAD,
    ...
};

struct ckv_slot {
    ckv_atomic_u32 incarnation;
    ckv_atomic_u32 unswept;
    ckv_atomic_u64 process_id;
    ckv_atomic_u64 oldest_pin_ns;
    ckv_atomic_u64 pinned_entries;
    ckv_atomic_u64 pinned_bytes;
    ckv_atomic_u64 counters[64];
    ...;
};

struct ckv_namespace {
    uint8_t tag[16];
    ckv_atomic_u64 used;
    ckv_atomic_u64 clear_sequence;
    ckv_atomic_u64 clear_count;
    ckv_atomic_u64 entries;
    ckv_atomic_u64 bytes;
    ...;
};

struct ckv_shared_path {
    ckv_atomic_u32 failed;
    ckv_atomic_u32 unread;
    ckv_atomic_u64 synced_sequence;
    ckv_atomic_u64 checkpoint_generation;
    ckv_atomic_u64 doomed_pages;
    ...;
};

struct ckv_hole {
    uint32_t first_page;
    uint32_t pages;
};

struct ckv_stripe {
    ckv_atomic_u64 lock;
    ckv_atomic_u64 virtual_time;
    ckv_atomic_u64 laps;
    ckv_atomic_u32 cursor_page;
    ckv_atomic_u32 entry_hand;
    ckv_atomic_u32 hole_count;
    struct ckv_hole holes[64];
    ...;
};

struct ckv_hint {
    ckv_atomic_u64 word;
    ckv_atomic_u64 since_ns;
};

struct ckv_bucket {
    ckv_atomic_u64 version;
    ckv_atomic_u64 slots[7];
};

struct ckv_place {
    ckv_atomic_u32 first_page;
    ckv_atomic_u32 pages;
};

uint32_t ckv_record_pages(uint32_t payload_bytes, uint16_t header_bytes);
enum ckv_state_kind ckv_state_kind(uint64_t state);
uint64_t ckv_state_live(uint64_t sequence);
uint64_t ckv_state_sequence(uint64_t state);
uint64_t ckv_state_owned(enum ckv_state_kind kind, uint32_t slot, uint32_t incarnation);
uint64_t ckv_owner_word(uint32_t slot, uint32_t incarnation);
