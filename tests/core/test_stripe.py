# SPDX-License-Identifier: Apache-2.0
"""The clock in place against a Python model; borders; choice of stripes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from os_faults import OsTable

from models import (
    BUSY,
    DEAD,
    FREE,
    GIB,
    LIVE,
    MIB,
    MISS,
    NO_RUN,
    NONE,
    OK,
    PAGE,
    PRESENT,
    RESERVED,
    Engine,
    EngineError,
    Gclock,
    Ring,
    pattern,
    permutation,
    zipf,
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder of its own for each example of hypothesis."""
    parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
    path = tempfile.mkdtemp(prefix="ckv-test-", dir=parent)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def sparse_engine(core, path: Path, capacity: int, **options) -> Iterator[Engine]:
    """A volume whose data area takes no room until it is written."""

    def allocate(fd: int, offset: int, length: int) -> int:
        if os.fstat(fd).st_size < offset + length:
            os.ftruncate(fd, offset + length)
        return 0

    def file_system(fd: int, result) -> int:
        status = table.native.file_system(fd, result)
        result.free_bytes = 1 << 50
        return status

    with OsTable(core) as table:
        table.replace("allocate", allocate)
        table.replace("file_system", file_system)
        engine = Engine(core, path, capacity, allow_sparse=True, **options)
    with engine:
        yield engine


@functools.cache
def crc_of_zeros(core_lib, length: int) -> int:
    return int(core_lib.ckv_crc32c(0, bytes(length), length))


