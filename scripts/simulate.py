# SPDX-License-Identifier: Apache-2.0

"""Runs seeds of the simulation: several processes in one, every step chosen by a seed.

    python scripts/simulate.py --seconds 60             new seeds, as CI does
    python scripts/simulate.py --seed 1703 --trace      one seed again, step by step
    python scripts/simulate.py --seeds 100000 --processes 3

Prints each finding with its seed, and a summary.  Ends with 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from simulation import build_simulation  # noqa: E402


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, help="of the first run; default: random")
    parser.add_argument("--seeds", type=int, help="how many; default: 1, or no limit")
    parser.add_argument("--seconds", type=int, default=0, help="no new seed after that")
    parser.add_argument("--processes", type=int, default=0, help="default: by the seed")
    parser.add_argument("--first", action="store_true", help="stop at a finding")
    parser.add_argument("--hashes", action="store_true", help="of the trace of each")
    parser.add_argument("--trace", action="store_true", help="print every step")
    parser.add_argument("--folder", type=Path, help="on tmpfs; default: temporary")
    return parser.parse_args()


def main() -> int:
    """Build, run; return 1 if there was a finding."""
    options = parse()
    seed = options.seed if options.seed is not None else random.randrange(1, 2**40)
    seeds = options.seeds or (1_000_000_000 if options.seconds else 1)
    print(f"seed: {seed} (repeat one with --seed=N)", flush=True)
    command = [
        str(build_simulation.build_program()),
        str(build_simulation.build_engine()),
    ]
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(
        dir=options.folder or shared, prefix="ckv-simulation-"
    ) as folder:
        command += [folder, "--seed", str(seed), "--seeds", str(seeds)]
        command += ["--seconds", str(options.seconds)]
        command += ["--processes", str(options.processes)]
        command += ["--first"] * options.first + ["--trace"] * options.trace
        command += ["--hashes"] * options.hashes
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
