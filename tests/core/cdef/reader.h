/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of reader.h. */

struct ckv_lease {
    uint32_t entry;
    uint64_t sequence;
    const void *copy;
    ...;
};

int ckv_reader_checksum(struct ckv_volume *volume, struct ckv_file *file,
    uint64_t data_offset, uint64_t length, uint32_t *crc);
