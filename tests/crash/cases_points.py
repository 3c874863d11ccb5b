# SPDX-License-Identifier: Apache-2.0
"""Kill and stop a process at a named point; what the others then find."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crash.blobs import blob, key_of
from crash.nursery import Child, fork, stopped
from crash.tour import (
    FILL_BYTES,
    LAP,
    OTHER,
    ask_again,
    config,
    fill,
    grow_chains,
    tour,
    tour_of_two,
    traveller_of,
)

from cyclone_kv import Cache, CacheConfig, OpenTimeoutError, VolumeError

CORE = Path(__file__).resolve().parents[2] / "csrc" / "core"
PATIENCE = 5.0  # seconds; N5 says 2, and CI machines are shared
# How long a stopped process stays so, while the others are asked again and again; 60 in
# the long form.  The longest answers are appended to the file CKV_CRASH_WAITS.
STOP_SECONDS = float(os.environ.get("CKV_CRASH_STOP_SECONDS", "0"))
SEED_KEYS = 6

# What lies in the way of the victim: processes that are killed together at these
# points.  So the victim sweeps pins, reservations and hints, succeeds a lock, and
# verifies a block of which two versions are left.  The one with the lock comes last: it
# holds the others up.
CRASHES = (
    "put.written:stop:12",
    "put.published:stop:9",
    "kill.condemned:stop:1",
    "put.locked:stop:9",
)
# Alone, two blocks of one key are left for the rebuild, and cleared ones.
CRASHES_ALONE = ("file.header:kill:2", "put.published:kill:9")
# Verifying leftovers takes a second; so only who has to do with them meets them.
MEETS_CRASHES = ("check.", "slot.", "stripe.", "sweep.")
# A hint that nobody has swept yet makes verify() skip the totals.
CRASHES_FOR = {"check.totals": ("kill.condemned:stop:1",)}


def places() -> int:
    """How many CKV_POINTs there are, however they are written."""
    text = "".join(source.read_text() for source in sorted(CORE.glob("*.[ch]")))
    return len(re.findall(r"\bCKV_POINT\s*\((?!name\))", text))


def named() -> int:
    text = "".join(source.read_text() for source in sorted(CORE.glob("*.[ch]")))
    return len(re.findall(r'CKV_POINT\("[^"]+"\)', text))


def names() -> list[str]:
    """Every CKV_POINT of the engine."""
    found: set[str] = set()
    for source in sorted(CORE.glob("*.c")):
        found.update(re.findall(r'CKV_POINT\("([^"]+)"\)', source.read_text()))
    return sorted(found)


def again_while_stopped(step: Callable[[], Any]) -> None:
    """Does it once, and every second again for as long as somebody stays stopped."""
    end = time.monotonic() + STOP_SECONDS
    step()
    while time.monotonic() < end:
        time.sleep(1)
        step()


# ---- the survivor ------------------------------------------------------------------


class Survivor:
    """A process that has the volume open from before to after the accident."""

    def __init__(self, path: str, go: Callable[[], str]) -> None:
        self.path = path
        self.cache = Cache.open(path, config())
        self.keys = [key_of("survivor", i) for i in range(SEED_KEYS)]
        for key in self.keys:
            assert self.cache.put(key, blob(key, 70_000))
        self.views = [self.cache.get(key) for key in self.keys[:3]]
        self.other = Cache.open(path, namespace="probe")


def survive(path: str, commands: int, answers: int) -> None:
    """Obeys one letter at a time; answers "." when it was done."""
    survivor = Survivor(path, lambda: "")
    steps = {b"p": _probe, b"c": _check_survivor}
    os.write(answers, b".")
    while command := os.read(commands, 1):
        steps[command](survivor)
        os.write(answers, b".")
    survivor.views.clear()
    survivor.other.close()
    survivor.cache.close()


def _probe(survivor: Survivor) -> None:
    """N5: nothing takes long because another process is stopped."""
    cache, key = survivor.cache, key_of("probe", time.monotonic_ns())
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("put", lambda: cache.put(key, b"p" * 9000)),
        ("put overwrite", lambda: cache.put(key, b"q" * 9000, overwrite=True)),
        ("put_many", lambda: cache.put_many([(key_of(i), b"m") for i in range(9)])),
        ("get", lambda: cache.get(survivor.keys[4])),
        ("get_into", lambda: cache.get_into(survivor.keys[4], bytearray(70_000))),
        ("contains", lambda: cache.contains(survivor.keys[5])),
        ("longest_prefix", lambda: cache.longest_prefix(survivor.keys)),
        ("remove", lambda: cache.remove(key)),
        ("clear", lambda: _clear(survivor)),
        ("events", cache.events),
        ("stats", cache.stats),
    ]
    longest = (0.0, "")
    for name, step in steps:
        began = time.monotonic()
        step()
        took = time.monotonic() - began
        assert took < PATIENCE, f"N5: {name} took {took:.1f} s"
        longest = max(longest, (took, name))
    if waits := os.environ.get("CKV_CRASH_WAITS"):
        with open(waits, "a") as file:
            file.write(f"{longest[0]:.3f} s {longest[1]}\n")


def _clear(survivor: Survivor) -> None:
    try:
        survivor.other.clear()
    except VolumeError:  # it cannot be recorded while the tour's path is out of use
        if not survivor.cache.stats().volume.failed_paths:
            raise


def _check_views(survivor: Survivor) -> None:
    for key, view in zip(survivor.keys, survivor.views, strict=False):
        assert view is not None
        assert bytes(view) == blob(key, 70_000), "N2: a held view has changed"


def _check_survivor(survivor: Survivor) -> None:
    cache = survivor.cache
    _check_views(survivor)
    if cache.stats().volume.failed_paths:  # as the tour left it when it was killed
        assert cache.recover() == 1
    report = cache.verify()
    assert report.ok, f"verify beside a dead process: {report.first_fault}"
    assert cache.stats().volume.processes == 1, "a slot of a dead process counts"
    assert fill(cache, "survivor", 2 * LAP) == 2 * LAP, "puts were refused"
    _check_views(survivor)
    stats = cache.stats().volume
    assert stats.pinned_entries == len(survivor.views), "pins of a dead process count"
    assert stats.puts_no_run == 0
    report = cache.verify()
    assert report.ok, f"verify after two laps: {report.first_fault}"


class Companion:
    """The handle on the survivor's process."""

    def __init__(self, path: str) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()

        def run() -> None:
            os.close(self._commands)
            os.close(self._answers)
            survive(path, commands, answers)

        self.child = fork(run)
        os.close(commands)
        os.close(answers)
        self._await()

    def _await(self) -> None:
        if os.read(self._answers, 1) != b".":
            self.child.result(5)  # raises what it met
            raise AssertionError("the survivor ended")

    def probe(self) -> None:
        self._tell(b"p")

    def check(self) -> None:
        self._tell(b"c")

    def _tell(self, command: bytes) -> None:
        os.write(self._commands, command)
        self._await()

    def end(self) -> None:
        os.close(self._commands)
        self.child.result()
        os.close(self._answers)


