/* SPDX-License-Identifier: Apache-2.0 */
#include "hit_density.h"

#include <string.h>

enum {
    TRACKER_WORDS_MIN = 16384,
    TRACKER_SPAN = 8,   /* capacities of distinct keys that it covers */
    OBSERVATION = 64,   /* what one life adds to a table: keeps decay exact enough */
    DECAY = 20,         /* a rebuild takes off one part in 20 */
    SHRINKAGE = 20,     /* lives that a class needs to speak for itself */
    PASSED_AIM = 8,     /* blocks that a cursor passes for each it takes */
    PASSED_STEP = 945,  /* 1 % in units of a score */
    REFUSED_STEP = 189, /* 0.2 % */
    STEP_MAX = 18909,   /* 20 % */
    CAPACITY_MAX = 1 << 30,
    DEPTH_MAX = 65535,
    COUNT_MAX = 31,
    SIGHT_PART = 64 /* of the capacity: sights so close are one access */
};

/* Ages from here on are accesses that raced with us (D5). */
#define FUTURE UINT32_C(0xF0000000)

#define LAST_OF(life) ((uint32_t)((life) >> 32))
#define LAST_MASK     (UINT64_C(0xffffffff) << 32)

enum {
    USED = 1,
    COUNT_SHIFT = 1,
    DEPTH_SHIFT = 6,
    END_SHIFT = 22,
    CLASS_SHIFT = 24,
    CARRIED = 0x3f, /* what the ghost keeps: used, count */
    GHOST_TAG_SHIFT = 6,
    TRACKER_CLASS_SHIFT = 1,
    TRACKER_TAG_SHIFT = 9
};

static uint32_t
count_of(uint64_t life)
{
    return (uint32_t)(life >> COUNT_SHIFT) & 31u;
}

uint32_t
ckv_density_depth(uint64_t life)
{
    return (uint32_t)(life >> DEPTH_SHIFT) & (uint32_t)DEPTH_MAX;
}

static uint32_t
end_of(uint64_t life)
{
    return (uint32_t)(life >> END_SHIFT) & 3u;
}

/* Below CKV_DENSITY_CLASSES whatever the word says (D2). */
static uint32_t
class_of(uint64_t life)
{
    const uint32_t class = (uint32_t)(life >> CLASS_SHIFT) & 127u;
    return class < CKV_DENSITY_CLASSES ? class : 0;
}

/* ---- classes --------------------------------------------------------------------- */

static uint32_t
bucket_of(uint32_t value, uint32_t second, uint32_t third, uint32_t fourth)
{
    return (uint32_t)(value >= second) + (value >= third) + (value >= fourth);
}

/* 0..15 first access: depth, end;  16..23 the second and third: end;  24..87 four levels
 * of later ones: gap, end. */
static uint32_t
classify(uint32_t count, uint32_t end, uint32_t depth, uint32_t gap)
{
    if (count <= 1) {
        return bucket_of(depth, 4, 16, 48) * 4 + end;
    }
    if (count <= 3) {
        return 16 + (count - 2) * 4 + end;
    }
    return 24 + bucket_of(count, 6, 10, 21) * 16 + gap * 4 + end;
}

static uint32_t
group_of(uint32_t class)
{
    return class < 16 ? 0 : class < 24 ? 1 + (class - 16) / 4 : 3 + (class - 24) / 16;
}

/* ---- ages (D5) ------------------------------------------------------------------- */

static uint32_t
age_at(uint32_t now, uint32_t last)
{
    const uint32_t age = now - last;
    return age >= FUTURE ? 0 : age;
}

static uint32_t
bin_begin(uint32_t bin) /* in half accesses */
{
    return (bin % 2 == 0 ? 2u : 3u) << bin / 2;
}

