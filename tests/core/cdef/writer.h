/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of writer.h. */

enum ckv_status ckv_writer_put(struct ckv_volume *volume,
    const struct ckv_identity *identity, const struct ckv_item *item, uint32_t flags,
    struct ckv_offer *offer, uint64_t *deadline_ns);
