/* SPDX-License-Identifier: Apache-2.0 */
/* lock_succession.pml: the stripe lock, its death and its successors.
 *
 * Three slots.  The process of slot 0 may die between any two steps; a new process then
 * claims the slot, under the next incarnation, and takes part.  A waiter reads the word,
 * asks whether the owner it names is alive, and only of a dead one tries to be the
 * successor: by CAS from exactly that word (T3).  A stopped process needs no model of its
 * own: it is one that the scheduler does not choose.
 *
 *   Property  there is one owner at most; and in the end the lock is free, or its owner is
 *             known to be dead, so that somebody can succeed it.
 *
 *   BROKEN_STORE           the successor stores its word instead of exchanging it
 *   BROKEN_READ_AGAIN      it exchanges what it reads after it asked
 *   BROKEN_NO_INCARNATION  the word names the slot only
 */
#define SLOTS 3
#ifdef BROKEN_NO_INCARNATION
#define WORD(slot, incarnation) ((slot) + 1)
#else
#define WORD(slot, incarnation) ((slot) + 1 + 4 * (incarnation))
#endif
#define SLOT_OF(word) (((word) - 1) % 4)

byte lock;                 /* the word; 0 is free */
byte inside;               /* the specification: how many are in the critical section */
bit held[SLOTS] = 0;       /* the slot's byte lock */
byte incarnation[SLOTS] = 0;
byte ended;

/* ckv_slot_alive(): two questions, asked one after the other. */
inline ask(word, alive)
{
    alive = (WORD(SLOT_OF(word), incarnation[SLOT_OF(word)]) == word);
    if
    :: alive -> alive = held[SLOT_OF(word)]
    :: else
    fi
}

inline maybe_die()
{
    if
    :: mortal -> atomic { inside = inside - in; held[slot] = 0; goto dead }
    :: skip
    fi
}

proctype process(byte slot; byte before; bit mortal)
{
    byte me, seen, round;
    bit alive, in;
    atomic { held[slot] == 0 && incarnation[slot] == before -> held[slot] = 1 };
    incarnation[slot]++;
    me = WORD(slot, incarnation[slot]);
    do
    :: round == 2 -> break
    :: round < 2 ->
       round++;
       maybe_die();
       atomic { seen = lock;
           if
           :: seen == 0 -> lock = me; in = 1; inside++
           :: else
           fi };
       if
       :: in
       :: else ->
          ask(seen, alive);
          if
          :: alive /* busy: another stripe */
          :: else ->
#if defined(BROKEN_STORE)
             atomic { lock = me; in = 1; inside++ }
#else
#if defined(BROKEN_READ_AGAIN)
             seen = lock;
#endif
             atomic {
                 if
                 :: lock == seen -> lock = me; in = 1; inside++
                 :: else
                 fi }
#endif
          fi
       fi;
       if
       :: in ->
          assert(inside == 1);
          maybe_die();
          assert(inside == 1);
          atomic { assert(lock == me); lock = 0; in = 0; inside-- }
       :: else
       fi
    od;
    if
    :: mortal -> held[slot] = 0 /* lived to leave in order */
    :: else                     /* still there when the end is judged */
    fi;
dead:
    ended++
}

init
{
    bit alive;
    byte word;
    atomic {
        run process(0, 0, 1);
        run process(1, 0, 0);
        run process(2, 0, 0);
        run process(0, 1, 0) /* once the slot is free again */
    };
    (ended == 4);
    word = lock;
    if
    :: word == 0
    :: else ->
       ask(word, alive);
       assert(!alive)
    fi
}
