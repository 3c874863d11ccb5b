/* SPDX-License-Identifier: Apache-2.0 */
/* format.h: every byte of a volume file and of the shared region.
 *
 * A volume file, all integers little-endian, all areas whole pages of 4 096 bytes:
 *
 *   page 0, 1    header, two copies; the newer valid one counts
 *   page 2       gate: zeros, never written again, so that asking it for pending
 *                write-back errors waits for nothing
 *   page 3       note: who is creating or rebuilding (text; advisory)
 *   namespaces   256 records of 4 copies of 64 bytes: durable clear sequences
 *   checkpoint   two copies of {page of head, one byte of heat per entry, part of the
 *                ghost of admission}
 *   table        one record of 80 bytes per entry, in stripe order
 *   data         stripes of equal size; nothing but payload, user header and fill
 *
 *   F1  A record is believed only if its seal agrees with its content, its number and its
 *       file.  A zero seal is a dead record.
 *   F2  Nothing depends on the order in which pages reach the medium: a payload is
 *       believed only after its checksum was verified in this life of the shared
 *       region.
 *   F3  An entry occupies whole pages, [payload][user header][zeros], inside one stripe
 *       and inside one chunk of 1 GiB of the data area.
 *   F4  Of two records that overlap or share (namespace, key, digested), the one with the
 *       lower sequence is dead.
 *   F5  Sequences grow by one per publish over the whole set of files and are never
 *       reused.
 *
 * The shared region (one file per set of volume files) holds everything volatile.  It is
 * thrown away and rebuilt from the tables when no process has the set open.  Its content
 * is input like that of a file: indices and offsets taken from it are bounds-checked.
 */
#ifndef CKV_FORMAT_H
#define CKV_FORMAT_H

#include "atomics.h"
#include "base.h"

#define CKV_FORMAT_MAGIC   UINT64_C(0x314b564c43594300) /* "\0CYLVK1" as bytes */
#define CKV_REGION_MAGIC   UINT64_C(0x324d4853564b4300)
#define CKV_FORMAT_VERSION 2u
#define CKV_ENDIAN_MARK    UINT32_C(0x01020304)

/* ---- volume file ---------------------------------------------------------------- */

struct ckv_member {
    uint8_t file_id[16]; /* random, fixed at creation */
    uint64_t data_bytes;
    uint32_t entry_count;
    uint16_t stripe_count;
    uint8_t granule_shift;
    uint8_t reserved;
};

struct ckv_file_header {
    uint64_t magic;
    uint32_t version;
    uint32_t endian_mark;
    uint32_t page_bytes;
    uint32_t stripe_count;
    uint64_t generation; /* of this header; the copy with the larger one counts */
    uint8_t set_id[16];
    uint8_t file_id[16];
    uint64_t file_bytes;
    uint64_t namespaces_offset;
    uint64_t checkpoint_offset; /* of copy 0; copy 1 follows */
    uint64_t checkpoint_bytes;  /* of one copy */
    uint64_t table_offset;
    uint64_t table_bytes;
    uint64_t data_offset;
    uint64_t data_bytes; /* = stripe_count * stripe_bytes */
    uint64_t stripe_bytes;
    uint32_t entry_count;   /* = stripe_count * entries of a stripe */
    uint32_t granule_bytes; /* of the page map; a power of two */
    uint32_t event_capacity;
    uint32_t member_count;
    uint32_t member_index;
    uint32_t reserved0;
    uint64_t created_ns;      /* realtime */
    uint64_t region_nonce;    /* of the shared region now in use; 0 for none yet */
    uint64_t synced_sequence; /* every put up to it is on the medium */
    uint8_t reserved1[64];
    struct ckv_member members[CKV_PATHS_MAX];
    char shm_directory[1024]; /* NUL-terminated; empty: beside member 0 */
    uint8_t reserved2[2308];
    uint32_t seal;
};
_Static_assert(sizeof(struct ckv_member) == 32, "member");
_Static_assert(sizeof(struct ckv_file_header) == CKV_PAGE_BYTES, "file header");
_Static_assert(offsetof(struct ckv_file_header, members) == 248, "members");
_Static_assert(offsetof(struct ckv_file_header, shm_directory) == 760, "directory");

struct ckv_record {
    uint64_t sequence;
    uint8_t namespace_tag[16];
    uint8_t key[32];
    uint32_t first_page; /* of the data area */
    uint32_t payload_bytes;
    uint32_t payload_crc; /* CRC-32C */
    uint32_t header_crc;
    uint16_t header_bytes;
    uint16_t flags; /* CKV_RECORD_... */
    uint32_t seal;
};
_Static_assert(sizeof(struct ckv_record) == 80, "record");

