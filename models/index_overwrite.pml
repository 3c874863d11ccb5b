/* SPDX-License-Identifier: Apache-2.0 */
/* index_overwrite.pml: a lookup against overwrites and a remove of the same key.
 *
 * Entry 1 is stored and its put has returned.  Two writers overwrite it at the same time
 * with entries 2 and 3, and a reader looks the key up; with -DREMOVER the second writer
 * is a process that removes the key.  Two buckets of two slots; a slot word is an entry
 * number; sequence n belongs to whoever drew it.
 *
 *   writer   RESERVED; CAS of an empty or stale slot; LIVE; versions + 1; find the newest;
 *            kill the others: CAS of the state, CAS of the slot to empty, version + 1
 *   reader   versions; both buckets; when nothing was found: versions again (I3)
 *
 *   Property  a lookup misses only after a remove began; without one exactly one entry is
 *             left in the end, and it is the newest.
 *
 *   BROKEN_NO_SECOND_LOOK  the reader does not look at the versions again
 *   BROKEN_KILL_FIRST      the writer moves the versions after it has killed the old entry
 */
#define SLOTS 4 /* 0, 1: bucket 0; 2, 3: bucket 1 */
#define BUCKET(slot) ((slot) / 2)

byte slots[SLOTS] = 0;
byte version[2] = 0;
bit live[4] = 0;
bit reserved[4] = 0;
byte sequence_of[4] = 0;
byte sequence = 1;
bit removing;
byte ended;

init
{
    atomic {
        live[1] = 1;
        sequence_of[1] = 1;
        slots[2] = 1;
        run writer(2);
        run reader();
#ifdef REMOVER
        run remover();
#else
        run writer(3);
#endif
    };
#ifndef REMOVER
    (ended == 2);
    assert(live[1] + live[2] + live[3] == 1);
    assert((live[2] && sequence_of[2] == 3) || (live[3] && sequence_of[3] == 3))
#endif
}

inline kill(victim, at)
{
    if
    :: atomic { live[victim] -> live[victim] = 0 }; /* E1 */
       atomic { /* the CAS fails when somebody took the stale slot */
           if
           :: slots[at] == victim -> slots[at] = 0; erased = 1
           :: else -> erased = 0
           fi
       };
       if
       :: erased -> version[BUCKET(at)]++
       :: else
       fi
    :: else
    fi
}

#define STALE(slot) \
    (slots[slot] == 0 || (!live[slots[slot]] && !reserved[slots[slot]]))

inline insert(bucket)
{
    do
    :: atomic { STALE(2 * bucket) -> slots[2 * bucket] = mine }; break
    :: atomic { STALE(2 * bucket + 1) -> slots[2 * bucket + 1] = mine }; break
    od
}

inline keep_newest()
{
    newest = 0;
    at = 0;
    do
    :: at == SLOTS -> break
    :: at < SLOTS ->
       word = slots[at];
       if
       :: word != 0 && live[word] && sequence_of[word] > newest ->
          newest = sequence_of[word]
       :: else
       fi;
       at++
    od;
    at = 0;
    do
    :: at == SLOTS -> break
    :: at < SLOTS ->
       word = slots[at];
       if
       :: word != 0 && live[word] && sequence_of[word] < newest -> kill(word, at)
       :: else
       fi;
       at++
    od
}

proctype writer(byte mine)
{
    byte at, word, newest, chosen;
    bit erased;
    atomic { sequence++; sequence_of[mine] = sequence; reserved[mine] = 1 };
    if
    :: chosen = 0
    :: chosen = 1
    fi;
    insert(chosen);
    atomic { live[mine] = 1; reserved[mine] = 0 }; /* one word */
#ifdef BROKEN_KILL_FIRST
    keep_newest();
    version[0]++;
    version[1]++;
#else
    version[0]++;
    version[1]++;
    keep_newest();
#endif
    ended++
}

proctype reader()
{
    byte before[2];
    byte at, word;
    bit hit;
again:
    before[0] = version[0];
    before[1] = version[1];
    at = 0;
    do
    :: at == SLOTS -> break
    :: at < SLOTS ->
       word = slots[at];
       if
       :: word != 0 && live[word] -> hit = 1
       :: else
       fi;
       at++
    od;
    if
    :: hit
    :: else ->
#ifndef BROKEN_NO_SECOND_LOOK
       if
       :: before[0] != version[0] || before[1] != version[1] -> goto again
       :: else
       fi;
#endif
       assert(removing) /* a miss */
    fi
}

#ifdef REMOVER
proctype remover()
{
    byte at, word;
    bit erased;
    removing = 1;
    do
    :: at == SLOTS -> break
    :: at < SLOTS ->
       word = slots[at];
       if
       :: word != 0 && live[word] -> kill(word, at)
       :: else
       fi;
       at++
    od
}
#endif
