/* SPDX-License-Identifier: Apache-2.0 */
/* cffi declarations of admission.h. */

enum {
    CKV_ADMISSION_WAYS,
    CKV_ADMISSION_RING_MIN,
    CKV_ADMISSION_RING_MAX,
    CKV_ADMISSION_TOUCHED,
    ...
};

enum ckv_access { CKV_ACCESS_READ, CKV_ACCESS_TOUCH, CKV_ACCESS_PUT, CKV_ACCESS_PUT_KNOWN, ... };

struct ckv_admission_head {
    ckv_atomic_u32 capacity;
    ckv_atomic_u32 sample_mask;
    ckv_atomic_u32 second_touch;
    ckv_atomic_u64 ghost_clock;
    ckv_atomic_u64 full_bytes;
    ckv_atomic_u64 live_sum;
    ckv_atomic_u32 samples;
    ckv_atomic_u32 period;
    ckv_atomic_u64 requests;
    ckv_atomic_u64 misses[2];
    ckv_atomic_u64 switches;
    ckv_atomic_u32 hands[2];
    ckv_atomic_u64 shadow_clock;
    ...;
};

struct ckv_ghost {
    ckv_atomic_u32 *words;
    ckv_atomic_u64 *clock;
    uint32_t buckets;
};

struct ckv_shadow {
    ckv_atomic_u32 *ring;
    ckv_atomic_u32 *index;
    ckv_atomic_u32 *hand;
    ckv_atomic_u64 *misses;
};

struct ckv_admission_memory {
    struct ckv_admission_head *head;
    struct ckv_ghost ghost;
    struct ckv_ghost shadow_ghost;
    struct ckv_shadow shadows[2];
    ckv_atomic_u32 *touched;
    uint32_t entry_count;
    uint32_t ring_max;
};

uint64_t ckv_admission_bytes(uint32_t entry_count);
uint32_t ckv_admission_ghost_words(uint32_t entry_count);
void ckv_admission_attach(
    struct ckv_admission_memory *admission, void *memory, uint32_t entry_count);
void ckv_admission_resize(struct ckv_admission_memory *admission, uint64_t blocks);
uint32_t ckv_admission_capacity(const struct ckv_admission_memory *admission);
bool ckv_admission_samples(const struct ckv_admission_memory *admission, uint64_t hash);
void ckv_admission_access(
    struct ckv_admission_memory *admission, uint64_t hash, enum ckv_access access);
bool ckv_admission_asks_twice(const struct ckv_admission_memory *admission);
bool ckv_admission_knows(const struct ckv_admission_memory *admission, uint64_t hash);
void ckv_admission_remember(struct ckv_admission_memory *admission, uint64_t hash);
