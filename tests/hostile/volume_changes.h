/* SPDX-License-Identifier: Apache-2.0 */
/* volume_changes.h: changes of volume files by somebody who knows the format.
 *
 * Headers, namespaces, checkpoint, table and data; raw bytes as well as forgeries with the
 * right seals, so that forged lengths, places, counters and chains get past them.
 */
#ifndef CKV_TESTS_VOLUME_CHANGES_H
#define CKV_TESTS_VOLUME_CHANGES_H

#include "hostile.h"

enum { HEADER_BYTES = sizeof(struct ckv_file_header), LINE = 160 };

struct target { /* a file that is being changed */
    int fd;
    unsigned which;                /* number in the set */
    struct ckv_file_header header; /* as the template has it */
    struct ckv_geometry geometry;
};

static void
get_bytes(const struct target *target, void *bytes, size_t length, uint64_t offset)
{
    memset(bytes, 0, length);
    if (pread(target->fd, bytes, length, (off_t)offset) < 0) {
        memset(bytes, 0, length);
    }
}

static void
set_bytes(const struct target *target, const void *bytes, size_t length,
    uint64_t offset)
{
    if (offset < UINT64_C(1) << 40 &&
        pwrite(target->fd, bytes, length, (off_t)offset) < 0) {
        return; /* past what the file may have: as good as any other change */
    }
}

static void
flip_bytes(const struct target *target, struct input *input, uint64_t begin,
    uint64_t end)
{
    for (unsigned i = 1 + take8(input) % 16; i > 0 && begin < end; i--) {
        const uint64_t at = begin + take_below(input, end - begin);
        const uint64_t word = take_evil(input);
        set_bytes(target, &word, one_in(input, 2) ? 1 : 8, at);
    }
}

/* ---- headers ------------------------------------------------------------------------ */

static void
seal_header(const struct target *target, struct ckv_file_header *header,
    unsigned copies)
{
    header->seal = ckv_seal_of(header, offsetof(struct ckv_file_header, seal));
    for (unsigned i = 0; i < 2; i++) {
        if ((copies >> i & 1) != 0) {
            set_bytes(target, header, sizeof *header, (uint64_t)i * HEADER_BYTES);
        }
    }
}

static void
set_field(struct ckv_file_header *header, struct input *input)
{
    const uint64_t value = take_evil(input);
    const bool wide = one_in(input, 2);
    const size_t at = take_below(input, 60) * 4 + (one_in(input, 4) ? 248 : 0);
    memcpy((uint8_t *)header + at, &value, wide ? 8 : 4);
}

/* Another layout that makes sense, with a file that is long enough for it. */
static void
change_geometry(const struct target *target, struct ckv_file_header *header,
    struct input *input)
{
    struct ckv_geometry geometry;
    const uint64_t capacity = (CKV_CAPACITY_MIN_BYTES << take8(input) % 8) +
                              take_below(input, 1000) * CKV_PAGE_BYTES;
    if (ckv_geometry_plan(capacity, (uint32_t)take_below(input, 9),
            UINT64_C(4096) << take8(input) % 6, &geometry, NULL) == CKV_OK) {
        ckv_geometry_write(&geometry, header);
        if (ftruncate(target->fd, (off_t)geometry.file_bytes) < 0) {
            return;
        }
    }
}

static void
change_header(const struct target *target, struct input *input)
{
    struct ckv_file_header header = target->header;
    const unsigned copies = 1 + take8(input) % 3;
    const struct template_file *other;
    header.generation += 1 + take8(input) % 2;
    switch (take8(input) % 12) {
    case 0:
        header.generation = take_evil(input);
        header.region_nonce = take64(input);
        break;
    case 1:
        header.event_capacity =
            (uint32_t)(one_in(input, 2) ? UINT64_C(1) << take8(input) % 32
                                        : take_evil(input));
        break;
    case 2:
        header.member_count = (uint32_t)take_evil(input);
        header.member_index = (uint32_t)take_below(input, 20);
        break;
    case 3:
        memset(header.shm_directory, '/' + take8(input) % 3,
            sizeof header.shm_directory);
        if (one_in(input, 2)) {
            header.shm_directory[1023] = '\0';
        }
        break;
    case 4: /* a member that is not given, for opens that do without it */
        header.member_count = 2 + take8(input) % 15;
        for (unsigned i = 0; i < CKV_PATHS_MAX; i++) {
            struct ckv_member *member = &header.members[i];
            if (i != header.member_index) {
                member->data_bytes = one_in(input, 3)
                                         ? take_evil(input) % (UINT64_C(8) << 30)
                                         : CKV_CAPACITY_MIN_BYTES;
                member->stripe_count = (uint16_t)take_evil(input);
                member->granule_shift = (uint8_t)(9 + take8(input) % 14);
            }
        }
        setting.degraded = true;
        break;
    case 5:
        change_geometry(target, &header, input);
        break;
    case 6: /* the header of another volume */
        other = &templates[take8(input) % TEMPLATES].files[0];
        memcpy(&header, other->content, sizeof header);
        break;
    case 7:
        header.synced_sequence = take_evil(input);
        break;
    case 8: /* one copy unsealed but newer: damage */
        header.generation = take_evil(input);
        header.region_nonce = take64(input);
        header.seal = (uint32_t)take64(input);
        set_bytes(target, &header, sizeof header,
            (uint64_t)(copies % 2) * HEADER_BYTES);
        return;
    case 9:
        header.version += take8(input) % 2;
        header.endian_mark += take8(input) % 2;
        header.page_bytes <<= take8(input) % 2;
        break;
    default:
        for (unsigned i = 1 + take8(input) % 3; i > 0; i--) {
            set_field(&header, input);
        }
        break;
    }
    seal_header(target, &header, copies);
}

