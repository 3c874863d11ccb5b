# SPDX-License-Identifier: Apache-2.0
"""Show what cyclone_kv does for a language model, on a laptop, in a few minutes.

    python examples/demo/prepare.py        # once: fetch and convert a small model
    python examples/demo/demo.py           # or with --short

Replicas are separate operating system processes (`replica.py`) that share nothing but a
volume file.  The demo asserts what it shows: it ends with status 1 and a sentence if an
answer or a logit differs, or if a kill cost more than what was being stored.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from prepare import MODEL_NAME, is_prepared, models_folder
from replica import CAPACITY, STEP, THREADS
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
QUESTION = "What is this text about? Answer in one short sentence."
FLIPPED_BITS = 0xFF
# Of the replicas.  Threads that wait passively leave a busy machine to others; how they
# wait does not change what they compute.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}


class DemoError(Exception):
    """The demo cannot go on; the text is for the person who runs it."""


class Screen:
    """What the person sees: paragraphs, and a bar while something runs."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, text: str = "") -> None:
        """Print a paragraph."""
        self.console.print(text)

    def plain(self, text: str) -> None:
        """Print text in which brackets mean nothing."""
        self.console.print(text, markup=False)

    def table(
        self, title: str, columns: tuple[str, str], rows: list[tuple[str, ...]]
    ) -> None:
        """Print a table: a name and two values in each row."""
        table = Table("", title=title, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column, justify="right")
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)

    def heading(self, text: str) -> None:
        """Print a heading."""
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left")

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Show that something runs; yields a function that takes (done, of)."""
        if not self.console.is_terminal:
            self.console.print(f"  ... {what}")
            yield lambda done, of: None
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=None)
            yield lambda done, of: progress.update(task, completed=done, total=of)


class Replica:
    """The parent's end of a replica process."""

    alive: ClassVar[set[Replica]] = set()
    _numbers: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(self, name: str, model: Path, log_folder: Path) -> None:
        self.name = name
        self._log = log_folder / f"replica-{next(Replica._numbers)}.log"
        environment = dict(os.environ, **ENVIRONMENT)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "replica.py"), "--model", str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        Replica.alive.add(self)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield events until a command ends, or the process does."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            yield event
            if event["event"] in ("ready", "result", "error"):
                return

    def send(self, do: str, **arguments: object) -> None:
        """Start a command."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(
                json.dumps({"do": do, **arguments}).encode() + b"\n"
            )
            self._process.stdin.flush()
        except BrokenPipeError:
            self.fail("ended unexpectedly")

    def wait(self, bar: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Wait for the end of a command and return its result."""
        for event in self.events():
            if event["event"] == "error":
                self.fail(f"failed: {event['text']}")
            if event["event"] in ("ready", "result"):
                return event
            if bar is not None and "done" in event:
                bar(event["done"], event["of"])
        self.fail("ended unexpectedly")

    def fail(self, text: str) -> NoReturn:
        """Raise with the last words of the process."""
        self._process.kill()
        self._process.wait()
        tail = self._log.read_text(errors="replace").strip().splitlines()[-15:]
        raise DemoError(f"replica {self.name} {text}\n" + "\n".join(tail))

    def kill(self) -> None:
        """Send SIGKILL: the process has no chance to do anything more."""
        self._process.kill()

    def exit_status(self) -> int:
        """Wait for the process to end and return its status."""
        status = self._process.wait()
        Replica.alive.discard(self)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return status

    def leave(self) -> None:
        """Let the process end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait() != 0:
            self.fail(f"ended with status {self._process.returncode}")
        self.exit_status()


class Demo:
    """The story, part by part."""

    def __init__(
        self, arguments: argparse.Namespace, screen: Screen, folder: Path
    ) -> None:
        self.screen = screen
        self.folder = folder
        self.volume = folder / "kv.cyc"
        self.model = arguments.model or models_folder() / MODEL_NAME
        self.tokens = 1024 if arguments.short else 2048
        self.blocks = self.tokens // STEP
        self.new_tokens = 8 if arguments.short else 16
        self.texts = document_texts(self.tokens)
        self.namespace = ""
        self.start_seconds = 0.0
        self.failures: list[str] = []
        self.passed = 0
        self.report: dict[str, Any] = {"tokens": self.tokens, "block_tokens": STEP}

    def run(self) -> None:
        """Run all parts."""
        first = self.read_document()
        plain = self.answer_twice()
        kill = self.kill_while_storing()
        self.reopen(kill, plain)
        self.damage(first, plain)

    # ---- parts ---------------------------------------------------------------

    def read_document(self) -> dict[str, Any]:
        """Let A compute and store the first document and exit."""
        self.screen.heading("1  Replica A reads a document and exits")
        replica = self.start("A")
        self.open_volume(replica)
        result = self.command(
            replica,
            f"A computes {self.tokens} tokens in steps of {STEP} and stores each block",
            "read",
            text=self.texts[0],
            tokens=self.tokens,
        )
        replica.leave()
        drop_page_cache(self.volume)
        self.report["read"] = result
        self.screen.say(
            f"A computed the KV of {self.tokens} tokens in "
            f"{seconds(result['compute_seconds'])} and stored {result['blocks']} "
            f"blocks of {STEP} tokens ({megabytes(result['bytes'])}) in "
            f"{seconds(result['store_seconds'])}. Then it exited. Nothing of it is "
            "left but the volume file, and the demo asked the operating system to drop "
            "the part of that file that it caches in memory."
        )
        self.check(
            f"all {self.blocks} blocks were stored",
            passed=result["tokens"] == self.tokens,
            otherwise=f"only {result['blocks']} of {self.blocks} blocks were stored",
        )
        return result

    def answer_twice(self) -> dict[str, Any]:
        """Let B answer the same question without and with the tier."""
        self.screen.heading("2  Replica B gets the same document with a question")
        replica = self.start("B")
        self.open_volume(replica)
        plain = self.ask(replica, 0, tier=False, keep="first.logits")
        tier = self.ask(replica, 0, tier=True, compare="first.logits")
        replica.leave()
        self.report["answer"] = {"without": plain, "with": tier}
        self.show_answers("The same question twice, in the same process", plain, tier)
        ratio = plain["first_token_seconds"] / tier["first_token_seconds"]
        self.screen.say(
            "With the tier, B read the document's KV from the volume instead of "
            "computing it. Its answer began after "
            f"{seconds(tier['first_token_seconds'])} instead of "
            f"{seconds(plain['first_token_seconds'])}: "
            f"[bold]{ratio:.1f} times sooner[/bold]."
        )
        self.check(
            f"B reused all {self.tokens} tokens that A had computed",
            passed=tier["reused"] == self.tokens,
            otherwise=f"B reused {tier['reused']} of {self.tokens} tokens",
        )
        self.check_equal("B with the tier", tier, plain)
        return plain

    def kill_while_storing(self) -> dict[str, int]:
        """Kill A while it stores a second document."""
        self.screen.heading("3  Replica A is killed while it stores a second document")
        kill = self.kill_once()
        while kill["done"] == self.blocks and len(self.texts[1]) > 1:
            # The machine was so busy that A had finished before the signal arrived.
            self.screen.say(
                "A was faster than the signal: once more, with another text."
            )
            self.texts[1] = self.texts[1][1:]
            kill = self.kill_once()
        in_flight = kill["begun"] - kill["done"]
        self.screen.say(
            "A had computed the document and was storing one block after another when "
            f"it got SIGKILL. It had reported {kill['done']} of {self.blocks} blocks "
            f"as stored; {'one was' if in_flight else 'none was'} in flight. A process "
            "that dies this way cleans up nothing: whatever it had locked, reserved or "
            "written in part stays behind."
        )
        self.check(
            "A died of SIGKILL, in the middle of its work",
            passed=kill["status"] == -signal.SIGKILL and kill["done"] < self.blocks,
            otherwise=f"A ended with status {kill['status']} before it was killed",
        )
        return kill

    def kill_once(self) -> dict[str, int]:
        """Start A and kill it half-way; say which blocks it had begun and done.

        The signal takes effect in the block that it is sent at, or in one soon after.
        """
        replica = self.start("A")
        self.open_volume(replica)
        begun = done = 0
        with self.screen.waiting("A computes and stores another document") as bar:
            replica.send("read", text=self.texts[1], tokens=self.tokens, at_end=True)
            for event in replica.events():
                if event["event"] == "storing":
                    begun = event["block"]
                    if begun == self.blocks // 2:
                        replica.kill()
                elif event["event"] == "stored":
                    done = event["block"]
                elif event["event"] == "progress":
                    bar(event["done"], event["of"])
                elif event["event"] == "error":
                    replica.fail(f"failed: {event['text']}")
        return {"begun": begun, "done": done, "status": replica.exit_status()}

    def reopen(self, kill: dict[str, int], plain: dict[str, Any]) -> None:
        """Open everything again after the kill and use both documents."""
        self.screen.heading("4  Everything is opened again")
        replica = self.start("C")
        open_seconds = self.open_volume(replica)
        found = [self.lookup(replica, document) for document in (0, 1)]
        checked = self.verify(replica)
        first = self.ask(replica, 0, tier=True, compare="first.logits")
        second_plain = self.ask(replica, 1, tier=False, keep="second.logits")
        second = self.ask(replica, 1, tier=True, compare="second.logits")
        replica.leave()
        lost = max(kill["begun"] - found[1] // STEP, 0)
        self.report["kill"] = {
            **kill,
            "found": found[1] // STEP,
            "lost": lost,
            "open_seconds": open_seconds,
            "without": second_plain,
            "with": second,
        }
        self.show_kill(kill, found, lost)
        if lost:
            cost = f"The kill cost the block in flight: {STEP} tokens to compute again."
        elif kill["begun"] > kill["done"]:
            cost = (
                "The kill cost nothing: the block in flight had just become complete."
            )
        else:
            cost = "The kill cost nothing: no block was in flight."
        self.screen.say(
            f"Opening took {seconds(open_seconds)}. {cost} The checksums of all "
            f"{checked['blocks']} stored blocks are right."
        )
        self.show_answers("A question about the second document", second_plain, second)
        self.screen.say(
            f"C took the {second['reused']} tokens that had survived, computed the "
            f"other {self.tokens - second['reused']} and stored them. It answered "
            "about the first document too, after "
            f"{seconds(first['first_token_seconds'])}."
        )
        self.check_kill(kill, found, lost)
        self.check_sound(checked)
        self.check(
            "C reused what was found and completed the second document",
            passed=second["reused"] == found[1]
            and second["stored_after"] == self.tokens,
            otherwise=f"C reused {second['reused']} of {found[1]} tokens and left "
            f"{second['stored_after']} of {self.tokens} stored",
        )
        self.check_equal("C, first document", first, plain)
        self.check_equal("C, second document", second, second_plain)

    def damage(self, stored: dict[str, Any], plain: dict[str, Any]) -> None:
        """Flip a byte of a stored block and ask again."""
        self.screen.heading("5  One byte of a stored block is flipped")
        block = self.blocks // 2
        offset = self.flip_byte(bytes.fromhex(stored["keys"][block]))
        replica = self.start("D")
        self.open_volume(replica)
        damaged = self.ask(replica, 0, tier=True, compare="first.logits")
        again = self.lookup(replica, 0)
        checked = self.verify(replica)
        replica.leave()
        self.report["damage"] = {"block": block, "offset": offset, "with": damaged}
        title = f"A flipped byte in block {block + 1} (without the tier: as in part 2)"
        self.show_answers(title, plain, damaged)
        self.screen.say(
            "While no process had the volume open, the demo inverted the byte at "
            f"offset {offset} of the file, inside block {block + 1} of {self.blocks}. "
            f"D noticed by the checksum, reused the {damaged['reused']} tokens in "
            "front of it, computed the rest and stored the damaged block anew. No "
            "wrong byte reached the model. (The blocks behind the damaged one were "
            "read too, in the same batch, and then not used.)"
        )
        self.check(
            f"the reuse ended in front of the damaged block ({block} of {self.blocks})",
            passed=damaged["reused"] == block * STEP,
            otherwise=f"D reused {damaged['reused']} tokens, the sound prefix has "
            f"{block * STEP}",
        )
        self.check(
            "the engine counted one corrupt block",
            passed=checked["corrupt"] == 1,
            otherwise=f"the engine counted {checked['corrupt']} corrupt blocks, not 1",
        )
        self.check_equal("D, beside the damage", damaged, plain)
        self.check(
            "the damaged block was replaced: all of the document is there again",
            passed=again == self.tokens,
            otherwise=f"afterwards {again} of {self.tokens} tokens are found",
        )
        self.check_sound(checked)

    # ---- commands ------------------------------------------------------------

    def start(self, name: str) -> Replica:
        """Start a replica and wait until its model is loaded."""
        start = time.monotonic()
        with self.screen.waiting(f"starting replica {name}: Python, torch, the model"):
            replica = Replica(name, self.model, self.folder)
            self.namespace = replica.wait()["namespace"]
        spent = time.monotonic() - start
        self.start_seconds += spent
        self.screen.say(
            f"[dim]Replica {name} is a new process; starting Python and loading the "
            f"model took {spent:.1f} s (set-up, counted apart).[/dim]"
        )
        return replica

    def command(
        self, replica: Replica, what: str, do: str, **arguments: object
    ) -> dict[str, Any]:
        """Run a command of a replica behind a progress bar."""
        with self.screen.waiting(what) as bar:
            replica.send(do, **arguments)
            return replica.wait(bar)

    def open_volume(self, replica: Replica) -> float:
        """Let a replica open the volume; return the seconds that it took."""
        what = f"{replica.name} opens the volume"
        result = self.command(replica, what, "open", volume=str(self.volume))
        return float(result["seconds"])

    def lookup(self, replica: Replica, document: int) -> int:
        """Return the number of leading tokens of a document that are stored."""
        name = ("first", "second")[document]
        result = self.command(
            replica,
            f"{replica.name} looks for the {name} document",
            "lookup",
            text=self.texts[document],
            tokens=self.tokens,
        )
        return int(result["tokens"])

    def verify(self, replica: Replica) -> dict[str, Any]:
        """Let a replica read and check everything that is stored."""
        what = f"{replica.name} verifies the checksum of every block"
        return self.command(replica, what, "check")

    def ask(
        self,
        replica: Replica,
        document: int,
        *,
        tier: bool,
        keep: str | None = None,
        compare: str | None = None,
    ) -> dict[str, Any]:
        """Let a replica answer the question about a document."""
        way = "with" if tier else "without"
        return self.command(
            replica,
            f"{replica.name} answers {way} the tier",
            "answer",
            text=self.texts[document],
            tokens=self.tokens,
            question=QUESTION,
            new_tokens=self.new_tokens,
            tier=tier,
            keep=str(self.folder / keep) if keep else None,
            compare=str(self.folder / compare) if compare else None,
        )

    def flip_byte(self, key: bytes) -> int:
        """Invert a byte in the middle of a block of the closed volume; say where."""
        from cyclone_kv import Cache, CacheConfig

        config = CacheConfig.for_kv_tier(capacity=CAPACITY)
        with Cache.open(self.volume, config, namespace=self.namespace) as cache:
            place = cache.locate(key)
            if place is None:
                raise DemoError("the block to be damaged is not stored")
            with place:
                offset = place.offset + place.nbytes // 2
        file = os.open(self.volume, os.O_RDWR)
        try:
            before = os.pread(file, 1, offset)
            os.pwrite(file, bytes([before[0] ^ FLIPPED_BITS]), offset)
            os.fsync(file)
        finally:
            os.close(file)
        return offset

    # ---- tables and checks ---------------------------------------------------

    def show_answers(
        self, title: str, plain: dict[str, Any], tier: dict[str, Any]
    ) -> None:
        """Print the table of two answers."""
        rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
            ("tokens reused", lambda arm: f"{arm['reused']}"),
            ("tokens computed before the answer", lambda arm: f"{arm['computed']}"),
            ("bytes read from the volume", lambda arm: megabytes(arm["bytes_read"])),
            (
                "finding and reading the blocks",
                lambda arm: seconds(arm["load_seconds"]) if arm["bytes_read"] else "-",
            ),
            ("time to first token", lambda arm: seconds(arm["first_token_seconds"])),
        ]
        self.screen.table(
            title,
            ("without the tier", "with the tier"),
            [(name, cell(plain), cell(tier)) for name, cell in rows],
        )
        self.screen.say(f"Question: [italic]{QUESTION}[/italic]")
        for name, arm in (("without", plain), ("with   ", tier)):
            self.screen.plain(f"  {name}: {json.dumps(arm['text'])}")
        self.screen.say()

    def show_kill(self, kill: dict[str, int], found: list[int], lost: int) -> None:
        """Print the table of what was stored before and after the kill."""
        blocks, in_flight = self.blocks, kill["begun"] - kill["done"]
        self.screen.table(
            "What the kill cost",
            ("first document", "second document"),
            [
                ("blocks reported as stored", f"{blocks}", f"{kill['done']}"),
                ("blocks in flight at the kill", "0", f"{in_flight}"),
                ("blocks found afterwards", *(f"{n // STEP}" for n in found)),
                ("blocks lost", f"{blocks - found[0] // STEP}", f"{lost}"),
            ],
        )

    def check_kill(self, kill: dict[str, int], found: list[int], lost: int) -> None:
        """Check that the kill cost nothing but blocks in flight."""
        in_flight = kill["begun"] - kill["done"]
        self.check(
            "the kill cost no block of the first document",
            passed=found[0] == self.tokens,
            otherwise=f"only {found[0]} of {self.tokens} tokens of the first document "
            "are left",
        )
        self.check(
            f"the kill cost at most the block in flight: {lost} lost, all "
            f"{kill['done']} that were reported are there",
            passed=lost <= in_flight <= 1 and found[1] // STEP >= kill["done"],
            otherwise=f"the kill cost more than the block in flight: {kill['done']} "
            f"blocks had been reported as stored and {in_flight} in flight, "
            f"{found[1] // STEP} were found",
        )

    def check_sound(self, checked: dict[str, Any]) -> None:
        """Check that verification found nothing wrong."""
        self.check(
            f"verification read {checked['blocks']} blocks and found nothing wrong",
            passed=checked["damaged"] == 0 and checked["faults"] == 0,
            otherwise=f"verification found {checked['damaged']} damaged blocks and "
            f"{checked['faults']} broken structures: {checked['first_fault']}",
        )

    def check_equal(
        self, who: str, tier: dict[str, Any], plain: dict[str, Any]
    ) -> None:
        """Check an answer against the one computed without the tier."""
        self.check(
            f"{who}: the same answer, token for token ({len(plain['answer'])} tokens)",
            passed=tier["answer"] == plain["answer"],
            otherwise=f"{who}: the answer differs: tokens {tier['answer']} instead of "
            f"{plain['answer']}",
        )
        self.check(
            f"{who}: all logits equal bit for bit (torch.equal)",
            passed=tier["logits_equal"],
            otherwise=f"{who}: logits differ from those computed without the tier",
        )

    def check(self, sentence: str, *, passed: bool, otherwise: str) -> None:
        """Print what was checked, and remember a failure."""
        if passed:
            self.passed += 1
            self.screen.say(f"  [green]ok[/green]  {sentence}")
        else:
            self.failures.append(otherwise)
            self.screen.say("  [bold red]FAILED[/bold red]")
            self.screen.plain(f"      {otherwise}")


def document_texts(tokens: int) -> list[str]:
    """Return two texts of this repository that begin differently."""
    guides = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
    prose = "\n\n".join(path.read_text() for path in guides if path.exists())
    licence = REPOSITORY / "LICENSE"
    if not prose or not licence.exists():
        raise DemoError(f"README.md and LICENSE are expected in {REPOSITORY}")
    legal = licence.read_text().strip()
    enough = tokens * 16  # characters: a token of prose has about four
    return [f"{prose}\n\n{legal}"[:enough], f"{legal}\n\n{prose}"[:enough]]


def drop_page_cache(volume: Path) -> None:
    """Ask the kernel to forget the cached pages of a file, so that it is read anew."""
    if not hasattr(os, "posix_fadvise"):
        return
    file = os.open(volume, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def seconds(value: float) -> str:
    """Format a duration."""
    return f"{value * 1000:.0f} ms" if value < 0.1 else f"{value:.2f} s"


def megabytes(value: int) -> str:
    """Format a number of bytes."""
    return f"{value / 1e6:.1f} MB" if value else "0"


def stop_replicas() -> None:
    """Kill the replicas that still run."""
    for replica in list(Replica.alive):
        replica.kill()
        replica.exit_status()


def run_in(folder: Path, arguments: argparse.Namespace, screen: Screen) -> int:
    """Run the demo with its files below `folder`; return the exit status."""
    start = time.monotonic()
    late = threading.Event()

    def give_up() -> None:
        late.set()
        for replica in list(Replica.alive):
            replica.kill()

    watchdog = threading.Timer(arguments.limit, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        demo = Demo(arguments, screen, folder)
        demo.run()
    except DemoError as error:
        reason = (
            f"it ran past its limit of {arguments.limit} s" if late.is_set() else error
        )
        screen.console.print(f"\nThe demo stopped: {reason}", style="red", markup=False)
        return 1
    finally:
        watchdog.cancel()
        stop_replicas()
    total = time.monotonic() - start
    demo.report["set_up_seconds"] = demo.start_seconds
    demo.report["demo_seconds"] = total - demo.start_seconds
    demo.report["failures"] = demo.failures
    if arguments.json:
        arguments.json.write_text(json.dumps(demo.report, indent=2) + "\n")
    summarize(demo, total)
    return 1 if demo.failures else 0


def summarize(demo: Demo, total: float) -> None:
    """Print the last words."""
    screen = demo.screen
    screen.heading("Summary")
    screen.say(
        f"Set-up (starting replicas and loading the model): {demo.start_seconds:.1f} s."
        f" Everything else: {total - demo.start_seconds:.1f} s."
    )
    if not demo.failures:
        screen.say(f"[green]All {demo.passed} checks passed.[/green]")
        return
    screen.say(f"[bold red]{len(demo.failures)} checks failed:[/bold red]")
    for failure in demo.failures:
        screen.console.print(f"  {failure}", markup=False)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Show what cyclone_kv does for a language model."
    )
    parser.add_argument("--short", action="store_true", help="half the text, for CI")
    parser.add_argument(
        "--path", type=Path, help="directory for the volume (default: a temporary one)"
    )
    parser.add_argument("--model", type=Path, help="a folder made by prepare.py")
    parser.add_argument(
        "--json", type=Path, help="also write the measurements to a file"
    )
    parser.add_argument(
        "--limit", type=float, default=900, metavar="SECONDS", help="give up after this"
    )
    arguments = parser.parse_args()
    model = arguments.model or models_folder() / MODEL_NAME
    if not is_prepared(model):
        sys.stderr.write(
            f"There is no prepared model in {model}.\n"
            f"Prepare it once with: {sys.executable} {HERE / 'prepare.py'}\n"
        )
        return 2
    if arguments.path is not None and not arguments.path.is_dir():
        parser.error(f"--path {arguments.path} is not a directory")
    screen = Screen()
    screen.heading("cyclone_kv: a document is read once")
    screen.say(
        "Before a language model can answer a question about a document, it computes "
        "keys and values (its KV cache) for every token of it. That takes most of the "
        "time, and the next process that gets the same document does it all over "
        f"again. cyclone_kv keeps the KV in a file, in blocks of {STEP} tokens; a "
        "block is found by a hash of all tokens up to its end. Below, several "
        "processes (replicas A to D) share nothing but that file. The model is "
        "SmolLM2-135M on two CPU threads: watch the times and the equality of the "
        "answers, not their wisdom."
    )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        screen.say(
            f"\nThe machine is busy (load {load:.1f} on {cores} cores). The times "
            "below will be long and uneven; what is checked does not depend on them."
        )
    # SIGTERM ends the demo like Ctrl-C: replicas stopped, files removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(
        prefix="cyclone_kv-demo-", dir=arguments.path
    ) as name:
        try:
            return run_in(Path(name), arguments, screen)
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
