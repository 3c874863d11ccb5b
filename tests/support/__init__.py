# SPDX-License-Identifier: Apache-2.0
"""Helpers of the test suite; nothing here is part of the package."""
