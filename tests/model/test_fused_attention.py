"""Attention through tokamax: the mask by hand, the choice of the core, and, where tokamax is installed, values,
gradients and programs. Without it those tests are skipped. No GPU is needed; to run them:

    pip install tokamax==0.0.12 && python -m pytest tests/model/test_fused_attention.py

The kernels are lowered for CUDA by the CPU, not run: tests/gpu/check_attention.py runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import worst

from equimoe.model.attention import attend
from equimoe.model.blocked_attention import blocked_attention
from equimoe.model.fused_attention import ROW_MULTIPLE, first_keys, fused_attention
from equimoe.model.init import abstract, init
from equimoe.objectives.language_model import loss_and_terms
from equimoe.parallel import capabilities as capabilities_module
from equimoe.parallel.capabilities import TOKAMAX, TOKAMAX_JAX, capabilities
from equimoe.presets import derive

POSITIONS = 37


@pytest.fixture
def tokamax():
    """tokamax promotes dtypes and ranks, so it runs outside the strict numerics of this folder."""
    pytest.importorskip("tokamax", reason="tokamax, of the extra `gpu`, is not installed")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def documents(positions=POSITIONS):
    out = np.zeros((3, positions), np.int32)
    out[0, 20:] = 1
    out[1, 9:11], out[1, 11:30], out[1, 30:] = 4, 2, -1  # padding at the end
    out[2] = np.arange(positions) // 3  # many short documents
    return jnp.asarray(out)


def draw(heads, keys, positions=POSITIONS, dtype=jnp.float32):
    shapes = [(3, positions, n, 8) for n in (heads, keys, keys, heads)]
    return [(jax.random.normal(jax.random.key(i), s) * jnp.float32(1.5)).astype(dtype) for i, s in enumerate(shapes)]


# position        0  1  2  3  4  5  6  7  8  9
# segment         7  7  7  7  3  3  3  3 -1 -1
# run starts at   0  0  0  0  4  4  4  4  8  8
# window of 3    -2 -1  0  1  2  3  4  5  6  7
@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (None, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]),
        (1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, [0, 0, 0, 1, 4, 4, 4, 5, 8, 8]),
        (50, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]),
    ],
)
def test_first_keys_of_a_packed_row(window, expected):
    packed = jnp.asarray([[7, 7, 7, 7, 3, 3, 3, 3, -1, -1]], jnp.int32)
    assert first_keys(packed, window).tolist() == [expected]


def test_the_mask_has_no_square_array():
    program = str(jax.make_jaxpr(partial(first_keys, window=5))(documents()))
    assert f"i32[3,{POSITIONS}]" in program and not square(program, POSITIONS)


def square(program: str, positions: int) -> set[str]:
    """Arrays of a jaxpr or of StableHLO that have two axes of a row's length."""
    in_jaxpr = rf"\w+\[(?:\d+,)*{positions},{positions}(?:,\d+)*\]"
    in_stablehlo = rf"(?<=<)(?:\d+x)*{positions}x{positions}x\w+"
    return set(re.findall(f"{in_jaxpr}|{in_stablehlo}", program))


def test_square_can_fail():
    wide = jax.make_jaxpr(lambda ids: ids[:, :, None] == ids[:, None, :])(documents())
    assert square(str(wide), POSITIONS) == {f"bool[3,{POSITIONS},{POSITIONS}]"}
    assert square("tensor<2x1x512x512xi32>", 512) == {"2x1x512x512xi32"}


# ---- which core is used ----


def test_a_cpu_has_no_fused_kernels():
    assert (capabilities().attention, capabilities().attention_note) == ("blocked", "fused kernels are for GPUs")


