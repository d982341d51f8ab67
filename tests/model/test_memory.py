"""What the loss and its gradient never hold: logits of all tokens, scores of a whole row, one-hot dispatch masks.

The jaxpr of the whole training computation is walked, with every nested one (scan, cond, custom_vjp, remat), at sizes
that no other axis has. Nothing is compiled or allocated.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest

B, S, V, E, K, LAYERS = 3, 1100, 4999, 11, 2, 3
S_PADDED = 1536  # three attention blocks of 512
T = B * S


def shapes_in(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of every value in a jaxpr and in all jaxprs inside it."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {v.aval.shape for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "shape")}
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, (tuple, list)) else [parameter]:
                inner = getattr(inner, "jaxpr", inner)  # a closed jaxpr holds an open one
                if hasattr(inner, "eqns"):
                    found |= shapes_in(inner)
    return found


def holds_logits(shape) -> bool:
    return any(v in shape for v in (V, V + 2)) and (T in shape or (B in shape and S in shape))


def holds_scores(shape) -> bool:
    return sum(n in (S, S_PADDED) for n in shape) >= 2


def holds_dispatch_mask(shape) -> bool:
    """[T, E] alone is the router; with a third axis it is a one-hot mask or a stack over layers."""
    return len(shape) > 2 and E in shape and (T in shape or (B in shape and S in shape) or T * K in shape)


@pytest.fixture(scope="module")
def shapes():
    from numerics import strict

    from equimoe.config import ModelConfig
    from equimoe.model.init import abstract
    from equimoe.objectives.language_model import loss_and_terms

    config = ModelConfig(
        vocab_size=V,
        hidden_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        head_dim=8,
        local_kv_heads=2,
        global_kv_heads=1,
        num_experts=E,
        num_experts_per_tok=K,
        moe_intermediate_size=10,
        latent_dim=14,
        num_shared_experts=2,
        shared_expert_intermediate_size=9,
        max_position_embeddings=S,
        sliding_window=600,
        gated_norm_rank=7,
    )
    tokens = jax.ShapeDtypeStruct((B, S), jnp.int32)
    with strict():
        gradient = jax.value_and_grad(loss_and_terms, has_aux=True)
        return shapes_in(jax.make_jaxpr(gradient)(abstract(config), tokens, tokens).jaxpr)


def test_the_walk_reaches_every_stage(shapes):
    assert (T, E) in shapes, "router"
    assert (T, -(-V // 3)) in shapes, "a block of logits: 2,048 at most, so three"
    assert (B, 2, 2 * 512, 512) in shapes and (B, 1, 4 * 512, 512) in shapes, "score blocks of local and global layers"
    assert (E, 14, 10) in shapes, "gradient of the experts"


def test_never_all_logits(shapes):
    assert not [s for s in shapes if holds_logits(s)]
    assert max(math.prod(s) for s in shapes) < T * V, "nor anything else of that size"


def test_never_the_scores_of_a_row(shapes):
    assert not [s for s in shapes if holds_scores(s)]


def test_never_a_dispatch_mask(shapes):
    assert not [s for s in shapes if holds_dispatch_mask(s)]


def test_the_walk_finds_what_it_looks_for():
    """The same walk over the naive computations, hidden in a scan, a cond, a remat and a custom VJP."""

    @jax.custom_vjp
    def naive_loss(hidden, head):
        return jax.nn.logsumexp(hidden @ head.T, axis=1).sum()

    naive_loss.defvjp(lambda h, w: (naive_loss(h, w), (h, w)), lambda saved, g: (saved[0] * g, saved[1] * g))

    def naive(hidden, head, scores_of, choices):
        _, sizes = jax.lax.scan(lambda c, _: (c, jnp.sum(scores_of @ scores_of.T)), 0.0, None, length=2)
        mask = jax.lax.cond(sizes[0] > 0, lambda: jax.nn.one_hot(choices, E).sum(), lambda: jnp.zeros(()))
        return jax.checkpoint(naive_loss)(hidden, head) + mask + sizes.sum()

    f32 = jnp.float32
    arguments = [jax.ShapeDtypeStruct(s, f32) for s in ((T, 8), (V, 8), (S, 8))]
    found = shapes_in(jax.make_jaxpr(naive)(*arguments, jax.ShapeDtypeStruct((T, K), jnp.int32)).jaxpr)
    assert [s for s in found if holds_logits(s)] == [(T, V)]
    assert (S, S) in [s for s in found if holds_scores(s)]
    assert (T, K, E) in [s for s in found if holds_dispatch_mask(s)]
