"""Weights on disk that change under a run: found by their checksums before a token is wrong."""

import os
import shutil

import pytest
import torch
from helpers.error_cases import command_refused, refused
from helpers.generation import token_ids
from helpers.internals import before_logits, extents_of

from flexgen_h2o import LLM, Placement, Policy
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands import generate
from flexgen_h2o.models.safetensors_io import read_header, write_safetensors
from flexgen_h2o.storage.disk import Checksums, Extent

DISK = Policy(weights=Placement(0, 0, 100), gpu_batch_size=2)
# Where the weights of a run lie: in the checkpoint, in the weight cache, in the run's own folder.
KINDS = {"model.safetensors": {}, "weights/": {"weight_bits": 4},
         "flexgen_h2o-run-": {"weight_bits": 4, "weight_cache": None}}


@pytest.fixture
def opened(tiny_model, tmp_path, monkeypatch):
    """A function that opens a copy of a tiny model with all its weights on disk."""
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(tiny_model("llama_untied_bias").folder, tmp_path / "tiny")

    def get(**options) -> LLM:
        return LLM(str(folder), policy=DISK, progress=False, offload_dir=tmp_path / "offload",
                   **{"verify": True, "dtype": "float32"} | options)

    return get


def tokens(llm) -> list[list[int]]:
    return token_ids(llm.generate([[5, 9, 5], [7]], max_new_tokens=4, eos_token_id=-1))


def flip(extent: Extent, place: int) -> None:
    """Change one bit of a file, in the byte at this place of an extent."""
    descriptor = os.open(extent.path, os.O_RDWR)
    (byte,) = os.pread(descriptor, 1, extent.offset + place)
    os.pwrite(descriptor, bytes([byte ^ 1]), extent.offset + place)
    os.close(descriptor)


@pytest.mark.parametrize("part", KINDS)
def test_a_changed_bit_on_disk_ends_the_run(opened, device, part):
    """In tensors of each unit; a run goes on when the bit is back. Unasked, nothing is checked."""
    with opened(**KINDS[part]) as llm:
        expected = tokens(llm)
        extents = extents_of(llm)
        table = extents.pop("model.embed_tokens.weight")
        assert any(part in str(extent.path) for extent in extents.values())
        for extent in list(extents.values())[::6]:
            flip(extent, extent.nbytes // 2)
            refused(lambda: tokens(llm), f"{extent.path} has changed: ",
                    f" at byte {extent.offset} ", "check the disk")
            flip(extent, extent.nbytes // 2)
        if not KINDS[part]:  # of a table, the rows of a prompt's tokens are read
            row = table.nbytes // 120
            flip(table, 5 * row)
            refused(lambda: tokens(llm), f"the {row} bytes at byte {table.offset + 5 * row} ")
            flip(table, 5 * row)
        assert tokens(llm) == expected
    with opened(verify=False, **KINDS[part]) as llm:
        assert tokens(llm) == expected
        flip(next(iter(extents_of(llm).values())), 1)
        tokens(llm)


def test_a_bit_that_changes_during_a_run_ends_it(opened, monkeypatch):
    with opened() as llm:
        extent = extents_of(llm)["model.layers.0.mlp.up_proj.weight"]
        taken = []
        before_logits(monkeypatch, lambda step: taken.append(step) or len(taken) == 2
                      and flip(extent, 7))
        refused(lambda: tokens(llm), str(extent.path))
        assert len(taken) < 4


@pytest.mark.parametrize("options", [{"weight_bits": 4}, {"dtype": "float16"}])
def test_copies_in_the_weight_cache_are_verified(opened, options):
    """It may have changed before this run opened it, or be of a version that kept no checksums."""
    with opened(**options) as llm:
        expected = tokens(llm)
        extent = extents_of(llm)["model.layers.1.mlp.up_proj.weight"]
    flip(extent, extent.nbytes - 1)
    with opened(**options) as llm:
        refused(lambda: tokens(llm), f"{extent.path} has changed: ", f" at byte {extent.offset}")
    flip(extent, extent.nbytes - 1)
    raw = extent.path.read_bytes()
    extent.path.write_bytes(raw.replace(b'"xxh3_64":"', b'"xxh3_46":"'))
    with opened(**options) as llm:
        assert tokens(llm) == expected


def test_written_files_have_checksums(tmp_path):
    tensors = {"a": torch.arange(9.0), "none": torch.empty(0), "b": torch.ones(3, 5)}
    path = tmp_path / "a.safetensors"
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, layout,
                      lambda name: tensors[name].view(-1).split(4) if name == "a"
                      else [tensors[name]])
    with open(path, "rb") as file:
        infos = read_header(path, file.fileno())
    known = Checksums()
    for name, info in infos.items():
        known.expect(info.extent, info.checksum)
        known.read(info.extent, tensors[name].view(-1).view(torch.uint8))
    refused(lambda: known.read(infos["a"].extent, torch.zeros(36, dtype=torch.uint8)), str(path))


def test_verify_without_weights_on_disk_is_an_error(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command_refused(generate.main, capfd, ["--verify"], "--verify has no effect on weights in "
                    "memory: let --percent leave some on disk")
    assert RunConfig(verify=True, percent="auto").verify
