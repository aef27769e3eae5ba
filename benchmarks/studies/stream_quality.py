"""Quality of a stream by position: ``stream_quality.py --input-path FILE.jsonl ...``.

One long text of joined articles is scored token by token with each cache, far past the context that
the model was trained on. Measured are perplexity, ms/token and memory by segment. The full cache
runs until it fails. Bad flags are refused before torch is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import stream_segments as segments
from stream_segments import Streamed

from flexgen_h2o.cli import measurements
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import (
    ENGINE,
    WITHOUT_PLAN,
    Parser,
    build_parser,
    check_flags,
    check_from_csv,
    check_outputs_writable,
    check_placed,
    command_flags,
    parse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors

sys.path.insert(0, str(Path(__file__).parents[1]))
from articles import articles_flag, read_articles

_SCORES = {"h2o": "sum", "h2o-mean": "mean", "h2o-decay": "decay"}
_POLICIES = (*_SCORES, "sink-window", "window", "full")
_SHARED = (*ENGINE, "num_window_length", "num_heavy_hitter_tokens")
_DEFAULTS = {"model": "smollm2-135m", "dtype": "float32", "num_window_length": 512}
# Tokens are computed one by one, so a larger chunk would only reserve memory.
_ONE_BY_ONE = {"gpu_batch_size": 1, "prefill_chunk": 1}


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
    csv: str | None = measurements.csv_flag("piece")
    plot: str | None = measurements.plot_flag("both figures against position")
    from_csv: str | None = measurements.from_csv_flag()

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
        measurements.check_outputs(self)

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
    rows = (measure_all(options, "\n\n".join(read_articles(options.input_path)))
            if options.from_csv is None else segments.read_rows(options.from_csv))
    print_stdout(segments.table(rows))
    if options.plot is not None:
        with catch_write_errors("--plot", options.plot):
            segments.draw(rows, options.plot)


def measure_all(options: StreamQualityOptions, text: str) -> list[dict[str, object]]:
    """Stream the text through every cache. Rows are written to ``--csv`` one by one."""
    return measurements.collected(options.csv, segments.COLUMNS, _rows(options, text))


def _rows(options: StreamQualityOptions, text: str) -> Iterator[dict[str, object]]:
    """Yield the rows of one cache after the other."""
    tokens: list[int] | None = None
    todo = [options.streamed(policy) for policy in options.policies]
    with ProgressBar(total=sum(streamed.max_tokens for streamed in todo), unit="token",
                     disable=None) as bar:
        for streamed in todo:
            bar.set_description(streamed.policy)
            with open_llm(options.config(streamed.policy), progress=False) as llm:
                if tokens is None:
                    tokens = _tokens(llm, text, options)
                yield from segments.measure(llm, streamed, tokens, piece=options.piece,
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


main = entry_point(parse_args, run)


if __name__ == "__main__":
    sys.exit(main())
