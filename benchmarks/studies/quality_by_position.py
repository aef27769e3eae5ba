"""Why a small cache costs perplexity: nats per token over the full cache, by quarter of the text.

    python benchmarks/studies/quality_by_position.py --input-path xsum_0shot.jsonl

The articles and halves are those of `flexgen_h2o.tasks.quality`. A budget is a share of the prompt;
as the text goes on, it is an ever smaller share of what there is to remember, unless generated
tokens are left in (``evict_generated=False``).
"""

from __future__ import annotations

import argparse

from flexgen_h2o import LLM, H2OConfig, Policy
from flexgen_h2o.files.articles import choose, halves, read_articles
from flexgen_h2o.files.rows import write_csv

CACHES = {
    "full": None,
    "h2o 20 %": H2OConfig(heavy_ratio=0.1),
    "h2o 20 %, prompt only": H2OConfig(heavy_ratio=0.1, evict_generated=False),
    "h2o 40 %": H2OConfig(heavy_ratio=0.2),
    "recent 20 %, prompt only": H2OConfig(recent_ratio=0.2, evict_generated=False),
}
QUARTERS = 4


def quarters(log_probs: list[list[float]]) -> list[float]:
    """Mean negative log-likelihood per token of each quarter of the articles' second halves."""
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
    found = {}
    texts = read_articles(args.input_path)
    for name, h2o in CACHES.items():
        with LLM(args.model, policy=Policy(gpu_batch_size=args.articles), h2o=h2o,
                 dtype="float32", progress=False) as llm:
            chosen = choose(texts, lambda text, llm=llm: llm.tokenizer(text)["input_ids"],
                            articles=args.articles, min_tokens=args.min_tokens,
                            max_tokens=args.max_tokens)
            found[name] = quarters(llm.loglikelihood(halves(chosen)))
        print(name, [f"{a - b:+.3f}" for a, b in zip(found[name], found["full"], strict=True)],
              flush=True)
    rows = [{"model": args.model, "articles": args.articles, "cache": name, "quarter": quarter,
             "nats_per_token": f"{value:.4f}", "nats_over_full": f"{value - full:.4f}"}
            for name, values in found.items()
            for quarter, (value, full) in enumerate(zip(values, found["full"], strict=True), 1)]
    write_csv(args.csv, tuple(rows[0]), rows, flag="--csv")


if __name__ == "__main__":
    main()
