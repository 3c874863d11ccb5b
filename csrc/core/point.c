/* SPDX-License-Identifier: Apache-2.0 */
/* point.c: test points (point.h); release builds contain nothing of it. */
#include "point.h"

#include "atomics.h"
#include "base.h"

#ifdef CKV_POINTS

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXIT_STATUS = 77 }; /* of the action "exit" */

enum action { ACTION_NONE, ACTION_KILL, ACTION_STOP, ACTION_EXIT };

void (*ckv_point_hook)(const char *name) = NULL;
void (*ckv_yield_hook)(void) = NULL;
void (*ckv_relax_hook)(void) = NULL;

enum { PLANS_MAX = 2 };

static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct plan {
    enum action action;
    uint64_t count;
    char name[128];
    _Atomic(uint64_t) reached; /* no ckv_atomic: a yield hook must not count here */
} plans[PLANS_MAX];

static enum action
parse_action(const char *text, size_t length)
{
    if (length == 4 && memcmp(text, "kill", 4) == 0) {
        return ACTION_KILL;
    }
    if (length == 4 && memcmp(text, "stop", 4) == 0) {
        return ACTION_STOP;
    }
    if (length == 4 && memcmp(text, "exit", 4) == 0) {
        return ACTION_EXIT;
    }
    return ACTION_NONE;
}

/* "name:action" or "name:action:count"; anything else is a mistake of the test, which
 * would pass in silence if it were ignored. */
static void
parse_plan(struct plan *plan, const char *text, size_t length)
{
    const char *end = text + length;
    const char *colon = memchr(text, ':', length);
    CKV_CHECK(colon != NULL);
    const size_t name_length = (size_t)(colon - text);
    CKV_CHECK(name_length < sizeof(plan->name));

    const char *action = colon + 1;
    const char *second_colon = memchr(action, ':', (size_t)(end - action));
    plan->count = 1;
    if (second_colon != NULL) {
        char *stop = NULL;
        plan->count = strtoull(second_colon + 1, &stop, 10);
        CKV_CHECK(stop == end && stop != second_colon + 1 && plan->count != 0);
        end = second_colon;
    }
    memcpy(plan->name, text, name_length);
    plan->name[name_length] = '\0';
    plan->action = parse_action(action, (size_t)(end - action));
    CKV_CHECK(plan->action != ACTION_NONE);
}

/* One or two of them, separated by a comma. */
static void
parse_environment(void)
{
    const char *text = getenv("CYCLONE_KV_TEST_POINT");
    for (int i = 0; text != NULL && text[0] != '\0'; i++) {
        CKV_CHECK(i < PLANS_MAX);
        const size_t length = strcspn(text, ",");
        parse_plan(&plans[i], text, length);
        text += length + (text[length] == ',');
    }
}

static void
act(enum action action)
{
    switch (action) {
    case ACTION_NONE:
        break;
    case ACTION_KILL:
        (void)kill(getpid(), SIGKILL); /* a process may always kill itself */
        break;
    case ACTION_STOP:
        (void)kill(getpid(), SIGSTOP);
        break;
    case ACTION_EXIT:
        _exit(EXIT_STATUS);
    }
}

void
ckv_point_reached(const char *name)
{
    (void)pthread_once(&once, parse_environment); /* cannot fail here */
    if (ckv_point_hook != NULL) {
        ckv_point_hook(name);
    }
    for (int i = 0; i < PLANS_MAX; i++) {
        struct plan *plan = &plans[i];
        if (plan->action != ACTION_NONE && strcmp(name, plan->name) == 0 &&
            atomic_fetch_add(&plan->reached, 1) + 1 == plan->count) {
            act(plan->action);
        }
    }
}

#endif /* CKV_POINTS */
