"""Compiled programs kept on disk, so that a second start of the same run compiles nothing. On by default.

They lie in `compiled/` of the cache folder (`EQUIMOE_CACHE`), the least used go first above 4 GB, and a damaged one is
compiled anew. A key covers program, versions, flags and device: another machine or version never takes a wrong one.
`EQUIMOE_COMPILE_CACHE=off` turns it off, `JAX_COMPILATION_CACHE_DIR` names another folder.
"""

from __future__ import annotations

import os
import warnings

import jax

from equimoe.files import cache_folder

__all__ = ["enable_compile_cache"]

MOST_BYTES = 4 * 10**9
LEAST_COMPILE_SECONDS = 0.5  # what compiles faster is not worth a file


def enable_compile_cache() -> None:
    """Turn the cache on, unless the environment or the program already decided. To be called before JAX compiles."""
    if os.environ.get("EQUIMOE_COMPILE_CACHE", "").lower() in ("off", "0", "false", "no"):
        return
    if jax.config.jax_compilation_cache_dir:  # JAX_COMPILATION_CACHE_DIR, or an earlier call
        return
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        warnings.warn(
            f"compiled programs are not kept, since {folder} cannot be written ({error.strerror}): every start "
            "compiles. EQUIMOE_CACHE names another folder, EQUIMOE_COMPILE_CACHE=off turns this off",
            stacklevel=2,
        )
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(folder))
