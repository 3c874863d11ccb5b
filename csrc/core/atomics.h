/* SPDX-License-Identifier: Apache-2.0 */
/* atomics.h: the only file that spells memory orders.
 *
 * Every access to memory that processes share goes through these functions.  The label in
 * the comment at a call site ("W3", "R3") names the pair in docs/concurrency.md: a
 * release store Wn is seen by the acquire load Rn.  The ckv_..._ordered functions are
 * sequentially consistent; they are used where a store must be seen before a later load
 * is done (a pin against a kill), which release and acquire do not give.
 */
#ifndef CKV_ATOMICS_H
#define CKV_ATOMICS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "point.h"

typedef _Atomic(uint64_t) ckv_atomic_u64;
typedef _Atomic(uint32_t) ckv_atomic_u32;
typedef _Atomic(uint8_t) ckv_atomic_u8;

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && sizeof(ckv_atomic_u64) == 8, "u64");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && sizeof(ckv_atomic_u32) == 4, "u32");
_Static_assert(ATOMIC_CHAR_LOCK_FREE == 2 && sizeof(ckv_atomic_u8) == 1, "u8");

#define CKV_DEFINE_ATOMICS(suffix, type)                                               \
    static inline type ckv_load_relaxed_##suffix(const ckv_atomic_##suffix *word)      \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_load_explicit(word, memory_order_relaxed);                       \
    }                                                                                  \
    static inline type ckv_load_acquire_##suffix(const ckv_atomic_##suffix *word)      \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_load_explicit(word, memory_order_acquire);                       \
    }                                                                                  \
    static inline type ckv_load_ordered_##suffix(const ckv_atomic_##suffix *word)      \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_load_explicit(word, memory_order_seq_cst);                       \
    }                                                                                  \
    static inline void ckv_store_relaxed_##suffix(ckv_atomic_##suffix *word,           \
        type value)                                                                    \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        atomic_store_explicit(word, value, memory_order_relaxed);                      \
    }                                                                                  \
    static inline void ckv_store_release_##suffix(ckv_atomic_##suffix *word,           \
        type value)                                                                    \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        atomic_store_explicit(word, value, memory_order_release);                      \
    }                                                                                  \
    static inline void ckv_store_ordered_##suffix(ckv_atomic_##suffix *word,           \
        type value)                                                                    \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        atomic_store_explicit(word, value, memory_order_seq_cst);                      \
    }                                                                                  \
    static inline bool ckv_cas_ordered_##suffix(ckv_atomic_##suffix *word,             \
        type *expected, type desired)                                                  \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_compare_exchange_strong_explicit(word, expected, desired,        \
            memory_order_seq_cst, memory_order_seq_cst);                               \
    }                                                                                  \
    static inline type ckv_add_relaxed_##suffix(ckv_atomic_##suffix *word, type value) \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_fetch_add_explicit(word, value, memory_order_relaxed);           \
    }                                                                                  \
    static inline type ckv_add_ordered_##suffix(ckv_atomic_##suffix *word, type value) \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_fetch_add_explicit(word, value, memory_order_seq_cst);           \
    }                                                                                  \
    static inline type ckv_or_ordered_##suffix(ckv_atomic_##suffix *word, type value)  \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_fetch_or_explicit(word, value, memory_order_seq_cst);            \
    }                                                                                  \
    static inline type ckv_and_ordered_##suffix(ckv_atomic_##suffix *word, type value) \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_fetch_and_explicit(word, value, memory_order_seq_cst);           \
    }                                                                                  \
    static inline type ckv_exchange_ordered_##suffix(ckv_atomic_##suffix *word,        \
        type value)                                                                    \
    {                                                                                  \
        CKV_YIELD();                                                                   \
        return atomic_exchange_explicit(word, value, memory_order_seq_cst);            \
    }

CKV_DEFINE_ATOMICS(u64, uint64_t)
CKV_DEFINE_ATOMICS(u32, uint32_t)
CKV_DEFINE_ATOMICS(u8, uint8_t)

#undef CKV_DEFINE_ATOMICS

/* Keeps the loads before it before the loads after it. */
static inline void
ckv_fence_acquire(void)
{
    atomic_thread_fence(memory_order_acquire);
}

/* Between this thread and a signal handler that interrupts it. */
static inline void
ckv_fence_signal(void)
{
    atomic_signal_fence(memory_order_seq_cst);
}

static inline void
ckv_cpu_relax(void)
{
    CKV_RELAX();
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Raises *word to at least `value`. */
static inline void
ckv_raise_u64(ckv_atomic_u64 *word, uint64_t value)
{
    uint64_t seen = ckv_load_relaxed_u64(word);
    while (seen < value && !ckv_cas_ordered_u64(word, &seen, value)) {
    }
}

#endif /* CKV_ATOMICS_H */
