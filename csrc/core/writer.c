/* SPDX-License-Identifier: Apache-2.0 */
#include "writer.h"

#include <errno.h>
#include <string.h>

#include "announce.h"
#include "maintenance.h"
#include "pin.h"
#include "policy.h"
#include "prefix.h"
#include "reader.h"
#include "slot.h"
#include "stripe.h"
#include "write_behind.h"

enum {
    PIECE_BYTES = 1 << 20, /* of one pwritev: the checksum runs while it is in cache */
    PIECE_VECTORS = 64     /* segments of one piece, header and fill besides */
};

#define HINT_LIFE_NS      UINT64_C(1000000000)
#define OVERWRITE_WAIT_NS UINT64_C(1000000000)

static const uint8_t zero_page[CKV_PAGE_BYTES];

/* ---- hints: who is writing which key --------------------------------------------- */

enum hint_result { HINT_CLAIMED, HINT_UNAVAILABLE, HINT_TAKEN };

static uint64_t
hint_word(const struct ckv_volume *volume, uint64_t hash)
{
    return (uint64_t)volume->incarnation << 38 | (uint64_t)volume->slot << 32 |
           (uint32_t)(hash >> 20);
}

static struct ckv_hint *
hint_of(struct ckv_volume *volume, uint64_t hash)
{
    return &volume->region.hints[hash % CKV_HINTS];
}

/* Whether the claim behind a word is still to be respected. */
static bool
hint_holds(struct ckv_volume *volume, const struct ckv_hint *hint, uint64_t word,
    uint64_t now_ns)
{
    const uint64_t since = ckv_load_acquire_u64(&hint->since_ns);
    if (now_ns > since && now_ns - since > HINT_LIFE_NS) {
        return false; /* stopped, or on another clock: a duplicate write is harmless */
    }
    const uint32_t slot = (uint32_t)(word >> 32) & 63u;
    const uint32_t incarnation =
        ckv_load_relaxed_u32(&volume->region.slots[slot].incarnation);
    return (incarnation & UINT32_C(0x3ffffff)) == word >> 38 &&
           ckv_slot_alive(volume, slot, incarnation);
}

static enum hint_result
hint_claim(struct ckv_volume *volume, uint64_t hash)
{
    struct ckv_hint *hint = hint_of(volume, hash);
    const uint64_t mine = hint_word(volume, hash);
    const uint64_t now = ckv_os.monotonic_ns();
    uint64_t seen = ckv_load_acquire_u64(&hint->word);
    if (seen != 0 && hint_holds(volume, hint, seen, now)) {
        return (uint32_t)seen == (uint32_t)mine ? HINT_TAKEN : HINT_UNAVAILABLE;
    }
    ckv_store_release_u64(&hint->since_ns, now);
    CKV_POINT("put.hint");
    if (ckv_cas_ordered_u64(&hint->word, &seen, mine)) {
        return HINT_CLAIMED;
    }
    return (uint32_t)seen == (uint32_t)mine ? HINT_TAKEN : HINT_UNAVAILABLE;
}

/* While a long payload is written; not for somebody else's claim. */
static void
hint_renew(struct ckv_volume *volume, uint64_t hash)
{
    struct ckv_hint *hint = hint_of(volume, hash);
    if (ckv_load_relaxed_u64(&hint->word) == hint_word(volume, hash)) {
        ckv_store_relaxed_u64(&hint->since_ns, ckv_os.monotonic_ns());
    }
}

static void
hint_release(struct ckv_volume *volume, uint64_t hash)
{
    uint64_t mine = hint_word(volume, hash);
    (void)ckv_cas_ordered_u64(&hint_of(volume, hash)->word, &mine, 0); /* or expired */
}

/* ---- payload ---------------------------------------------------------------------- */

struct source { /* where the next piece comes from */
    const struct ckv_segment *segments;
    size_t segment_count;
    size_t segment;
    size_t consumed; /* of that segment */
};

/* iovec wants a pointer to non-const data also for writing. */
static void *
unconst(const void *data)
{
    union {
        const void *in;
        void *out;
    } pointer = {.in = data};
    return pointer.out;
}

/* Collects up to `limit` bytes, extends the checksum over them. */
static size_t
next_piece(struct source *source, size_t limit, struct iovec *iov, int *count,
    uint32_t *crc)
{
    size_t total = 0;
    *count = 0;
    while (total < limit && source->segment < source->segment_count &&
           *count < PIECE_VECTORS) {
        const struct ckv_segment *segment = &source->segments[source->segment];
        const size_t left = segment->length - source->consumed;
        const size_t length = left < limit - total ? left : limit - total;
        if (length > 0) {
            const uint8_t *begin = (const uint8_t *)segment->data + source->consumed;
            *crc = ckv_crc32c(*crc, begin, length);
            iov[(*count)++] =
                (struct iovec){.iov_base = unconst(begin), .iov_len = length};
            total += length;
            source->consumed += length;
        }
        if (source->consumed == segment->length) {
            source->segment++;
            source->consumed = 0;
        }
    }
    return total;
}

