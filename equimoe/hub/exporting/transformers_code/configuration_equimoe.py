"""Configuration of the Grug Mixture-of-Experts architecture for Hugging Face transformers.

Written by EquiMoE into every model it exports. Reads both artifact schemas: 1 (released weights: stacked experts of
full width, one shared expert, no short convolutions) and 2. The field names are those of config.json; older spellings
are read and never written. Values that mean another architecture are refused, all of them in one error.
"""

import transformers
from packaging.version import Version
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

logger = logging.get_logger(__name__)

OLDEST = "5.24.0"  # of transformers: its caches hold the states of convolutions, under the name that `generate` passes
if Version(transformers.__version__) < Version(OLDEST):
    raise ImportError(
        f"transformers ({transformers.__version__}): this model's code needs {OLDEST} or newer. "
        "Run `pip install -U transformers`"
    )

SITES = ("k", "v", "attn", "mlp")  # where a short convolution may stand

# Other spellings that are met in the wild -> ours.
_SPELLINGS = {
    "hidden_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "attention_head_dim": "head_dim",
    "max_seq_len": "max_position_embeddings",
    "layer_norm_eps": "rms_norm_eps",
    "initializer_std": "initializer_range",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "intermediate_dim": "moe_intermediate_size",
    "intermediate_size": "moe_intermediate_size",
    "shared_expert_intermediate_dim": "shared_expert_intermediate_size",
}
_MUST_BE = {  # field -> the only value that means this architecture
    "tie_word_embeddings": False,
    "grugmoe_attention_mode": "production",
    "disable_pko": True,
    "disable_long_rope": True,
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "local_kv_heads",
    "global_kv_heads",
    "global_every",
    "max_position_embeddings",
    "sliding_window",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "sconv_kernel",
    "gated_norm_rank",
)
_POSITIVE = ("rms_norm_eps", "initializer_range", "rope_theta", "qk_mult", "qk_mult_long_scale")
_BOOKKEEPING = {  # what transformers and its tools write beside the fields of a model
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_router_logits",
    "per_layer_config",
    "quantization_config",
    "tokenizer_class",
    "torch_dtype",
}


