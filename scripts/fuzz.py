# SPDX-License-Identifier: Apache-2.0

"""Coverage-guided fuzzing of the engine: hostile volume files and shared regions.

    python scripts/fuzz.py                          a fixed number of runs, as CI does
    python scripts/fuzz.py --seconds 1800           longer; what is found new is kept
    python scripts/fuzz.py --target region --runs 0 FILE...     these inputs again

tests/hostile/guided.c says what an input is and what must hold.  Needs clang with its
runtimes (Debian: clang-14 and libclang-rt-14-dev).  The engine is built under
libFuzzer, ASan and UBSan; "edges" are those of csrc/core alone.

It begins with programs made here, one for each kind of change and of call, and those of
tests/hostile/corpus.txt: what once found a fault, and a few that reach far.  Inputs
that reach something new are kept in build/fuzz/TARGET; --keep N writes the N that reach
most to stdout, as lines for corpus.txt.
"""

from __future__ import annotations

import argparse
import base64
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import compile as c  # noqa: E402

HOSTILE = ROOT / "tests" / "hostile"
WORK = c.BUILD / "fuzz"
TARGETS = ("volume", "region")
SANITIZERS = "address,undefined"
STEP_BYTES = 16
STEPS_MAX = 64
RUNS = 1500  # of each target in CI
# As in guided.c.
CHANGE_FILE, CHANGE_OTHER, OPEN_ONE, CLOSE_ALL, READ_ALL = 6, 7, 9, 11, 12
CHANGE_PART, CALL = 13, 14
CHANGES, CALLS = 27, 24  # kinds of changes of a region, the longer list; of calls


def find_clang() -> str:
    """Return a clang that can link libFuzzer."""
    for name in ("clang", *(f"clang-{version}" for version in range(20, 13, -1))):
        path = shutil.which(name)
        if path is None:
            continue
        query = [path, "-print-file-name=libclang_rt.fuzzer-x86_64.a"]
        found = subprocess.run(query, capture_output=True, text=True, check=True)
        library = Path(found.stdout.strip())
        if library.exists() or list(
            library.parent.glob("lib/linux/libclang_rt.fuzzer*")
        ):
            return path
    sys.exit("no clang with libFuzzer: install clang-14 and libclang-rt-14-dev")


def build(target: str) -> Path:
    """Compile the engine for coverage, the target without."""
    common = ["-O1", *c.sanitizer_flags(SANITIZERS)]
    core = c.compile_objects(c.core_sources(), [*common, "-fsanitize=fuzzer-no-link"])
    mine = ["-DHOSTILE_LIBFUZZER", f"-DGUIDED_{target.upper()}", "-Werror", "-Wall"]
    mine += ["-Wno-unused-function"]  # of the headers it shares with other programs
    objects = [*core, *c.compile_objects([HOSTILE / "guided.c"], [*common, *mine])]
    return c.link(
        objects,
        WORK / f"guided-{target}",
        ["-fsanitize=fuzzer", *c.sanitizer_flags(SANITIZERS)],
    )


def programs(target: str) -> Iterator[bytes]:
    """One short program for each kind of change and call, and what corpus.txt has."""
    rng = random.Random(f"programs of {target}")

    def step(*first: int) -> bytes:
        return bytes(first) + rng.randbytes(STEP_BYTES - len(first))

    def finish(*steps: bytes) -> bytes:
        settings = [rng.randrange(3), rng.randrange(3), rng.randrange(3), 0, 0, 0, 0]
        settings[0] += 129 * rng.randrange(2)  # evicts by prefix
        return bytes(settings).ljust(STEP_BYTES, b"\0") + b"".join(steps)

    opening, reading = step(OPEN_ONE, 0, 0), step(READ_ALL, 0)
    for kind in range(CHANGES):
        yield finish(step(0, 0, kind), opening, reading, step(CALL, 0, 0, 0, kind))
        yield finish(opening, reading, step(0, 1, kind), reading, step(CALL, 0, 3))
        parts = [step(CHANGE_PART, kind) for _ in range(16)]
        yield finish(opening, reading, *parts, reading, step(CALL, 0, 3))
    for kind in range(CALLS):
        calls = [step(CALL, 0, n, n, kind) for n in range(6)]
        yield finish(opening, *calls, step(0, 0), *calls, step(CLOSE_ALL), reading)
    for kind in range(10):
        change = step(CHANGE_FILE, 1 - kind % 2, 0, kind)
        yield finish(opening, change, reading, step(CALL), step(CHANGE_OTHER, 0, kind))
    for line in (HOSTILE / "corpus.txt").read_text().splitlines():
        name, _, text = line.partition(" ")
        if name == target:
            yield base64.b64decode(text)


