# SPDX-License-Identifier: Apache-2.0
"""The engine as tests call it, and plain Python models of its structures.

Engine      one open handle: the public interface, and a view of the shared region
Ring        a clock in place: what stripe.h says, over a sorted list of extents
Gclock      equal sizes: eviction.md 0, in twenty lines
Zipf        the stream of reference.md 5.1
"""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PAGE = 4096
MIB = 1 << 20
GIB = 1 << 30
NONE = 0xFFFFFFFF

OK, MISS, PRESENT, BUSY, NO_RUN, NOT_ADMITTED = range(6)
IN_FLIGHT, FAILED_PATH, IO_FAILED, SHORT_BUFFER = range(6, 10)
E_INVALID, E_CLOSED, E_TOO_LARGE, E_READ_ONLY = -1, -8, -10, -13
FREE, RESERVED, LIVE, DYING, DEAD = range(5)
OVERWRITE, CHAIN = 1, 2


class EngineError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.text = text


class Event(NamedTuple):
    number: int
    kind: int
    key: bytes
    digested: bool


class Lease:
    """A pinned block."""

    def __init__(self, engine: Engine, pointer: Any) -> None:
        self.engine = engine
        self.pointer = pointer  # struct ckv_lease **

    @property
    def entry(self) -> int:
        return int(self.pointer[0].entry)

    @property
    def data(self) -> bytes:
        ffi, length = self.engine.ffi, self.engine.ffi.new("size_t *")
        data = self.engine.lib.ckv_lease_data(self.pointer[0], length)
        return bytes(ffi.buffer(data, length[0]))

    @property
    def address(self) -> int:
        ffi, length = self.engine.ffi, self.engine.ffi.new("size_t *")
        data = self.engine.lib.ckv_lease_data(self.pointer[0], length)
        return int(ffi.cast("uintptr_t", data))

    @property
    def header(self) -> bytes | None:
        ffi, length = self.engine.ffi, self.engine.ffi.new("size_t *")
        data = self.engine.lib.ckv_lease_header(self.pointer[0], length)
        return None if data == ffi.NULL else bytes(ffi.buffer(data, length[0]))

    def release(self) -> None:
        self.engine.lib.ckv_lease_release(self.pointer)


