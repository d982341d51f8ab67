"""The command line as a fixture."""

from __future__ import annotations

import sys

import pytest
from cli_helpers import run_cli

from equimoe.cli.app import main


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """Call `equimoe ARGUMENTS` in an empty folder: (exit code, stdout, stderr). In this process, where that works.

    `recipes` gets a process of its own: typer hands it a base class of the `typer.Context` that it asks for, which
    the type checks of the tests refuse.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        if arguments[0] == "recipes":
            done = run_cli(*arguments, folder=tmp_path)
            return done.returncode, done.stdout, done.stderr
        monkeypatch.setattr(sys, "argv", ["equimoe", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call