static uint32_t
bin_of(uint32_t age)
{
    if (age <= 1) {
        return 0;
    }
    const uint32_t octave = 31u - (uint32_t)__builtin_clz(age);
    const uint32_t bin = octave * 2 + (age >> (octave - 1) & 1u);
    return bin < CKV_DENSITY_BINS ? bin : CKV_DENSITY_BINS - 1;
}

static uint64_t
capacity_of(const struct ckv_density *density)
{
    const uint64_t capacity = ckv_load_relaxed_u64(&density->head->capacity);
    return capacity < 1 ? 1 : ckv_min_u64(capacity, CAPACITY_MAX);
}

/* How long ago the last access was, in four steps. */
static uint32_t
quantise_gap(const struct ckv_density *density, uint32_t age)
{
    const uint64_t capacity = capacity_of(density);
    return (uint32_t)(age > capacity / 64) + (age > capacity / 4) + (age > capacity);
}

/* ---- layout ---------------------------------------------------------------------- */

#define TABLE_WORDS ((uint64_t)CKV_DENSITY_CLASSES * CKV_DENSITY_BINS)
#define SCORE_WORDS ((uint64_t)CKV_DENSITY_CLASSES * (CKV_DENSITY_BINS + 1))

static uint32_t
ghost_buckets(uint32_t block_count)
{
    const uint32_t buckets = block_count / (CKV_DENSITY_GHOST_WAYS / 2);
    return buckets > 0 ? buckets : 1;
}

static uint32_t
tracker_buckets(uint32_t block_count)
{
    const uint32_t words =
        block_count / 2 > TRACKER_WORDS_MIN ? block_count / 2 : TRACKER_WORDS_MIN;
    return words / CKV_DENSITY_WAYS;
}

static uint64_t
line_up(uint64_t bytes)
{
    return ckv_align_up(bytes, CKV_CACHE_LINE);
}

uint64_t
ckv_density_bytes(uint32_t block_count)
{
    return sizeof(struct ckv_density_head) + 2 * line_up(TABLE_WORDS * 4) +
           line_up(SCORE_WORDS * 4) +
           ((uint64_t)ghost_buckets(block_count) * CKV_DENSITY_GHOST_WAYS +
               (uint64_t)tracker_buckets(block_count) * CKV_DENSITY_WAYS) *
               sizeof(ckv_atomic_u64);
}

void
ckv_density_attach(struct ckv_density *density, void *base, uint32_t block_count)
{
    char *at = base;
    density->head = (void *)at;
    at += sizeof(struct ckv_density_head);
    density->ended = (void *)at;
    at += line_up(TABLE_WORDS * 4);
    density->dropped = (void *)at;
    at += line_up(TABLE_WORDS * 4);
    density->scores = (void *)at;
    at += line_up(SCORE_WORDS * 4);
    density->ghost = (void *)at;
    density->ghost_buckets = ghost_buckets(block_count);
    at += (uint64_t)density->ghost_buckets * CKV_DENSITY_GHOST_WAYS *
          sizeof(ckv_atomic_u64);
    density->tracker = (void *)at;
    density->tracker_buckets = tracker_buckets(block_count);
}

/* ---- buckets --------------------------------------------------------------------- */

