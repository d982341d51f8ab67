"""Reading the golden tensors, and models from them. A golden file holds tensors by name on disk, some with a prefix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

MASKS = ("unpacked", "packed", "padded")


class InMemory:
    """A tensor that stands for one in a file (`hub.format.safetensors_files.TensorHandle`)."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def read(self, part=()):
        return self.array[part]


def read_config(folder: Path, file: str, **changes):
    from equimoe.hub.format.config_json import config_from_json

    return dataclasses.replace(config_from_json(json.loads((folder / file).read_text())), **changes)


def by_path(config, tensors: dict[str, np.ndarray], *, schema: int = 2) -> dict[str, np.ndarray]:
    """Tensors by name on disk -> by path of the weight table."""
    from equimoe.hub.format.tensors import entries
    from equimoe.weights import describe

    handles = {name: InMemory(a) for name, a in tensors.items()}
    return {path: entry.read() for path, entry in entries(handles, describe(config), schema=schema).items()}


def assembled(config, tensors: dict[str, np.ndarray], *, schema: int = 2):
    import jax.numpy as jnp

    from equimoe.model.init import assemble

    return assemble(config, {p: jnp.asarray(a) for p, a in by_path(config, tensors, schema=schema).items()})


def with_prefix(tensors: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name[len(prefix) :]: a for name, a in tensors.items() if name.startswith(prefix)}


def read(folder: Path, file: str) -> dict[str, np.ndarray]:
    return load_file(folder / file)


def without_v_conv(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Variant B: the same weights without the short convolution on v."""
    return {name: a for name, a in tensors.items() if not name.endswith("self_attn.sconv_v.weight")}


def zero_router_bias(config) -> dict[str, np.ndarray]:
    """Gradients of the router bias, that no golden gradient file holds because it has none."""
    return {
        f"model.layers.{i}.mlp.router.bias": np.zeros(config.num_experts, np.float32)
        for i in range(config.num_hidden_layers)
    }


def worst(actual, expected) -> float:
    """Largest absolute difference; shapes must agree, so that nothing broadcasts."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float(np.abs(actual - expected).max(initial=0.0))
