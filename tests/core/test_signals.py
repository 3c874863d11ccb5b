# SPDX-License-Identifier: Apache-2.0
"""No call ends the process by SIGBUS, whatever the process did with that signal.

Copies out of the mapping and into the targets of a read load and store themselves;
where a read call would answer EFAULT, these meet the signal.  Each case is a process
of its own.
"""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import core_child
import pytest

PRELUDE = """
import ctypes, faulthandler, mmap, os, signal, sys, threading
from pathlib import Path
from os_faults import OsTable
from models import MIB, MISS, OK, PAGE, Engine, pattern

FOLDER = Path(sys.argv[1])
table = OsTable(core)
SIZE = 3 * MIB
DATA = pattern(1, SIZE)

def cached_as(share):
    # The whole of what is asked about seems to be in memory, or none of it.
    def cached(fd, offset, length, result):
        result.pages, result.dirty_pages = (-(-length // PAGE) if share else 0), 0
        return 0
    table.replace("cached", cached)

def forget(engine):
    for entry in range(engine.region.layout.entry_count):
        engine.region.marks[entry] = engine.region.heats[entry] = 0

def cut(engine):
    # The second MiB of the block and what follows is lost; a load meets the hole.
    table.replace("populate_read", lambda address, length: -22)
    place = next(i for i in engine.list() if i.payload_length == SIZE).offset_bytes
    os.truncate(FOLDER / "kv", place + MIB)

def lost_target(name, size=SIZE):
    # Memory of the caller that nothing can be stored to any more.
    fd = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, size)
    memory = mmap.mmap(fd, size)
    os.truncate(fd, PAGE)
    return memory

engine = Engine(core, FOLDER / "kv", 64 * MIB)
assert engine.put(b"k", DATA) == OK
assert engine.get_into(b"k", bytearray(SIZE)) == (OK, SIZE)
"""


def passes(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    done = core_child.run(PRELUDE + textwrap.dedent(script), folder)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done


READ_WHAT_IS_LOST = """
for _ in range(3):
    assert engine.get_into(b"k", bytearray(SIZE)) == (MISS, 0)
    target = [bytearray(SIZE)]
    assert engine.get_many_into([(b"k", target)] * 2) == [(MISS, 0)] * 2
assert engine.stats.pinned_entries == 0
"""


@pytest.mark.parametrize(
    "before",
    [
        "",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])",
        "signal.signal(signal.SIGBUS, signal.SIG_DFL)",
        "signal.signal(signal.SIGBUS, signal.SIG_IGN)",
        "faulthandler.enable()",
    ],
    ids=["ours", "blocked", "default", "ignored", "faulthandler"],
)
@pytest.mark.parametrize("thread", [False, True], ids=["main", "thread"])
def test_lost_pages_are_a_miss(volume_folder, before, thread):
    body = "def work():" + textwrap.indent(READ_WHAT_IS_LOST, "    ")
    body += "    done.append(True)\ndone = []\n"
    if thread:
        body += "t = threading.Thread(target=work)\nt.start()\nt.join()\n"
    else:
        body += "work()\n"
    passes(
        f"cached_as(True)\n{before}\ncut(engine)\n{body}assert done\n", volume_folder
    )


LOST_TARGET = """
memory = lost_target("target")
for targets in ([memory], [bytearray(5), memory]):
    assert engine.get_into(b"k", *targets) == (MISS, 0)
    assert engine.get_many_into([(b"k", targets)] * 2) == [(MISS, 0)] * 2
assert engine.stats.pinned_entries == 0
good = bytearray(SIZE)
assert engine.get_into(b"k", good) == (OK, SIZE) and good == DATA
assert engine.stats.corrupt == 0
"""


def test_a_target_that_cannot_be_stored_to_is_a_miss(volume_folder):
    """As it is for a read call, which answers EFAULT."""
    passes("cached_as(True)\n" + LOST_TARGET, volume_folder)


@pytest.mark.parametrize(
    "before", ["", "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGBUS])"]
)
def test_a_target_of_a_direct_read_likewise(disk_folder, before):
    passes(
        f"""
table.replace("make_huge", lambda address, length: 0)
cached_as(False)
if lib.ckv_file_direct(engine.volume.files) < 0:
    sys.exit(0)
forget(engine)
{before}
"""
        + LOST_TARGET.replace("    assert", "    forget(engine)\n    assert"),
        disk_folder,
    )
