# SPDX-License-Identifier: Apache-2.0

"""Fails every call of the engine, one after the other, in every scenario.

    python scripts/fault_sweep.py                      all, some 40 minutes of 2 cores
    python scripts/fault_sweep.py --only recover       scenarios of this name
    python scripts/fault_sweep.py --cases 500 --seed 7 so many of each, by the seed
    python scripts/fault_sweep.py --faults             what fails, and why it may

Prints how many cases of each kind were tried; ends with 1 when something was found.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import fault_sweep  # noqa: E402


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default="", help="regular expression for names of scenarios"
    )
    parser.add_argument("--cases", type=int, default=0, help="of each; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sanitize", default="", help="address,undefined")
    parser.add_argument("--folder", type=Path, help="for the volumes; default: tmpfs")
    parser.add_argument("--faults", action="store_true", help="print the list of them")
    return parser.parse_args()


def print_scenario(outcome: fault_sweep.Outcome, seconds: float) -> None:
    """Say what became of one scenario, as soon as it is done."""
    print(
        f"{outcome.scenario:34} {outcome.transient:6} once {outcome.persistent:6} "
        f"lasting {outcome.absorbed:6} absorbed {len(outcome.findings):4} findings "
        f"{seconds:6.0f} s",
        flush=True,
    )
    for finding in outcome.findings:
        print(f"    {finding}", flush=True)


def main() -> int:
    """Run the scenarios side by side; return 1 if something was found."""
    options = parse()
    program = fault_sweep.build(options.sanitize)
    if options.faults:
        return subprocess.run([str(program), "--faults"], check=False).returncode
    shm = Path("/dev/shm")
    parent = options.folder or (shm if shm.is_dir() else None)
    names = [
        name for name in fault_sweep.scenarios(program) if re.search(options.only, name)
    ]
    with tempfile.TemporaryDirectory(dir=parent, prefix="ckv-sweep-") as folder:

        def run(number: int) -> fault_sweep.Outcome:
            started = time.monotonic()
            outcome = fault_sweep.run(
                program,
                Path(folder, str(number)),
                names[number],
                cases=options.cases,
                seed=options.seed,
            )
            print_scenario(outcome, time.monotonic() - started)
            return outcome

        with ThreadPoolExecutor(max_workers=options.jobs) as pool:
            outcomes = list(pool.map(run, range(len(names))))
    calls: collections.Counter[str] = collections.Counter()
    for outcome in outcomes:
        calls.update(outcome.calls)
    print("\ncases by call:")
    for name, count in calls.most_common():
        print(f"    {name:20} {count:7}")
    findings = sum(len(outcome.findings) for outcome in outcomes)
    transient = sum(outcome.transient for outcome in outcomes)
    persistent = sum(outcome.persistent for outcome in outcomes)
    absorbed = sum(outcome.absorbed for outcome in outcomes)
    print(
        f"\n{transient + persistent} cases in {len(outcomes)} scenarios: {transient} "
        f"calls that failed once, {persistent} from then on; {absorbed} of them "
        f"changed nothing for the caller; {findings} findings"
    )
    return 1 if findings or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