enum { CKV_RECORD_DIGESTED = 1, CKV_RECORD_HOLE = 2, CKV_RECORD_FLAGS = 3 };

struct ckv_namespace_record { /* copy (clear_count & 3) of 4 is written */
    uint8_t tag[16];
    uint64_t clear_sequence; /* blocks of this namespace up to it are dead */
    uint64_t clear_count;    /* the largest valid copy counts */
    uint8_t reserved[28];
    uint32_t seal;
};
_Static_assert(sizeof(struct ckv_namespace_record) == 64, "namespace record");
enum { CKV_NAMESPACE_COPIES = 4 };

#define CKV_CHECKPOINT_MAGIC UINT64_C(0x32505056434b4300)
struct ckv_checkpoint_head {
    uint64_t magic;
    uint64_t generation;
    uint64_t sequence; /* heat of entries with a larger one is unknown */
    uint32_t entry_count;
    uint32_t heat_crc;
    uint32_t ghost_words; /* of this file; 0 when nothing is known of admission */
    uint32_t ghost_crc;
    uint32_t capacity; /* from here on as in struct ckv_admission_head */
    uint32_t second_touch;
    uint64_t ghost_clock;
    uint64_t full_bytes;
    uint64_t live_sum;
    uint64_t requests;
    uint64_t misses[2];
    uint32_t reserved;
    uint32_t seal;
};
_Static_assert(sizeof(struct ckv_checkpoint_head) == 104, "checkpoint head");

/* Pages that an entry of these lengths occupies; an empty one occupies one. */
static inline uint32_t
ckv_record_pages(uint32_t payload_bytes, uint16_t header_bytes)
{
    const uint64_t bytes = (uint64_t)payload_bytes + header_bytes;
    return bytes == 0 ? 1u : (uint32_t)((bytes + CKV_PAGE_BYTES - 1) / CKV_PAGE_BYTES);
}

/* Whether the two fields about the user header can both be true: the checksum of nothing
 * is 0.  A record that lost its length only would pass for one without a header. */
static inline bool
ckv_record_header_believable(const struct ckv_record *record)
{
    return record->header_bytes != 0 || record->header_crc == 0;
}

/* Sets the seal; the record is believed only under this file and number (F1). */
void ckv_record_seal(struct ckv_record *record, const uint8_t file_id[16],
    uint32_t local_entry);
/* Whether the seal agrees.  Says nothing about bounds. */
bool ckv_record_sealed(const struct ckv_record *record, const uint8_t file_id[16],
    uint32_t local_entry);

/* CRC-32C of everything before the final `seal` member, never 0. */
uint32_t ckv_seal_of(const void *object, size_t bytes_before_seal);

/* ---- shared region -------------------------------------------------------------- */

/* Entry state, one 64-bit word:
 *
 *   FREE ---reserve---> RESERVED(owner) ---publish---> LIVE(sequence)
 *    ^                      |                              | kill (final)
 *    |                      | abort / sweep                v
 *    +------ free ------- DEAD <---------strike------- DYING(owner)
 *
 *   bits 0..2  kind
 *   LIVE       bits 3..63 the sequence
 *   RESERVED, DYING
 *              bits 3..8 slot of the owner, bits 9..40 its incarnation
 * DYING: dead for every lookup; its owner still has to strike the record in the file.
 * DEAD: the pages may be reused once its pin mask is 0; only the cursor, holding the
 * stripe lock, turns it into FREE. */
enum ckv_state_kind {
    CKV_STATE_FREE = 0,
    CKV_STATE_RESERVED = 1,
    CKV_STATE_LIVE = 2,
    CKV_STATE_DYING = 3,
    CKV_STATE_DEAD = 4
};

static inline enum ckv_state_kind
ckv_state_kind(uint64_t state)
{
    return (enum ckv_state_kind)(state & 7u);
}

static inline uint64_t
ckv_state_live(uint64_t sequence)
{
    return sequence << 3 | CKV_STATE_LIVE;
}

static inline uint64_t
ckv_state_sequence(uint64_t state)
{
    return state >> 3;
}

static inline uint64_t
ckv_state_owned(enum ckv_state_kind kind, uint32_t slot, uint32_t incarnation)
{
    return (uint64_t)incarnation << 9 | (uint64_t)slot << 3 | (uint64_t)kind;
}

