/* SPDX-License-Identifier: Apache-2.0 */
#include "format.h"

#include <string.h>

uint32_t
ckv_seal_of(const void *object, size_t bytes_before_seal)
{
    const uint32_t crc = ckv_crc32c(0, object, bytes_before_seal);
    return crc == 0 ? 1u : crc; /* 0 means dead (F1) */
}

static uint32_t
record_seal_of(const struct ckv_record *record, const uint8_t file_id[16],
    uint32_t local_entry)
{
    uint32_t crc = ckv_crc32c(0, file_id, 16);
    crc = ckv_crc32c(crc, &local_entry, sizeof local_entry);
    crc = ckv_crc32c(crc, record, offsetof(struct ckv_record, seal));
    return crc == 0 ? 1u : crc;
}

void
ckv_record_seal(struct ckv_record *record, const uint8_t file_id[16],
    uint32_t local_entry)
{
    record->seal = record_seal_of(record, file_id, local_entry);
}

bool
ckv_record_sealed(const struct ckv_record *record, const uint8_t file_id[16],
    uint32_t local_entry)
{
    return record->seal != 0 &&
           record->seal == record_seal_of(record, file_id, local_entry);
}
