# SPDX-License-Identifier: Apache-2.0
"""``python -m bench report``: docs/benchmarks.md and its pictures, from records.

Every number on the page comes from a record; words about the method come from
``report_template.md``, where a line ``{{name}}`` is replaced by a section. The same
records give the same bytes. Several runs of a bench are put together row by row, the
newest first (``bench.merge``). A section without records names the command that makes
them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench import merge, records
from bench.policy.samples import POLICY
from bench.records import Run, Spread, Verdict
from bench.report_sections import SECTIONS, Page
from bench.report_text import Row, loss_table, losses, machine, verdict_table
from bench.suites import suites

__all__ = ["Report", "gather", "write"]

_TEMPLATE = Path(__file__).with_name("report_template.md")
_LOSSES_SHOWN = 15
_PLACE = re.compile(r"^\{\{(\w+)\}\}$", re.MULTILINE)


Loss = tuple[Row, str, Spread]
"""What is compared, who is ahead, and ours against theirs."""


class Report:
    """What was gathered: of each bench one run, where it came from, all verdicts."""

    def __init__(self, runs: Sequence[Run] = ()) -> None:
        names = sorted({sample.bench for run in runs for sample in run.samples})
        self.parts = {bench: merge.parts_of(runs, bench) for bench in names}
        self.runs = {bench: merge.merged(runs, bench) for bench in names}
        self.verdicts: dict[tuple[str, str], Verdict] = {}
        for run in reversed(merge.latest_first(runs)):
            for verdict in run.verdicts:
                at = verdict.bench, verdict.row
                # A run that did not measure a row does not take back what another did.
                if verdict.reached is not None or at not in self.verdicts:
                    self.verdicts[at] = verdict
        for suite in suites():
            # Of a suite in pieces each has judged itself alone.
            if len(self.parts.get(suite.name, ())) > 1:
                for verdict in suite.verdicts(self.runs[suite.name]):
                    if verdict.reached is not None:
                        self.verdicts[verdict.bench, verdict.row] = verdict


def gather(paths: Sequence[Path]) -> Report:
    """Read files, and all ``*.jsonl`` of folders; ValueError for a broken one."""
    files: list[Path] = []
    for path in paths:
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return Report([records.load(file) for file in files])


def _verdicts(found: Report, *, reached: bool | None) -> list[Verdict]:
    return [
        verdict for verdict in found.verdicts.values() if verdict.reached is reached
    ]


def _losing(found: Report) -> list[str]:
    """Return where we lose: targets not reached, then rivals that are ahead."""
    missed = _verdicts(found, reached=False)
    lines = [f"### Targets not reached: {len(missed)}", ""]
    lines += [*verdict_table(missed), ""] if missed else ["None of those measured.", ""]
    for title, replays in (
        ("Behind a rival in the same run", False),
        ("Behind another policy in the replays", True),
    ):
        behind = [
            (item, run)
            for bench, run in found.runs.items()
            if (bench == POLICY) is replays
            for item in losses(run, bench)
            # What a policy writes is a cost to know, and no aim.
            if item[0].phase != "writes_per_miss"
        ]
        if behind or not replays:
            lines += [*_behind(title, behind), ""]
    return lines[:-1]


def _behind(title: str, behind: list[tuple[Loss, Run]]) -> list[str]:
    """Return a table of where others are ahead, the worst first."""
    behind.sort(key=lambda pair: pair[0][2].median)
    lines = [f"### {title}: {len(behind)}", ""]
    if not behind:
        return [*lines, "Nowhere, or no rival was measured."]
    tables = [loss_table([item], run) for item, run in behind]
    head, shown = tables[0][:2], [rows[2] for rows in tables]
    lines += [*head, *shown[:_LOSSES_SHOWN]]
    if len(shown) > _LOSSES_SHOWN:
        rest = shown[_LOSSES_SHOWN:]
        lines += ["", f"<details><summary>{len(rest)} more</summary>", ""]
        lines += [*head, *rest, "", "</details>"]
    return lines


def _reached(found: Report) -> list[str]:
    lines = []
    for reached, title in ((True, "Reached"), (None, "Not measured by these runs")):
        chosen = _verdicts(found, reached=reached)
        lines += [f"### {title}: {len(chosen)}", ""]
        lines += [*verdict_table(chosen), ""] if chosen else ["None.", ""]
    return lines[:-1]


def _machines(found: Report) -> list[str]:
    by_line: dict[str, list[str]] = {}
    for bench, parts in found.parts.items():
        for run in parts:
            benches = by_line.setdefault(machine(run.machine), [])
            if bench not in benches:
                benches.append(bench)
    lines = [f"- {', '.join(benches)}: {line}" for line, benches in by_line.items()]
    return lines or ["No run was given."]


def _sections(found: Report, folder: Path, link: str) -> dict[str, list[str]]:
    """Return the lines of every section; pictures go to ``folder``."""
    sections: dict[str, list[str]] = {
        "losses": _losing(found),
        "reached": _reached(found),
        "machines": _machines(found),
    }
    known = {section.bench for section in SECTIONS}
    page = Page(folder, link)
    for section in SECTIONS:
        run = found.runs.get(section.bench)
        if run is None:
            text = f"Not in the records of this page: `{section.command}` makes them."
            sections[section.bench] = [text]
        else:
            sections[section.bench] = section.lines(run, section.bench, page)
    others: list[str] = []
    for bench in sorted(set(found.runs) - known):
        others += [f"### {bench}", ""]
        others += [*page.plain(found.runs[bench], bench), ""]
    sections["others"] = others
    return sections


def _fill(template: str, sections: Mapping[str, Iterable[str]]) -> str:
    used = set(_PLACE.findall(template))
    if used != set(sections):
        raise ValueError(f"template and sections differ: {used ^ set(sections)}")
    text = _PLACE.sub(lambda match: "\n".join(sections[match[1]]), template)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def write(found: Report, page: Path, pictures: Path) -> list[Path]:
    """Write page and pictures; return what was written.

    Pictures of an earlier page that this one does not have are removed.
    """
    link = _relative(pictures, page.parent)
    with tempfile.TemporaryDirectory(prefix="report-") as made:
        sections = _sections(found, Path(made), link)
        text = _fill(_TEMPLATE.read_text(), sections)
        pictures.mkdir(parents=True, exist_ok=True)
        for old in pictures.glob("*.svg"):
            old.unlink()
        written = []
        for new in sorted(Path(made).glob("*.svg")):
            written.append(Path(shutil.copy(new, pictures / new.name)))
    page.write_text(text)
    return [page, *written]


def _relative(target: Path, base: Path) -> str:
    return Path(os.path.relpath(target, base)).as_posix()
