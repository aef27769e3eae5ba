"""Quality of a stream by position: ``stream_quality.py --input-path FILE.jsonl ...``.

One long text of joined articles is scored token by token with each cache, far past the context that
the model was trained on. Measured are perplexity, ms/token and memory by segment. The full cache
runs until it fails. Bad flags are refused before torch is loaded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import (
    ENGINE,
    WITHOUT_PLAN,
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_from_csv,
    check_outputs_writable,
    check_placed,
    command_flags,
    parse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import csv_flag, flag, from_csv_flag, plot_flag
from flexgen_h2o.config.h2o import H2OConfig
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.rows import collect_rows, read_csv
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.metrics.figures import LINES, check_plot, new_figure, save
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.free_memory import resident_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import articles_flag, perplexity, read_articles
from plots import log_scale

_SCORES = {"h2o": "sum", "h2o-mean": "mean", "h2o-decay": "decay"}
_POLICIES = (*_SCORES, "sink-window", "window", "full")
_SHARED = (*ENGINE, "num_window_length", "num_heavy_hitter_tokens")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "num_window_length": 512}
# Tokens are computed one by one, so a larger chunk would only reserve memory.
_ONE_BY_ONE = {"gpu_batch_size": 1, "prefill_chunk": 1}
_ENDS = 3
"""Segments that define the initial perplexity. The same number far above it is a failure."""
# The full cache has no sizes, and a refused cache has no figures.
_SIZES = ("budget_tokens", "heavy_tokens", "recent_tokens", "sink_tokens")
_MEASURED = ("nll_mean", "perplexity", "ms_per_token_median", "ms_per_token_p95", "cached_tokens",
             "kv_cache_bytes")
COLUMNS = (*ORIGIN, "device", "model", "dtype", "policy", *_SIZES, "positions",
           "trained_positions", "position", "tokens", *_MEASURED, "process_bytes", "reason")
_TEXTS = (*ORIGIN, "device", "model", "dtype", "policy", "positions", "reason")


@dataclass(frozen=True)
class Streamed:
    """One cache to measure.

    `h2o` is None for the full cache, which has a capacity of `max_tokens` tokens. The cache has
    failed when several segments in a row have `blow_up` times the perplexity of the first ones.
    """

    policy: str
    h2o: H2OConfig | None
    max_tokens: int
    blow_up: float

    def open_stream(self, llm) -> AbstractContextManager:
        """Open the stream. It may exceed the model's positions, because this is measured."""
        if self.h2o is None:
            return llm.stream(max_tokens=self.max_tokens, past_context=True)
        return llm.stream()

    def cells(self) -> dict[str, object]:
        """Return the columns of a row that describe the cache."""
        if self.h2o is None:
            return {"policy": self.policy, **dict.fromkeys(_SIZES), "positions": "original"}
        heavy, recent, sinks = (getattr(self.h2o, f"{part}_tokens")
                                for part in ("heavy", "recent", "sink"))
        sizes = (heavy + recent + sinks, heavy, recent, sinks)
        return {"policy": self.policy, **dict(zip(_SIZES, sizes, strict=True)),
                "positions": self.h2o.positions}


