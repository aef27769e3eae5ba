"""The C ABI of the CPU kernels: one table, from which both sides are generated.

setup.py writes `header` for the C++ sources; `structs` returns the ctypes structures for
`kernels.cpu.library`. `FINGERPRINT` identifies the table: a field that is moved, renamed or retyped
changes it, and so does a size in config/limits.py, so a library of other sources is rejected. The
module imports nothing of the package, since setup.py runs it by its path.
"""

from __future__ import annotations

import ctypes
import hashlib
import runpy
from pathlib import Path
from types import MappingProxyType

STRUCTS = MappingProxyType({
    # GroupLayout of config/cache_layout.py; bits is 16 for plain vectors.
    "GroupLayout": "int64_t: bits groups group code_bytes nbytes",
    # MatrixLayout of config/weight_layout.py; group is 0 for MXFP4 and for 16 bits, and negative
    # for compact scales; activation_bits is 8 if matmuls quantize activations, else 16.
    "Matrix": "void*: data; int64_t: outputs inputs bits group activation_bits",
    # arguments.VariantArguments: sink_logits [heads] and offsets [sequences, heads] or null; a
    # scale of 0 is 1 / sqrt(head_dim), a softcap or a window of 0 is none. Decode attention ignores
    # the window, see DecodeAttention.
    "AttentionVariant": """const float*: sink_logits offsets; double: scale softcap;
        int64_t: window""",
    # reference.attention.prefill_attention: q [rows, heads, head_dim], k and v [key_rows, kv_heads,
    # head_dim], out contiguous as q, scores [kv_heads, key_rows] or null.
    "PrefillAttention": """const void*: q k v; void*: out; float*: scores;
        const int64_t*: lengths key_lengths;
        int64_t: dtype sequences heads kv_heads head_dim
                 q_row q_head k_row k_head v_row v_head scores_head threads;
        double: decay; AttentionVariant: variant""",
    # reference.attention.select_heavy_hitters: k and v [rows, kv_heads, head_dim], scores
    # [kv_heads, rows] or null, cuts [sequences, 3], slots as CacheLayout of config/cache_layout.py,
    # with values slots_kind elements after their keys; kept_scores, positions and ranks [sequences,
    # kv_heads, num_slots] are contiguous.
    "SelectHeavyHitters": """const void*: k v; const float*: scores; const int64_t*: cuts;
        void*: slots; float*: kept_scores; int32_t*: positions ranks;
        GroupLayout: key_layout value_layout;
        int64_t: dtype sequences kv_heads head_dim num_slots
                 k_row k_head v_row v_head scores_head
                 slots_kind slots_sequence slots_head slots_slot mean sinks threads""",
    # reference.attention.decode_attention: q [sequences, heads, head_dim], k and v [sequences,
    # kv_heads, head_dim], out like q, contiguous, metadata [4, sequences], contiguous; scores and
    # positions both or neither null; cos and sin [rope_rows, half_rotary]; a window other than 0
    # masks cached positions outside of it; factor and shift [kv_heads, head_dim] of smoothed keys,
    # with ranks, or null.
    "DecodeAttention": """const void*: q k v; void*: out slots; const int32_t*: metadata;
        float*: scores; int32_t*: positions ranks; const float*: cos sin factor shift;
        int64_t*: written_slots; GroupLayout: key_layout value_layout;
        int64_t: dtype sequences heads kv_heads head_dim num_slots rope_rows half_rotary
                 q_row q_head k_row k_head v_row v_head
                 slots_kind slots_sequence slots_head slots_slot mean sinks window threads;
        double: decay; AttentionVariant: variant""",
    # reference.recall.index_keys: keys [sequences, kv_heads, num_keys, width], index [sequences,
    # kv_heads, num_tiles, tile_bytes] in tiles of `IndexLayout`, spans [3, sequences] contiguous.
    "IndexKeys": """const void*: keys; void*: index; const int32_t*: spans;
        GroupLayout: key_layout;
        int64_t: dtype sequences kv_heads head_dim bits groups num_keys num_tiles
                 keys_sequence keys_head keys_slot index_sequence index_head threads""",
    # reference.recall.select_keys: metadata [2, sequences], selected [sequences, kv_heads, top_k]
    # and log_weights [sequences, kv_heads, tokens] or null, all contiguous.
    "SelectKeys": """const void*: q k index; const int32_t*: metadata;
        int32_t*: selected log_weights;
        int64_t: dtype sequences heads kv_heads head_dim bits groups num_tiles top_k tokens
                 q_row q_head k_row k_head index_sequence index_head threads;
        AttentionVariant: variant""",
    # reference.recall.recall_attention: as DecodeAttention; selected as in SelectKeys.
    "RecallAttention": """const void*: q k v; void*: out slots; const int32_t*: selected metadata;
        int64_t*: written_slots; GroupLayout: key_layout value_layout;
        int64_t: dtype sequences heads kv_heads head_dim num_slots top_k
                 q_row q_head k_row k_head v_row v_head
                 slots_kind slots_sequence slots_head slots_slot threads;
        AttentionVariant: variant""",
    # reference.recall.assign_slots: selected and slots [sequences, kv_heads, top_k], slot_of
    # and log_weights [heads, tokens] and token_of [heads, num_slots], of all heads of all
    # sequences; missing [3, heads * top_k], of which the first counts[0] of each row are written,
    # and counts [2].
    "AssignSlots": """const int32_t*: selected first_recent log_weights;
        int32_t*: slots slot_of token_of; int64_t*: missing counts;
        int64_t: sequences kv_heads top_k tokens num_slots newest threads""",
    # reference.recall.fetch_tokens: missing [3, count], slots [heads, num_slots] of token_bytes
    # each, counts [2]; pages of page_tokens tokens, head_pages per head.
    "FetchTokens": """const int64_t*: missing; void*: slots read_buffer; int64_t*: counts;
        int64_t: file direct offset missing_row count heads head_pages page_tokens token_bytes
                 page_bytes num_slots read_buffer_bytes gap max_read_pages threads""",
    # reference.attention.quantize_groups and its inverse: x [rows, length] and packed [rows,
    # nbytes]; x is float32 if it is the output.
    "QuantizeGroups": """void*: x packed; GroupLayout: layout;
        int64_t: dtype rows length x_row packed_row threads""",
    # reference.attention.linear_skinny: x [rows, inputs], weight [outputs, inputs], bias [outputs]
    # or null, out [rows, outputs]; next: another matmul of the same x, or null.
    "Linear": """const void*: x weight bias; void*: out; const Linear*: next;
        int64_t: dtype rows inputs outputs x_row weight_row out_row add threads""",
    # reference.matrix.linear_quantized: x [rows, inputs], bias [outputs] or null, out [rows,
    # outputs]; next: another matmul of the same x, with a matrix of equal bits, group and inputs;
    # invariant: the order of a row's sums must not depend on the number of rows.
    "QuantizedLinear": """const void*: x bias; void*: out; Matrix: matrix;
        const QuantizedLinear*: next;
        int64_t: dtype rows x_row out_row add invariant threads""",
    # reference.matrix.unpack_rows: rows [count], out [count, inputs].
    "UnpackRows": "const int64_t*: rows; void*: out; Matrix: matrix; int64_t: dtype count threads",
    # reference.matrix.quantize_matrix: weight [outputs, inputs], importance [inputs] or null.
    "QuantizeMatrix": """const void*: weight; const float*: importance; Matrix: matrix;
        int64_t: dtype weight_row search threads""",
    # reference.blocks.repack: blocks [.., row_bytes] of GGUF type `ggml_type`; rows [outputs] are
    # indices of blocks, or null for all in order; non_finite: the number of tiles with non-finite
    # scales or zero points.
    "Repack": """const void*: blocks; const int64_t*: rows; Matrix: matrix; int64_t*: non_finite;
        int64_t: ggml_type row_bytes threads""",
    # reference.layers.norm: x and out [rows, width], which may be the same, weight and bias [width]
    # or null; not centered: RMSNorm.
    "Norm": """const void*: x weight bias; void*: out;
        int64_t: dtype rows width x_row out_row centered threads; double: eps""",
    # reference.layers.rotate: x [rows, heads, head_dim], cos and sin [rows, half_rotary]
    # contiguous, null if half_rotary is 0; factor, shift and mean [kv_heads, head_dim] contiguous,
    # the last two or all null; offsets [rows, heads] with mean.
    "Rotate": """void*: x; const float*: cos sin factor shift mean; float*: offsets;
        int64_t: dtype rows heads kv_heads head_dim half_rotary x_row x_head threads""",
    # reference.layers.activate: x [rows, width], factor like x or null; function by `ACTIVATIONS`.
    "Activate": """void*: x; const void*: factor;
        int64_t: dtype function rows width x_row factor_row threads""",
    # reference.layers.gated_delta_net: mixed [rows, conv_size], beta and step [rows,
    # value_heads], out [rows, value_heads, value_dim] contiguous, states [.., state_size], of which
    # `sequences` [count] are used, for `lengths` [count] rows each; conv [conv_size, kernel],
    # log_decay and step_bias [value_heads], contiguous.
    "GatedDeltaNet": """const void*: mixed beta step; void*: out; float*: states;
        const void*: conv log_decay step_bias; const int64_t*: sequences lengths;
        int64_t: dtype count key_heads value_heads key_dim value_dim kernel
                 mixed_row beta_row step_row states_row threads""",
    # reference.layers.route: x [rows, hidden], router [num_experts, hidden], bias [num_experts] or
    # null, ids and routing_weights [rows, per_token] contiguous.
    "Route": """const void*: x router bias; int64_t*: ids; float*: routing_weights;
        int64_t: rows hidden num_experts per_token x_row router_row normalize threads""",
    # An expert's weights: of 16 bits, contiguous, or quantized; gate.data is null for a missing
    # expert. Biases [outputs] or null.
    "Expert": "Matrix: gate up down; const void*: gate_bias up_bias down_bias",
    # reference.layers.experts: x [rows, hidden], ids and routing_weights [rows, per_token]
    # contiguous, experts [num_experts], sums [rows, hidden]; experts with more than max_rows tokens
    # are skipped; limit: 0 to use `function`.
    "Experts": """const void*: x; const int64_t*: ids; const float*: routing_weights;
        float*: sums;
        const Expert*: experts;
        int64_t: rows per_token num_experts max_rows function x_row sums_row threads;
        double: slope limit""",
    # A captured call: the number of one of `OPERATIONS`, and its struct. And a list of calls.
    "CapturedCall": "int64_t: operation; const void*: arguments",
    "Replay": "const CapturedCall*: calls; int64_t: count",
})
"""Fields of each struct by C type. Strides are in elements, and named after the dimension that they
step along; the last dimension is contiguous."""

