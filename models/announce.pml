/* SPDX-License-Identifier: Apache-2.0 */
/* announce.pml: changes of one key, events of them that come late or never, and a reader
 * that folds what it is told.
 *
 * Changers store and remove the block, one after the other in any order, and may be
 * overtaken or die between any two steps.  Whoever finds a dead one records a gap if it
 * was counted as announcing.  The ring is long enough; that its slots are overwritten is
 * in event_ring.pml, and is the same to the reader as a gap.
 *
 *   changer   announcing++; change; event n = ++head, of the kind of the change;
 *             announcing--
 *   reader    takes all events up to head; the last one of the key: looks the block up.
 *             A gap: looks the block up, whatever else there was
 *
 *   Property  when all changers are done or dead and swept, and all events are read, the
 *             reader has what is there.
 *
 *   BROKEN_AS_RECORDED  the reader believes what the event says
 *   BROKEN_NO_GAP       nobody says that a process has died
 *   BROKEN_COUNT_LATE   a changer is counted after its change
 */
#define CHANGERS 3

bool present; /* what a lookup answers */
byte head;
byte kinds[8]; /* 1 stored, 2 removed, 3 a gap */
byte announcing[CHANGERS];
byte dead[CHANGERS];
byte ended;
byte read_up_to;
bool folded; /* what the reader has */

proctype changer(byte me; bool stored)
{
#ifndef BROKEN_COUNT_LATE
    if
    :: goto death
    :: announcing[me] = 1
    fi;
#endif
    if
    :: goto death
    :: present = stored
    fi;
#ifdef BROKEN_COUNT_LATE
    if
    :: goto death
    :: announcing[me] = 1
    fi;
#endif
    if
    :: goto death
    :: atomic { head++; kinds[head] = (stored -> 1 : 2) }
    fi;
    if
    :: goto death
    :: announcing[me] = 0
    fi;
    ended++;
    goto over;
death:
    dead[me] = 1;
    /* The sweep, by somebody else. */
    if
    :: announcing[me] == 1 ->
#ifndef BROKEN_NO_GAP
       atomic { head++; kinds[head] = 3 };
#endif
       announcing[me] = 0
    :: else
    fi;
    ended++;
over:
    skip
}

inline read_all()
{
    byte last;
    last = head;
    if
    :: last > read_up_to ->
#ifdef BROKEN_AS_RECORDED
       do
       :: read_up_to < last ->
          read_up_to++;
          if
          :: kinds[read_up_to] == 3 -> folded = present
          :: else -> folded = (kinds[read_up_to] == 1)
          fi
       :: else -> break
       od
#else
       read_up_to = last;
       folded = present
#endif
    :: else
    fi
}

active proctype reader()
{
    byte rounds;
    do
    :: rounds < 2 -> read_all(); rounds++
    :: ended == CHANGERS -> break
    od;
    read_all();
    assert(folded == present)
}

init
{
    atomic {
        run changer(0, 1);
        run changer(1, 0);
        run changer(2, 1)
    }
}