/* Writes payload, header and fill into the extent; fills in the checksums.  Whole
 * pages: a piece begins on a page unless many tiny segments come together, and the last
 * one carries header and fill along, so that no page has to be read back.  0 or
 * -errno. */
static int
write_extent(struct ckv_volume *volume, const struct ckv_extent *extent,
    const struct ckv_item *item, uint64_t hash, struct ckv_record *record)
{
    struct source source = {
        .segments = item->segments,
        .segment_count = item->segment_count,
    };
    uint64_t at = extent->file->geometry.data_offset +
                  (uint64_t)extent->first_page * CKV_PAGE_BYTES;
    const uint64_t end = at + (uint64_t)extent->pages * CKV_PAGE_BYTES;
    uint64_t payload_left = record->payload_bytes;
    for (;;) {
        struct iovec iov[PIECE_VECTORS + 2];
        int count = 0;
        const size_t piece =
            next_piece(&source, PIECE_BYTES, iov, &count, &record->payload_crc);
        payload_left -= piece;
        const bool last = payload_left == 0;
        if (last && record->header_bytes > 0) {
            record->header_crc = ckv_crc32c(0, item->header, record->header_bytes);
            iov[count++] = (struct iovec){.iov_base = unconst(item->header),
                .iov_len = record->header_bytes};
        }
        const uint64_t fill = end - at - piece - record->header_bytes;
        if (last && fill > 0) {
            iov[count++] =
                (struct iovec){.iov_base = unconst(zero_page), .iov_len = (size_t)fill};
        }
        CKV_POINT("put.piece");
        const int result = ckv_os_writev_all(extent->file->data_fd, iov, count, at);
        if (result < 0 || last) {
            return result;
        }
        at += piece;
        hint_renew(volume, hash);
    }
}

/* ---- put -------------------------------------------------------------------------- */

enum presence {
    ABSENT,
    REPLACEABLE, /* of other lengths, or not to be trusted */
    SOUND /* makes the put unnecessary: same lengths, and its bytes are known to be
                  * sound, or are found to be so now */
};

static enum presence
look_for(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_item *item, uint64_t payload_bytes, bool overwrite)
{
    struct ckv_found found;
    if (!ckv_index_find(volume, identity, &found)) {
        return ABSENT;
    }
    if (overwrite || found.record.payload_bytes != payload_bytes ||
        found.record.header_bytes != item->header_length) {
        return REPLACEABLE;
    }
    if (ckv_entry_verified(volume, found.entry, found.record.sequence)) {
        return SOUND;
    }
    if (!ckv_pin(volume, found.entry, found.state)) {
        return REPLACEABLE; /* it died this moment */
    }
    const enum ckv_status status = ckv_reader_verify(volume, &found);
    ckv_unpin(volume, found.entry);
    return status == CKV_OK ? SOUND : REPLACEABLE;
}

/* A failed write: give the pages back; a medium error takes the path out of use. */
static enum ckv_status
give_up(struct ckv_volume *volume, const struct ckv_extent *extent, int os_errno)
{
    ckv_entry_abort(volume, extent->entry);
    if (os_errno == EIO) {
        ckv_volume_fail_path(volume, extent->file, "writing a block", os_errno);
    }
    return CKV_IO_FAILED;
}

/* After publishing: alone, announced, on its way to the medium. */
static enum ckv_status
settle(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_extent *extent, const struct ckv_record *record,
    uint64_t *deadline_ns)
{
    ckv_index_keep_stored(volume, identity, record->sequence);
    ckv_index_settle(volume, identity, deadline_ns);
    CKV_POINT("put.newest");
    const uint64_t page_bytes = (uint64_t)extent->pages * CKV_PAGE_BYTES;
    ckv_bump(volume, CKV_COUNTER_payload_bytes_written, record->payload_bytes);
    ckv_bump(volume, CKV_COUNTER_page_bytes_written, page_bytes);
    ckv_announce(volume, identity, true);
    if (volume->behind != NULL) {
        ckv_write_behind_add(volume->behind, extent->file->data_fd,
            extent->file->geometry.data_offset +
                (uint64_t)extent->first_page * CKV_PAGE_BYTES,
            page_bytes);
        ckv_bump(volume, CKV_COUNTER_write_behind_bytes, page_bytes);
    }
    ckv_volume_probe(volume, extent->file);
    return ckv_volume_file_usable(volume, extent->file) ? CKV_OK : CKV_FAILED_PATH;
}

/* What the entry will carry for the policy: a newer version carries on the older one. */
static uint64_t
life_of(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_offer *offer)
{
    struct ckv_found found;
    if (!ckv_prefix_on(volume) || offer->life != 0 ||
        !ckv_index_find(volume, identity, &found)) {
        return offer->life;
    }
    return ckv_load_relaxed_u64(&volume->region.lives[found.entry]);
}

