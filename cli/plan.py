"""The help panel Plan: `plan`, `drops`, `launch`."""

from __future__ import annotations

import typer

__all__ = ["commands"]

PANEL = "Plan"
commands = typer.Typer()
