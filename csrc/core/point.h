/* SPDX-License-Identifier: Apache-2.0 */
/* point.h: named places where a test can pause, kill or interleave.
 *
 * CKV_POINT("module.step") marks a step of put, evict, publish, remove, rebuild and the
 * like; CKV_YIELD() stands before every access to shared memory (atomics.h), and
 * CKV_RELAX() in a loop that waits for a word of another thread.  Release builds compile
 * all three to nothing; a build with -DCKV_POINTS calls the hooks below, and
 * obeys the environment variable CYCLONE_KV_TEST_POINT="name:action:count" where action
 * is "kill" (SIGKILL), "stop" (SIGSTOP) or "exit", done when the point is reached for
 * the count-th time.
 */
#ifndef CKV_POINT_H
#define CKV_POINT_H

#ifdef CKV_POINTS
extern void (*ckv_point_hook)(const char *name); /* may be NULL */
extern void (*ckv_yield_hook)(void);             /* may be NULL */
extern void (*ckv_relax_hook)(void);             /* may be NULL */
void ckv_point_reached(const char *name);
#define CKV_POINT(name) ckv_point_reached(name)
#define CKV_YIELD()                                                                    \
    do {                                                                               \
        if (ckv_yield_hook != NULL) {                                                  \
            ckv_yield_hook();                                                          \
        }                                                                              \
    } while (0)
#define CKV_RELAX()                                                                    \
    do {                                                                               \
        if (ckv_relax_hook != NULL) {                                                  \
            ckv_relax_hook();                                                          \
        }                                                                              \
    } while (0)
#else
#define CKV_POINT(name) ((void)0)
#define CKV_YIELD()     ((void)0)
#define CKV_RELAX()     ((void)0)
#endif

#endif /* CKV_POINT_H */