@dataclass(frozen=True, kw_only=True)
class StreamQualityOptions:
    """The checked flags; `run` holds those shared with `generate`. Lengths are in tokens."""

    run: RunConfig
    input_path: str | None = articles_flag()
    tokens: int = flag("int", 32_000, ge=2, help="tokens to stream")
    piece: int = flag("int", 500, ge=2, help="tokens of a row")
    policies: tuple[str, ...] = flag(
        "words", ("h2o", "sink-window", "full"), choices=_POLICIES, metavar="POLICY",
        help=f"caches to measure: {', '.join(_POLICIES)}",
    )
    full_max_tokens: int | None = flag(
        "int", None, ge=2, shown="--tokens", help="tokens to stream through the full cache",
    )
    blow_up: float = flag(
        "float", 10.0, gt=1,
        help="a cache has failed after three pieces in a row whose perplexity is this factor over "
        "the first pieces'",
    )
    csv: str | None = csv_flag("piece")
    plot: str | None = plot_flag("both figures against position")
    from_csv: str | None = from_csv_flag()

    def __post_init__(self) -> None:
        check_flags(self)
        if (self.input_path is None) == (self.from_csv is None):
            raise UserError("give --input-path, a .jsonl file of articles, or --from-csv")
        check_placed(self.run)
        if len(set(self.policies)) < len(self.policies):
            raise UserError("--policies names a cache twice")
        if self.run.num_heavy_hitter_tokens is not None and not _SCORES.keys() & {*self.policies}:
            raise UserError("--num-heavy-hitter-tokens has no effect without h2o: leave it out")
        if self.full_max_tokens is not None and "full" not in self.policies:
            raise UserError("--full-max-tokens has no effect without full: leave it out")
        for policy in self.policies:
            self.config(policy)  # checks that the sizes leave recent tokens
        if self.plot is not None:
            check_plot("--plot", self.plot)
        check_files(self, ("input_path", "from_csv", "csv", "plot"))

    def config(self, policy: str) -> RunConfig:
        """Return the run with one cache; positions roll in caches that evict."""
        if policy == "full":
            return replace(self.run, num_window_length=None, num_heavy_hitter_tokens=None)
        rolling = replace(self.run, enable_position_rolling=True)
        if policy in _SCORES:
            return replace(rolling, eviction="h2o", score=_SCORES[policy])
        return replace(rolling, eviction=policy, num_heavy_hitter_tokens=None)

    def streamed(self, policy: str) -> Streamed:
        """Return one cache to measure."""
        max_tokens = self.tokens
        if policy == "full" and self.full_max_tokens is not None:
            max_tokens = min(max_tokens, self.full_max_tokens)
        return Streamed(policy, self.config(policy).h2o(), max_tokens, self.blow_up)


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(StreamQualityOptions, names=_SHARED, **WITHOUT_PLAN,
                      **{name: {"shown": value} for name, value in _DEFAULTS.items()}),
        prog="python benchmarks/studies/stream_quality.py", show_all=True,
        description="Perplexity and ms/token by position in one endless text.")


def parse_args(argv: Sequence[str] | None = None) -> StreamQualityOptions:
    """Parse flags into checked `StreamQualityOptions`. Raises `UserError`."""
    stream_flags, shared = parse(argv, parser(), StreamQualityOptions)
    check_from_csv([*stream_flags, *shared])
    options = StreamQualityOptions(run=RunConfig(**_DEFAULTS | _ONE_BY_ONE | shared),
                                   **stream_flags)
    if "num_window_length" in shared and {*options.policies} == {"full"}:
        raise UserError("--num-window-length has no effect on the full cache: leave it out")
    return options


def run(options: StreamQualityOptions) -> None:
    """Measure, or read measured rows; write the files and print the table."""
    check_outputs_writable(options, "csv", "plot")
    if options.from_csv is None:
        text = "\n\n".join(read_articles(options.input_path))
        rows = collect_rows(options.csv, COLUMNS, measure_all(options, text))
    else:
        rows = read_rows(options.from_csv)
    print_stdout(table(rows))
    if options.plot is not None:
        with catch_write_errors("--plot", options.plot):
            draw(rows, options.plot)


def measure_all(options: StreamQualityOptions, text: str) -> Iterator[dict[str, object]]:
    """Stream the text through every cache, and yield the rows of one after the other."""
    tokens: list[int] | None = None
    todo = [options.streamed(policy) for policy in options.policies]
    with ProgressBar(total=sum(streamed.max_tokens for streamed in todo), unit="token",
                     disable=None) as bar:
        for streamed in todo:
            bar.set_description(streamed.policy)
            with open_llm(options.config(streamed.policy), progress=False) as llm:
                if tokens is None:
                    tokens = _tokens(llm, text, options)
                yield from measure(llm, streamed, tokens, piece=options.piece,
                                   on_segment=bar.update)