static uint64_t
mix(uint64_t hash)
{
    hash = (hash ^ hash >> 32) * UINT64_C(0xd6e8feb86659fd93);
    hash = (hash ^ hash >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return hash ^ hash >> 32;
}

/* ---- tracker: how old lives get -------------------------------------------------- */

static void
observe(ckv_atomic_u32 *table, uint32_t class, uint32_t age)
{
    ckv_atomic_u32 *cell = &table[class * CKV_DENSITY_BINS + bin_of(age)];
    const uint32_t seen = ckv_load_relaxed_u32(cell);
    if (seen < UINT32_MAX - OBSERVATION) { /* two at once may count as one (D1) */
        ckv_store_relaxed_u32(cell, seen + OBSERVATION);
    }
}

static uint32_t
tracked_class(uint64_t word)
{
    const uint32_t class = (uint32_t)(word >> TRACKER_CLASS_SHIFT) & 255u;
    return class < CKV_DENSITY_CLASSES ? class : 0;
}

/* Keys are followed at the rate at which the tracker covers TRACKER_SPAN capacities. */
static bool
sampled(const struct ckv_density *density, uint64_t mixed)
{
    const uint64_t words = (uint64_t)density->tracker_buckets * CKV_DENSITY_WAYS;
    const uint64_t span = ckv_min_u64(capacity_of(density) * TRACKER_SPAN, UINT32_MAX);
    return (mixed & UINT32_MAX) * span >> 32 < words;
}

/* The word of the bucket with this tag, else an empty one, else the one that was accessed
 * longest ago. */
static ckv_atomic_u64 *
tracker_word(ckv_atomic_u64 *bucket, uint32_t now, uint32_t tag)
{
    ckv_atomic_u64 *best = bucket;
    uint64_t best_age = 0;
    for (uint32_t way = 0; way < CKV_DENSITY_WAYS; way++) {
        const uint64_t word = ckv_load_relaxed_u64(&bucket[way]);
        uint64_t age = UINT64_MAX;
        if ((word & USED) != 0) {
            if ((uint32_t)word >> TRACKER_TAG_SHIFT == tag) {
                return &bucket[way];
            }
            age = (uint64_t)age_at(now, LAST_OF(word)) + 1;
        }
        if (age > best_age) {
            best_age = age;
            best = &bucket[way];
        }
    }
    return best;
}

/* A life of the key begins; the one before it ended. */
static void
track(const struct ckv_density *density, uint64_t hash, uint32_t now, uint32_t class)
{
    const uint64_t mixed = mix(hash);
    if (!sampled(density, mixed)) {
        return;
    }
    const uint64_t bucket = (mixed >> 32) * density->tracker_buckets >> 32;
    const uint32_t tag = (uint32_t)(mix(mixed) >> (32 + TRACKER_TAG_SHIFT));
    ckv_atomic_u64 *word =
        tracker_word(&density->tracker[bucket * CKV_DENSITY_WAYS], now, tag);
    const uint64_t old = ckv_load_relaxed_u64(word);
    if ((old & USED) != 0) {
        const bool same = (uint32_t)old >> TRACKER_TAG_SHIFT == tag;
        observe(same ? density->ended : density->dropped, tracked_class(old),
            age_at(now, LAST_OF(old)));
    }
    CKV_POINT("density.track");
    ckv_store_relaxed_u64(word, (uint64_t)now << 32 |
                                    (uint64_t)tag << TRACKER_TAG_SHIFT |
                                    (uint64_t)class << TRACKER_CLASS_SHIFT | USED);
}

/* ---- ghost ----------------------------------------------------------------------- */

struct place {
    ckv_atomic_u64 *bucket;
    uint32_t tag;
};

static struct place
ghost_place(const struct ckv_density *density, uint64_t hash)
{
    const uint64_t mixed = mix(hash);
    const uint64_t bucket = (mixed >> 32) * density->ghost_buckets >> 32;
    return (struct place){
        .bucket = &density->ghost[bucket * CKV_DENSITY_GHOST_WAYS],
        .tag = (uint32_t)(mix(mixed) >> (32 + GHOST_TAG_SHIFT)),
    };
}

static uint32_t
now_of(const struct ckv_density *density)
{
    return (uint32_t)ckv_load_relaxed_u64(&density->head->now);
}

/* A bucket is a queue, the newest word first: what was evicted is as good a memory as
 * what was refused, although its last access is longer ago. */
void
ckv_density_remember(const struct ckv_density *density, uint64_t hash, uint64_t life)
{
    const struct place place = ghost_place(density, hash);
    uint64_t moving =
        (life & LAST_MASK) | (uint64_t)place.tag << GHOST_TAG_SHIFT | (life & CARRIED);
    if ((life & USED) == 0) {
        return;
    }
    for (uint32_t way = 0; way < CKV_DENSITY_GHOST_WAYS; way++) {
        const uint64_t word = ckv_load_relaxed_u64(&place.bucket[way]);
        CKV_POINT("density.remember");
        ckv_store_relaxed_u64(&place.bucket[way], moving);
        if ((word & USED) == 0 || (uint32_t)word >> GHOST_TAG_SHIFT == place.tag) {
            return;
        }
        moving = word;
    }
}

/* Takes the word out of the ghost if `take`. */
static uint64_t
look_up(const struct ckv_density *density, uint64_t hash, bool take)
{
    const struct place place = ghost_place(density, hash);
    for (uint32_t way = 0; way < CKV_DENSITY_GHOST_WAYS; way++) {
        const uint64_t word = ckv_load_relaxed_u64(&place.bucket[way]);
        if ((word & USED) != 0 && (uint32_t)word >> GHOST_TAG_SHIFT == place.tag) {
            if (take) {
                ckv_store_relaxed_u64(&place.bucket[way], 0);
            }
            return word & (LAST_MASK | CARRIED);
        }
    }
    return 0;
}

uint64_t
ckv_density_recall(const struct ckv_density *density, uint64_t hash)
{
    return look_up(density, hash, false);
}

/* ---- accesses -------------------------------------------------------------------- */

static uint64_t
make_life(uint32_t now, uint32_t count, uint32_t end, uint32_t depth, uint32_t gap)
{
    const uint32_t class = classify(count, end, depth, gap);
    return (uint64_t)now << 32 | (uint64_t)class << CLASS_SHIFT |
           (uint64_t)end << END_SHIFT | (uint64_t)depth << DEPTH_SHIFT |
           (uint64_t)count << COUNT_SHIFT | USED;
}

static uint32_t
cut(uint32_t value, uint32_t limit)
{
    return value < limit ? value : limit;
}

static uint32_t
end_bucket(uint32_t from_end)
{
    return bucket_of(from_end, 1, 4, 16);
}

static uint32_t
next_access(const struct ckv_density *density)
{
    return (uint32_t)ckv_add_relaxed_u64(&density->head->now, 1) + 1;
}

/* D6 */
static bool
just_seen(const struct ckv_density *density, uint64_t life)
{
    return (life & USED) != 0 &&
           age_at(now_of(density), LAST_OF(life)) < capacity_of(density) / SIGHT_PART;
}

/* The life after one more access; `life` is 0 for an entry that was rebuilt. */
static uint64_t
go_on(const struct ckv_density *density, uint64_t hash, uint64_t life, uint32_t end,
    uint32_t depth)
{
    const uint32_t now = next_access(density);
    const bool known = (life & USED) != 0;
    const uint32_t gap = known ? quantise_gap(density, age_at(now, LAST_OF(life))) : 3;
    const uint32_t count = cut(known ? count_of(life) + 1 : 2, COUNT_MAX);
    const uint64_t next = make_life(now, count, end, depth, gap);
    track(density, hash, now, class_of(next));
    return next;
}

uint64_t
ckv_density_at_depth(uint64_t life, uint32_t depth)
{
    return (life & ~((uint64_t)DEPTH_MAX << DEPTH_SHIFT)) |
           (uint64_t)cut(depth, DEPTH_MAX) << DEPTH_SHIFT;
}

uint64_t
ckv_density_resume(const struct ckv_density *density, uint32_t count)
{
    return make_life(now_of(density), cut(count, COUNT_MAX), 0, 0, 3);
}

void
ckv_density_hit(const struct ckv_density *density, uint64_t hash, ckv_atomic_u64 *word,
    uint32_t from_end)
{
    const uint64_t life = ckv_load_relaxed_u64(word);
    if (just_seen(density, life)) {
        return;
    }
    const uint32_t end = from_end == UINT32_MAX ? end_of(life) : end_bucket(from_end);
    const uint64_t next = go_on(density, hash, life, end, ckv_density_depth(life));
    CKV_POINT("density.hit");
    ckv_store_relaxed_u64(word, next); /* two at once may count as one (D1) */
}

uint64_t
ckv_density_miss(const struct ckv_density *density, uint64_t hash, uint32_t depth,
    uint32_t from_end)
{
    /* Resident from now on, or remembered anew. */
    const uint64_t before = look_up(density, hash, true);
    const uint32_t end = end_bucket(from_end);
    depth = cut(depth, DEPTH_MAX);
    if (just_seen(density, before)) {
        const uint32_t class = classify(count_of(before), end, depth, 0);
        return (before & (LAST_MASK | CARRIED)) | (uint64_t)class << CLASS_SHIFT |
               (uint64_t)end << END_SHIFT | (uint64_t)depth << DEPTH_SHIFT;
    }
    if (before != 0) {
        return go_on(density, hash, before, end, depth);
    }
    const uint32_t now = next_access(density);
    const uint64_t life = make_life(now, 1, end, depth, 0);
    track(density, hash, now, class_of(life));
    return life;
}

/* ---- scores and threshold -------------------------------------------------------- */

static int32_t
clamp_score(int64_t score)
{
    return score > CKV_DENSITY_SCORE_MAX    ? CKV_DENSITY_SCORE_MAX
           : score < -CKV_DENSITY_SCORE_MAX ? -CKV_DENSITY_SCORE_MAX
                                            : (int32_t)score;
}

static int32_t
load_score(const ckv_atomic_u32 *word)
{
    return clamp_score((int32_t)ckv_load_relaxed_u32(word));
}

int32_t
ckv_density_score(const struct ckv_density *density, uint64_t life)
{
    const uint32_t age =
        (life & USED) != 0 ? age_at(now_of(density), LAST_OF(life)) : FUTURE - 1;
    const uint32_t bin = bin_of(age);
    const ckv_atomic_u32 *cell =
        &density->scores[class_of(life) * (CKV_DENSITY_BINS + 1) + bin];
    const int64_t here = load_score(cell);
    const int64_t next = load_score(cell + 1);
    const int64_t begin = bin_begin(bin);
    const int64_t width = bin_begin(bin + 1) - begin;
    const int64_t into = (int64_t)age * 2 - begin;
    if (into <= 0) {
        return (int32_t)here;
    }
    return (int32_t)(into >= width ? next : here + (next - here) * into / width);
}

int32_t
ckv_density_threshold(const struct ckv_density *density)
{
    return load_score(&density->head->threshold);
}

static void
move_threshold(const struct ckv_density *density, int64_t step)
{
    ckv_store_relaxed_u32(&density->head->threshold,
        (uint32_t)clamp_score(ckv_density_threshold(density) + step));
}

bool
ckv_density_admits(const struct ckv_density *density, uint64_t life)
{
    return ckv_load_relaxed_u64(&density->head->taken) < capacity_of(density) ||
           ckv_density_score(density, life) >= ckv_density_threshold(density);
}

void
ckv_density_took(const struct ckv_density *density, uint32_t passed)
{
    ckv_atomic_u64 *taken = &density->head->taken;
    ckv_store_relaxed_u64(taken, ckv_load_relaxed_u64(taken) + 1);
    const int64_t step = ((int64_t)passed - PASSED_AIM) * PASSED_STEP;
    move_threshold(density, step < STEP_MAX ? step : STEP_MAX);
}

void
ckv_density_refused(const struct ckv_density *density, uint32_t refused)
{
    const int64_t step = (int64_t)refused * REFUSED_STEP;
    move_threshold(density, -(step < STEP_MAX ? step : STEP_MAX));
}

/* ---- rebuild --------------------------------------------------------------------- */

/* Logarithm of a positive number to the base 2, in units of a score; by squaring, so that
 * it is the same everywhere and needs no library. */
static int32_t
log2_of(double value)
{
    int32_t octave = 0;
    while (value >= 2.0 && octave < 64) {
        value *= 0.5;
        octave++;
    }
    while (value < 1.0 && octave > -64) {
        value *= 2.0;
        octave--;
    }
    int32_t fraction = 0;
    for (int bit = 0; bit < 16; bit++) {
        value *= value;
        fraction *= 2;
        if (value >= 2.0) {
            value *= 0.5;
            fraction++;
        }
    }
    return clamp_score((int64_t)octave * 65536 + fraction);
}

void
ckv_density_init(const struct ckv_density *density)
{
    for (uint32_t class = 0; class < CKV_DENSITY_CLASSES; class++) {
        for (uint32_t bin = 0; bin <= CKV_DENSITY_BINS; bin++) {
            ckv_store_relaxed_u32(&density
                                      ->scores[class * (CKV_DENSITY_BINS + 1) + bin],
                (uint32_t)-log2_of((double)bin_begin(bin) / 2));
        }
    }
}

void
ckv_density_resize(const struct ckv_density *density, uint64_t blocks)
{
    if (ckv_load_relaxed_u64(&density->head->capacity) != blocks) {
        ckv_store_relaxed_u64(&density->head->capacity, blocks);
    }
}

bool
ckv_density_due(const struct ckv_density *density)
{
    struct ckv_density_head *head = density->head;
    const uint64_t interval = capacity_of(density) / 4 + 1;
    const uint64_t now = ckv_load_relaxed_u64(&head->now);
    uint64_t due = ckv_load_relaxed_u64(&head->due);
    if (now < due && due - now <= interval) {
        return false; /* else past it, or nonsense */
    }
    const bool begun = due != 0; /* else nothing was seen yet: the first interval */
    CKV_POINT("density.due");
    return ckv_cas_ordered_u64(&head->due, &due, now + interval) && begun;
}

struct lives { /* of one class or of several together */
    double ended[CKV_DENSITY_BINS];
    double at_risk[CKV_DENSITY_BINS]; /* lives that got as old as the bin */
};

/* Lives that are open now, by class and age. */
static void
count_open(const struct ckv_density *density,
    uint32_t open[CKV_DENSITY_CLASSES][CKV_DENSITY_BINS])
{
    const uint32_t now = now_of(density);
    const uint64_t words = (uint64_t)density->tracker_buckets * CKV_DENSITY_WAYS;
    memset(open, 0, sizeof(uint32_t) * TABLE_WORDS);
    for (uint64_t i = 0; i < words; i++) {
        const uint64_t word = ckv_load_relaxed_u64(&density->tracker[i]);
        if ((word & USED) != 0) {
            open[tracked_class(word)][bin_of(age_at(now, LAST_OF(word)))]++;
        }
    }
}

static void
add_class(const struct ckv_density *density, uint32_t class,
    const uint32_t open[CKV_DENSITY_BINS], struct lives *lives)
{
    double older = 0;
    for (uint32_t bin = CKV_DENSITY_BINS; bin-- > 0;) {
        const uint32_t cell = class * CKV_DENSITY_BINS + bin;
        const double ended =
            (double)ckv_load_relaxed_u32(&density->ended[cell]) / OBSERVATION;
        const double dropped =
            (double)ckv_load_relaxed_u32(&density->dropped[cell]) / OBSERVATION;
        older += ended + dropped + (double)open[bin];
        lives->ended[bin] += ended;
        lives->at_risk[bin] += older;
    }
}

/* The chance to be hit in a bin, given that its age was reached; where lives are few, the
 * more general estimate counts for SHRINKAGE of them. */
static void
estimate(const struct lives *lives, const double general[CKV_DENSITY_BINS],
    double hazard[CKV_DENSITY_BINS])
{
    for (uint32_t bin = 0; bin < CKV_DENSITY_BINS; bin++) {
        hazard[bin] = (lives->ended[bin] + SHRINKAGE * general[bin]) /
                      (lives->at_risk[bin] + SHRINKAGE);
    }
}

static double
slope(const double *hits, const double *time, uint32_t from, uint32_t to)
{
    const double stay = time[to] - time[from];
    return stay > 0 ? (hits[to] - hits[from]) / stay : 0;
}

static void
store_scores(const struct ckv_density *density, uint32_t class,
    const double hazard[CKV_DENSITY_BINS])
{
    double hits[CKV_DENSITY_BINS + 1]; /* expected until a bin begins */
    double time[CKV_DENSITY_BINS + 1];
    double alive = 1;
    hits[0] = 0;
    time[0] = 0;
    for (uint32_t bin = 0; bin < CKV_DENSITY_BINS; bin++) {
        const double width = (double)(bin_begin(bin + 1) - bin_begin(bin)) / 2;
        hits[bin + 1] = hits[bin] + alive * hazard[bin];
        time[bin + 1] = time[bin] + alive * width * (1 - hazard[bin] / 2);
        alive *= 1 - hazard[bin];
    }
    ckv_atomic_u32 *row = &density->scores[class * (CKV_DENSITY_BINS + 1)];
    /* The steepest chord from a point to a later one ends on their concave hull. */
    uint32_t hull[CKV_DENSITY_BINS + 1];
    uint32_t top = 0;
    hull[0] = CKV_DENSITY_BINS;
    for (uint32_t bin = CKV_DENSITY_BINS; bin-- > 0;) {
        while (top > 0 && slope(hits, time, bin, hull[top - 1]) >=
                              slope(hits, time, bin, hull[top])) {
            top--;
        }
        ckv_store_relaxed_u32(&row[bin],
            (uint32_t)log2_of(slope(hits, time, bin, hull[top])));
        hull[++top] = bin;
    }
    ckv_store_relaxed_u32(&row[CKV_DENSITY_BINS],
        ckv_load_relaxed_u32(&row[CKV_DENSITY_BINS - 1]));
}

static void
decay(ckv_atomic_u32 *table)
{
    for (uint64_t i = 0; i < TABLE_WORDS; i++) {
        const uint32_t seen = ckv_load_relaxed_u32(&table[i]);
        ckv_store_relaxed_u32(&table[i], seen - seen / DECAY - (seen % DECAY != 0));
    }
}

void
ckv_density_rebuild(const struct ckv_density *density)
{
    uint32_t open[CKV_DENSITY_CLASSES][CKV_DENSITY_BINS];
    struct lives all = {0};
    struct lives groups[CKV_DENSITY_GROUPS] = {0};
    double general[CKV_DENSITY_BINS] = {0};
    double by_group[CKV_DENSITY_GROUPS][CKV_DENSITY_BINS];

    count_open(density, open);
    for (uint32_t class = 0; class < CKV_DENSITY_CLASSES; class++) {
        add_class(density, class, open[class], &all);
        add_class(density, class, open[class], &groups[group_of(class)]);
    }
    for (uint32_t bin = 0; bin < CKV_DENSITY_BINS; bin++) {
        general[bin] = all.at_risk[bin] > 0 ? all.ended[bin] / all.at_risk[bin] : 0;
    }
    for (uint32_t group = 0; group < CKV_DENSITY_GROUPS; group++) {
        estimate(&groups[group], general, by_group[group]);
    }
    CKV_POINT("density.rebuild");
    for (uint32_t class = 0; class < CKV_DENSITY_CLASSES; class++) {
        struct lives lives = {0};
        double hazard[CKV_DENSITY_BINS];
        add_class(density, class, open[class], &lives);
        estimate(&lives, by_group[group_of(class)], hazard);
        store_scores(density, class, hazard);
    }
    decay(density->ended);
    decay(density->dropped);
    CKV_POINT("density.rebuilt");
    ckv_add_relaxed_u64(&density->head->rebuilds, 1);
}
