"""Hardware files in YAML: round trip, and errors that name file and key."""

import functools
from pathlib import Path

import pytest
import yaml
from helpers.error_cases import refused
from helpers.selection import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.config.weight_layout import WEIGHT_BITS
from flexgen_h2o.metrics.trace import LINKS
from flexgen_h2o.planning.hardware import (
    BITS,
    HOST_LINKS,
    RECALL_RATES,
    ROWS,
    ComputeRates,
    Hardware,
    HostAttentionRates,
    RecallRates,
    linear_roofline,
    load_hardware,
    save_hardware,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "hardware"

GIGA, TERA, MICRO, NANO = 9, 12, -6, -9
"""Units of a file, as powers of ten."""

nbytes = st.integers(10**6, 10**15 - 1)


def figures(unit=0):
    """Figures of 15 digits from 1e-9 of a unit, a power of ten, to 1e9 of it."""
    return st.tuples(st.integers(10**14, 10**15 - 1), st.integers(-23, -6)).map(
        lambda parts: float(f"{parts[0]}e{parts[1] + unit}"))


def tables(keys, unit=0):
    return st.fixed_dictionaries(dict.fromkeys(keys, figures(unit)))


@st.composite
def machines(draw) -> Hardware:
    has_gpu = draw(st.booleans())
    rows = sorted(draw(st.sets(st.integers(1, 10**6), min_size=1, max_size=4)))
    return Hardware(
        name=draw(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip)),
        gpu_bytes=draw(nbytes) if has_gpu else None,
        cpu_bytes=draw(nbytes),
        disk_bytes=draw(nbytes),
        links=draw(tables(LINKS if has_gpu else HOST_LINKS, GIGA)),
        compute=ComputeRates(
            linear={bits: draw(tables(rows))
                    for bits in draw(st.sampled_from([BITS, WEIGHT_BITS]))},
            prefill_attention=draw(tables(("plain", "scored"), TERA)),
            decode_attention=draw(tables(BITS, GIGA)),
            head_seconds=draw(figures(MICRO)), elementwise=draw(figures()),
            layer_seconds=draw(figures(MICRO)), logit_seconds=draw(figures()),
            captured_layer_seconds=draw(st.none() | figures(MICRO)),
            query_seconds=draw(st.just({}) | tables(("plain", "scored"), NANO)),
            caching=draw(st.just({}) | tables(BITS))),
        host_attention=HostAttentionRates(draw(tables(BITS, GIGA)), draw(figures(MICRO)))
        if has_gpu and draw(st.booleans()) else None,
        recall=RecallRates(*(draw(figures()) for _ in RECALL_RATES)),
        interference=draw(st.floats(0, 1)), read_interference=draw(st.floats(0, 1)),
        **({} if has_gpu else {name: draw(figures(MICRO)) for name in (
            "fetch_seconds", "fetch_head_seconds")}))


@settings(max_examples=examples(100))
@given(hardware=machines())
def test_hardware_files_round_trip(tmp_path_factory, hardware):
    path = tmp_path_factory.mktemp("machines") / "machine.yaml"
    save_hardware(hardware, path)
    assert load_hardware(path) == hardware
    assert load_hardware(path).has_gpu == ("gpu_gb" in yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.stem)
def test_shipped_hardware_files_are_valid(path):
    hardware = load_hardware(path)
    assert hardware.has_gpu and set(hardware.links) == set(LINKS)
    assert all(0 < figure < 1e14 for figure in hardware.links.values())


def test_keys_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "machine.yaml"
    values = cpu() | {"recall": {"index_cost": 1.5, "gather_cost": 4, "call_overhead": 2}}
    values["compute"]["captured_layer_microseconds"] = 90
    path.write_text(yaml.safe_dump(values))
    hardware = load_hardware(path)
    values["recall"] = {"index_work": 1.5, "apart": 4, "calls": 2}
    values["compute"]["bound_layer_microseconds"] = values["compute"].pop(
        "captured_layer_microseconds")
    path.write_text(yaml.safe_dump(values))
    assert load_hardware(path) == hardware


def test_units_are_those_of_the_keys():
    t4 = load_hardware(CONFIGS / "t4.yaml")
    assert (t4.gpu_bytes, t4.cpu_bytes) == (16_000_000_000, 208_000_000_000)
    assert t4.links["cpu->gpu"] == 13.84e9
    assert t4.compute.prefill_attention["plain"] == 9.97e12
    assert t4.compute.decode_attention[16] == 79e9
    assert t4.compute.layer_seconds == 400e-6
    assert t4.host_attention.head_seconds == 1e-6