# ---- afterwards --------------------------------------------------------------------


def _fresh(path: str) -> None:
    """A process that opens the volume when all others are gone."""
    travellers = [traveller_of(path, who) for who in ("victim", *CRASHES_ALONE)]
    with Cache.open(path, config()) as cache:
        evicting = any(each.journal.filling for each in travellers)
        faults = [
            fault for each in travellers for fault in each.faults(cache, evicting)
        ]
        assert not faults, faults
        report = cache.verify()
        assert not report.structure_faults, report.first_fault
        assert not report.unreadable, report.first_fault
        assert not report.damaged_payloads, report.first_fault
        stats = cache.stats().volume
        assert (stats.processes, stats.pinned_entries) == (1, 0)
        assert stats.failed_paths == 0
        assert len(cache) == sum(
            entry.namespace_tag == bytes(16) for entry in cache.ls()
        )
        assert fill(cache, "fresh", 2 * LAP) == 2 * LAP, "puts were refused"
        report = cache.verify()
        assert report.ok, report.first_fault
    with Cache.open(path, config()) as cache:
        assert cache.verify().ok


# ---- cases -------------------------------------------------------------------------


def kill_alone(path: str, point: str, *, count: int = 1, created: bool = True) -> bool:
    """Nobody else has the volume open.  False when the point was not reached."""
    for crash in CRASHES_ALONE if created else ():
        fork(tour, path, crash, point=crash).wait()
    victim = fork(tour, path, "victim", point=f"{point}:kill:{count}")
    if not _died(victim):
        return False
    fork(_fresh, path).result()
    return True


