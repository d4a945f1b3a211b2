"""What of a server's arguments and the tiers exclude each other, and is said before anything starts."""

from types import SimpleNamespace

import pytest

from psrl_sglang.config import load_config
from psrl_sglang.engine.tier_start import _wrong_arguments

CONFIG = load_config({"psrl": {"lmcache": {"enable": True, "chunk_size": 256, "enable_p2p": True}}})


def arguments(**more):
    given = {"page_size": 16, "pp_size": 1, "enable_hierarchical_cache": False, "lora_paths": None}
    return SimpleNamespace(**{**given, **more})


def test_usual_arguments_are_fine():
    assert _wrong_arguments(CONFIG, arguments()) == []
    assert _wrong_arguments(CONFIG, arguments(page_size=1)) == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"page_size": 96}, "--page-size 96: choose 192"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_hierarchical_cache": True}, "enable_p2p"),
        ({"lora_paths": ["a=/adapters/a"]}, "--lora-paths"),
    ],
)
def test_what_cannot_be_is_named_with_what_to_do(more, named):
    [problem] = _wrong_arguments(CONFIG, arguments(**more))
    assert named in problem
