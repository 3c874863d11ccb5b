/* SPDX-License-Identifier: Apache-2.0 */
/* world.h: the blocks of a case, what must be there of them, and the parts of a sweep.
 *
 *   world.c       blocks, template volumes, what must be there, the peer process
 *   scenarios.c   what is done while a call fails
 *   sweep.c       the loop over faults, and the judge
 */
#ifndef CKV_TESTS_WORLD_H
#define CKV_TESTS_WORLD_H

#include <stdlib.h>

#include "cache.h"
#include "inject.h"
#include "volume.h"

enum {
    BLOCKS = 40,     /* of the namespace that is worked on; 0 to 13 are in a template */
    NEW_BLOCKS = 16, /* the first number that no template has */
    FILES = 2,       /* of a set */
    HEADER_MAX = 4096,
};

/* ---- blocks ---------------------------------------------------------------------- */

struct block { /* what a version of a block consists of */
    size_t length;
    size_t header_length;
    const uint8_t *payload;
    const uint8_t *header;
};
const struct block *block_of(unsigned number, unsigned version);
struct ckv_key key_of(unsigned number); /* some are digested */

enum want {
    WANT_ABSENT,
    WANT_PRESENT, /* whole, in `version` */
    WANT_EITHER   /* absent, or whole in `version` or `other` */
};
struct expectation {
    enum want want;
    unsigned version;
    unsigned other;
};

/* ---- one case -------------------------------------------------------------------- */

enum template { TEMPLATE_NONE, TEMPLATE_ONE, TEMPLATE_FULL, TEMPLATE_TWO };

struct scenario;

struct run {
    const struct scenario *scenario;
    const struct fault *fault;
    unsigned long nth;
    bool persistent;
    struct ckv_cache *cache; /* NULL when none is open */
    struct ckv_options options;
    struct ckv_path paths[FILES];
    char names[FILES][300];
    struct expectation *blocks; /* BLOCKS; shared with the peer */
    bool ideal;          /* every call had the outcome that it has without a fault */
    char deviation[700]; /* the first that had not */
    bool damaged;        /* the scenario spoiled payloads on purpose */
    bool others_may_go;  /* blocks of the other namespaces were given up */
    unsigned long problems;
    bool quiet;
};

struct scenario {
    const char *name;
    enum template template;
    void (*prepare)(struct run *run); /* without faults; may be NULL */
    void (*act)(struct run *run);
    void (*options)(struct ckv_options *options); /* may be NULL */
    bool peer;  /* another process has the volume open */
    bool fresh; /* in a process that never used the engine */
    struct pretence pretence;
};
extern const struct scenario scenarios[];
extern const size_t scenario_count;

void problem(struct run *run, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* For what must work or there is no test. */
void need(bool condition, const char *what);

/* ---- calls whose outcome is looked at -------------------------------------------- */

/* Statuses that a function may answer, as its comment in cyclone_kv.h has it. */
#define MAY(status) (UINT64_C(1) << ((status) + 20))
extern const uint64_t MAY_OPEN, MAY_PUT, MAY_GET, MAY_COPY;

/* Compares an outcome with the one without faults and with those that are allowed. */
bool outcome(struct run *run, const char *what, enum ckv_status status,
    enum ckv_status ideal, uint64_t allowed, const struct ckv_error *error);

/* Opens run->cache with run->options, and waits for what is done beside. */
enum ckv_status open_cache(struct run *run, struct ckv_error *error);
void open_or_end(struct run *run);
void do_open(struct run *run);
void do_put(struct run *run, unsigned number, unsigned version, uint32_t flags);
void note_put(struct run *run, unsigned number, unsigned version,
    enum ckv_status status);
void do_get(struct run *run, unsigned number);
void do_get_into(struct run *run, unsigned number);
void do_get_many_into(struct run *run, unsigned first, unsigned count);
void do_remove(struct run *run, unsigned number);

/* ---- worlds ---------------------------------------------------------------------- */

void world_begin(const char *folder, const struct scenario *scenario);
void world_restore(struct run *run);
/* Looks at every block through run->cache.  `loose`: what is absent may be back. */
void world_check(struct run *run, const char *when, bool loose);
void world_end(void);

void peer_start(struct run *run);
void peer_open(void);
void peer_close(void);
void peer_judge(struct run *run);
void peer_stop(void);

#endif /* CKV_TESTS_WORLD_H */
