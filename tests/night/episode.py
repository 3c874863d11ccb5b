# SPDX-License-Identifier: Apache-2.0
"""An episode: one volume, several lives of its shared region, each with an end.

    life    the watch opens and inspects; workers are started, killed, stopped, woken
    end     calm      the workers end by themselves, the watch settles
            killed    all are stopped, the watch lists, all are killed at once
            sudden    all are killed at once, wherever they are
            cut       like killed; then what changed since a sync is lost in part
            damaged   like calm or killed; then payloads or pages of metadata are hit
    after   the region is kept, removed or scribbled on; page cache kept or dropped

The next life inspects what the end has left.  What was stored when it was listed must
be there, unless it was damaged, or (after a cut) was not the same at the last sync.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from night import damage
from night.oracle import Oracle
from night.plan import Plan, draw_life
from night.watch import Listed, watch
from night.worker import Worker, note_fault

__all__ = ["TALLY", "Episode", "said_of"]

ENDS = ("calm", "killed", "sudden", "cut", "cut", "damaged", "damaged")
TALLY = (
    "lives",
    "kills",
    "massacres",  # all killed at once
    "stops",
    "cuts",
    "noise",  # pages of metadata that were overwritten
    "damaged",  # blocks whose payload was hit in the file
    "detected",  # of them, those that were misses when somebody asked
    "revived",  # older versions back after all were killed: see _revived
)
HUNG_S = 60.0
REVIVED_MAX = 8  # in one restart
LOGGING = os.O_CREAT | os.O_APPEND | os.O_WRONLY


class Process:
    """A forked process that dies with us and leaves Ctrl-C to us."""

    def __init__(self, folder: Path, call: Callable[[], object]) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            if os.getppid() == parent:
                log = (folder / "deaths.txt").open("a")
                os.dup2(os.open(folder / "stderr.txt", LOGGING, 0o600), 2)
                faulthandler.enable(log)
                faulthandler.register(signal.SIGUSR1, log)
                try:
                    call()
                    status = 0
                except BaseException:
                    log.write(traceback.format_exc())
                    log.flush()
        finally:
            os._exit(status)

    def ended(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end(self, timeout_s: float) -> int | None:
        """Waits for it to end by itself; None when it does not."""
        deadline = time.monotonic() + timeout_s
        while (status := self.ended()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return status

    def kill(self) -> int:
        """Kills it; the status tells whether that was the reason."""
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def stop(self) -> bool:
        """Stops it and waits for that; False when it ended instead."""
        os.kill(self.pid, signal.SIGSTOP)
        while True:
            state = self._field("stat").rpartition(")")[2].split()[0]
            if state in "TZX":
                return state == "T"
            time.sleep(0.0002)

    def _field(self, name: str) -> str:
        return Path(f"/proc/{self.pid}/{name}").read_text()

    def usage(self) -> tuple[int, int]:
        """Its own memory in bytes, and its descriptors."""
        for line in self._field("status").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024, len(
                    os.listdir(f"/proc/{self.pid}/fd")
                )
        return 0, 0


@dataclasses.dataclass
class Expected:
    """What the next inspection must find."""

    blocks: Listed | None = None
    """What was listed when everybody was stopped or gone."""
    unfinished: bool = False
    """Processes were killed in the middle of something, and nobody swept."""
    cut: bool = False
    """Blocks that were being overwritten may be torn, and are then misses."""
    damaged: dict[str, int] = dataclasses.field(default_factory=dict)
    """Identity and sequence of blocks whose payload was hit."""
    may_lack: int = 0


class Episode:
    """Runs lives until its time is over; counts go to `tally`.

    `look` is called once a second; what it raises ends the episode at once.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        tally: dict[str, int],
        look: Callable[[Episode], None],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.tally = tally
        self.report = look
        self.dice = random.Random(plan.seed)
        folder.mkdir(parents=True, mode=0o700)
        if plan.shm_directory is not None:
            Path(plan.shm_directory).mkdir(mode=0o700)
        self.oracle = Oracle(folder / "oracle", plan)
        self.paths = plan.paths(folder)
        self.crew: list[Process | None] = [None] * plan.processes
        self.asleep: dict[int, float] = {}
        self.watching: Process | None = None
        self.line: socket.socket | None = None
        self.expected = Expected()
        self.life: dict[str, Any] = {}
        self.synced: Listed | None = None
        self.synced_floor = self.oracle.floor.copy()
        self.memory_max = 0
        self.descriptors_max = 0
        self.looked_at = 0.0
        self.story: list[str] = []

    def fault(self, kind: str, text: str) -> None:
        """Counts a fault as one of the watch, with what went before."""
        text += f" (after {', '.join(self.story[-4:])})"
        note_fault(self.folder, self.oracle, self.plan.processes, kind, text)

    def run(self, until: float) -> None:
        """Lives until `until` (monotonic), and a last look at what they have left."""
        try:
            while time.monotonic() < until:
                self.live(min(until, time.monotonic() + self.dice.uniform(3, 9)))
            self.open_watch()
            self.inspect()
            self.ask("settle")
            self.close_watch()
        finally:
            for process in [*self.crew, self.watching]:
                if process is not None:
                    with contextlib.suppress(ProcessLookupError, ChildProcessError):
                        process.kill()

    # ---- the watch ------------------------------------------------------------------

    def open_watch(self) -> None:
        ours, theirs = socket.socketpair()

        def begin() -> None:
            ours.close()
            watch(self.plan, self.folder, self.life, theirs)

        self.watching = Process(self.folder, begin)
        theirs.close()
        self.line = ours
        ours.settimeout(120)
        self.answers = ours.makefile("r")
        if self.hear() != "ready":
            raise RuntimeError("the watch did not open the volume")

    def hear(self) -> Any:
        line = self.answers.readline()
        if not line:
            status = self.watching.end(10) if self.watching else None
            self.watching = None
            raise RuntimeError(f"the watch died: {status}")
        return json.loads(line)

    def ask(self, command: str) -> Any:
        assert self.line is not None
        self.line.sendall(command.encode() + b"\n")
        return self.hear()

    def close_watch(self) -> None:
        assert self.line is not None
        assert self.watching is not None
        self.line.sendall(b"quit\n")
        if self.watching.end(60) != 0:
            self.fault("other", "the watch did not end well")
        self.watching = None
        self.line.close()

    def inspect(self) -> None:
        """Looks at what the last life has left, and tells the oracle."""
        found = self.ask("inspect")
        expected, self.expected = self.expected, Expected()
        before, after = found["before"], found["after"]
        lacking = []
        for identity, place in (expected.blocks or {}).items():
            newest = before.get(identity, [-1])[-1]
            replaced = newest > place[-1]
            if newest < place[-1]:
                lacking.append(identity)
            elif (
                identity not in after
                and newest != expected.damaged.get(identity)
                and not (expected.cut and replaced)
            ):
                lacking.append(f"{identity} (its bytes)")
        if len(lacking) > expected.may_lack:
            self.fault(
                "lost",
                f"{len(lacking)} of {len(expected.blocks or {})} blocks after a "
                f"restart (up to {expected.may_lack} may be): {lacking[:3]}",
            )
        hit = [
            identity
            for identity, sequence in expected.damaged.items()
            if identity in before and before[identity][-1] == sequence
        ]
        served = [identity for identity in hit if identity in after]
        if served:
            self.fault("wrong", f"{len(served)} damaged blocks are not misses")
        self.tally["detected"] += len(hit) - len(served)
        if expected.blocks and not expected.cut and found["corrupt"] != len(hit):
            self.fault("other", f"{found['corrupt']} corrupt, {len(hit)} were hit")
        versions = np.array(found["versions"], dtype=np.uint64)
        floor = np.maximum(self.oracle.floor, self.oracle.cleared.max(axis=0) + 1)
        stale = (versions != 0) & (
            (versions < floor) | (versions > self.oracle.pending)
        )
        stale &= ~self._revived(versions, floor, expected)
        for process, number in np.argwhere(stale)[:3]:
            self.fault(
                "stale",
                f"{process}/{number} after a restart: {versions[process, number]} is "
                f"not in [{floor[process, number]}, "
                f"{self.oracle.pending[process, number]}]",
            )
        if not self.plan.evicts and expected.may_lack == 0 and not expected.damaged:
            kept = self.oracle.present.copy()
            kept[:, [n for n in range(self.plan.keys) if self.plan.space(n)]] = 0
            gone = int(np.count_nonzero((kept != 0) & (versions == 0)))
            if gone:
                self.fault("lost", f"{gone} blocks that nothing evicted")
        self.oracle.present[:] = versions
        self.oracle.floor[:] = np.maximum(self.oracle.floor, versions)

    def _revived(
        self, versions: np.ndarray, floor: np.ndarray, expected: Expected
    ) -> np.ndarray:
        """Older versions that may be back, and only so many.

        A process that is stopped for seconds between the two steps of an eviction has
        taken the block away and left its record.  When the key is then stored anew, the
        new block goes too, and all die, that record is found: docs/failure-model.md.
        """
        back = np.zeros(versions.shape, dtype=bool)
        if not expected.unfinished:
            return back
        for process, number in np.argwhere((versions != 0) & (versions < floor)):
            key = self.plan.key(process, number).hex()
            listed = (name[32:] == key for name in expected.blocks or {})
            back[process, number] = not any(listed)
        count = int(np.count_nonzero(back))
        if count > REVIVED_MAX:
            return np.zeros(versions.shape, dtype=bool)
        self.tally["revived"] += count
        return back

    # ---- a life ---------------------------------------------------------------------

    def live(self, until: float) -> None:
        self.tally["lives"] += 1
        end = self.dice.choice(ENDS)
        self.life = draw_life(self.dice, self.plan)
        if end == "cut":
            self.life["sync_interval"] = None
        self.open_watch()
        self.inspect()
        self.story.append(end)
        self.oracle.end[0] = 0
        self.oracle.unsynced[0] = 0
        began = time.monotonic()
        while time.monotonic() < until:
            self.tick()
            late = time.monotonic() > began + (until - began) * 0.6
            if end == "cut" and self.synced is None and late:
                self.take_image()
        if end == "calm" or (end == "damaged" and self.dice.randrange(2)):
            self.end_calmly()
        elif end == "sudden":
            self.end_suddenly()
        else:
            self.end_killed()
        self.oracle.anchor[:] = 0
        if end == "cut" and self.synced is not None:
            self.cut_power()
        elif end == "damaged":
            self.damage()
        self.rest()

    def tick(self) -> None:
        dice = self.dice
        for me, process in enumerate(self.crew):
            if process is None:
                self.start(me)
        now = time.monotonic()
        for me, wake in list(self.asleep.items()):
            if now > wake:
                self.wake(me)
        if now > self.looked_at + 1:
            self.looked_at = now
            self.look()
            self.report(self)
        time.sleep(dice.random() * 0.15)
        me = dice.randrange(self.plan.processes)
        what = dice.random()
        if what < 0.35:
            self.kill(me)
        elif what < 0.65 and me not in self.asleep:
            self.stop(me, now + dice.choice((0.02, 0.2, 1, 4)) * dice.random())
        elif what < 0.66:
            self.tally["massacres"] += 1
            for each in range(self.plan.processes):
                self.kill(each)

    def start(self, me: int) -> None:
        seed = self.dice.getrandbits(32)

        def begin() -> None:
            Worker(me, self.plan, self.folder, self.life, seed).run()

        self.oracle.beat[me] = time.monotonic_ns()
        self.crew[me] = Process(self.folder, begin)

    def stop(self, me: int, wake: float) -> None:
        process = self.crew[me]
        assert process is not None
        self.oracle.stops[me] += np.uint64(1)
        if not process.stop():
            self.lost_process(me, process.end(5))
            return
        self.tally["stops"] += 1
        self.asleep[me] = wake

    def wake(self, me: int) -> None:
        self.asleep.pop(me)
        process = self.crew[me]
        if process is not None:
            self.oracle.stops[me] += np.uint64(1)
            self.oracle.beat[me] = time.monotonic_ns()
            os.kill(process.pid, signal.SIGCONT)

    def kill(self, me: int) -> None:
        """Stops first: its pins must be off the oracle before they end."""
        process = self.crew[me]
        if process is None:
            return
        if me not in self.asleep and not process.stop():
            self.lost_process(me, process.end(5))
            return
        self.asleep.pop(me, None)
        self.oracle.anchor[me, :] = 0
        process.kill()
        self.crew[me] = None
        self.tally["kills"] += 1

    def lost_process(self, me: int, status: int | None) -> None:
        self.crew[me] = None
        self.oracle.anchor[me, :] = 0
        if status == 0 and self.oracle.end[0]:
            return
        self.fault("other", f"process {me} ended by itself: {status}")

    def look(self) -> None:
        """Memory, descriptors; who hangs; who has ended."""
        memory = 0
        for me, process in enumerate([*self.crew, self.watching]):
            if process is None:
                continue
            status = process.ended()
            if status is not None:
                self.lost_process(me, status)
                continue
            used, descriptors = process.usage()
            memory += used
            self.descriptors_max = max(self.descriptors_max, descriptors)
            quiet = time.monotonic_ns() - int(self.oracle.beat[me])
            if (
                process is not self.watching
                and me not in self.asleep
                and quiet > HUNG_S * 1e9
            ):
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                self.fault("other", f"process {me} hangs, see deaths.txt")
                self.kill(me)
        self.memory_max = max(self.memory_max, memory)

    def stop_all(self) -> None:
        for me in range(self.plan.processes):
            process = self.crew[me]
            if process is not None and me not in self.asleep:
                self.stop(me, time.monotonic())

    def take_image(self) -> None:
        """A sync, while nobody moves; from here on a cut may lose things."""
        self.stop_all()
        self.oracle.unsynced[0] = 1
        self.ask("sync")
        self.synced = self.ask("list")
        self.synced_floor = self.oracle.floor.copy()
        damage.keep_image(self.paths)
        for me in list(self.asleep):
            self.wake(me)

    # ---- the end of a life ----------------------------------------------------------

    def end_calmly(self) -> None:
        self.oracle.end[0] = 1
        for me in list(self.asleep):
            self.wake(me)
        for me, process in enumerate(self.crew):
            if process is None:
                continue
            status = process.end(HUNG_S)
            if status is None:
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                process.kill()
            self.lost_process(me, status)
        self.ask("settle")
        self.expected = Expected(self.ask("list"))
        self.close_watch()

    def end_killed(self) -> None:
        self.stop_all()
        self.expected = Expected(self.ask("list"), unfinished=True)
        self._kill_everybody()

    def end_suddenly(self) -> None:
        self.expected = Expected(unfinished=True)
        self._kill_everybody()

    def _kill_everybody(self) -> None:
        self.tally["massacres"] += 1
        processes = [one for one in [*self.crew, self.watching] if one is not None]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            if process.end(30) != -signal.SIGKILL:
                self.fault("other", f"{process.pid} did not die of SIGKILL")
        self.tally["kills"] += len(processes)
        self.crew = [None] * self.plan.processes
        self.asleep.clear()
        self.watching = None
        assert self.line is not None
        self.line.close()

    def cut_power(self) -> None:
        self.tally["cuts"] += 1
        damage.cut(self.paths, self.dice)
        synced, blocks = self.synced, self.expected.blocks
        assert synced is not None
        assert blocks is not None
        self.expected.cut = True
        self.expected.blocks = {
            identity: place
            for identity, place in blocks.items()
            if synced.get(identity, [-1])[-1] == place[-1]
        }
        self.oracle.floor[:] = self.synced_floor
        self.oracle.present[:] = 0

    def damage(self) -> None:
        dice = self.dice
        if dice.randrange(3) == 0:
            noise = damage.noise(self.paths, dice)
            self.tally["noise"] += noise.pages
            self.story[-1] += f" {noise}"
            self.expected.may_lack += noise.blocks
            if noise.clears:
                self.oracle.cleared[:] = 0
            return
        blocks = sorted(
            (identity, place)
            for identity, place in (self.expected.blocks or {}).items()
        )
        blocks = [block for block in blocks if block[1][2] > 0]
        for identity, place in dice.sample(blocks, min(len(blocks), 12)):
            path_index, offset, length, sequence = place
            damage.flip(self.paths[path_index], offset, length, dice)
            self.expected.damaged[identity] = sequence
            self.tally["damaged"] += 1

    def rest(self) -> None:
        """Nobody has the volume open."""
        self.synced = None
        region = self.plan.shm_path(self.folder)
        what = self.dice.randrange(4)
        self.story[-1] += (" region removed", " region scribbled on", "", "")[what]
        if what == 0:
            region.unlink(missing_ok=True)
        elif what == 1 and region.exists():
            with region.open("r+b") as file:
                file.seek(self.dice.randrange(64) * 4096)
                file.write(self.dice.randbytes(65_536))
        if self.dice.randrange(3) == 0:
            damage.drop_pages(self.paths)


def said_of(folder: Path) -> str:
    """What was written down about faults, the first lines of it."""
    texts = []
    for name in ("faults.txt", "deaths.txt", "waits.txt"):
        path = folder / name
        if path.exists() and path.stat().st_size:
            texts.append(f"{name}:\n{path.read_text()[:4000]}")
    return "\n".join(texts)
