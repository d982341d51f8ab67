"""The Grug Mixture-of-Experts language model for Hugging Face transformers, in plain PyTorch.

    x = gate(norm(embed[token]))
    for each layer:  x += attention(gate(norm(x)));  x += experts(gate(norm(x)))
    logits = lm_head(gate(norm(x)))

Written by EquiMoE into every model it exports; it needs torch and transformers, and nothing of EquiMoE.

Axis letters: B sequences, S new positions, P positions in the cache, T = B * S tokens, D hidden, N query heads,
M stored key/value heads, G those a layer uses, H head dim, L latent width, E experts, K experts a token, R rows sorted
by expert, C channels, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import WeightConverter, initialization
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin, StaticLayer
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import MergeModulelist
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import maybe_autocast
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_equimoe import GrugMoeConfig

COMBINE_TOTAL = 2.5  # the K combine weights of a token sum to this
UNIT_EPS = 1e-6  # of the norms without a gain (queries, keys, exclusive self attention)
TRUNCATION_SIGMAS = 3.0  # initial weights are normal within so many standard deviations
PADDING = -1  # document number of padding


class Text(NamedTuple):
    """What every layer needs to know of the positions it is given; made once per forward. A tuple, because accelerate
    moves the tensors of a tuple along when the layers stand on several devices.

    `documents` numbers the documents of the P + S positions, PADDING where there is no token; None: one document and
    no padding. A mask is True where a query may read a key, None where causal order says it all.
    """

    past: int  # P
    cos: torch.Tensor  # [B or 1, 1, S, H/4]
    sin: torch.Tensor
    documents: torch.Tensor | None  # [B, P + S]
    local_mask: torch.Tensor | None  # [B or 1, 1, S, keys]
    global_mask: torch.Tensor | None
    local_keys: int  # keys that local layers look at: the new ones and what the window reaches before them

    @property
    def valid(self) -> torch.Tensor | None:
        """[B, S], False at padding."""
        return None if self.documents is None else self.documents[:, self.past :] != PADDING


# Positions, documents and masks.


def number_documents(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, past: int, shape: tuple[int, int]
) -> torch.Tensor | None:
    """[B, P + S] document numbers, or None where every row is one document without padding.

    A mask of zeros and ones marks padding. Without one, positions that start anew mark packed documents.
    """
    batch, length = shape
    if attention_mask is not None:
        if attention_mask.ndim != 2 or attention_mask.shape != (batch, past + length):
            raise ValueError(
                f"attention_mask ({list(attention_mask.shape)}): must be [sequences, positions] = "
                f"[{batch}, {past + length}] with 0 at padding, {past} positions of the cache included"
            )
        real = attention_mask.bool()
        return None if bool(real.all()) else torch.where(real, 0, PADDING)
    if position_ids is None or past or length == 1:
        return None
    restarts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if not bool(restarts.any()):
        return None
    return F.pad(restarts.long().cumsum(1), (1, 0)).expand(batch, -1)


def default_positions(attention_mask: torch.Tensor | None, past: int, length: int, device) -> torch.Tensor:
    """[B or 1, S] positions counted from the first real token of a row."""
    if attention_mask is None:
        return torch.arange(past, past + length, device=device)[None]
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past:]


def attention_pattern(
    documents: torch.Tensor | None, past: int, length: int, keys: int, window: int | None, device
) -> torch.Tensor | None:
    """[B or 1, 1, S, keys]: may query s read key t? Keys are the last `keys` positions.

    Causal, inside one document, and on local layers inside the window, which includes the query. Padding is a document
    of its own, so that a padding query has a key and no softmax runs over nothing.
    """
    unbounded = window is None or (past == 0 and length <= window)
    if documents is None and (length == 1 or (past == 0 and unbounded)):
        return None
    end = past + length
    query = torch.arange(past, end, device=device)[:, None]
    key = torch.arange(end - keys, end, device=device)[None, :]
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if documents is None:
        return seen[None, None]
    same = documents[:, past:, None] == documents[:, None, end - keys :]
    return (seen & same)[:, None]


def rotary_angles(positions: torch.Tensor, config: GrugMoeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [B or 1, 1, S, H/4] in float32: a bfloat16 angle is off by whole turns at long positions."""
    pairs = config.head_dim // 4
    exponents = torch.arange(pairs, device=positions.device, dtype=torch.float32) / pairs
    angles = positions[:, None, :, None].float() * config.rope_theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, adjacent_pairs: bool) -> torch.Tensor:
    """Turn pairs of the first half of each head [B, heads, S, H]: neighbours (2j, 2j+1), or (j, j + H/4)."""
    turned, rest = x.chunk(2, dim=-1)
    pair_axis = -1 if adjacent_pairs else -2
    pairs = turned.float().unflatten(-1, (-1, 2) if adjacent_pairs else (2, -1))
    first, second = pairs.unbind(pair_axis)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=pair_axis).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