static enum ckv_status
store(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_item *item, struct ckv_record *record,
    const struct ckv_offer *offer, uint64_t *deadline_ns)
{
    const uint64_t life = life_of(volume, identity, offer);
    struct ckv_extent extent;
    const enum ckv_status reserved = ckv_stripe_reserve(volume,
        ckv_record_pages(record->payload_bytes, record->header_bytes), deadline_ns,
        &extent);
    if (reserved != CKV_OK) {
        return reserved;
    }
    if (ckv_prefix_on(volume)) {
        ckv_store_relaxed_u64(&volume->region.lives[extent.entry], life);
    }
    record->first_page = extent.first_page;
    record->flags = (uint16_t)((identity->digested ? CKV_RECORD_DIGESTED : 0) |
                               (extent.hole ? CKV_RECORD_HOLE : 0));
    const int result = write_extent(volume, &extent, item, identity->hash, record);
    if (result < 0) {
        return give_up(volume, &extent, -result);
    }
    CKV_POINT("put.written");
    ckv_announce_begin(volume);
    enum ckv_status status = ckv_entry_publish(volume, identity, extent.entry, record);
    if (status == CKV_OK) {
        status = settle(volume, identity, &extent, record, deadline_ns);
    } else if (status == CKV_NO_RUN) { /* fourteen blocks in use share both buckets */
        ckv_entry_abort(volume, extent.entry);
    } else {
        status = give_up(volume, &extent, EIO);
    }
    ckv_announce_end(volume);
    return status;
}

static void
count_outcome(struct ckv_volume *volume, enum ckv_status status)
{
    static const struct {
        enum ckv_status status;
        enum ckv_counter counter;
    } outcomes[] = {
        {CKV_OK, CKV_COUNTER_puts_stored},
        {CKV_PRESENT, CKV_COUNTER_puts_present},
        {CKV_BUSY, CKV_COUNTER_puts_busy},
        {CKV_NO_RUN, CKV_COUNTER_puts_no_run},
        {CKV_NOT_ADMITTED, CKV_COUNTER_puts_not_admitted},
        {CKV_IN_FLIGHT, CKV_COUNTER_puts_in_flight},
        {CKV_FAILED_PATH, CKV_COUNTER_puts_failed_path},
        {CKV_IO_FAILED, CKV_COUNTER_puts_io_failed},
    };
    for (size_t i = 0; i < CKV_ARRAY_LENGTH(outcomes); i++) {
        if (outcomes[i].status == status) {
            ckv_bump(volume, outcomes[i].counter, 1);
        }
    }
}

/* Claims the hint of the key; an overwrite waits for the other writer first. */
static enum hint_result
claim(struct ckv_volume *volume, uint64_t hash, bool overwrite, uint64_t *deadline_ns)
{
    enum hint_result result = hint_claim(volume, hash);
    while (result == HINT_TAKEN && overwrite) {
        const uint64_t now_ns = ckv_os.monotonic_ns();
        if (*deadline_ns == 0) {
            *deadline_ns = now_ns + OVERWRITE_WAIT_NS;
        }
        if (now_ns >= *deadline_ns) {
            break;
        }
        ckv_os.sleep_ns(200000);
        result = hint_claim(volume, hash);
    }
    return result;
}

/* With the hint in hand: looks again, since the block may have been stored before the
 * hint was ours, asks the policy about a key that is new, and stores.  `before` is what
 * the first look found. */
static enum ckv_status
store_unless_present(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_item *item, uint64_t payload_bytes, bool overwrite,
    enum presence before, struct ckv_offer *offer, uint64_t *deadline_ns)
{
    struct ckv_record record = {
        .payload_bytes = (uint32_t)payload_bytes,
        .header_bytes = (uint16_t)item->header_length,
    };
    const enum presence now =
        look_for(volume, identity, item, payload_bytes, overwrite);
    if (now == SOUND) {
        return CKV_PRESENT;
    }
    if (now == ABSENT && before == ABSENT && /* else Y2 */
        !ckv_policy_admits(volume, identity->hash,
            ckv_record_pages(record.payload_bytes, record.header_bytes), offer)) {
        return CKV_NOT_ADMITTED;
    }
    memcpy(record.namespace_tag, identity->namespace_tag, 16);
    memcpy(record.key, identity->key, 32);
    return store(volume, identity, item, &record, offer, deadline_ns);
}

enum ckv_status
ckv_writer_put(struct ckv_volume *volume, const struct ckv_identity *identity,
    const struct ckv_item *item, uint32_t flags, struct ckv_offer *offer,
    uint64_t *deadline_ns)
{
    uint64_t payload_bytes = 0;
    for (size_t i = 0; i < item->segment_count; i++) {
        payload_bytes += item->segments[i].length;
    }
    const bool overwrite = (flags & CKV_PUT_OVERWRITE) != 0;
    const enum presence before =
        look_for(volume, identity, item, payload_bytes, overwrite);
    enum ckv_status status = CKV_PRESENT;
    if (before != SOUND) {
        const enum hint_result hint =
            claim(volume, identity->hash, overwrite, deadline_ns);
        status = hint == HINT_TAKEN
                     ? CKV_IN_FLIGHT
                     : store_unless_present(volume, identity, item, payload_bytes,
                           overwrite, before, offer, deadline_ns);
        if (hint == HINT_CLAIMED) {
            hint_release(volume, identity->hash);
        }
    }
    count_outcome(volume, status);
    return status;
}
