"""Stream conversations: ``flexgen-h2o stream --input-path FILE.jsonl ...``.

All conversations of a file go through one cache of fixed size, as one endless text. The text is
printed as it comes. Invalid flags and files are refused before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import (
    ENGINE,
    WITHOUT_PLAN,
    Parser,
    build_parser,
    check_files,
    check_flags,
    check_outputs_writable,
    check_placed,
    command_flags,
    parse,
    refuse,
)
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import csv_flag, flag, flag_name
from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.readers import Turn, read_conversations
from flexgen_h2o.files.rows import CsvWriter, JsonlWriter, report_partial_rows
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.files.writing import catch_write_errors
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.free_memory import resident_bytes

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.sessions import Streamer, StreamingSession

FIGURES = ("question_id", "turn", "position", "prompt_tokens", "generated_tokens", "cached_tokens",
           "prefill_seconds", "decode_ms_per_token", "process_bytes", "kv_cache_bytes")
COLUMNS = (*ORIGIN, "device", "model", "dtype", *FIGURES)

_CACHE = ("eviction", "num_heavy_hitter_tokens", "num_window_length", "score", "score_decay",
          "sink_tokens", "enable_position_rolling")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
             "no_repeat_ngram_size", "min_new_tokens", "no_generation_config", "ignore_eos",
             "seed")
_SHARED = (*ENGINE, "attn_sparsity", "prefill_chunk", "gen_len", *_CACHE, *_SAMPLING)
_WINDOW = 512
_DEFAULTS: dict[str, Any] = {"model": "smollm2-135m", "gen_len": 256}
_PROMPT = "USER: {}\n\nASSISTANT: "  # as in the H2O repository


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The checked flags; `run` holds those shared with `generate`. Lengths are in tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="conversations, a JSON object per line: the list `turns`, as in MT-Bench",
    )
    sample_num: int | None = flag(
        "int", None, ge=1, shown="all", help="use only the first N conversations",
    )
    chat_template: bool = flag(
        "bool", False, help="put each turn into the model's chat template",
    )
    enable_h2o_generation: bool = flag(
        "bool", False,
        help="evict tokens from the cache as --eviction says; otherwise the cache keeps all tokens",
    )
    max_tokens: int | None = flag(
        "int", None, ge=1, shown="the model's positions",
        help="capacity of the full cache in tokens",
    )
    past_context: bool = flag(
        "bool", False,
        help="continue past the positions that the model was trained on, to see what happens; not "
        "with --enable-position-rolling",
    )
    output_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="write a line per turn; an existing file is replaced. Until the run ends, the file is "
        "FILE.jsonl.partial",
    )
    csv: str | None = csv_flag("turn")
    verbose: int = flag(
        "int", 2, choices=(0, 1, 2),
        help="print nothing (0), a summary (1), or also the conversation as it comes (2)",
    )

    def __post_init__(self) -> None:
        check_flags(self)
        if self.input_path is None:
            raise UserError("give --input-path, a .jsonl file of conversations")
        check_placed(self.run)
        if self.enable_h2o_generation:
            if self.max_tokens is not None:
                raise UserError("--max-tokens is the capacity of the full cache: leave it or "
                                "--enable-h2o-generation out")
            if self.run.enable_position_rolling and self.past_context:
                raise UserError("--past-context has no effect with --enable-position-rolling: "
                                "leave it out")
        elif self.past_context and self.max_tokens is None:
            raise UserError("--past-context needs --max-tokens, the capacity of the full cache")
        check_files(self, ("input_path", "output_path", "csv"))

    def sampling(self, chat_end_tokens: tuple[int, ...]) -> dict[str, Any]:
        """Return fields of `SamplingParams`. Turns end at end tokens, unless ``--ignore-eos``."""
        ends = chat_end_tokens if self.chat_template and chat_end_tokens else None
        return asdict(self.run.sampling()) | {"eos_token_id": -1 if self.run.ignore_eos else ends}


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        command_flags(
            StreamOptions, names=_SHARED, model={"shown": _DEFAULTS["model"]},
            gen_len={"help": "maximum number of new tokens per turn",
                     "shown": _DEFAULTS["gen_len"]},
            num_window_length={"shown": f"{_WINDOW} with --enable-h2o-generation"},
            prefill_chunk={"shown": 256},
            sink_tokens={"help": "first tokens of the stream to always keep"}, **WITHOUT_PLAN),
        command="stream", show_all=True,
        description="Answer conversations one after the other through one cache of fixed size.")


def parse_args(argv: Sequence[str] | None = None) -> StreamOptions:
    """Parse flags into checked `StreamOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), StreamOptions)
    if options.get("enable_h2o_generation"):
        if shared.get("eviction") == "full":
            raise UserError("--enable-h2o-generation evicts: leave --eviction full out")
        if not shared.keys() & {"num_window_length", "num_heavy_hitter_tokens"}:
            shared["num_window_length"] = _WINDOW
    else:
        evicting = [name for name in shared if shared[name] != "full"]
        refuse(evicting, _CACHE, "has no effect on the full cache: add --enable-h2o-generation")
    run = RunConfig.from_mapping(_DEFAULTS | {"gpu_batch_size": 1} | shared)
    return StreamOptions(run=run, **options)


def run(options: StreamOptions) -> None:
    """Stream all conversations. Print the text and a summary; write the files turn by turn."""
    check_outputs_writable(options, "output_path", "csv")
    assert options.input_path is not None
    conversations = read_conversations(options.input_path)[: options.sample_num]
    turns = [turn for conversation in conversations for turn in conversation]
    # Progress bars would break into the text.
    with open_llm(options.run, progress=None if options.verbose == 1 else False) as llm:
        if llm.tokenizer is None:
            raise UserError(f"{options.run.model} has no tokenizer here, and turns are text")
        streamer = Printer(llm.tokenizer) if options.verbose == 2 else None
        with (_encoder(llm.tokenizer, options.chat_template) as encode,
              llm.stream(max_tokens=_capacity(llm, options), past_context=options.past_context)
              as stream):
            _write(answer(stream, turns, encode, streamer=streamer,
                          sampling=options.sampling(llm.chat_end_tokens)), options)


def _capacity(llm: LLM, options: StreamOptions) -> int | None:
    """Return the capacity of the full cache in tokens; None for an evicting cache."""
    if options.enable_h2o_generation:
        return None
    return options.max_tokens or llm.model_config.plain_positions


@contextmanager
def _encoder(tokenizer: Any, chat_template: bool) -> Iterator[Callable[[str], str | list[int]]]:
    """Yield a function from the text of a turn to its prompt: text or token ids."""
    if not chat_template:
        yield _PROMPT.format
        return
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template: leave --chat-template out")
    with ChatRenderer(tokenizer) as renderer:
        # The template already contains the special tokens.
        yield lambda text: tokenizer(renderer.render([{"role": "user", "content": text}]),
                                     add_special_tokens=False, verbose=False)["input_ids"]


class Printer:
    """Streamer with transformers' interface that prints each complete character.

    `tokenizer`: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._detokenizer = Detokenizer(tokenizer)
        self._text = IncrementalDetokenizer(self._detokenizer)

    def put(self, value: Any) -> None:
        """Print the text of a tensor of token ids."""
        print_stdout("".join(map(self._text.step, value.flatten().tolist())), end="")

    def end(self) -> None:
        """Print a newline after the last token of a turn."""
        self._text = IncrementalDetokenizer(self._detokenizer)
        print_stdout("")


@dataclass(frozen=True)
class Answer:
    """One turn and its answer."""

    turn: Turn
    text: str
    finish_reason: str
    position: int  # tokens of the stream before the turn
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int  # cached tokens after the turn, in the layer with the largest cache
    process_bytes: int  # resident memory
    stats: RunStats

    def figures(self) -> dict[str, object]:
        """Return `FIGURES` by name. Without decode steps, their time is None."""
        steps = self.stats.step_seconds
        return {
            "question_id": self.turn.question_id, "turn": self.turn.number,
            "position": self.position, "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens, "cached_tokens": self.cached_tokens,
            "prefill_seconds": self.stats.prefill_seconds,
            "decode_ms_per_token": 1000 * fmean(steps) if steps else None,
            "process_bytes": self.process_bytes, "kv_cache_bytes": self.stats.kv_cache_bytes,
        }

    def record(self) -> dict[str, object]:
        """Return the line of ``--output-path``."""
        return {"text": self.text, "finish_reason": self.finish_reason, **self.figures()}

    def row(self) -> dict[str, object]:
        """Return the row of ``--csv``, by `COLUMNS`."""
        stats = self.stats
        return {**origin(), "device": stats.device, "model": stats.model, "dtype": stats.dtype,
                **self.figures()}


def answer(stream: StreamingSession, turns: Iterable[Turn],
           encode: Callable[[str], str | list[int]], *, streamer: Streamer | None,
           sampling: dict[str, Any]) -> Iterator[Answer]:
    """Yield the answer to each turn, one after the other, all in one stream.

    `encode`: returns the prompt of a turn's text. `streamer`: gets tokens as they come. `sampling`:
    fields of `SamplingParams`.
    """
    for turn in turns:
        position = stream.tokens
        try:
            out = stream.generate(encode(turn.text), streamer=streamer, **sampling)
        except KeyboardInterrupt:
            if streamer is not None:
                streamer.end()  # ends the line
            raise
        stats = stream.stats
        assert out.text is not None and stats is not None  # there is a tokenizer
        yield Answer(turn, out.text, out.finish_reason, position, len(out.prompt_token_ids),
                     len(out.token_ids), stream.cached_tokens, resident_bytes(), stats)


def _write(answers: Iterable[Answer], options: StreamOptions) -> None:
    """Write each answer to the files, and print the summary, also after an error."""
    lines = JsonlWriter(options.output_path) if options.output_path is not None else None
    rows = CsvWriter(options.csv, COLUMNS) if options.csv is not None else None
    done: list[Answer] = []
    try:
        with (report_partial_rows(lines, "turns answered"),
              report_partial_rows(rows, "rows of turns")):
            for turn_answer in answers:
                done.append(turn_answer)
                if lines is not None:
                    with catch_write_errors("--output-path", str(options.output_path)):
                        lines.write(turn_answer.record())
                if rows is not None:
                    with catch_write_errors("--csv", str(options.csv)):
                        rows.write(turn_answer.row())
            for name, file in (("output_path", lines), ("csv", rows)):
                if file is not None:
                    with catch_write_errors(flag_name(name), getattr(options, name)):
                        file.finish()
    finally:
        if done and options.verbose:
            print_stdout(summary(done))


def summary(answers: Sequence[Answer]) -> str:
    """Return a line about all turns: tokens, cache, and the first and last tenth of the steps.

    A tenth has its mean time of a decode step, and the memory after the turn in which it ends.
    """
    last = answers[-1]
    tokens = sum(answer.prompt_tokens + answer.generated_tokens for answer in answers)
    line = (f"{len(answers)} turns of {tokens} tokens, {last.cached_tokens} cached at the end in "
            f"{last.stats.kv_cache_bytes / 1e6:.1f} MB")
    steps = [second for answer in answers for second in answer.stats.step_seconds]
    if not steps:
        return f"{line}; process {last.process_bytes / 1e6:.0f} MB"
    count = max(1, len(steps) // 10)
    first_ms, last_ms = (1000 * fmean(tenth) for tenth in (steps[:count], steps[-count:]))
    done = 0
    for early in answers:
        done += len(early.stats.step_seconds)
        if done >= count:
            break
    return (f"{line}; first tenth {first_ms:.2f} ms a token, process "
            f"{early.process_bytes / 1e6:.0f} MB; last tenth {last_ms:.2f} ms a token, process "
            f"{last.process_bytes / 1e6:.0f} MB")


main = entry_point(parse_args, run)