def _crash_together(path: str, point: str) -> None:
    children: list[Child] = []
    if not point.startswith(MEETS_CRASHES):
        return
    for crash in CRASHES_FOR.get(point, CRASHES):
        children.append(fork(tour, path, crash, point=crash))
        assert stopped(children[-1]), f"{crash} was not reached"
    for child in children:
        child.kill()


def kill_beside_another(path: str, point: str, count: int = 1) -> bool:
    companion = Companion(path)
    _crash_together(path, point)
    victim = fork(tour, path, "victim", point=f"{point}:kill:{count}")
    if not _died(victim):
        return False
    companion.probe()
    companion.check()
    companion.end()
    fork(_fresh_after_laps, path).result()
    return True


def _fresh_after_laps(path: str) -> None:
    with Cache.open(path) as cache:
        report = cache.verify()
        assert report.ok, report.first_fault
        assert cache.stats().volume.pinned_entries == 0


def stop_beside_another(path: str, point: str) -> bool:
    companion = Companion(path)
    _crash_together(path, point)
    victim = fork(tour, path, "victim", point=f"{point}:stop:1")
    if not stopped(victim):
        victim.result()
        return False
    again_while_stopped(companion.probe)
    fork(_open_beside_stopped, path).result()
    victim.signal(signal.SIGCONT)
    victim.result()  # it goes on and finds everything as it left it
    companion.check()
    companion.end()
    fork(_fresh_after_laps, path).result()
    return True


def _open_beside_stopped(path: str) -> None:
    began = time.monotonic()
    try:
        cache = Cache.open(path, config(open_timeout=0.3))
    except OpenTimeoutError as error:
        if re.search(r"process \d+", str(error)) is None:
            raise AssertionError("it names nobody") from error
        return
    finally:
        assert time.monotonic() - began < PATIENCE, "open ignored its timeout"
    key = key_of("beside", 0)
    if cache.put(key, blob(key, 30_000)):
        view = cache.get(key)
        assert view is not None
        assert bytes(view) == blob(key, 30_000)
    cache.close()


def kill_while_evicting(path: str, point: str) -> bool:
    """Nobody else has the volume open, and each put overwrites older blocks."""
    victim = fork(_evict, path, point=f"{point}:kill:30")
    if not _died(victim):
        return False
    fork(_fresh, path).result()
    return True


def _evict(path: str) -> None:
    with Cache.open(path, config()) as cache:
        assert fill(cache, "evicting", 2 * LAP) == 2 * LAP


def kill_while_replacing(path: str, point: str) -> bool:
    """What a survivor then removes, and syncs, stays removed when all have died."""
    key = key_of("replaced")
    survivor = fork(_remove_later, path, key)
    _wait_for(f"{path}.open")
    victim = fork(_replace, path, key, point=f"{point}:kill:1")
    died = _died(victim)
    Path(f"{path}.go").touch()
    assert survivor.wait() == -signal.SIGKILL
    fork(_is_gone, path, key).result()
    return died


def _wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.002)


def _remove_later(path: str, key: bytes) -> None:
    with Cache.open(path, config()) as cache:
        assert cache.put(key, blob(key, 40_000, 1))
        Path(f"{path}.open").touch()
        _wait_for(f"{path}.go")
        cache.remove(key)
        cache.sync()
        assert cache.get(key) is None
        os.kill(os.getpid(), signal.SIGKILL)


def _replace(path: str, key: bytes) -> None:
    with Cache.open(path, config()) as cache:
        assert cache.put(key, blob(key, 50_000, 2), overwrite=True)


def _is_gone(path: str, key: bytes) -> None:
    with Cache.open(path, config()) as cache:
        view = cache.get(key)
        assert view is None, f"a removed block of {len(view)} bytes is back"
        assert cache.verify().ok


def kill_among_chains(path: str, point: str, count: int) -> bool:
    """The region lives on in another process, with what the victim left half done."""
    keeper = fork(_keep_open, path, {"eviction": "prefix"})
    _wait_for(f"{path}.open")
    victim = fork(_grow, path, "victim", point=f"{point}:kill:{count}")
    died = _died(victim)
    if died:
        fork(_grow_on, path).result()
    Path(f"{path}.end").touch()
    keeper.result()
    return died