static inline uint32_t
ckv_state_slot(uint64_t state)
{
    return (uint32_t)(state >> 3) & 63u;
}

static inline uint32_t
ckv_state_incarnation(uint64_t state)
{
    return (uint32_t)(state >> 9);
}

/* A lock word: 0 when free, else who holds it. */
static inline uint64_t
ckv_owner_word(uint32_t slot, uint32_t incarnation)
{
    return (uint64_t)incarnation << 32 | (slot + 1u);
}

static inline uint32_t
ckv_owner_slot(uint64_t word)
{
    return ((uint32_t)word - 1u) & 63u;
}

enum ckv_counter {
#define X(kind, name, unit, sentence)   CKV_COUNTER_INDEX_##kind(name)
#define CKV_COUNTER_INDEX_counter(name) CKV_COUNTER_##name,
#define CKV_COUNTER_INDEX_gauge(name)
    CKV_STATISTICS(X)
#undef X
#undef CKV_COUNTER_INDEX_counter
#undef CKV_COUNTER_INDEX_gauge
        CKV_COUNTER_COUNT
};

/* One per process that has the volume open.  A process owns its slot by a byte lock on
 * every file of the set (slot.h), which dies with it. */
struct ckv_slot {
    ckv_atomic_u32 incarnation;   /* grows with each owner */
    ckv_atomic_u32 unswept;       /* 1 from claim until swept or left in order */
    ckv_atomic_u64 process_id;    /* in the owner's pid namespace; for people */
    ckv_atomic_u64 oldest_pin_ns; /* realtime, 0 for none; written once a second */
    ckv_atomic_u64 pinned_entries;
    ckv_atomic_u64 pinned_bytes;
    ckv_atomic_u64 opened_ns;
    ckv_atomic_u64 announcing; /* threads between a change and its event */
    uint8_t reserved[8];
    ckv_atomic_u64
        counters[64]; /* enum ckv_counter; never reset, whoever owns the slot */
};
_Static_assert(CKV_COUNTER_COUNT <= 64, "counters fit");
_Static_assert(sizeof(struct ckv_slot) == 64 + 512, "slot");

struct ckv_namespace {
    uint8_t tag[16];
    ckv_atomic_u64 used; /* 0 free, 1 in use; set under the open lock, after the tag */
    ckv_atomic_u64 clear_sequence;
    ckv_atomic_u64 clear_count;
    ckv_atomic_u64 entries; /* a total, see below: live entries */
    ckv_atomic_u64 bytes;   /* a total: their pages, in bytes */
    uint8_t reserved[8];
};
_Static_assert(sizeof(struct ckv_namespace) == 64, "namespace");

/* A total: bits 0..47 a signed number, bits 48..63 the epoch, which grows with every
 * clear.  What was added in an older epoch is not taken off again. */
static inline uint64_t
ckv_total_value(uint64_t word)
{
    const uint64_t value = word & ((UINT64_C(1) << 48) - 1);
    return value >> 47 != 0 ? 0 : value; /* below zero for a moment: none */
}

struct ckv_shared_path {
    ckv_atomic_u32 failed; /* 1: its entries are misses, its pages are left alone */
    ckv_atomic_u32 unread; /* 1: the rebuild does not know all that its table has */
    ckv_atomic_u64 synced_sequence;
    ckv_atomic_u64 synced_ns;     /* realtime of the last good sync; 0 for none */
    ckv_atomic_u64 checkpoint_ns; /* realtime of the last checkpoint */
    ckv_atomic_u64 checkpoint_generation;
    ckv_atomic_u64 doomed_pages; /* of entries that are DYING or DEAD; for people */
    uint8_t pad[16];
};
_Static_assert(sizeof(struct ckv_shared_path) == 64, "path");

struct ckv_hole {
    uint32_t first_page;
    uint32_t pages;
};
enum { CKV_HOLES_MAX = 64 };

/* Everything but `lock` and `virtual_time` is read and written under `lock` only. */
struct ckv_stripe {
    ckv_atomic_u64 lock;         /* ckv_owner_word() */
    ckv_atomic_u64 virtual_time; /* laps in 32.32 fixed point */
    ckv_atomic_u64 laps;
    ckv_atomic_u32 cursor_page; /* of the data area, inside the stripe */
    ckv_atomic_u32 entry_hand;  /* where the search for a free entry goes on */
    ckv_atomic_u32 hole_count;
    uint8_t reserved[28];
    struct ckv_hole holes[CKV_HOLES_MAX]; /* hints: forgotten at any doubt */
};
_Static_assert(sizeof(struct ckv_stripe) == 64 + 512, "stripe");