class Machine:
    """One stripe of a real volume, and its model; all data is zeros."""

    def __init__(self, engine: Engine, *, stripe: int = 0) -> None:
        self.engine, self.lib = engine, engine.lib
        self.file = engine.ffi.addressof(engine.volume.files, 0)
        geometry = self.file.geometry
        pages = geometry.stripe_bytes // PAGE
        self.shared = engine.region.stripes[stripe]
        self.ring = Ring(
            stripe * pages,
            (stripe + 1) * pages,
            stripe * geometry.stripe_entries,
            geometry.stripe_entries,
        )
        self.names = itertools.count()
        self.flying: list = []  # extents that are reserved

    # -- steps; numbers choose among what is there

    def reserve(self, pages: int):
        before = self.counters()
        status, extent = self.engine.reserve_pages(pages)
        hole = extent.first_page if status == OK and extent.hole else None
        before_holes = list(self.ring.holes)
        expected = self.ring.reserve(pages, hole)
        if expected is None:
            assert status == NO_RUN
            return None
        assert status == OK
        assert extent.first_page == expected.first, before_holes
        assert bool(extent.hole) == expected.hole
        assert extent.entry == expected.number
        assert extent.pages == pages
        after = self.counters()
        assert after["evictions"] - before["evictions"] == len(expected.evicted)
        assert after["holes_filled"] - before["holes_filled"] == expected.hole
        # C12: however large the volume is
        assert self.ring.looked <= 8 * (LOOKS + pages)
        self.flying.append(extent)
        return extent

    def publish(self, which: int) -> None:
        if self.flying:
            extent = self.flying.pop(which % len(self.flying))
            model = self.ring.extents[extent.entry]
            key = next(self.names).to_bytes(32, "little")
            length = model.pages * PAGE
            crc = crc_of_zeros(self.lib, length)
            assert self.engine.publish(key, extent, length, crc)
            model.kind, model.key = LIVE, key

    def abort(self, which: int) -> None:
        if self.flying:
            extent = self.flying.pop(which % len(self.flying))
            self.lib.ckv_entry_abort(self.engine.volume, extent.entry)
            self.ring.extents[extent.entry].kind = DEAD

    def pick(self, which: int, *, kind: int = LIVE, pinned: bool | None = None):
        numbers = [
            number
            for _, number in self.ring.linked
            if self.ring.extents[number].kind == kind
            and pinned in (None, self.ring.extents[number].pins > 0)
        ]
        return numbers[which % len(numbers)] if numbers else None

    def remove(self, which: int) -> None:
        number = self.pick(which)
        if number is not None:
            state = self.engine.region.states[number]
            reason = self.lib.CKV_KILL_REMOVE
            assert self.lib.ckv_entry_kill(self.engine.volume, number, state, reason)
            self.ring.extents[number].kind = DEAD

    def hit(self, which: int, amount: int = 1) -> None:
        number = self.pick(which)
        if number is not None:
            self.lib.ckv_entry_heat(self.engine.volume, number, amount)
            extent = self.ring.extents[number]
            extent.heat = min(2, extent.heat + amount)

    def pin(self, which: int) -> None:
        number = self.pick(which)
        if number is not None:
            state = self.engine.region.states[number]
            assert self.lib.ckv_pin(self.engine.volume, number, state)
            self.ring.extents[number].pins += 1

    def unpin(self, which: int) -> None:
        number = self.pick(which, kind=which % 2 * 2 + 2, pinned=True)
        if number is not None:
            self.lib.ckv_unpin(self.engine.volume, number)
            self.ring.extents[number].pins -= 1

    def put(self, pages: int) -> None:
        if self.reserve(pages) is not None:
            self.publish(-1)

    # -- what must hold at any time

    def counters(self) -> dict[str, int]:
        counters = self.engine.volume.counters
        return {
            name: int(counters[getattr(self.lib, f"CKV_COUNTER_{name}")])
            for name in ("evictions", "holes_filled", "entries_exhausted")
        }

    def map_of_pages(self) -> list[tuple[int, int]]:
        found, at, volume = [], self.ring.begin, self.engine.volume
        while True:
            number = self.lib.ckv_stripe_next(volume, self.file, at, self.ring.end)
            if number == NONE:
                return found
            first = int(self.engine.region.places[number].first_page)
            found.append((first, int(number)))
            at = first + 1

    def check(self) -> None:
        ring, region = self.ring, self.engine.region
        assert self.map_of_pages() == ring.linked
        assert self.shared.cursor_page == ring.cursor
        assert self.shared.lock == 0
        kinds = {FREE: 0, LIVE: 0, RESERVED: 0, DEAD: 0}
        for i in range(ring.numbers):
            number = ring.first_number + i
            kind = self.engine.kind(number)
            extent = ring.extents.get(number)
            kinds[kind] += 1
            assert kind == (FREE if extent is None else extent.kind)
            assert (region.masks[number] != 0) == (
                extent is not None and extent.pins > 0
            )
        dead = [e.pages for e in ring.extents.values() if e.kind == DEAD]
        assert region.paths[0].doomed_pages == sum(dead)
        end = ring.begin
        occupied = []
        for first, number in ring.linked:
            extent = ring.extents[number]
            assert region.places[number].pages == extent.pages
            if extent.kind == LIVE:
                assert region.heats[number] == extent.heat
            if extent.holds:
                assert first >= end, "an extent in use was given away"
                end = extent.end
                occupied.append((first, extent.end))
        assert end <= ring.end
        holes = sorted(
            (hole.first_page, hole.pages)
            for hole in self.shared.holes[0 : self.shared.hole_count]
        )
        assert holes == sorted(ring.holes)
        places = sorted(occupied + [(h[0], h[0] + h[1]) for h in holes])
        for (_, one_end), (other, _) in itertools.pairwise(places):
            assert one_end <= other, "a hole where something lies"

    def end(self) -> None:
        while self.flying:
            self.abort(0)
        for number, extent in self.ring.extents.items():
            while extent.pins:
                self.lib.ckv_unpin(self.engine.volume, number)
                extent.pins -= 1
        live = [e for e in self.ring.extents.values() if e.kind == LIVE]
        assert self.engine.count() == len(live)
        assert self.engine.assert_clean() == len(live)
        assert self.engine.contains(*[e.key for e in live]) == [True] * len(live)


LOOKS = 256 + 1024 + 1024  # of one search: warm, forced, and for a number