OPERATIONS = MappingProxyType({
    "norm": "Norm", "rotate": "Rotate", "activate": "Activate",
    "decode_attention": "DecodeAttention",
    "index_keys": "IndexKeys", "select_keys": "SelectKeys", "recall_attention": "RecallAttention",
    "linear_skinny": "Linear", "linear_tiled": "Linear", "linear_float32": "Linear",
    "linear_quantized": "QuantizedLinear",
})
"""Operations that can be captured, with their structs; numbered in this order."""

ACTIVATIONS = ("relu", "silu", "gelu", "gelu_tanh")
"""Functions of `activate`; numbered in this order."""

_CTYPES = {"int64_t": ctypes.c_int64, "double": ctypes.c_double}


def fields(struct: str) -> list[tuple[str, str]]:
    """Return (C type, name) of each field of a struct, in order."""
    return [(kind.strip(), name) for part in STRUCTS[struct].split(";")
            for kind, _, names in [part.partition(":")] for name in names.split()]


def _sizes() -> dict[str, int]:
    """Return the sizes in config/limits.py that the C++ sources use, by name."""
    limits = runpy.run_path(str(Path(__file__).parents[1] / "config" / "limits.py"))
    return {name: limits[name] for name in limits["CPP_CONSTANTS"]}


SIZES = _sizes()
FINGERPRINT = hashlib.sha256(repr(([(name, fields(name)) for name in STRUCTS], SIZES,
                                   list(OPERATIONS.items()), ACTIVATIONS)).encode()
                             ).hexdigest()[:16]


def header() -> str:
    """Return the text of the C++ header `abi.h`."""
    lines = ["// Written by setup.py from kernels/abi.py and config/limits.py.", "#pragma once",
             "#include <cstdint>", f'#define H2O_ABI "{FINGERPRINT}"',
             *(f"constexpr int {name} = {size};" for name, size in SIZES.items()),
             *(f"enum : int64_t {{ {', '.join(name.upper() for name in names)} }};"
               for names in (OPERATIONS, ACTIVATIONS))]
    for struct in STRUCTS:
        members = "".join(f"    {kind} {name};\n" for kind, name in fields(struct))
        lines.append(f"struct {struct} {{\n{members}}};")
    return "\n".join(lines) + "\n"


def structs() -> dict[str, type[ctypes.Structure]]:
    """Return a ctypes structure for each of `STRUCTS`, by name."""
    types: dict[str, type[ctypes.Structure]] = {}
    for struct in STRUCTS:
        known = _CTYPES | types
        types[struct] = type(struct, (ctypes.Structure,), {"_fields_": [
            (name, ctypes.c_void_p if kind.endswith("*") else known[kind])
            for kind, name in fields(struct)]})
    return types