# Norms and gates.


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, statistics in float32, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class GrugMoeRMSNorm(nn.Module):
    """RMSNorm with a gain."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (unit_rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class GrugMoeGate(nn.Module):
    """The low-rank gate behind every norm of the residual stream: n * sigmoid(silu(n down) up) (arXiv 2601.22966)."""

    def __init__(self, config: GrugMoeConfig):
        super().__init__()
        self.down_proj = nn.Linear(config.hidden_size, config.gated_norm_rank, bias=False)
        self.up_proj = nn.Linear(config.gated_norm_rank, config.hidden_size, bias=False)

    def forward(self, normed: torch.Tensor) -> torch.Tensor:
        gate = self.up_proj(F.silu(self.down_proj(normed)))
        return normed * torch.sigmoid(gate).to(normed.dtype)


# Short convolutions.


class GrugMoeShortConv(nn.Module):
    """Causal convolution per channel: y[t] = sum over lags of weight[lag] * x[t - lag], inside one document."""

    def __init__(self, config: GrugMoeConfig, channels: int, layer_idx: int, site: str):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.sconv_kernel, channels))
        self.lags = config.sconv_kernel
        self.layer_idx = layer_idx
        self.state_idx = config.sconv_sites.index(site)

    def forward(self, x: torch.Tensor, text: Text, cache: Cache | None) -> torch.Tensor:
        """x and result [B, S, C]."""
        length, before = x.shape[1], self.lags - 1
        longer = self._with_inputs_before(x, before, cache)
        documents = None
        if text.documents is not None:  # of the same positions as `longer`; -2 is before every row
            documents = F.pad(text.documents, (before, 0), value=PADDING - 1)[:, -(length + before) :, None]
        y = torch.zeros_like(x)
        for lag, weight in enumerate(self.weight.to(x.dtype)):
            start = before - lag
            tap = longer[:, start : start + length]
            if lag and documents is not None:
                tap = tap.masked_fill(documents[:, start : start + length] != documents[:, before:], 0)
            y = y + tap * weight
        return y

    def _with_inputs_before(self, x: torch.Tensor, before: int, cache: Cache | None) -> torch.Tensor:
        """[B, before + S, C]: the inputs that the cache remembers, or zeros, in front of the new ones."""
        longer = x
        if cache is not None and before:
            state = (self.layer_idx, self.state_idx)
            longer = cache.update_conv_state(x.transpose(1, 2), *state, conv_kernel_size=before).transpose(1, 2)
        missing = before + x.shape[1] - longer.shape[1]
        return F.pad(longer, (0, 0, missing, 0)) if missing > 0 else longer[:, -missing:]


# Attention.


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention: q [B, N, S, H], k and v [B, G, keys, H]; query head n reads key head n // (N / G)."""
    groups, per_group = k.shape[1], q.shape[1] // k.shape[1]
    if q.shape[2] == 1:  # one token: the heads of a group are the rows of one product, and no key is copied
        rows = q.unflatten(1, (groups, per_group)).squeeze(3)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask).flatten(1, 2).unsqueeze(2)
    # The fast kernels want one key head per query head; the plain one, which does not, would hold all scores at once.
    k, v = (part.repeat_interleave(per_group, dim=1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def exclude_self(y: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Exclusive self attention: take from y [B, N, S, H] what points along the value of its own position.

    y - (y.v / (|v|^2 + eps)) v in float32, v of `own` [B, G, S, H].
    """
    v = own.repeat_interleave(y.shape[1] // own.shape[1], dim=1).float()
    wide = y.float()
    along = (wide * v).sum(-1, keepdim=True) / (v.square().sum(-1, keepdim=True) + UNIT_EPS)
    return (wide - along * v).to(y.dtype)


class GrugMoeHeadGate(nn.Linear):
    """Scores of the head gates. A linear layer that starts at zero, and nothing else: quantisers replace those."""


class GrugMoeAttention(nn.Module):
    """Grouped attention of one layer. Local: a sliding window and rotary positions. Global: the whole text, none."""

    def __init__(self, config: GrugMoeConfig, layer_idx: int):
        super().__init__()
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        stored = config.num_key_value_heads * width
        self.layer_idx = layer_idx
        self.head_dim = width
        self.is_global = config.is_global(layer_idx)
        self.kv_heads = config.global_kv_heads if self.is_global else config.local_kv_heads
        self.q_scale = config.qk_mult * (config.qk_mult_long_scale if self.is_global else 1.0)
        self.adjacent_pairs = config.rope_fused
        self.q_proj = nn.Linear(hidden, heads * width, bias=False)
        self.k_proj = nn.Linear(hidden, stored, bias=False)
        self.v_proj = nn.Linear(hidden, stored, bias=False)
        self.o_proj = nn.Linear(heads * width, hidden, bias=False)
        self.attn_gate = GrugMoeHeadGate(hidden, heads, bias=False)
        self.sconv_k = GrugMoeShortConv(config, stored, layer_idx, "k") if "k" in config.sconv_sites else None
        self.sconv_v = GrugMoeShortConv(config, stored, layer_idx, "v") if "v" in config.sconv_sites else None

    def forward(self, x: torch.Tensor, text: Text, cache: Cache | None) -> torch.Tensor:
        """x and result [B, S, D]."""
        q, k, own = self._heads(x, text, cache)
        v = own
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        if not self.is_global:
            k, v = k[:, :, -text.local_keys :], v[:, :, -text.local_keys :]
        y = attend(q, k, v, text.global_mask if self.is_global else text.local_mask)
        gates = 2.0 * torch.sigmoid(self.attn_gate(x))  # [B, S, N]
        y = exclude_self(y, own).transpose(1, 2) * gates.to(y.dtype)[..., None]
        return self.o_proj(y.flatten(2))

    def _heads(self, x: torch.Tensor, text: Text, cache: Cache | None) -> tuple[torch.Tensor, ...]:
        """Queries [B, N, S, H], keys and values [B, G, S, H] of the new positions."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.sconv_k is not None:
            k = self.sconv_k(k, text, cache)
        if self.sconv_v is not None:
            v = self.sconv_v(v, text, cache)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (q, k, v))
        k, v = k[:, : self.kv_heads], v[:, : self.kv_heads]
        q, k = unit_rms(q, UNIT_EPS), unit_rms(k, UNIT_EPS)
        if not self.is_global:
            q, k = (rotate(part, text.cos, text.sin, adjacent_pairs=self.adjacent_pairs) for part in (q, k))
        # The multiplier in the compute dtype, as in training: 1.3 is 1.296875 in bfloat16.
        return q * torch.tensor(self.q_scale, dtype=q.dtype), k, v


# Experts.


class GrugMoeMLP(nn.Module):
    """A shared expert: SwiGLU on the full width."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GrugMoeRouter(nn.Module):
    """Picks K experts a token. The bias only selects: it balances load, and no gradient reaches it."""

    def __init__(self, config: GrugMoeConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=torch.float32))  # float32 in any model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, D] -> logits [T, E] without the bias, experts [T, K], combine weights [T, K]; float32 throughout, for
        bfloat16 logits of many experts tie often."""
        with maybe_autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.weight.float())
        selected = (logits.detach() + self.bias.float()).topk(self.top_k, dim=-1).indices
        # Sigmoid scores over their sum; in logarithms, for the scores of logits far below zero are 0 in float32.
        return logits, selected, COMBINE_TOTAL * F.logsigmoid(logits.gather(1, selected)).softmax(-1)


class GrugMoeExpertStack(nn.Module):
    """One projection of all experts, [E, out, in]."""

    def __init__(self, experts: int, inner: int, outer: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outer, inner))


