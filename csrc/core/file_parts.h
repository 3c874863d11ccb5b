/* SPDX-License-Identifier: Apache-2.0 */
/* file_parts.h: what the parts of file.h share; nobody else includes it.
 *
 *   file_path.c    P1..P3: resolve, open, lock, reopen, still attached, note
 *   file_format.c  blank files: space, zeros, self-test, first header
 *   file_direct.c  the description for direct reads
 *   file.c         header, mappings, records
 */
#ifndef CKV_FILE_PARTS_H
#define CKV_FILE_PARTS_H

#include "file.h"

#define CKV_HEAD_BYTES (4u * CKV_PAGE_BYTES) /* two headers, gate, note */

/* The path, or its end with "..." before when it would crowd out the sentence. */
struct ckv_shown_path {
    char text[204];
};
struct ckv_shown_path ckv_file_shown(const char *path);

/* "cannot <what> <path>: <errno text>"; `code` is -errno.  ENOSPC and the like become
 * CKV_E_NO_SPACE, ENOMEM becomes CKV_E_NO_MEMORY. */
enum ckv_status ckv_file_fail_os(struct ckv_error *error, int code, const char *what,
    const char *path);

/* The note of this process, zero-padded to a page. */
void ckv_file_compose_note(char note[CKV_PAGE_BYTES], const char *doing);

#define CKV_NOTE_PREFIX   "cyclone_kv: "
#define CKV_NOTE_CREATING "creating" /* `doing` of an unfinished file */

/* Seals `header`, writes it into copy 0 or 1.  0 or -errno. */
int ckv_file_put_header(int fd, struct ckv_file_header *header, unsigned int copy);

/* Tells headers apart, also two that processes have written as the same generation. */
static inline uint64_t
ckv_file_header_name(const struct ckv_file_header *header)
{
    return header->generation << 32 | header->seal;
}

/* Whether the two pages have the header of a volume that was ever in use (one that names
 * a region), or one that is not for us to judge. */
bool ckv_file_was_used(const void *pages);

/* Whether a header of this version counts now; false also when it cannot be read. */
bool ckv_file_is_ours(const struct ckv_file *file);

/* Maps pages that need not start on a page of this system.  0 or -errno. */
int ckv_file_map_range(int fd, uint64_t offset, uint64_t length, const void **address);
void ckv_file_unmap_range(const void *address, uint64_t length);

#endif /* CKV_FILE_PARTS_H */