enum { CKV_HINTS = 1024 };
struct ckv_hint { /* a put in flight */
    ckv_atomic_u64
        word; /* bits 0..31 tag of the key, 32..37 slot, 38..63 incarnation */
    ckv_atomic_u64 since_ns; /* monotonic; renewed while it is written */
};

struct ckv_shared_event {
    ckv_atomic_u64 number;   /* see events.c */
    ckv_atomic_u64 words[7]; /* kind and flags, tag (2), key (4) */
};
_Static_assert(sizeof(struct ckv_shared_event) == 64, "event");

enum { CKV_BUCKET_SLOTS = 7 };
struct ckv_bucket {
    ckv_atomic_u64 version;
    /* 0 or: bits 0..31 entry, 32..51 low bits of its sequence, 52..63 tag of the key */
    ckv_atomic_u64 slots[CKV_BUCKET_SLOTS];
};
_Static_assert(sizeof(struct ckv_bucket) == 64, "bucket");

struct ckv_place {
    ckv_atomic_u32 first_page; /* of the data area of the entry's path */
    ckv_atomic_u32 pages;
};

/* The counts of admission.h; lines that are written often lie apart from those that are
 * read at each request. */
struct ckv_admission_head {
    ckv_atomic_u32 capacity;     /* blocks in a full tier; 0 until it is known */
    ckv_atomic_u32 sample_mask;  /* the shadows follow keys without these bits */
    ckv_atomic_u32 second_touch; /* 1 while a second touch is asked for */
    uint8_t pad0[52];
    ckv_atomic_u64 ghost_clock;
    ckv_atomic_u64 full_bytes; /* of live blocks when one is evicted; 0 before that */
    ckv_atomic_u64 live_sum;   /* 64 times the number of live blocks at that moment */
    uint8_t pad1[40];
    ckv_atomic_u32 samples;   /* requests since the last decision */
    ckv_atomic_u32 period;    /* decisions, as long as they can be counted */
    ckv_atomic_u64 requests;  /* decayed, without those since the last decision */
    ckv_atomic_u64 misses[2]; /* decayed; of the shadow that admits all, of the other */
    ckv_atomic_u64 switches;
    uint8_t pad2[24];
    ckv_atomic_u32 hands[2];
    ckv_atomic_u64 shadow_clock; /* of the second shadow's ghost */
    uint8_t pad3[48];
};
_Static_assert(sizeof(struct ckv_admission_head) == 256, "admission head");

/* The counts of hit_density.h. */
struct ckv_density_head {
    ckv_atomic_u64 now;      /* accesses so far */
    ckv_atomic_u64 due;      /* at which `now` the next rebuild is (D3) */
    ckv_atomic_u64 rebuilds; /* finished */
    ckv_atomic_u64 capacity; /* blocks that fit */
    uint8_t pad0[32];
    ckv_atomic_u64 taken;     /* blocks that cursors overwrote */
    ckv_atomic_u32 threshold; /* a score, as signed */
    uint8_t pad1[52];
};
_Static_assert(sizeof(struct ckv_density_head) == 128, "density head");

struct ckv_region_header {
    uint64_t magic;
    uint32_t version;
    uint32_t ready; /* 1 after the rebuild; a region without it is thrown away */
    uint64_t nonce;
    uint8_t set_id[16];
    uint64_t region_bytes;
    uint64_t layout_crc; /* of struct ckv_region_layout */
    uint64_t rebuilt_entries;
    uint64_t rebuild_dropped;
    uint64_t
        rebuilt_synced_sequence; /* newest sequence known durable in an earlier life */
    uint64_t rebuilt_last_sequence; /* newest one of an earlier life, durable or not */
    uint32_t eviction; /* enum ckv_eviction; decides what areas there are */
    uint8_t reserved[36];
    ckv_atomic_u64 sequence; /* last one given out (F5); its own cache line */
    uint8_t pad0[56];
    ckv_atomic_u64 event_head; /* last event number given out */
    uint8_t pad1[56];
    ckv_atomic_u32 eviction_seen;   /* the first eviction was logged */
    ckv_atomic_u32 exhaustion_seen; /* the first want of a table entry was logged */
    uint8_t pad2[56];
};
_Static_assert(sizeof(struct ckv_region_header) == 320, "region header");

#endif /* CKV_FORMAT_H */
