"""The settings of malloc reach the process that trains, once, and leave a user's own alone."""

import os
import platform
import subprocess
import sys

import pytest

from equimoe.cli.allocator import SETTINGS, _has_settings

PROBE = """
import os, sys
from equimoe.cli import app
app.main = lambda: print(os.environ.get("GLIBC_TUNABLES"), sys.argv, os.getpid())
app.console()
"""


def started(*arguments: str, tunables: str | None) -> tuple[list[str], int]:
    """What the process that runs the command sees, and the id of the process that was started."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-c", PROBE, *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        return process.communicate()[0].split(maxsplit=1), process.pid


@pytest.mark.skipif(not _has_settings(*platform.libc_ver()), reason="needs glibc 2.35")
def test_training_starts_again_with_the_settings_and_the_same_arguments():
    (seen, rest), pid = started("train", "tiny", "a b", tunables=None)
    assert dict(pair.split("=") for pair in seen.split(":")) == {name: str(value) for name, value in SETTINGS.items()}
    assert rest == f"['-c', 'train', 'tiny', 'a b'] {pid}\n"  # the same process: signals and `kill` still reach it
    (seen, _), _ = started("resume", "r", tunables="glibc.rtld.nns=8")
    assert seen.startswith("glibc.rtld.nns=8:glibc.malloc.hugetlb=1:")


def test_other_commands_and_users_with_settings_are_left_alone():
    assert started("show", "tiny", tunables=None)[0][0] == "None"
    assert started("train", "tiny", tunables="glibc.malloc.hugetlb=0")[0][0] == "glibc.malloc.hugetlb=0"


def test_only_a_library_that_knows_them():
    known = [("glibc", "2.35"), ("glibc", "2.41"), ("glibc", "3.0")]
    unknown = [("glibc", "2.34"), ("glibc", "2.9"), ("", ""), ("musl", "2.40"), ("glibc", "2.35rc")]
    assert [_has_settings(*pair) for pair in known + unknown] == [True] * 3 + [False] * 5
