# SPDX-License-Identifier: Apache-2.0
"""Connectors to inference engines, one module for each.

Import the one you need; none of them is imported by ``import cyclone_kv``.
"""
