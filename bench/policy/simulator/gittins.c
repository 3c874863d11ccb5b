/* SPDX-License-Identifier: Apache-2.0 */
/* gittins.c: prefix eviction: only leaves give way, the one with the fewest hits to come
 * per block and access.
 *
 *   request -> see(each block) -> admit from the head while worth it -> put
 *   see:      access count, turn, gap -> class; a sampled key ends a life in the tracker
 *   put:      the cursor passes leaves until one is worth no more than theta
 *   rebuild:  every C/4 accesses, from the tracker:
 *             hazard of reuse by class and age -> worth[class][age]
 *
 *   G1  A block with resident children is not overwritten (FLAG_ANY_VICTIM: it is).
 *   G2  What is admitted of a chain begins at its resident part: no gaps
 *       (FLAG_NO_CLOSURE: blocks are judged one by one).
 *   G3  theta moves so that a put passes `aim` leaves.
 *   G4  Count, turn and last access of a key outlive it in a ghost of `ghosts`
 *       capacities.
 *   G5  An age is in block accesses, a bin of age half an octave.
 *
 * worth[c][b] = max over e > b of the hits in bins [b, e) per block and access spent in
 * them: the Gittins index of a block of class c that got to age b.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy.h"

enum {
    BINS = 56,
    FIRST_CLASSES = 64,
    FEW_CLASSES = 8,
    CLASSES = FIRST_CLASSES + FEW_CLASSES + 64,
    GROUPS = 7, /* by access count */
    SCORED_MAX = 64,
    TRACKER_MIN = 16384,
};

enum flags {
    FLAG_ANY_VICTIM = 1,
    FLAG_NO_CLOSURE = 2,
    FLAG_AGE_ONLY = 4,    /* worth is 1 / age: LRU of leaves */
    FLAG_NO_REFUSAL = 8,  /* everything is admitted */
    FLAG_HEAD_FIRST = 16, /* puts, of one request */
    FLAG_LATE = 32,    /* nothing is refused in the first lap after the tier is full */
    FLAG_NO_TURN = 64, /* turn unknown */
    FLAG_NO_DEPTH = 128,
    FLAG_NO_END = 256,            /* distance from the end of the request unknown */
    FLAG_HIT_NO_END = 512,        /* the same for hits only: gets one by one */
    FLAG_TWICE = 1024,            /* a hit is seen twice: longest_prefix, then get */
    FLAG_DEBOUNCE = 2048,         /* a sight soon after the last one changes nothing */
    FLAG_STEPS = 4096,            /* worth by bin, not interpolated */
    FLAG_RARE = 8192,             /* rebuilt every C accesses */
    FLAG_SMALL_TRACKER = 16384,   /* at least 4096 lives */
    FLAG_QUARTER_TRACKER = 32768, /* C/4 lives */
    FLAG_SHORT_TRACKER = 65536,   /* covers 4 C keys */
    FLAG_OCTAVES = 131072,        /* bins are whole octaves */
    FLAG_BUCKETS = 262144,        /* the ghost is made of buckets of 32 keys */
};

struct life {
    uint32_t last;
    uint8_t class;
};

struct stripe {
    uint32_t first;
    uint32_t slots;
    uint32_t cursor;
    double laps;
};

struct gittins {
    struct policy base;
    uint32_t capacity;
    uint32_t flags;
    uint32_t aim;
    uint32_t piece; /* blocks offered in one call; 0: all of a request */
    uint32_t used;
    uint32_t now;
    uint32_t next_rebuild;
    uint64_t late_puts;
    double theta;
    /* by slot */
    uint32_t *keys;
    struct stripe *stripes;
    uint32_t stripe_count;
    uint32_t last_stripe;
    double lead;
    /* by key */
    uint32_t *places;
    uint32_t *parents;
    uint32_t *lasts;
    uint16_t *kids;
    uint8_t *counts;
    uint8_t *turns;
    uint8_t *gaps;
    uint8_t *classes;
    uint64_t *ghost_since; /* 0: not in the ghost */
    uint64_t ghost_now;
    uint64_t ghost_room;
    /* tracker */
    uint32_t *newer;
    uint32_t *older;
    struct life *lives;
    bool *tracked;
    uint32_t newest;
    uint32_t oldest;
    uint32_t track_count;
    uint32_t track_max;
    uint64_t sample_below;
    uint32_t salt;
    bool learned;
    double reused[CLASSES][BINS];
    double dropped[CLASSES][BINS];
    double worth[CLASSES][BINS];
};

