# SPDX-License-Identifier: Apache-2.0
"""``python -m bench report``; matplotlib is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from bench import records

__all__ = ["report"]


@click.command("report")
@click.argument(
    "results", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="RESULTS"
)
@click.option(
    "--page",
    default=Path("docs/benchmarks.md"),
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page that is written.",
)
@click.option(
    "--pictures",
    default=Path("docs/pictures"),
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where its pictures go; other SVG files there are removed.",
)
def report(results: Sequence[Path], *, page: Path, pictures: Path) -> None:
    """Write the page of benchmarks from RESULTS: files of records, or folders of them.

    Without RESULTS, from all runs in build/bench/results. Several runs of a bench, of
    one commit and machine, are put together row by row; the newest comes first.
    """
    from bench import report as writer

    if not results and not records.RESULTS.is_dir():
        raise click.ClickException(f"{records.RESULTS} is not there; name RESULTS")
    try:
        found = writer.gather(results or [records.RESULTS])
        written = writer.write(found, page, pictures)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    for path in written:
        click.echo(f"{path.stat().st_size:8} bytes  {path}")
