# SPDX-License-Identifier: Apache-2.0
"""gpu_upload: stored blocks into device memory, ours and other ways beside the limit.

Blocks are stored and in memory, each way is set up, and then the clock runs: batches
follow each other with two under way, as an engine does it that has more to load
("upload"), and one by one, each waited for ("latency"). Which blocks a batch has is
drawn beforehand. In a round all ways take their turn; ratios are of one round. Bytes
are read back from the device and compared, for each way at each size.

G1  The limit ("pinned") runs the same loop with the same calls, without a store.
G2  "cold" begins with nothing of the store in memory. What is registered cannot be
    cold: its pages are pinned. "register" says what it costs to make it so.
G3  Without a driver, or without a device, nothing is measured and that is said; with a
    driver that is a fake, no number counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.dataset import Dataset
from bench.machine import CacheDropper, DeviceLimit
from bench.records import Better, Run, Sample, Spread, Verdict
from bench.sizes import GIB, KIB, MIB, human_size
from bench.suites import Context, Suite

__all__ = ["BENCH", "SUITE"]

BENCH = "gpu_upload"
_COMMAND = f"python -m bench --suite {BENCH}"
_CHECK_BLOCKS = 4
_DRAWS = 1024
_FAKE_MARK = " (a fake driver: these are no measurements)"
_REGISTERED_MIN = 0.99
_STAGED_MIN = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    blocks: tuple[int, ...]
    batches: tuple[int, ...]
    bytes_max: int
    """Of the blocks of one size."""
    rounds: int
    seconds: float
    """Of each loop."""
    fio_seconds: float
    ring_blocks: tuple[int, ...]
    """Of them, those with which shapes of the ring are compared."""
    ring_slots: tuple[int, ...]
    ring_slot_bytes: tuple[int, ...]
    ring_rounds: int


_SHORT = _Plan(
    blocks=(512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB),
    batches=(1, 16),
    bytes_max=1 * GIB,
    rounds=3,
    seconds=0.25,
    fio_seconds=0.5,
    ring_blocks=(2 * MIB,),
    ring_slots=(2, 4, 8),
    ring_slot_bytes=(4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
    ring_rounds=2,
)
_FULL = dataclasses.replace(
    _SHORT,
    batches=(1, 4, 16, 64),
    bytes_max=8 * GIB,
    rounds=5,
    seconds=2.0,
    fio_seconds=2.0,
    ring_blocks=(512 * KIB, 2 * MIB, 32 * MIB),
    ring_slots=(2, 4, 8, 16),
    ring_rounds=5,
)
_TINY = _Plan(
    blocks=(64 * KIB,),
    batches=(1, 2),
    bytes_max=1 * MIB,
    rounds=1,
    seconds=0.002,
    fio_seconds=0.05,
    ring_blocks=(64 * KIB,),
    ring_slots=(2, 3),
    ring_slot_bytes=(64 * KIB, 128 * KIB),
    ring_rounds=1,
)


class _Bench:
    """One block size."""

    def __init__(
        self, context: Context, plan: _Plan, gpu: Any, nbytes: int, folder: Path
    ) -> None:
        self.context = context
        self.plan = plan
        self.gpu = gpu
        self.folder = folder
        self.data = Dataset(nbytes, max(1, plan.bytes_max // nbytes))
        self.path = folder / "kv.cyc"
        room = self.data.count * (nbytes + 8192)
        self.capacity = max(64 * MIB, room * 5 // 4 // MIB * MIB + 8 * nbytes)
        if self.capacity > GIB:
            # Whole chunks, and blocks all over them, so that a half of it is a half.
            self.capacity = max(2, -(-self.capacity // GIB)) * GIB
        self.largest = max(plan.batches)
        self.pool = gpu.allocate(2 * self.largest * nbytes)
        self.draw = random.Random(nbytes)

    # ---- one loop -------------------------------------------------------------------

    def places(self, batch: int, half: int) -> list[tuple[int, int]]:
        nbytes = self.data.nbytes
        first = self.pool + half * self.largest * nbytes
        return [(first + i * nbytes, nbytes) for i in range(batch)]

    def batches(self, batch: int) -> list[list[int]]:
        """Draw batches; within one no block comes twice, if there are enough."""
        count = self.data.count
        if batch > count:
            return [[self.draw.randrange(count) for _ in range(batch)]]
        return [
            self.draw.sample(range(count), batch)
            for _ in range(max(1, _DRAWS // batch))
        ]

    def sustained(self, way: Any, batches: Sequence[Sequence[int]]) -> float:
        """Return GB/s with two batches under way."""
        nbytes, seconds = self.data.nbytes, self.plan.seconds
        places = [self.places(len(batches[0]), half) for half in (0, 1)]
        begin = time.perf_counter()
        waiting = way.start(batches[0], places[0], 0)
        done = 0
        for turn in range(1, 1 << 30):
            following = way.start(
                batches[turn % len(batches)], places[turn % 2], turn % 2
            )
            way.finish(waiting)
            waiting = following
            done += 1
            if time.perf_counter() - begin >= seconds:
                break
        way.finish(waiting)
        took = time.perf_counter() - begin
        return (done + 1) * len(batches[0]) * nbytes / took / 1e9

    def once_over(self, way: Any, batch: int) -> float:
        """Return GB/s of all blocks once, in stored order, two batches under way."""
        order = range(self.data.count // batch * batch)
        places = [self.places(batch, half) for half in (0, 1)]
        begin = time.perf_counter()
        waiting = None
        for turn, first in enumerate(range(0, len(order), batch)):
            half = turn % 2
            following = way.start(
                list(order[first : first + batch]), places[half], half
            )
            if waiting is not None:
                way.finish(waiting)
            waiting = following
        way.finish(waiting)
        return len(order) * self.data.nbytes / (time.perf_counter() - begin) / 1e9

    def latencies(self, way: Any, batches: Sequence[Sequence[int]]) -> list[float]:
        """Return microseconds of batches that are waited for."""
        places = self.places(len(batches[0]), 0)
        found: list[float] = []
        end = time.perf_counter() + self.plan.seconds / 2
        while not found or time.perf_counter() < end:
            begin = time.perf_counter()
            way.finish(way.start(batches[len(found) % len(batches)], places, 0))
            found.append((time.perf_counter() - begin) * 1e6)
        return sorted(found)

    def check(self, way: Any) -> None:
        """Compare what arrives, byte for byte."""
        count = min(_CHECK_BLOCKS, self.largest, self.data.count)
        chosen = self.draw.sample(range(self.data.count), count)
        if way.name == "pinned":
            chosen = list(range(count))  # it has these alone
        places = self.places(count, 1)
        for pointer, nbytes in places:
            self.gpu.fill(pointer, 0xEE, nbytes)
        way.finish(way.start(chosen, places, 1))
        for index, (pointer, nbytes) in zip(chosen, places, strict=True):
            self.data.check(index, self.gpu.read(pointer, nbytes))

    # ---- records --------------------------------------------------------------------

    def add(
        self,
        phase: str,
        store: str,
        value: float,
        number: int,
        unit: str = "GB/s",
        **params: Any,
    ) -> None:
        better: Better = "lower" if unit == "us" else "higher"
        self.context.writer.sample(
            Sample(
                bench=BENCH,
                phase=phase,
                store=store,
                value=value,
                unit=unit,
                better=better,
                block_bytes=self.data.nbytes,
                round=number,
                params=params,
            )
        )

    def note(self, text: str) -> None:
        self.context.console.print(text, soft_wrap=True)
        self.context.writer.other("left_out", {"bench": BENCH, "text": text})

    # ---- rounds ---------------------------------------------------------------------

    def run(self) -> None:
        from bench.gpu_upload import ways

        with contextlib.ExitStack() as stack:
            cache = stack.enter_context(ways.opened(self.path, self.capacity))
            for key, row in zip(self.data.keys, self.data.values, strict=True):
                if not cache.put(key, row.data):
                    raise RuntimeError(f"a put was refused: {cache.stats()}")
            cache.sync()
            made: dict[str, Any] = {}
            for name, make in self._others(ways, cache).items():
                try:
                    made[name] = make()
                except (ways.WayError, Exception) as error:
                    if not isinstance(error, ways.WayError) and not _of_cuda(error):
                        raise
                    self.note(f"{name} at {human_size(self.data.nbytes)}: {error}")
                else:
                    if hasattr(made[name], "close"):
                        stack.callback(made[name].close)
            names = [kind.name for kind in ways.WAYS]
            for number in range(self.plan.rounds):
                turn = number % len(names)
                for name in names[turn:] + names[:turn]:
                    if name in made:
                        self._turn(cache, made, name, number)
            self._numa(cache)
        self._cold()
        if self.data.nbytes in self.plan.ring_blocks:
            from bench.gpu_upload import rings

            chosen = rings.shapes(self.plan.ring_slots, self.plan.ring_slot_bytes)
            rings.sweep(self, chosen, self.plan.ring_rounds)

    def _others(self, ways: Any, cache: Any) -> dict[str, Callable[[], Any]]:
        gpu, data, batch = self.gpu, self.data, self.largest
        return {
            "pinned": lambda: ways.Pinned(gpu, data, batch),
            "registered": lambda: ways.Registered(gpu, data, cache),
            "partial": lambda: ways.Partial(gpu, data, cache),
            "staged": lambda: ways.Staged(gpu, data, cache),
            "pageable": lambda: ways.Pageable(gpu, data, cache),
            "per_span": lambda: ways.PerSpan(gpu, data, cache),
            "lmdb": lambda: ways.Lmdb(gpu, data, self.folder),
            "files": lambda: ways.Files(gpu, data, self.folder, batch),
        }

    def _turn(self, cache: Any, made: dict[str, Any], name: str, number: int) -> None:
        with self._registration(cache, name, number) as usable:
            if not usable:
                return
            way = made[name]
            try:
                if number == 0:
                    self.check(way)
                for batch in self.plan.batches:
                    batches = self.batches(batch)
                    speed = self.sustained(way, batches)
                    self.add("upload", name, speed, number, batch=batch)
                    waits = self.latencies(way, batches)
                    for share in (50, 99):
                        value = waits[min(len(waits) - 1, len(waits) * share // 100)]
                        self.add(
                            f"latency_p{share}", name, value, number, "us", batch=batch
                        )
            except Exception as error:
                if not _of_cuda(error):
                    raise
                self.gpu.driver.synchronize()
                del made[name]
                self.note(f"{name} at {human_size(self.data.nbytes)}: {error}")

    @contextlib.contextmanager
    def _registration(self, cache: Any, name: str, number: int) -> Iterator[bool]:
        if name not in {"registered", "partial"}:
            yield True
            return
        budget = None if name == "registered" else self.capacity // 2
        begin = time.perf_counter()
        found = cache.register_cuda(0, budget)
        took = time.perf_counter() - begin
        try:
            if number == 0:
                self.context.writer.other(
                    "registration",
                    {
                        "bench": BENCH,
                        "store": name,
                        "block_bytes": self.data.nbytes,
                        **dataclasses.asdict(found),
                    },
                )
                if found.reason:
                    size = human_size(self.data.nbytes)
                    self.note(f"{name} at {size}: {found.reason}")
            if found.complete:
                self.add("register", name, found.covered_bytes / took / 1e9, number)
            yield bool(found)
        finally:
            cache.unregister_cuda()

    def _numa(self, cache: Any) -> None:
        from bench.gpu_upload.device import node_pages

        with contextlib.suppress(OSError):
            pages = node_pages(Path(cache.info().paths[0].path))
            self.context.writer.other(
                "numa",
                {"bench": BENCH, "block_bytes": self.data.nbytes, "pages": pages},
            )

    def _cold(self) -> None:
        """Read all blocks once, in stored order, with nothing in memory."""
        from bench.gpu_upload import ways

        dropper = CacheDropper()
        batch = min(self.largest, self.data.count)
        device = DeviceLimit(
            self.folder,
            self.data.total,
            self.data.nbytes,
            fio_seconds=self.plan.fio_seconds,
        )
        files: ways.Files | None = ways.Files(self.gpu, self.data, self.folder, batch)
        try:
            for number in range(self.plan.rounds):
                if (speed := device.measure()) is not None:
                    self.add("cold", "device", speed, number, batch=batch)
                for name in ("staged", "files"):
                    stored = [p for p in self.folder.rglob("*") if p.is_file()]
                    dropper.drop(self.folder, stored)
                    with ways.opened(self.path, self.capacity) as cache:
                        way = (
                            ways.Staged(self.gpu, self.data, cache)
                            if name == "staged"
                            else files
                        )
                        speed = self.once_over(way, batch)
                    self.add("cold", name, speed, number, batch=batch)
        finally:
            if files is not None:
                files.close()
            device.close()


def _of_cuda(error: Exception) -> bool:
    from cyclone_kv.errors import CudaError

    return isinstance(error, CudaError)


# ---- the suite ----------------------------------------------------------------------


def _run(context: Context, plan: _Plan) -> None:
    from cyclone_kv.cuda.driver import LIBRARY
    from cyclone_kv.errors import CudaUnavailableError

    try:
        from bench.gpu_upload.device import Gpu

        gpu = Gpu()
    except (CudaUnavailableError, ImportError) as error:
        text = f"{BENCH} was not run: {error}"
        context.console.print(text, soft_wrap=True)
        context.writer.other("left_out", {"bench": BENCH, "text": text})
        return
    with gpu:
        about = gpu.about()
        about["fake"] = gpu.driver.name != LIBRARY
        context.writer.other("gpu", {"bench": BENCH, **about})
        context.console.print(
            f"{about['device']}, CUDA {about['cuda']}, NUMA node {about['numa_node']}"
        )
        if about["fake"]:
            context.console.print("the driver is a fake: no number counts")
    for nbytes in plan.blocks:
        folder = Path(tempfile.mkdtemp(prefix="gpu-", dir=context.folder))
        try:
            with gpu:
                _Bench(context, plan, gpu, nbytes, folder).run()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    mark = _FAKE_MARK if about["fake"] else ""
    _print(context, mark)
    _draw(context, mark)


def _print(context: Context, mark: str) -> None:
    from bench.gpu_upload import rings
    from bench.gpu_upload.ways import WAYS

    run = context.writer.run
    for nbytes in run.names("block_bytes", bench=BENCH, phase="upload"):
        table = Table(title=f"{human_size(nbytes)} blocks{mark}", title_justify="left")
        batches = sorted(
            {s.params["batch"] for s in run.select(bench=BENCH, phase="upload")}
        )
        table.add_column("way")
        for batch in batches:
            table.add_column(f"batch {batch}, GB/s", justify="right")
            table.add_column("x limit", justify="right")
        table.add_column("p50 us", justify="right")
        table.add_column("p99 us", justify="right")
        table.add_column("cold GB/s", justify="right")
        for kind in WAYS:
            what: dict[str, Any] = {"bench": BENCH, "block_bytes": nbytes}
            cells = [kind.label]
            for batch in batches:
                each = {**what, "phase": "upload", "batch": batch}
                cells.append(_cell(run.spread(store=kind.name, **each)))
                cells.append(_cell(run.ratio(kind.name, "pinned", **each), 3))
            last = {**what, "batch": batches[-1]}
            for phase in ("latency_p50", "latency_p99"):
                cells.append(_cell(run.spread(store=kind.name, phase=phase, **last), 0))
            cells.append(_cell(run.spread(store=kind.name, phase="cold", **what)))
            table.add_row(*cells)
        device = run.spread(
            bench=BENCH, store="device", phase="cold", block_bytes=nbytes
        )
        if device is not None:
            empty = [""] * (2 * len(batches) + 2)
            table.add_row("the disk alone (the limit)", *empty, _cell(device))
        context.console.print(table)
    for nbytes in rings.block_sizes(run):
        context.console.print(rings.table(run, nbytes, mark))
        for phase, word in zip(rings.PHASES, ("warm", "cold"), strict=True):
            found = rings.best(run, nbytes, phase)
            if found is not None and not mark:  # a fake says nothing about it
                shape, share = found
                size = human_size(shape.slot_bytes)
                context.console.print(
                    f"{word}: best is a ring of {shape.slots} x {size}; the default "
                    f"has {share:.2f} of its speed"
                )


def _cell(spread: Spread | None, digits: int = 2) -> str:
    return "-" if spread is None else f"{spread.median:.{digits}f}"


def _draw(context: Context, mark: str) -> None:
    """Draw what the table says, where matplotlib is there."""
    try:
        from bench.gpu_upload import rings
        from bench.report_pictures import bars, grid
    except ImportError as error:
        context.console.print(f"no picture: {error}")
        return
    run = context.writer.run
    panels = []
    for batch in sorted(
        {s.params["batch"] for s in run.select(bench=BENCH, phase="upload")}
    ):
        groups: dict[str, dict[str, Spread]] = {}
        for nbytes in run.names("block_bytes", bench=BENCH, phase="upload"):
            what = {
                "bench": BENCH,
                "phase": "upload",
                "block_bytes": nbytes,
                "batch": batch,
            }
            groups[human_size(nbytes)] = {
                store: spread
                for store in run.names("store", **what)
                if (spread := run.spread(store=store, **what)) is not None
            }
        panels.append(bars(f"warm upload, batches of {batch}{mark}", "GB/s", groups))
    for nbytes in rings.block_sizes(run):
        panels += rings.panels(run, nbytes, mark, bars)
    if panels:
        path = context.writer.path.with_suffix(".svg")
        grid(panels, path, columns=1, height=3.2)
        context.console.print(f"drawn in {path}")


def _short(context: Context) -> None:
    _run(context, _TINY if context.tiny else _SHORT)


def _full(context: Context) -> None:
    _run(context, _TINY if context.tiny else _FULL)


# ---- verdicts -----------------------------------------------------------------------


def _verdicts(run: Run) -> Iterable[Verdict]:
    fake = any(
        each.get("kind") == "gpu" and each.get("fake")
        for each in run.others
        if each.get("bench") == BENCH
    )
    yield _registered(run, fake=fake)
    yield _staged(run, fake=fake)


def _verdict(
    row: str, value: float | None, target: float, text: str, *, fake: bool
) -> Verdict:
    counts = value is not None and not fake
    return Verdict(
        bench=BENCH,
        row=row,
        reached=value >= target if counts and value is not None else None,
        value=value if counts else None,
        target=target,
        text=text if counts else "needs a CUDA device",
        command=_COMMAND,
    )


def _registered(run: Run, *, fake: bool) -> Verdict:
    """Judge the worst of all sizes, at the largest batch."""
    worst: tuple[float, str] | None = None
    for nbytes in run.names("block_bytes", bench=BENCH, phase="upload"):
        found = run.select(bench=BENCH, phase="upload", block_bytes=nbytes)
        batch = max(sample.params["batch"] for sample in found)
        what = {
            "bench": BENCH,
            "phase": "upload",
            "block_bytes": nbytes,
            "batch": batch,
        }
        ratio = run.ratio("registered", "pinned", **what)
        if ratio is None:
            continue
        text = (
            f"{ratio.text(3)} x pinned memory, at {human_size(nbytes)}, batch {batch}"
        )
        if worst is None or ratio.median < worst[0]:
            worst = ratio.median, text
    return _verdict(
        "registered upload, x the pinned limit",
        None if worst is None else worst[0],
        _REGISTERED_MIN,
        "" if worst is None else worst[1],
        fake=fake,
    )


def _staged(run: Run, *, fake: bool) -> Verdict:
    """Cold uploads beside the slower of disk and bus, the worst of all sizes."""
    worst: tuple[float, str] | None = None
    for nbytes in run.names("block_bytes", bench=BENCH, phase="cold"):
        what: dict[str, Any] = {"bench": BENCH, "block_bytes": nbytes}
        ours = run.spread(store="staged", phase="cold", **what)
        disk = run.spread(store="device", phase="cold", **what)
        found = run.select(store="pinned", phase="upload", **what)
        if ours is None or disk is None or not found:
            continue
        batch = max(sample.params["batch"] for sample in found)
        bus = run.spread(store="pinned", phase="upload", batch=batch, **what)
        if bus is None:
            continue
        limit = min(disk.median, bus.median)
        text = (
            f"{ours.text()} GB/s of {limit:.2f} (disk {disk.median:.2f}, bus "
            f"{bus.median:.2f}), at {human_size(nbytes)}"
        )
        if worst is None or ours.median / limit < worst[0]:
            worst = ours.median / limit, text
    return _verdict(
        "staged upload, cold, x min(disk, bus)",
        None if worst is None else worst[0],
        _STAGED_MIN,
        "" if worst is None else worst[1],
        fake=fake,
    )


SUITE = Suite(
    name=BENCH,
    help="Uploads to a CUDA device: registered, staged and others, beside the limit.",
    short=_short,
    full=_full,
    verdicts=_verdicts,
)