static uint32_t
bin_of(uint32_t age)
{
    if (age <= 1) {
        return 0;
    }
    const uint32_t octave = 31u - (uint32_t)__builtin_clz(age);
    /* sqrt(2) is 1.0110 1010 in binary; the half octave begins there */
    const uint64_t half = ((uint64_t)age << 16) >> octave;
    const uint32_t bin = 2 * octave + (half >= 92682);
    return bin < BINS ? bin : BINS - 1;
}

static uint32_t
group_of(uint32_t class)
{
    if (class < FIRST_CLASSES) {
        return 0;
    }
    class -= FIRST_CLASSES;
    if (class < FEW_CLASSES) {
        return 1 + class / 4;
    }
    return 3 + (class - FEW_CLASSES) / 16;
}

static uint32_t
end_bucket(uint32_t from_end)
{
    return from_end == 0 ? 0 : from_end < 4 ? 1 : from_end < 16 ? 2 : 3;
}

static uint32_t
class_of(const struct gittins *model, uint32_t key, uint32_t depth, uint32_t from_end)
{
    const uint32_t count = model->counts[key];
    const uint32_t end = (model->flags & FLAG_NO_END) != 0 ? 0 : end_bucket(from_end);
    if (count <= 1) {
        const uint32_t turn =
            (model->flags & FLAG_NO_TURN) != 0 ? 0 : model->turns[key];
        const uint32_t t = turn == 0 ? 0 : turn == 1 ? 1 : turn < 4 ? 2 : 3;
        const uint32_t d = (model->flags & FLAG_NO_DEPTH) != 0 ? 0
                           : depth < 4                         ? 0
                           : depth < 16                        ? 1
                           : depth < 48                        ? 2
                                                               : 3;
        return t * 16 + end * 4 + d;
    }
    if (count < 4) {
        return FIRST_CLASSES + (count - 2) * 4 + end;
    }
    const uint32_t group = count < 6 ? 0 : count < 10 ? 1 : count < 21 ? 2 : 3;
    return FIRST_CLASSES + FEW_CLASSES + group * 16 + model->gaps[key] * 4 + end;
}

static double
worth_of(const struct gittins *model, uint32_t key)
{
    uint32_t age = model->now - model->lasts[key];
    age = age == 0 ? 1 : age;
    if (!model->learned || (model->flags & FLAG_AGE_ONLY) != 0) {
        return 1.0 / age;
    }
    const double *worth = model->worth[model->classes[key]];
    const double at = 2.0 * log2((double)age);
    const uint32_t bin = (uint32_t)at;
    if ((model->flags & FLAG_STEPS) != 0) {
        return worth[bin_of(age)];
    }
    if (bin >= BINS - 1) {
        return worth[BINS - 1];
    }
    const double part = at - bin;
    return worth[bin] * (1.0 - part) + worth[bin + 1] * part;
}

/* ---- learning --------------------------------------------------------------------- */

static void
track_take(struct gittins *model, uint32_t key)
{
    const uint32_t newer = model->newer[key];
    const uint32_t older = model->older[key];
    if (newer != NONE) {
        model->older[newer] = older;
    } else {
        model->newest = older;
    }
    if (older != NONE) {
        model->newer[older] = newer;
    } else {
        model->oldest = newer;
    }
    model->tracked[key] = false;
    model->track_count--;
}