def _tokens(llm, text: str, options: StreamQualityOptions) -> list[int]:
    """Return the first ``--tokens`` token ids of the text."""
    if llm.tokenizer is None:
        raise UserError(f"{options.run.model} has no tokenizer here, and articles are text")
    # verbose=False suppresses a warning that the text is longer than the model's context.
    tokens = list(llm.tokenizer(text, verbose=False)["input_ids"])
    if len(tokens) < options.tokens:
        raise UserError(f"--input-path has {len(tokens)} tokens and --tokens is "
                        f"{options.tokens}: lower it")
    return tokens[: options.tokens]


def measure(llm, streamed: Streamed, tokens: Sequence[int], *, piece: int,
            on_segment: Callable[[int], None] = lambda _: None) -> Iterator[dict[str, object]]:
    """Stream the tokens, and yield a row for each segment by `COLUMNS`.

    A cache that fails stops early, and the last row has the reason. A full cache may also be
    refused because it does not fit in memory: then a row without figures has the reason. A
    `UserError` of another cache is raised.

    `piece`: tokens of a row. `on_segment`: called with the tokens of each segment when it is done.
    """
    for row in _segments(llm, streamed, tokens, piece, on_segment):
        yield {**origin(), **streamed.cells(),
               "trained_positions": llm.model_config.plain_positions, **row}


def _segments(llm, streamed: Streamed, tokens: Sequence[int], piece: int,
              on_segment: Callable[[int], None]) -> Iterator[dict[str, object]]:
    """Yield the cells of each row that change from row to row."""
    log_probs: list[list[float]] = []
    position, refused = 0, None
    try:
        with streamed.open_stream(llm) as stream:
            for start in range(0, min(len(tokens), streamed.max_tokens), piece):
                part = tokens[start : min(start + piece, streamed.max_tokens)]
                log_probs.append(stream.loglikelihood(part))
                position = start + len(part)
                reason = _failure(log_probs, streamed.blow_up)
                if not reason and streamed.max_tokens == position < len(tokens):
                    reason = f"stopped at {position} tokens, as asked"
                on_segment(len(part))
                yield {**_figures(log_probs[-1], stream), "position": position, "reason": reason}
                if reason:
                    return
    except UserError as error:
        if streamed.h2o is not None:
            raise
        refused = " ".join(str(error).split())
    if refused is not None:
        yield {**dict.fromkeys(("device", "model", "dtype"), ""), **dict.fromkeys(_MEASURED),
               "tokens": 0, "process_bytes": resident_bytes(), "position": position,
               "reason": refused}


def _failure(log_probs: Sequence[Sequence[float]], blow_up: float) -> str:
    """Return why a cache with these log-probabilities has failed; empty if it has not."""
    if len(log_probs) < 2 * _ENDS:
        return ""
    limit = blow_up * perplexity(log_probs[:_ENDS])
    last = [perplexity([text]) for text in log_probs[-_ENDS:]]
    # Infinite and NaN values are failures too.
    if any(math.isfinite(value) and value <= limit for value in last):
        return ""
    return f"perplexity over {blow_up:g} x the first {_ENDS} pieces', {_ENDS} pieces in a row"


def _figures(log_probs: Sequence[float], stream) -> dict[str, object]:
    stats: RunStats = stream.stats
    median, p95 = stats.latency_p50_seconds, stats.latency_p95_seconds
    return {
        **{name: getattr(stats, name) for name in ("device", "model", "dtype")},
        "tokens": len(log_probs), "nll_mean": -fmean(log_probs),
        "perplexity": perplexity([log_probs]),
        "ms_per_token_median": median and 1000 * median, "ms_per_token_p95": p95 and 1000 * p95,
        "cached_tokens": stream.cached_tokens, "process_bytes": resident_bytes(),
        "kv_cache_bytes": stats.kv_cache_bytes,
    }


def read_rows(path: str) -> list[dict[str, object]]:
    """Read rows of a CSV file of an earlier run. Raises `UserError`."""
    rows = read_csv(path, (COLUMNS,), texts=_TEXTS, may_lack=(*_SIZES, *_MEASURED))
    if not rows:
        raise UserError(f"--from-csv {path} has no rows")
    return rows


