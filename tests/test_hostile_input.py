"""Input that once gave a silent wrong result or a traceback: each is refused, or handled, by name."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import equimoe
from equimoe.errors import EquimoeError
from equimoe.recipe.resolve import resolve

CONFIG = equimoe.derive(
    16, layers=1, head_dim=8, experts=4, experts_per_token=1, vocabulary=32, row_tokens=8, gated_norm_rank=4
)


def test_wide_segment_ids_and_a_text_for_a_bool_are_refused():
    """In a process without the type checks of the tests, as users run it: JAX would cut the ids to 32 bits."""
    code = """
import dataclasses, jax, jax.numpy as jnp, numpy as np, equimoe
config = equimoe.derive(16, layers=1, head_dim=8, experts=4, experts_per_token=1, vocabulary=32, row_tokens=8)
model = equimoe.init(config, key=jax.random.key(0))
for attempt in (
    lambda: model(jnp.zeros((1, 8), jnp.int32), np.asarray([[0] * 4 + [2**32] * 4])),
    lambda: dataclasses.replace(config, rope_fused="false"),
):
    try:
        attempt()
    except equimoe.EquimoeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "segment_ids ((0, 4294967296)): must fit in 32 bits" in done.stdout
    assert "rope_fused ('false'): must be true or false" in done.stdout


def test_a_weight_on_the_last_position_counts_nothing():
    model = equimoe.init(CONFIG, key=jax.random.key(0))
    ids = jnp.arange(8, dtype=jnp.int32)[None]
    loss = jax.jit(equimoe.loss)
    everywhere = loss(model, ids, None, jnp.ones((1, 8)))
    assert float(everywhere) == float(loss(model, ids, None, jnp.ones((1, 8)).at[0, -1].set(0.0)))


def test_a_recipe_that_exits_is_an_error_and_one_with_dataclasses_works(tmp_path):
    path = tmp_path / "leaves.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(EquimoeError, match="leaves.py"):
        resolve(str(path))
    path = tmp_path / "typed.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport equimoe\n\n"
        "@dataclass\nclass Sizes:\n    steps: int = 7\n\n\ndef recipe() -> equimoe.Recipe:\n"
        "    return equimoe.Recipe(name='typed', model=equimoe.preset('tiny'),\n"
        "                          schedule=equimoe.Schedule(steps=Sizes().steps, batch_sequences=2))\n"
    )
    assert resolve(str(path)).recipe.schedule.steps == 7
