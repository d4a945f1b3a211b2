"""Random-weight models, made on the spot: `make_model` writes a directory that any engine loads as a model.

Two seeds give two weight versions of one model: the weights differ, architecture and tokenizer do not.
"""

import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl_sglang.lab import tokenizer

CONTEXT_TOKENS = 32768
_RECIPE = "psrl_model.json"
# Raise it when the same seed and preset give other files: directories of an older format are then refused.
_FORMAT = 1
# The usual initial deviation. It keeps float32 noise between a cache hit and a recomputation at one unit in the
# last place of a log-probability (4.8e-7), while weights of another seed move one by 0.03 and more.
_DEVIATION = 0.02


class ModelDirectoryError(Exception):
    """The directory exists and is not the model that was asked for."""


@dataclass(frozen=True)
class Preset(ABC):
    """The shape of a model; a subclass is an architecture."""

    layers: int
    hidden: int
    intermediate: int
    heads: int

    @property
    def deviation(self) -> float:
        """Of the initial weights."""
        return _DEVIATION

    def config(self) -> dict[str, Any]:
        """The `config.json` of the model."""
        return {
            "vocab_size": tokenizer.VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": CONTEXT_TOKENS,
            "hidden_act": "silu",
            "rope_theta": 1e6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": self.deviation,
            "tie_word_embeddings": False,
            "use_cache": True,
            "torch_dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": tokenizer.EOS_ID,
            "pad_token_id": tokenizer.PAD_ID,
            **self._own_config(),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its checkpoint name, in file order."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokenizer.VOCAB_SIZE, self.hidden)}
        for i in range(self.layers):
            layer = {"input_layernorm": (self.hidden,), **self._attention(), **self._behind_attention()}
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.config()["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (tokenizer.VOCAB_SIZE, self.hidden)
        return shapes

    @abstractmethod
    def _own_config(self) -> dict[str, Any]: ...

    @abstractmethod
    def _attention(self) -> dict[str, tuple[int, ...]]: ...

    def _behind_attention(self) -> dict[str, tuple[int, ...]]:
        return {"post_attention_layernorm": (self.hidden,), **self._mlp()}

    def _mlp(self) -> dict[str, tuple[int, ...]]:
        return {
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


@dataclass(frozen=True)
class Qwen3(Preset):
    """Grouped-query attention: K and V of every layer."""

    kv_heads: int
    head_dim: int

    def _own_config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "use_sliding_window": False,
        }

    def _attention(self) -> dict[str, tuple[int, ...]]:
        return {
            "self_attn.q_proj": (self.heads * self.head_dim, self.hidden),
            "self_attn.k_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.v_proj": (self.kv_heads * self.head_dim, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * self.head_dim),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
        }


@dataclass(frozen=True)
class DeepseekV2(Preset):
    """Latent attention (MLA): one compressed row a token, and no experts.

    `latent` is the width of the compressed KV, of a value head and of the unrotated part of a query head at once:
    torch-native attention, which knows nothing of MLA, runs only where the three are the same.
    """

    latent: int
    rope: int

    def _own_config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": self.heads,
            "rms_norm_eps": 1e-6,
            "kv_lora_rank": self.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": self.latent,
            "v_head_dim": self.latent,
            "qk_rope_head_dim": self.rope,
            "rope_scaling": {
                "type": "yarn",
                "factor": 8,
                "original_max_position_embeddings": CONTEXT_TOKENS // 8,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "first_k_dense_replace": self.layers + 1,
            "moe_layer_freq": 1,
            "n_routed_experts": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
        }

    def _attention(self) -> dict[str, tuple[int, ...]]:
        return {
            "self_attn.q_proj": (self.heads * (self.latent + self.rope), self.hidden),
            "self_attn.kv_a_proj_with_mqa": (self.latent + self.rope, self.hidden),
            "self_attn.kv_a_layernorm": (self.latent,),
            "self_attn.kv_b_proj": (self.heads * 2 * self.latent, self.latent),
            "self_attn.o_proj": (self.hidden, self.heads * self.latent),
        }


@dataclass(frozen=True)
class Cohere2(Preset):
    """Sliding windows of `window` tokens in all layers but the last of every `period`.

    SGLang gives it a pool for either kind of layer because its configuration asks for them (`is_hybrid_swa`).
    """

    kv_heads: int
    window: int
    period: int

    @property
    def deviation(self) -> float:
        return (
            4 * _DEVIATION
        )  # else the embedding, which is the output head too, repeats the last token for ever

    def _own_config(self) -> dict[str, Any]:
        is_full = [(layer + 1) % self.period == 0 for layer in range(self.layers)]
        return {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "num_key_value_heads": self.kv_heads,
            "layer_norm_eps": 1e-6,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
            "sliding_window": self.window,
            "layer_types": ["full_attention" if full else "sliding_attention" for full in is_full],
            "is_hybrid_swa": True,
            "hybrid_layer_pattern": [int(not full) for full in is_full],
        }

    def _attention(self) -> dict[str, tuple[int, ...]]:
        dim = self.hidden // self.heads
        return {
            "self_attn.q_proj": (self.heads * dim, self.hidden),
            "self_attn.k_proj": (self.kv_heads * dim, self.hidden),
            "self_attn.v_proj": (self.kv_heads * dim, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * dim),
        }

    def _behind_attention(self) -> dict[str, tuple[int, ...]]:
        return self._mlp()  # beside the attention, behind the same norm


PRESETS: dict[str, Preset] = {
    "tiny": Qwen3(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2, head_dim=32),
    "bench": Qwen3(layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64),
    "mla": DeepseekV2(layers=4, hidden=128, intermediate=384, heads=4, latent=32, rope=16),
    "swa": Cohere2(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2, window=128, period=2),
}


def make_model(directory: str | os.PathLike[str], *, seed: int, preset: str = "tiny") -> Path:
    """Write the model of `preset` with the weights of `seed` to `directory`, and return its absolute path.

    A directory that already holds that model is left as it is; any other existing one raises
    ModelDirectoryError. The directory appears complete or not at all, also when several processes make it.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; there are: {', '.join(PRESETS)}")
    target = Path(directory).absolute()
    recipe = {"format": _FORMAT, "preset": preset, "seed": seed}
    if target.exists():
        return _require(target, recipe)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(staging, PRESETS[preset], seed)
        (staging / _RECIPE).write_text(json.dumps(recipe, indent=2) + "\n")
        staging.chmod(0o755)
        try:
            staging.rename(target)
        except OSError:
            # Another process was first; what it made is checked like any directory found in place.
            if not target.exists():
                raise
        return _require(target, recipe)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require(target: Path, recipe: dict[str, Any]) -> Path:
    try:
        found = json.loads((target / _RECIPE).read_text())
    except (OSError, ValueError):
        found = None
    if found != recipe:
        held = "something that was not made here" if found is None else f"{found}"
        raise ModelDirectoryError(
            f"{target} holds {held}, expected {recipe}; name another directory or remove it"
        )
    return target


def _write(directory: Path, preset: Preset, seed: int) -> None:
    from safetensors.numpy import save_file

    save_file(_weights(preset, seed), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(preset.config(), indent=2) + "\n")
    generation = {"eos_token_id": tokenizer.EOS_ID, "pad_token_id": tokenizer.PAD_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.write(directory, context_tokens=CONTEXT_TOKENS)


def _weights(preset: Preset, seed: int) -> dict[str, Any]:
    import numpy as np

    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in preset.shapes().items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, dtype=np.float32)
        else:
            weights[name] = random.standard_normal(shape, dtype=np.float32) * np.float32(preset.deviation)
    return weights