/* ---- namespaces and checkpoint ------------------------------------------------------ */

static void
forge_namespace(const struct target *target, struct input *input)
{
    enum { ALL = CKV_NAMESPACES_MAX * CKV_NAMESPACE_COPIES };
    const unsigned count = one_in(input, 4) ? ALL : 1 + take8(input) % 4u;
    for (unsigned i = 0; i < count; i++) {
        struct ckv_namespace_record record = {0};
        const uint64_t at = count == ALL ? i : take_below(input, ALL);
        switch (take8(input) % 3) {
        case 0:
            break; /* the default namespace */
        case 1:
            get_bytes(target, &record, sizeof record,
                target->geometry.namespaces_offset); /* the one that was cleared */
            break;
        default:
            memset(record.tag, (int)take64(input) & 0xff, sizeof record.tag);
            record.tag[3] = (uint8_t)i;
            break;
        }
        record.clear_sequence = take_evil(input);
        record.clear_count = take_evil(input);
        record.seal = ckv_seal_of(&record, offsetof(struct ckv_namespace_record, seal));
        set_bytes(target, &record, sizeof record,
            target->geometry.namespaces_offset + at * sizeof record);
    }
}

static void
forge_checkpoint(const struct target *target, struct input *input)
{
    const uint32_t count = target->geometry.entry_count;
    const uint64_t copy = take8(input) % 2;
    const uint32_t ghost_words = ckv_admission_ghost_words(count);
    uint8_t *heats = malloc(count);
    uint32_t *ghost = malloc(ghost_words * sizeof *ghost);
    need(heats != NULL && ghost != NULL, "memory");
    memset(heats, (int)take_evil(input) & 0xff, count);
    for (uint32_t i = 0; i < ghost_words; i++) {
        ghost[i] = (uint32_t)take_evil(input);
    }
    struct ckv_checkpoint_head head = {
        .magic = CKV_CHECKPOINT_MAGIC,
        .generation = (take_evil(input) & ~UINT64_C(1)) | copy,
        .sequence = take_evil(input),
        .entry_count = one_in(input, 4) ? (uint32_t)take_evil(input) : count,
        .heat_crc = ckv_crc32c(0, heats, count),
        .ghost_words = one_in(input, 4) ? (uint32_t)take_evil(input) : ghost_words,
        .ghost_crc = ckv_crc32c(0, ghost, ghost_words * sizeof *ghost),
        .ghost_clock = take_evil(input),
        .capacity = 1 + (uint32_t)take_below(input, count),
        .second_touch = take8(input) % 2u,
        .full_bytes = take_below(input, CKV_CAPACITY_MIN_BYTES),
        .live_sum = take_below(input, count * UINT64_C(64)),
        .requests = take_below(input, 1u << 20),
        .misses = {take_below(input, 1u << 20), take_below(input, 1u << 20)},
    };
    switch (take8(input) % 8) { /* one that cannot have been written */
    case 0:
        head.capacity = (uint32_t)take_evil(input);
        break;
    case 1:
        head.second_touch = (uint32_t)take_evil(input);
        break;
    case 2:
        head.full_bytes = take_evil(input);
        break;
    case 3:
        head.live_sum = take_evil(input);
        break;
    case 4:
        head.misses[1] = take_evil(input);
        break;
    default:
        break;
    }
    head.seal = ckv_seal_of(&head, offsetof(struct ckv_checkpoint_head, seal));
    const uint64_t offset =
        target->geometry.checkpoint_offset + copy * target->geometry.checkpoint_bytes;
    set_bytes(target, &head, sizeof head, offset);
    set_bytes(target, heats, count, offset + CKV_PAGE_BYTES);
    set_bytes(target, ghost, ghost_words * sizeof *ghost,
        offset + CKV_PAGE_BYTES + ckv_align_up(count, CKV_PAGE_BYTES));
    free(heats);
    free(ghost);
}

