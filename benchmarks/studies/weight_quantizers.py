"""Loss of 4-bit weights from one 16-bit source: this engine's quantizer and llama.cpp's Q4_K_M.

    python benchmarks/studies/weight_quantizers.py FOLDER --like FILE.gguf --csv rows.csv

FOLDER is the source, a Hugging Face model in safetensors. FILE is any GGUF file of the same shape,
whose metadata and tensor names are used for the file that llama.cpp quantizes. This engine scores
all of them on the articles of `check_quality.py`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from gguf_decode import print_row

from flexgen_h2o import LLM, Policy
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.metrics.provenance import cpu_model, origin
from flexgen_h2o.models.checkpoint_files import open_checkpoint
from flexgen_h2o.models.gguf.checkpoint import mapped
from flexgen_h2o.models.gguf.header import read_header

sys.path.insert(0, str(Path(__file__).parents[1]))
import check_quality as gate
from articles import compare_to_full, read_articles

COLUMNS = ("date", "version", "commit", "host", "cpu", "source", "weights", "bits_per_weight",
           "scored_tokens", "loss_nats", "loss_low", "loss_high", "kl_nats", "top1_agreement")


def write_source(folder: Path, like: Path, out: Path) -> None:
    """Write the source as a GGUF file in BF16, with the metadata of another one."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(like)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind,
                             field.types[-1] if kind == GGUFValueType.ARRAY else None)
    header = read_header(like)
    at = {tensor.offset: name for name, tensor in header.tensors.items()}
    hub_names = {at[tensor.offset]: hub
                 for hub, tensor in mapped(header, fuse_experts=False).items()}
    with open_checkpoint(folder) as checkpoint:
        for tensor in reader.tensors:
            values = torch.empty(checkpoint.info(hub_names[tensor.name]).shape)
            checkpoint.read(hub_names[tensor.name], values)
            if values.dim() == 1:
                writer.add_tensor(tensor.name, values.numpy())
            else:
                writer.add_tensor(tensor.name,
                                  values.bfloat16().view(torch.uint8).numpy().astype(np.uint8),
                                  raw_dtype=GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def quantize_by_llama_cpp(source: Path, out: Path) -> None:
    """Quantize a GGUF file to Q4_K_M. Raises `UserError` if llama.cpp cannot."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, torch.get_num_threads()
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), params):
        raise UserError(f"llama.cpp could not quantize {source}: see its message above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a 16-bit model")
    parser.add_argument("--like", type=Path, required=True, help="a .gguf file of the same shape")
    parser.add_argument("--articles", type=int, default=24)
    parser.add_argument("--csv", default="benchmarks/results/weight_quantizers.csv")
    args = parser.parse_args()
    texts, rows = read_articles(gate.TEXTS), CsvWriter(args.csv, COLUMNS)
    reference, full = gate.Distributions(args.articles), []

    def score(model: str, **options) -> tuple[list, float]:
        compare = reference.compare if full else reference.keep
        with LLM(model, policy=Policy(gpu_batch_size=8), dtype="bfloat16", progress=False,
                 **options) as llm:
            ids = gate.texts_of(llm, texts, "short", args.articles)
            scored = llm.score([(text[: gate.SCORED], text[gate.SCORED :]) for text in ids],
                               on_logits=compare)
            return ([text.log_probs for text in scored],
                    8 * llm.stats.weight_bytes / llm.stats.num_parameters)

    with report_partial_rows(rows), tempfile.TemporaryDirectory(dir=".") as scratch:
        plain, quantized = Path(scratch) / "source.gguf", Path(scratch) / "q4_k_m.gguf"
        write_source(args.source, args.like, plain)
        quantize_by_llama_cpp(plain, quantized)
        tensors = read_header(quantized).tensors.values()
        file_bits = 8 * sum(
            int(np.prod(tensor.shape)) // tensor.ggml_type.elements * tensor.ggml_type.nbytes
            for tensor in tensors) / sum(int(np.prod(tensor.shape)) for tensor in tensors)
        full += score(str(args.source), weight_bits=16)[0]
        four = {"weight_bits": 4, "weight_cache": None}
        for name, model, options in (
                ("Q4_K_M of llama.cpp", str(quantized), {"weight_bits": "auto"}),
                ("4 bits", str(args.source), four),
                ("4 bits, calibrated", str(args.source), four | {"calibration": gate.CALIBRATION})):
            log_probs, bits = score(model, **options)
            loss = compare_to_full(log_probs, full)
            row = {**origin(), "cpu": cpu_model(), "source": args.source.name, "weights": name,
                   "bits_per_weight": file_bits if model == str(quantized) else bits,
                   "scored_tokens": args.articles * gate.SCORED, "loss_nats": loss["delta_nats"],
                   "loss_low": loss["delta_nats_low"], "loss_high": loss["delta_nats_high"],
                   "kl_nats": reference.kl.mean().item(),
                   "top1_agreement": reference.agrees.mean().item()}
            rows.write(row)
            print_row(row)
        rows.finish()


if __name__ == "__main__":
    sys.exit(exit_status(main))
