/* SPDX-License-Identifier: Apache-2.0 */
/* event_ring.pml: writers of events that share one slot, and a reader of it.
 *
 * A ring of one slot and two words: every event belongs into the same place, so all that
 * can go wrong between laps goes wrong here.  A writer may die between any two steps.
 *
 *   writer   n = ++head; CAS of `number` from an older finished one to WRITING + n;
 *            words; number = n
 *   reader   number == n?  words; number still n?
 *
 *   Property  words that are believed are those of event n; finished numbers only grow.
 *
 *   BROKEN_TAKE_OVER  a writer claims a slot that an older one has not finished
 *   BROKEN_ONE_LOOK   the reader does not look at the number again
 */
#define WRITERS 3
#define WRITING 16

byte head;
byte number;
byte words[2] = 0;
byte finished; /* the specification: the last number that was stored */

active [WRITERS] proctype writer()
{
    byte n, seen;
    bit claimed;
    atomic { head++; n = head };
    seen = number;
    do
#ifdef BROKEN_TAKE_OVER
    :: seen % WRITING >= n -> break
#else
    :: seen >= n -> break /* dropped; WRITING is larger than any number */
#endif
    :: else ->
       atomic {
           if
           :: number == seen -> number = WRITING + n; claimed = 1; break
           :: else -> seen = number
           fi }
    od;
    if
    :: claimed ->
       if
       :: goto dead
       :: words[0] = n
       fi;
       if
       :: goto dead
       :: words[1] = n
       fi;
       atomic { number = n; assert(finished < n); finished = n }
    :: else
    fi;
dead:
    skip
}

active proctype reader()
{
    byte copies[2];
    byte n;
    select (n : 1 .. WRITERS);
    if
    :: number == n ->
       copies[0] = words[0];
       copies[1] = words[1];
#ifndef BROKEN_ONE_LOOK
       if
       :: number == n -> assert(copies[0] == n && copies[1] == n)
       :: else /* lost */
       fi
#else
       assert(copies[0] == n && copies[1] == n)
#endif
    :: else /* behind, or lost */
    fi
}