/* ---- table -------------------------------------------------------------------------- */

static uint64_t
record_offset(const struct target *target, uint32_t entry)
{
    return target->geometry.table_offset + (uint64_t)entry * sizeof(struct ckv_record);
}

/* An entry that has a record, if there is one. */
static uint32_t
some_entry(const struct target *target, struct input *input, struct ckv_record *record)
{
    const uint32_t count = target->geometry.entry_count;
    struct ckv_record *table = calloc(count, sizeof *table);
    uint32_t *sealed = calloc(count, sizeof *sealed);
    uint32_t found = 0;
    need(table != NULL && sealed != NULL, "memory");
    get_bytes(target, table, count * sizeof *table, record_offset(target, 0));
    for (uint32_t i = 0; i < count; i++) {
        if (table[i].seal != 0) {
            sealed[found++] = i;
        }
    }
    const uint32_t entry = (uint32_t)take_below(input, found != 0 ? found : count);
    const uint32_t chosen = found != 0 ? sealed[entry] : entry;
    *record = table[chosen];
    free(table);
    free(sealed);
    return chosen;
}

static void
write_sealed(const struct target *target, uint32_t entry, struct ckv_record *record)
{
    ckv_record_seal(record, target->header.file_id, entry);
    set_bytes(target, record, sizeof *record, record_offset(target, entry));
}

static void
distort(const struct target *target, struct ckv_record *record, struct input *input)
{
    const uint32_t pages = (uint32_t)(target->geometry.data_bytes / CKV_PAGE_BYTES);
    const uint32_t stripe = pages / target->geometry.stripe_count;
    switch (take8(input) % 9) {
    case 0:
        record->sequence = take_evil(input);
        break;
    case 1:
        record->payload_bytes = (uint32_t)take_evil(input);
        break;
    case 2:
        record->header_bytes = (uint16_t)take_evil(input);
        break;
    case 3:
        record->flags = (uint16_t)take_evil(input);
        break;
    case 4:
        record->first_page = (uint32_t)take_evil(input);
        break;
    case 5: /* across the end of a stripe, or of the data area */
        record->first_page =
            stripe * (1 + take8(input) % target->geometry.stripe_count) -
            take8(input) % 3;
        break;
    case 6: /* close to what is there: overlaps */
        record->first_page += (uint32_t)(take8(input) % 9) - 4;
        break;
    case 7:
        record->namespace_tag[take8(input) % 16] ^= take8(input);
        break;
    default:
        record->key[take8(input) % 32] ^= take8(input);
        break;
    }
}

static void
forge_record(const struct target *target, struct input *input)
{
    struct ckv_record record;
    uint32_t entry = some_entry(target, input, &record);
    for (unsigned i = 1 + take8(input) % 2; i > 0; i--) {
        distort(target, &record, input);
    }
    if (one_in(input, 2)) { /* the same again, in another place of the table */
        entry = (uint32_t)take_below(input, target->geometry.entry_count);
    }
    write_sealed(target, entry, &record);
}

/* A record with the right checksum for bytes that were never put under its key. */
static void
forge_content(const struct target *target, struct input *input)
{
    struct ckv_record record;
    struct ckv_record other;
    const uint32_t entry = some_entry(target, input, &record);
    (void)some_entry(target, input, &other);
    record.first_page = other.first_page;
    record.payload_bytes = other.payload_bytes;
    record.payload_crc = other.payload_crc;
    record.header_bytes = other.header_bytes;
    record.header_crc = other.header_crc;
    setting.forged[0] = setting.forged[1] = true;
    write_sealed(target, entry, &record);
}

