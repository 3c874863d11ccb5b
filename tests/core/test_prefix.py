# SPDX-License-Identifier: Apache-2.0
"""eviction="prefix": chains, what the cursor may take, admission from the head."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import CHAIN, LIVE, MIB, NONE, NOT_ADMITTED, OK, PAGE, PRESENT, Engine

PREFIX = 1
BLOCKS = 4096  # of a page, in 16 MiB
GENERATION, COUNT = 0xFFF, 0xFFFFF


def key(*parts: object) -> bytes:
    return repr(parts).encode().ljust(32, b".")[:32]


def options(**more: Any) -> dict[str, Any]:
    return {"eviction": PREFIX, "expected_object_bytes": PAGE, "verify": 2, **more}


@contextmanager
def opened(core: Any, path: Path, **more: Any) -> Iterator[Engine]:
    with Engine(core, path, **options(**more)) as engine:
        yield engine


@pytest.fixture
def engine(core, volume_path):
    with opened(core, volume_path) as engine:
        assert int(engine.region.layout.entry_count) == BLOCKS
        yield engine
        assert_sound(engine)


def link(engine: Engine, entry: int) -> int | None:
    """The live parent of an entry, by the words themselves."""
    word = int(engine.region.chains[entry])
    parent = (word >> 32) - 1
    if parent < 0:
        return None
    state = int(engine.region.states[parent])
    alive = state & 7 == LIVE and (state >> 3) & GENERATION == word >> 20 & GENERATION
    return parent if alive else None


def live(engine: Engine) -> list[int]:
    count = int(engine.region.layout.entry_count)
    return [e for e in range(count) if engine.kind(e) == LIVE]


def successors(engine: Engine, entry: int) -> int:
    return int(engine.region.chains[entry]) & COUNT


def leaf_bit(engine: Engine, entry: int) -> bool:
    file = engine.volume.files[0]
    page = int(engine.region.places[entry].first_page)
    granule = page * PAGE // int(file.geometry.granule_bytes)
    return bool(int(engine.region.leaves[granule // 64]) >> granule % 64 & 1)


def assert_sound(engine: Engine) -> None:
    """Each number is that of the links, each leaf has its bit, no rings, no orphans."""
    entries = live(engine)
    links = {entry: link(engine, entry) for entry in entries}
    counts = Counter(parent for parent in links.values() if parent is not None)
    for entry in entries:
        assert successors(engine, entry) == counts[entry]
        assert counts[entry] or leaf_bit(engine, entry)
        seen = {entry}
        above = links[entry]
        while above is not None:
            assert above not in seen
            seen.add(above)
            above = links[above]
    engine.assert_clean()


def store(
    engine: Engine, keys: Sequence[bytes], parent: bytes | None = None, size: int = 100
) -> list[int]:
    return engine.put_many([(k, b"x" * size) for k in keys], CHAIN, parent)


def fill(engine: Engine, count: int, name: str = "fill") -> None:
    """Blocks that are nobody's successors, until as many were stored."""
    stored = 0
    for i in range(20 * count):
        stored += engine.put(key(name, i), b"y") == OK
        if stored == count:
            return
    raise AssertionError(f"only {stored} of {count} were admitted")


# ---- chains ------------------------------------------------------------------------


def test_a_chain_is_linked_to_its_parent_and_in_itself(engine):
    chain = [key("chain", i) for i in range(6)]
    assert engine.put(chain[0], b"x") == OK
    assert store(engine, chain[1:4], parent=chain[0]) == [OK] * 3
    assert store(engine, chain[4:], parent=chain[3]) == [OK] * 2
    entries = [int(engine.find(k).entry) for k in chain]
    assert [link(engine, e) for e in entries] == [None, *entries[:-1]]
    assert [successors(engine, e) for e in entries] == [1] * 5 + [0]
    branch = [key("branch", i) for i in range(3)]
    assert store(engine, branch, parent=chain[2]) == [OK] * 3
    assert successors(engine, entries[2]) == 2
    assert store(engine, branch, parent=chain[2]) == [PRESENT] * 3
    assert successors(engine, entries[2]) == 2


def test_a_block_that_dies_is_nobodys_successor(engine):
    chain = [key("chain", i) for i in range(4)]
    assert store(engine, chain) == [OK] * 4
    entries = [int(engine.find(k).entry) for k in chain]
    engine.remove(chain[3])
    assert [successors(engine, e) for e in entries[:3]] == [1, 1, 0]
    engine.remove(chain[1])  # from the middle: what follows has no parent any more
    assert link(engine, entries[2]) is None
    assert successors(engine, entries[0]) == 0
    assert store(engine, chain[:2]) == [PRESENT, OK]
    assert engine.longest_prefix(chain[:3], touch=True) == 3
    assert link(engine, entries[2]) == int(engine.find(chain[1]).entry)