SIZES = st.one_of(
    st.sampled_from([1, 2, 3, 16, 64, 100, 250, 256, 512, 1000, 2000, 4095, 4096]),
    st.integers(1, 4096),
    st.integers(100, 400),
)
WHICH = st.integers(0, 1000)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), SIZES),
        st.tuples(st.just("put"), st.integers(100, 400)),
        st.tuples(st.just("put"), st.integers(1, 60)),
        st.tuples(st.just("put_several"), st.integers(1, 40)),
        st.tuples(st.just("reserve"), SIZES),
        st.tuples(st.just("publish"), WHICH),
        st.tuples(st.just("abort"), WHICH),
        st.tuples(st.just("remove"), WHICH),
        st.tuples(st.just("remove"), WHICH),
        st.tuples(st.just("hit"), WHICH),
        st.tuples(st.just("touch"), WHICH),
        st.tuples(st.just("heat_all"), st.integers(1, 2)),
        st.tuples(st.just("pin"), WHICH),
        st.tuples(st.just("unpin"), WHICH),
    ),
    max_size=60,
)


def walk(machine: Machine, steps, *, every: int = 1) -> None:
    for i, (name, value) in enumerate(steps):
        if name == "touch":
            machine.hit(value, 2)
        elif name == "heat_all":
            for n in range(len(machine.ring.linked)):
                machine.hit(n, value)
        elif name == "put_several":
            for _ in range(6):
                machine.put(value)
        else:
            getattr(machine, name)(value)
        if i % every == 0:
            machine.check()
    machine.check()
    machine.end()


@pytest.mark.parametrize("granule", [PAGE, 64 * 1024, MIB])
def test_one_stripe_agrees_with_the_model(core, granule):
    @settings(max_examples=60)
    @given(STEPS)
    def run(steps):
        with (
            folder() as where,
            Engine(core, where / "kv", expected_object_bytes=granule) as engine,
        ):
            walk(Machine(engine), steps)

    run()


@pytest.mark.parametrize("granule", [PAGE, 64 * 1024])
def test_long_runs_agree_with_the_model(core, volume_path, rng, granule):
    with Engine(core, volume_path, expected_object_bytes=granule) as engine:
        machine = Machine(engine)
        steps = []
        for _ in range(1500):
            draw = rng.random()
            if draw < 0.45:
                size = rng.choice([1, 5, 16, 30, 30, 64, 128, 300, 700, 2500])
                steps.append(("put", size))
            elif draw < 0.55:
                steps.append(("reserve", rng.randrange(1, 100)))
            elif draw < 0.65:
                steps.append((rng.choice(["publish", "abort"]), rng.randrange(1000)))
            elif draw < 0.75:
                steps.append(("remove", rng.randrange(1000)))
            elif draw < 0.92:
                steps.append((rng.choice(["hit", "touch"]), rng.randrange(1000)))
            else:
                steps.append((rng.choice(["pin", "unpin"]), rng.randrange(1000)))
        walk(machine, steps, every=25)
        assert machine.ring.linked


# ---- single properties --------------------------------------------------------------


def name(number: int) -> bytes:
    return number.to_bytes(32, "little")


def test_nothing_is_evicted_when_no_run_is_found(core, volume_path):
    with Engine(core, volume_path, expected_object_bytes=64 * 1024) as engine:
        keys = [name(i) for i in range(16)]
        for i, key in enumerate(keys):
            assert engine.put(key, pattern(i, MIB)) == OK
        held = [engine.get(key) for key in keys[::2]]
        before = engine.stats.evictions
        assert engine.put(name(99), bytes(2 * MIB)) == NO_RUN
        assert engine.put(name(98), bytes(16 * MIB)) == NO_RUN
        assert engine.stats.evictions == before
        assert all(engine.contains(*keys))
        assert engine.stats.puts_no_run == 2
        assert engine.put(name(97), bytes(MIB)) == OK
        for i, lease in zip(range(0, 16, 2), held, strict=True):
            assert lease.data == pattern(i, MIB)
            lease.release()
        engine.assert_clean()


