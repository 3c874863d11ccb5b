# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.gpu_upload``: this suite alone.

Imports no rival of other suites, so it runs where LMDB and the like are missing.
"""

from __future__ import annotations

from pathlib import Path

import click

from bench.gpu_upload import SUITE
from bench.recording import console_for, recording


@click.command()
@click.option("--full", is_flag=True, help="Larger data, more batches, longer loops.")
@click.option("--tiny", is_flag=True, hidden=True)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/bench"),
    show_default=True,
    help="Where the stores live, on the device to measure.",
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path))
def main(*, full: bool, tiny: bool, folder: Path, output: Path | None) -> None:
    """Measure uploads to a CUDA device, and say how far they came."""
    form = "tiny" if tiny else "full" if full else "short"
    console = console_for()
    with recording(console, "gpu_upload", form, folder, output) as context:
        (SUITE.full if full else SUITE.short)(context)
        for verdict in SUITE.verdicts(context.writer.run):
            context.writer.verdict(verdict)
            console.print(verdict.line(), soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
