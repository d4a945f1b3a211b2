"""How much memory KV takes: exact bytes per token and TP rank, and PSRL's rule of thumb beside it.

Everything follows from a model's `config.json`; no model and no engine is loaded. A model whose KV these
figures would not describe is refused rather than estimated. Every refusal is a `ValueError` that names the
field, its value and what to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GB = 1e9  # PSRL's rule divides by this
GIB = 2.0**30  # the unit of `offload_size_gb`

_BYTES_PER_ELEMENT = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "bf16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
_LAYERS_WITH_KV = ("full_attention", "sliding_attention", "chunked_attention", "attention")
_LAYERS_WITHOUT_KV = ("linear_attention", "mamba", "conv")
# With any of these the KV is not the plain product below, so the figures would be wrong.
_UNCOUNTED_FIELDS = (
    "hybrid_override_pattern",
    "attn_layer_period",
    "attn_type_list",
    "index_head_dim",
    "multi_query",
    "multi_query_group_num",
    "num_kv_heads",
    "attn_config",
    "attn_layer_indices",
    "attention_other_setting",
    "layers_block_type",
    "linear_attn_config",
    "swa_num_key_value_heads",
    "num_kv_shared_layers",
    "global_head_dim",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model determines the size of its KV.

    `kv_layers` counts the layers that keep KV per token. An MLA model keeps one latent vector of `latent_dim`
    elements per layer; any other model has `latent_dim` 0 and keeps a key and a value per KV head.
    """

    num_layers: int
    kv_layers: int
    hidden_size: int
    attention_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent_dim: int
    dtype: str | None

    @property
    def is_mla(self) -> bool:
        return self.latent_dim > 0

    @classmethod
    def from_config_json(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face `config.json`: its path, the directory that holds it, or its content."""
        outer = source if isinstance(source, Mapping) else _read_json(Path(source))
        nested = outer.get("text_config")
        config: Mapping[str, Any] = {**outer, **nested} if isinstance(nested, Mapping) else outer
        for name in _UNCOUNTED_FIELDS:
            if config.get(name):
                raise ValueError(
                    f"{name} is {config[name]!r}: the KV of such a model is not counted here; "
                    "read the size of its pools from the log of a running server"
                )
        hidden = _positive(config, "hidden_size")
        heads = _positive(config, "num_attention_heads")
        layers = _positive(config, "num_hidden_layers")
        latent = 0
        if config.get("kv_lora_rank") is not None:
            latent = _positive(config, "kv_lora_rank") + _positive(config, "qk_rope_head_dim")
        key_dim = latent or _head_dim(config, hidden, heads)
        return cls(
            num_layers=layers,
            kv_layers=_kv_layers(config, layers),
            hidden_size=hidden,
            attention_heads=heads,
            kv_heads=_positive(config, "num_key_value_heads", heads),
            key_dim=key_dim,
            value_dim=0 if latent else _positive(config, "v_head_dim", key_dim),
            latent_dim=latent,
            dtype=_dtype(config),
        )


@dataclass(frozen=True, slots=True)
class OffloadSize:
    """The memory that keeps a number of tokens, in bytes."""

    bytes_per_token_per_rank: int
    per_rank_bytes: int
    total_bytes: int

    @property
    def per_rank_gb(self) -> float:
        return self.per_rank_bytes / GB

    @property
    def total_gb(self) -> float:
        return self.total_bytes / GB

    @property
    def offload_size_gb(self) -> float:
        """The least `psrl.lmcache.offload_size_gb`, which is in GiB over all TP ranks."""
        return self.total_bytes / GIB


def bytes_per_token(shape: ModelShape, tp_size: int, kv_dtype: str | None = None) -> int:
    """Bytes of KV that one token takes on one TP rank, exactly.

    KV heads are split over the ranks; with more ranks than heads each rank keeps one head, and every rank of
    an MLA model keeps the whole latent vector. `kv_dtype` is the type KV is kept in; None or "auto" means
    the model's own, which is right unless the server keeps another: it was started with `--dtype` or
    `--kv-cache-dtype`, or serves a float32 model, which SGLang's `--dtype auto` turns into float16.
    """
    _require_positive("tp_size", tp_size)
    if shape.attention_heads % tp_size:
        raise ValueError(
            f"tp_size is {tp_size}, which does not divide num_attention_heads {shape.attention_heads}: "
            "choose a tp_size that does"
        )
    element_bytes = _element_bytes(shape, kv_dtype)
    if shape.is_mla:
        return shape.kv_layers * shape.latent_dim * element_bytes
    if max(shape.kv_heads, tp_size) % min(shape.kv_heads, tp_size):
        raise ValueError(
            f"tp_size is {tp_size}, which does not fit num_key_value_heads {shape.kv_heads}: "
            "choose a tp_size that divides the KV heads, or is a multiple of them"
        )
    heads_per_rank = max(1, shape.kv_heads // tp_size)
    return shape.kv_layers * heads_per_rank * (shape.key_dim + shape.value_dim) * element_bytes


def reference_offload_gb(layers: int, hidden: int, sequences: int, mean_length: float) -> float:
    """PSRL's rule for `offload_size_gb`, total over TP ranks: a key and a value of `hidden` elements.

    Elements take 2 bytes. The rule is often quoted with 64 GB for 32 layers, hidden 4096 and 64 sequences of
    4k tokens. The formula gives twice that, 137.4 GB (128 GiB) at 4096 tokens and 134.2 GB at 4000: the
    quoted figure misses one of the two factors of 2. The formula, not the quotation, is implemented. It takes
    every attention head for a KV head, so it is far too high for GQA and MLA; `exact_offload_gb` is not.
    """
    for name, value in (
        ("layers", layers),
        ("hidden", hidden),
        ("sequences", sequences),
        ("mean_length", mean_length),
    ):
        _require_positive(name, value)
    return layers * hidden * sequences * mean_length * 2 * 2 / GB


def exact_offload_gb(
    shape: ModelShape, sequences: int, mean_length: int, tp_size: int, kv_dtype: str | None = None
) -> OffloadSize:
    """The memory that keeps `sequences` sequences of `mean_length` tokens, per TP rank and over all ranks."""
    _require_positive("sequences", sequences)
    _require_positive("mean_length", mean_length)
    token_bytes = bytes_per_token(shape, tp_size, kv_dtype)
    per_rank = token_bytes * sequences * mean_length
    return OffloadSize(token_bytes, per_rank, per_rank * tp_size)


def _read_json(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model config {str(path)!r} cannot be read: {error}; "
            "give a model directory or the path of its config.json"
        ) from error
    config = data if isinstance(data, dict) else None
    if config is None:
        raise ValueError(f"model config {str(path)!r} is not a JSON object: give the config.json of a model")
    return config


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    if hidden % heads:
        raise ValueError(
            f"hidden_size is {hidden}, which num_attention_heads {heads} does not divide: set head_dim"
        )
    return hidden // heads


def _kv_layers(config: Mapping[str, Any], layers: int) -> int:
    types = config.get("layer_types")
    if types is None:
        interval = config.get("full_attention_interval")
        return layers if interval is None else layers // _positive(config, "full_attention_interval")
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"layer_types is {types!r}: it must name one type for each of {layers} layers")
    for one in types:
        if one not in (*_LAYERS_WITH_KV, *_LAYERS_WITHOUT_KV):
            raise ValueError(
                f"layer_types holds {one!r}: its KV is not counted here; "
                "read the size of its pools from the log of a running server"
            )
    return sum(one in _LAYERS_WITH_KV for one in types)


def _dtype(config: Mapping[str, Any]) -> str | None:
    name = config.get("torch_dtype") or config.get("dtype")
    return None if name is None else str(name).removeprefix("torch.")


def _element_bytes(shape: ModelShape, kv_dtype: str | None) -> int:
    field, name = ("dtype", shape.dtype) if kv_dtype in (None, "auto") else ("kv_dtype", kv_dtype)
    known = ", ".join(_BYTES_PER_ELEMENT)
    if name is None:
        raise ValueError(f"dtype is missing from the model config: give kv_dtype, one of {known}")
    if name not in _BYTES_PER_ELEMENT:
        raise ValueError(f"{field} is {name!r}: give kv_dtype, one of {known}")
    return _BYTES_PER_ELEMENT[name]


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} is {value!r} in the model config: it must be a whole number > 0")
    return value


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value!r}: it must be > 0")
