"""Cross entropy over vocabulary blocks against `jax.nn.log_softmax`: values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst

from equimoe.model.loss import cross_entropy, cross_entropy_and_likeliest

TOKENS, WIDTH = 13, 10


def dense(hidden, lm_head, targets):
    logits = hidden @ lm_head.T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=1), targets[:, None], axis=1)[:, 0]
    return -picked, jax.nn.logsumexp(logits, axis=1)


# 257 in blocks of 64: five of 52, the last one short. 7 in one block of 2048: still two blocks, of 4. 1: one block.
@pytest.mark.parametrize(("vocabulary", "block"), [(257, 64), (7, 2048), (1, 2048)])
def test_equals_log_softmax_in_values_and_gradients(vocabulary, block):
    keys = jax.random.split(jax.random.key(vocabulary), 4)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH))
    lm_head = jax.random.normal(keys[1], (vocabulary, WIDTH)) * jnp.float32(3.0)
    targets = jax.random.randint(keys[2], (TOKENS,), 0, vocabulary, jnp.int32)
    pull = tuple(jax.random.normal(keys[3], (2, TOKENS)))

    @jax.jit
    def both(hidden, lm_head):
        ours, back = jax.vjp(lambda h, w: cross_entropy(h, w, targets, block=block), hidden, lm_head)
        plain, plain_back = jax.vjp(lambda h, w: dense(h, w, targets), hidden, lm_head)
        return (*ours, *back(pull)), (*plain, *plain_back(pull))

    for name, a, b in zip(("loss", "log total", "d_hidden", "d_head"), *both(hidden, lm_head), strict=True):
        assert worst(a, b) <= 1e-5 * max(1.0, np.abs(b).max()), name


def test_a_target_outside_the_vocabulary_gives_the_log_sum_exp():
    hidden, lm_head = jnp.ones((3, 4)), jnp.ones((5, 4))
    per_token, log_total = cross_entropy(hidden, lm_head, jnp.asarray([-1, 5, 2], jnp.int32), block=2)
    expected = 4.0 + np.log(5.0)
    np.testing.assert_allclose(log_total, [expected] * 3, rtol=1e-6)
    np.testing.assert_allclose(per_token, [expected, expected, np.log(5.0)], rtol=1e-6)


@pytest.mark.parametrize(("vocabulary", "block"), [(257, 64), (7, 2048), (1, 2048)])
def test_the_likeliest_entry_is_the_argmax(vocabulary, block):
    keys = jax.random.split(jax.random.key(vocabulary), 3)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH))
    lm_head = jax.random.normal(keys[1], (vocabulary, WIDTH))
    targets = jax.random.randint(keys[2], (TOKENS,), 0, vocabulary, jnp.int32)
    per_token, likeliest = cross_entropy_and_likeliest(hidden, lm_head, targets, block=block)
    np.testing.assert_allclose(per_token, dense(hidden, lm_head, targets)[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(likeliest, jnp.argmax(hidden @ lm_head.T, axis=1))


def test_of_equal_logits_the_first_entry_is_the_likeliest():
    """In one block and across two: entries 1, 2 and 3 are equal, blocks are 0-1 and 2-3."""
    lm_head = jnp.asarray([[0.0], [1.0], [1.0], [1.0]])
    _, likeliest = cross_entropy_and_likeliest(jnp.ones((1, 1)), lm_head, jnp.asarray([0], jnp.int32), block=2)
    assert likeliest.tolist() == [1]
    _, negative = cross_entropy_and_likeliest(-jnp.ones((1, 1)), lm_head[1:], jnp.asarray([0], jnp.int32), block=2)
    assert negative.tolist() == [0]  # three entries in two blocks of two: never the padding behind them


def test_logits_far_apart_do_not_overflow():
    hidden = jnp.asarray([[1.0]])
    lm_head = jnp.asarray([[-1e4], [0.0], [1e4]])
    per_token, log_total = cross_entropy(hidden, lm_head, jnp.asarray([0], jnp.int32), block=1)
    assert (float(per_token[0]), float(log_total[0])) == (2e4, 1e4)


def test_bfloat16_products_accumulate_in_float32():
    hidden, lm_head = jnp.ones((1, 4), jnp.bfloat16), jnp.ones((512, 4))
    _, log_total = cross_entropy(hidden, lm_head, jnp.asarray([0], jnp.int32), block=64)
    assert log_total.dtype == jnp.float32
    assert abs(float(log_total[0]) - (4.0 + np.log(512.0))) < 1e-5  # bfloat16 would be off by up to 0.03
