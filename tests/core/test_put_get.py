# SPDX-License-Identifier: Apache-2.0
"""Every outcome of put and get: refused, failed, damaged, odd sizes, batches."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from os_faults import OsTable

from models import (
    BUSY,
    CHAIN,
    E_INVALID,
    E_TOO_LARGE,
    FAILED_PATH,
    IN_FLIGHT,
    IO_FAILED,
    LIVE,
    MIB,
    MISS,
    NO_RUN,
    OK,
    OVERWRITE,
    PAGE,
    PRESENT,
    SHORT_BUFFER,
    Engine,
    EngineError,
    pattern,
)

HERE = Path(__file__).resolve().parent


@pytest.fixture
def engine(core, volume_path) -> Iterator[Engine]:
    """A volume of one stripe; clean at the end."""
    with Engine(core, volume_path) as engine:
        yield engine
        if not any(path.failed for path in engine.region.paths[0:1]):
            engine.assert_clean()


def key(number: int) -> bytes:
    return hashlib.sha256(b"prefix-%d" % number).digest()


def damage(engine: Engine, name: bytes, at: int) -> None:
    """Flips a bit of a stored block behind the engine's back; `at` may be negative."""
    info = info_of(engine, name)
    end = info.payload_length + info.header_length
    place = info.offset_bytes + (at if at >= 0 else end + at)
    path = engine.ffi.string(engine.info.paths[info.path_index].path).decode()
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def info_of(engine: Engine, name: bytes):
    wanted = engine.stored_key(name)
    return next(i for i in engine.list() if bytes(i.key) == wanted)


def forget_checks(engine: Engine) -> None:
    """As if the region were new: nothing has been verified."""
    for entry in range(engine.region.layout.entry_count):
        engine.region.marks[entry] = 0


class Writes:
    """Fails write calls to the data area of the first file, by their number."""

    def __init__(self, table: OsTable, engine: Engine) -> None:
        self.table, self.engine = table, engine
        self.begin = int(engine.volume.files[0].geometry.data_offset)
        self.table_at = int(engine.volume.files[0].geometry.table_offset)
        self.count = 0
        self.fails: Callable[[int, bool], int] = lambda number, data: 0
        table.replace("write_at", self)

    def __call__(self, fd, iov, count, offset) -> int:
        data = offset >= self.begin
        if fd != self.engine.volume.files[0].data_fd or offset < self.table_at:
            return self.table.native.write_at(fd, iov, count, offset)
        self.count += 1
        failure = self.fails(self.count, data)
        if failure:
            return -failure
        return self.table.native.write_at(fd, iov, count, offset)


@contextlib.contextmanager
def writes_of(core, engine: Engine) -> Iterator[Writes]:
    with OsTable(core) as table:
        yield Writes(table, engine)


# ---- sizes and shapes ---------------------------------------------------------------

B12 = [0, 1, 511, 512, 513, 4095, 4096, 4097, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1]


@pytest.mark.parametrize("verify", [0, 1, 2])
def test_sizes_round_trip(core, volume_folder, verify):  # B12
    with Engine(core, volume_folder / "kv", 64 * MIB, verify=verify) as engine:
        for size in [*B12, 33_554_431]:
            for shift in (0, 1, 64):
                data = pattern(size + shift, size)
                source = memoryview(bytes(shift) + data)[shift:]
                name = b"%d %d" % (size, shift)
                assert engine.put(name, source) == OK
                lease = engine.get(name)
                assert lease is not None
                assert lease.data == data
                assert lease.header == b""
                assert lease.address % PAGE == 0
                lease.release()
                target = bytearray(b"\xa5" * (size + shift))
                assert engine.get_into(name, target) == (OK, size)
                assert target == data + b"\xa5" * shift
        engine.assert_clean()


