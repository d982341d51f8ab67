"""The skew and imbalance of a trained model's routing, layer by layer, estimated from documents that it reads.

What is compared is how unevenly a piece of a document loads the experts: the mean over pieces and experts of
|load - mean load of the expert|, a load of 1 being an even share. The skew of a layer is that at which the routing
model, on pieces of the same lengths, is as uneven. The chance that a short piece is uneven without any skew is so in
both; that neighbouring tokens choose alike is in the estimate, which comes out higher the shorter the pieces are. The
imbalance is the spread of the logarithm of the experts' mean loads, without what so many pieces give by chance.

Cost: one forward pass over at most `MOST_TOKENS` tokens, and 16 draws of as many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float64, Int, Int64

from equimoe.data.rows import Batch, heldout_batches
from equimoe.data.store import TokenStore
from equimoe.errors import EquimoeError
from equimoe.hub.load import load, local_folder
from equimoe.hub.source import find_source
from equimoe.model.transformer import Transformer, forward
from equimoe.parallel.capabilities import capabilities
from equimoe.parallel.compile_cache import enable_compile_cache
from equimoe.rehearsal.routing import RoutingModel, choose
from equimoe.sampling.terminal import needed_tokenizer
from equimoe.tasks.heldout import data_sets, run_sets
from equimoe.tasks.options import named_paths
from equimoe.train.scoring import averaged

__all__ = ["Loads", "estimate", "loads_of", "routing_of_source"]

MOST_TOKENS = 200_000
SHORTEST_PIECE = 32  # tokens: what is shorter says little about a document
FEWEST_PIECES = 8
_LEAST_LOAD = 0.01
_GRID = np.linspace(0.0, 3.0, 16)  # skews that are drawn; between them straight lines

Log = Callable[[str], None]
Loads = tuple[Float64[np.ndarray, "layers pieces E"], Int64[np.ndarray, " pieces"]]


def routing_of_source(
    source: str | Path, data: tuple[str, ...], *, seed: int, log: Log, **found: Any
) -> list[RoutingModel]:
    """Of every layer of a run, an exported folder or a Hub id, on `data` (as `eval` takes it) or a run's own sets.

    `found`: `step`, `revision` and `force` of the source, `text_field` and `max_bytes` of the data.
    """
    enable_compile_cache()
    folder = local_folder(find_source(str(source)), found.get("revision"), force=found.get("force", False))
    of_run = (folder / "recipe.json").exists()
    if not (data or of_run):
        raise EquimoeError("--load", "is a model and brings no text", "Add --data PATHS", value=str(source))
    model, tokenizer = load(folder, step=found.get("step") if of_run else None, force=found.get("force", False))
    if data:
        reading = {"text_field": found.get("text_field"), "max_bytes": found.get("max_bytes")}
        words = needed_tokenizer(tokenizer, source)
        stores = data_sets(named_paths(data), words, model.config.vocab_size, log, **reading)
    else:
        sets, cells = run_sets(folder, log)
        stores = averaged(sets, cells=cells)
    loads, lengths = loads_of(model, stores)
    log(f"routing of {lengths.sum():,} tokens in {len(lengths):,} pieces of documents, {loads.shape[0]} layers")
    return estimate(loads, lengths, model.config.num_experts_per_tok, seed=seed)


def loads_of(model: Transformer, stores: Mapping[str, TokenStore]) -> Loads:
    """Loads of every layer, piece of a document within a row, and expert; and the pieces' lengths in tokens."""
    config = model.config
    row = config.max_position_embeddings
    rows = max(1, min(8, MOST_TOKENS // row))
    counted = jax.jit(partial(_selected, compute_dtype=capabilities().compute_dtype))
    counts, lengths, left = [], [], MOST_TOKENS
    for batch in _batches(stores, row, rows):
        selected = np.asarray(counted(model, jnp.asarray(batch.token_ids), jnp.asarray(batch.segment_ids)))
        for tokens in _pieces(batch):
            chosen = selected[:, tokens].reshape(selected.shape[0], -1)
            counts.append(np.stack([np.bincount(layer, minlength=config.num_experts) for layer in chosen]))
            lengths.append(int(tokens.sum()))
        left -= batch.token_ids.size
        if left <= 0:
            break
    if len(lengths) < FEWEST_PIECES:
        raise EquimoeError(
            "--data",
            f"must hold at least {FEWEST_PIECES} documents of {SHORTEST_PIECE} tokens or more",
            "Add text with --data",
            value=len(lengths),
        )
    of_piece = np.asarray(lengths)
    even = of_piece * config.num_experts_per_tok / config.num_experts
    return np.stack(counts, axis=1) / even[None, :, None], of_piece


def estimate(
    loads: Float64[np.ndarray, "layers pieces E"], lengths: Int64[np.ndarray, " pieces"], per_token: int, *, seed: int
) -> list[RoutingModel]:
    """Of each layer the skew at which the routing model is as uneven on pieces of these lengths, and the imbalance."""
    rng = np.random.SeedSequence((seed, loads.shape[2]))
    modelled = np.asarray([_drawn(skew, lengths, loads.shape[2], per_token, rng) for skew in _GRID])
    modelled = np.maximum.accumulate(modelled)  # more skew is never less uneven: what says otherwise is chance
    return [
        RoutingModel(float(np.interp(_uneven(layer), modelled, _GRID)), _imbalance(layer, lengths)) for layer in loads
    ]


def _imbalance(loads: Float64[np.ndarray, "pieces E"], lengths: Int64[np.ndarray, " pieces"]) -> float:
    """Standard deviation over experts of log(mean load); an expert that nobody wants counts as one wanted a little."""
    share = lengths / lengths.sum()
    mean = share @ loads
    by_chance = float((share**2 @ (loads - mean) ** 2).mean())
    return math.sqrt(max(float(np.log(np.maximum(mean, _LEAST_LOAD)).var()) - by_chance, 0.0))


def _uneven(loads: Float64[np.ndarray, "pieces E"]) -> float:
    return float(np.abs(loads - loads.mean(axis=0)).mean())


def _drawn(skew: float, lengths, experts: int, per_token: int, seed: np.random.SeedSequence) -> float:
    """How uneven the routing model is; the same draws at every skew."""
    of_documents, of_tokens = np.random.default_rng(seed), np.random.default_rng((*seed.entropy, 1))
    preference = RoutingModel(float(skew)).preferences(len(lengths), np.zeros(experts), of_documents)
    chosen = choose(preference, lengths.tolist(), per_token, of_tokens)
    piece = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount((piece[:, None] * experts + chosen).reshape(-1), minlength=len(lengths) * experts)
    return _uneven(counts.reshape(len(lengths), experts) * experts / (lengths * per_token)[:, None])


def _selected(
    model: Transformer, token_ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"], *, compute_dtype: str
) -> Int[Array, "layers T K"]:
    """What `output.router.selected` is, without logits of every layer in memory."""
    return forward(
        model, token_ids, segment_ids, compute_dtype=compute_dtype, observe=lambda routing, _: routing.selected
    )[1]


def _batches(stores: Mapping[str, TokenStore], row: int, rows: int) -> Iterator[Batch]:
    for store in stores.values():
        yield from heldout_batches(store, row, rows)


def _pieces(batch: Batch) -> Iterator[Bool[np.ndarray, " T"]]:
    """Which tokens of the batch each piece has: one document within one row."""
    rows, width = batch.segment_ids.shape
    number = (np.arange(rows)[:, None] * width + batch.segment_ids).reshape(-1)
    number[batch.segment_ids.reshape(-1) < 0] = -1  # padding
    for piece, size in zip(*np.unique(number, return_counts=True), strict=True):
        if piece >= 0 and size >= SHORTEST_PIECE:
            yield number == piece