def by_policy(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """Group rows by policy, in their order."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["policy"], []).append(row)
    return groups


def table(rows: Sequence[dict]) -> str:
    """Return aligned lines, one per cache: its first and last segments, and the reason to end."""
    head = ("cache", "cached", "position", "perplexity first", "last", "ms/token first", "last",
            "process MB first", "last", "stopped early")
    body = []
    for policy, its in by_policy(rows).items():
        measured = [row for row in its if row["tokens"]]
        ends = (measured[:_ENDS], measured[-_ENDS:])
        cached = f"{measured[-1]['cached_tokens']:.0f}" if measured else "-"
        body.append((policy, cached, f"{its[-1]['position']:.0f}",
                     *map(_perplexity, ends),
                     *(_mean(part, "ms_per_token_median", 1) for part in ends),
                     *(_mean(part, "process_bytes", 1e-6) for part in ends), its[-1]["reason"]))
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]),
                                *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]]).rstrip()
                     for line in (head, *body))


def _perplexity(rows: Sequence[dict]) -> str:
    """Return the perplexity over all tokens of the """
    if not rows:
        return "-"
    nats = math.fsum(row["nll_mean"] * row["tokens"] for row in rows)
    return f"{perplexity([[-nats / sum(row['tokens'] for row in rows)]]):.4g}"


def _mean(rows: Sequence[dict], column: str, scale: float) -> str:
    values = [row[column] for row in rows if row[column] is not None]
    return f"{scale * fmean(values):.4g}" if values else "-"


_MARKS = 12  # markers on the longest line


def draw(rows: Sequence[dict], path: str) -> None:
    """Draw rows to a file, which is written atomically.

    A cross marks the end of a cache that stopped early. Raises OSError if the file cannot be
    written.
    """
    figure = new_figure(11, 4.8)
    left, right = figure.subplots(1, 2)
    trained, end = rows[0]["trained_positions"], max(row["position"] for row in rows)
    policies = by_policy(rows)
    mark_every = max(1, max(map(len, policies.values())) // _MARKS)
    for axes, column in ((left, "perplexity"), (right, "ms_per_token_median")):
        for policy, its in policies.items():
            _line(axes, policy, its, column=column, mark_every=mark_every)
        if trained <= end:  # further right, it would compress the lines
            axes.axvline(trained, color="0.4", linewidth=1, linestyle=(0, (6, 3)),
                         label=f"trained context, {trained:.0f} tokens")
        axes.set(xlabel="position, tokens", xlim=(0, None))
        axes.grid(color="0.9", which="both")
        axes.set_axisbelow(True)
    tokens = max(row["tokens"] for row in rows)
    left.set(ylabel=f"perplexity of {tokens:.0f} tokens (log scale)",
             title="Perplexity: lower is better")
    log_scale(left, [row["perplexity"] for row in rows if row["perplexity"] is not None])
    right.set(ylabel="ms/token, median of a piece", title="Time: lower is better",
              ylim=(0, 1.05 * right.get_ylim()[1]))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, fontsize=9)
    # The row of a refused cache has no model.
    sample = next((row for row in rows if row["tokens"]), None)
    model = "" if sample is None else f"{sample['model']}, {sample['dtype']}, "
    figure.suptitle(f"{model}one text token by token{_budget(rows)}; x: stopped early",
                    fontsize=10)
    save(figure, path)


def _line(axes, policy: str, rows: Sequence[dict], *, column: str, mark_every: int) -> None:
    """Draw the figures of one cache, with a marker every few """
    points = [(row["position"], row[column]) for row in rows
              if row[column] is not None and math.isfinite(row[column])]
    if not points:
        return
    style = LINES[policy]
    axes.plot(*zip(*points, strict=True), markersize=5, linewidth=1.6, label=policy,
              markevery=mark_every, **style)
    if rows[-1]["reason"]:
        axes.plot(*points[-1], linestyle="none", marker="x", markersize=10, markeredgewidth=2,
                  color=style["color"])


def _budget(rows: Sequence[dict]) -> str:
    """Return the size of the caches, if all caches that evict have the same size."""
    sizes = {row["budget_tokens"] for row in rows} - {None}
    return f", {sizes.pop():.0f} tokens cached" if len(sizes) == 1 else ""


main = entry_point(parse_args, run)


if __name__ == "__main__":
    sys.exit(main())
