# SPDX-License-Identifier: Apache-2.0
"""What an episode of the soak is like: drawn from a seed, the same in every process.

blocks of its own      process p alone stores blocks (p, k), with versions that grow
anchors                the first of them: pinned by their owner for a while
blocks of namespace    "cleared": those with an odd k, which two processes clear
chains                 prefixes that all processes store, read and remove
"""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path
from typing import Any

from crash.blobs import blob, key_of

from cyclone_kv import CacheConfig

__all__ = ["ANCHORS", "CLEARED", "HEAD_BYTES", "PAGE", "Plan", "draw", "draw_life"]

MIB = 1 << 20
PAGE = 4096
ANCHORS = 2
CLEARED = "cleared"
_HEAD = struct.Struct("<QQ")
HEAD_BYTES = _HEAD.size
_SHAPES = {  # lengths in bytes, capacities in MiB
    "tiny": (16, 6000, (16, 24)),
    "small": (16, 60_000, (16, 32)),
    "medium": (50_000, 400_000, (32, 64)),
    "mixed": (16, 3_000_000, (64, 128)),
    "large": (MIB, 8_000_000, (96, 192)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """An episode; `options` are those of the volume, a life adds its own."""

    name: str
    seed: int
    processes: int
    evicts: bool
    capacity: int
    files: int
    lengths: tuple[int, ...]
    keys: int
    chains: int
    chain_blocks: int
    namespace_of_chains: str
    options: dict[str, Any]
    shm_directory: str | None

    def config(self, life: dict[str, Any]) -> CacheConfig:
        """The configuration of one process."""
        return CacheConfig(
            capacity=self.capacity,
            shm_dir=self.shm_directory,
            **{**self.options, **life},
        )

    def paths(self, folder: Path) -> list[str]:
        """The volume files of the episode."""
        return [f"{folder}/kv{number}.cyc" for number in range(self.files)]

    def shm_path(self, folder: Path) -> Path:
        """The shared region; which file it is named after is the engine's choice."""
        where = Path(self.shm_directory or folder)
        found = [file for file in where.iterdir() if file.name.endswith("-shm")]
        return found[0] if found else where / "none-shm"

    # ---- blocks of one process ------------------------------------------------------

    def key(self, process: int, number: int) -> bytes:
        """The key of block `number` of `process`."""
        return key_of("soak", self.seed, process, number)

    def length(self, process: int, number: int, version: int) -> int:
        """Bytes of a payload, without its head."""
        at = process * 977 + number * 7919 + version * 104_729
        return self.lengths[at % len(self.lengths)]

    def payload(self, process: int, number: int, version: int) -> bytes:
        """What the block holds: version and length, then words of its own."""
        length = self.length(process, number, version)
        body = blob(self.key(process, number), length, version)
        return _HEAD.pack(version, length) + body

    def header(self, process: int, number: int, version: int) -> bytes:
        """The user header of that version."""
        kind = (process + number + version) % 4
        if kind < 2:
            return b""
        return blob(self.key(process, number), (0, 0, 9, 300)[kind], version + 1)

    def version_of(self, data: bytes | memoryview, process: int, number: int) -> int:
        """The version that a payload is, or -1 when it is none."""
        if len(data) < _HEAD.size:
            return -1
        version, length = _HEAD.unpack_from(data)
        if version > 2**40 or length != len(data) - _HEAD.size:
            return -1
        return version if data == self.payload(process, number, version) else -1

    def space(self, number: int) -> str:
        """The namespace of block `number`."""
        return CLEARED if number % 2 and number >= ANCHORS else ""

    # ---- chains ---------------------------------------------------------------------

    def chain_key(self, chain: int, number: int) -> bytes:
        """The key of a block of a chain."""
        return key_of("soak chain", self.seed, chain, number)

    def chain_payload(self, chain: int, number: int) -> bytes:
        """Its bytes, which never change; now and then there are none."""
        at = chain * 31 + number * 7
        length = self.lengths[at % len(self.lengths)] if at % 23 else 0
        return blob(self.chain_key(chain, number), length)

    @property
    def longest(self) -> int:
        """Bytes of the longest payload."""
        return max(self.lengths) + _HEAD.size


def draw(number: int, seed: int, processes: int, folder: Path) -> Plan:
    """The plan of episode `number`."""
    dice = random.Random(f"{seed} {number}")
    name = list(_SHAPES)[(number + dice.randrange(2)) % len(_SHAPES)]
    shortest, longest, capacities = _SHAPES[name]
    evicts = dice.randrange(5) != 0 or name in ("mixed", "large")
    capacity = dice.choice(capacities) * MIB
    if not evicts:
        name, shortest, longest, capacity = "kept", 16, 20_000, 96 * MIB
    ratio = longest / shortest
    lengths = [
        max(shortest, round(shortest * ratio ** dice.random())) for _ in range(61)
    ]
    mean = sum(PAGE * (1 + length // PAGE) for length in lengths) / len(lengths)
    wanted = capacity * (dice.uniform(1.5, 3) if evicts else 0.3) / mean
    chains = max(2, min(24, round(wanted * 0.4 / 12)))
    files = min(dice.choice((1, 1, 2, 3)), capacity // (16 * MIB))
    options: dict[str, Any] = {
        "stripes": dice.choice((0, 1, 2, 4)),
        "event_capacity": dice.choice((64, 0, 65_536, 65_536)),
        "expected_object_size": PAGE,
    }
    if evicts and dice.randrange(3) == 0:  # the table is full before the data is
        options["expected_object_size"] = max(PAGE, round(mean * dice.uniform(0.6, 2)))
    if name in ("mixed", "large"):
        options["stripes"] = dice.choice((0, 1))
    shm_directory = None
    if dice.randrange(3) == 0:
        shm_directory = f"{folder}/shm"
    return Plan(
        name=name,
        seed=dice.getrandbits(32),
        processes=processes,
        evicts=evicts,
        capacity=capacity,
        files=files,
        lengths=tuple(lengths),
        keys=max(ANCHORS + 2, min(400, round(wanted * 0.6 / processes))),
        chains=chains,
        chain_blocks=max(2, min(40, round(wanted * 0.4 / chains))),
        namespace_of_chains=dice.choice(("", "chains")),
        options=options,
        shm_directory=shm_directory,
    )


def draw_life(dice: random.Random, plan: Plan) -> dict[str, Any]:
    """What may differ from one life of the region to the next."""
    life: dict[str, Any] = {
        "verify": dice.choice(("once", "once", "always", "never")),
        "eviction": dice.choice(("clock", "prefix")),
        "admission": dice.choice(("always", "second-touch", "adaptive")),
        "sigbus_guard": dice.randrange(3) == 0,
        "write_behind": dice.randrange(3) != 0,
        "io_threads": dice.choice((0, 1, 3)),
        "sync_interval": dice.choice((None, 0.5, 1.5)),
        "page_table_budget": dice.choice((0, 0, MIB)),
        "open_timeout": 4.0,
    }
    if not plan.evicts:
        life["admission"] = "always"
    return life
