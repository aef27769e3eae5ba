"""Files of earlier releases are read, or refused by name: tools/release_fixtures.py writes them."""

import shutil
import tarfile
from pathlib import Path

import pytest
from helpers.programs import ROOT, program
from helpers.read_back import read_csv, read_jsonl
from helpers.servers import flags, serving

from flexgen_h2o import LLM, Placement, Policy, __version__
from flexgen_h2o.cli import commands
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import OTHER_NAMES, load_yaml
from flexgen_h2o.engine.expert_counts import load_counts
from flexgen_h2o.files.disk_cache import cache_dir, entries
from flexgen_h2o.planning.hardware import load_hardware

FIXTURES = ROOT / "tests" / "fixtures" / "releases"
RELEASES = sorted(path.name for path in FIXTURES.iterdir())
COPIES = [{"policy": Policy(weights=Placement(0, 0, 100))}, {"weight_bits": 4}, {"weight_bits": 12}]


@pytest.fixture(scope="module")
def writer():
    return program("tools/release_fixtures.py")


@pytest.fixture(params=RELEASES)
def release(request, tmp_path, monkeypatch) -> str:
    """The working folder has copies of the files of a release, and its cache."""
    shutil.copytree(FIXTURES / request.param, tmp_path, dirs_exist_ok=True)
    with tarfile.open(tmp_path / "folders.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXGEN_H2O_CACHE", str(tmp_path / "cache"))
    return request.param


def test_each_release_has_fixtures():
    assert __version__ in RELEASES, "python tools/release_fixtures.py"


def test_a_job_of_an_earlier_release_goes_on(release, writer, capsys):
    kept, rows = Path("results.jsonl").read_bytes().rpartition(b"\n")[0], read_csv("rows.csv")
    status = commands.main(writer.JOB)
    message = capsys.readouterr().err
    if status:  # other settings or columns
        assert status == 2 and ("results.jsonl" in message or "rows.csv" in message), message
        return
    assert Path("results.jsonl").read_bytes().startswith(kept)
    assert sorted(line["custom_id"] for line in read_jsonl("results.jsonl")) == [
        f"r{number}" for number in range(6)]
    assert read_csv("rows.csv")[:-1] == rows


def test_the_settings_of_a_run_are_a_configuration(release):
    saved = load_yaml("rows.csv.config.yaml")
    read = RunConfig.from_mapping(saved).to_dict()
    assert all(read[OTHER_NAMES.get(name, name)] == value for name, value in saved.items())


def test_copies_of_an_earlier_release_are_right(release):
    def tokens(**options) -> list[list[int]]:
        with LLM("model", dtype="float32", offload_dir="offload", **options) as llm:
            return [out.token_ids for out in llm.generate([[5, 3, 9, 7], [4]], max_new_tokens=8,
                                                          eos_token_id=-1)]

    before = {entry.path for entry in entries()}
    assert {path.parent.name for path in before} == {"converted", "weights"}
    for options in COPIES:
        generated = tokens(**options)
        fresh = {"weight_cache": None} if "weight_bits" in options else {}
        assert generated == tokens(**{"policy": Policy(), **options, **fresh} if fresh else {})
    after = {entry.path for entry in entries()}
    assert after >= before
    assert after == before or release != __version__, "the bytes or the keys of copies have changed"


def test_a_server_goes_on_with_the_data_of_an_earlier_release(release):
    with serving([*flags("model", "data"), "--max-model-len", "32"]) as served:
        left, done = served.openai.batches.list().data
        ended = served.wait(left.id)
        assert (done.status, done.metadata, ended.status) == ("completed", {"kept": "yes"},
                                                              "completed")
        for batch in (done, ended):
            assert batch.request_counts.completed == 4
            assert sorted(line["custom_id"] for line in served.lines(batch.output_file_id)) == [
                "r0", "r1", "r2", "r3"]


def test_measured_rates_of_an_earlier_release_are_read(release):
    assert load_hardware("hardware.yaml").links.keys() == {"disk->cpu", "cpu->disk"}
    assert load_counts(Path("experts.json"), [4, 0], 2).counts == ((600, 20, 0, 80), ())
    assert cache_dir() == Path.cwd() / "cache"