def test_links_come_back_after_a_restart_with_the_next_touch(core, volume_path):
    chain = [key("chain", i) for i in range(5)]
    with opened(core, volume_path) as engine:
        assert store(engine, chain) == [OK] * 5
    with opened(core, volume_path) as engine:
        entries = [int(engine.find(k).entry) for k in chain]
        assert [link(engine, e) for e in entries] == [None] * 5
        assert engine.longest_prefix(chain) == 5  # asking is no access
        assert [link(engine, e) for e in entries] == [None] * 5
        assert engine.longest_prefix(chain, touch=True) == 5
        assert [link(engine, e) for e in entries] == [None, *entries[:-1]]
        assert_sound(engine)


@pytest.mark.parametrize("put_first", [True, False])
def test_contradictory_orders_make_no_ring(engine, put_first):
    a, b, c = (key("ring", i) for i in range(3))
    if put_first:
        store(engine, [a, b, a, c, b])
    else:
        for name in (a, b, c):
            engine.put(name, b"x")
    for order in ([a, b, c], [c, b, a], [b, a], [b, c, a], [a, c], [a, a], [b, b, b]):
        engine.longest_prefix(order, touch=True)
        store(engine, order)
        store(engine, order[:1], parent=order[-1])
    assert_sound(engine)


# ---- the cursor --------------------------------------------------------------------


def test_a_trunk_outlives_what_grows_on_it(engine):
    """Blocks are read in no way that would keep them: only the chain protects."""
    trunk = [key("trunk", i) for i in range(50)]
    assert store(engine, trunk) == [OK] * 50
    leaf = key("leaf")
    assert store(engine, [leaf], parent=trunk[-1]) == [OK]
    for lap in range(3):
        fill(engine, BLOCKS, f"lap {lap}")
        present = engine.longest_prefix([*trunk, leaf])
        assert engine.contains(*trunk, leaf)[:present] == [True] * present
        assert not any(engine.contains(*trunk, leaf)[present:])  # from the tail on
    assert engine.stats.chains_ignored == 0


def test_chains_are_closed_whatever_is_stored(engine):
    """At every moment the ancestors of a stored block are stored."""
    choice = random.Random(7)
    sessions: list[list[bytes]] = [[] for _ in range(60)]
    for step in range(3000):
        session = choice.choice(sessions)
        if not session or len(session) > 200:
            session[:] = [key("head", step, i) for i in range(choice.randrange(1, 9))]
        session += [key("s", step, i) for i in range(choice.randrange(1, 12))]
        held = engine.longest_prefix(session, touch=True)
        parent = session[held - 1] if held else None
        store(engine, session[held:], parent)
        if step % 500 == 499:
            for each in sessions:
                there = engine.contains(*each) if each else []
                assert there == sorted(there, reverse=True)
    stats = engine.stats
    assert stats.evictions > BLOCKS
    assert stats.chains_ignored == 0
    assert stats.density_rebuilds > 3