def _keep_open(path: str, options: dict[str, Any]) -> None:
    with Cache.open(path, config(**options)):
        Path(f"{path}.open").touch()
        while not Path(f"{path}.end").exists():
            time.sleep(0.01)


def _grow(path: str, who: str) -> None:
    with Cache.open(path, config(eviction="prefix")) as cache:
        grow_chains(cache, who, 12)
        cache.verify(repair=True)


def _grow_on(path: str) -> None:
    """Two laps more: nothing is stuck, and what is wrong is told and put right."""
    with Cache.open(path, config(eviction="prefix")) as cache:
        report = cache.verify()
        assert report.ok, report.first_fault
        before = cache.stats().volume
        grow_chains(cache, "after", 24)
        after = cache.stats().volume
        assert after.puts_stored > before.puts_stored
        assert after.puts_no_run == after.puts_busy == 0
        cache.verify(repair=True)
        report = cache.verify()
        assert report.ok, report.first_fault


def stop_with(path: str, point: str, options: dict[str, str], action: str) -> bool:
    """Stopped, or killed, while all processes use the same policies."""
    keeper = fork(_keep_open, path, options)
    _wait_for(f"{path}.open")
    victim = fork(_busy, path, "victim", options, point=f"{point}:stop:1")
    reached = stopped(victim)
    if reached:
        again_while_stopped(lambda: fork(_busy, path, "other", options).result())
        if action == "kill":
            victim.kill()
        else:
            victim.signal(signal.SIGCONT)
    if action == "stop" or not reached:
        victim.result()
    fork(_busy_on, path, options).result()
    Path(f"{path}.end").touch()
    keeper.result()
    return reached


def two_at_once(path: str, first: str, second: str, options: dict[str, str]) -> int:
    """One is stopped while another is killed, and a third works beside them."""
    keeper = fork(_keep_open, path, options)
    _wait_for(f"{path}.open")
    victims = []
    for who, point in (("first", first), ("second", second)):
        victim = fork(_busy, path, who, options, point=f"{point}:stop:1")
        victims.append((victim, stopped(victim)))
    again_while_stopped(lambda: fork(_busy, path, "third", options).result())
    (stays, stays_stopped), (dies, died) = victims
    if died:
        dies.kill()
    else:
        dies.result()
    again_while_stopped(lambda: fork(_busy, path, "fourth", options).result())
    if stays_stopped:
        stays.signal(signal.SIGCONT)
    stays.result()
    fork(_busy_on, path, options).result()
    Path(f"{path}.end").touch()
    keeper.result()
    fork(_fresh_after_laps, path).result()
    return stays_stopped + died


def _busy(path: str, who: str, options: dict[str, Any]) -> None:
    """Puts, overwrites, lookups, removals, a clear and a sync, over a lap; N5, N1.

    Who is stopped while it opens keeps others from opening: they say so.
    """
    try:
        _busy_inside(path, who, {"open_timeout": 0.5, **options})
    except OpenTimeoutError:
        if who in ("victim", "first"):
            raise


def _busy_inside(path: str, who: str, options: dict[str, Any]) -> None:
    # Who works beside one that is stopped with a stripe locked waits a second a put.
    beside = who not in ("victim", "first")
    longest = 0.0

    def timed(step: Callable[[], Any]) -> Any:
        nonlocal longest
        began = time.monotonic()
        result = step()
        longest = max(longest, time.monotonic() - began)
        return result

    with (
        Cache.open(path, config(**options)) as cache,
        Cache.open(path, config(**options), namespace=who) as own,
    ):
        if options.get("eviction") == "prefix":
            grow_chains(cache, who, 1 if beside else 12)
        elif options.get("admission") and not beside:
            fill(cache, who, 2 * LAP)  # full: from now on the policy decides
            ask_again(cache, who)
        for number in range(4 if beside else LAP):
            key = key_of(who, number)
            data = blob(key, 200_000 + number)
            again = bool(number % 2)
            timed(lambda k=key, d=data, a=again: cache.put(k, d, overwrite=a))
            seen = timed(lambda key=key: cache.get(key))
            assert seen is None or bytes(seen) == data, "N1: wrong bytes"
            del seen
            mine = key_of("own", number)
            timed(lambda mine=mine: own.put(mine, b"o" * 5000))
            if number % 4 == 3:
                timed(lambda key=key: cache.remove(key))
                assert cache.get(key) is None, "a removed block is there"
        timed(lambda: own.clear())
        timed(cache.sync)
        timed(lambda: fill(cache, who, 1))
    if beside:  # the others may have been stopped inside a call
        assert longest < PATIENCE, f"N5: a call took {longest:.1f} s"


