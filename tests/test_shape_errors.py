"""A wrong shape gives a readable error: under the jaxtyping hook of this test suite it names the argument; without
the hook, as users run it, the public entry points raise an EquimoeError that names it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

import equimoe
from equimoe.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=17,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    head_dim=4,
    local_kv_heads=1,
    global_kv_heads=1,
    num_experts=3,
    num_experts_per_tok=1,
    moe_intermediate_size=4,
    latent_dim=4,
    num_shared_experts=1,
    shared_expert_intermediate_size=4,
    max_position_embeddings=8,
    sliding_window=4,
    gated_norm_rank=2,
)


def zero_model():
    from equimoe.model.init import assemble
    from equimoe.weights import describe

    return assemble(CONFIG, {p: jnp.zeros(w.shape) for p, w in describe(CONFIG).items()})


def ids(*shape, dtype=jnp.int32):
    return jnp.zeros(shape, dtype)


def calls():
    """name -> (argument that is wrong, call)."""
    from equimoe.model.blocked_attention import blocked_attention
    from equimoe.model.loss import cross_entropy
    from equimoe.model.norm import rms_norm
    from equimoe.model.quantile_balancing import histogram_betas
    from equimoe.model.rotary import rotate
    from equimoe.model.short_conv import short_conv
    from equimoe.optim import orthogonalise
    from equimoe.parallel.transports.local import plan_dispatch

    model = zero_model()
    heads, keys = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 6, 2, 8))
    return {
        "model, one row without a batch axis": ("token_ids", lambda: model(ids(6))),
        "model, float ids": ("token_ids", lambda: model(ids(2, 6, dtype=jnp.float32))),
        "model, segments of other rows": ("segment_ids", lambda: model(ids(2, 6), ids(2, 5))),
        "loss": ("segment_ids", lambda: equimoe.loss(model, ids(2, 6), ids(3, 6))),
        "loss, weight": ("loss_weight", lambda: equimoe.loss(model, ids(2, 6), ids(2, 6), jnp.ones((2, 5)))),
        "cross_entropy, head of another width": (
            "lm_head",
            lambda: cross_entropy(jnp.zeros((5, 8)), jnp.zeros((17, 7)), ids(5)),
        ),
        "cross_entropy, targets": ("targets", lambda: cross_entropy(jnp.zeros((5, 8)), jnp.zeros((17, 8)), ids(4))),
        "blocked_attention, values": ("v", lambda: blocked_attention(heads, keys, keys[:, :5], ids(2, 6), window=None)),
        "blocked_attention, segments": (
            "segment_ids",
            lambda: blocked_attention(heads, keys, keys, ids(6), window=None),
        ),
        "orthogonalise": ("g", lambda: orthogonalise(jnp.zeros(5))),
        "short_conv": ("kernel", lambda: short_conv(jnp.zeros((2, 6, 8)), jnp.zeros((4, 7)), ids(2, 6))),
        "rms_norm": ("gain", lambda: rms_norm(jnp.zeros((2, 8)), jnp.zeros(7), 1e-5)),
        "rotate": ("positions", lambda: rotate(heads, ids(5), 1e4, adjacent_pairs=True)),
        "histogram_betas": ("alpha", lambda: histogram_betas(jnp.zeros((5, 3)), jnp.zeros(4), ids(5) >= 0, 1, 10)),
        "plan_dispatch": ("valid", lambda: plan_dispatch(ids(5, 1), ids(4) >= 0, 3)),
    }


@pytest.mark.parametrize("name", list(calls()))
def test_the_argument_is_named_under_the_hook(name):
    argument, call = calls()[name]
    with pytest.raises(TypeCheckError, match=f"typechecking parameter '{argument}'"):
        call()


WITHOUT_HOOK = """
    import sys
    sys.path.insert(0, {tests!r})
    import jax.numpy as jnp
    from test_shape_errors import CONFIG, ids, zero_model
    import equimoe
    import dataclasses

    model = zero_model()
    for call in (
        lambda: model(ids(6)),
        lambda: model(ids(2, 6, dtype=jnp.float32)),
        lambda: model([[1, 2]]),
        lambda: model(ids(2, 6), ids(2, 5)),
        lambda: model(ids(2, 6), ids(2, 6, dtype=jnp.float32)),
        lambda: model(ids(2, 9)),
        lambda: equimoe.loss(model, ids(6)),
        lambda: equimoe.loss(model, ids(2, 6), ids(3, 6)),
        lambda: equimoe.loss(model, ids(2, 6), ids(2, 6), jnp.ones((2, 5))),
        lambda: dataclasses.replace(CONFIG, hidden_size=8.0),
        lambda: dataclasses.replace(CONFIG, sconv_sites=("k", "q")),
    ):
        try:
            call()
            print("no error")
        except equimoe.EquimoeError as error:
            print(str(error).replace(chr(10), " "))
"""


def test_without_the_hook_the_public_entry_points_name_the_argument(request):
    script = textwrap.dedent(WITHOUT_HOOK.format(tests=str(request.path.parent)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    ids_rule = "must be integers of shape [B, S] (sequences, positions). Pass a batch of rows, for example ids[None, :]"
    *shapes, whole, site = done.stdout.splitlines()
    assert shapes == [
        f"token_ids ('int32[6]'): {ids_rule}",
        f"token_ids ('float32[2, 6]'): {ids_rule}",
        f"token_ids ('list[]'): {ids_rule}",
        "segment_ids ([2, 5]): must have the shape of token_ids, [2, 6]. Number the documents of the same rows",
        f"segment_ids ('float32[2, 6]'): {ids_rule}",
        "token_ids ([2, 9]): rows are at most 8 positions long (max_position_embeddings). "
        "Cut the rows or raise the limit",
        f"token_ids ('int32[6]'): {ids_rule}",
        "segment_ids ([3, 6]): must have the shape of token_ids, [2, 6]. Number the documents of the same rows",
        "loss_weight ([2, 5]): must have the shape of token_ids, [2, 6]. Give one weight per position",
    ]
    # Types that the hook refuses before the config can: what the config says itself.
    assert "hidden_size (8.0): must be a whole number of at least 1" in whole
    assert "sconv_sites ('q'): known sites are k, v, attn, mlp; remove it" in site