class GrugMoeConfig(PreTrainedConfig):
    """Sizes of one model. Defaults are the 535B-A23B model without short convolutions, in split-half rotary form:
    what the format means where a file leaves a field out."""

    model_type = "grug_moe"
    keys_to_ignore_at_inference = ["cache"]

    vocab_size: int = 128_256
    hidden_size: int = 6144
    num_hidden_layers: int = 48
    num_attention_heads: int = 48
    num_key_value_heads: int = 12  # stored; a kind of layer may use fewer
    head_dim: int = 128
    max_position_embeddings: int = 4096
    sliding_window: int = 2048  # keys that a local layer sees, the query itself included
    rms_norm_eps: float = 1e-5
    initializer_range: float | None = None  # None: 0.5 / sqrt(hidden_size)
    rope_theta: float = 10_000.0
    rope_fused: bool = False  # rotary on adjacent pairs; False: split halves
    tie_word_embeddings: bool = False
    num_experts: int = 384
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 3072
    shared_expert_intermediate_size: int = 3072
    num_shared_experts: int = 1
    latent_dim: int | None = None  # width of the routed experts' rows; None: hidden_size
    qk_mult: float = 1.3
    qk_mult_long_scale: float = 1.0  # extra factor of the queries on global layers
    local_kv_heads: int | None = None  # None: num_key_value_heads
    global_kv_heads: int | None = None
    global_every: int = 4  # every so many layers one is global, and the last one always
    sconv: bool | None = None
    sconv_kernel: int = 4
    sconv_sites: list[str] | None = None
    gated_norm_rank: int = 128
    grugmoe_attention_mode: str = "production"
    grugmoe_artifact_schema_version: int = 2
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        problems = []
        kwargs = self._read_spellings(kwargs, problems)
        self._read_rotary(kwargs, problems)
        for name, only in _MUST_BE.items():
            value = kwargs.get(name, getattr(self, name, only))
            if value != only or type(value) is not type(only):
                problems.append(f"{name} ({value!r}): must be {only!r}, a model that differs here is another one")
        self._fill_in(problems)
        if not problems:  # the checks below need the derived fields
            problems = self._wrong_values()
        if problems:
            raise ValueError("config.json of a grug_moe model:\n  " + "\n  ".join(problems))
        unknown = set(kwargs) - _BOOKKEEPING - set(_MUST_BE) - set(GenerationConfig().to_dict())
        if unknown := sorted(name for name in unknown if not name.startswith("_")):
            logger.warning(f"grug_moe config: {', '.join(unknown)} mean nothing to this model and are not used")
        super().__post_init__(**kwargs)

    def _read_spellings(self, kwargs: dict, problems: list[str]) -> dict:
        """The fields left over once other spellings went to ours; two spellings must agree."""
        seen, rest = {}, {}
        for name, value in kwargs.items():
            ours = _SPELLINGS.get(name)
            if ours is None:
                rest[name] = value
            elif value is not None:
                if seen.setdefault(ours, value) != value:
                    problems.append(f"{ours}: is given twice with different values, {seen[ours]!r} and {value!r}")
                setattr(self, ours, value)
        return rest

    def _read_rotary(self, kwargs: dict, problems: list[str]) -> None:
        """`rope.theta` and `rope_parameters.rope_theta`; scaled rotary positions are another model."""
        for parent, child in (("rope", "theta"), ("rope_parameters", "rope_theta")):
            nested = kwargs.pop(parent, None) or {}
            unknown = set(nested) - {child, "rope_type"}
            if unknown or nested.get("rope_type", "default") != "default":
                problems.append(f"{parent} ({nested!r}): must hold {child} and no scaling")
            self.rope_theta = nested.get(child, self.rope_theta)
        if kwargs.pop("rope_scaling", None):
            problems.append("rope_scaling: is not supported, only plain rotary positions are")

    def _fill_in(self, problems: list[str]) -> None:
        """What is implied where a field is left out."""
        for name in ("local_kv_heads", "global_kv_heads"):
            if getattr(self, name) is None:
                setattr(self, name, self.num_key_value_heads)
        if not self.initializer_range and isinstance(self.hidden_size, int) and self.hidden_size > 0:
            self.initializer_range = 0.5 / self.hidden_size**0.5
        sites = list(self.sconv_sites or ())
        self.sconv = bool(sites) if self.sconv is None else self.sconv
        if self.sconv and not sites:
            problems.append(f"sconv ({self.sconv!r}): needs sconv_sites, some of {', '.join(SITES)}")
        self.sconv_sites = sites if self.sconv else []

    def _wrong_values(self) -> list[str]:
        """What is wrong with the numbers: subject (value): rule."""
        wrong = []

        def require(holds: bool, name: str, rule: str) -> None:
            if not holds:
                wrong.append(f"{name} ({getattr(self, name)!r}): {rule}")

        optional = ("latent_dim",) if self.latent_dim is not None else ()
        for name in (*_SIZES, *optional):
            require(_is_whole(getattr(self, name), 1), name, "must be a whole number of at least 1")
        require(_is_whole(self.num_shared_experts, 0), "num_shared_experts", "must be a whole number of at least 0")
        for name in _POSITIVE:
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(is_number and 0 < value < float("inf"), name, "must be a finite number above 0")
        for name in ("rope_fused", "sconv"):
            require(isinstance(getattr(self, name), bool), name, "must be true or false")
        once = len(set(self.sconv_sites)) == len(self.sconv_sites) and set(self.sconv_sites) <= set(SITES)
        require(once, "sconv_sites", f"may hold {', '.join(SITES)}, each once")
        schema = self.grugmoe_artifact_schema_version
        known = schema in (1, 2) and not isinstance(schema, bool)
        require(known, "grugmoe_artifact_schema_version", "must be 1 or 2; a newer one needs newer code")
        if wrong:
            return wrong  # the rules below divide by these sizes
        stored = self.num_key_value_heads
        require(self.num_attention_heads % stored == 0, "num_attention_heads", f"must be a multiple of {stored}")
        for name in ("local_kv_heads", "global_kv_heads"):
            require(stored % getattr(self, name) == 0, name, f"must divide num_key_value_heads ({stored})")
        require(self.head_dim % 4 == 0, "head_dim", "must be a multiple of 4 (rotary turns pairs of its first half)")
        below = self.num_experts_per_tok < self.num_experts
        require(below, "num_experts_per_tok", f"must be below num_experts ({self.num_experts})")
        require(schema == 2 or self.num_shared_experts == 1, "num_shared_experts", "must be 1 in schema 1")
        return wrong

    def is_global(self, layer: int) -> bool:
        """Whether layer `layer` (0-based) attends to the whole text and carries no positions."""
        return (layer + 1) % self.global_every == 0 or layer == self.num_hidden_layers - 1

    @property
    def layer_types(self) -> list[str]:
        """The kind of cache that transformers gives each layer: "hybrid" ones also hold states of convolutions."""
        kinds = ("sliding_attention", "full_attention")
        if self.number_of_conv_states:
            kinds = ("hybrid_sliding", "hybrid")
        return [kinds[self.is_global(i)] for i in range(self.num_hidden_layers)]

    @property
    def number_of_conv_states(self) -> int:
        """Short convolutions of a layer that look back; each has a state in the cache."""
        return len(self.sconv_sites) if self.sconv_kernel > 1 else 0


def _is_whole(value, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


__all__ = ["GrugMoeConfig"]
