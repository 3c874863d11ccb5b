/* SPDX-License-Identifier: Apache-2.0 */
/* pin_against_kill.pml: pins of one process against a cursor that reuses the pages.
 *
 *   threads   two of one process: look the entry up, pin it (pin.c), read, unpin
 *   cursor    of another process: kills the entry, looks at the mask, reuses the pages
 *
 * Every access of the protocol is seq_cst in the code, which is what spin's interleaving
 * means.  The mask is one bit, that of the threads' process; other bits are alike.
 *
 *   Property   while a thread holds a pin that counts (N2), its bit is set (N1) and the
 *              pages are those of the sequence that it looked up.
 *
 *   BROKEN_LOOK_FIRST   the pin looks at the state before it sets the bit
 *   BROKEN_MASK_FIRST   the cursor looks at the mask before it kills, and not again
 *   BROKEN_NO_LOCK_BIT  the private word is a bare counter
 */
#define ROUNDS 2

bit locked;        /* private word: lock bit */
byte count;        /* private word: number of pins */
bit mask;          /* shared: the process's bit */
byte state = 1;    /* shared: the sequence of the LIVE entry, 0 for dead */
byte pages = 1;    /* whose payload the pages hold */

inline take()
{
#ifdef BROKEN_NO_LOCK_BIT
    atomic { first = (count == 0); count++ };
    if
    :: first -> mask = 1
    :: else
    fi
#else
    do
    :: atomic { !locked && count > 0 -> count++; break }
    :: atomic { !locked && count == 0 -> locked = 1 };
       mask = 1;
       atomic { count = 1; locked = 0 };
       break
    od
#endif
}

inline give()
{
#ifdef BROKEN_NO_LOCK_BIT
    atomic { count--; first = (count == 0) };
    if
    :: first -> mask = 0
    :: else
    fi
#else
    do
    :: atomic { !locked && count > 1 -> count--; break }
    :: atomic { !locked && count == 1 -> locked = 1 };
       mask = 0;
       atomic { count = 0; locked = 0 };
       break
    od
#endif
}

active [2] proctype thread()
{
    byte round, sequence;
    bit first, valid;
    do
    :: round == ROUNDS -> break
    :: round < ROUNDS ->
       round++;
       sequence = state;
       if
       :: sequence == 0
       :: else ->
#ifdef BROKEN_LOOK_FIRST
          valid = (state == sequence);
          take();
#else
          take();
          valid = (state == sequence);
#endif
          if
          :: valid ->
             assert(mask);              /* N1 */
             assert(pages == sequence); /* the view does not change ... */
             assert(pages == sequence)  /* ... however long it is held */
          :: else
          fi;
          give()
       fi
    od
}

active proctype cursor()
{
    byte round;
    do
    :: round == ROUNDS -> break
    :: round < ROUNDS ->
       round++;
#ifdef BROKEN_MASK_FIRST
       (mask == 0);
       state = 0;
#else
       state = 0;   /* E1: final */
       (mask == 0); /* stepped over until then */
#endif
       pages = round + 1;
       state = round + 1
    od
}
