# SPDX-License-Identifier: Apache-2.0

"""Cuts the power under recorded streams of writes; the long form of tests/power.

    python scripts/power_cuts.py --cuts 20000 --seed 7
    python scripts/power_cuts.py --workload wrap --cuts 2000

Each stream is recorded anew and cut some 150 times; a fourth of the lives that follow
is cut as well, and counts.  A failure is told with its seeds, its stream is kept in
build/power, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "core")]

import build_core  # noqa: E402
from power.cuts import WORKLOADS, Wrong, campaign  # noqa: E402

CUTS_PER_STREAM = 150
KEPT = ROOT / "build" / "power"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=20_000, help="images in all")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().getrandbits(32)
    )
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append")
    options = parser.parse_args()
    module = build_core.load()
    core = SimpleNamespace(lib=module.lib, ffi=module.ffi)
    print(f"seed: {options.seed} (repeat with --seed {options.seed})", flush=True)
    totals: dict[str, dict[str, int]] = {}
    began = time.monotonic()
    done = 0
    names = itertools.cycle(options.workload or WORKLOADS)
    for number, name in enumerate(names):
        if done >= options.cuts or time.monotonic() - began > options.seconds:
            break
        seed = f"{options.seed}-{number}"
        try:
            counts = campaign(core, name, seed, CUTS_PER_STREAM, keep=KEPT)
        except Wrong as wrong:
            print(f"WRONG {wrong}", flush=True)
            return 1
        done += counts.cuts
        total = totals.setdefault(name, {"streams": 0})
        total["streams"] += 1
        for field, value in dataclasses.asdict(counts).items():
            total[field] = total.get(field, 0) + value
    for name, total in totals.items():
        print(name, *(f"{value} {field}" for field, value in total.items()), sep=", ")
    print(f"{done} cuts in {time.monotonic() - began:.0f} s, nothing wrong", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