@pytest.mark.parametrize(
    ("devices", "compute", "installed", "jax_version", "kind", "note"),
    [
        (1, "9.0", TOKAMAX, "0.10.2", "tokamax", f"tokamax {TOKAMAX}, for bfloat16 and float16"),
        (1, "9.0", None, "0.10.2", "blocked", "tokamax is not installed; pip install 'equimoe[gpu]'"),
        (1, "9.0", "9.9.9", "0.10.2", "blocked", f"tokamax 9.9.9 is installed, {TOKAMAX} was checked"),
        (1, "9.0", "unknown", "0.10.2", "blocked", f"tokamax of unknown version is installed, {TOKAMAX} was checked"),
        (1, "9.0", TOKAMAX, "0.12.0.1", "blocked", f"tokamax {TOKAMAX} needs jax 0.10.x, this is 0.12.0.1"),
        (8, "9.0", TOKAMAX, "0.10.2", "blocked", "XLA cannot partition the fused kernels over 8 devices"),
        (1, "8.0", TOKAMAX, "0.10.2", "blocked", "the fused kernels are for compute capability 9 (H100, H200)"),
        (1, "10.0", TOKAMAX, "0.10.2", "blocked", "this is 10.0"),
        (1, None, TOKAMAX, "0.10.2", "blocked", "this is unknown"),
    ],
)
def test_when_the_kernels_are_used(devices, compute, installed, jax_version, kind, note, monkeypatch):
    def version(name):
        assert name == "tokamax"
        if installed == "unknown":
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed and object())
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(jax, "__version__", jax_version)
    before = "tokamax" in sys.modules
    found = capabilities_module._attention(True, devices, compute)
    assert found[0] == kind and note in found[1]
    assert ("tokamax" in sys.modules) == before, "asking does not import it"


@pytest.mark.parametrize("globally", [True, False])
@pytest.mark.parametrize(
    ("record", "dtype", "expected"),
    [("tokamax", "bfloat16", "fused"), ("tokamax", "float32", "blocked"), ("blocked", "bfloat16", "blocked")],
)
def test_attend_asks_the_record(record, dtype, expected, globally, monkeypatch):
    calls = []

    def stub(name):
        def core(q, k, v, segment_ids, *, window):
            calls.append((name, q.dtype.name, k.shape, window))
            return q

        return core

    module = sys.modules["equimoe.model.attention"]
    replaced = dataclasses.replace(capabilities(), attention=record)
    monkeypatch.setattr(module, "capabilities", lambda: replaced)
    for name in ("fused", "blocked"):
        monkeypatch.setattr(module, f"{name}_attention", stub(name))
    config = small_model()
    q, k, v, _ = draw(config.num_attention_heads, config.num_key_value_heads, dtype=jnp.dtype(dtype))
    attend(q, k, v, documents(), config=config, globally=globally)
    used = config.global_kv_heads if globally else config.local_kv_heads
    window = None if globally else config.sliding_window
    assert calls == [(expected, dtype, (3, POSITIONS, used, 8), window)]


def small_model():
    """Eight heads of 8: two key heads in a local layer, one in a global one."""
    sizes = dict(layers=4, experts=4, experts_per_token=2, vocabulary=64, row_tokens=64, window=5, gated_norm_rank=4)
    return derive(64, head_dim=8, **sizes)


# ---- with tokamax ----


@pytest.mark.parametrize("window", [None, 1, 5, 3 * POSITIONS])
@pytest.mark.parametrize(("heads", "keys"), [(4, 1), (8, 2)])
def test_equals_blocked_attention_in_values_and_gradients(heads, keys, window, tokamax):
    *inputs, pull = draw(heads, keys)
    pull = pull * (documents() >= 0)[..., None, None]  # what a padding query returns is nobody's

    @jax.jit
    def both(*inputs):
        fused = partial(fused_attention, window=window, implementation="xla_chunked")
        out = []
        for core in (fused, partial(blocked_attention, window=window)):
            value, back = jax.vjp(lambda *a, core=core: core(*a, documents()), *inputs)
            out.append((value, *back(pull)))
        return out

    fused, blocked = both(*inputs)
    assert np.isfinite(fused[0]).all()
    real = np.asarray(documents() >= 0)
    assert worst(fused[0][real], blocked[0][real]) <= 1e-5
    for name, a, b in zip(("d_q", "d_k", "d_v"), fused[1:], blocked[1:], strict=True):
        assert np.abs(b).max() > 0.1 or (window == 1 and name != "d_v"), name
        assert worst(a, b) <= 1e-5, name


@pytest.mark.parametrize("positions", [1, ROW_MULTIPLE, ROW_MULTIPLE + 1])
def test_any_length_of_row(positions, tokamax):
    *inputs, _ = draw(2, 1, positions)
    ids = documents(positions) if positions > POSITIONS else jnp.zeros((3, positions), jnp.int32)
    fused = jax.jit(partial(fused_attention, window=7, implementation="xla_chunked"))(*inputs, ids)
    blocked = jax.jit(partial(blocked_attention, window=7))(*inputs, ids)
    real = np.asarray(ids >= 0)
    assert worst(fused[real], blocked[real]) <= 1e-5


