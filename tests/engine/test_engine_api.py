"""``Engine(psrl_config=...)``: the offline engine keeps the same promise, and refuses the same settings."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine

SCRIPT = """
import random, sys
import sglang

def main():
    one, two = sys.argv[1:3]
    common = dict(model_path=one, device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
                  dtype="float32", max_total_tokens=4096, page_size=16, weight_version="1", context_length=2048)
    try:
        sglang.Engine(psrl_config={"psrl": {"sglang": {"max_version_lag": -1}}}, **common)
    except ValueError as error:
        assert "psrl.sglang.max_version_lag" in str(error), error
    else:
        raise AssertionError("a negative lag was accepted")
    source = random.Random(1)
    asked = [source.randrange(512) for _ in range(200)]
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    with sglang.Engine(psrl_config={"psrl": {}}, **common) as engine:
        def cached():
            return engine.generate(input_ids=asked, sampling_params=sampling)["meta_info"]["cached_tokens"]
        seen = [cached(), cached()]
        engine.update_weights_from_disk(two)  # this API cannot name a version
        seen += [cached(), cached()]
        assert seen == [0, 192, 0, 192], seen
    print("ENGINE-OK")

if __name__ == "__main__":
    main()
"""


def test_the_offline_engine_versions_its_kv_and_refuses_bad_settings(models, tmp_path):
    script = tmp_path / "offline.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(models[1]), str(models[2])]
    env = {**os.environ, "SGLANG_PLATFORM": "psrl_cpu"}
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert "ENGINE-OK" in run.stdout, run.stderr[-3000:]
