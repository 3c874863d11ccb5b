/* SPDX-License-Identifier: Apache-2.0 */
/* index_publish.pml: a put that dies at any step, and a removal of its key afterwards.
 *
 * One bucket of two slots, a slot word is an entry number.  A writer stores key A as
 * entry 1 and may die before each of its steps; another stores key B as entry 2.  When
 * the first has ended in either way, somebody removes key A.
 *
 *   writer   RESERVED; CAS of an empty or stale slot; record; LIVE
 *   remover  kills what is LIVE; sweeps what is RESERVED by the dead and has a record
 *
 *   Property  when the removal has returned, no record of key A is left that a rebuild
 *             would believe (E4), whether the put died or not; key B can be found.
 *
 *   BROKEN_RECORD_FIRST    the record is written before the index leads to the entry
 *   BROKEN_LIVE_FIRST      the same, and the entry becomes LIVE before that
 *   BROKEN_NO_STRIKE       who takes the slot of the dead does not strike its record
 *   BROKEN_RESERVED_STALE  the slot of an entry that is not LIVE yet is anybody's
 */
#define SLOTS 2

mtype = { FREE, RESERVED, LIVE, DEAD };

byte slots[SLOTS] = 0;
mtype state[3] = FREE;
bit record[3] = 0;
bit ended[3] = 0, died = 0;

init
{
    atomic { run writer(1); run writer(2); run remover() };
    (ended[2]);
    assert(slots[0] == 2 || slots[1] == 2)
}

#ifdef BROKEN_RESERVED_STALE
#define HELD(entry) (state[entry] == LIVE)
#else
#define HELD(entry) (state[entry] == LIVE || state[entry] == RESERVED)
#endif
#define dead(entry) (entry == 1 && died)

/* The record is struck before the entry is DEAD (E2). */
inline sweep()
{
    record[1] = 0;
    state[1] = DEAD
}

inline insert()
{
    do
    :: atomic { !HELD(slots[0]) -> slots[0] = mine }; break
    :: atomic { !HELD(slots[1]) -> slots[1] = mine }; break
    :: dead(1) && state[1] == RESERVED ->
#ifdef BROKEN_NO_STRIKE
       state[1] = DEAD
#else
       sweep()
#endif
    od
}

#define STEP(what)                            \
    if                                        \
    :: mine == 1 -> died = 1; goto over       \
    :: what                                   \
    fi

proctype writer(byte mine)
{
    state[mine] = RESERVED;
#ifdef BROKEN_LIVE_FIRST
    STEP(record[mine] = 1);
    STEP(state[mine] = LIVE);
    STEP(skip); insert();
#else
#ifdef BROKEN_RECORD_FIRST
    STEP(record[mine] = 1);
    STEP(skip); insert();
#else
    STEP(skip); insert();
    STEP(record[mine] = 1);
#endif
    STEP(state[mine] = LIVE);
#endif
over:
    ended[mine] = 1
}

proctype remover()
{
    byte at;
    (ended[1]);
    do
    :: at == SLOTS -> break
    :: at < SLOTS ->
       if
       :: slots[at] == 1 && (state[1] == LIVE || (dead(1) && record[1])) -> sweep()
       :: else
       fi;
       at++
    od;
    assert(!record[1])
}