static void
track(struct gittins *model, uint32_t key, uint32_t class)
{
    if ((uint32_t)mixed(key ^ (UINT64_C(0x5bd1e995) + model->salt) << 32) >=
        model->sample_below) {
        return;
    }
    if (model->tracked[key]) {
        const struct life *life = &model->lives[key];
        model->reused[life->class][bin_of(model->now - life->last)] += 1;
        track_take(model, key);
    } else if (model->track_count == model->track_max) {
        const uint32_t oldest = model->oldest;
        const struct life *life = &model->lives[oldest];
        model->dropped[life->class][bin_of(model->now - life->last)] += 1;
        track_take(model, oldest);
    }
    model->lives[key] = (struct life){.last = model->now, .class = (uint8_t)class};
    model->newer[key] = NONE;
    model->older[key] = model->newest;
    if (model->newest != NONE) {
        model->newer[model->newest] = key;
    } else {
        model->oldest = key;
    }
    model->newest = key;
    model->tracked[key] = true;
    model->track_count++;
}

static void
suffix_sums(double *values)
{
    for (int bin = BINS - 2; bin >= 0; bin--) {
        values[bin] += values[bin + 1];
    }
}

static void
index_class(double *worth, const double *hazard)
{
    double hits[BINS + 1] = {0};
    double spent[BINS + 1] = {0};
    double alive = 1;
    for (int bin = 0; bin < BINS; bin++) {
        const double width = exp2((bin + 1) / 2.0) - exp2(bin / 2.0);
        hits[bin + 1] = hits[bin] + alive * hazard[bin];
        spent[bin + 1] = spent[bin] + alive * width * (1 - hazard[bin] / 2);
        alive *= 1 - hazard[bin];
        alive = alive < 1e-9 ? 1e-9 : alive;
    }
    for (int bin = 0; bin < BINS; bin++) {
        double best = 0;
        for (int end = bin + 1; end <= BINS; end++) {
            const double rate = (hits[end] - hits[bin]) / (spent[end] - spent[bin]);
            best = rate > best ? rate : best;
        }
        worth[bin] = best;
    }
}

static void
rebuild(struct gittins *model)
{
    static double at_risk[CLASSES][BINS];
    static double group_reused[GROUPS][BINS], group_risk[GROUPS][BINS];
    double all_reused[BINS] = {0}, all_risk[BINS] = {0};
    const double shrink = 20;
    memset(at_risk, 0, sizeof at_risk);
    memset(group_reused, 0, sizeof group_reused);
    memset(group_risk, 0, sizeof group_risk);
    for (uint32_t key = model->newest; key != NONE; key = model->older[key]) {
        const struct life *life = &model->lives[key];
        at_risk[life->class][bin_of(model->now - life->last)] += 1;
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        const uint32_t group = group_of(c);
        for (uint32_t b = 0; b < BINS; b++) {
            at_risk[c][b] += model->reused[c][b] + model->dropped[c][b];
        }
        suffix_sums(at_risk[c]);
        for (uint32_t b = 0; b < BINS; b++) {
            group_reused[group][b] += model->reused[c][b];
            group_risk[group][b] += at_risk[c][b];
            all_reused[b] += model->reused[c][b];
            all_risk[b] += at_risk[c][b];
        }
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        const uint32_t group = group_of(c);
        double hazard[BINS];
        for (uint32_t b = 0; b < BINS; b++) {
            const double all = all_risk[b] > 0 ? all_reused[b] / all_risk[b] : 0;
            const double near = (group_reused[group][b] + shrink * all) /
                                (group_risk[group][b] + shrink);
            hazard[b] =
                (model->reused[c][b] + shrink * near) / (at_risk[c][b] + shrink);
        }
        index_class(model->worth[c], hazard);
        for (uint32_t b = 0; b < BINS; b++) {
            const double kept = (model->flags & FLAG_RARE) != 0 ? 0.815 : 0.95;
            model->reused[c][b] *= kept;
            model->dropped[c][b] *= kept;
        }
    }
    model->learned = true;
}

/* ---- what is known of a key -------------------------------------------------------- */

/* How long the ghost knows a key: where it consists of queues of 32 keys, until 32 others
 * came to the same one, which is about normal, with a deviation of 1 / sqrt(32). */