def test_a_run_takes_a_tail_with_what_it_hangs_on(engine):
    """Chains of small blocks make room for large ones, whole chains at a time."""
    for i in range(BLOCKS // 8):
        store(engine, [key("small", i, j) for j in range(8)])
    for i in range(40):
        assert engine.put(key("large", i), b"z" * (64 * PAGE)) == OK
    assert engine.stats.chains_ignored == 0


def test_without_leaves_the_cursor_takes_what_is_there(core, volume_path):
    """A number that is too large, everywhere: puts go on, and are counted."""
    with opened(core, volume_path) as engine:
        for i in range(BLOCKS):
            assert engine.put(key(i), b"x") == OK
        for entry in range(BLOCKS):
            engine.region.chains[entry] = 7
        for i in range(20):
            assert engine.put(key("more", i), b"x") == OK
        assert (
            engine.stats.chains_ignored == 1
        )  # what it stored is a leaf, for the next
        assert int(engine.verify().structure_faults) > 0
        engine.verify(repair=True)
        assert_sound(engine)


def test_a_pinned_leaf_stays(engine):
    assert engine.put(key("kept"), b"kept") == OK
    lease = engine.get(key("kept"))
    assert lease is not None
    fill(engine, 2 * BLOCKS)
    assert engine.read(key("kept")) == b"kept"
    assert lease.data == b"kept"
    lease.release()


@pytest.mark.parametrize("wrong", [1, -1])
def test_verify_tells_and_repairs_wrong_numbers(core, volume_path, wrong):
    with opened(core, volume_path) as engine:
        chain = [key("chain", i) for i in range(4)]
        store(engine, chain)
        entry = int(engine.find(chain[1]).entry)
        engine.region.chains[entry] = int(engine.region.chains[entry]) + wrong
        report = engine.verify()
        assert int(report.structure_faults) == (wrong > 0)  # K1
        assert int(engine.verify(repair=True).repaired) == 1
        assert successors(engine, entry) == 1
        assert_sound(engine)


# ---- admission ---------------------------------------------------------------------


def warm(engine: Engine) -> None:
    """A volume that has evicted what it holds, and knows that some keys come back."""
    for i in range(5 * BLOCKS):
        engine.put(key("cold", i), b"x")
        name = key("hot", i % 500)
        if i % 3 == 0 and engine.get_into(name, bytearray(9))[0] != OK:
            engine.put(name, b"x")


def test_a_chain_is_admitted_from_its_head(engine):
    warm(engine)
    engine.region.density.head.threshold = 64 << 16  # nothing is worth so much
    chain = [key("chain", i) for i in range(6)]
    assert store(engine, chain) == [NOT_ADMITTED] * 6
    engine.region.density.head.threshold = -(64 << 16) & 0xFFFFFFFF
    assert store(engine, chain[:2]) == [OK] * 2
    engine.region.density.head.threshold = 64 << 16
    before = engine.stats.puts_not_admitted
    assert store(engine, chain) == [PRESENT] * 2 + [NOT_ADMITTED] * 4
    assert engine.stats.puts_not_admitted == before + 4
    # What follows a refused block is refused, whatever the threshold.
    engine.region.density.head.threshold = -(64 << 16) & 0xFFFFFFFF
    assert store(engine, [key("next")], parent=chain[4]) == [NOT_ADMITTED]
    assert store(engine, [key("next")], parent=key("never heard of")) == [OK]


def test_everything_is_admitted_while_there_is_room(engine):
    warm(engine)
    engine.region.density.head.threshold = 64 << 16
    assert engine.put(key("one"), b"x") == NOT_ADMITTED
    engine.clear()
    assert engine.put(key("one"), b"x") == OK
    assert store(engine, [key("two"), key("three")]) == [OK] * 2


def test_an_overwrite_is_never_refused(engine):
    warm(engine)
    name = next(e.key for e in engine.list())
    engine.region.density.head.threshold = 64 << 16
    assert engine.put(bytes(name), b"longer than before") == OK
    assert engine.read(bytes(name)) == b"longer than before"


def test_a_hit_and_the_lookup_before_it_are_one_access(engine):
    chain = [key("chain", i) for i in range(8)]
    store(engine, chain)
    head = engine.region.density.head
    head.capacity = BLOCKS
    head.now = 10_000
    engine.longest_prefix(chain, touch=True)
    seen = int(head.now)
    assert seen == 10_008
    for name in chain:
        engine.read(name)
    engine.contains(*chain)
    engine.longest_prefix(chain)
    engine.prefetch(chain)
    assert int(head.now) == seen
    head.now = 20_000
    for name in chain:
        engine.read(name)
    assert int(head.now) == 20_008


# ---- the volume --------------------------------------------------------------------


def test_who_comes_later_takes_over_the_policy(core, volume_path):
    with opened(core, volume_path) as first:
        with Engine(core, volume_path) as second:  # the same volume object
            assert second.volume.eviction == PREFIX
        assert first.stats.eviction_prefix == 1
    with Engine(core, volume_path) as third:
        assert third.stats.eviction_prefix == 0
        assert third.region.chains == third.ffi.NULL


def test_mixed_sizes_and_removals_leave_it_sound(core):
    @settings(max_examples=15, deadline=None)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        with (
            tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            opened(core, Path(folder) / "v.cyc") as engine,
        ):
            _random_life(engine, random.Random(seed))
            assert_sound(engine)

    run()


def _random_life(engine: Engine, choice: random.Random) -> None:
    sizes = [10, PAGE, 3 * PAGE + 1, 20 * PAGE, MIB]
    for step in range(400):
        session = [key("s", choice.randrange(30), i) for i in range(40)]
        count = choice.randrange(1, 40)
        match choice.randrange(8):
            case 0:
                engine.remove(choice.choice(session))
            case 1:
                engine.longest_prefix(session[:count], touch=True)
            case 2:
                engine.put(key("one", step), b"x" * choice.choice(sizes))
            case 3 if step % 50 == 0:
                engine.clear()
            case 4:
                engine.put(session[count], b"o" * choice.choice(sizes), flags=1)
            case _:
                held = engine.longest_prefix(session[:count])
                parent = session[held - 1] if held and choice.random() < 0.9 else None
                size = choice.choice(sizes[:4])
                store(engine, session[held:count], parent, size)


def test_any_words_in_the_region_are_harmless(core, volume_path):
    """Noise in the areas of the policy: no signal, no endless call, no wrong bytes."""
    choice = random.Random(1)
    with opened(core, volume_path) as engine:
        region, ffi = engine.region, engine.ffi
        for i in range(300):
            store(engine, [key("c", i, j) for j in range(16)])
        for _ in range(40):
            for _ in range(200):
                word = choice.choice([0, NONE, 2**64 - 1, choice.getrandbits(64)])
                region.chains[choice.randrange(BLOCKS)] = word
                region.lives[choice.randrange(BLOCKS)] = choice.getrandbits(64)
                region.leaves[choice.randrange(BLOCKS // 64)] = word
            begin = ffi.cast("uint64_t *", region.density.head)
            begin[choice.randrange(16)] = choice.getrandbits(64)
            scores = choice.randrange(4000)
            region.density.scores[scores] = choice.getrandbits(32)
            session = [key("c", choice.randrange(300), j) for j in range(16)]
            engine.longest_prefix(session, touch=True)
            for status in store(engine, session):
                assert status in (OK, PRESENT, NOT_ADMITTED)
            for name in session:
                assert engine.read(name) in (None, b"x" * 100)
            engine.remove(session[3])
        engine.verify(repair=True)
        assert int(engine.verify().structure_faults) == 0


# ---- what it is for ----------------------------------------------------------------


def conversations(seed: int, requests: int) -> Iterator[list[bytes]]:
    """Prompts in turns: each continues one of those that are going on, or begins one.

    Of the new ones most end at once; those that go on are likely to go on again.
    """
    choice = random.Random(seed)
    alive: list[tuple[list[bytes], int]] = []
    for number in range(requests):
        going_on = alive and choice.random() < 0.5
        at = int(min(choice.expovariate(1 / 40), len(alive) - 1)) if going_on else -1
        prompt, turn = alive.pop(-1 - at) if going_on else ([key("system")], 0)
        grown = [key(number, i) for i in range(choice.randrange(2, 30))]
        prompt = [*prompt, *grown]
        if choice.random() < (0.34 if turn == 0 else 0.7) and len(prompt) < 300:
            alive.append((prompt, turn + 1))
        yield prompt


def usable(core: Any, path: Path, requests: list[list[bytes]], **more: Any) -> float:
    """Share of the blocks asked for that were found in front of their prompt."""
    with Engine(core, path, expected_object_bytes=PAGE, verify=2, **more) as engine:
        found = asked = 0
        for prompt in requests:
            held = engine.longest_prefix(prompt, touch=True)
            found, asked = found + held, asked + len(prompt)
            store(engine, prompt[held:], prompt[held - 1] if held else None)
        assert engine.stats.evictions > BLOCKS
    return found / asked


def test_conversations_are_kept_as_well_as_by_the_clock(core, tmp_path):
    requests = list(conversations(5, 3000))
    clock = usable(core, tmp_path / "clock.cyc", requests)
    prefix = usable(core, tmp_path / "prefix.cyc", requests, eviction=PREFIX)
    assert prefix > clock - 0.005


def test_blocks_without_chains_are_kept_as_well_as_by_the_clock(core, tmp_path):
    choice = random.Random(9)
    requests = [[key(int(20_000 ** choice.random()))] for _ in range(60_000)]
    clock = usable(core, tmp_path / "clock.cyc", requests)
    prefix = usable(core, tmp_path / "prefix.cyc", requests, eviction=PREFIX)
    assert prefix > clock


def test_more_blocks_than_the_table_has_numbers(core, volume_path):
    """Pages are left and numbers are not: leaves give theirs."""
    with Engine(core, volume_path, eviction=PREFIX, verify=2) as engine:  # 64 KiB each
        for i in range(200):
            statuses = store(engine, [key("s", i, j) for j in range(5)])
            assert set(statuses) <= {OK, NOT_ADMITTED}
        assert engine.stats.entries_exhausted > 0
        assert engine.stats.chains_ignored == 0
        assert_sound(engine)