def test_no_hole_is_left_inside_a_block(core, volume_path):
    """A run over the old cursor: a hole behind that was kept, and given away again."""
    with Engine(core, volume_path, expected_object_bytes=PAGE) as engine:
        for i in range(40):
            assert engine.put(name(i), pattern(i, 100 * PAGE)) == OK
        assert engine.put(b"end", bytes(96 * PAGE)) == OK  # the cursor is at 0 again
        for i in range(30):
            assert engine.put(name(50 + i), bytes(100 * PAGE)) == OK
        assert engine.put(b"leaves 50 pages", bytes(150 * PAGE)) == OK
        third = engine.get(name(32))  # what comes next is in use: a hole before it
        assert engine.put(b"behind it", bytes(100 * PAGE)) == OK
        assert engine.stats.holes == 1
        third.release()
        large = pattern(7, 3900 * PAGE)
        assert engine.put(b"large", large) == OK
        assert engine.read(b"large") == large
        for i in range(6):
            assert engine.put(b"small %d" % i, bytes(8 * PAGE)) == OK
        assert engine.read(b"large") in (None, large)
        engine.assert_clean()


def test_new_blocks_are_not_the_first_to_go(core, volume_path):  # C8
    with Engine(core, volume_path, expected_object_bytes=64 * 1024) as engine:
        old = [b"a%d" % i for i in range(16)]
        for key in old:
            assert engine.put(key, bytes(MIB)) == OK
        for key in old:
            assert engine.read(key) is not None
        new = [b"b%d" % i for i in range(4)]
        for key in new:
            assert engine.put(key, bytes(MIB)) == OK
        assert all(engine.contains(*new))
        before = set(old) & {k for k in old if engine.contains(k)[0]}
        for i in range(4):
            assert engine.put(b"c%d" % i, bytes(MIB)) == OK
        assert all(engine.contains(*new))
        after = {k for k in old if engine.contains(k)[0]}
        assert len(before - after) == 4
        engine.assert_clean()


@pytest.mark.parametrize("stripes", [1, 3])
def test_numbers_run_out_before_the_bytes_do(core, volume_path, stripes):  # A7, C14
    """A volume laid out for 1 MiB gets blocks of a page."""
    with Engine(
        core,
        volume_path,
        stripe_count=stripes,
        expected_object_bytes=2 * MIB,
    ) as engine:
        numbers = int(engine.info.paths[0].entry_count)
        assert numbers == 15 + (stripes == 1)
        payload = {}
        for i in range(10 * numbers):
            payload[i] = pattern(i, PAGE - i % 3)
            assert engine.put(name(i), payload[i]) == OK
            assert engine.read(name(i)) == payload[i]
        stats = engine.stats
        assert stats.entries == numbers
        assert stats.entries_exhausted > 0
        assert stats.evictions == 9 * numbers
        # A large one still finds its run, and takes one number.
        assert engine.put(b"large", pattern(1, 3 * MIB)) == OK
        assert engine.read(b"large") == pattern(1, 3 * MIB)
        alive = [i for i in payload if engine.contains(name(i))[0]]
        assert len(alive) < numbers
        assert all(engine.read(name(i)) == payload[i] for i in alive)
        engine.assert_clean()


def test_numbers_run_out_while_all_are_pinned(core, volume_path):
    with Engine(core, volume_path, expected_object_bytes=2 * MIB) as engine:
        for i in range(16):
            assert engine.put(name(i), b"x") == OK
        held = [engine.get(name(i)) for i in range(16)]
        assert engine.put(b"more", b"y") == NO_RUN
        assert engine.stats.evictions == 0
        held.pop().release()
        assert engine.put(b"more", b"y") == NO_RUN or engine.contains(b"more")[0]
        for lease in held:
            lease.release()
        assert engine.put(b"more still", b"y") in (OK, PRESENT)
        engine.assert_clean()


@pytest.mark.parametrize("stripes", [1, 2, 4])
def test_blocks_as_large_as_a_stripe(core, volume_path, stripes):  # C14
    with Engine(core, volume_path, stripe_count=stripes) as engine:
        largest = int(engine.info.payload_max_bytes)
        assert largest == 16 * MIB // stripes
        for i in range(3 * stripes):
            data = pattern(i, largest - i % 2)
            assert engine.put(name(i), data) == OK
            assert engine.read(name(i)) == data
            assert engine.put(name(1000 + i), b"small") == OK
        header = bytes(100)
        assert engine.put(name(500), bytes(largest - 100), header=header) == OK
        count, evictions = engine.count(), engine.stats.evictions
        for excess in (bytes(largest + 1), bytes(largest)):
            with pytest.raises(EngineError) as caught:
                engine.put(name(501), excess, header=b"h")
            assert caught.value.status == engine.lib.CKV_E_TOO_LARGE
        assert (engine.count(), engine.stats.evictions) == (count, evictions)
        engine.assert_clean()