/* The whole table full of records that lie over each other. */
static void
forge_table(const struct target *target, struct input *input)
{
    const struct ckv_geometry *geometry = &target->geometry;
    const uint32_t stripe_pages = ckv_geometry_stripe_pages(geometry);
    const unsigned keys = 1 + take8(input) % KEYS;
    const uint32_t spread = 1 + (uint32_t)take_below(input, stripe_pages);
    const uint32_t length = 1 + (uint32_t)take_below(input, 100) * CKV_PAGE_BYTES;
    const bool one_bucket = one_in(input, 4);
    uint64_t state = take64(input);
    for (uint32_t entry = 0; entry < geometry->entry_count; entry++) {
        struct ckv_record record = {0};
        state = mix(state);
        const uint32_t stripe = entry / geometry->stripe_entries;
        record.sequence = 1 + state % 5000;
        record.first_page = stripe * stripe_pages + (uint32_t)(state >> 32) % spread;
        record.payload_bytes = (uint32_t)(state >> 20) % length;
        record.payload_crc = (uint32_t)state | 1;
        const bool digested =
            stored_key(one_bucket ? 0 : (unsigned)(state >> 7) % keys, record.key);
        if (one_in(input, 2)) {
            record.key[0] ^= (uint8_t)(state >> 3);
        }
        record.flags = digested ? CKV_RECORD_DIGESTED : 0;
        if (state % 11 == 0) {
            record.flags ^= CKV_RECORD_HOLE;
        }
        write_sealed(target, entry, &record);
    }
}

/* ---- the file as a whole ------------------------------------------------------------- */

static uint64_t
some_offset(const struct target *target, struct input *input)
{
    const struct ckv_geometry *geometry = &target->geometry;
    const uint64_t offsets[] = {0, HEADER_BYTES, 2 * HEADER_BYTES, 3 * HEADER_BYTES,
        geometry->namespaces_offset, geometry->checkpoint_offset,
        geometry->table_offset, geometry->data_offset,
        geometry->data_offset + geometry->stripe_bytes, geometry->file_bytes};
    return offsets[take_below(input, CKV_ARRAY_LENGTH(offsets))];
}

static void
change_pages(const struct target *target, struct input *input)
{
    static uint8_t page[CKV_PAGE_BYTES];
    const uint64_t from = some_offset(target, input);
    uint64_t to = some_offset(target, input) + take_below(input, 3) * CKV_PAGE_BYTES;
    if (one_in(input, 2)) {
        memset(page, 0, sizeof page);
    } else {
        get_bytes(target, page, sizeof page, from);
    }
    if (to + sizeof page <= target->geometry.file_bytes) {
        set_bytes(target, page, sizeof page, to);
    }
}

static void
change_length(const struct target *target, struct input *input)
{
    uint64_t length = some_offset(target, input);
    if (one_in(input, 2)) {
        length += take_below(input, 3 * CKV_PAGE_BYTES);
    }
    if (ftruncate(target->fd, (off_t)length) < 0) {
        return; /* refused: then nothing is changed */
    }
}

static void
change_volume(const struct target *target, struct input *input)
{
    const struct ckv_geometry *geometry = &target->geometry;
    switch (take8(input) % 16) {
    case 0:
    case 1:
    case 2:
        change_header(target, input);
        break;
    case 3:
        forge_namespace(target, input);
        break;
    case 4:
        forge_checkpoint(target, input);
        break;
    case 5:
        forge_content(target, input);
        break;
    case 6:
        forge_table(target, input);
        break;
    case 7:
        change_pages(target, input);
        break;
    case 8:
        change_length(target, input);
        break;
    case 9:
        flip_bytes(target, input, 0, geometry->data_offset);
        break;
    case 10:
        flip_bytes(target, input, geometry->table_offset, geometry->data_offset);
        break;
    case 11:
        flip_bytes(target, input, geometry->data_offset,
            geometry->data_offset + geometry->data_bytes / 8);
        break;
    default:
        for (unsigned i = 1 + take8(input) % 8; i > 0; i--) {
            forge_record(target, input);
        }
        break;
    }
}

static void
change_some(struct input *input, unsigned template_number)
{
    const unsigned which = take8(input) % setting.path_count;
    const struct template_file *file = &templates[template_number].files[which];
    struct target target = {
        .fd = open(setting.paths[which], O_RDWR | O_CLOEXEC),
        .which = which,
    };
    need(target.fd >= 0, "open the volume to change it");
    /* Of the two copies the template's last session wrote one. */
    struct ckv_file_header copies[2];
    memcpy(copies, file->content, sizeof copies);
    target.header = copies[copies[1].generation > copies[0].generation];
    need(ckv_geometry_read(&target.header, &target.geometry, NULL) == CKV_OK,
        "geometry");
    doing("changing files");
    for (unsigned i = 1 + take8(input) % 5; i > 0; i--) {
        change_volume(&target, input);
    }
    (void)close(target.fd);
}

#endif /* CKV_TESTS_VOLUME_CHANGES_H */
