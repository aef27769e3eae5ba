"""Loss of small caches over the full cache, in nats per token, by quarter of the text.

    python benchmarks/studies/quality_by_position.py --input-path xsum_0shot.jsonl

It uses the articles and halves of `quality.py`. A budget is a fraction of the prompt, so it
becomes a smaller fraction of the text as the text grows, unless generated tokens are not evicted
(``evict_generated=False``).
"""

from __future__ import annotations

import argparse
import sys

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.cli.command import exit_status
from flexgen_h2o.cli.values import flag_name
from flexgen_h2o.config.validation import check_int
from flexgen_h2o.files.articles import read_articles, select_articles, split_halves
from flexgen_h2o.files.rows import CsvWriter, report_partial_rows
from flexgen_h2o.files.writing import check_writable

CACHES = {
    "full": None,
    "h2o 20 %": H2OConfig(heavy_ratio=0.1),
    "h2o 20 %, prompt only": H2OConfig(heavy_ratio=0.1, evict_generated=False),
    "h2o 40 %": H2OConfig(heavy_ratio=0.2),
    "recent 20 %, prompt only": H2OConfig(recent_ratio=0.2, evict_generated=False),
}
QUARTERS = 4
COLUMNS = ("model", "articles", "cache", "quarter", "nats_per_token", "nats_over_full")


def quarters(log_probs: list[list[float]]) -> list[float]:
    """Return mean nats per token for each quarter of the articles' second halves."""
    parts: list[list[float]] = [[] for _ in range(QUARTERS)]
    for article in log_probs:
        for place, value in enumerate(article):
            parts[place * QUARTERS // len(article)].append(-value)
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--input-path", required=True)
    parser.add_argument("--articles", type=int, default=30)
    parser.add_argument("--min-tokens", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--csv", default="benchmarks/results/quality_by_position.csv")
    args = parser.parse_args()
    check_int("--articles", args.articles, ge=1)
    for name in ("min_tokens", "max_tokens"):  # each quarter of a half has at least one token
        check_int(flag_name(name), getattr(args, name), ge=2 * QUARTERS)
    check_writable("--csv", args.csv)
    full: list[float] = []
    texts, file = read_articles(args.input_path), CsvWriter(args.csv, COLUMNS)
    with report_partial_rows(file):
        for name, h2o in CACHES.items():
            with LLM(args.model, policy=Policy(gpu_batch_size=args.articles), h2o=h2o,
                     dtype="float32", progress=False) as llm:
                selected = select_articles(texts, lambda text,
                                           llm=llm: llm.tokenizer(text)["input_ids"],
                                           articles=args.articles, min_tokens=args.min_tokens,
                                           max_tokens=args.max_tokens)
                losses = quarters(llm.loglikelihood(split_halves(selected)))
            full = full or losses
            over = [a - b for a, b in zip(losses, full, strict=True)]
            print(name, [f"{ratio:+.3f}" for ratio in over], flush=True)
            for quarter, (nats, increase) in enumerate(zip(losses, over, strict=True), 1):
                file.write({"model": args.model, "articles": args.articles, "cache": name,
                            "quarter": quarter, "nats_per_token": f"{nats:.4f}",
                            "nats_over_full": f"{increase:.4f}"})
    file.finish()


if __name__ == "__main__":
    sys.exit(exit_status(main))
