# SPDX-License-Identifier: Apache-2.0
"""Rebuild against a model that says of each record, on its own, whether it survives."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opened import CAPACITY, LIVE, MIB, PAGE, Opened, Peer, payload_of
from os_faults import OsTable

NAMESPACES = (b"", b"other", b"third")
CHUNK_PAGES = (1 << 30) // PAGE


def tag_of(namespace: bytes) -> bytes:
    return hashlib.sha256(namespace).digest()[:16] if namespace else bytes(16)


@dataclass(frozen=True)
class Record:
    entry: int
    sequence: int
    namespace: int
    key: int
    digested: bool
    first_page: int
    pages: int
    hole: bool = False
    header_bytes: int = 0
    damage: str = ""

    @property
    def identity(self) -> tuple[int, int, bool]:
        return self.namespace, self.key, self.digested

    @property
    def rank(self) -> tuple[int, int]:
        return self.sequence, self.entry

    @property
    def user_key(self) -> bytes:
        name = f"key {self.key}".encode()
        return name if self.digested else name.ljust(32, b"-")

    @property
    def stored_key(self) -> bytes:
        return (
            hashlib.sha256(self.user_key).digest() if self.digested else self.user_key
        )

    def overlaps(self, other: Record) -> bool:
        return (
            self.first_page < other.first_page + other.pages
            and other.first_page < self.first_page + self.pages
        )


class Image:
    """A volume file without anybody inside, whose table a test writes."""

    def __init__(self, core, path: Path, **options) -> None:
        self.core, self.path, self.options = core, path, options
        with Opened(core, path, **options) as cache:
            header = cache.volume.files[0].header
            geometry = cache.volume.files[0].geometry
            self.file_id = bytes(header.file_id)
            self.table_offset = geometry.table_offset
            self.namespaces_offset = geometry.namespaces_offset
            self.entries = geometry.entry_count
            self.stripes = geometry.stripe_count
            self.stripe_entries = geometry.stripe_entries
            self.stripe_pages = geometry.stripe_bytes // PAGE

    def write_at(self, offset: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(offset)
            file.write(data)

    def table(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.table_offset)
            return file.read(self.entries * 80)

    def seal(self, record: Record) -> bytes:
        ffi = self.core.ffi
        raw = ffi.new("struct ckv_record *")
        raw.sequence = record.sequence
        raw.namespace_tag = tag_of(NAMESPACES[record.namespace])
        raw.key = record.stored_key
        raw.first_page = record.first_page
        raw.payload_bytes = record.pages * PAGE - record.header_bytes - 7
        raw.header_bytes = record.header_bytes
        raw.flags = (1 if record.digested else 0) | (2 if record.hole else 0)
        if record.damage == "flags":
            raw.flags |= 8
        elif record.damage == "huge":
            raw.payload_bytes = (1 << 32) - 1
        elif record.damage == "outside":
            raw.first_page = self.stripes * self.stripe_pages - 1
            raw.payload_bytes = 2 * PAGE
        elif record.damage == "sequence":
            raw.sequence = 1 << 60
        file_id = ffi.new("uint8_t[16]", self.file_id)
        entry = record.entry
        if record.damage == "number":
            entry += 1
        self.core.lib.ckv_record_seal(raw, file_id, entry)
        if record.damage == "struck":
            raw.seal = 0
        data = bytearray(ffi.buffer(raw))
        if record.damage == "flipped":
            data[17] ^= 4
        return bytes(data)

    def write_table(self, records: list[Record]) -> None:
        table = bytearray(self.entries * 80)
        for record in records:
            table[record.entry * 80 : record.entry * 80 + 80] = self.seal(record)
        self.write_at(self.table_offset, bytes(table))

    def write_clears(self, clears: dict[int, int]) -> None:
        area = bytearray(256 * 4 * 64)
        for index, (namespace, sequence) in enumerate(clears.items()):
            for copy in range(2):  # an older one beside it
                raw = self.core.ffi.new("struct ckv_namespace_record *")
                raw.tag = tag_of(NAMESPACES[namespace])
                raw.clear_sequence = sequence - (1 - copy if sequence else 0)
                raw.clear_count = 6 + copy
                raw.seal = self.core.lib.ckv_seal_of(raw, 60)
                at = (index * 4 + (6 + copy) % 4) * 64
                area[at : at + 64] = bytes(self.core.ffi.buffer(raw))
        self.write_at(self.namespaces_offset, bytes(area))


# ---- the model ---------------------------------------------------------------------


def in_bounds(image: Image, record: Record) -> bool:
    stripe = record.entry // image.stripe_entries
    begin, end = record.first_page, record.first_page + record.pages
    return (
        record.damage == ""
        and record.sequence > 0
        and stripe * image.stripe_pages <= begin
        and end <= (stripe + 1) * image.stripe_pages
        and begin // CHUNK_PAGES == (end - 1) // CHUNK_PAGES
    )


def believed(
    image: Image, records: list[Record], clears: dict[int, int]
) -> list[Record]:
    return [
        record
        for record in records
        if in_bounds(image, record)
        and record.sequence > clears.get(record.namespace, 0)
    ]


def survivors(records: list[Record]) -> dict[int, Record]:
    """Of records that can be believed, those that no newer one speaks against."""
    return {
        record.entry: record
        for record in records
        if not any(
            other.rank > record.rank
            and (other.identity == record.identity or other.overlaps(record))
            for other in records
        )
    }


def cursor_of(
    image: Image, records: list[Record], live: dict[int, Record], stripe: int
) -> int:
    """Behind the newest entry and what lies ahead of it and is nearly as new."""
    begin = stripe * image.stripe_pages
    known = [r for r in records if r.entry // image.stripe_entries == stripe]
    inside = [record for record in known if record.entry in live and not record.hole]
    if not inside:
        return begin
    newest = max(inside, key=lambda record: record.rank)
    end = newest.first_page + newest.pages - begin
    window = min(len(known) // 4, 256)
    ahead = 0
    for record in inside:
        distance = (record.first_page - begin - end) % image.stripe_pages
        nearly_as_new = record.sequence + window > newest.sequence
        if record != newest and nearly_as_new and distance < image.stripe_pages // 4:
            ahead = max(ahead, distance + record.pages)
    return begin + (end + ahead) % image.stripe_pages


THREE = {"stripe_count": 3, "capacity": 18 * MIB}
DAMAGE = ("flags", "huge", "outside", "sequence", "number", "struck", "flipped")


def random_records(image: Image, rng: random.Random) -> list[Record]:
    """Few keys and few places, so that they meet."""
    count = rng.choice([0, 1, 5, 40, image.entries])
    keys = rng.choice([3, 30, 10_000])
    spread = rng.choice([40, image.stripe_pages])
    longest = rng.choice([1, 4, 100])
    records = []
    for entry in rng.sample(range(image.entries), min(count, image.entries)):
        stripe = entry // image.stripe_entries
        record = Record(
            entry=entry,
            sequence=rng.randrange(0, rng.choice([20, 10**6])),
            namespace=rng.randrange(len(NAMESPACES)),
            key=rng.randrange(keys),
            digested=rng.random() < 0.3,
            first_page=stripe * image.stripe_pages + rng.randrange(spread),
            pages=rng.randrange(1, longest + 1),
            hole=rng.random() < 0.2,
            header_bytes=rng.choice([0, 0, 100]),
        )
        if rng.random() < 0.1:
            record = replace(record, damage=rng.choice(DAMAGE))
        elif rng.random() < 0.05:  # of another stripe
            record = replace(
                record, first_page=rng.randrange(image.stripes * image.stripe_pages)
            )
        records.append(record)
    return records


def check_region(image: Image, cache: Opened, records: list[Record]) -> None:
    region, live = cache.region, survivors(records)
    assert cache.states(LIVE) == sorted(live)
    assert region.header.rebuilt_entries == len(live)
    for entry, record in live.items():
        assert region.states[entry] >> 3 == record.sequence
        place = region.places[entry]
        assert (place.first_page, place.pages) == (record.first_page, record.pages)
        assert region.marks[entry] == 0  # B5
        space = region.namespaces[region.owners[entry]]
        assert bytes(space.tag) == tag_of(NAMESPACES[record.namespace])
    for stripe in range(image.stripes):
        state = region.stripes[stripe]
        cursor = cursor_of(image, records, live, stripe)
        position = cursor - stripe * image.stripe_pages
        assert state.cursor_page == cursor  # B3
        assert state.virtual_time == (position << 32) // image.stripe_pages
        assert state.laps == state.hole_count == state.lock == 0
    report = cache.verify()
    assert report.structure_faults == 0, report.first_fault
    assert report.entries_checked == len(live)


def check_lookups(core, image: Image, live: dict[int, Record], **options) -> None:
    for number, namespace in enumerate(NAMESPACES):
        with Opened(core, image.path, namespace=namespace, **options) as cache:
            inside = [r for r in live.values() if r.namespace == number]
            assert cache.count() == len(inside)
            assert all(cache.contains(record.user_key) for record in inside)


@pytest.fixture(scope="module")
def image(core):
    folder = Path(
        tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    )
    yield Image(core, folder / "kv.cyc", **THREE)
    shutil.rmtree(folder)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_what_survives_is_what_the_model_says(core, image, seed):
    rng = random.Random(seed)
    records = random_records(image, rng)
    clears = {
        namespace: rng.choice([3, 10, 300_000])
        for namespace in range(len(NAMESPACES))
        if rng.random() < 0.3
    }
    image.write_table(records)
    image.write_clears(clears)
    sound = believed(image, records, clears)
    live = survivors(sound)

    # A reader alone finds the same and writes nothing.
    table = image.table()
    reading = {"mode": core.lib.CKV_MODE_READ, "create": False}
    with Opened(core, image.path, capacity=0, **reading) as cache:
        check_region(image, cache, sound)
    assert image.table() == table

    with Opened(core, image.path, **THREE) as cache:
        check_region(image, cache, sound)
        check_lookups(core, image, live, **THREE)
        sealed = [r for r in records if r.damage != "sequence"]
        seen = [r.sequence for r in sealed if r.damage not in ("flipped", "number")]
        believable = [
            r.sequence for r in records if in_bounds(image, replace(r, damage=""))
        ]
        highest = cache.region.header.sequence
        assert highest >= max(
            [*clears.values(), *(r.sequence for r in live.values()), 0]
        )
        assert highest <= max([*clears.values(), *seen, *believable, 0])  # B4
        # What lost is struck; nothing sealed is left but what lives.
        left = image.table()
        ffi = core.ffi
        file_id = ffi.new("uint8_t[16]", image.file_id)
        for record in records:
            raw = ffi.new("struct ckv_record *")
            ffi.buffer(raw)[:] = left[record.entry * 80 : record.entry * 80 + 80]
            is_sealed = core.lib.ckv_record_sealed(raw, file_id, record.entry)
            assert is_sealed == (record.entry in live)
    with Opened(core, image.path, **THREE) as cache:  # and stays so
        check_region(image, cache, list(live.values()))


@pytest.mark.parametrize("what", ["overlap", "identity"])
def test_a_record_that_lost_still_counts_against_older_ones(core, image, what):
    """Newest beats middle, middle beats oldest: the newest is left, in any order."""
    base = {"namespace": 0, "digested": False, "pages": 10}
    if what == "overlap":
        places, keys = (0, 8, 16), (1, 2, 3)  # each meets its neighbour alone
    else:
        places, keys = (0, 5, 100), (1, 2, 2)
    newest, middle, oldest = (
        dict(base, first_page=place, key=key)
        for place, key in zip(places, keys, strict=True)
    )
    for order in ((3, 2, 1), (1, 2, 3), (2, 3, 1)):
        records = [
            Record(entry=order[0], sequence=30, **newest),
            Record(entry=order[1], sequence=20, **middle),
            Record(entry=order[2], sequence=10, **oldest),
        ]
        image.write_table(records)
        image.write_clears({})
        with Opened(core, image.path, **THREE) as cache:
            assert cache.states(LIVE) == [order[0]]
            assert cache.stats().rebuild_dropped == 2


def test_everything_at_one_place_takes_no_quadratic_time(core, volume_path):
    image = Image(core, volume_path, capacity=256 * MIB, expected_object_bytes=PAGE)
    assert image.entries > 60_000
    begin = 0
    records = [
        Record(entry, entry + 1, 0, entry, False, begin, 1000)
        for entry in range(image.stripe_entries)
    ]
    image.write_table(records)
    options = {"capacity": 256 * MIB, "expected_object_bytes": PAGE}
    with Opened(core, image.path, **options) as cache:
        assert cache.states(LIVE) == [image.stripe_entries - 1]


def test_sequences_are_never_given_out_twice(core, volume_path):
    """Also not those of blocks that were removed, cleared or struck since (B4, F5)."""
    highest = 0
    for round_number in range(4):
        with Opened(core, volume_path) as cache:
            assert cache.region.header.sequence >= highest
            for number in range(5):
                cache.put(b"%d %d" % (round_number, number), b"x" * 100)
            highest = cache.region.header.sequence
            for number in range(5):
                cache.remove(b"%d %d" % (round_number, number))
            if round_number == 2:
                cache.clear()


def test_heat_comes_back_for_what_the_checkpoint_knew(core, volume_path):
    with Opened(core, volume_path) as cache:
        cache.put(b"warm", b"x" * 100)
        for _ in range(3):
            cache.get(b"warm")
        assert core.lib.ckv_checkpoint_write(cache.volume) == 0
        generation = cache.region.paths[0].checkpoint_generation
    with Opened(core, volume_path) as cache:
        (entry,) = cache.states(LIVE)
        assert cache.region.heats[entry] == 2
        assert cache.region.paths[0].checkpoint_generation >= generation
    # Copies that are damaged are as good as none.
    with Opened(core, volume_path) as cache:
        geometry = cache.volume.files[0].geometry
        offset, length = geometry.checkpoint_offset, 2 * geometry.checkpoint_bytes
    with open(volume_path, "r+b") as file:
        file.seek(offset)
        file.write(os.urandom(length))
    with Opened(core, volume_path) as cache:
        assert cache.get(b"warm") == b"x" * 100
        assert cache.region.heats[entry] <= 1


def test_files_of_one_set_are_rebuilt_together(core, volume_path):
    """Together, in any order, and without a member that is missing."""
    paths = [volume_path, volume_path.with_name("second.cyc")]
    with Opened(core, *paths) as cache:
        for number in range(100):
            key = b"%032d" % number
            assert cache.put(key, payload_of(key, 9000)) == core.lib.CKV_OK
        used = [e // (cache.region.layout.entry_count // 2) for e in cache.states(LIVE)]
        assert 10 < sum(used) < 90
    with Opened(core, *reversed(paths)) as cache:
        cache.assert_sound()
        assert cache.count() == 100
    paths[0].unlink()
    with Opened(core, *paths, degraded=True) as cache:
        cache.assert_sound()
        assert cache.count() == sum(used)
        assert [cache.region.paths[number].failed for number in range(2)] == [1, 0]
        assert cache.put(b"new", b"x" * 100) == core.lib.CKV_OK


def test_a_table_that_cannot_be_read_fails_its_path_alone(core, volume_path):
    paths = [volume_path, volume_path.with_name("second.cyc")]
    with Opened(core, *paths) as cache:
        for number in range(100):
            cache.put(b"%032d" % number, b"x" * 9000)
        table = cache.volume.files[1].geometry.table_offset
        second = cache.core.ffi.string(cache.volume.files[1].path).decode()
    with OsTable(core) as system:

        def read(fd, iov, count, offset):
            if offset == table and os.readlink(f"/proc/self/fd/{fd}") == second:
                return -errno.EIO
            return system.native.read_at(fd, iov, count, offset)

        system.replace("read_at", read)
        cache = Opened(core, *paths)
    with cache:
        assert cache.stats().failed_paths == 1
        assert 0 < sum(cache.contains(b"%032d" % number) for number in range(100)) < 100
        assert cache.recover() == 0  # nobody knows what the table has
        assert cache.stats().failed_paths == 1
        assert cache.put(b"new", b"x" * 100) == core.lib.CKV_OK
    with Opened(core, *paths) as cache:  # the device answers again
        assert cache.stats().failed_paths == 0
        assert all(cache.contains(b"%032d" % number) for number in range(100))
        cache.assert_sound()


def test_two_tags_at_one_index_are_both_kept(core, volume_path):
    """Files that were cleared apart: each clear holds, and is durable in every file."""
    paths = [volume_path, volume_path.with_name("second.cyc")]
    images = []
    with Opened(core, *paths):
        pass
    for path, namespace in zip(paths, (1, 2), strict=True):
        image = object.__new__(Image)
        image.core, image.path = core, path
        with Opened(core, *paths) as cache:
            number = paths.index(path)
            image.namespaces_offset = cache.volume.files[
                number
            ].geometry.namespaces_offset
        images.append((image, namespace))
    for image, namespace in images:
        image.write_clears({namespace: 1000 + namespace})
    for _ in range(2):
        with Opened(core, *paths) as cache:
            spaces = cache.region.namespaces
            cleared = {
                bytes(spaces[i].tag): spaces[i].clear_sequence
                for i in range(256)
                if spaces[i].clear_count
            }
            assert cleared == {
                tag_of(NAMESPACES[1]): 1001,
                tag_of(NAMESPACES[2]): 1002,
            }
            assert cache.region.header.sequence >= 1002
    for number in range(2):  # either file alone knows both
        os.rename(paths[number], f"{paths[number]}.away")
        with Opened(core, *paths, degraded=True) as cache:
            spaces = cache.region.namespaces
            known = {bytes(spaces[i].tag) for i in range(256) if spaces[i].clear_count}
            assert known == set(cleared)
        os.rename(f"{paths[number]}.away", paths[number])


def test_a_cleared_namespace_stays_cleared(core, volume_path):
    with (
        Opened(core, volume_path) as cache,
        Opened(core, volume_path, namespace=b"other") as other,
    ):
        cache.put(b"k", b"x" * 100)
        other.put(b"k", b"y" * 100)
        assert other.clear() == 1
        other.put(b"new", b"z" * 100)
    with (
        Opened(core, volume_path) as cache,
        Opened(core, volume_path, namespace=b"other") as other,
    ):
        assert cache.get(b"k") == b"x" * 100
        assert other.get(b"k") is None
        assert other.get(b"new") == b"z" * 100
        assert (cache.count(), other.count()) == (1, 1)


@pytest.mark.parametrize(
    "point",
    [
        "region.unlink",
        "region.create",
        "region.allocate",
        "region.map",
        "region.created",
        "region.write",
        "region.published",
        "region.ready",
        "rebuild.begin",
        "rebuild.namespaces",
        "rebuild.piece",
        "rebuild.strike",
        "rebuild.stripe",
        "rebuild.lost",
        "rebuild.heats",
        "rebuild.done",
        "slot.locked",
        "slot.anchored",
        "slot.claimed",
    ],
)
def test_a_death_inside_an_open_is_completed_by_the_next(core, volume_path, point):
    image = Image(core, volume_path)
    with Opened(core, volume_path) as cache:
        cache.put(b"k" * 32, payload_of(b"k", 9000))
        (entry,) = cache.states(LIVE)
    record = Record(40, 1, 0, 1, False, 500, 4)
    loser = replace(record, entry=41, first_page=502, key=2, sequence=3)
    for written in (record, loser, replace(record, entry=42, damage="flags")):
        offset = image.table_offset + written.entry * 80
        image.write_at(offset, image.seal(written))
    with Peer(volume_path, point=f"{point}:kill") as peer:
        assert peer.hello is None, f"{point} was not reached"
        peer.process.wait(timeout=30)
    with Opened(core, volume_path) as cache:
        assert cache.get(b"k" * 32) == payload_of(b"k", 9000)
        assert cache.states(LIVE) == sorted([entry, 41])
        assert sorted(os.listdir(volume_path.parent)) == ["kv.cyc", "kv.cyc-shm"]


def test_capacity_is_what_the_tests_think(core, volume_path):
    with Opened(core, volume_path) as cache:
        assert cache.stats().capacity_bytes == CAPACITY
