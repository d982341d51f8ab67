"""Next-token cross entropy over vocabulary blocks: neither pass ever holds a [T, V] array.

The forward keeps an online log-sum-exp over blocks of the head; the backward makes each block of logits
again from it (custom VJP). Memory T * block floats; four head-sized products a step instead of three.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

__all__ = ["cross_entropy", "cross_entropy_and_likeliest"]

DEFAULT_BLOCK = 2048  # vocabulary entries a block: [65,536 tokens, 2,048] float32 is 512 MiB at hero size


def cross_entropy(
    hidden: Float[Array, "T D"], lm_head: Float[Array, "V D"], targets: Int[Array, " T"], *, block: int = DEFAULT_BLOCK
) -> tuple[Float32[Array, " T"], Float32[Array, " T"]]:
    """Per token: cross entropy in nats, and the log-sum-exp of its logits (for the z-loss). Both differentiable.

    Products in the dtype of `hidden`, accumulation and statistics in float32. A target outside [0, V) gives
    the log-sum-exp itself; mask such positions by their loss weight.
    """
    log_total, picked = _blockwise(hidden, _in_blocks(lm_head.astype(hidden.dtype), block), targets, lm_head.shape[0])
    return log_total - picked, log_total


def cross_entropy_and_likeliest(
    hidden: Float[Array, "T D"], lm_head: Float[Array, "V D"], targets: Int[Array, " T"], *, block: int = DEFAULT_BLOCK
) -> tuple[Float32[Array, " T"], Int32[Array, " T"]]:
    """Per token: `cross_entropy` in nats, and the entry of the largest logit, of equal ones the first. Forward only."""
    vocabulary, tokens = lm_head.shape[0], hidden.shape[0]
    head_blocks = _in_blocks(lm_head.astype(hidden.dtype), block)

    def step(carry, block):
        sums, likeliest = carry
        head_block, first = block
        logits, entry = _block_logits(hidden, head_block, first, vocabulary)
        likeliest = jnp.where(logits.max(axis=1) > sums[0], first + logits.argmax(axis=1).astype(jnp.int32), likeliest)
        return (_added(sums, logits, entry, targets, vocabulary), likeliest), None

    start = (_no_sums(tokens), jnp.zeros(tokens, jnp.int32))
    ((top, total, picked), likeliest), _ = jax.lax.scan(step, start, (head_blocks, _firsts(head_blocks)))
    return top + jnp.log(total) - picked, likeliest


def _in_blocks(lm_head: Float[Array, "V D"], block: int) -> Float[Array, "blocks block D"]:
    """The head in blocks of one size, at most `block`; what the last one lacks is zeros."""
    vocabulary = lm_head.shape[0]
    # At least two blocks, so that "never [T, V]" also holds for a vocabulary smaller than one block.
    blocks = max(2, -(-vocabulary // block)) if vocabulary > 1 else 1
    size = -(-vocabulary // blocks)
    return jnp.pad(lm_head, ((0, blocks * size - vocabulary), (0, 0))).reshape(blocks, size, -1)


def _firsts(head_blocks):
    """The first entry of each block."""
    return jnp.arange(head_blocks.shape[0], dtype=jnp.int32) * head_blocks.shape[1]


def _block_logits(hidden, head_block, first, vocabulary):
    """Logits of one block, float32, with the padding behind the vocabulary at -inf."""
    logits = jnp.einsum("td,vd->tv", hidden, head_block, preferred_element_type=jnp.float32)
    entry = first + jnp.arange(head_block.shape[0], dtype=jnp.int32)
    return jnp.where(entry[None, :] < vocabulary, logits, -jnp.inf), entry


def _is_target(entry, targets, vocabulary):
    """[T, block]. Never the padding behind the vocabulary: its logit of -inf would be the loss of a target V."""
    return (entry[None, :] == targets[:, None]) & (entry[None, :] < vocabulary)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blockwise(hidden, head_blocks, targets, vocabulary):
    """(log-sum-exp of the logits, logit of the target), each [T]."""
    return _forward(hidden, head_blocks, targets, vocabulary)[0]


def _no_sums(tokens):
    """Largest logit, sum of exponentials below it, and logit of the target, before the first block."""
    return jnp.full(tokens, -1e30, jnp.float32), jnp.zeros(tokens, jnp.float32), jnp.zeros(tokens, jnp.float32)


def _added(sums, logits, entry, targets, vocabulary):
    """The sums with one more block."""
    top, total, picked = sums
    new_top = jnp.maximum(top, logits.max(axis=1))
    total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=1)
    picked = picked + jnp.sum(jnp.where(_is_target(entry, targets, vocabulary), logits, 0.0), axis=1)
    return new_top, total, picked


def _forward(hidden, head_blocks, targets, vocabulary):
    def step(sums, block):
        head_block, first = block
        logits, entry = _block_logits(hidden, head_block, first, vocabulary)
        return _added(sums, logits, entry, targets, vocabulary), None

    (top, total, picked), _ = jax.lax.scan(step, _no_sums(hidden.shape[0]), (head_blocks, _firsts(head_blocks)))
    log_total = top + jnp.log(total)
    return (log_total, picked), (hidden, head_blocks, targets, log_total)


def _backward(vocabulary, saved, cotangents):
    hidden, head_blocks, targets, log_total = saved
    d_total, d_picked = cotangents

    def step(d_hidden, block):
        head_block, first = block
        logits, entry = _block_logits(hidden, head_block, first, vocabulary)
        d_logits = d_total[:, None] * jnp.exp(logits - log_total[:, None])
        d_logits = d_logits + jnp.where(_is_target(entry, targets, vocabulary), d_picked[:, None], 0.0)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = d_hidden + jnp.einsum("tv,vd->td", d_logits, head_block, preferred_element_type=jnp.float32)
        return d_hidden, jnp.einsum("tv,td->vd", d_logits, hidden, preferred_element_type=jnp.float32)

    d_hidden, d_head = jax.lax.scan(step, jnp.zeros(hidden.shape, jnp.float32), (head_blocks, _firsts(head_blocks)))
    return d_hidden.astype(hidden.dtype), d_head.astype(head_blocks.dtype), None


_blockwise.defvjp(_forward, _backward)
