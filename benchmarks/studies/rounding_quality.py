"""Perplexity of a model with quantized matrices, with and without a search for scales.

    python benchmarks/studies/rounding_quality.py --input-path xsum_0shot.jsonl

Matrices are quantized and dequantized into copies of the model, which are measured in float32, so
that only the rounding differs. Perplexity is teacher-forced over each article after its first
token. The model itself is also measured in bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from flexgen_h2o import LLM, Policy
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.config.weight_layout import MatrixLayout
from flexgen_h2o.files.articles import read_articles, select_articles
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import check_writable
from flexgen_h2o.kernels import ops
from flexgen_h2o.kernels.matrix import QuantizedMatrix
from flexgen_h2o.metrics.provenance import source_commit
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.safetensors_io import write_safetensors
from flexgen_h2o.models.sources import checkpoint_folder

ROUNDINGS = [(12, 64, False), (8, 64, False), (8, 64, True), (4, 64, False), (4, 64, True),
             (4, 32, False), (4, 32, True)]
"""Bits, group size, and whether scales are searched."""
COLUMNS = ("date", "commit", "host", "model", "articles", "tokens", "bits", "group", "search",
           "dtype", "perplexity", "over_float32")


def write_rounded(source: Path, target: Path, bits: int, group: int, search: bool) -> None:
    """Write a copy of a Hugging Face folder in float32 with quantized and dequantized matrices."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    with open_checkpoint(source) as checkpoint:

        def chunks(name: str):
            tensor = torch.empty(checkpoint.info(name).shape)
            checkpoint.read(name, tensor)
            if tensor.dim() == 2:
                layout = MatrixLayout(*tensor.shape, bits, group)
                data = ops.quantize_matrix(tensor, layout, search=search)
                tensor = ops.unpack_rows(QuantizedMatrix(data, layout),
                                         torch.arange(len(tensor)), torch.float32)
            yield tensor

        layout = {name: (torch.float32, checkpoint.info(name).shape)
                  for name in checkpoint.names()}
        write_safetensors(target / "model.safetensors", layout, chunks)


def perplexity(folder: Path, texts: list[str], args, dtype: str = "float32") -> tuple[float, int]:
    """Return the perplexity of all tokens but the first of each article, and their number."""
    with LLM(str(folder), dtype=dtype, policy=Policy(gpu_batch_size=8), progress=False) as llm:
        selected = select_articles(texts, lambda text: llm.tokenizer(text)["input_ids"],
                                   articles=args.articles, min_tokens=args.min_tokens,
                                   max_tokens=args.max_tokens)
        scores = llm.loglikelihood([(ids[:1], ids[1:]) for ids in selected])
    count = sum(map(len, scores))
    return math.exp(-sum(map(sum, scores)) / count), count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--input-path", required=True)
    parser.add_argument("--articles", type=int, default=30)
    parser.add_argument("--min-tokens", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--csv", default="benchmarks/results/rounding_quality.csv")
    args = parser.parse_args()
    check_int("--articles", args.articles, ge=1)
    for name in ("min_tokens", "max_tokens"):
        check_int(flag_name(name), getattr(args, name), ge=2)
    check_writable("--csv", args.csv)
    file = CsvWriter(args.csv, COLUMNS)
    with report_partial_rows(file):
        for row in rows(args):
            file.write(row)
            print(*(row[name] for name in ("bits", "group", "search", "dtype")),
                  f"perplexity {row['perplexity']}, {row['over_float32']} of float32", flush=True)
    file.finish()


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Yield the rows of the model itself, then one for each copy."""
    source, texts = checkpoint_folder(args.model), read_articles(args.input_path)
    plain, count = perplexity(source, texts, args)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

    def row(bits: int, group: object, search: object, dtype: str, value: float
            ) -> dict[str, object]:
        return dict(zip(COLUMNS, (
            now, source_commit(), platform.node(), args.model, args.articles, count, bits, group,
            search, dtype, f"{value:.4f}", f"{value / plain:.4f}"), strict=True))

    yield row(16, "", "", "float32", plain)
    yield row(16, "", "", "bfloat16", perplexity(source, texts, args, "bfloat16")[0])
    for bits, group, search in ROUNDINGS:
        with tempfile.TemporaryDirectory() as folder:
            rounded = Path(folder) / "rounded"
            write_rounded(source, rounded, bits, group, search)
            yield row(bits, group, search, "float32", perplexity(rounded, texts, args)[0])


if __name__ == "__main__":
    sys.exit(exit_status(main))
