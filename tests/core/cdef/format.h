/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of format.h, as far as the tests need them. */

enum ckv_counter { CKV_COUNTER_events_dropped, ... };

struct ckv_shared_event {
    ckv_atomic_u64 number;
    ckv_atomic_u64 words[7];
};

struct ckv_region_header {
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
