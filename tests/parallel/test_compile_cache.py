"""The cache of compiled programs: where it lies, who may turn it off, and that it changes no bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
from equimoe.parallel import compile_cache
compile_cache.LEAST_COMPILE_SECONDS = 0.0
compile_cache.enable_compile_cache()
x = jnp.linspace(0.0, 1.0, 64)
square = jnp.outer(x, x)
print(float(jax.jit(lambda a: jnp.sum(jnp.sin(a @ a) ** 3))(square)).hex())
print(jax.config.jax_compilation_cache_dir)
"""


def run(**environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("EQUIMOE", "JAX_COMPILATION"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**clean, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    value, folder = done.stdout.splitlines()
    return value, folder, done.stderr


@pytest.mark.slow
def test_a_cached_program_gives_the_same_bits_and_a_damaged_one_is_compiled_anew(tmp_path):
    fresh, folder, _ = run(EQUIMOE_CACHE=str(tmp_path), EQUIMOE_COMPILE_CACHE="off")
    assert folder == "None" and list(tmp_path.iterdir()) == []
    first, folder, _ = run(EQUIMOE_CACHE=str(tmp_path))
    assert folder == str(tmp_path / "compiled")
    entries = [path for path in (tmp_path / "compiled").iterdir() if path.name.endswith("-cache")]
    assert entries
    assert run(EQUIMOE_CACHE=str(tmp_path))[0] == first == fresh
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    assert run(EQUIMOE_CACHE=str(tmp_path))[0] == fresh


@pytest.mark.slow
def test_where_it_lies_and_what_an_unwritable_folder_says(tmp_path):
    (tmp_path / "file").write_text("")
    _, folder, said = run(EQUIMOE_CACHE=str(tmp_path / "file"))
    assert folder == "None"
    assert said.count("compiled programs are not kept") == 1
    _, folder, _ = run(EQUIMOE_CACHE=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "mine"))
    assert folder == str(tmp_path / "mine")
