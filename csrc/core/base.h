/* SPDX-License-Identifier: Apache-2.0 */
/* base.h: attributes, alignment, checked arithmetic and assertions; no types of ours.
 *
 * Assertions are for bugs of the engine alone.  Content of files and of shared memory is
 * input: it is validated and becomes a miss or an error, never an assertion.
 *   CKV_CHECK   stays on in release builds; guards what would damage other processes
 *   CKV_DCHECK  test builds only (CKV_POINTS)
 */
#ifndef CKV_BASE_H
#define CKV_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cyclone_kv.h"

#define CKV_PAGE_BYTES  4096u
#define CKV_CHUNK_BYTES (UINT64_C(1) << 30) /* no entry crosses such a border */
#define CKV_CACHE_LINE  64u

#define CKV_LIKELY(condition)   __builtin_expect(!!(condition), 1)
#define CKV_UNLIKELY(condition) __builtin_expect(!!(condition), 0)
#define CKV_ARRAY_LENGTH(array) (sizeof(array) / sizeof((array)[0]))
#define CKV_PRINTF(format_index, first)                                                \
    __attribute__((format(printf, format_index, first)))

/* Prints the place and ends the process; the only function that does. */
_Noreturn void ckv_invariant_failed(const char *condition, const char *file, int line);

#define CKV_CHECK(condition)                                                           \
    do {                                                                               \
        if (CKV_UNLIKELY(!(condition))) {                                              \
            ckv_invariant_failed(#condition, __FILE__, __LINE__);                      \
        }                                                                              \
    } while (0)

#ifdef CKV_POINTS
#define CKV_DCHECK(condition) CKV_CHECK(condition)
#else
#define CKV_DCHECK(condition) ((void)sizeof(!(condition)))
#endif

/* Returns from the calling function unless the expression is CKV_OK. */
#define CKV_TRY(expression)                                                            \
    do {                                                                               \
        const enum ckv_status ckv_try_status = (expression);                           \
        if (ckv_try_status != CKV_OK) {                                                \
            return ckv_try_status;                                                     \
        }                                                                              \
    } while (0)

/* Fills in *error (which may be NULL) and returns `status`. */
enum ckv_status ckv_fail(struct ckv_error *error, enum ckv_status status, int os_errno,
    const char *format, ...) CKV_PRINTF(4, 5);

void ckv_log(enum ckv_log_level level, const char *format, ...) CKV_PRINTF(2, 3);

static inline uint64_t
ckv_align_down(uint64_t value, uint64_t alignment)
{
    return value - value % alignment;
}

/* The caller has bounded `value`: rounding up must not overflow. */
static inline uint64_t
ckv_align_up(uint64_t value, uint64_t alignment)
{
    return ckv_align_down(value + alignment - 1, alignment);
}

static inline uint64_t
ckv_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t
ckv_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* False on overflow; for numbers that come from outside. */
static inline bool
ckv_add_u64(uint64_t a, uint64_t b, uint64_t *sum)
{
    return !__builtin_add_overflow(a, b, sum);
}

static inline bool
ckv_mul_u64(uint64_t a, uint64_t b, uint64_t *product)
{
    return !__builtin_mul_overflow(a, b, product);
}

#endif /* CKV_BASE_H */
