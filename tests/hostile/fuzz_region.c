/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_region.c: writes into the shared region of a volume that is open.
 *
 * The words that are written are those that the engine acts on: states, masks, places,
 * links, the page map, buckets, stripes with their locks, cursors and holes, hints,
 * events, slots, namespaces, the sequence, admission.  They change between calls, so that a case can
 * be repeated, in some cases by a thread at the same time as well.  A second process may
 * have the volume open from before the changes or open it afterwards.
 *
 * What may come out of it: misses, refused puts, blocks that are lost.  What may not: a
 * signal, a call that does not end, bytes that fail their checksum (with verify=always:
 * the marks of blocks that were verified lie in the region too), and a next life of the
 * region that is not sound.
 */
#include "region_changes.h"

/* ---- a case --------------------------------------------------------------------------- */

static uint32_t storm_ends;

static void *
storm(void *argument)
{
    struct input input = {.beyond = *(const uint64_t *)argument};
    while (__atomic_load_n(&storm_ends, __ATOMIC_RELAXED) == 0) {
        change_region(&input);
        if (one_in(&input, 64)) {
            (void)usleep(200);
        }
    }
    return NULL;
}

static void
use(struct handle *handles, unsigned count, struct input *input, unsigned changes)
{
    for (unsigned i = 0; i < 40 && seconds() < setting.until; i++) {
        for (unsigned j = changes == 0 ? 0 : take8(input) % changes; j > 0; j--) {
            change_region(input);
        }
        one_call(&handles[i % count], input);
    }
}

/* Another process; returns its id. */
static pid_t
start_peer(struct input *input)
{
    const uint64_t seed = take64(input);
    (void)fflush(NULL);
    const pid_t peer = fork();
    need(peer >= 0, "fork");
    if (peer == 0) {
        struct handle handle;
        struct input own = {.beyond = seed};
        if (open_handle(&handle, seed % SPACES,
                one_in(&own, 3) ? CKV_MODE_READ : CKV_MODE_READ_WRITE)) {
            get_all(&handle);
            use(&handle, 1, &own, 0);
            close_handle(&handle);
        }
        _exit(0);
    }
    return peer;
}

static void
end_peer(pid_t peer)
{
    int status = 0;
    need(waitpid(peer, &status, 0) == peer, "wait");
    if (WIFSIGNALED(status)) {
        fault("a second process was ended by signal %d", WTERMSIG(status));
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fault("a second process ended with %d", WEXITSTATUS(status));
    }
}

/* The life after it has to be sound again. */
static void
next_life(struct input *input)
{
    struct handle handle;
    setting.until = seconds() + 1.5;
    setting.verify = CKV_VERIFY_ONCE;
    setting.compare = true;
    setting.sound = true;
    if (!open_handle(&handle, take8(input) % SPACES, CKV_MODE_READ_WRITE)) {
        fault("the volume cannot be opened again");
    }
    do_prove(&handle, "the rebuild");
    do_list(&handle);
    get_all(&handle);
    use(&handle, 1, input, 0);
    do_verify(&handle, true);
    do_prove(&handle, "the repair");
    close_handle(&handle);
}

static void
run_input(struct input *input)
{
    const unsigned first = take8(input);
    const unsigned template_number = first % TEMPLATES;
    setting = (struct setting){
        .eviction = first < 128 ? CKV_EVICTION_CLOCK : CKV_EVICTION_PREFIX,
        .verify = one_in(input, 4) ? CKV_VERIFY_ONCE : CKV_VERIFY_ALWAYS,
        .admission = (enum ckv_admission)(take8(input) % 3),
        .guard = one_in(input, 2),
        .until = seconds() + 1.2,
    };
    setting.compare = setting.verify == CKV_VERIFY_ALWAYS;
    restore(template_number, "r");
    struct handle handles[3];
    unsigned count = 1;
    if (!open_handle(&handles[0], 0, CKV_MODE_READ_WRITE)) {
        fault("the template cannot be opened");
    }
    if (one_in(input, 2) && open_handle(&handles[1], 1, CKV_MODE_READ_WRITE)) {
        count++;
    }
    if (one_in(input, 3) && open_handle(&handles[count], 0, CKV_MODE_READ)) {
        count++;
    }
    map_region(template_number);
    get_all(&handles[0]);
    const pid_t early = one_in(input, 4) ? start_peer(input) : 0;
    const bool stormy = one_in(input, 4);
    const uint64_t storm_seed = take64(input);
    pthread_t thread;
    storm_ends = 0;
    if (stormy) {
        /* Views change while they are compared when pages are given away twice. */
        setting.compare = false;
        need(pthread_create(&thread, NULL, storm, (void *)(uintptr_t)&storm_seed) == 0,
            "start a thread");
    }
    use(handles, count, input, 6);
    const pid_t late = one_in(input, 6) ? start_peer(input) : 0;
    setting.until = seconds() + 1;
    get_all(&handles[count - 1]);
    use(handles, count, input, 2);
    if (stormy) {
        __atomic_store_n(&storm_ends, 1, __ATOMIC_RELAXED);
        (void)pthread_join(thread, NULL);
    }
    if (early != 0) {
        end_peer(early);
    }
    if (late != 0) {
        end_peer(late);
    }
    do_verify(&handles[0], true);
    while (count > 0) {
        close_handle(&handles[--count]);
    }
    (void)munmap(region.base, region.bytes);
    next_life(input);
}

int
main(int count, char **arguments)
{
    return run_cases(count, arguments, run_input);
}
