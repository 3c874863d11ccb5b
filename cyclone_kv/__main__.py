# SPDX-License-Identifier: Apache-2.0
"""The command ``cyclone-kv``, also ``python -m cyclone_kv``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; say what to install when its libraries are missing."""
    try:
        from cyclone_kv.cli import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in {"click", "rich"}:
            raise
        sys.exit(
            f"cyclone-kv: the command line needs {error.name!r}; "
            f"install it with: pip install 'cyclone-kv[cli]'"
        )
    cli(prog_name="cyclone-kv")


if __name__ == "__main__":
    main()