class Engine:
    """One handle; negative results are raised, positive ones returned."""

    def __init__(
        self,
        core: Any,
        paths: Path | Sequence[tuple[Path, int]],
        capacity: int = 16 * MIB,
        **options: Any,
    ) -> None:
        self.lib, self.ffi = core.lib, core.ffi
        ffi = self.ffi
        if isinstance(paths, Path):
            paths = [(paths, capacity)]
        self._kept: list[Any] = [
            ffi.new("char[]", str(path).encode()) for path, _ in paths
        ]
        rows = ffi.new("struct ckv_path[]", len(paths))
        for row, name, (_, size) in zip(rows, self._kept, paths, strict=True):
            row.path, row.capacity_bytes = name, size
        self._kept.append(rows)
        settings = ffi.new("struct ckv_options *")
        self.lib.ckv_options_init(settings)
        settings.paths, settings.path_count = rows, len(paths)
        settings.sync_interval_ms = 0xFFFFFFFF
        settings.allow_shared_directory = True
        namespace = options.pop("namespace", b"")
        text = ffi.new("char[]", namespace)
        settings.namespace_data, settings.namespace_length = text, len(namespace)
        for name, value in options.items():
            setattr(settings, name, value)
        self.pointer = ffi.new("struct ckv_cache **")
        self.error = ffi.new("struct ckv_error *")
        self._check(self.lib.ckv_open(settings, self.pointer, self.error))

    def _check(self, status: int) -> int:
        if status < 0:
            text = self.ffi.string(self.error.text).decode(errors="replace")
            raise EngineError(status, text)
        return int(status)

    # ---- the public interface ----------------------------------------------------

    def key(self, key: bytes) -> tuple[Any, Any]:
        data = self.ffi.new("char[]", key) if key else self.ffi.NULL
        return self.ffi.new(
            "struct ckv_key *", {"data": data, "length": len(key)}
        ), data

    def keys(self, keys: Sequence[bytes]) -> tuple[Any, Any]:
        kept = [self.ffi.new("char[]", key) for key in keys]
        rows = self.ffi.new("struct ckv_key[]", max(len(keys), 1))
        for row, data, key in zip(rows, kept, keys, strict=False):
            row.data, row.length = data, len(key)
        return rows, kept

    def fill_item(
        self, item: Any, key: bytes, segments: Sequence[Any], header: bytes
    ) -> list[Any]:
        ffi = self.ffi
        name = ffi.new("char[]", key)
        views = [ffi.from_buffer(s) if len(s) else ffi.NULL for s in segments]
        rows = ffi.new("struct ckv_segment[]", max(len(segments), 1))
        for row, view, segment in zip(rows, views, segments, strict=False):
            row.data, row.length = view, len(segment)
        text = ffi.new("char[]", header) if header else ffi.NULL
        item.key.data, item.key.length = name, len(key)
        item.segments, item.segment_count = rows, len(segments)
        item.header, item.header_length = text, len(header)
        return [name, views, rows, text]

    def put(
        self, key: bytes, *segments: Any, header: bytes = b"", flags: int = 0
    ) -> int:
        item = self.ffi.new("struct ckv_item *")
        kept = self.fill_item(item, key, segments, header)
        status = self._check(self.lib.ckv_put(self.pointer[0], item, flags, self.error))
        del kept
        return status

    def put_many(
        self,
        items: Sequence[tuple[bytes, bytes]],
        flags: int = 0,
        parent: bytes | None = None,
    ) -> list[int]:
        rows = self.ffi.new("struct ckv_item[]", max(len(items), 1))
        kept = [
            self.fill_item(row, key, [data], b"")
            for row, (key, data) in zip(rows, items, strict=False)
        ]
        above, name = self.key(parent) if parent is not None else (self.ffi.NULL, None)
        self._check(
            self.lib.ckv_put_many(
                self.pointer[0], rows, len(items), flags, above, self.error
            )
        )
        del kept, name
        return [int(rows[i].status) for i in range(len(items))]

    def get(self, key: bytes) -> Lease | None:
        lease = self.ffi.new("struct ckv_lease **")
        name, kept = self.key(key)
        status = self._check(self.lib.ckv_get(self.pointer[0], name, lease, self.error))
        del kept
        return Lease(self, lease) if status == OK else None

    def read(self, key: bytes) -> bytes | None:
        lease = self.get(key)
        if lease is None:
            return None
        data = lease.data
        lease.release()
        return data

    def get_into(self, key: bytes, *targets: bytearray) -> tuple[int, int]:
        read = self.ffi.new("struct ckv_read *")
        kept = self.fill_read(read, key, targets)
        status = self._check(self.lib.ckv_get_into(self.pointer[0], read, self.error))
        del kept
        assert status == read.status
        return status, int(read.payload_length)

    def fill_read(
        self, read: Any, key: bytes, targets: Sequence[bytearray]
    ) -> list[Any]:
        ffi = self.ffi
        name = ffi.new("char[]", key)
        views = [
            ffi.from_buffer(t, require_writable=True) if len(t) else ffi.NULL
            for t in targets
        ]
        rows = ffi.new("struct ckv_target[]", max(len(targets), 1))
        for row, view, target in zip(rows, views, targets, strict=False):
            row.data, row.length = view, len(target)
        read.key.data, read.key.length = name, len(key)
        read.targets, read.target_count = rows, len(targets)
        return [name, views, rows]

    def get_many_into(
        self,
        wanted: Sequence[tuple[bytes, Sequence[bytearray]]],
        *,
        exact: bool = False,
    ) -> list[tuple[int, int]]:
        rows = self.ffi.new("struct ckv_read[]", max(len(wanted), 1))
        kept = [
            self.fill_read(row, key, targets)
            for row, (key, targets) in zip(rows, wanted, strict=False)
        ]
        for row in rows:
            row.exact = exact
        self._check(
            self.lib.ckv_get_many_into(self.pointer[0], rows, len(wanted), self.error)
        )
        del kept
        return [
            (int(rows[i].status), int(rows[i].payload_length))
            for i in range(len(wanted))
        ]

    def contains(self, *keys: bytes) -> list[bool]:
        rows, kept = self.keys(keys)
        present = self.ffi.new("bool[]", max(len(keys), 1))
        self._check(
            self.lib.ckv_contains_many(
                self.pointer[0], rows, len(keys), present, self.error
            )
        )
        del kept
        return [bool(present[i]) for i in range(len(keys))]

    def _walk(self, function: str, keys: Sequence[bytes], *more: Any) -> int:
        rows, kept = self.keys(keys)
        found = self.ffi.new("size_t *")
        call = getattr(self.lib, function)
        self._check(call(self.pointer[0], rows, len(keys), *more, found, self.error))
        del kept
        return int(found[0])

    def longest_prefix(self, keys: Sequence[bytes], *, touch: bool = False) -> int:
        return self._walk("ckv_longest_prefix", keys, touch)

    def touch(self, keys: Sequence[bytes]) -> int:
        return self._walk("ckv_touch", keys)

    def prefetch(self, keys: Sequence[bytes]) -> int:
        return self._walk("ckv_prefetch", keys)

    def remove(self, key: bytes) -> int:
        name, kept = self.key(key)
        status = self._check(self.lib.ckv_remove(self.pointer[0], name, self.error))
        del kept
        return status

    def clear(self) -> int:
        removed = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_clear(self.pointer[0], removed, self.error))
        return int(removed[0])

    def count(self) -> int:
        entries = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_count(self.pointer[0], entries, self.error))
        return int(entries[0])

    def sync(self) -> None:
        self._check(self.lib.ckv_sync(self.pointer[0], self.error))

    def recover(self) -> int:
        paths = self.ffi.new("uint64_t *")
        self._check(self.lib.ckv_recover(self.pointer[0], paths, self.error))
        return int(paths[0])

    def verify(self, *, repair: bool = False) -> Any:
        report = self.ffi.new("struct ckv_verify_report *")
        self._check(
            self.lib.ckv_verify(
                self.pointer[0],
                repair,
                self.ffi.NULL,
                self.ffi.NULL,
                report,
                self.error,
            )
        )
        return report

    def assert_clean(self) -> int:
        """Nothing is wrong with the volume; returns the number of entries."""
        report = self.verify()
        text = self.ffi.string(report.first_fault).decode()
        assert report.structure_faults == 0, text
        assert report.damaged_payloads == 0, text
        assert report.unreadable == 0, text
        return int(report.entries_checked)

    def list(self, piece: int = 7) -> list[Any]:
        cursor = self.ffi.new("uint64_t *")
        count = self.ffi.new("size_t *")
        rows = self.ffi.new("struct ckv_entry_info[]", piece)
        found = []
        while True:
            self._check(
                self.lib.ckv_list(
                    self.pointer[0], cursor, rows, piece, count, self.error
                )
            )
            if count[0] == 0:
                return found
            for i in range(count[0]):
                copy = self.ffi.new("struct ckv_entry_info *")
                copy[0] = rows[i]
                found.append(copy)

    def events(self, since: int = 0) -> tuple[list[Event], int, int]:
        rows = self.ffi.new("struct ckv_event[]", 20000)
        count = self.ffi.new("size_t *")
        lost = self.ffi.new("uint64_t *")
        last = self.ffi.new("uint64_t *")
        self._check(
            self.lib.ckv_events(
                self.pointer[0], since, rows, 20000, count, lost, last, self.error
            )
        )
        found = [
            Event(row.number, row.kind, bytes(row.key), bool(row.digested))
            for row in rows[0 : count[0]]
        ]
        return found, int(lost[0]), int(last[0])

    @property
    def stats(self) -> Any:
        stats = self.ffi.new("struct ckv_stats *")
        self._check(
            self.lib.ckv_get_stats(self.pointer[0], stats, self.ffi.NULL, self.error)
        )
        return stats

    @property
    def info(self) -> Any:
        info = self.ffi.new("struct ckv_info *")
        self._check(self.lib.ckv_get_info(self.pointer[0], info, self.error))
        return info

    def close(self) -> None:
        self.lib.ckv_close(self.pointer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what lies behind it -----------------------------------------------------

    @property
    def volume(self) -> Any:
        return self.pointer[0].volume

    @property
    def region(self) -> Any:
        return self.pointer[0].volume.region

    def kind(self, entry: int) -> int:
        return int(self.region.states[entry]) & 7

    def identity(self, key: bytes) -> Any:
        """What a key becomes (cache.c)."""
        digested = len(key) != 32
        identity = self.ffi.new("struct ckv_identity *")
        self.ffi.memmove(identity.namespace_tag, self.pointer[0].namespace_tag, 16)
        raw = hashlib.sha256(key).digest() if digested else key
        self.ffi.memmove(identity.key, raw, 32)
        identity.digested = digested
        identity.namespace_index = self.pointer[0].namespace_index
        identity.hash = self.lib.ckv_index_hash(
            self.volume, identity.namespace_tag, identity.key, digested
        )
        return identity

    def stored_key(self, key: bytes) -> bytes:
        return bytes(self.identity(key).key)

    def find(self, key: bytes) -> Any | None:
        found = self.ffi.new("struct ckv_found *")
        ok = self.lib.ckv_index_find(self.volume, self.identity(key), found)
        return found if ok else None

    def reserve_pages(self, pages: int) -> tuple[int, Any]:
        extent = self.ffi.new("struct ckv_extent *")
        return int(
            self.lib.ckv_stripe_reserve(
                self.volume, pages, self.ffi.new("uint64_t *"), extent
            )
        ), extent

    def publish(self, key: bytes, extent: Any, payload: int, crc: int) -> bool:
        """Makes a reserved extent a block without writing its data."""
        identity = self.identity(key)
        record = self.ffi.new("struct ckv_record *")
        record.payload_bytes, record.payload_crc = payload, crc
        record.first_page = extent.first_page
        record.flags = (self.lib.CKV_RECORD_DIGESTED if identity.digested else 0) | (
            self.lib.CKV_RECORD_HOLE if extent.hole else 0
        )
        self.ffi.memmove(record.namespace_tag, identity.namespace_tag, 16)
        self.ffi.memmove(record.key, identity.key, 32)
        status = self.lib.ckv_entry_publish(self.volume, identity, extent.entry, record)
        assert status in (OK, NO_RUN)
        return bool(status == OK)


# ---- a clock in place ---------------------------------------------------------------

LOOK_MAX, LOOK_MAX_FORCED, HAND_STEPS, GAPS_MAX, HOLES_MAX = 256, 1024, 4096, 16, 64


@dataclass
class Extent:
    first: int
    pages: int
    kind: int  # RESERVED, LIVE or DEAD
    heat: int = 0
    pins: int = 0
    key: bytes = b""

    @property
    def end(self) -> int:
        return self.first + self.pages

    @property
    def holds(self) -> bool:
        """Whether nobody else may have its pages."""
        return self.kind != DEAD or self.pins > 0


@dataclass
class Taken:
    number: int
    first: int
    hole: bool
    evicted: list[int] = field(default_factory=list)


class Ring:
    """One stripe.  `linked` is what the page map should say: numbers by first page."""

    def __init__(self, begin: int, end: int, first_number: int, numbers: int) -> None:
        self.begin, self.end = begin, end
        self.first_number, self.numbers = first_number, numbers
        self.extents: dict[int, Extent] = {}
        self.linked: list[tuple[int, int]] = []  # (first page, number), sorted
        self.cursor = begin
        self.hand = 0
        self.holes: list[tuple[int, int]] = []
        self.gaps: list[tuple[int, int]] = []
        self.looked = 0

    @property
    def pages(self) -> int:
        return self.end - self.begin

    # -- the ring itself

    def next_after(self, page: int, before: int) -> int | None:
        at = bisect.bisect_left(self.linked, (page, -1))
        if at < len(self.linked) and self.linked[at][0] < before:
            return self.linked[at][1]
        return None

    def link(self, number: int, extent: Extent) -> None:
        self.extents[number] = extent
        bisect.insort(self.linked, (extent.first, number))

    def unlink(self, number: int) -> Extent:
        extent = self.extents.pop(number)
        self.linked.remove((extent.first, number))
        return extent

    def distance(self, start: int, to: int) -> int:
        return (to - start) % self.pages

    # -- T5

    def takeable(self, number: int, *, ignore_heat: bool) -> bool:
        extent = self.extents[number]
        self.looked += 1
        if extent.kind == RESERVED:
            return False
        if extent.kind == LIVE and extent.heat > 0 and not ignore_heat:
            extent.heat -= 1
            return False
        return extent.pins == 0

    def borders(self, page: int) -> int:
        chunk = GIB // PAGE
        return min(page - page % chunk + chunk, self.end)

    def search(self, start: int, pages: int, *, ignore_heat: bool) -> int | None:
        """The first page of a run; its extents are in self.run."""
        self.gaps, self.run = [], []
        run = position = start
        wraps = beyond = 0
        limit = LOOK_MAX_FORCED if ignore_heat else LOOK_MAX
        while beyond <= limit:
            while run + pages > self.borders(run):
                beyond, self.run = beyond + len(self.run), []
                run = self.borders(run)
                if run == self.end:
                    run, wraps = self.begin, wraps + 1
                    if wraps >= 2:
                        return None
                position = run
            number = self.next_after(position, run + pages)
            if number is None:
                return run
            extent = self.extents[number]
            if self.takeable(number, ignore_heat=ignore_heat):
                self.run.append(number)
                position = extent.end
                continue
            if position < extent.first and len(self.gaps) < GAPS_MAX:
                self.gaps.append((position, extent.first - position))
            beyond, self.run = beyond + len(self.run) + 1, []
            run = position = extent.end
            if extent.end >= self.end:
                run = position = self.begin
                wraps += 1
        return None

    def search_twice(self, start: int, pages: int) -> int | None:
        run = self.search(start, pages, ignore_heat=False)
        return run if run is not None else self.search(start, pages, ignore_heat=True)

    def free_number(self) -> int | None:
        for _ in range(min(self.numbers, HAND_STEPS)):
            self.hand = (self.hand + 1) % self.numbers
            number = self.first_number + self.hand
            extent = self.extents.get(number)
            if extent is None:
                return number
            if extent.kind == DEAD and extent.pins == 0:
                self.unlink(number)
                return number
        return None

    def seek(self, start: int) -> int | None:
        """Out of numbers: where the next extent starts that may be taken."""
        at, looked = start, 0
        while looked < LOOK_MAX_FORCED and self.linked:
            number = self.next_after(at, self.end)
            if number is None:
                at = self.begin
                continue
            if self.takeable(number, ignore_heat=looked > LOOK_MAX):
                return self.extents[number].first
            looked += 1
            at = self.extents[number].end
        return None

    # -- T6

    def fill_hole(self, pages: int) -> Taken | None:
        near = [
            hole
            for hole in self.holes
            if self.distance(hole[0], self.cursor) <= self.pages // 4
        ]
        self.holes = near
        fitting = [hole for hole in near if hole[1] >= pages]
        if not fitting:
            return None
        smallest = min(hole[1] for hole in fitting)
        # Any of the smallest will do: the test follows the engine's choice.
        self.choices = [hole for hole in fitting if hole[1] == smallest]
        return Taken(NONE, NONE, hole=True)

    def reserve(self, pages: int, chosen_hole: int | None) -> Taken | None:
        """What ckv_stripe_reserve does; `chosen_hole` where the engine filled one."""
        self.looked = 0
        self.exhausted = False
        if self.fill_hole(pages) is not None:
            crossing = [h for h in self.choices if h[0] + pages > self.borders(h[0])]
            if chosen_hole is None:
                # Legal only where the hole it tried lies across a border, or where no
                # number is free.
                self.hand_before = self.hand
                assert crossing or self.free_number() is None, self.choices
            else:
                hole = next(h for h in self.choices if h[0] == chosen_hole)
                number = self.free_number()
                assert number is not None
                self.holes.remove(hole)
                if hole[1] > pages:
                    self.holes.append((hole[0] + pages, hole[1] - pages))
                self.link(number, Extent(hole[0], pages, RESERVED))
                return Taken(number, hole[0], hole=True)
        start = self.cursor
        for _ in range(8):
            run = self.search_twice(start, pages)
            if run is None:
                return None
            number = None
            if not self.run:
                number = self.free_number()
                if number is None:
                    self.exhausted = True
                    found = self.seek(run)
                    if found is None:
                        return None
                    start = found
                    continue
            evicted = [n for n in self.run if self.extents[n].kind == LIVE]
            for victim in self.run:
                self.unlink(victim)
            if number is None:
                number = self.run[0]
            self.move(run, pages)
            self.link(number, Extent(run, pages, RESERVED))
            return Taken(number, run, hole=False, evicted=evicted)
        return None

    def move(self, run: int, pages: int) -> None:
        """The cursor behind the run; gaps that it leaves behind are holes."""

        def clear(hole: tuple[int, int]) -> bool:
            return hole[0] + hole[1] <= run or hole[0] >= run + pages

        start = self.cursor
        self.cursor = run + pages if run + pages < self.end else self.begin
        moved = self.distance(start, self.cursor)
        if moved < pages:
            moved = self.pages
        self.moved = moved
        self.holes = [
            h for h in self.holes if self.distance(start, h[0]) >= moved and clear(h)
        ]
        for gap in self.gaps:
            if clear(gap) and self.distance(gap[0] + gap[1], run) < moved:
                self.holes = [
                    h for h in self.holes if h[0] + h[1] <= gap[0] or h[0] >= sum(gap)
                ]
                if len(self.holes) == HOLES_MAX:
                    smallest = min(self.holes, key=lambda hole: hole[1])
                    if smallest[1] >= gap[1]:
                        continue
                    self.holes.remove(smallest)
                self.holes.append(gap)


# ---- equal sizes --------------------------------------------------------------------


class Gclock:
    """GCLOCK2 over slots of one size: in at 0, +1 a hit up to 2, -1 a pass."""

    def __init__(self, slots: int) -> None:
        self.keys: list[Any] = [None] * slots
        self.heat = [0] * slots
        self.where: dict[Any, int] = {}
        self.hand = 0

    def access(self, key: Any) -> bool:
        at = self.where.get(key)
        if at is not None:
            self.heat[at] = min(self.heat[at] + 1, 2)
            return True
        while self.heat[self.hand] > 0:
            self.heat[self.hand] -= 1
            self.hand = (self.hand + 1) % len(self.keys)
        self.where.pop(self.keys[self.hand], None)
        self.keys[self.hand] = key
        self.where[key] = self.hand
        self.hand = (self.hand + 1) % len(self.keys)
        return False


class Xorshift:
    """xorshift64* (reference.md 5.1)."""

    def __init__(self, state: int) -> None:
        self.state = state or 0x9E3779B97F4A7C15

    def __call__(self) -> int:
        s = self.state
        s ^= s >> 12
        s = (s ^ s << 25) & 0xFFFFFFFFFFFFFFFF
        s ^= s >> 27
        self.state = s
        return s * 0x2545F4914F6CD1DB & 0xFFFFFFFFFFFFFFFF


def zipf(n: int, seed: int, theta: float = 0.99) -> Iterator[int]:
    """Ranks of reference.md 5.1."""
    random_word = Xorshift(seed)
    zeta = sum(i**-theta for i in range(1, n + 1))
    zeta2 = 1 + 0.5**theta
    alpha = 1 / (1 - theta)
    eta = (1 - (2 / n) ** (1 - theta)) / (1 - zeta2 / zeta)
    while True:
        u = (random_word() >> 11) * 2.0**-53
        z = u * zeta
        if z < 1:
            yield 0
        elif z < zeta2:
            yield 1
        else:
            yield min(n - 1, int(n * (eta * u - eta + 1) ** alpha))


def permutation(n: int) -> list[int]:
    """The key index of each rank (reference.md 5.1)."""
    random_word = Xorshift(0x243F6A8885A308D3)
    perm = list(range(n))
    for i in range(n - 1, 0, -1):
        j = random_word() % (i + 1)
        perm[i], perm[j] = perm[j], perm[i]
    return perm


def pattern(seed: int, length: int) -> bytes:
    """Bytes in which each word depends on the seed and its place."""
    return random.Random(seed).randbytes(length)
