/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of index.h. */

struct ckv_identity {
    uint8_t namespace_tag[16];
    uint8_t key[32];
    bool digested;
    uint8_t namespace_index;
    uint64_t hash;
};

struct ckv_found {
    uint64_t hash;
    uint32_t entry;
    uint64_t state;
    struct ckv_file *file;
    struct ckv_record record;
};

uint64_t ckv_index_hash(const struct ckv_volume *volume, const uint8_t *namespace_tag,
    const uint8_t *key, bool digested);
void ckv_index_prefetch(const struct ckv_volume *volume, uint64_t hash);
bool ckv_index_find(struct ckv_volume *volume, const struct ckv_identity *identity,
    struct ckv_found *found);
bool ckv_index_insert(
    struct ckv_volume *volume, uint64_t hash, uint32_t entry, uint64_t sequence);
void ckv_index_show(struct ckv_volume *volume, uint64_t hash);
uint64_t ckv_index_keep_newest(
    struct ckv_volume *volume, const struct ckv_identity *identity);
void ckv_index_erase(
    struct ckv_volume *volume, uint64_t hash, uint32_t entry, uint64_t sequence);
bool ckv_index_holds(
    struct ckv_volume *volume, uint64_t hash, uint32_t entry, uint64_t sequence);