@given(data=st.data())
@settings(max_examples=50)
def test_scatter_and_gather(core, data):
    """Any split of a payload in, any split out."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as where,
        Engine(core, Path(where) / "kv") as engine,
    ):
        for round_number in range(3):
            lengths = data.draw(
                st.lists(
                    st.one_of(
                        st.integers(0, 3),
                        st.integers(0, 5000),
                        st.sampled_from([0, 4095, 4096, MIB - 1, MIB, MIB + 1]),
                    ),
                    max_size=12,
                )
            )
            total = sum(lengths)
            whole = pattern(round_number, total)
            segments, at = [], 0
            for length in lengths:
                segments.append(whole[at : at + length])
                at += length
            header = pattern(9, data.draw(st.sampled_from([0, 1, 4095, 4096, 65535])))
            name = b"%d" % round_number
            assert engine.put(name, *segments, header=header) == OK
            lease = engine.get(name)
            assert lease.data == whole
            assert lease.header == header
            lease.release()
            outs, left = [], total
            while left > 0:
                piece = data.draw(st.integers(0, left))
                outs.append(bytearray(piece or min(left, 1000)))
                outs.append(bytearray(0))
                left -= len(outs[-2])
            if data.draw(st.booleans()):
                outs.append(bytearray(data.draw(st.integers(0, 10))))
            assert engine.get_into(name, *outs) == (OK, total)
            assert b"".join(outs)[:total] == whole
        engine.assert_clean()


def test_a_thousand_tiny_segments(engine):
    rows = [pattern(i, i % 7) for i in range(1000)]
    assert engine.put(b"k", *rows) == OK
    whole = b"".join(rows)
    assert engine.read(b"k") == whole
    outs = [bytearray(i % 5) for i in range(2000)]
    assert engine.get_into(b"k", *outs) == (OK, len(whole))
    assert b"".join(outs)[: len(whole)] == whole
    rows = [pattern(i, 4097) for i in range(1000)]
    assert engine.put(b"k2", *rows, header=b"h" * 65535) == OK
    assert engine.read(b"k2") == b"".join(rows)


def test_empty_payloads(engine):  # B7
    assert engine.put(b"no segment") == OK
    assert engine.put(b"empty segments", b"", b"") == OK
    assert engine.put(b"only a header", header=b"head") == OK
    for name in (b"no segment", b"empty segments", b"only a header"):
        assert engine.read(name) == b""
        assert engine.get_into(name) == (OK, 0)
        assert engine.get_into(name, bytearray(3)) == (OK, 0)
    lease = engine.get(b"only a header")
    assert lease.header == b"head"
    lease.release()
    assert engine.stats.resident_bytes == 3 * PAGE


def test_limits(engine):
    largest = int(engine.info.payload_max_bytes)
    for header, payload in [
        (65536, 0),
        (0, largest + 1),
        (1, largest),
        (65535, largest),
    ]:
        with pytest.raises(EngineError) as caught:
            engine.put(b"k", bytes(payload), header=bytes(header))
        assert caught.value.status == E_TOO_LARGE
        assert engine.contains(b"k") == [False]
    item = engine.ffi.new("struct ckv_item *")  # lengths that overflow their sum
    segments = engine.ffi.new("struct ckv_segment[2]")
    name, kept = engine.key(b"k")
    for lengths in [(2**63, 2**63), (2**64 - 1, 2), (2**64 - 1, 0), (1 << 32, 0)]:
        for segment, length in zip(segments, lengths, strict=True):
            segment.data, segment.length = kept, length
        item.key, item.segments, item.segment_count = name[0], segments, 2
        status = engine.lib.ckv_put(engine.pointer[0], item, 0, engine.error)
        assert status == E_TOO_LARGE
    reservation = engine.ffi.new("struct ckv_reservation **")
    for length in (2**64 - 1, 2**63, largest + 1):
        assert (
            engine.lib.ckv_reserve(
                engine.pointer[0], item, length, reservation, engine.error
            )
            == E_TOO_LARGE
        )
    for bad in (b"", bytes(65536)):
        for call in (engine.read, engine.put, engine.remove, engine.contains):
            with pytest.raises(EngineError) as caught:
                call(bad)
            assert caught.value.status == E_INVALID
    assert engine.put(bytes(65535), b"long key") == OK
    assert engine.put(b"\0", b"short key") == OK
    assert engine.read(bytes(65535)) == b"long key"
    # A digested key and its digest are two keys.
    assert engine.read(hashlib.sha256(b"\0").digest()) is None


# ---- outcomes of put ----------------------------------------------------------------


def test_present(engine):
    assert engine.put(b"k", b"value", header=b"h") == OK
    events = engine.events()[2]
    written = engine.stats.page_bytes_written
    assert engine.put(b"k", b"VALUE", header=b"H") == PRESENT  # same lengths: believed
    assert engine.stats.page_bytes_written == written
    assert engine.stats.puts_present == 1
    assert engine.events()[2] == events
    assert engine.put(b"k", b"longer") == OK  # another length is another block
    assert engine.read(b"k") == b"longer"
    assert engine.count() == 1


def test_present_but_damaged_is_written_again(engine):
    data = pattern(1, 10_000)
    assert engine.put(b"k", data) == OK
    damage(engine, b"k", 5000)
    assert engine.put(b"k", data) == OK
    assert engine.read(b"k") == data
    assert engine.stats.corrupt == 1
    assert engine.put(b"h", data, header=b"header") == OK
    damage(engine, b"h", -1)
    assert engine.put(b"h", data, header=b"header") == OK
    lease = engine.get(b"h")
    assert lease.header == b"header"
    lease.release()
    assert engine.stats.corrupt == 2


def test_overwrite(engine):
    for i in range(40):
        assert engine.put(b"k", pattern(i, 1000 + i), flags=OVERWRITE) == OK
        assert engine.read(b"k") == pattern(i, 1000 + i)
    assert engine.count() == 1
    assert engine.stats.entries == 1
    kinds = [event.kind for event in engine.events()[0]]
    assert kinds == [1] * 40  # the newer version speaks for both


def test_overwrite_that_fails_keeps_the_old_value(core, engine):
    old, new = pattern(1, 3 * MIB), pattern(2, 3 * MIB)
    assert engine.put(b"k", old) == OK
    with writes_of(core, engine) as writes:
        for n in range(1, 4):
            writes.count = 0
            writes.fails = lambda number, data, n=n: errno.ENOSPC * (number == n)
            assert engine.put(b"k", new, flags=OVERWRITE) == IO_FAILED
            assert engine.read(b"k") == old
    assert engine.stats.puts_io_failed == 3
    assert engine.put(b"k", new, flags=OVERWRITE) == OK
    assert engine.read(b"k") == new
    assert engine.count() == 1


def test_busy_while_a_stopped_process_has_the_lock(core, volume_path):  # N5
    """The only stripe is locked by a process that lives and does nothing."""
    with Engine(core, volume_path) as engine:
        assert engine.put(b"before", b"value") == OK
        script = textwrap.dedent(
            f"""
            import sys, time
            sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
            from pathlib import Path
            from types import SimpleNamespace
            import build_core, models
            module = build_core.load()
            core = SimpleNamespace(lib=module.lib, ffi=module.ffi)
            engine = models.Engine(core, Path({str(volume_path)!r}), 0)
            assert engine.read(b"before") == b"value"
            assert core.lib.ckv_stripe_lock(engine.volume, 0, 0)
            print("locked", flush=True)
            time.sleep(60)
            """
        )
        other = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "locked\n"
            other.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            assert engine.put(b"k", b"v") == BUSY
            assert 0.9 < time.monotonic() - began < 2.0
            assert engine.read(b"before") == b"value"
            assert engine.contains(b"before", b"k") == [True, False]
            assert engine.remove(b"before") == OK  # takes no stripe lock
            assert engine.stats.puts_busy == 1
            other.kill()
            other.wait()
            assert engine.put(b"k", b"v") == OK  # the dead are succeeded
            assert engine.stats.lock_successions == 1
        finally:
            other.kill()
            other.wait()
            other.stdout.close()
        engine.assert_clean()


def test_no_run_while_everything_is_pinned(engine):
    for i in range(16):
        assert engine.put(key(i), pattern(i, MIB)) == OK
    held = [engine.get(key(i)) for i in range(16)]
    assert engine.put(b"k", b"v") == NO_RUN
    assert engine.put(key(3), pattern(99, MIB), flags=OVERWRITE) == NO_RUN
    assert engine.put(key(3), bytes(MIB)) == PRESENT
    for i, lease in enumerate(held):
        assert lease.data == pattern(i, MIB)
    assert engine.remove(key(7)) == OK  # removed, but its pages stay
    assert engine.put(b"k", b"v") == NO_RUN
    assert held[7].data == pattern(7, MIB)
    assert engine.clear() == 15
    assert engine.put(b"k", b"v") == NO_RUN
    assert all(lease.data == pattern(i, MIB) for i, lease in enumerate(held))
    held.pop(7).release()
    assert engine.put(b"k", b"v") == OK
    for lease in held:
        lease.release()
    assert engine.put(b"l", bytes(15 * MIB)) == OK


def hint_for(engine: Engine, name: bytes, slot: int, incarnation: int, since: int):
    value = int(engine.identity(name).hash)
    hint = engine.region.hints[value % engine.lib.CKV_HINTS]
    hint.since_ns = since
    hint.word = (incarnation << 38 | slot << 32 | (value >> 20) & 0xFFFFFFFF) % 2**64
    return hint


def test_in_flight(engine):
    slot, incarnation = engine.volume.slot, engine.volume.incarnation
    now = time.monotonic_ns()
    hint = hint_for(engine, b"k", slot, incarnation, now + 500_000_000)
    assert engine.put(b"k", b"v") == IN_FLIGHT
    assert engine.stats.puts_in_flight == 1
    assert engine.contains(b"k") == [False]
    # Its owner is dead, or has not shown itself for a second.
    hint_for(engine, b"k", slot + 1, incarnation, now)
    assert engine.put(b"k", b"v") == OK
    assert hint.word == 0
    hint_for(engine, b"l", slot, incarnation, now - 1_100_000_000)
    assert engine.put(b"l", b"v") == OK
    # An overwrite waits for it, at most a second.
    hint_for(engine, b"k", slot, incarnation, time.monotonic_ns() - 600_000_000)
    began = time.monotonic()
    assert engine.put(b"k", b"new", flags=OVERWRITE) == OK
    assert 0.3 < time.monotonic() - began < 1.5
    hint = hint_for(engine, b"k", slot, incarnation, time.monotonic_ns() + 10**10)
    began = time.monotonic()
    assert engine.put(b"k", b"newer", flags=OVERWRITE) == IN_FLIGHT
    assert 0.9 < time.monotonic() - began < 1.5
    assert engine.read(b"k") == b"new"
    hint.word = 0


def test_hint_of_another_key_does_not_refuse(engine):
    hint = hint_for(engine, b"k", engine.volume.slot, engine.volume.incarnation, 2**63)
    hint.word ^= 1 << 3  # another tag in the same place
    other = int(hint.word)
    assert engine.put(b"k", b"v") == OK
    assert hint.word == other
    hint.word = 0


def test_failed_path(engine):
    assert engine.put(b"k", b"v") == OK
    lease = engine.get(b"k")
    file = engine.ffi.addressof(engine.volume.files, 0)
    engine.lib.ckv_volume_fail_path(engine.volume, file, b"a test", errno.EIO)
    assert engine.put(b"l", b"v") == FAILED_PATH
    assert engine.read(b"k") is None
    assert engine.contains(b"k") == [False]
    assert engine.get_into(b"k", bytearray(9)) == (MISS, 0)
    assert lease.data == b"v"
    lease.release()
    assert (engine.stats.failed_paths, engine.stats.puts_failed_path) == (1, 1)
    assert engine.recover() == 1
    assert engine.read(b"k") == b"v"
    assert engine.put(b"l", b"v") == OK


def test_every_write_fails_once(core, engine):  # B1
    """EIO takes the path out of use; nothing of the failed block is ever visible."""
    data = pattern(1, 2 * MIB + 5)
    with writes_of(core, engine) as writes:
        for n in range(1, 20):
            assert engine.put(key(0), pattern(0, 5000)) in (OK, PRESENT)
            writes.count = 0
            writes.fails = lambda number, _, n=n: errno.EIO * (number == n)
            status = engine.put(b"k", data, header=b"header")
            writes.fails = lambda number, data: 0
            if status == OK:
                break
            assert status == IO_FAILED
            assert engine.contains(b"k") == [False]
            assert engine.stats.failed_paths == 1
            assert engine.put(b"other", b"v") == FAILED_PATH
            assert engine.recover() == 1
            assert engine.contains(b"k") == [False]
            assert engine.read(key(0)) == pattern(0, 5000)
            engine.assert_clean()
        else:
            raise AssertionError("too many writes for one put")
    assert n == 5  # three pieces and one record
    assert engine.read(b"k") == data


@pytest.mark.parametrize("flags", [0, CHAIN])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_put_many_fails_by_the_item(core, volume_path, flags, code):  # B1
    with Engine(core, volume_path, 64 * MIB) as engine:
        for n in range(1, 40):
            items = [(key(100 * n + i), pattern(i, MIB + 1 + i)) for i in range(4)]
            failed: list[bool] = []

            def fails(number, is_data, n=n, failed=failed) -> int:
                if number == n:
                    failed.append(is_data)
                    return code
                return 0

            with writes_of(core, engine) as writes:
                writes.fails = fails
                statuses = engine.put_many(items, flags)
            if not failed:
                assert statuses == [OK] * 4
                break
            order = statuses if flags == 0 else statuses[::-1]
            at = (n - 1) // 3
            if failed[0]:
                # The others are stored, before and after it.
                assert order == [OK] * at + [IO_FAILED] + [OK] * (3 - at)
                assert engine.stats.failed_paths == 0
            else:
                # The table could not be written: the path is not to be trusted.
                assert order == [OK] * at + [IO_FAILED] + [FAILED_PATH] * (3 - at)
                assert engine.contains(*[name for name, _ in items]) == [False] * 4
                assert engine.recover() == 1
            for (name, data), status in zip(items, statuses, strict=True):
                assert engine.contains(name) == [status == OK]
                if status == OK:
                    assert engine.read(name) == data
            engine.assert_clean()
        assert n == 13  # two pieces and one record each


def test_short_and_interrupted_calls_are_gone_on_with(core, engine, rng):
    data = pattern(1, 3 * MIB + 77)
    with OsTable(core) as table:
        one = engine.ffi.new("struct iovec *")

        def cut(native):
            def call(fd, iov, count, offset):
                draw = rng.random()
                if draw < 0.2:
                    return -errno.EINTR
                if draw < 0.6 and iov[0].iov_len > 1:
                    one.iov_base = iov[0].iov_base
                    one.iov_len = rng.randrange(1, iov[0].iov_len)
                    return native(fd, one, 1, offset)
                return native(fd, iov, count, offset)

            return call

        table.replace("write_at", cut(table.native.write_at))
        table.replace("read_at", cut(table.native.read_at))
        for i in range(10):
            pieces = [data[:i], data[i : 2 * i], data[2 * i :]]
            assert engine.put(key(i), *pieces, header=b"hd" * i) == OK
            out = [bytearray(1000), bytearray(MIB), bytearray(3 * MIB)]
            assert engine.get_into(key(i), *out) == (OK, len(data))
            assert b"".join(out)[: len(data)] == data
            lease = engine.get(key(i))
            assert lease.data == data
            assert lease.header == b"hd" * i
            lease.release()


def test_a_write_that_makes_no_progress_fails(core, engine):
    with OsTable(core) as table:
        table.replace("write_at", lambda fd, iov, count, offset: 0)
        began = time.monotonic()
        assert engine.put(b"k", b"v") in (IO_FAILED, FAILED_PATH)
        assert time.monotonic() - began < 2
    engine.recover()
    assert engine.contains(b"k") == [False]
    assert engine.put(b"k", b"v") == OK


def test_lost_write_back(core, engine):
    """The kernel gave up a page that put had written: everybody must notice."""
    data = pattern(1, 100_000)
    assert engine.put(b"before", data) == OK
    lost = []
    with OsTable(core) as table:

        def pending(fd, offset, length):
            if lost:
                return -lost.pop()
            return table.native.pending_error(fd, offset, length)

        table.replace("pending_error", pending)
        lost.append(errno.EIO)
        status = engine.put(b"k", data)
        assert status == FAILED_PATH or not lost
        deadline = time.monotonic() + 3
        while not engine.stats.failed_paths and time.monotonic() < deadline:
            time.sleep(0.01)
    assert engine.stats.failed_paths == 1
    assert engine.read(b"before") is None
    assert engine.read(b"k") is None
    assert engine.put(b"more", data) == FAILED_PATH
    damage_at = engine.volume.files[0].geometry.data_offset  # what was lost
    path = engine.ffi.string(engine.info.paths[0].path).decode()
    with open(path, "r+b") as file:
        file.seek(damage_at)
        file.write(bytes(4096))
    assert engine.recover() == 1
    assert engine.stats.failed_paths == 0
    assert engine.read(b"before") is None  # its first page is zeros
    assert engine.put(b"before", data) == OK
    assert engine.read(b"before") == data


# ---- outcomes of get ----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4096, 10_001, 2 * MIB])
@pytest.mark.parametrize("how", ["get", "get_into", "get_many_into"])
def test_damage_is_a_miss_and_counted_once(engine, how, size):  # B4
    def miss(name: bytes) -> bool:
        if how == "get":
            return engine.get(name) is None
        target = bytearray(size)
        if how == "get_into":
            return engine.get_into(name, target) == (MISS, 0)
        return engine.get_many_into([(name, [target])]) == [(MISS, 0)]

    places = sorted({0, size // 2, size - 1})
    for i in range(8):
        assert engine.put(key(i), pattern(i, size)) == OK
    for i, at in enumerate(places):
        damage(engine, key(i), at)
    for i in range(len(places)):
        assert miss(key(i))
        assert miss(key(i))
        assert engine.contains(key(i)) == [False]
    stats = engine.stats
    assert stats.corrupt == len(places)
    assert stats.misses == 3 * len(places)
    assert stats.read_errors == 0
    for i in range(len(places), 8):
        assert engine.read(key(i)) == pattern(i, size)
    assert engine.count() == 8 - len(places)


def test_damaged_header_is_a_miss(engine):
    assert engine.put(b"k", b"payload", header=b"header") == OK
    damage(engine, b"k", -2)
    assert engine.get(b"k") is None
    assert engine.stats.corrupt == 1
    assert engine.contains(b"k") == [False]
    # Damaged after it was checked: the view stands, the header is refused.
    assert engine.put(b"l", b"payload", header=b"header") == OK
    lease = engine.get(b"l")
    damage(engine, b"l", -2)
    assert lease.data == b"payload"
    assert lease.header is None
    lease.release()
    assert engine.remove(b"l") == OK


@pytest.mark.parametrize("verify", [0, 1, 2])
def test_when_it_is_checked(core, volume_path, verify):
    with Engine(core, volume_path, verify=verify) as engine:
        data = pattern(3, 20_000)
        assert engine.put(b"k", data) == OK
        for _ in range(3):
            assert engine.read(b"k") == data
            assert engine.get_into(b"k", bytearray(20_000)) == (OK, 20_000)
        assert engine.stats.verified_blocks == {0: 1, 1: 6, 2: 0}[verify]
        damage(engine, b"k", 100)
        assert (engine.read(b"k") is None) == (verify == 1)
        assert (engine.get_into(b"k", bytearray(20_000))[0] == MISS) == (verify == 1)
        assert engine.verify(repair=True).damaged_payloads == (verify != 1)
        engine.assert_clean()


def test_never_still_checks_what_an_earlier_life_left(core, volume_path):
    data = pattern(3, 20_000)
    with Engine(core, volume_path) as engine:
        for name in (b"one", b"two", b"three"):
            assert engine.put(name, data) == OK
        damage(engine, b"one", 3)
        damage(engine, b"two", 3)
    with Engine(core, volume_path, verify=2) as engine:
        assert engine.read(b"one") is None
        assert engine.get_into(b"two", bytearray(20_000)) == (MISS, 0)
        assert engine.read(b"three") == data
        assert (engine.stats.corrupt, engine.stats.verified_blocks) == (2, 1)
        assert engine.put(b"new", data) == OK
        assert engine.read(b"new") == data
        assert engine.read(b"three") == data
        assert engine.stats.verified_blocks == 1
        engine.assert_clean()


@pytest.mark.parametrize("code", [errno.EIO, errno.EFAULT])
def test_unreadable_blocks_are_misses(core, engine, code):
    data = pattern(1, 600_000)
    assert engine.put(b"k", data, header=b"h") == OK
    with OsTable(core) as table:
        base = engine.volume.files[0].geometry.data_offset

        def read_at(fd, iov, count, offset):
            if offset >= base + 262_144:
                return -code
            return table.native.read_at(fd, iov, count, offset)

        table.replace("read_at", read_at)
        assert engine.get(b"k") is None
        assert engine.get_into(b"k", bytearray(600_000)) == (MISS, 0)
        assert engine.get_many_into([(b"k", [bytearray(600_000)])]) == [(MISS, 0)]
        assert engine.stats.read_errors == 3
        table.replace("read_at", lambda fd, iov, count, offset: 0)  # the file ends
        assert engine.get(b"k") is None
        table.replace("read_at", table.native.read_at)
        table.replace("populate_read", lambda address, length: -code)
        assert engine.get(b"k") is None
    assert engine.read(b"k") == data
    assert engine.stats.pinned_entries == 0


def test_short_buffers(engine):
    assert engine.put(b"k", pattern(1, 1000)) == OK
    for targets in (
        [],
        [bytearray(999)],
        [bytearray(500), bytearray(0), bytearray(499)],
    ):
        assert engine.get_into(b"k", *targets) == (SHORT_BUFFER, 1000)
        assert all(not any(target) for target in targets)
    assert engine.stats.short_buffers == 3
    assert engine.stats.lookups == engine.stats.hits + engine.stats.misses
    assert engine.get_into(b"k", bytearray(1000)) == (OK, 1000)
    assert engine.get_into(b"absent", bytearray(1000)) == (MISS, 0)
    assert engine.stats.pinned_entries == 0


def test_exact_targets(engine):
    assert engine.put(b"k", pattern(1, 1000)) == OK
    for lengths, expected in (
        ([1000], OK),
        ([0, 400, 600, 0], OK),
        ([999], SHORT_BUFFER),
        ([1001], SHORT_BUFFER),
        ([1000, 1], SHORT_BUFFER),
        ([], SHORT_BUFFER),
    ):
        targets = [bytearray(length) for length in lengths]
        found = engine.get_many_into([(b"k", targets)], exact=True)
        assert found == [(expected, 1000)], lengths
        assert (b"".join(targets) == pattern(1, 1000)) is (expected == OK)
    assert engine.stats.short_buffers == 4
    assert engine.stats.pinned_entries == 0


def test_get_many_into(engine, rng):
    sizes = [rng.randrange(0, 200_000) for _ in range(60)]
    for i, size in enumerate(sizes):
        assert engine.put(key(i), pattern(i, size)) == OK
    damage(engine, key(5), 0) if sizes[5] else None
    wanted, targets = [], []
    for i in range(70):
        size = sizes[i] if i < 60 else 10
        short = i % 11 == 3 and size > 0
        cut = rng.randrange(0, size + 1 - short)
        pieces = [bytearray(cut), bytearray(size - cut - short)]
        targets.append(pieces)
        wanted.append((key(i), pieces))
    results = engine.get_many_into(wanted)
    for i, (status, length) in enumerate(results):
        if i >= 60 or (i == 5 and sizes[5]):
            assert (status, length) == (MISS, 0)
        elif i % 11 == 3 and sizes[i] > 0:
            assert (status, length) == (SHORT_BUFFER, sizes[i])
        else:
            assert (status, length) == (OK, sizes[i])
            assert b"".join(targets[i]) == pattern(i, sizes[i])
    assert engine.get_many_into([]) == []
    # One bad key harms no other.
    results = engine.get_many_into(
        [(b"", [bytearray(1)]), (key(1), [bytearray(200_000)])]
    )
    assert [status for status, _ in results] == [E_INVALID, OK]


def test_targets_that_change_meanwhile_kill_nothing(core, engine):
    """Another thread writes into the buffer: it is copied again, the block stays."""
    data = pattern(4, 300_000)
    assert engine.put(b"k", data) == OK
    target = bytearray(300_000)
    with OsTable(core) as table:
        spoiled = []

        def read_at(fd, iov, count, offset):
            result = table.native.read_at(fd, iov, count, offset)
            if not spoiled:
                spoiled.append(True)
                engine.ffi.buffer(iov[0].iov_base, 1)[0] = bytes([data[0] ^ 255])
            return result

        table.replace("read_at", read_at)
        assert engine.get_into(b"k", target) == (OK, len(data))
    assert target == data
    assert engine.stats.corrupt == 0


# ---- reservations -------------------------------------------------------------------


class Reservation:
    def __init__(self, engine: Engine, name: bytes, length: int, header: bytes = b""):
        self.engine = engine
        item = engine.ffi.new("struct ckv_item *")
        kept = engine.fill_item(item, name, [], header)
        self.pointer = engine.ffi.new("struct ckv_reservation **")
        engine._check(
            engine.lib.ckv_reserve(
                engine.pointer[0], item, length, self.pointer, engine.error
            )
        )
        del kept
        size = engine.ffi.new("size_t *")
        data = engine.lib.ckv_reservation_data(self.pointer[0], size)
        assert size[0] == length
        self.buffer = engine.ffi.buffer(data, length)

    def commit(self, flags: int = 0) -> int:
        lib, engine = self.engine.lib, self.engine
        return engine._check(lib.ckv_commit(self.pointer, flags, engine.error))


def test_reservations(engine):
    slot = Reservation(engine, b"k", 10_000, b"header")
    assert bytes(slot.buffer) == bytes(10_000)  # not memory of the process
    slot.buffer[5:10] = b"hello"
    assert engine.contains(b"k") == [False]
    assert slot.commit() == OK
    assert slot.pointer[0] == engine.ffi.NULL
    lease = engine.get(b"k")
    assert lease.data == bytes(5) + b"hello" + bytes(9990)
    assert lease.header == b"header"
    lease.release()
    slot = Reservation(engine, b"l", 10)
    engine.lib.ckv_abort(slot.pointer)
    engine.lib.ckv_abort(slot.pointer)  # twice is nothing
    assert engine.contains(b"l") == [False]
    assert Reservation(engine, b"k", 10_000, b"header").commit() == PRESENT
    assert Reservation(engine, b"k", 10_000, b"header").commit(OVERWRITE) == OK
    assert engine.read(b"k") == bytes(10_000)
    assert Reservation(engine, b"empty", 0).commit() == OK
    assert engine.read(b"empty") == b""


# ---- chains, counts, events ---------------------------------------------------------


def test_longest_prefix_and_touch(engine):
    names = [key(i) for i in range(20)]
    for i, name in enumerate(names):
        if i != 12:
            assert engine.put(name, b"x" * i) == OK
    assert engine.longest_prefix(names) == 12
    assert engine.longest_prefix([]) == 0
    assert engine.longest_prefix([b"absent", *names]) == 0
    assert {i.heat for i in engine.list()} == {0}
    assert engine.longest_prefix(names, touch=True) == 12
    heats = {bytes(i.key): i.heat for i in engine.list()}
    assert [heats.get(name) for name in names] == [2] * 12 + [None] + [0] * 7
    assert engine.touch(names) == 19
    assert {i.heat for i in engine.list()} == {2}
    assert engine.prefetch(names) == 19
    assert engine.contains(*names) == [i != 12 for i in range(20)]
    assert engine.stats.pinned_entries == 0


def test_a_touched_block_survives_two_passes(core, volume_path):  # C10
    """Found and touched: still there after two laps of others."""
    with Engine(core, volume_path) as engine:
        for i in range(256):
            assert engine.put(key(i), pattern(i, 65_536)) == OK
        assert engine.longest_prefix([key(i) for i in range(16)], touch=True) == 16
        laps_at = engine.stats.laps
        number, seen = 1000, 0
        while engine.stats.laps < laps_at + 2:
            assert engine.put(key(number), bytes(65_536)) == OK
            number += 1
            seen += engine.contains(key(0))[0]
        assert seen >= number - 1000 - 1
        assert engine.longest_prefix([key(i) for i in range(16)]) == 16
        for i in range(16):
            assert engine.read(key(i)) == pattern(i, 65_536)
        engine.assert_clean()


def test_put_many_in_chain_order(engine):  # C7
    items = [(key(i), pattern(i, 5000)) for i in range(10)]
    assert engine.put(b"root", b"r") == OK
    assert engine.put_many(items, CHAIN, parent=b"root") == [OK] * 10
    order = {bytes(i.key): i for i in engine.list()}
    places = [int(order[name].offset_bytes) for name, _ in items]
    assert places == sorted(places, reverse=True)  # tail first: the head lies last
    numbers = [bytes(e.key) for e in engine.events(1)[0]]
    assert numbers == [name for name, _ in reversed(items)]
    plain = [(key(100 + i), b"v") for i in range(5)]
    assert engine.put_many(plain) == [OK] * 5
    last = [bytes(e.key) for e in engine.events(11)[0]]
    assert last == [name for name, _ in plain]
    # Present ones, bad ones and doubles: each has its own answer.
    statuses = engine.put_many(
        [
            plain[0],
            (b"", b"v"),
            (b"big", bytes(17 * MIB)),
            (key(300), b"v"),
            (key(300), b"v"),
        ]
    )
    assert statuses == [PRESENT, E_INVALID, E_TOO_LARGE, OK, PRESENT]
    assert engine.put_many([]) == []
    assert engine.put_many([], CHAIN, parent=b"root") == []


def test_clear_counts_and_namespaces(core, volume_path):  # C17
    with (
        Engine(core, volume_path) as one,
        Engine(core, volume_path, namespace=b"two") as two,
    ):
        for i in range(10):
            assert one.put(key(i), b"one") == OK
            assert two.put(key(i), b"two") == OK
        assert (one.count(), two.count()) == (10, 10)
        assert one.read(key(1)) == b"one"
        assert two.read(key(1)) == b"two"
        lease = two.get(key(2))
        assert two.clear() == 10
        assert two.clear() == 0
        assert (one.count(), two.count()) == (10, 0)
        assert two.contains(*[key(i) for i in range(10)]) == [False] * 10
        assert two.read(key(1)) is None
        assert two.remove(key(1)) == MISS
        assert lease.data == b"two"
        lease.release()
        assert len(one.list()) == 10
        assert two.put(key(1), b"again") == OK
        assert (two.read(key(1)), two.count()) == (b"again", 1)
        assert one.remove(key(1)) == OK
        assert one.remove(key(1)) == MISS
        assert two.read(key(1)) == b"again"
        kinds = [e.kind for e in one.events()[0]]
        assert kinds == [1] * 20 + [3, 3, 1, 2]
        # What was cleared is collected in silence.
        for i in range(40):
            assert one.put(key(1000 + i), bytes(MIB)) == OK
        assert two.count() in (0, 1)
        one.assert_clean()
    with Engine(core, volume_path, namespace=b"two") as two:
        assert [two.contains(key(i))[0] for i in (0, 2, 3)] == [False] * 3
        two.assert_clean()


def test_a_reader_that_came_before_its_namespace(core, volume_path):
    """Its blocks are cleared for it as well; the default namespace is not its own."""
    with (
        Engine(core, volume_path) as default,
        Engine(core, volume_path, mode=1, namespace=b"late") as reader,
        Engine(core, volume_path, namespace=b"late") as writer,
    ):
        assert writer.put(b"k", b"v") == OK
        assert reader.read(b"k") == b"v"
        assert default.put(b"d", b"v") == OK
        default.clear()
        assert reader.read(b"k") == b"v"
        writer.clear()
        assert reader.contains(b"k") == [False]
        assert reader.read(b"k") is None
        default.assert_clean()


def test_numbers_add_up(engine, rng):
    """Counters against what was done, through evictions."""
    known: dict[bytes, bytes] = {}
    lookups = hits = stored = 0
    for _ in range(600):
        name = key(rng.randrange(80))
        draw = rng.random()
        if draw < 0.5:
            data = pattern(rng.randrange(99), rng.randrange(0, 300_000))
            status = engine.put(name, data, flags=OVERWRITE)
            assert status == OK
            stored += 1
            known[name] = data
        elif draw < 0.6:
            engine.remove(name)
            known.pop(name, None)
        else:
            found = engine.read(name)
            lookups, hits = lookups + 1, hits + (found is not None)
            assert found is None or found == known[name]
    stats = engine.stats
    assert (stats.lookups, stats.hits, stats.misses) == (lookups, hits, lookups - hits)
    assert stats.puts_stored == stored
    live = [i for i in engine.list()]
    assert stats.entries == engine.count() == len(live)
    assert stats.puts_stored == stats.evictions + stats.removed + stats.entries
    pages = sum(max(1, -(-(i.payload_length + i.header_length) // PAGE)) for i in live)
    assert stats.resident_bytes == pages * PAGE
    events, lost, _ = engine.events()
    assert lost == 0
    assert [e.number for e in events] == list(range(1, len(events) + 1))
    alive: set[bytes] = set()
    for event in events:
        if event.kind == 1:
            alive.add(bytes(event.key))
        else:
            assert event.kind == 2
            alive.remove(bytes(event.key))
    assert alive == {bytes(i.key) for i in live}
    assert all(engine.kind(engine.find(n).entry) == LIVE for n in alive)


def test_capacity_comes_back(engine):  # C2
    start = engine.stats.resident_bytes
    for i in range(300):
        assert engine.put(b"k", pattern(i, MIB)) == OK
        if i % 3 == 0:
            assert engine.put(b"k", pattern(i, MIB // 2), flags=OVERWRITE) == OK
        if i % 3 == 1:
            assert engine.clear() == 1
        else:
            assert engine.remove(b"k") == OK
        assert engine.stats.resident_bytes == start
    for i in range(8):
        assert engine.put(key(i), pattern(i, MIB)) == OK
    assert all(engine.read(key(i)) == pattern(i, MIB) for i in range(8))


def test_source_may_change_after_the_call(engine):  # B10
    data = bytearray(pattern(1, 5000))
    before = bytes(data)
    assert engine.put(b"k", data) == OK
    data[:] = bytes(5000)
    assert engine.read(b"k") == before


def test_reopened(core, volume_path, rng):
    kept = {}
    with Engine(core, volume_path) as engine:
        for i in range(120):
            data = pattern(i, rng.randrange(0, 200_000))
            assert engine.put(key(i), data, header=b"h%d" % i) == OK
            kept[i] = data
        alive = {i for i in kept if engine.contains(key(i))[0]}
    for _ in range(2):
        with Engine(core, volume_path, 0) as engine:
            assert engine.count() == len(alive)
            for i, data in kept.items():
                lease = engine.get(key(i))
                assert (lease is not None) == (i in alive)
                if lease is not None:
                    assert lease.data == data
                    assert lease.header == b"h%d" % i
                    lease.release()
            engine.assert_clean()


def test_a_volume_of_odd_stripes_opens_as_it_is(core, volume_path):
    """Capacity 0 takes what is there, also what rounding left below 16 MiB."""
    with Engine(
        core, volume_path, 16 * MIB, stripe_count=3, expected_object_bytes=MIB
    ) as e:
        assert e.put(b"k", b"v") == OK
    with Engine(core, volume_path, 0) as e:
        assert e.read(b"k") == b"v"
        e.assert_clean()


def test_leases_outlive_the_handle(core, volume_path):
    engine = Engine(core, volume_path)
    assert engine.put(b"k", b"value", header=b"h") == OK
    lease = engine.get(b"k")
    with Engine(core, volume_path) as other:
        engine.close()
        for i in range(60):
            assert other.put(key(i), pattern(i, MIB)) == OK
        assert lease.data == b"value"
        assert lease.header == b"h"
        lease.release()
        other.assert_clean()


def test_a_handle_is_closed_once(core, volume_path):
    engine = Engine(core, volume_path)
    engine.close()
    assert engine.pointer[0] == engine.ffi.NULL
    engine.close()


def test_one_of_two_paths_fails(core, volume_path):
    """The other goes on; what was stored, replaced or removed meanwhile stays so."""
    paths = [(volume_path, 16 * MIB), (volume_path.with_name("kv2.cyc"), 16 * MIB)]
    with Engine(core, paths) as engine:
        for i in range(40):
            assert engine.put(key(i), pattern(i, 200_000)) == OK
        on = {i: int(info_of(engine, key(i)).path_index) for i in range(40)}
        assert set(on.values()) == {0, 1}
        file = engine.ffi.addressof(engine.volume.files, 0)
        engine.lib.ckv_volume_fail_path(engine.volume, file, b"a test", errno.EIO)
        for i in range(40):
            assert engine.read(key(i)) == (pattern(i, 200_000) if on[i] else None)
        lost = [i for i in range(40) if not on[i]]
        assert len(lost) >= 4
        again, gone, both = lost[0], lost[1], lost[2]
        assert engine.put(key(again), b"again") == OK
        assert engine.remove(key(gone)) in (OK, MISS)
        assert engine.put(key(both), b"both") == OK
        assert engine.remove(key(both)) == OK
        assert engine.recover() == 1
        assert engine.read(key(again)) == b"again"
        assert engine.read(key(both)) is None
        assert engine.read(key(gone)) is None
        for i in lost[3:]:
            assert engine.read(key(i)) == pattern(i, 200_000)
        assert engine.count() == 38
        engine.assert_clean()
