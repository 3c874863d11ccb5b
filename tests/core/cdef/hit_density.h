/* cffi declarations of hit_density.h. */

enum {
    CKV_DENSITY_BINS,
    CKV_DENSITY_CLASSES,
    CKV_DENSITY_WAYS,
    CKV_DENSITY_SCORE_MAX,
    ...
};

struct ckv_density_head {
    ckv_atomic_u64 now;
    ckv_atomic_u64 due;
    ckv_atomic_u64 rebuilds;
    ckv_atomic_u64 capacity;
    ckv_atomic_u64 taken;
    ckv_atomic_u32 threshold;
    ...;
};

struct ckv_density {
    struct ckv_density_head *head;
    ckv_atomic_u32 *ended;
    ckv_atomic_u32 *dropped;
    ckv_atomic_u32 *scores;
    ckv_atomic_u64 *ghost;
    ckv_atomic_u64 *tracker;
    uint32_t ghost_buckets;
    uint32_t tracker_buckets;
};

uint64_t ckv_density_bytes(uint32_t block_count);
void ckv_density_attach(struct ckv_density *density, void *base, uint32_t block_count);
void ckv_density_init(const struct ckv_density *density);
void ckv_density_resize(const struct ckv_density *density, uint64_t blocks);
void ckv_density_hit(const struct ckv_density *density, uint64_t hash,
    ckv_atomic_u64 *life, uint32_t from_end);
uint64_t ckv_density_miss(const struct ckv_density *density, uint64_t hash,
    uint32_t depth, uint32_t from_end);
void ckv_density_remember(
    const struct ckv_density *density, uint64_t hash, uint64_t life);
uint64_t ckv_density_recall(const struct ckv_density *density, uint64_t hash);
uint32_t ckv_density_depth(uint64_t life);
int32_t ckv_density_score(const struct ckv_density *density, uint64_t life);
int32_t ckv_density_threshold(const struct ckv_density *density);
bool ckv_density_admits(const struct ckv_density *density, uint64_t life);
void ckv_density_took(const struct ckv_density *density, uint32_t passed);
void ckv_density_refused(const struct ckv_density *density, uint32_t refused);
bool ckv_density_due(const struct ckv_density *density);
void ckv_density_rebuild(const struct ckv_density *density);