static double
ghost_window(const struct gittins *model, uint32_t key)
{
    const double room = (double)model->ghost_room;
    if ((model->flags & FLAG_BUCKETS) == 0) {
        return room;
    }
    double sum = 0; /* of 12 that are even in [0, 1): deviation 1 */
    uint64_t draw =
        mixed(key ^ (model->ghost_since[key] << 32) ^ (uint64_t)model->salt << 24);
    for (int i = 0; i < 12; i++) {
        draw = mixed(draw);
        sum += (double)(draw >> 11) * 0x1p-53;
    }
    return room * (1 + (sum - 6) / sqrt(32));
}

static bool
in_ghost(const struct gittins *model, uint32_t key)
{
    return model->ghost_since[key] != 0 &&
           (double)(model->ghost_now - model->ghost_since[key]) <
               ghost_window(model, key);
}

static void
to_ghost(struct gittins *model, uint32_t key)
{
    model->ghost_since[key] = ++model->ghost_now;
}

static bool
resident(const struct gittins *model, uint32_t key)
{
    return model->places[key] != NONE;
}

static void
see(struct gittins *model, uint32_t key, uint32_t depth, uint32_t from_end,
    uint32_t turn)
{
    const uint32_t gap = model->now + 1 - model->lasts[key];
    const bool known = resident(model, key) || in_ghost(model, key);
    if (known && (model->flags & FLAG_DEBOUNCE) != 0 && gap < model->capacity / 64) {
        return; /* the same use, reported twice */
    }
    model->now++;
    if (known) {
        model->gaps[key] = (uint8_t)(gap <= model->capacity / 64  ? 0
                                     : gap <= model->capacity / 4 ? 1
                                     : gap <= model->capacity     ? 2
                                                                  : 3);
        if (model->counts[key] < 255) {
            model->counts[key]++;
        }
    } else {
        model->counts[key] = 1;
        model->turns[key] = (uint8_t)turn;
        model->gaps[key] = 3;
    }
    const uint32_t class = class_of(model, key, depth, from_end);
    track(model, key, class);
    model->lasts[key] = model->now;
    model->classes[key] = (uint8_t)class;
    if (model->now >= model->next_rebuild) {
        rebuild(model);
        const uint32_t period =
            (model->flags & FLAG_RARE) != 0 ? model->capacity : model->capacity / 4;
        model->next_rebuild = model->now + (period > 64 ? period : 64);
    }
}

/* ---- slots ------------------------------------------------------------------------ */

static struct stripe *
choose(struct gittins *model)
{
    uint32_t best = model->last_stripe;
    double least = model->stripes[best].laps - model->lead;
    for (uint32_t s = 0; s < model->stripe_count; s++) {
        if (model->stripes[s].laps < least) {
            least = model->stripes[s].laps;
            best = s;
        }
    }
    model->last_stripe = best;
    return &model->stripes[best];
}

static uint32_t
find_slot(struct gittins *model, struct stripe *stripe)
{
    uint32_t best = NONE, scored = 0, walked = 0;
    double least = INFINITY;
    while (scored < SCORED_MAX && walked < stripe->slots) {
        const uint32_t slot = stripe->first + stripe->cursor;
        const uint32_t key = model->keys[slot];
        stripe->cursor = stripe->cursor + 1 == stripe->slots ? 0 : stripe->cursor + 1;
        walked++;
        if (key == NONE) {
            best = slot;
            break;
        }
        if (model->kids[key] != 0 && (model->flags & FLAG_ANY_VICTIM) == 0) {
            continue; /* G1 */
        }
        const double worth = worth_of(model, key);
        if (worth < least) {
            least = worth;
            best = slot;
        }
        if (worth <= model->theta) {
            break;
        }
        scored++;
    }
    stripe->laps += (double)walked / stripe->slots;
    if (best != NONE && model->used == model->capacity) {
        double step = 0.01 * ((double)scored - model->aim); /* G3 */
        step = step > 0.2 ? 0.2 : step;
        model->theta *= exp(step);
    }
    model->base.passed += walked - 1;
    if (walked > model->base.walk_max) {
        model->base.walk_max = walked;
    }
    return best;
}

