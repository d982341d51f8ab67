"""Settings of malloc for commands that compute, or move weights, for long.

XLA:CPU takes the buffers of a step from malloc and gives them back after it. As malloc comes, each step then asks the
kernel for its memory again, in pages of 4 KiB: 130,000 of them in a step of a 15 M model. With the settings below
the memory is kept between steps, in pages of 2 MiB: 10 % less time a step for 8 % more memory (2 cores, jax 0.10.2).
An export reads every array into new memory, and spends half the processor's time. glibc reads the settings when a
process starts, so that the process starts itself again, once.
"""

from __future__ import annotations

import os
import platform
import sys

__all__ = ["start_again_with_settings", "with_settings"]

SETTINGS = {
    "glibc.malloc.hugetlb": 1,  # ask for huge pages where the kernel gives them to those that ask
    "glibc.malloc.mmap_max": 0,  # large blocks from the heap, which stays, and not each as a mapping of its own
    "glibc.malloc.trim_threshold": 1 << 35,
    "glibc.malloc.top_pad": 1 << 26,
}
_OLDEST = (2, 35)  # the first glibc with `hugetlb`


def start_again_with_settings() -> None:
    """Replace this process by itself with the settings, on glibc. A process whose GLIBC_TUNABLES already speak of
    malloc is left as it is: started again by us, or set by the user (`GLIBC_TUNABLES=glibc.malloc.hugetlb=0`)."""
    if not (environment := with_settings()):
        return
    try:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})
    except OSError:  # slower, not wrong
        return


def with_settings() -> dict[str, str]:
    """What the environment of such a process has on top of that of this one; empty where nothing is to be set."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc." in tunables or not _has_settings(*platform.libc_ver()):
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, [tunables, *(f"{n}={v}" for n, v in SETTINGS.items())]))}


def _has_settings(library: str, version: str) -> bool:
    numbers = version.split(".")
    return library == "glibc" and all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) >= _OLDEST
