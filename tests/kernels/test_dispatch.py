"""The table of what multiplies on a CPU: what it says, and that operations and calibration obey."""

import math

import pytest
import torch
from helpers import kernel_internals
from helpers.kernel_cases import AVAILABLE, BUILT, SETS, prefill_case, using
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.kernels import dispatch, ops, torch_ops
from flexgen_h2o.kernels.arguments import QuantizedMatrix
from flexgen_h2o.kernels.cpu import native
from flexgen_h2o.kernels.implementations import IMPLEMENTATIONS
from flexgen_h2o.models import layers

OPERATIONS = st.sampled_from(sorted(IMPLEMENTATIONS))
ROWS = st.integers(1, 3000)


@BUILT
@pytest.mark.parametrize(("name", "operation", "rows", "chosen"), [
    ("portable", "linear", 1, "pytorch"), ("avx2", "linear", 20, "skinny"),
    ("avx2", "linear", 21, "float32"), ("avx512", "linear", 49, "float32"),
    ("avx512bf16", "linear", 32, "skinny"), ("avx512bf16", "linear", 33, "pytorch"),
    ("amx", "linear", 128, "skinny"), ("amx_emulated", "linear", 129, "tiled"),
    ("amx", "linear_quantized", 999, "codes"), ("portable", "prefill_attention", 9, "blocks")])
def test_default_implementation_of_each_isa(name, operation, rows, chosen):
    if name not in AVAILABLE:
        pytest.skip("this CPU cannot be made to choose so")
    with using(name):
        assert dispatch.select_implementation(operation, rows, torch.bfloat16, 4) == chosen
        assert dispatch.select_implementation(operation, rows, torch.float32, 4) == (
            IMPLEMENTATIONS[operation][0])
        # AMX' machines multiply float16, too.
        half = operation == "linear" and rows >= 4 and not name.startswith(("amx", "portable"))
        assert dispatch.select_implementation(operation, rows, torch.float16, 4) == (
            "float32" if half else IMPLEMENTATIONS[operation][0])


@BUILT
@given(OPERATIONS, ROWS, st.sampled_from([16, 8, 4]), st.sampled_from(SETS or [None]),
       st.dictionaries(ROWS, st.integers(0, 2), min_size=1, max_size=5))
def test_autotune_table_overrides_the_defaults(operation, rows, bits, name, by_rows):
    names = IMPLEMENTATIONS[operation]
    names_by_rows = {count: names[one % len(names)] for count, one in by_rows.items()}
    winners = {operation: {bits: names_by_rows}}
    with using(name):
        table = dispatch.select_implementation(operation, rows, torch.bfloat16, bits)
        with dispatch.use_autotune_table(winners):
            chosen = dispatch.select_implementation(operation, rows, torch.bfloat16, bits)
            assert dispatch.select_implementation(operation, rows, torch.float32, bits) == names[0]
            others = {16, 8, 4} - {bits}
            with dispatch.use_autotune_table(None):
                assert table == dispatch.select_implementation(
                    operation, rows, torch.bfloat16, bits)
        nearest = min((count for count in by_rows if count >= rows), default=max(by_rows))
        wanted = winners[operation][bits][nearest]
        possible = dispatch.available(operation, rows, torch.bfloat16)
        assert chosen == (wanted if wanted in possible else table)
        with dispatch.use_autotune_table(winners):
            for other in others:
                assert dispatch.select_implementation(operation, rows, torch.bfloat16, other) == (
                    table_of(operation, rows, other))


def table_of(operation, rows, bits):
    with dispatch.use_autotune_table(None):
        return dispatch.select_implementation(operation, rows, torch.bfloat16, bits)


@BUILT
def test_operations_run_the_chosen_implementation(monkeypatch, isa):
    """Each way of doing it is taken, and gives the same within bfloat16's rounding."""
    taken = []

    def listen(module, function, name):
        plain = getattr(module, function)

        def call(*args, **options):
            taken.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(module, function, call)

    for module, function, name in (
            (native, "linear_skinny", "skinny"), (native, "linear_float32", "float32"),
            (native, "linear_quantized", "codes"),
            (ops, kernel_internals.UNPACKED_MATMUL, "unpacked"),
            (native, "prefill_attention", "blocks"), (torch_ops, "sdpa_prefill_attention", "sdpa")):
        listen(module, function, name)
    torch.default_generator.manual_seed(1)
    case = prefill_case([9, 4], dtype=torch.bfloat16) | {"scores": None, "key_lengths": None}
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(20, 64).bfloat16()
    layout = MatrixLayout(20, 64, 8)
    matrix = QuantizedMatrix(ops.quantize_matrix(weight, layout), layout)
    calls = {"linear": (16, lambda: layers.linear(x, weight)),
             "linear_quantized": (8, lambda: layers.linear(x, matrix)),
             "prefill_attention": (16, lambda: ops.prefill_attention(**case))}
    for operation, (bits, call) in calls.items():
        results = []
        for name in dispatch.available(operation, 9, torch.bfloat16):
            taken.clear()
            with dispatch.use_autotune_table({operation: {bits: {9: name}}}):
                results.append(call())
            assert taken == ([] if name == "pytorch" else [name])
        taken.clear()
        results.append(call())
        chosen = dispatch.select_implementation(operation, 9, torch.bfloat16, bits)
        assert taken == ([] if chosen == "pytorch" else [chosen])
        for other in results[1:]:
            bound = 2**-7 * math.sqrt(64) * results[0].abs().max().item()
            torch.testing.assert_close(other, results[0], rtol=0, atol=bound)
