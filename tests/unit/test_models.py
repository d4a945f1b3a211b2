"""Models made on the spot: reproducible, atomic, never overwritten, and one tokenizer for every seed."""

import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from psrl_sglang.lab import tokenizer
from psrl_sglang.lab.models import ModelDirectoryError, make_model

TEXT = "Hello wörld, 日本語\x00\t two  spaces\n\n'quoted' it's 🙂 ünïcode"


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_same_seed_gives_the_same_files_and_another_seed_only_other_weights(tmp_path):
    one, again, two = (
        digests(make_model(tmp_path / name, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == again
    assert {name for name in one if one[name] != two[name]} == {"model.safetensors", "psrl_model.json"}


def test_existing_model_is_left_as_it_is(tmp_path):
    path = make_model(tmp_path / "m", seed=1)
    before = (path / "model.safetensors").stat()
    assert make_model(tmp_path / "m", seed=1) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1, "preset": "bench"}])
def test_directory_of_another_model_is_refused(tmp_path, other):
    make_model(tmp_path / "m", seed=1)
    before = digests(tmp_path / "m")
    with pytest.raises(ModelDirectoryError, match="expected"):
        make_model(tmp_path / "m", **other)
    assert digests(tmp_path / "m") == before


def test_foreign_directory_is_refused(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious.txt").write_text("mine")
    with pytest.raises(ModelDirectoryError, match="not made here"):
        make_model(tmp_path / "m", seed=1)
    assert [file.name for file in (tmp_path / "m").iterdir()] == ["precious.txt"]


def test_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(tokenizer, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        make_model(tmp_path / "m", seed=1)
    assert list(tmp_path.iterdir()) == []


def test_unknown_preset_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="tiny, bench"):
        make_model(tmp_path / "m", seed=1, preset="huge")


@pytest.mark.parametrize("preset", ["tiny", "bench"])
def test_checkpoint_has_the_tensors_of_its_config(tmp_path, preset):
    from safetensors import safe_open

    path = make_model(tmp_path / "m", seed=3, preset=preset)
    config = json.loads((path / "config.json").read_text())
    with safe_open(path / "model.safetensors", "np") as tensors:
        names = set(tensors.keys())
        key = tensors.get_slice("model.layers.0.self_attn.k_proj.weight")
    assert key.get_shape() == [config["num_key_value_heads"] * config["head_dim"], config["hidden_size"]]
    assert len(names) == 3 + 11 * config["num_hidden_layers"]


def test_tokenizer_is_lossless_and_has_the_models_vocabulary(tmp_path):
    path = make_model(tmp_path / "m", seed=1)
    made = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert made.get_vocab_size() == tokenizer.VOCAB_SIZE
    ids = made.encode(TEXT).ids
    assert made.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode())
    assert made.token_to_id("<|im_end|>") == tokenizer.EOS_ID
