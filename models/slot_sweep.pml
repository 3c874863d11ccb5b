/* SPDX-License-Identifier: Apache-2.0 */
/* slot_sweep.pml: one slot, its bit in one mask, owners that die, and sweepers.
 *
 *   owner     claims the slot by its byte lock, sweeps it if the one before died, pins,
 *             unpins, leaves in order; or dies between any two steps, which frees the byte
 *             and leaves the bit
 *   sweeper   two threads of a third process: meet the bit, take the byte lock without
 *             waiting, sweep, unlock
 *
 *   Property  no bit of a live pin is ever cleared by somebody else; and a slot that was
 *             left in order has no bit.
 *
 *   BROKEN_ASK_ONLY      the sweeper asks whether the owner lives, and clears without
 *                        holding the byte lock
 *   BROKEN_SHARED_LOCK   the two sweepers share one lock owner and no mutex (a record
 *                        lock is granted again to the description that has it)
 *   BROKEN_SWEEP_LATE    a new owner pins first and sweeps afterwards
 */
#define FREE     0
#define SWEEPERS 9

byte byte_owner = FREE; /* who has the byte lock */
bit unswept;
bit mask;
byte pinned;  /* the owner whose pin is live; the specification, not a variable of ours */
bit mutex;    /* of the sweeping process */

active proctype monitor()
{
    assert(pinned == 0 || mask);                       /* at any moment */
    assert(byte_owner != FREE || unswept || mask == 0) /* S2 */
}

inline die()
{
    atomic { pinned = 0; byte_owner = FREE; goto dead }
}

inline maybe_die()
{
    if
    :: die()
    :: skip
    fi
}

proctype owner(byte self)
{
    byte round;
    atomic { byte_owner == FREE -> byte_owner = self };
    maybe_die();
#ifndef BROKEN_SWEEP_LATE
    if
    :: unswept -> mask = 0; maybe_die()
    :: else
    fi;
#endif
    unswept = 1;
    maybe_die();
    do
    :: round == 2 -> break
    :: round < 2 ->
       round++;
       mask = 1;      /* pin.c sets the bit, then looks at the state: */
       pinned = self; /* from here on the pin counts */
       maybe_die();
#ifdef BROKEN_SWEEP_LATE
       if
       :: round == 1 -> mask = 0
       :: else
       fi;
#endif
       pinned = 0;
       maybe_die();
       mask = 0;
       maybe_die()
    od;
    unswept = 0; /* left in order */
    maybe_die();
    byte_owner = FREE;
dead:
    skip
}

proctype sweeper()
{
    bit got;
    if
    :: mask == 0
    :: mask == 1 ->
#if defined(BROKEN_ASK_ONLY)
       if
       :: byte_owner == FREE -> mask = 0
       :: else
       fi
#else
#ifndef BROKEN_SHARED_LOCK
       atomic { mutex == 0 -> mutex = 1 };
#endif
       atomic {
           if
           :: byte_owner == FREE -> byte_owner = SWEEPERS; got = 1
#ifdef BROKEN_SHARED_LOCK
           :: byte_owner == SWEEPERS -> got = 1
#endif
           :: else -> got = 0 /* stepped over */
           fi
       };
       if
       :: got ->
          if
          :: unswept -> mask = 0; unswept = 0
          :: else
          fi;
          byte_owner = FREE
       :: else
       fi;
       mutex = 0
#endif
    fi
}

init
{
    atomic {
        run owner(1);
        run owner(2);
        run owner(3);
        run sweeper();
        run sweeper()
    }
}
