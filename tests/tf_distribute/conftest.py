"""Fixtures for tests that start clusters."""

from __future__ import annotations

from tests.tf_distribute.launching import script, start

__all__ = ["script", "start"]