static void
put(struct gittins *model, uint32_t key, uint32_t parent)
{
    uint32_t slot = NONE;
    for (uint32_t s = 0; slot == NONE && s < model->stripe_count * 2; s++) {
        slot = find_slot(model, choose(model)); /* a stripe without leaves: the next */
    }
    if (slot == NONE) {
        to_ghost(model, key);
        return;
    }
    const uint32_t victim = model->keys[slot];
    if (victim == NONE) {
        model->used++;
    } else {
        if (model->parents[victim] != NONE) {
            model->kids[model->parents[victim]]--;
        }
        model->places[victim] = NONE;
        to_ghost(model, victim);
    }
    model->keys[slot] = key;
    model->places[key] = slot;
    model->parents[key] = parent;
    model->ghost_since[key] = 0;
    if (parent != NONE) {
        model->kids[parent]++;
    }
    model->base.writes++;
}

static void
put_admitted(struct gittins *model, const uint32_t *keys, uint32_t i)
{
    if (!resident(model, keys[i])) {
        put(model, keys[i], i > 0 ? keys[i - 1] : NONE);
    }
}

static bool
worth_storing(const struct gittins *model, uint32_t key)
{
    return resident(model, key) || worth_of(model, key) >= model->theta;
}

static uint32_t
turn_of(const struct gittins *model, const uint32_t *keys, uint32_t count)
{
    uint32_t known = 0;
    while (known < count &&
           (resident(model, keys[known]) || in_ghost(model, keys[known]))) {
        known++;
    }
    if (known < 2) {
        return 0;
    }
    const uint32_t turn = model->turns[keys[known - 1]] + 1u;
    return turn > 9 ? 9 : turn;
}

/* What these hang on stays while they are stored. */
static void
put_all(struct gittins *model, const uint32_t *keys, uint32_t from, uint32_t to,
    bool full)
{
    const uint32_t root = from > 0 ? keys[from - 1] : NONE;
    if (root != NONE) {
        model->kids[root]++;
    }
    for (uint32_t n = 0; n < to - from; n++) {
        const bool forward = (model->flags & FLAG_HEAD_FIRST) != 0;
        const uint32_t i = forward ? from + n : to - 1 - n;
        if ((model->flags & FLAG_NO_CLOSURE) != 0 && full &&
            !worth_storing(model, keys[i])) {
            to_ghost(model, keys[i]);
            model->theta *= exp(-0.002);
            continue;
        }
        put_admitted(model, keys, i);
    }
    if (root != NONE) {
        model->kids[root]--;
    }
}

/* Offers the blocks [from, to) of a request, in one call. */
static void
offer(struct gittins *model, const uint32_t *keys, uint32_t from, uint32_t to,
    uint32_t turn)
{
    for (uint32_t i = to; i-- > from;) {
        see(model, keys[i], i, to - 1 - i, turn);
    }
    uint32_t admitted = to;
    const bool late =
        (model->flags & FLAG_LATE) != 0 && model->late_puts < model->capacity;
    const bool full = model->used == model->capacity;
    if (full) {
        model->late_puts += to - from;
    }
    if (full && (model->flags & FLAG_NO_CLOSURE) == 0) {
        admitted = from;
        const bool rooted = from == 0 || resident(model, keys[from - 1]); /* G2 */
        const bool all = late || (model->flags & FLAG_NO_REFUSAL) != 0;
        while (rooted && admitted < to &&
               (all || worth_storing(model, keys[admitted]))) {
            admitted++;
        }
    }
    for (uint32_t i = admitted; i < to; i++) {
        if (!resident(model, keys[i])) {
            to_ghost(model, keys[i]);
        }
    }
    if (admitted < to) {
        const double step = 0.002 * (to - admitted);
        model->theta *= exp(-(step > 0.2 ? 0.2 : step)); /* G3 */
    }
    put_all(model, keys, from, admitted, full);
}

