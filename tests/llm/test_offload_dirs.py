"""Files of the disk tier over several folders: the same tokens as with one."""

import os

import pytest
from helpers.error_cases import refused
from helpers.generation import make_prompts, prompts_of, tokens, transformers_tokens

from flexgen_h2o import LLM, H2OConfig, Placement, Policy
from flexgen_h2o.storage import offload_dirs
from flexgen_h2o.storage.device import PAGE

DISK = Placement(0, 0, 100)
ON_DISK = {"weights": DISK, "cache": DISK, "activations": DISK}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders for small stripes, which must be empty in the end."""
    monkeypatch.setattr(offload_dirs, "STRIPE", PAGE)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    paths = [tmp_path / "one", tmp_path / "two"]
    yield paths
    assert [os.listdir(path) for path in paths] == [[], []]


@pytest.mark.parametrize(("h2o", "policy"), [
    (None, {}), (None, {"num_gpu_batches": 1, "gpu_batch_size": 5}),
    (H2OConfig(heavy_ratio=0.2, recent_ratio=0.2), {}),
    (H2OConfig(recall=True, heavy_ratio=0.2, recent_ratio=0.2), {"selective_fetch": True})],
    ids=["full", "shards", "h2o", "selective fetch"])
def test_tokens_with_several_offload_folders(tiny_model, tmp_path, folders, h2o, policy):
    tiny = tiny_model("llama")
    prompts = prompts_of(tiny, [9, 4, 1, 17, 12])
    expected = tokens(tiny, prompts, h2o, offload_dir=tmp_path / "single", **ON_DISK, **policy)
    assert tokens(tiny, prompts, h2o, offload_dir=folders, **ON_DISK, **policy) == expected


@pytest.mark.parametrize("bits", [16, 4])
def test_experts_over_several_folders(tiny_model, tmp_path, folders, bits):
    def generate(places):
        with LLM(str(tiny_model("qwen3_moe").folder), dtype="float32", offload_dir=places,
                 weight_bits=bits, weight_cache=tmp_path / "weights", verify=True, progress=False,
                 policy=Policy(2, 2, experts=DISK, expert_slots=3)) as llm:
            used = [sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
                    for place in places]
            outputs = llm.generate(prompts, max_new_tokens=6, eos_token_id=-1)
            return [out.token_ids for out in outputs], used

    prompts = make_prompts(97, [9, 4, 1, 12, 7])
    expected, _ = generate([tmp_path / "single"])
    got, used = generate(folders)
    assert got == expected
    assert bits < 16 or got == transformers_tokens(tiny_model("qwen3_moe"), prompts, 6)
    assert min(used) > 0 and max(used) - min(used) <= PAGE


def test_offload_folders_need_space_for_weights(tiny_model, folders, monkeypatch):
    monkeypatch.setattr("flexgen_h2o.storage.free_memory._disk_bytes", lambda *_: 9)
    refused(lambda: tokens(tiny_model("llama"), [[5]], offload_dir=folders, **ON_DISK),
            match="disk")
    for path in folders:
        path.mkdir(exist_ok=True)
