"""Hidden states and logits of an export through its PyTorch code, with one decoder layer in memory at a time.

The model is built on the `meta` device, where tensors have shapes and no memory, and all its layers are given one
layer's memory. Its own forward pass then runs; before each layer a hook fills that memory from the files. The only
module that imports torch and transformers, when it is asked to; they come with `pip install 'equimoe[torch]'`.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32

from equimoe.errors import EquimoeError
from equimoe.hub.exporting.packaged_code import CONFIGURATION, import_code, packaged_code, refuse_foreign_code
from equimoe.hub.format.safetensors_files import TensorHandle, read_each

__all__ = ["LayerOutput", "TorchPass", "block_logits", "hidden_states", "missing_library"]

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")


@dataclass(frozen=True)
class LayerOutput:
    """What JAX computes for a layer. `tied`: positions where the last expert that is chosen leads the next one by so
    little that another library may choose the other."""

    hidden: Float32[np.ndarray, "B S D"]
    tied: Bool[np.ndarray, "B S"]


@dataclass(frozen=True)
class TorchPass:
    """`ties`: how often PyTorch chose the other one of two tied experts; there it went on with JAX's layer output."""

    hidden: Float32[np.ndarray, "B S D"]  # after the final norm and gate
    ties: int
    through: str  # the library and its version


def missing_library() -> str | None:
    """The library that is not installed, if one is not."""
    return next((name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None), None)


def hidden_states(
    folder: Path,
    handles: Mapping[str, TensorHandle],
    embedded: Float32[np.ndarray, "B S D"],
    layers: Sequence[LayerOutput],
    most_difference: float,
) -> TorchPass:
    """Final hidden states from embedded tokens. `layers`: what JAX computes, for ties of experts (`_LayerHooks`)."""
    import torch
    import transformers

    model = _without_memory(folder)
    memory = model.layers[0].to_empty(device="cpu").state_dict()
    hooks = [
        _LayerHooks(f"model.layers.{number}.", memory, handles, expected, most_difference)
        for number, expected in enumerate(layers)
    ]
    for layer, hook in zip(model.layers, hooks, strict=True):
        layer.load_state_dict(memory, assign=True)
        layer.register_forward_pre_hook(hook.before)
        layer.register_forward_hook(hook.after)
    for name in ("embed_norm", "embed_gated_norm", "norm", "final_gated_norm"):
        _fill(getattr(model, name).to_empty(device="cpu").state_dict(), f"model.{name}.", handles)
    with torch.inference_mode():
        hidden = model(inputs_embeds=torch.from_numpy(embedded), use_cache=False).last_hidden_state
    return TorchPass(hidden.numpy(), sum(h.ties for h in hooks), f"transformers {transformers.__version__}")


@dataclass
class _LayerHooks:
    """What happens before a layer computes and after. At a tie of two experts that went the other way than in JAX the
    layer's output there becomes JAX's, so that all that follows is still compared."""

    prefix: str
    memory: Mapping[str, Any]
    handles: Mapping[str, TensorHandle]
    expected: LayerOutput
    most_difference: (
        float  # of an output from the expected one, over the largest: more shows that it went the other way
    )
    ties: int = 0

    def before(self, layer: Any, inputs: Any) -> None:
        _fill(self.memory, self.prefix, self.handles)

    def after(self, layer: Any, inputs: Any, output: Any) -> Any:
        import torch

        found, expected = output.numpy(), self.expected.hidden
        off = np.abs(found - expected).max(-1) > self.most_difference * np.abs(expected).max()
        swapped = off & self.expected.tied
        self.ties += int(swapped.sum())
        return torch.from_numpy(np.where(swapped[..., None], expected, found))


def block_logits(
    hidden: Float32[np.ndarray, "B S D"], rows: Float32[np.ndarray, "V D"]
) -> Float32[np.ndarray, "B S V"]:
    """Logits of the vocabulary entries whose rows of the head are given."""
    import torch

    with torch.inference_mode():
        return torch.nn.functional.linear(torch.from_numpy(hidden), torch.from_numpy(rows)).numpy()


def _without_memory(folder: Path) -> Any:
    """The language model's body in evaluation mode, float32, on the `meta` device."""
    import sys

    import torch

    code = packaged_code()
    refuse_foreign_code(folder, code)
    modeling = import_code(code)
    configuration = sys.modules[f"{modeling.__package__}.{CONFIGURATION}"]
    with torch.device("meta"):
        model = modeling.GrugMoeForCausalLM(configuration.GrugMoeConfig.from_pretrained(folder))
    return model.float().eval().model


def _fill(memory: Mapping[str, Any], prefix: str, handles: Mapping[str, TensorHandle]) -> None:
    """Fill the tensors of a module's state with those of the files whose names begin with `prefix`."""
    names = [name for name in handles if name.startswith(prefix)]
    filled = 0
    for name, array in zip(names, read_each(handles[name] for name in names), strict=True):
        inside = name.removeprefix(prefix)
        expert = _EXPERT.fullmatch(inside)  # one by one in the files, one stack in memory
        place = memory.get(inside if expert is None else f"mlp.experts.{expert[2]}")
        place = place if expert is None or place is None else place[int(expert[1])]
        if place is None or tuple(place.shape) != array.shape:
            raise _other_tensors(name)
        place.numpy()[...] = array
        filled += math.prod(array.shape)
    if filled != sum(tensor.numel() for tensor in memory.values()):
        raise _other_tensors(f"{prefix}*")


def _other_tensors(name: str) -> EquimoeError:
    return EquimoeError(
        "verification",
        "must be a tensor of the PyTorch code too, with the same name and shape",
        "Report it with the version of equimoe",
        value=name,
    )
