"""Memory rules: exact figures for each way a model keeps KV, and refusals of what cannot be counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl_sglang.sizing import ModelShape, bytes_per_token, exact_offload_gb, reference_offload_gb

MHA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "torch_dtype": "float16",
}
GQA = {**MHA, "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
MLA = {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def shape(config: dict[str, Any], **changes: Any) -> ModelShape:
    return ModelShape.from_config_json({**config, **changes})


class TestShape:
    def test_heads_default_to_attention_heads_and_head_dim_to_their_share(self):
        model = shape(MHA)
        assert (model.kv_heads, model.key_dim, model.value_dim) == (32, 128, 128)
        assert not model.is_mla

    def test_stated_head_dim_wins_over_the_share(self):
        assert shape(GQA, hidden_size=2560, head_dim=128).key_dim == 128

    def test_value_heads_may_have_another_size(self):
        assert bytes_per_token(shape(GQA, head_dim=192, v_head_dim=128), 1) == 36 * 8 * (192 + 128) * 2

    def test_mla_keeps_one_latent_vector(self):
        assert shape(MLA).is_mla
        assert shape(MLA).latent_dim == 576

    def test_text_part_of_a_multimodal_model_counts(self):
        outer = {
            "architectures": ["X"],
            "dtype": "bfloat16",
            "text_config": {k: v for k, v in GQA.items() if k != "torch_dtype"},
        }
        assert ModelShape.from_config_json(outer) == shape(GQA)

    @pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
    @pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
    def test_dtype_is_read_under_both_names(self, key, name):
        config = {k: v for k, v in GQA.items() if k != "torch_dtype"} | {key: name}
        assert ModelShape.from_config_json(config).dtype == "bfloat16"

    def test_only_layers_that_keep_kv_count(self):
        types = ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]
        model = shape(GQA, num_hidden_layers=4, layer_types=types)
        assert (model.num_layers, model.kv_layers) == (4, 2)
        assert shape(GQA, num_hidden_layers=48, full_attention_interval=4).kv_layers == 12

    def test_file_directory_and_content_agree(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(GQA))
        from_file = ModelShape.from_config_json(tmp_path / "config.json")
        assert from_file == ModelShape.from_config_json(str(tmp_path)) == shape(GQA)


class TestBytesPerToken:
    @pytest.mark.parametrize(
        ("config", "tp_size", "expected"),
        [
            (MHA, 1, 32 * 32 * 256 * 2),
            (MHA, 4, 32 * 8 * 256 * 2),
            (GQA, 1, 36 * 8 * 256 * 2),
            (GQA, 8, 36 * 1 * 256 * 2),
            (GQA, 32, 36 * 1 * 256 * 2),  # four ranks share a KV head, each keeps a copy
            (MLA, 1, 61 * 576 * 2),
            (MLA, 16, 61 * 576 * 2),  # whole on every rank
        ],
    )
    def test_is_exact_per_rank(self, config, tp_size, expected):
        assert bytes_per_token(shape(config), tp_size) == expected

    @pytest.mark.parametrize(
        ("kv_dtype", "factor"), [("float32", 2), ("auto", 1), ("bfloat16", 1), ("fp8_e4m3", 0.5)]
    )
    def test_kv_dtype_replaces_the_models(self, kv_dtype, factor):
        assert bytes_per_token(shape(GQA), 2, kv_dtype) == factor * bytes_per_token(shape(GQA), 2)

    @given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 64))
    def test_ranks_together_keep_each_head_at_least_once(self, log_heads, log_tp, layers):
        model = shape(GQA, num_hidden_layers=layers, num_key_value_heads=2**log_heads)
        tp_size = 2**log_tp
        together = bytes_per_token(model, tp_size) * tp_size
        assert together == bytes_per_token(model, 1) * max(1, tp_size // model.kv_heads)


class TestOffload:
    def test_reference_formula_gives_137_gb_for_the_example_quoted_with_64(self):
        assert reference_offload_gb(32, 4096, 64, 4096) == pytest.approx(137.438953472)
        assert reference_offload_gb(32, 4096, 64, 4096) * 1e9 == 128 * 2**30
        assert reference_offload_gb(32, 4096, 64, 4000) == pytest.approx(134.217728)

    def test_exact_equals_the_reference_for_mha_in_two_bytes(self):
        exact = exact_offload_gb(shape(MHA), 64, 4096, 4)
        assert exact.total_gb == pytest.approx(reference_offload_gb(32, 4096, 64, 4096))
        assert exact.per_rank_gb == pytest.approx(exact.total_gb / 4)

    def test_exact_is_a_fraction_of_the_reference_for_gqa(self):
        exact = exact_offload_gb(shape(GQA), 64, 4096, 1)
        assert exact.total_gb == pytest.approx(reference_offload_gb(36, 4096, 64, 4096) / 4)

    def test_mla_total_grows_with_the_ranks(self):
        one, eight = (exact_offload_gb(shape(MLA), 64, 4096, tp) for tp in (1, 8))
        assert eight.per_rank_bytes == one.per_rank_bytes
        assert eight.total_bytes == 8 * one.total_bytes

    def test_offload_size_is_in_gib(self):
        assert exact_offload_gb(shape(MHA), 64, 4096, 1).offload_size_gb == 128.0


class TestRefusals:
    @pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
    @pytest.mark.parametrize("value", [None, 0, -1, "32", 1.5, True])
    def test_bad_dimension_is_named_with_its_value(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value!r}.*must be"):
            shape(GQA, **{name: value})

    def test_latent_without_its_rope_part(self):
        with pytest.raises(ValueError, match="qk_rope_head_dim is None"):
            shape(MLA, qk_rope_head_dim=None)

    def test_hidden_size_that_heads_do_not_divide(self):
        with pytest.raises(ValueError, match=r"hidden_size is 100.*set head_dim"):
            shape(MHA, hidden_size=100)

    @pytest.mark.parametrize("config", [GQA, MLA])
    def test_tp_that_does_not_divide_the_attention_heads(self, config):
        with pytest.raises(ValueError, match=r"tp_size is 3.*num_attention_heads.*choose"):
            bytes_per_token(shape(config), 3)

    def test_tp_that_does_not_fit_the_kv_heads(self):
        with pytest.raises(ValueError, match=r"tp_size is 4.*num_key_value_heads 6.*choose"):
            bytes_per_token(shape(GQA, num_attention_heads=12, num_key_value_heads=6), 4)

    @pytest.mark.parametrize("tp_size", [0, -2])
    def test_tp_that_is_not_positive(self, tp_size):
        with pytest.raises(ValueError, match=f"tp_size is {tp_size}"):
            bytes_per_token(shape(GQA), tp_size)

    def test_unknown_and_missing_dtype(self):
        with pytest.raises(ValueError, match="kv_dtype is 'int3'"):
            bytes_per_token(shape(GQA), 1, "int3")
        with pytest.raises(ValueError, match=r"dtype is 'int3'.*give kv_dtype"):
            bytes_per_token(shape(GQA, torch_dtype="int3"), 1)
        with pytest.raises(ValueError, match="dtype is missing"):
            bytes_per_token(shape(GQA, torch_dtype=None), 1)
        assert bytes_per_token(shape(GQA, torch_dtype=None), 1, "bfloat16") > 0

    @pytest.mark.parametrize(
        "name", ["index_head_dim", "multi_query", "hybrid_override_pattern", "attn_config"]
    )
    def test_model_whose_kv_is_not_the_plain_product(self, name):
        with pytest.raises(ValueError, match=f"{name} is.*not counted"):
            shape(GQA, **{name: 128})

    @pytest.mark.parametrize(
        ("types", "match"),
        [(["full_attention"], "one type for each"), (["full_attention", "novel"], "'novel'")],
    )
    def test_layer_types_that_cannot_be_counted(self, types, match):
        with pytest.raises(ValueError, match=match):
            shape(GQA, num_hidden_layers=2, layer_types=types)

    @pytest.mark.parametrize("text", ["{", "[1]"])
    def test_file_that_is_no_model_config(self, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json.*give"):
            ModelShape.from_config_json(tmp_path)

    def test_missing_file(self, tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            ModelShape.from_config_json(tmp_path)

    @pytest.mark.parametrize("name", ["layers", "hidden", "sequences", "mean_length"])
    def test_reference_rule_needs_positive_figures(self, name):
        figures = {"layers": 1, "hidden": 1, "sequences": 1, "mean_length": 1, name: 0}
        with pytest.raises(ValueError, match=f"{name} is 0"):
            reference_offload_gb(**figures)

    @pytest.mark.parametrize(("sequences", "length", "name"), [(0, 1, "sequences"), (1, 0, "mean_length")])
    def test_exact_size_needs_positive_figures(self, sequences, length, name):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            exact_offload_gb(shape(GQA), sequences, length, 1)