class GrugMoeExperts(nn.Module):
    """The routed experts: SwiGLU each, on rows sorted by expert, so that each expert is one product."""

    def __init__(self, config: GrugMoeConfig):
        super().__init__()
        experts, inner = config.num_experts, config.moe_intermediate_size
        width = config.latent_dim or config.hidden_size
        self.num_experts = experts
        self.gate_proj = GrugMoeExpertStack(experts, width, inner)
        self.up_proj = GrugMoeExpertStack(experts, width, inner)
        self.down_proj = GrugMoeExpertStack(experts, inner, width)

    def forward(
        self, x: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor, valid: torch.Tensor | None
    ) -> torch.Tensor:
        """Weighted sum of the K selected experts, [T, L]; x [T, L], selected and weights [T, K], valid [T].

        Padding is sent nowhere and gets zeros. The sum is in float32 and in the same order on every run.
        """
        top_k = selected.shape[1]
        if valid is not None:
            selected = selected.masked_fill(~valid[:, None], self.num_experts)  # sorts behind every expert
        assigned = selected.flatten()
        counts = torch.bincount(assigned, minlength=self.num_experts)[: self.num_experts]
        order = assigned.argsort(stable=True)
        if valid is not None:
            order = order[: int(counts.sum())]
        computed = self._swiglu(x[order // top_k], counts)
        rows = computed.new_zeros(assigned.shape[0], x.shape[1]).index_copy(0, order, computed)
        total = (rows.unflatten(0, (-1, top_k)).float() * weights[..., None]).sum(1)
        return total.to(x.dtype)

    def _swiglu(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [R, L] in order of expert, counts [E] rows of each."""
        projections = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
        if has_grouped_kernel(x, *projections):
            return grouped_swiglu(x, counts, *projections)
        return looped_swiglu(x, counts.tolist(), *projections)


def has_grouped_kernel(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether one fused product for all experts is there: bfloat16 on CUDA, rows of whole 16-byte units."""
    plain = x.is_cuda and len(x) > 0 and hasattr(F, "grouped_mm") and not torch.is_autocast_enabled("cuda")
    return plain and all(
        w.dtype == x.dtype == torch.bfloat16 and w.shape[1] % 8 == w.shape[2] % 8 == 0 for w in weights
    )


def grouped_swiglu(
    x: torch.Tensor, counts: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of all experts in three grouped products."""
    ends = counts.cumsum(0).to(torch.int32)
    inner = F.silu(F.grouped_mm(x, gate.transpose(1, 2), offs=ends)) * F.grouped_mm(x, up.transpose(1, 2), offs=ends)
    return F.grouped_mm(inner, down.transpose(1, 2), offs=ends)


def looped_swiglu(
    x: torch.Tensor, counts: list[int], gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """SwiGLU of the experts that have rows, one after another."""
    if torch.is_grad_enabled():  # the gradient of an unbind is one stack; that of an index is as large as all experts
        gate, up, down = gate.unbind(0), up.unbind(0), down.unbind(0)
    busy = [e for e, count in enumerate(counts) if count]
    rows = x.split([counts[e] for e in busy]) if busy else (x,)
    busy = busy or [0]  # no token at all: an empty product has the right shape and dtype
    parts = (
        F.linear(F.silu(F.linear(part, gate[e])) * F.linear(part, up[e]), down[e])
        for e, part in zip(busy, rows, strict=True)
    )
    return torch.cat(list(parts))


class GrugMoeSparseMLP(nn.Module):
    """Router and routed experts, in the latent space where the model has one (LatentMoE, arXiv 2601.18089)."""

    def __init__(self, config: GrugMoeConfig):
        super().__init__()
        self.router = GrugMoeRouter(config)
        self.experts = GrugMoeExperts(config)
        self.is_latent = config.latent_dim is not None
        if self.is_latent:
            self.latent_down_proj = nn.Linear(config.hidden_size, config.latent_dim, bias=False)
            self.latent_norm = GrugMoeRMSNorm(config.latent_dim, config.rms_norm_eps)
            self.latent_up_proj = nn.Linear(config.latent_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """x and result [B, S, D]; valid [B, S]."""
        tokens = x.flatten(0, 1)
        _, selected, weights = self.router(tokens)
        rows = self.latent_norm(self.latent_down_proj(tokens)) if self.is_latent else tokens
        routed = self.experts(rows, selected, weights, None if valid is None else valid.flatten())
        return (self.latent_up_proj(routed) if self.is_latent else routed).view_as(x)


# The model.


class GrugMoeDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: GrugMoeConfig, layer_idx: int):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GrugMoeRMSNorm(hidden, eps)
        self.attn_gated_norm = GrugMoeGate(config)
        self.self_attn = GrugMoeAttention(config, layer_idx)
        self.post_attention_layernorm = GrugMoeRMSNorm(hidden, eps)
        self.mlp_gated_norm = GrugMoeGate(config)
        self.mlp = GrugMoeSparseMLP(config)
        # On disk, schema 1 names its one shared expert and schema 2 numbers them.
        if config.grugmoe_artifact_schema_version == 1:
            self.shared_expert = GrugMoeMLP(hidden, config.shared_expert_intermediate_size)
        else:
            shared = (
                GrugMoeMLP(hidden, config.shared_expert_intermediate_size) for _ in range(config.num_shared_experts)
            )
            self.shared_experts = nn.ModuleList(shared)
        sites = config.sconv_sites
        self.sconv_attn = GrugMoeShortConv(config, hidden, layer_idx, "attn") if "attn" in sites else None
        self.sconv_mlp = GrugMoeShortConv(config, hidden, layer_idx, "mlp") if "mlp" in sites else None

    def forward(self, hidden_states: torch.Tensor, text: Text, cache: Cache | None = None) -> torch.Tensor:
        """hidden_states and result [B, S, D]."""
        attended = self.self_attn(self.attn_gated_norm(self.input_layernorm(hidden_states)), text, cache)
        if self.sconv_attn is not None:
            attended = self.sconv_attn(attended, text, cache)
        hidden_states = hidden_states + attended
        normed = self.mlp_gated_norm(self.post_attention_layernorm(hidden_states))
        mixed = self.mlp(normed, text.valid)
        for expert in self._shared():
            mixed = mixed + expert(normed)
        if self.sconv_mlp is not None:
            mixed = self.sconv_mlp(mixed, text, cache)
        return hidden_states + mixed

    def _shared(self) -> list[nn.Module]:
        return [self.shared_expert] if hasattr(self, "shared_expert") else list(self.shared_experts)


class GrugMoePreTrainedModel(PreTrainedModel):
    config_class = GrugMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GrugMoeDecoderLayer"]
    _supports_sdpa = True
    _can_record_outputs = {
        "hidden_states": GrugMoeDecoderLayer,
        "router_logits": OutputRecorder(GrugMoeRouter, index=0),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Where training from scratch starts: gains 1, head gates 0 (a gate of 1), convolutions that pass through."""
        if isinstance(module, GrugMoeRMSNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, GrugMoeHeadGate):
            initialization.zeros_(module.weight)
        elif isinstance(module, GrugMoeShortConv):
            through = torch.zeros_like(module.weight)
            through[0] = 1.0
            initialization.copy_(module.weight, through)
        elif isinstance(module, (nn.Linear, nn.Embedding, GrugMoeExpertStack, GrugMoeRouter)):
            sigma = self.config.initializer_range
            reach = TRUNCATION_SIGMAS * sigma
            initialization.trunc_normal_(module.weight, std=sigma, a=-reach, b=reach)
        if isinstance(module, GrugMoeRouter):
            initialization.zeros_(module.bias)


class GrugMoeModel(GrugMoePreTrainedModel):
    """Token ids to hidden states, after the last norm and gate."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # of the language model, when this part alone is loaded

    def __init__(self, config: GrugMoeConfig):
        super().__init__(config)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_norm = GrugMoeRMSNorm(hidden, eps)
        self.embed_gated_norm = GrugMoeGate(config)
        self.layers = nn.ModuleList(GrugMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = GrugMoeRMSNorm(hidden, eps)
        self.final_gated_norm = GrugMoeGate(config)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> MoeModelOutputWithPast:
        """Hidden states of S new positions, behind the P that `cache` holds.

        `attention_mask` [B, P + S] is 0 at padding, on either side of a row; a row that goes on through the cache must
        be padded on the left. Packed documents are told apart by `position_ids` [B, S] that start anew, without a mask.
        `use_cache` None: as the config says, and not while training. `past_key_values` is the older name of `cache`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds: exactly one of them must be given")
        if self.config.output_attentions or kwargs.get("output_attentions"):
            raise ValueError("output_attentions (True): this model never forms attention weights. Leave it out")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values if cache is None else cache, use_cache)
        text = self._text(x, attention_mask, position_ids, 0 if cache is None else cache.get_seq_length())
        x = self.embed_gated_norm(self.embed_norm(x))
        for layer in self.layers:
            x = layer(x, text, cache=cache)
        return MoeModelOutputWithPast(last_hidden_state=self.final_gated_norm(self.norm(x)), cache=cache)

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to read and write: the given one, a new one, or none."""
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        if not use_cache or (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return None
        if cache is None:
            return DynamicCache(config=self.config)
        fits = len(cache) == self.config.num_hidden_layers and not any(isinstance(x, StaticLayer) for x in cache.layers)
        if self.config.number_of_conv_states:
            fits = fits and all(isinstance(x, LinearAttentionCacheLayerMixin) for x in cache.layers)
        if not fits:
            raise ValueError(
                f"cache ({type(cache).__name__}): must be a DynamicCache(config=model.config), whose layers hold the "
                "states of the short convolutions and the keys of a window"
            )
        return cache

    def _text(
        self, x: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, past: int
    ) -> Text:
        length, window, device = x.shape[1], self.config.sliding_window, x.device
        documents = number_documents(attention_mask, position_ids, past, x.shape[:2])
        if position_ids is None:
            position_ids = default_positions(attention_mask, past, length, device)
        cos, sin = rotary_angles(position_ids.to(device), self.config)
        local_keys = min(past, window - 1) + length
        return Text(
            past=past,
            cos=cos,
            sin=sin,
            documents=documents,
            local_mask=attention_pattern(documents, past, length, local_keys, window, device),
            global_mask=attention_pattern(documents, past, length, past + length, None, device),
            local_keys=local_keys,
        )


class GrugMoeForCausalLM(GrugMoePreTrainedModel, GenerationMixin):
    """The language model: hidden states, and logits of the next token through a head of its own (never tied)."""

    def __init__(self, config: GrugMoeConfig):
        super().__init__(config)
        self.model = GrugMoeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [B, S, V], of the last `logits_to_keep` positions only where that is not 0 (or of those it lists).

        With `labels` [B, S] also the mean cross entropy of the next token; -100 is not scored. See `GrugMoeModel`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            router_logits=outputs.router_logits,
        )


# Experts stand one by one on disk and in one stack in memory, where a grouped product wants them. Files that hold the
# stacks already are read as they are. Saving writes what was read, and experts one by one for a new model.
register_checkpoint_conversion_mapping(
    GrugMoeConfig.model_type,
    [
        WeightConverter(
            source_patterns=f"mlp.experts.*.{name}.weight",
            target_patterns=f"mlp.experts.{name}.weight",
            operations=[MergeModulelist(dim=0)],
        )
        for name in ("gate_proj", "up_proj", "down_proj")
    ],
    overwrite=True,
)

__all__ = ["GrugMoeForCausalLM", "GrugMoeModel", "GrugMoePreTrainedModel"]
