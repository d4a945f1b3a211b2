"""Random-weight models, made on the spot: `make_model` writes a directory that any engine loads as a model.

Two seeds give two weight versions of one model: the weights differ, architecture and tokenizer do not.
"""

import json
import os
import shutil
import tempfile
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
class Preset:
    """The shape of a Qwen3 model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def config(self) -> dict[str, Any]:
        """The `config.json` of the model."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": tokenizer.VOCAB_SIZE,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": CONTEXT_TOKENS,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": _DEVIATION,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "torch_dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": tokenizer.EOS_ID,
            "pad_token_id": tokenizer.PAD_ID,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its checkpoint name, in file order."""
        hidden, inter, dim = self.hidden, self.intermediate, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokenizer.VOCAB_SIZE, hidden)}
        for i in range(self.layers):
            layer = {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (self.heads * dim, hidden),
                "self_attn.k_proj": (self.kv_heads * dim, hidden),
                "self_attn.v_proj": (self.kv_heads * dim, hidden),
                "self_attn.o_proj": (hidden, self.heads * dim),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inter, hidden),
                "mlp.up_proj": (inter, hidden),
                "mlp.down_proj": (hidden, inter),
            }
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (tokenizer.VOCAB_SIZE, hidden)
        return shapes


PRESETS = {
    "tiny": Preset(layers=4, hidden=128, intermediate=384, heads=4, kv_heads=2, head_dim=32),
    "bench": Preset(layers=8, hidden=512, intermediate=1536, heads=8, kv_heads=4, head_dim=64),
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
            weights[name] = random.standard_normal(shape, dtype=np.float32) * np.float32(_DEVIATION)
    return weights
