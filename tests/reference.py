"""A second opinion: the forward pass of hero_spec sections 2 and 8 in plain float64 numpy.

Written from hero_spec.md alone and not from the JAX code, with loops where they are the shortest way to say it.
It reads the names and the [out, in] orientation of section 8, so it also stands beside `equimoe.hub`.
Slow on purpose; only for tiny shapes. At a padding query the attention output is 0 (the page leaves it open).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Layer:
    """What one layer's router did; all tokens, padding included. `valid` is False at padding."""

    logits: np.ndarray  # [T, E], unbiased
    selected: np.ndarray  # [T, K]
    alpha: np.ndarray  # [T]
    weights: np.ndarray  # [T, K]
    residual: np.ndarray  # [B, S, D], after the layer
    attention_branch: np.ndarray  # [B, S, D], what the attention half added
    moe_branch: np.ndarray  # [B, S, D], what the expert half added


@dataclass
class Output:
    embedded: np.ndarray  # [B, S, D]
    layers: list[Layer]
    hidden: np.ndarray  # [B, S, D], after the last norm
    logits: np.ndarray  # [B, S, V]
    valid: np.ndarray  # [T]


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, gain=None, eps=1e-5):
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if gain is None else normed * gain


def forward(config: dict, weights: dict, token_ids, segment_ids=None) -> Output:
    """`config` is a config.json of schema 2, `weights` its tensors by name on disk (routed experts one by one)."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    token_ids = np.asarray(token_ids)
    segments = np.zeros_like(token_ids) if segment_ids is None else np.asarray(segment_ids)
    valid = segments.reshape(-1) >= 0
    eps = config["rms_norm_eps"]

    def gated_norm(x, norm, gate):
        normed = rms_norm(x, w[f"{norm}.weight"], eps)
        inner = silu(normed @ w[f"{gate}.down_proj.weight"].T) @ w[f"{gate}.up_proj.weight"].T
        return normed * sigmoid(inner)

    x = gated_norm(w["model.embed_tokens.weight"][token_ids], "model.embed_norm", "model.embed_gated_norm")
    embedded, layers = x, []
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        here = {name[len(at) :]: value for name, value in w.items() if name.startswith(at)}
        is_global = (i + 1) % config["global_every"] == 0 or i == config["num_hidden_layers"] - 1
        a = gated_norm(x, f"{at}input_layernorm", f"{at}attn_gated_norm")
        attended = conv_if(here, "sconv_attn.weight", attention(config, here, a, segments, is_global), segments)
        x = x + attended
        m = gated_norm(x, f"{at}post_attention_layernorm", f"{at}mlp_gated_norm")
        layer, mixed = experts(config, here, m.reshape(-1, m.shape[-1]), valid)
        mixed = conv_if(here, "sconv_mlp.weight", mixed.reshape(m.shape), segments)
        x = x + mixed
        layer.residual, layer.attention_branch, layer.moe_branch = x, attended, mixed
        layers.append(layer)
    hidden = gated_norm(x, "model.norm", "model.final_gated_norm")
    return Output(embedded, layers, hidden, hidden @ w["lm_head.weight"].T, valid)


def conv_if(here: dict, name: str, x, segments):
    """The short convolution where the model has one: sum over lags, no tap into another document."""
    if name not in here:
        return x
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for lag, tap in enumerate(here[name]):
                if t - lag >= 0 and segments[b, t - lag] == segments[b, t]:
                    out[b, t] += tap * x[b, t - lag]
    return out


def rotate(config: dict, x, position: int):
    """Rotary on the first half of one head [H]: adjacent pairs, or split halves of that half."""
    out, quarter = x.copy(), len(x) // 4
    for j in range(quarter):
        angle = position * config["rope_theta"] ** (-j / quarter)
        first, second = (2 * j, 2 * j + 1) if config["rope_fused"] else (j, j + quarter)
        out[first] = x[first] * np.cos(angle) - x[second] * np.sin(angle)
        out[second] = x[first] * np.sin(angle) + x[second] * np.cos(angle)
    return out


def attention(config: dict, here: dict, a, segments, is_global: bool):
    n_heads, stored, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    used = config["global_kv_heads"] if is_global else config["local_kv_heads"]
    batch, rows, _ = a.shape
    q = (a @ here["self_attn.q_proj.weight"].T).reshape(batch, rows, n_heads, width)
    k = conv_if(here, "self_attn.sconv_k.weight", a @ here["self_attn.k_proj.weight"].T, segments)
    v = conv_if(here, "self_attn.sconv_v.weight", a @ here["self_attn.v_proj.weight"].T, segments)
    k, v = (z.reshape(batch, rows, stored, width) for z in (k, v))
    q, k = rms_norm(q, eps=1e-6), rms_norm(k, eps=1e-6)
    multiplier = config["qk_mult"] * (config["qk_mult_long_scale"] if is_global else 1.0)
    gates = 2.0 * sigmoid(a @ here["self_attn.attn_gate.weight"].T)
    out = np.zeros((batch, rows, n_heads, width))
    for n in range(n_heads):
        slot = n // (n_heads // stored)
        head = slot // (stored // used)  # the first `used` heads, each filling neighbouring slots: a a b b
        for b in range(batch):
            if is_global:
                queries, keys = q[b, :, n], k[b, :, head]
            else:
                queries = np.stack([rotate(config, q[b, t, n], t) for t in range(rows)])
                keys = np.stack([rotate(config, k[b, t, head], t) for t in range(rows)])
            for t in range(rows):
                if segments[b, t] < 0:
                    continue
                first = 0 if is_global else max(0, t - config["sliding_window"] + 1)
                seen = [s for s in range(first, t + 1) if segments[b, s] == segments[b, t]]
                scores = keys[seen] @ (multiplier * queries[t]) / np.sqrt(width)
                p = np.exp(scores - scores.max())
                y = (p / p.sum()) @ v[b, seen, head]
                own = v[b, t, head]
                y = y - (y @ own) / (own @ own + 1e-6) * own
                out[b, t, n] = gates[b, t, n] * y
    return out.reshape(batch, rows, -1) @ here["self_attn.o_proj.weight"].T


def swiglu(here: dict, name: str, x):
    gate, up, down = (here[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def experts(config: dict, here: dict, m, valid):
    top, tokens = config["num_experts_per_tok"], len(m)
    logits = m @ here["mlp.router.weight"].T
    biased = logits + here["mlp.router.bias"]
    order = np.argsort(-biased, axis=-1, kind="stable")
    selected, alpha = order[:, :top], np.take_along_axis(biased, order[:, top : top + 1], axis=-1)[:, 0]
    combine = sigmoid(np.take_along_axis(logits, selected, axis=-1))
    combine = 2.5 * combine / combine.sum(axis=-1, keepdims=True)
    latent = "mlp.latent_down_proj.weight" in here
    z = (
        m
        if not latent
        else rms_norm(m @ here["mlp.latent_down_proj.weight"].T, here["mlp.latent_norm.weight"], config["rms_norm_eps"])
    )
    routed = np.zeros_like(z)
    for t in range(tokens):
        for e, weight in zip(selected[t], combine[t], strict=True):
            if valid[t]:
                routed[t] += weight * swiglu(here, f"mlp.experts.{e}", z[t])
    if latent:
        routed = routed @ here["mlp.latent_up_proj.weight"].T
    shared = sum(
        (swiglu(here, f"shared_experts.{j}", m) for j in range(config["num_shared_experts"])), np.zeros_like(m)
    )
    return Layer(logits, selected, alpha, combine, None, None, None), routed + shared


def hist_betas(logits, alpha, valid, top: int, bins: int):
    """HIST quantile balancing: the value that a share K/E of the valid tokens reach, from one grid per layer."""
    margin = (logits - alpha[:, None])[valid]
    tokens, n_experts = margin.shape
    low, high = margin.min(), margin.max()
    step, wanted = (high - low) / bins, tokens * top / n_experts
    index = np.clip(((margin - low) / step).astype(int), 0, bins - 1)
    betas = np.zeros(n_experts)
    for e in range(n_experts):
        count = np.bincount(index[:, e], minlength=bins)
        from_top = np.cumsum(count[::-1])[::-1]
        b = np.flatnonzero(from_top >= wanted)[-1]
        betas[e] = low + b * step + step * (from_top[b] - wanted) / max(count[b], 1)
    return betas


def topk_betas(logits, alpha, valid, top: int):
    """TOPK quantile balancing on one device."""
    margin = (logits - alpha[:, None])[valid]
    rank = max(1, len(margin) * top // margin.shape[1])
    return np.sort(margin, axis=0)[-rank]


def loss(logits, token_ids, loss_weight, z_loss: float = 1e-4) -> float:
    """sum(w * (cross entropy + z * logsumexp^2)) / sum(w); the target is the row shifted by one."""
    token_ids, loss_weight = np.asarray(token_ids), np.asarray(loss_weight, np.float64)
    peak = logits.max(axis=-1)
    log_total = peak + np.log(np.exp(logits - peak[..., None]).sum(axis=-1))
    total = 0.0
    for b in range(token_ids.shape[0]):
        for t in range(token_ids.shape[1]):
            if loss_weight[b, t]:
                cross_entropy = log_total[b, t] - logits[b, t, token_ids[b, t + 1]]
                total += loss_weight[b, t] * (cross_entropy + z_loss * log_total[b, t] ** 2)
    return total / loss_weight.sum()