def _busy_on(path: str, options: dict[str, Any]) -> None:
    with Cache.open(path, config(**options)) as cache:
        report = cache.verify(repair=True)
        assert not report.damaged_payloads, report.first_fault
        report = cache.verify()
        assert report.ok, report.first_fault
        stats = cache.stats().volume
        assert stats.pinned_entries == 0
        before = stats.puts_stored + stats.puts_not_admitted
        if options.get("eviction") == "prefix":
            grow_chains(cache, "after", 24)
        else:
            fill(cache, "after", LAP)
            fill(cache, "after", LAP)  # asked for twice
        after = cache.stats().volume
        asked = after.puts_stored + after.puts_not_admitted
        assert asked > before, "puts were neither taken nor refused"


def hold_views(path: str, rounds: int) -> None:
    """A process that holds views is stopped while others go round, then killed."""
    keeper = fork(_keep_open, path, {})
    _wait_for(f"{path}.open")
    for number in range(rounds):
        holder = fork(_hold, path, number)
        _wait_for(f"{path}.held{number}")
        holder.signal(signal.SIGSTOP)
        assert stopped(holder)
        again_while_stopped(lambda: fork(_fill_beside, path, 3).result())
        holder.signal(signal.SIGCONT)
        Path(f"{path}.look{number}").touch()
        _wait_for(f"{path}.right{number}")
        holder.signal(signal.SIGSTOP)
        holder.kill()
        fork(_fill_beside, path, 0).result()
    Path(f"{path}.end").touch()
    keeper.result()


def _hold(path: str, number: int) -> None:
    with Cache.open(path, config()) as cache:
        keys = [key_of("held", number, i) for i in range(4)]
        for key in keys:
            assert cache.put(key, blob(key, 300_000))
        views = [cache.get(key) for key in keys]
        Path(f"{path}.held{number}").touch()
        _wait_for(f"{path}.look{number}")
        for key, view in zip(keys, views, strict=True):
            assert view is not None
            assert bytes(view) == blob(key, 300_000), "N2: a held view has changed"
        Path(f"{path}.right{number}").touch()
        time.sleep(60)  # until it is killed


def _fill_beside(path: str, pinned: int) -> None:
    """Two laps: nothing waits for the holder, and a dead one holds nothing."""
    with Cache.open(path, config()) as cache:
        began = time.monotonic()
        assert fill(cache, "beside", 2 * LAP) == 2 * LAP, "puts were refused"
        assert time.monotonic() - began < 4 * PATIENCE
        report = cache.verify()
        assert report.ok, report.first_fault
        held = cache.stats().volume.pinned_entries
        assert (held > 0) == (pinned > 0), f"{held} pins"


def kill_in_set_of_two(folder: str, point: str, count: int) -> bool:
    """A set of two files: whatever a dead process left, the next open completes."""
    victim = fork(tour_of_two, folder, point=f"{point}:kill:{count}")
    if not _died(victim):
        return False
    fork(_fresh_of_two, folder).result()
    return True


def _fresh_of_two(folder: str) -> None:
    paths = [f"{folder}/one.cyc", f"{folder}/two.cyc"]
    key = key_of("fresh two")
    with Cache.open(paths, CacheConfig(capacity=32 << 20)) as cache:
        assert cache.put(key, blob(key, 100_000))
        report = cache.verify()
        assert report.ok, report.first_fault
    with Cache.open(paths[::-1]) as cache:
        view = cache.get(key)
        assert view is not None
        assert bytes(view) == blob(key, 100_000)


def _died(victim: Child) -> bool:
    status = victim.wait()
    if status == 0:
        return False
    if status != -signal.SIGKILL:
        victim.result()
        raise AssertionError(f"the victim ended with {status}")
    return True


assert FILL_BYTES * LAP > (16 << 20)
assert OTHER