def use_fused(monkeypatch, core, *dtypes):
    """Lets every model that is traced from here on use `core` as the fused one, for `dtypes`."""
    module = sys.modules["equimoe.model.attention"]
    record = dataclasses.replace(capabilities(), attention="tokamax")
    monkeypatch.setattr(module, "capabilities", lambda: record)
    monkeypatch.setattr(module, "fused_attention", core)
    monkeypatch.setattr(module, "FUSED_DTYPES", dtypes)


def model_gradients(dtype):
    """A new function each time, so that nothing is taken from an earlier trace."""

    def total(model, ids, segments):
        return loss_and_terms(model, ids, segments, (segments >= 0).astype(jnp.float32), compute_dtype=dtype)[0]

    return jax.jit(jax.value_and_grad(total))


def test_a_whole_model_in_its_scan_cond_and_rematerialisation(tokamax, monkeypatch):
    model = init(small_model(), key=jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (3, POSITIONS), 0, 64)
    loss, gradients = model_gradients(jnp.float32)(model, ids, documents())
    use_fused(monkeypatch, partial(fused_attention, implementation="xla_chunked"), jnp.float32)
    fused_loss, fused_gradients = model_gradients(jnp.float32)(model, ids, documents())
    assert worst(fused_loss, loss) <= 1e-5
    for a, b in zip(jax.tree.leaves(fused_gradients), jax.tree.leaves(gradients), strict=True):
        assert worst(a, b) <= 1e-5


@contextlib.contextmanager
def pretended_gpu(monkeypatch, compute: float):
    """tokamax believes in a GPU of this compute capability, and lowers for it."""
    from tokamax._src import config, gpu_utils

    facts = dict(platform="gpu", device_kind="pretended", compute_capability=str(compute), core_count=132)
    device = type("Device", (), facts)()
    monkeypatch.setattr(gpu_utils, "_compute_capability", lambda device=None: compute)
    monkeypatch.setattr("jax.extend.backend.get_default_device", lambda: device)
    with config.cross_compile(True):
        yield


def lowered_for_cuda(positions, implementation="mosaic_gpu", window=256):
    """StableHLO for CUDA of values and gradients, with the head width and the 4:1 heads of the hero's local layers."""

    def run(q, k, v, ids):
        out, back = jax.vjp(lambda *a: fused_attention(*a, ids, window=window, implementation=implementation), q, k, v)
        return out, back(out)

    q, kv = (jax.ShapeDtypeStruct((2, positions, n, 128), jnp.bfloat16) for n in (8, 2))
    ids = jax.ShapeDtypeStruct((2, positions), jnp.int32)
    return jax.jit(run).trace(q, kv, kv, ids).lower(lowering_platforms=("cuda",)).as_text()


lowers = pytest.mark.skipif(
    not jax.__version__.startswith(TOKAMAX_JAX), reason=f"this tokamax's kernels need jax {TOKAMAX_JAX}x"
)


@lowers
@pytest.mark.parametrize("positions", [1024, 1000])
def test_the_kernels_lower_for_capability_9_without_a_square_array(positions, tokamax, monkeypatch):
    with pretended_gpu(monkeypatch, 9.0):
        program = lowered_for_cuda(positions)
    assert program.count("custom_call @mosaic_gpu") == 3, "forward, d_q, d_k and d_v"
    assert not square(program, 1024)


@lowers
def test_the_step_of_a_whole_model_lowers_for_capability_9(tokamax, monkeypatch):
    """Inside a scan, `cond` and rematerialisation, with a row of 512 that no other axis is as long as."""
    sizes = dict(layers=4, experts=4, experts_per_token=2, vocabulary=64, row_tokens=512, window=40, gated_norm_rank=4)
    model = abstract(derive(256, head_dim=32, **sizes))
    row = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    use_fused(monkeypatch, fused_attention, jnp.bfloat16)
    with pretended_gpu(monkeypatch, 9.0):
        program = model_gradients(jnp.bfloat16).trace(model, row, row).lower(lowering_platforms=("cuda",)).as_text()
    # Local and global layers, each: forward, forward again for the backward, two backward kernels.
    assert program.count("custom_call @mosaic_gpu") == 8
    assert not square(program, 512)


@lowers
def test_why_capability_10_and_triton_are_left_out(tokamax, monkeypatch):
    """When one of these fails after an update of tokamax or JAX, the rule in `capabilities` can be widened."""
    with pretended_gpu(monkeypatch, 10.0), pytest.raises(ValueError, match="exceeds available shared memory"):
        lowered_for_cuda(1024)
    with pretended_gpu(monkeypatch, 8.0):
        assert "2x1x1024x1024xi32" in square(lowered_for_cuda(1024, "triton"), 1024)
