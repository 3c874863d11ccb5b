# SPDX-License-Identifier: Apache-2.0
"""The engine measured beside LMDB and a file per block: docs/benchmarks.md."""
