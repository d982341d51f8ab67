"""config.json of the interchange format, schema 1 (released weights) and 2, to and from `ModelConfig` (hero_spec 8).

Reading is strict: a field that would change the mathematics and is not understood is refused by name, never
skipped; bookkeeping fields that stock tools write are on a short list of their own.
"""

from __future__ import annotations

import re
from typing import Any

from equimoe.config import ModelConfig
from equimoe.errors import EquimoeError, Problems

__all__ = ["config_from_json", "config_to_json", "schema_of"]

MODEL_TYPE, ARCHITECTURE = "grug_moe", "GrugMoeForCausalLM"
SCHEMAS = (1, 2)

# Our name -> other spellings met in the wild, in order of preference. Dots walk into nested objects.
_SPELLINGS = {
    "vocab_size": (),
    "hidden_size": ("hidden_dim",),
    "num_hidden_layers": ("num_layers",),
    "num_attention_heads": ("num_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "head_dim": ("attention_head_dim",),
    "max_position_embeddings": ("max_seq_len",),
    "sliding_window": (),
    "rms_norm_eps": ("layer_norm_eps",),
    "initializer_range": ("initializer_std",),
    "rope_theta": ("rope.theta", "rope_parameters.rope_theta"),
    "num_experts": ("num_local_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "moe_intermediate_size": ("intermediate_dim", "intermediate_size"),
    "shared_expert_intermediate_size": ("shared_expert_intermediate_dim",),
    "num_shared_experts": (),
    "latent_dim": (),
    "qk_mult": (),
    "qk_mult_long_scale": (),
    "local_kv_heads": (),
    "global_kv_heads": (),
    "global_every": (),
    "rope_fused": (),
    "sconv_kernel": (),
    "sconv_sites": (),
    "gated_norm_rank": (),
}
_MUST_BE = {  # field -> the only value that means our architecture
    "tie_word_embeddings": False,
    "grugmoe_attention_mode": "production",
    "disable_pko": True,
    "disable_long_rope": True,
}
_BOOKKEEPING = {
    "architectures",
    "model_type",
    "grugmoe_artifact_schema_version",
    "sconv",
    "auto_map",
    "torch_dtype",
    "dtype",
    "transformers_version",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "_name_or_path",
    "rope",
    "rope_parameters",
}
_CODE_HERE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)  # file.Class; another repository's has -- in it
_NESTED = {"rope": {"theta"}, "rope_parameters": {"rope_theta", "rope_type"}}


def schema_of(json_config: dict[str, Any]) -> int:
    """The artifact schema, 1 or 2; refused when it is another."""
    schema = json_config.get("grugmoe_artifact_schema_version", 2)
    if schema not in SCHEMAS or isinstance(schema, bool):
        raise EquimoeError(
            "grugmoe_artifact_schema_version",
            f"must be one of {SCHEMAS}",
            "Update equimoe, or export the weights again",
            value=schema,
        )
    return schema


def config_from_json(json_config: dict[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises EquimoeError with all problems at once."""
    if not isinstance(json_config, dict):
        raise EquimoeError(
            "config.json", "must be a JSON object", "Point at a model folder", value=type(json_config).__name__
        )
    schema = schema_of(json_config)
    problems = Problems("config.json")
    problems.require(
        json_config.get("model_type") == MODEL_TYPE,
        "model_type",
        json_config.get("model_type"),
        f"must be {MODEL_TYPE!r}",
        "this folder holds another architecture",
    )
    for name, only in _MUST_BE.items():
        value = json_config.get(name, only)
        problems.require(
            value == only and type(value) is type(only),
            name,
            value,
            f"must be {only!r}",
            "a model that differs here is another architecture",
        )
    _refuse_foreign_code(json_config.get("auto_map"), problems)
    given = _collect(json_config, problems)
    problems.raise_if_any()
    _defaults(given, json_config, schema, problems)
    problems.raise_if_any()
    return ModelConfig(**given)


def _refuse_foreign_code(auto_map: Any, problems: Problems) -> None:
    """`auto_map` says which code transformers is to run. None of it is run here, and code of elsewhere is a warning."""
    entries = auto_map if isinstance(auto_map, dict) else {"": auto_map} if auto_map is not None else {}
    for name, value in entries.items():
        for code in value if isinstance(value, list) else [value]:
            problems.require(
                code is None or (isinstance(code, str) and _CODE_HERE.fullmatch(code) is not None),
                f"auto_map.{name}",
                code,
                "names code outside of this folder",
                "do not use this model; or, if you trust it, take auto_map out of config.json: equimoe needs none",
            )


def _collect(json_config: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Our field names with the values found under any spelling; unknown fields and contradictions are problems."""
    known = _BOOKKEEPING | set(_MUST_BE) | set(_SPELLINGS)
    known |= {s for spellings in _SPELLINGS.values() for s in spellings if "." not in s}
    for name in sorted(set(json_config) - known):
        problems.require(
            False,
            name,
            json_config[name],
            "is not a field of this architecture",
            "remove it if it is bookkeeping; a field that changes the model cannot be ignored",
        )
    for parent, children in _NESTED.items():
        nested = json_config.get(parent) or {}
        for name in sorted(set(nested) - children) if isinstance(nested, dict) else []:
            problems.require(False, f"{parent}.{name}", nested[name], "is not supported", "only plain rotary is")
        if isinstance(nested, dict) and nested.get("rope_type", "default") != "default":
            problems.require(
                False,
                f"{parent}.rope_type",
                nested["rope_type"],
                "must be 'default'",
                "scaled rotary positions are another model",
            )
    given = {}
    for name, spellings in _SPELLINGS.items():
        values = {s: v for s in (name, *spellings) if (v := _lookup(json_config, s)) is not None}
        if len({repr(v) for v in values.values()}) > 1:
            problems.require(False, name, values, "is given twice with different values", "keep one spelling")
        elif values:
            given[name] = next(iter(values.values()))
    return given


def _lookup(tree: dict[str, Any], dotted: str) -> Any:
    for name in dotted.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _defaults(given: dict[str, Any], json_config: dict[str, Any], schema: int, problems: Problems) -> None:
    """Fill in what a schema implies. Schema 1: one shared expert, no latent, no short conv, split-half rotary."""
    required = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "sliding_window",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ]
    for name in required:
        problems.require(name in given, name, None, "is missing", "a config.json of this format holds it")
    heads = given.get("num_key_value_heads")
    given.setdefault("local_kv_heads", heads)
    given.setdefault("global_kv_heads", heads)
    given.setdefault("num_shared_experts", 1)
    given.setdefault("latent_dim", None)
    given.setdefault("rope_fused", False)  # absent means split halves (hero_spec section 8)
    sites = given.pop("sconv_sites", ()) or ()
    is_list = isinstance(sites, list | tuple) and all(isinstance(site, str) for site in sites)
    problems.require(is_list, "sconv_sites", sites, "must be a list of sites", "write ['k', 'attn', 'mlp']")
    sites = sites if is_list else ()
    uses_conv = json_config.get("sconv", bool(sites))
    given["sconv_sites"] = tuple(sites) if uses_conv else ()
    problems.require(
        bool(given["sconv_sites"]) == bool(uses_conv),
        "sconv",
        uses_conv,
        "needs sconv_sites",
        "list the sites, for example ['k', 'attn', 'mlp']",
    )
    if schema == 1:
        problems.require(
            given["num_shared_experts"] == 1,
            "num_shared_experts",
            given["num_shared_experts"],
            "schema 1 has one shared expert",
            "use schema 2",
        )


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The schema-2 config.json of a model: only the spellings of hero_spec section 8."""
    fields = {name: getattr(config, name) for name in _SPELLINGS}
    if config.gated_norm_rank == 128:
        del fields["gated_norm_rank"]  # the format's own value; readers that know no such field stay happy
    if config.latent_dim is None:
        del fields["latent_dim"]
    fields["sconv_sites"] = list(config.sconv_sites)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **fields,
        "sconv": bool(config.sconv_sites),
        "tie_word_embeddings": False,
        "grugmoe_attention_mode": "production",
        "grugmoe_artifact_schema_version": 2,
    }
