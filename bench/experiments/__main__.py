# SPDX-License-Identifier: Apache-2.0
"""``python -m bench.experiments``: one command for each experiment."""

from __future__ import annotations

import click

from bench.experiments.read_paths import read_paths
from bench.experiments.write_paths import write_paths


@click.group()
def main() -> None:
    """Repeat a measurement that a decision rests on."""


main.add_command(read_paths)
main.add_command(write_paths)

if __name__ == "__main__":
    main()