def test_the_roofline_is_bytes_at_few_rows_and_flops_at_many():
    table = linear_roofline(20e12, 200e9)
    assert set(table) == set(WEIGHT_BITS)
    assert all(tuple(column) == ROWS for column in table.values())
    assert table[16][1] == 2e9 / 200e9
    assert table[4][1] == 4.5 / 8 * 1e9 / 200e9  # scales and zeros of groups of 64 included
    assert table[8][1] == 8.5 / 8 * 1e9 / 200e9
    assert table[12][1] == 12.125 / 8 * 1e9 / 200e9  # with the exponents of groups
    assert table[16][2048] == table[4][2048] == 2 * 2048e9 / 20e12
    rows = table[8]
    assert list(rows.values()) == sorted(rows.values())


def cpu() -> dict:
    """A machine without a GPU, as its file says it."""
    return {
        "name": "small", "cpu_gb": 24, "disk_gb": 250,
        "links_gb_per_s": {"disk->cpu": 3, "cpu->disk": 6.5},
        "compute": {
            "linear_seconds_per_billion_weights": {
                bits: {1: 0.1, 64: 0.3} for bits in (16, 8, 4)},
            "prefill_attention_tflop_per_s": {"plain": 0.2, "scored": 0.15},
            "decode_attention_gb_per_s": {16: 40, 8: 30, 4: 20},
            "head_microseconds": 0.9, "elementwise_seconds_per_billion": 5,
            "layer_microseconds": 150, "logit_seconds_per_billion": 1}}


TABLE = ("compute", "linear_seconds_per_billion_weights")
ROOFLINE = {"tflop_per_s": 1, "memory_gb_per_s": 40}
HOST = {"decode_attention_gb_per_s": {16: 40, 8: 30, 4: 20}, "head_microseconds": 0.9}

# Keys, the value that is put there (DROP: none), and a word of the message.
DROP = object()
MISTAKES = {
    "unknown": (("speed",), 3, "speed"),
    "missing below": (("compute", "layer_microseconds"), DROP, "layer_microseconds"),
    "rounded with 12": (("compute", "rounded_linear_seconds_per_billion_weights"), {12: {1: 0.1}},
                        "12"),
    "other bits": ((*TABLE, 3), {1: 0.1}, "3 - at `key`"),
    "no number": (("compute", "head_microseconds"), "fast", "$.compute.head_microseconds"),
    "zero": (("links_gb_per_s", "disk->cpu"), 0, "$.links_gb_per_s"),
    "too fast": (("compute", "decode_attention_gb_per_s", 16), 1e12, "<= 1000000000"),
    "infinite": (("compute", "layer_microseconds"), float("inf"), "$.compute.layer_microseconds"),
    "enormous": (("disk_gb",), 1e300, "$.disk_gb"),
    "no name": (("name",), " ", "$.name"),
    "a link of a GPU": (("links_gb_per_s", "cpu->gpu"), 12, "'cpu->gpu'"),
    "no implementation": (("compute", "implementations"), {"linear": {16: {4: "magic"}}}, "magic"),
    "host attention": (("host_attention",), HOST, "host_attention"),
    "links of a GPU missing": (("gpu_gb",), 16, "links_gb_per_s"),
    "rows descend": ((*TABLE, 16), {64: 0.3, 1: 0.1}, "16 must list"),
    "no rows": ((*TABLE, 16), {}, "16 must list"),
    "two forms": (("compute", "linear_roofline"), ROOFLINE, "give either"),
    "no form": (TABLE, DROP, "give either")}


@pytest.mark.parametrize(("where", "value", "words"), MISTAKES.values(), ids=MISTAKES)
def test_errors_name_file_and_key(where, value, words, tmp_path):
    values = cpu()
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    assert load_hardware(path).name == "small"
    *parents, key = where
    table = functools.reduce(dict.__getitem__, parents, values)
    table.pop(key, None)
    if value is not DROP:
        table[key] = value
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    refused(lambda: load_hardware(path), str(path), words)


@pytest.mark.parametrize(("text", "words"), [
    ("name: [", "not valid YAML at line"), ("- 1\n- 2", "object"), ("", "object"),
    ("!!python/object/apply:os.getcwd []", "not valid YAML"), (None, "No such file"),
    *((f"{(CONFIGS / 't4.yaml').read_text()}\n{key}: 3\n", f"{key} is for machines without") for key
      in ("fetch_microseconds", "fetch_head_microseconds"))])
def test_invalid_hardware_files(text, words, tmp_path):
    path = tmp_path / "machine.yaml"
    if text is not None:
        path.write_text(text)
    refused(lambda: load_hardware(path), words)
