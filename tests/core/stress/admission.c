/* SPDX-License-Identifier: Apache-2.0 */
/* admission.c: threads that use one state of admission.h at once, without the engine.
 *
 *     admission PATH [--seconds S] [--seed N]      (PATH is not used)
 *
 * Nothing that they do is ordered, so what is looked at is what must hold after any race:
 * no word leads outside (the sanitizers tell), no loop goes on for ever, sums are those
 * of what was added, and the shadows still work afterwards.
 */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "admission.h"

enum { ENTRIES = 4096, BLOCKS = 600, THREADS = 6, KEYS = 3000 };

static struct ckv_admission_memory admission;
static _Atomic(uint32_t) stop;
static _Atomic(uint64_t) insertions;
static _Thread_local uint64_t random_state;

_Noreturn static void
fail(const char *what, uint64_t a, uint64_t b)
{
    fprintf(stderr, "admission: %s: %" PRIu64 ", %" PRIu64 "\n", what, a, b);
    abort();
}

static uint64_t
draw(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void
yield_at_random(void)
{
    if (random_state != 0 && draw() % 400 == 0) {
        (void)sched_yield();
    }
}

static uint64_t
hash_of(uint64_t number)
{
    uint64_t hash = (number + 1) * UINT64_C(0x9e3779b97f4a7c15);
    hash ^= hash >> 29;
    return hash * UINT64_C(0xbf58476d1ce4e5b9);
}

static void *
work(void *argument)
{
    const uint64_t number = *(const uint64_t *)argument;
    random_state = hash_of(number);
    while (!stop) {
        for (int i = 0; i < 64; i++) {
            const uint64_t hash = hash_of(draw() % KEYS);
            if (ckv_admission_samples(&admission, hash)) {
                ckv_admission_access(&admission, hash, (enum ckv_access)(draw() % 4));
            }
            if (!ckv_admission_knows(&admission, hash)) {
                ckv_admission_remember(&admission, hash);
                insertions++;
            }
        }
        ckv_admission_resize(&admission, BLOCKS + draw() % BLOCKS);
        struct ckv_admission_estimate estimate;
        ckv_admission_estimate(&admission, &estimate);
        /* What others add while a decision takes off is not lost, so neither of them
         * falls below zero. */
        if (estimate.misses[0] >> 40 != 0 || estimate.misses[1] >> 40 != 0 ||
            estimate.requests >> 40 != 0) {
            fail("a sum is below zero", estimate.misses[0], estimate.misses[1]);
        }
    }
    return NULL;
}

/* Requests of few keys hit both shadows after each was asked for often enough. */
static void
look_afterwards(void)
{
    uint64_t before[2] = {0};
    for (int round = 0; round < 40; round++) {
        for (int i = 0; i < 2 && round == 35; i++) {
            before[i] = ckv_load_relaxed_u64(&admission.head->misses[i]);
        }
        for (uint64_t key = 0; key < 20; key++) {
            ckv_admission_access(&admission, hash_of(1000000 + key) << 3,
                CKV_ACCESS_PUT);
        }
    }
    for (int i = 0; i < 2; i++) {
        const uint64_t after = ckv_load_relaxed_u64(&admission.head->misses[i]);
        if (after > before[i]) {
            fail("a shadow does not keep its keys", (uint64_t)i, after - before[i]);
        }
    }
    const uint64_t clock = ckv_load_relaxed_u64(&admission.head->ghost_clock);
    if (insertions > 100 && clock == 0) {
        fail("the ghost counted nothing", insertions, clock);
    }
}

int
main(int argc, char **argv)
{
    double seconds = 2;
    uint64_t seed = 1;
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0) {
            seconds = strtod(argv[i + 1], NULL);
        } else if (strcmp(argv[i], "--seed") == 0) {
            seed = strtoull(argv[i + 1], NULL, 10);
        }
    }
    void *memory = aligned_alloc(64, (size_t)ckv_admission_bytes(ENTRIES));
    if (memory == NULL) {
        fail("no memory", 0, 0);
    }
    memset(memory, 0, (size_t)ckv_admission_bytes(ENTRIES));
    ckv_admission_attach(&admission, memory, ENTRIES);
    ckv_admission_resize(&admission, BLOCKS);
    ckv_yield_hook = yield_at_random;

    pthread_t threads[THREADS];
    uint64_t numbers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        numbers[i] = seed * THREADS + i;
        if (pthread_create(&threads[i], NULL, work, &numbers[i]) != 0) {
            fail("no thread", i, 0);
        }
    }
    const struct timespec pause = {.tv_sec = (time_t)seconds,
        .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    (void)nanosleep(&pause, NULL);
    stop = 1;
    for (int i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    look_afterwards();
    printf("%" PRIu64 " insertions, %" PRIu64 " decisions, %" PRIu64 " switches\n",
        (uint64_t)insertions, (uint64_t)ckv_load_relaxed_u32(&admission.head->period),
        ckv_load_relaxed_u64(&admission.head->switches));
    free(memory);
    return 0;
}