static uint32_t
gittins_request(struct policy *policy, const uint32_t *keys, uint32_t count)
{
    struct gittins *model = (struct gittins *)policy;
    uint32_t hits = 0;
    while (hits < count && resident(model, keys[hits])) {
        hits++;
    }
    const uint32_t turn = turn_of(model, keys, count);
    const uint32_t passes = (model->flags & FLAG_TWICE) != 0 ? 2 : 1;
    for (uint32_t pass = 0; pass < passes; pass++) {
        for (uint32_t i = hits; i-- > 0;) {
            const bool hidden = (model->flags & FLAG_HIT_NO_END) != 0;
            see(model, keys[i], i, hidden ? 0 : count - 1 - i, turn);
        }
    }
    policy->offers += count - hits;
    const uint32_t piece = model->piece == 0 ? count : model->piece;
    for (uint32_t from = hits; from < count; from += piece) {
        offer(model, keys, from, from + piece < count ? from + piece : count, turn);
    }
    return hits;
}

static bool
gittins_holds(const struct policy *policy, uint32_t key)
{
    return resident((const struct gittins *)policy, key);
}

static void
gittins_destroy(struct policy *policy)
{
    struct gittins *model = (struct gittins *)policy;
    free(model->keys);
    free(model->stripes);
    free(model->places);
    free(model->parents);
    free(model->lasts);
    free(model->kids);
    free(model->counts);
    free(model->turns);
    free(model->gaps);
    free(model->classes);
    free(model->ghost_since);
    free(model->newer);
    free(model->older);
    free(model->lives);
    free(model->tracked);
    free(model);
}

static void
open_tracker(struct gittins *model, uint32_t universe)
{
    const uint32_t capacity = model->capacity;
    const uint32_t least =
        (model->flags & FLAG_SMALL_TRACKER) != 0 ? TRACKER_MIN / 4 : TRACKER_MIN;
    const uint32_t part = (model->flags & FLAG_QUARTER_TRACKER) != 0 ? 4 : 2;
    model->track_max = capacity / part > least ? capacity / part : least;
    const double span = (model->flags & FLAG_SHORT_TRACKER) != 0 ? 4.0 : 8.0;
    const double rate = model->track_max / (span * capacity);
    model->sample_below =
        rate >= 1 ? UINT64_C(1) << 32 : (uint64_t)(rate * 4294967296.0);
    model->newer = nones(universe);
    model->older = nones(universe);
    model->lives = zeroed(universe, sizeof *model->lives);
    model->tracked = zeroed(universe, sizeof *model->tracked);
    model->newest = NONE;
    model->oldest = NONE;
}

struct policy *
gittins_create(const struct stream *stream, const struct options *options)
{
    struct gittins *model = zeroed(1, sizeof *model);
    model->base = (struct policy){
        .holds = gittins_holds,
        .request = gittins_request,
        .destroy = gittins_destroy,
    };
    const uint32_t capacity = options->capacity;
    const uint32_t universe = stream->universe;
    model->capacity = capacity;
    model->flags = options->gittins_flags;
    model->aim = options->aim == 0 ? 8 : options->aim;
    model->theta = 1.0 / capacity;
    model->piece = options->piece;
    model->salt = options->salt;
    model->lead = options->lead;
    model->next_rebuild = capacity / 4 > 64 ? capacity / 4 : 64;
    model->ghost_room = (uint64_t)options->ghosts * capacity;
    model->keys = nones(capacity);
    model->places = nones(universe);
    model->parents = nones(universe);
    model->lasts = zeroed(universe, sizeof *model->lasts);
    model->kids = zeroed(universe, sizeof *model->kids);
    model->counts = zeroed(universe, 1);
    model->turns = zeroed(universe, 1);
    model->gaps = zeroed(universe, 1);
    model->classes = zeroed(universe, 1);
    model->ghost_since = zeroed(universe, sizeof *model->ghost_since);
    model->stripe_count = options->stripes == 0 ? 1 : options->stripes;
    model->stripes = zeroed(model->stripe_count, sizeof *model->stripes);
    uint32_t first = 0;
    for (uint32_t s = 0; s < model->stripe_count; s++) {
        const uint32_t slots =
            capacity / model->stripe_count + (s < capacity % model->stripe_count);
        model->stripes[s] = (struct stripe){.first = first, .slots = slots};
        first += slots;
    }
    open_tracker(model, universe);
    return &model->base;
}
