# SPDX-License-Identifier: Apache-2.0
"""The night: processes that store, read, die, and lose power, for as long as told.

    python scripts/soak.py --minutes 60 --processes 8
    python scripts/soak.py --seconds 20 --seed 7 --json build/soak.json

tests/night/ has what happens; one line a minute and a verdict are printed.  Status 0:
nothing was wrong, stale or lost.  Ctrl-C ends it with the verdict on what was done.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from night.episode import TALLY, Episode, said_of  # noqa: E402
from night.oracle import COUNTERS, WAITS  # noqa: E402
from night.plan import draw  # noqa: E402

SHIM = "CKV_SHIM"
FAULTS = ("wrong", "stale", "lost", "other")


class Enough(Exception):
    """Ends the soak between two steps of an episode."""


class Soak:
    """All episodes together."""

    def __init__(
        self, processes: int, seed: int, folder: Path, *, until_fault: bool
    ) -> None:
        self.processes = processes
        self.until_fault = until_fault
        self.interrupted = False
        self.seed = seed
        self.folder = folder
        self.began = time.monotonic()
        self.line_due = self.began + 60
        self.counts = dict.fromkeys((*COUNTERS, *TALLY), 0)
        self.waits = dict.fromkeys(WAITS, 0.0)
        self.memory_max = 0
        self.descriptors_max = 0
        self.episodes: list[dict[str, Any]] = []
        self.said: list[str] = []

    def run(self, seconds: float, episode_s: float) -> None:
        """Episodes until the time is over, or until there is a reason to end."""
        end = self.began + seconds
        while time.monotonic() < end:
            number = len(self.episodes)
            folder = self.folder / str(number)
            plan = draw(number, self.seed, self.processes, folder)
            tally = dict.fromkeys(TALLY, 0)
            episode = Episode(plan, folder, tally, self.look)
            began = time.monotonic()
            enough = False
            try:
                episode.run(min(end, time.monotonic() + episode_s))
            except Enough:
                enough = True
            except Exception:
                episode.fault("other", traceback.format_exc())
            counts = {**episode.oracle.counts(), **tally}
            for name, value in counts.items():
                self.counts[name] += value
            self._longest(episode)
            if any(counts[name] for name in FAULTS):
                self.said.append(f"episode {number}: {plan}\n{said_of(folder)}")
                print(self.said[-1], flush=True)
            self.episodes.append(
                {
                    "name": plan.name,
                    "capacity": plan.capacity,
                    "files": plan.files,
                    "options": plan.options,
                    "seconds": round(time.monotonic() - began, 1),
                    **counts,
                }
            )
            shutil.rmtree(folder)
            if enough:
                return

    def _longest(self, episode: Episode) -> None:
        for name, wait in episode.oracle.longest().items():
            self.waits[name] = max(self.waits[name], wait)
        self.memory_max = max(self.memory_max, episode.memory_max)
        self.descriptors_max = max(self.descriptors_max, episode.descriptors_max)

    def interrupt(self, *_: object) -> None:
        """Handle Ctrl-C; the second one ends everything at once."""
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def look(self, episode: Episode) -> None:
        """Once a second: prints a line when one is due, and knows when to end."""
        if self.interrupted:
            print("interrupted", flush=True)
            raise Enough
        now = {**episode.oracle.counts(), **episode.tally}
        if self.until_fault and any(now[name] for name in FAULTS):
            raise Enough
        if time.monotonic() < self.line_due:
            return
        self.line_due += 60
        self._longest(episode)
        counts = {name: value + now[name] for name, value in self.counts.items()}
        print(self.line(counts), flush=True)

    def line(self, counts: dict[str, int]) -> str:
        """Return the state of things in a line."""
        minutes = (time.monotonic() - self.began) / 60
        waits = "/".join(f"{self.waits[name]:.2f}" for name in WAITS)
        return (
            f"{minutes:6.1f} min  {counts['operations']} ops  {counts['lives']} lives  "
            f"{counts['kills']} kills  {counts['stops']} stops  {counts['cuts']} cuts  "
            f"{counts['failed_writes']} failed writes  {counts['noise']} noise  "
            f"damaged {counts['damaged']} detected {counts['detected']}  "
            f"revived {counts['revived']}  events {counts['events']}  "
            f"resyncs {counts['resyncs']}  wrong {counts['wrong']}  "
            f"stale {counts['stale']}  lost {counts['lost']}  "
            f"other {counts['other']}  longest call/sync/open {waits} s  "
            f"memory {self.memory_max >> 20} MiB  {self.descriptors_max} descriptors"
        )

    def failures(self, wait_limit: float) -> list[str]:
        """Return what the verdict is made of; nothing when the soak has passed."""
        found = [f"{self.counts[name]} {name}" for name in FAULTS if self.counts[name]]
        if self.waits["call"] > wait_limit:
            found.append(f"a call took {self.waits['call']:.1f} s")
        if not self.counts["operations"] or not self.counts["hits"]:
            found.append("nothing was done")
        return found


def preload(folder: Path) -> None:
    """Start this program again under crash/shim.c, so that writes can fail."""
    if os.environ.get(SHIM):
        return
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        print(f"without {compiler}: no write will fail", flush=True)
        return
    library = folder / "shim.so"
    source = ROOT / "tests" / "crash" / "shim.c"
    command = [compiler, "-shared", "-fPIC", "-O1", "-D_GNU_SOURCE"]
    subprocess.run([*command, "-o", str(library), str(source), "-ldl"], check=True)
    libraries = filter(None, [os.environ.get("LD_PRELOAD", ""), str(library)])
    environment = {**os.environ, "LD_PRELOAD": ":".join(libraries), SHIM: "none"}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def commit() -> str:
    """Return the commit that is checked out, as far as git knows."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or "unknown"


@click.command(help=__doc__)
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--seconds", type=float, help="Instead of minutes.")
@click.option("--processes", type=click.IntRange(2, 32), default=8, show_default=True)
@click.option("--seed", type=int, help="Repeats the plan of a run, not its timing.")
@click.option("--episode", type=float, default=45.0, help="Seconds of an episode.")
@click.option(
    "--wait-limit",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds that a call of data may take; the promise is 2.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=ROOT / "build" / "soak",
    help="For the volumes: up to 1 GiB.",
)
@click.option("--until-fault", is_flag=True, help="Ends with the first fault.")
@click.option(
    "--json", "record", type=click.Path(path_type=Path), help="Writes a record."
)
def main(
    *,
    minutes: float,
    seconds: float | None,
    processes: int,
    seed: int | None,
    episode: float,
    wait_limit: float,
    folder: Path,
    until_fault: bool,
    record: Path | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    preload(folder)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    seconds = minutes * 60 if seconds is None else seconds
    work = Path(tempfile.mkdtemp(dir=folder, prefix="run-"))
    soak = Soak(processes, seed, work, until_fault=until_fault)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, soak.interrupt)
    print(f"seed: {seed} (repeat with --seed={seed})", flush=True)
    try:
        soak.run(seconds, episode)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    failures = soak.failures(wait_limit)
    print(soak.line(soak.counts))
    print("FAILED: " + ", ".join(failures) if failures else "passed")
    if record is not None:
        result = {
            "verdict": failures or "passed",
            "command": shlex.join(sys.argv),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seed": seed,
            "processes": processes,
            "seconds": round(time.monotonic() - soak.began, 1),
            "counts": soak.counts,
            "longest_wait_s": soak.waits,
            "memory_max_bytes": soak.memory_max,
            "descriptors_max": soak.descriptors_max,
            "episodes": soak.episodes,
            "said": soak.said,
        }
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
