/* SPDX-License-Identifier: Apache-2.0 */
/* prefix_links.pml: a block is linked to the one before it while a kill undoes that.
 *
 *   linker   prefix.c, link_pinned(): writes the link of the child, then counts it at the
 *            parent.  Both are pinned, so neither number gets another life meanwhile.
 *   killer   prefix.c, unlink_chain(), once after the kill of the child: takes the child
 *            off the count of the parent, then erases the link.
 *   other    a second child of the same parent, that was linked before and is killed.
 *   reuse    ckv_prefix_begin(): what a link left behind is undone before the next life.
 *
 *   Property   when all is done the parent counts exactly its living successors (K1):
 *              a number that is too large would keep it from being a leaf for ever.
 *
 *   BROKEN_SATURATES    a count of 0 is not taken below 0
 *   BROKEN_COUNT_FIRST  the linker counts before it writes the link
 *   BROKEN_NO_REUSE     a new life begins without undoing an old link
 */
#define NO_LINK 0
#define LINK    1

bit link;           /* of the child to the parent */
short count = 1;    /* successors of the parent, signed */
bit killed;          /* the child is dead */
byte done;

inline take_off()
{
    atomic {
        if
#ifdef BROKEN_SATURATES
        :: count == 0 -> skip
        :: count != 0 -> count--
#else
        :: count--
#endif
        fi
    }
}

active proctype linker()
{
#ifdef BROKEN_COUNT_FIRST
    count++;
    if
    :: killed && link == NO_LINK /* a kill that came first found no link to undo */
    :: else -> link = LINK
    fi;
#else
    link = LINK; /* the kill may have been over: reuse undoes it */
    atomic { count++ };
#endif
    done++
}

active proctype killer()
{
    killed = 1;
    if
    :: link == LINK ->
       take_off();
       link = NO_LINK
    :: link == NO_LINK
    fi;
    done++
}

active proctype other()
{
    take_off();
    done++
}

init
{
    (done == 3);
    /* The pins are gone: the number of the child gets another life. */
#ifndef BROKEN_NO_REUSE
    if
    :: link == LINK ->
       take_off();
       link = NO_LINK
    :: link == NO_LINK
    fi;
#endif
    assert(count == 0)
}
