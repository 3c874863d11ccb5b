# SPDX-License-Identifier: Apache-2.0
"""Blocks to device memory, and back.

    registered   pinned block of the mapping ----------- DMA --------------> device
    staged       reads of the engine -> pinned ring ---- DMA --------------> device
    pageable     reads of the engine -> heap ----------- driver's copy ----> device

A block takes the first way that is open to it. All bytes were checked, as for any other
read, before a copy of them is enqueued: a registered block when it is pinned, the
others by the read itself. A miss enqueues nothing.

Reads and copies overlap: while one lot of blocks is being copied, the next is read.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cyclone_kv.cuda import targets
from cyclone_kv.cuda.flight import Flight
from cyclone_kv.cuda.ring import Ring, Slot
from cyclone_kv.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cyclone_kv import _core
    from cyclone_kv.cache import Cache
    from cyclone_kv.cuda.runtime import Device
    from cyclone_kv.cuda.targets import Place
    from cyclone_kv.cuda.volume import Attachment, Volume

__all__ = ["Upload", "put_from_device", "upload"]

_ALIGNMENT = 4096  # of blocks in a slot: what direct reads want
_LOT_MIN_BYTES = 4 << 20
_LOTS = 4  # a call is cut into so many, where they are not too small
_REPLACED_MAX = 3  # times that a block may grow between question and read

_Copy = tuple[int, int, int]  # target, source, bytes


class Upload:
    """Blocks on their way to a device.  Any thread may ask.

    The pins, the buffers and the memory of the destinations are kept until the copies
    are done, whether or not this object lives. Blocks stay pinned until somebody has
    looked: ``done``, ``wait``, the next upload from the volume, or ``close``.
    """

    __slots__ = (
        "_flights",
        "lengths",
        "pageable_bytes",
        "registered_bytes",
        "staged_bytes",
    )

    def __init__(self, count: int) -> None:
        self._flights: list[Flight] = []
        self.lengths: list[int | None] = [None] * count
        """Bytes of each block; None for a miss, whose destination is untouched."""
        self.registered_bytes = 0
        """Copied by the device out of the registered mapping."""
        self.staged_bytes = 0
        """Copied by way of the pinned ring."""
        self.pageable_bytes = 0
        """Copied by way of ordinary memory: no pinned ring could be had, or the block
        is larger than all of it."""

    @property
    def found(self) -> list[bool]:
        """Whether each key was a hit."""
        return [length is not None for length in self.lengths]

    def done(self) -> bool:
        """Return whether all bytes have arrived; does not wait."""
        return all([flight.poll() for flight in self._flights])

    def wait(self) -> Upload:
        """Wait until all bytes have arrived; return self."""
        for flight in self._flights:
            flight.wait()
        return self

    def __repr__(self) -> str:
        hits = sum(self.found)
        return f"<Upload of {hits} of {len(self.lengths)} blocks>"


@dataclasses.dataclass(slots=True)
class _Item:
    """A block that does not go out of the mapping."""

    index: int
    key: Buffer
    place: Place
    nbytes: int


# ---- what both directions share -----------------------------------------------------


@contextlib.contextmanager
def _flight(
    volume: Volume,
    device: Device,
    stream: int,
    keep: list[object],
    after: Callable[[], None] | None = None,
) -> Iterator[Flight]:
    """Start a flight; in the block copies are enqueued, by ``_go``, or none at all.

    Requires: the device is current. When the block raises, whatever it enqueued is
    done, or what that needs is kept for ever.
    """
    flight = volume.flights.start(device, keep, after)
    try:
        yield flight
        if flight.open:
            flight.land()
    except BaseException:
        if flight.open:
            flight.settle(stream)
        raise


def _go(
    device: Device, stream: int, flight: Flight, enqueue: Callable[[], None]
) -> None:
    """Enqueue copies, and the event by which the flight lands."""
    event = device.take_event()
    try:
        enqueue()
        device.driver.record(event, stream)
    except BaseException:
        device.drop_event(event)
        raise
    flight.recorded(event)


@contextlib.contextmanager
def _unless_stuck(ring: Ring, slots: list[Slot]) -> Iterator[list[Flight]]:
    """Lose the slots when the flight that the block notes ends in doubt."""
    started: list[Flight] = []
    try:
        yield started
    except BaseException:
        if any(flight.stuck for flight in started):
            ring.lose(slots)
        raise


def _wait_for_owners(device: Device, stream: int, places: Iterable[Place]) -> None:
    """Let the stream wait for what the owners of memory have under way there."""
    others = {p.stream for p in places if p.stream is not None} - {stream, 0}
    if stream == 0:
        others.discard(1)  # the same stream by another name
    for other in others:
        targets.check_stream(device, other)
        event = device.take_event()
        try:
            device.driver.record(event, other)
            device.driver.stream_wait(stream, event)
        finally:
            # The wait refers to what was recorded, not to the event.
            device.drop_event(event)


def _keys(keys: Any) -> list[Buffer]:
    """Return keys one by one; a buffer has 32 bytes for each."""
    if isinstance(keys, (list, tuple)):
        return list(keys)
    view = memoryview(keys).cast("B")
    if view.nbytes % 32:
        raise ConfigError(
            f"keys is a buffer of {view.nbytes} bytes, which is no multiple of 32; "
            f"give a list of keys"
        )
    return [bytes(view[i : i + 32]) for i in range(0, view.nbytes, 32)]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _lots(sizes: Sequence[int], ring: Ring) -> Iterator[tuple[range, int]]:
    """Cut items into lots; yield each with the number of slots that it takes.

    A lot fits one slot; only a single item that is larger takes several.  Items larger
    than the ring have 0 slots.
    """
    slot = ring.shape.slot_bytes
    wanted = min(slot, max(_LOT_MIN_BYTES, sum(sizes) // _LOTS))
    first, used = 0, 0
    for index, nbytes in enumerate(sizes):
        some = _aligned(nbytes)
        if used and used + some > wanted:
            yield range(first, index), 1
            first, used = index, 0
        if some > slot:
            slots = -(-nbytes // slot)
            yield range(index, index + 1), slots if slots <= ring.shape.slots else 0
            first = index + 1
        else:
            used += some
    if first < len(sizes):
        yield range(first, len(sizes)), 1


def _pieces(slots: Sequence[Slot], offset: int, nbytes: int) -> list[tuple[int, Any]]:
    """Return (address, view) of a part of some slots, taken as one after the other."""
    found = []
    for slot in slots:
        size = slot.view.nbytes
        if offset < size:
            some = min(nbytes, size - offset)
            found.append((slot.address + offset, slot.view[offset : offset + some]))
            nbytes -= some
        offset = max(0, offset - size)
    return found


# ---- to the device ------------------------------------------------------------------


def upload(
    attachment: Attachment,
    cache: Cache,
    keys: Any,
    destinations: Sequence[Any],
    stream: Any,
) -> Upload:
    """Enqueue the copies of all blocks that are there.  See ``Cache.upload_async``."""
    names = _keys(keys)
    with attachment.use() as volume:
        if len(names) != len(destinations):
            raise ConfigError(
                f"{len(names)} keys and {len(destinations)} destinations were given"
            )
        handle = targets.stream_of(stream)
        places = targets.resolve(
            destinations, handle, writable=True, name="destinations"
        )
        targets.no_overlap(places, "destinations")
        volume.flights.reap()
        result = Upload(len(names))
        ordinal = targets.find_device(volume.runtime.driver(), places, "destinations")
        if ordinal is None:
            _look_only(cache, names, places, result)
            return result
        with volume.runtime.device(ordinal) as device:
            targets.check_stream(device, handle)
            _wait_for_owners(device, handle, places)
            with volume.transfer():
                work = _Upload(cache, volume, device, handle, names, places, result)
                try:
                    work.run()
                except BaseException:
                    # Nobody gets the result to wait with: nothing may be under way.
                    for flight in result._flights:
                        flight.settle(handle)
                    raise
        return result


def _look_only(
    cache: Cache, keys: Sequence[Buffer], places: Sequence[Place], result: Upload
) -> None:
    """Of destinations without room only empty blocks can be found."""
    for index, nbytes in enumerate(cache._pin_many(keys, None)):
        if isinstance(nbytes, int):
            _check_size(index, nbytes, places[index])
            result.lengths[index] = nbytes


def _check_size(index: int, nbytes: int, place: Place) -> None:
    if nbytes > place.nbytes:
        raise ConfigError(
            f"destinations[{index}] has {place.nbytes} bytes and the block has "
            f"{nbytes}; give a larger one"
        )
    if nbytes % place.item_bytes:
        raise ConfigError(
            f"the block for destinations[{index}] has {nbytes} bytes, which are no "
            f"whole elements of {place.item_bytes} bytes; is it another type?"
        )


class _Upload:
    """One call of ``upload``.  Requires: the device is current."""

    def __init__(
        self,
        cache: Cache,
        volume: Volume,
        device: Device,
        stream: int,
        keys: Sequence[Buffer],
        places: Sequence[Place],
        result: Upload,
    ) -> None:
        self.cache = cache
        self.volume = volume
        self.device = device
        self.stream = stream
        self.keys = keys
        self.places = places
        self.result = result

    def run(self) -> None:
        pins = self.cache._pin_many(self.keys, self.volume.hold)
        try:
            staged = self._from_mapping(pins)
        finally:
            pins.clear()
        for _ in range(_REPLACED_MAX):
            if not staged:
                break
            staged = self._grown(self._stage(staged))

    # ---- registered ------------------------------------------------------------------

    def _from_mapping(self, pins: Sequence[_core.Lease | int | None]) -> list[_Item]:
        """Copy what is pinned, sizes checked before; return what lies elsewhere."""
        staged: list[_Item] = []
        direct: list[tuple[int, _core.Lease, int]] = []
        pin = None
        try:
            for index, pin in enumerate(pins):
                if pin is None:
                    continue
                place = self.places[index]
                nbytes = pin if isinstance(pin, int) else pin.nbytes
                _check_size(index, nbytes, place)
                if isinstance(pin, int):
                    staged.append(_Item(index, self.keys[index], place, nbytes))
                else:
                    direct.append((index, pin, nbytes))
            if direct:
                self._copy_pinned(direct)
        finally:
            # A traceback may keep this frame: it must not keep the pins.
            pin = None
            direct.clear()
        return staged

    def _copy_pinned(self, direct: Sequence[tuple[int, _core.Lease, int]]) -> None:
        copies = [
            (self.places[index].pointer, lease.address, nbytes)
            for index, lease, nbytes in direct
            if nbytes
        ]
        if copies:
            table = self.volume.table
            assert table is not None  # or there were no pins
            copies = _joined(copies, table.ends())
            keep: list[object] = [lease for _, lease, _ in direct]
            keep += [self.places[index].keep for index, _, _ in direct]
            with _flight(self.volume, self.device, self.stream, keep) as flight:
                _go(self.device, self.stream, flight, lambda: self._enqueue(copies))
            self.result._flights.append(flight)
        for index, nbytes in [(index, nbytes) for index, _, nbytes in direct]:
            self.result.lengths[index] = nbytes
            self.result.registered_bytes += nbytes

    def _enqueue(self, copies: Sequence[_Copy]) -> None:
        copy, stream = self.device.driver.copy_to_device, self.stream
        for target, source, nbytes in copies:
            copy(target, source, nbytes, stream)

    # ---- staged ----------------------------------------------------------------------

    def _stage(self, items: Sequence[_Item]) -> list[_Item]:
        """Read and copy; return the items that were not read."""
        ring = self.device.ring(self.volume.runtime.shape)
        missed: list[_Item] = []
        if ring is None:
            for item in items:
                missed += self._pageable(item)
            return missed
        for lot, count in _lots([item.nbytes for item in items], ring):
            chosen = [items[i] for i in lot]
            if count == 0:
                missed += self._pageable(chosen[0])
            else:
                missed += self._lot(ring, chosen, count)
        return missed

    def _lot(self, ring: Ring, items: Sequence[_Item], count: int) -> list[_Item]:
        slots = ring.take(count)
        keep: list[object] = [item.place.keep for item in items]
        with (
            _unless_stuck(ring, slots) as started,
            _flight(
                self.volume, self.device, self.stream, keep, lambda: ring.give(slots)
            ) as flight,
        ):
            started.append(flight)
            pieces, offset = [], 0
            for item in items:
                pieces.append(_pieces(slots, offset, item.nbytes))
                offset += _aligned(item.nbytes)
            lengths = self._read(items, [[view for _, view in p] for p in pieces])
            copies: list[_Copy] = []
            for item, parts, length in zip(items, pieces, lengths, strict=True):
                target, left = item.place.pointer, max(length, 0)
                for address, view in parts:
                    some = min(left, view.nbytes)
                    if some:
                        copies.append((target, address, some))
                    target += some
                    left -= some
            if copies:
                copies = _joined(copies, [])
                _go(self.device, self.stream, flight, lambda: self._enqueue(copies))
                ring.flying(flight)
                self.result._flights.append(flight)
        self.result.staged_bytes += sum(length for length in lengths if length > 0)
        return self._note(items, lengths)

    def _pageable(self, item: _Item) -> list[_Item]:
        heap = bytearray(item.nbytes)
        keep: list[object] = [heap, item.place.keep]
        with _flight(self.volume, self.device, self.stream, keep) as flight:
            lengths = self._read([item], [[heap]])
            if lengths[0] > 0:
                address = self.device.driver.address_of(heap)
                copies = [(item.place.pointer, address, lengths[0])]
                _go(self.device, self.stream, flight, lambda: self._enqueue(copies))
                self.result._flights.append(flight)
        self.result.pageable_bytes += max(lengths[0], 0)
        return self._note([item], lengths)

    def _read(self, items: Sequence[_Item], parts: list[list[Any]]) -> list[int]:
        return self.cache._copy_many([item.key for item in items], parts)

    def _note(self, items: Sequence[_Item], lengths: Sequence[int]) -> list[_Item]:
        missed = []
        for item, length in zip(items, lengths, strict=True):
            if length < 0:
                missed.append(item)
            else:
                self.result.lengths[item.index] = length
        return missed

    def _grown(self, missed: Sequence[_Item]) -> list[_Item]:
        """Return those that are there after all: replaced by a longer block."""
        if not missed:
            return []
        found = self.cache._pin_many([item.key for item in missed], None)
        again = []
        for item, nbytes in zip(missed, found, strict=True):
            if isinstance(nbytes, int) and item.nbytes < nbytes <= item.place.nbytes:
                again.append(dataclasses.replace(item, nbytes=nbytes))
        return again


def _joined(copies: Sequence[_Copy], ends: Sequence[int]) -> list[_Copy]:
    """Make one copy of neighbours, but none across ``ends`` (of registered chunks)."""
    joined: list[_Copy] = []
    for target, source, nbytes in copies:
        if joined:
            before = joined[-1]
            if (
                before[0] + before[2] == target
                and before[1] + before[2] == source
                and not _is_end(ends, source)
            ):
                joined[-1] = (before[0], before[1], before[2] + nbytes)
                continue
        joined.append((target, source, nbytes))
    return joined


def _is_end(ends: Sequence[int], address: int) -> bool:
    position = bisect.bisect_left(ends, address)
    return position < len(ends) and ends[position] == address


# ---- from the device ----------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Lot:
    """Blocks that are being copied to the host."""

    items: range
    flight: Flight | None
    """Of the copies; None before they begin."""
    slots: list[Slot]
    ring: Ring | None
    segments: list[list[Any]]


def put_from_device(
    attachment: Attachment,
    cache: Cache,
    items: Iterable[Any],
    stream: Any,
    *,
    chain: bool,
    parent: Buffer | None,
    overwrite: bool,
) -> list[bool]:
    """See ``Cache.put_from_device``."""
    rows = [tuple(item) for item in items]
    for index, row in enumerate(rows):
        if len(row) not in {2, 3}:
            raise ConfigError(
                f"items[{index}] has {len(row)} parts; it is (key, source) or "
                f"(key, source, header)"
            )
    with attachment.use() as volume:
        handle = targets.stream_of(stream)
        places = targets.resolve(
            [row[1] for row in rows], handle, writable=False, name="sources"
        )
        volume.flights.reap()
        ordinal = targets.find_device(volume.runtime.driver(), places, "sources")
        store = _Store(cache, rows, chain=chain, parent=parent, overwrite=overwrite)
        if ordinal is None:
            store.put(range(len(rows)), [[b""] for _ in rows])
            return store.stored
        with volume.runtime.device(ordinal) as device:
            targets.check_stream(device, handle)
            _wait_for_owners(device, handle, places)
            with volume.transfer():
                _fetch_all(volume, device, handle, places, store)
        return store.stored


class _Store:
    """Puts lots in order; in a chain each lot follows the one before."""

    def __init__(
        self,
        cache: Cache,
        rows: Sequence[Any],
        *,
        chain: bool,
        parent: Buffer | None,
        overwrite: bool,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._chain = chain
        self._parent = parent
        self._overwrite = overwrite
        self.stored: list[bool] = []

    def put(self, lot: range, segments: Sequence[list[Any]]) -> None:
        items: list[Any] = [
            (self._rows[i][0], parts, *self._rows[i][2:])
            for i, parts in zip(lot, segments, strict=True)
        ]
        self.stored += self._cache.put_many(
            items, chain=self._chain, parent=self._parent, overwrite=self._overwrite
        )
        if self._chain and len(lot):
            self._parent = self._rows[lot[-1]][0]


def _fetch_all(
    volume: Volume, device: Device, stream: int, places: Sequence[Place], store: _Store
) -> None:
    """Copy one lot ahead of the one that is being stored, where slots are free."""
    ring = device.ring(volume.runtime.shape)
    sizes = [place.nbytes for place in places]
    if ring is None:
        waiting = [(range(i, i + 1), 0) for i in range(len(sizes))]
    else:
        waiting = list(_lots(sizes, ring))
    waiting.reverse()
    ahead: list[_Lot] = []
    try:
        while waiting or ahead:
            while waiting and len(ahead) < 2:
                lot, count = waiting[-1]
                slots: list[Slot] = []
                if ring is not None and count:
                    # Who holds slots does not wait for more: others may do the same.
                    slots = ring.try_take(count) if ahead else ring.take(count)
                    if not slots:
                        break
                waiting.pop()
                ahead.append(_fetch(volume, device, stream, places, lot, slots, ring))
            done = ahead[0]
            if done.flight is not None:
                done.flight.wait()
            store.put(done.items, done.segments)
            ahead.pop(0)
            _give(done)
    finally:
        for lot_left in ahead:
            _abandon(lot_left, stream)


def _give(lot: _Lot) -> None:
    if lot.ring is not None and lot.slots:
        lot.segments.clear()
        lot.ring.give(lot.slots)


def _abandon(lot: _Lot, stream: int) -> None:
    """After an error: the slots come back when nothing is copied into them any more."""
    flight = lot.flight
    if flight is not None and not flight.landed:
        flight.settle(stream)
    if flight is None or flight.landed:
        _give(lot)
    elif lot.ring is not None and lot.slots:
        lot.ring.lose(lot.slots)


def _fetch(
    volume: Volume,
    device: Device,
    stream: int,
    places: Sequence[Place],
    lot: range,
    slots: list[Slot],
    ring: Ring | None,
) -> _Lot:
    """Start the copies of a lot."""
    copies: list[_Copy] = []
    segments: list[list[Any]] = []
    keep: list[object] = [places[i].keep for i in lot]
    offset = 0
    for index in lot:
        place = places[index]
        if slots:
            parts = _pieces(slots, offset, place.nbytes)
            offset += _aligned(place.nbytes)
        else:
            heap = bytearray(place.nbytes)
            keep.append(heap)
            parts = [(device.driver.address_of(heap), memoryview(heap))]
        source = place.pointer
        for address, view in parts:
            if view.nbytes:
                copies.append((address, source, view.nbytes))
                source += view.nbytes
        segments.append([view for _, view in parts])

    def enqueue() -> None:
        for target, source, nbytes in copies:
            device.driver.copy_to_host(target, source, nbytes, stream)

    started = _Lot(lot, None, slots, ring, segments)
    try:
        with _flight(volume, device, stream, keep) as flight:
            started.flight = flight
            if copies:
                _go(device, stream, flight, enqueue)
    except BaseException:
        _abandon(started, stream)
        raise
    return started