def environment(folder: Path) -> dict[str, str]:
    """Return what the runtimes are told: SIGBUS is the engine's, leaks are faults."""
    return {
        **os.environ,
        "CKV_FUZZ_FOLDER": str(folder),
        "ASAN_OPTIONS": "handle_sigbus=0:allocator_may_return_null=1:detect_leaks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def report(target: str, log: Path) -> bool:
    """Print what a run reached; False when it found a fault."""
    text = log.read_text(errors="replace")
    counters = re.search(r"\((\d+) inline 8-bit counters\)", text)
    edges = re.findall(r"\bcov: (\d+)", text)
    executions = re.findall(r"stat::number_of_executed_units:\s+(\d+)", text)
    print(
        f"{target}: {executions[-1] if executions else '?'} executions, "
        f"{edges[-1] if edges else '?'} of {counters[1] if counters else '?'} edges"
    )
    return bool(executions) and "SUMMARY:" not in text


def start(
    target: str, options: argparse.Namespace, scratch: Path
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start one target on its corpus, or on the inputs that were named."""
    program = build(target)
    corpus, findings = WORK / target, WORK / "findings"
    begin, folder = scratch / f"begin-{target}", scratch / f"volumes-{target}"
    for path in (corpus, findings, begin, folder):
        path.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(programs(target)):
        (begin / f"{number:04}").write_bytes(content)
    command = [str(program), "-handle_bus=0", "-handle_xfsz=0", "-timeout=120"]
    command += [f"-seed={options.seed}", f"-artifact_prefix={findings}/{target}-"]
    command += ["-print_final_stats=1", "-rss_limit_mb=2400", "-malloc_limit_mb=1000"]
    if options.inputs:
        command += options.inputs
    else:
        command += [f"-max_len={STEP_BYTES * STEPS_MAX}"]
        command += [f"-max_total_time={options.seconds}", f"-runs={options.runs}"]
        if options.fresh:  # the same in every checkout
            corpus = scratch / f"corpus-{target}"
            corpus.mkdir()
        command += [str(corpus), str(begin)]
    log = WORK / f"{target}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(folder), stdout=output, stderr=subprocess.STDOUT
        )
    return process, log


def keep(target: str, count: int, scratch: Path) -> None:
    """Print the inputs that reach most for their length, as lines for corpus.txt."""
    merged, folder = scratch / f"merged-{target}", scratch / f"merging-{target}"
    merged.mkdir()
    folder.mkdir()
    command = [str(build(target)), "-handle_bus=0", "-handle_xfsz=0", "-merge=1"]
    command += [str(merged), str(WORK / target)]
    subprocess.run(command, env=environment(folder), check=True, capture_output=True)
    # libFuzzer takes the small ones first, and names what is new in each.
    for path in sorted(merged.iterdir(), key=lambda path: path.stat().st_size)[:count]:
        print(target, base64.b64encode(path.read_bytes()).decode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the targets side by side; 1 when any found a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--runs", type=int, help=f"of each target; {RUNS}")
    parser.add_argument("--seconds", type=int, default=0, help="instead of runs")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    parser.add_argument("--fresh", action="store_true", help="not from build/fuzz")
    parser.add_argument("--keep", type=int, metavar="N")
    parser.add_argument("inputs", nargs="*")
    options = parser.parse_args(arguments)
    targets = options.target or TARGETS
    if options.inputs and len(targets) != 1:
        parser.error("inputs belong to one --target")
    if options.runs is None:
        options.runs = -1 if options.seconds else RUNS
    os.environ["CC"] = find_clang()
    shm = Path("/dev/shm")
    scratch = Path(
        tempfile.mkdtemp(prefix="ckv-fuzz-", dir=shm if shm.is_dir() else None)
    )
    try:
        if options.keep is not None:
            for target in targets:
                keep(target, options.keep, scratch)
            return 0
        print(f"seed: {options.seed} (repeat with --seed {options.seed})", flush=True)
        running = [(target, *start(target, options, scratch)) for target in targets]
        failed = False
        for target, process, log in running:
            code = process.wait()
            if not report(target, log) or code != 0:
                failed = True
                print(log.read_text(errors="replace")[-6000:])
        return int(failed)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