# ---- borders of 1 GiB ---------------------------------------------------------------


def check_borders(engine: Engine, extent, file) -> None:
    pages = file.geometry.stripe_bytes // PAGE
    first, last = extent.first_page, extent.first_page + extent.pages - 1
    assert first // pages == last // pages, "crosses a stripe"
    assert first // (GIB // PAGE) == last // (GIB // PAGE), "crosses 1 GiB"
    assert last < file.geometry.data_bytes // PAGE
    stripe = extent.entry // file.geometry.stripe_entries
    assert first // pages == stripe, "a number of another stripe"
    shared = engine.region.stripes[stripe]
    assert stripe * pages <= shared.cursor_page < (stripe + 1) * pages


@pytest.mark.parametrize("capacity", [5 * GIB, 10_000_000_000])
def test_no_extent_crosses_a_border(core, volume_path, rng, capacity):
    """Stripes that are no multiple of 1 GiB have pieces too small for a put."""
    with sparse_engine(
        core,
        volume_path,
        capacity,
        stripe_count=4,
        expected_object_bytes=MIB,
        event_capacity=64,
    ) as engine:
        file = engine.volume.files[0]
        pages = file.geometry.stripe_bytes // PAGE
        largest = int(engine.info.payload_max_bytes) // PAGE
        chunk = GIB // PAGE
        for _ in range(400):
            for s in range(4):
                shared = engine.region.stripes[s]
                shared.cursor_page = s * pages + rng.randrange(pages)
                shared.virtual_time = rng.randrange(1 << 30)
                near = [b for b in range(chunk, 4 * pages, chunk) if b // pages == s]
                if near and rng.random() < 0.5:
                    shared.cursor_page = max(
                        s * pages, min(rng.choice(near) - rng.randrange(9), pages * 4)
                    )
            size = rng.choice([rng.randrange(1, largest + 1), largest, 1, 2, 77_000])
            status, extent = engine.reserve_pages(min(size, largest))
            assert status in (OK, NO_RUN)
            if status == OK:
                check_borders(engine, extent, file)
                engine.lib.ckv_entry_abort(engine.volume, extent.entry)
        engine.assert_clean()


def test_blocks_around_powers_of_two(core, volume_path):  # B14
    """Offsets of 31 to 36 bits and more; read back here and from the file."""
    straddled = [31, 32, 33, 36]
    with sparse_engine(
        core,
        volume_path,
        70 * GIB,
        expected_object_bytes=MIB,
        stripe_count=1,
        event_capacity=64,
    ) as engine:
        offset = int(engine.info.paths[0].data_offset_bytes)
        shared = engine.region.stripes[0]
        stored = {}
        for power in straddled:
            # So that the block lies over 2^power of the file, and of the data area as
            # near as the border of 1 GiB allows.
            for base in ((1 << power) - offset, 1 << power):
                for before in (1, 128, 255):
                    shared.cursor_page = base // PAGE - before
                    shared.hole_count = 0
                    key = b"%d %d %d" % (power, base, before)
                    stored[key] = pattern(base + before, MIB)
                    assert engine.put(key, stored[key]) == OK
        assert len(stored) == 24
        infos = {bytes(info.key): info for info in engine.list()}
        crossing = 0
        for key, data in stored.items():
            if not engine.contains(key)[0]:
                continue  # its neighbour took the place
            assert engine.read(key) == data
            info = infos[engine.stored_key(key)]
            at = int(info.offset_bytes)
            with volume_path.open("rb") as file:
                file.seek(at)
                assert file.read(MIB) == data
            crossing += any(at < 1 << p < at + MIB for p in straddled)
        assert crossing >= len(straddled)
        engine.assert_clean()


def test_the_last_pages_of_the_largest_volume(core, tmp_path):
    """2^31 pages: the page numbers themselves reach their limit."""
    lib, ffi = core.lib, core.ffi
    geometry, error = ffi.new("struct ckv_geometry *"), ffi.new("struct ckv_error *")
    assert lib.ckv_geometry_plan(8 << 40, 1, MIB, geometry, error) == OK
    last = (8 << 40) // PAGE
    assert lib.ckv_geometry_extent_valid(geometry, last - 1, 1)
    assert lib.ckv_geometry_extent_valid(geometry, last - GIB // PAGE, GIB // PAGE)
    assert not lib.ckv_geometry_extent_valid(geometry, last, 1)
    assert not lib.ckv_geometry_extent_valid(geometry, last - 1, 2)
    # The search itself, over a region whose untouched pages cost nothing.
    layout = ffi.new("struct ckv_region_layout *")
    assert lib.ckv_region_layout_plan(geometry, 1, 64, 0, layout, error) == OK
    with (tmp_path / "region").open("wb+") as file:
        file.truncate(layout.region_bytes)

        memory = mmap.mmap(file.fileno(), 0)
        base = ffi.from_buffer(memory)
        volume = ffi.new("struct ckv_volume *")
        volume.file_count = 1
        volume.files[0].geometry = geometry[0]
        volume.files[0].present = True
        volume.files[0].data_fd = -1
        region = volume.region
        region.layout = layout[0]
        for field in [
            "header",
            "slots",
            "namespaces",
            "paths",
            "stripes",
            "hints",
            "events",
            "buckets",
            "states",
            "masks",
            "places",
            "marks",
            "links",
            "page_map",
            "heats",
            "owners",
        ]:
            offset = 0 if field == "header" else getattr(layout, f"{field}_offset")
            kind = ffi.typeof(getattr(region, field))
            setattr(region, field, ffi.cast(kind, base + offset))
        volume.counters = region.slots[0].counters
        volume.incarnation, volume.last_stripe = 1, NONE
        volume.owner_word = lib.ckv_owner_word(0, 1)
        extent, deadline = ffi.new("struct ckv_extent *"), ffi.new("uint64_t *")
        for back, pages in [
            (1, 1),
            (1, 2),
            (GIB // PAGE, GIB // PAGE),
            (GIB // PAGE - 1, GIB // PAGE),
            (5, 4),
        ]:
            region.stripes[0].cursor_page = last - back
            assert lib.ckv_stripe_reserve(volume, pages, deadline, extent) == OK
            assert lib.ckv_geometry_extent_valid(
                geometry, extent.first_page, extent.pages
            )
            if back == 1 and pages == 1:
                assert extent.first_page == last - 1
        del region, base
        volume = extent = None


# ---- which stripe -------------------------------------------------------------------


def test_stripes_and_paths_advance_together(core, tmp_path, rng):  # T4
    """Two devices of different size: each laps as often as the other."""
    paths = [(tmp_path / "small", 16 * MIB), (tmp_path / "large", 64 * MIB)]
    with Engine(core, paths, stripe_count=2, expected_object_bytes=64 * 1024) as engine:
        count = int(engine.region.layout.stripe_count)
        assert count == 4
        stored = 0
        while stored < 5 * 80 * MIB:
            size = rng.choice([1, 4, 16, 64]) * 16 * 1024
            status, extent = engine.reserve_pages(size // PAGE)
            assert status == OK
            engine.lib.ckv_entry_abort(engine.volume, extent.entry)
            stored += size
            times = [
                engine.region.stripes[s].virtual_time / 2**32 for s in range(count)
            ]
            # 1/64 lap of staying, and one put that was too large for the end
            assert max(times) - min(times) <= 1 / 64 + 2 * MIB / (8 * MIB)
        laps = [int(engine.region.stripes[s].laps) for s in range(count)]
        assert max(laps) - min(laps) <= 1
        assert min(laps) >= 4
        engine.assert_clean()


def test_a_stripe_that_lags_is_not_given_everything(core, volume_path):  # T4
    with sparse_engine(
        core,
        volume_path,
        16 * GIB,
        stripe_count=4,
        expected_object_bytes=MIB,
        event_capacity=64,
    ) as engine:
        for s in range(1, 4):
            engine.region.stripes[s].virtual_time = 10 << 32  # it was locked for laps
        entries = engine.volume.files[0].geometry.stripe_entries
        taken = [0] * 4
        for i in range(200):
            status, extent = engine.reserve_pages(4096)
            assert status == OK
            taken[extent.entry // entries] += 1
            engine.lib.ckv_entry_abort(engine.volume, extent.entry)
            if i == 70:
                # 1/16 lap is 256 MiB, 16 puts; then 16 MiB of staying at a time
                assert 16 <= taken[0] <= 40, taken
        assert min(taken) > 30, taken


def test_locked_stripes_are_passed_over(core, volume_path):
    with Engine(core, volume_path, 64 * MIB, stripe_count=4) as engine:
        entries = engine.volume.files[0].geometry.stripe_entries
        for s in (0, 2):
            assert engine.lib.ckv_stripe_lock(engine.volume, s, 0)
        for _ in range(50):
            status, extent = engine.reserve_pages(16)
            assert status == OK
            assert extent.entry // entries in (1, 3)
        for s in (1, 3):
            assert engine.lib.ckv_stripe_lock(engine.volume, s, 0)
        status, extent = engine.reserve_pages(16)
        assert status == BUSY
        for s in range(4):
            engine.lib.ckv_stripe_unlock(engine.volume, s)
        assert engine.put(b"k", b"v") == OK


def test_lock_of_an_owner_that_never_lived_is_taken_over(core, volume_path):  # T3
    with Engine(core, volume_path, 64 * MIB, stripe_count=4) as engine:
        for s in range(4):
            engine.region.stripes[s].lock = engine.lib.ckv_owner_word(40, 7)
        assert engine.put(b"k", b"v") == OK
        assert engine.read(b"k") == b"v"
        assert engine.stats.lock_successions >= 1
        engine.assert_clean()


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_noise_in_the_stripe_damages_no_block(core, cursor, hand, noise):
    """The region is input: whatever stands there, nothing live is overwritten."""
    with folder() as where, Engine(core, where / "kv") as engine:
        for i in range(20):
            assert engine.put(name(i), pattern(i, 500_000)) == OK
        stripe = engine.region.stripes[0]
        stripe.cursor_page, stripe.entry_hand = cursor, hand
        stripe.hole_count = noise % 100
        for i in range(64):
            stripe.holes[i].first_page = (noise * (i + 1)) % 2**32 % (5000 + i)
            stripe.holes[i].pages = (noise >> i % 20) % 600
        for i in range(20, 40):
            assert engine.put(name(i), pattern(i, 100_000)) == OK
        for i in range(40):
            assert engine.read(name(i)) in (
                None,
                pattern(i, 500_000 if i < 20 else 100_000),
            )
        assert engine.verify().damaged_payloads == 0


# ---- equal sizes --------------------------------------------------------------------


def test_hit_ratio_is_that_of_gclock2(core, volume_path):  # eviction.md 0
    slots = 4096
    universe = 3 * slots
    perm = permutation(universe)
    keys = [name(i) for i in range(universe)]
    model = Gclock(slots)
    draws = 120_000
    hits = expected = 0
    with Engine(
        core, volume_path, expected_object_bytes=PAGE, event_capacity=64
    ) as engine:
        assert engine.volume.files[0].geometry.entry_count == slots
        stream = zipf(universe, 42)
        target = bytearray(8)
        for i, rank in zip(range(draws), stream, strict=False):
            index = perm[rank]
            expected_hit = model.access(index)
            status, _ = engine.get_into(keys[index], target)
            if status == MISS:
                assert engine.put(keys[index], index.to_bytes(8, "little")) == OK
            else:
                assert target == index.to_bytes(8, "little")
            if i >= draws // 3:
                hits += status == OK
                expected += expected_hit
        engine.assert_clean()
    measured = draws - draws // 3
    assert abs(hits - expected) / measured <= 0.003
    assert 0.80 < hits / measured < 0.90
