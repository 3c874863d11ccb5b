# SPDX-License-Identifier: Apache-2.0

"""Engines with one fault each, which the simulation has to find.

Each is the sound engine with one passage of one C file replaced: a step of a protocol
left out or moved.  A passage that is not there exactly once is an error, so a change of
the code cannot turn a mutant into the sound engine unseen.

    python tests/simulation/mutants.py      how many seeds each of them takes
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import build_simulation  # noqa: E402  (the path is set up above)
from support import compile as c  # noqa: E402


class Mutant(NamedTuple):
    """A fault: `before` becomes `after` in `file`; `breaks` names what it breaks."""

    name: str
    file: str
    before: str
    after: str
    breaks: str
    rare: bool = False  # takes hundreds of seeds: with CKV_SIMULATION=long only


MUTANTS = (
    Mutant(
        "pin-without-second-look",
        "pin.c",
        "if (ckv_load_ordered_u64(&volume->region.states[entry]) == live_state) {",
        "if (entry < volume->region.layout.entry_count || live_state == 0) {",
        "N2 of pin.h: the pin counts although the entry died before the bit was set",
        rare=True,
    ),
    Mutant(
        "pin-of-any-life",
        "pin.c",
        "if (ckv_load_ordered_u64(&volume->region.states[entry]) == live_state) {",
        "if ((ckv_load_ordered_u64(&volume->region.states[entry]) & 7) =="
        " (live_state & 7)) {",
        "N2 of pin.h: the entry has come back under the same number, for another key",
        rare=True,
    ),
    Mutant(
        "claim-without-sweep",
        "slot.c",
        "        sweep_column(volume, slot);\n"
        "    }\n"
        "    for (size_t i = 0; i < CKV_ARRAY_LENGTH(volume->counters_at_open); i++) {",
        "    }\n"
        "    for (size_t i = 0; i < CKV_ARRAY_LENGTH(volume->counters_at_open); i++) {",
        "S2: the pins of the dead pass for those of the next owner",
    ),
    Mutant(
        "pin-without-lock-bit",
        "pin.c",
        "if (ckv_cas_ordered_u64(pin, &word, word | WORD_LOCK)) {\n"
        '            CKV_POINT("pin.last");',
        "if (ckv_cas_ordered_u64(pin, &word, word)) {\n"
        '            CKV_POINT("pin.last");',
        "N1 of pin.h: the bit is taken away under a pin of another thread",
    ),
    Mutant(
        "reuse-without-look-at-pins",
        "stripe.c",
        "    if (ckv_load_ordered_u64(&volume->region.masks[entry]) == 0) {\n"
        "        return true;\n"
        "    }\n"
        "    ckv_entry_bury(volume, entry);\n"
        "    return false;\n",
        "    return true;\n",
        "E3: pages are reused under a pin that came before the kill",
        rare=True,
    ),
    Mutant(
        "publish-before-payload",
        "entry.c",
        '    CKV_POINT("put.indexed");\n'
        "    if (ckv_file_write_record(file, local_entry, record) < 0) {\n"
        "        return CKV_IO_FAILED; /* the slot is stale when the entry is DEAD */\n"
        "    }\n"
        '    CKV_POINT("put.recorded");\n',
        '    CKV_POINT("put.indexed");\n',
        "W1: an entry is LIVE before its record is written",
    ),
    Mutant(
        "kill-before-insert",
        "writer.c",
        '    CKV_POINT("put.written");\n',
        '    CKV_POINT("put.written");\n'
        "    ckv_index_keep_stored(volume, identity, UINT64_MAX);\n",
        "I2: the older version dies before the newer one is there",
    ),
    Mutant(
        "strike-after-dead",
        "entry.c",
        "    ckv_entry_strike(volume, file, entry); /* E2: before DEAD */\n"
        "    uint64_t expected = own_state(volume, CKV_STATE_DYING);\n"
        "    const bool moved =\n"
        "        ckv_cas_ordered_u64(&volume->region.states[entry], &expected,"
        " CKV_STATE_DEAD);\n",
        "    uint64_t expected = own_state(volume, CKV_STATE_DYING);\n"
        "    const bool moved =\n"
        "        ckv_cas_ordered_u64(&volume->region.states[entry], &expected,"
        " CKV_STATE_DEAD);\n"
        "    ckv_entry_strike(volume, file, entry);\n",
        "E2: a late strike hits the next record of the number",
        rare=True,
    ),
    Mutant(
        "lock-without-successor",
        "stripe.c",
        "        succeed_any(volume);\n",
        "",
        "N5: the lock of a dead process is never taken over",
    ),
)


def build(mutant: Mutant) -> Path:
    """Builds the engine with the fault."""
    text = (c.CORE / mutant.file).read_text()
    if text.count(mutant.before) != 1:
        raise ValueError(f"{mutant.name}: the passage in {mutant.file} has changed")
    changed = {mutant.file: text.replace(mutant.before, mutant.after)}
    return build_simulation.build_engine(changed, mutant.name)


if __name__ == "__main__":
    import subprocess
    import tempfile

    program = build_simulation.build_program()
    for mutant in MUTANTS:
        engine = build(mutant)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            result = subprocess.run(
                [program, engine, folder, "--seeds", "2000", "--first", *sys.argv[1:]],
                capture_output=True,
                text=True,
                check=False,
            )
        print(f"{mutant.name}: {result.stdout}{result.stderr}", flush=True)
        engine.unlink()
