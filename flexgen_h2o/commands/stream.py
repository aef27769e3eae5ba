"""Printer of a stream's text as tokens come. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from flexgen_h2o.cli import parser as task_flags
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.engine.detokenization import Detokenizer, IncrementalDetokenizer
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Turn, read_conversations
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.rows import CsvWriter, JsonlWriter, report_partial_rows
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.files.writing import catch_write_errors, check_writable
from flexgen_h2o.metrics.provenance import ORIGIN, origin
from flexgen_h2o.metrics.run_stats import RunStats
from flexgen_h2o.storage.free_memory import resident_bytes


class Printer:
    """Streamer with transformers' interface that prints each complete character.

    Parameters
    ----------
    tokenizer
        A transformers tokenizer.
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


# Times of a stream's turns, in rows and in one line at the end. No torch.
#
# A stream, or anything with its `generate`, `tokens`, `cached_tokens` and `stats`, is handed in.


FIGURES = ("question_id", "turn", "position", "prompt_tokens", "generated_tokens", "cached_tokens",
           "prefill_seconds", "decode_ms_per_token", "process_bytes", "kv_cache_bytes")
COLUMNS = (*ORIGIN, "device", "model", "dtype", *FIGURES)


@dataclass(frozen=True)
class Answer:
    """One turn and its answer. `position` is the tokens that the stream had before the turn;
    `cached_tokens` those of the layer that holds most, after it. `process_bytes` are resident.
    """

    turn: Turn
    text: str
    finish_reason: str
    position: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int
    process_bytes: int
    stats: RunStats

    def figures(self) -> dict[str, object]:
        """`FIGURES` by name; None for the time of a decode step if there was none."""
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
        """A line of ``--output-path``."""
        return {"text": self.text, "finish_reason": self.finish_reason, **self.figures()}

    def row(self) -> dict[str, object]:
        """A row of ``--csv``, by `COLUMNS`."""
        stats = self.stats
        return {**origin(), "device": stats.device, "model": stats.model, "dtype": stats.dtype,
                **self.figures()}


def answer(stream, turns: Iterable[Turn], encode: Callable[[str], object], *, streamer,
           sampling: dict[str, object]) -> Iterator[Answer]:
    """Have each turn answered, one after the other through the one stream.

    Parameters
    ----------
    stream
        What `LLM.stream` gives.
    turns : iterable of Turn
    encode : callable
        What `stream.generate` takes, of a turn's text.
    streamer
        In transformers' form; None: nothing is told as it comes.
    sampling : dict
        Fields of `SamplingParams`.
    """
    for turn in turns:
        position = stream.tokens
        try:
            out = stream.generate(encode(turn.text), streamer=streamer, **sampling)
        except KeyboardInterrupt:
            if streamer is not None:
                streamer.end()  # words that it holds back, and the end of the line
            raise
        yield Answer(turn, out.text, out.finish_reason, position, len(out.prompt_token_ids),
                     len(out.token_ids), stream.cached_tokens, resident_bytes(), stream.stats)


def totals(answers: Sequence[Answer]) -> str:
    """All turns in one line: tokens, the cache, time and memory in the first and last tenth.

    A tenth is of the decode steps; its memory is that after the turn in which it ends.
    """
    last = answers[-1]
    tokens = sum(each.prompt_tokens + each.generated_tokens for each in answers)
    line = (f"{len(answers)} turns of {tokens} tokens, {last.cached_tokens} cached at the end in "
            f"{last.stats.kv_cache_bytes / 1e6:.1f} MB")
    steps = [second for each in answers for second in each.stats.step_seconds]
    if not steps:
        return f"{line}; process {last.process_bytes / 1e6:.0f} MB"
    count = max(1, len(steps) // 10)
    first, end = (1000 * fmean(some) for some in (steps[:count], steps[-count:]))
    done = 0
    for early in answers:
        done += len(early.stats.step_seconds)
        if done >= count:
            break
    return (f"{line}; first tenth {first:.2f} ms a token, process "
            f"{early.process_bytes / 1e6:.0f} MB; last tenth {end:.2f} ms a token, process "
            f"{last.process_bytes / 1e6:.0f} MB")


# One endless conversation: ``flexgen-h2o stream --input-path FILE.jsonl ...``.
#
# All conversations of a file go one after the other through one cache of fixed size, which survives
# the turns, and text is printed as it comes. All that can be refused is refused before torch is
# loaded.


_CACHE = ("eviction", "num_heavy_hitter_tokens", "num_window_length", "score", "score_decay",
          "sink_tokens", "enable_position_rolling")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
             "no_repeat_ngram_size", "min_new_tokens", "no_generation_config", "ignore_eos",
             "seed")
_SHARED = (*task_flags.ENGINE, "attn_sparsity", "prefill_chunk", "gen_len", *_CACHE, *_SAMPLING)
_WINDOW = 512
_DEFAULTS = {"model": "smollm2-135m", "gen_len": 256}
_SHOWN = _DEFAULTS | {"num_window_length": f"{_WINDOW} with --enable-h2o-generation",
                     "prefill_chunk": 256}
_HELPS = {"gen_len": "most tokens to generate for each turn",
          "sink_tokens": "first tokens of the stream to keep always"}
_FILES = ("input_path", "output_path", "csv")
_PROMPT = "USER: {}\n\nASSISTANT: "  # the H2O repository's


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The flags, checked. `run` holds those that `flex_opt` has too; lengths are tokens.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    run: RunConfig
    input_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="conversations: their `turns` in a list, as MT-Bench has them",
    )
    sample_num: int | None = flag(
        "int", None, low=1, shown="all", help="stream the first so many conversations",
    )
    chat_template: bool = flag(
        "bool", False, help="put each turn into the model's own chat template",
    )
    enable_h2o_generation: bool = flag(
        "bool", False, help="evict from the cache, as --eviction says; otherwise it keeps all",
    )
    max_tokens: int | None = flag(
        "int", None, low=1, shown="the model's positions",
        help="room of the cache that keeps all, in tokens",
    )
    past_context: bool = flag(
        "bool", False,
        help="go past the positions that the model was trained on without --enable-position-rolling"
        ": what that does can be seen",
    )
    output_path: str | None = flag(
        "path", None, shown="none", metavar="FILE.jsonl",
        help="write a line for each turn, anew; FILE.jsonl.partial until all are in",
    )
    csv: str | None = flag(
        "path", None, shown="none", metavar="FILE",
        help="write the same figures as rows, anew; FILE.partial until all are in",
    )
    verbose: int = flag(
        "int", 2, choices=(0, 1, 2),
        help="print 0: nothing, 1: the totals, 2: the conversation too, as it comes",
    )

    def __post_init__(self) -> None:
        task_flags.check_own(self)
        if self.input_path is None:
            raise UserError("give --input-path, a .jsonl file of conversations")
        task_flags.check_placed(self.run)
        if self.enable_h2o_generation:
            if self.max_tokens is not None:
                raise UserError("--max-tokens is the room of the cache that keeps all: leave it or "
                                "--enable-h2o-generation out")
            if self.run.enable_position_rolling and self.past_context:
                raise UserError("--past-context has no effect with --enable-position-rolling: "
                                "leave it out")
        elif self.past_context and self.max_tokens is None:
            raise UserError("--past-context needs --max-tokens, the room of the cache that keeps "
                            "all")
        task_flags.check_files(self, _FILES)

    def sampling(self, chat_end_tokens: tuple[int, ...]) -> dict[str, object]:
        """Fields of `SamplingParams`. A turn ends at the model's end tokens, unless told not to."""
        ends = chat_end_tokens if self.chat_template and chat_end_tokens else None
        return asdict(self.run.sampling()) | {"eos_token_id": -1 if self.run.ignore_eos else ends}


def parser() -> Parser:
    """The parser of the flags."""
    return task_flags.command_parser(
        StreamOptions, _SHARED, prog=task_flags.program("stream"), defaults=_SHOWN,
        helps=_HELPS,
        description="Answer conversations one after the other through one cache of fixed size.")


def parse_args(argv: Sequence[str] | None = None) -> StreamOptions:
    """Flags as checked `StreamOptions`. Raises `UserError`."""
    own, shared = task_flags.parse(argv, parser(), StreamOptions)
    if own.get("enable_h2o_generation"):
        if shared.get("eviction") == "full":
            raise UserError("--enable-h2o-generation evicts: leave --eviction full out")
        if not shared.keys() & {"num_window_length", "num_heavy_hitter_tokens"}:
            shared["num_window_length"] = _WINDOW
    else:
        evicting = [name for name in shared if shared[name] != "full"]
        task_flags.refuse(evicting, _CACHE,
                          "has no effect on the full cache: add --enable-h2o-generation")
    return StreamOptions(run=RunConfig(**_DEFAULTS | {"gpu_batch_size": 1} | shared), **own)


def run(options: StreamOptions) -> None:
    """Stream all conversations; write the files as answers come, print the text and the totals."""
    for name in ("output_path", "csv"):
        if getattr(options, name) is not None:
            check_writable(flag_name(name), getattr(options, name))
    turns = [turn for each in read_conversations(options.input_path)[: options.sample_num]
             for turn in each]
    # Bars would break into the text.
    with open_llm(options.run, progress=None if options.verbose == 1 else False) as llm:
        if llm.tokenizer is None:
            raise UserError(f"{options.run.model} has no tokenizer here, and turns are text")
        streamer = Printer(llm.tokenizer) if options.verbose == 2 else None
        with (_encoder(llm.tokenizer, options.chat_template) as encode,
              llm.stream(max_tokens=_room(llm, options), past_context=options.past_context)
              as stream):
            answers = answer(stream, turns, encode, streamer=streamer,
                                            sampling=options.sampling(llm.chat_end_tokens))
            _keep(answers, options)


def _room(llm, options: StreamOptions) -> int | None:
    """Tokens that the cache has room for, where it keeps all."""
    if options.enable_h2o_generation:
        return None
    return options.max_tokens or llm.model_config.plain_positions


def _keep(answers: Iterable[Answer], options: StreamOptions) -> None:
    """Write each answer into the files that were asked for; tell the totals, however it ends."""
    lines = JsonlWriter(options.output_path) if options.output_path is not None else None
    rows = CsvWriter(options.csv, COLUMNS) if options.csv is not None else None
    files = {"output_path": lines, "csv": rows}
    done: list[Answer] = []
    try:
        with report_partial_rows(lines, "turns answered"), report_partial_rows(rows,
                                                                               "rows of turns"):
            for each in answers:
                done.append(each)
                if lines is not None:
                    with catch_write_errors("--output-path", options.output_path):
                        lines.write(each.record())
                if rows is not None:
                    with catch_write_errors("--csv", options.csv):
                        rows.write(each.row())
            for name, file in files.items():
                if file is not None:
                    with catch_write_errors(flag_name(name), getattr(options, name)):
                        file.finish()
    finally:
        if done and options.verbose:
            print_stdout(totals(done))


@contextmanager
def _encoder(tokenizer, chat_template: bool) -> Iterator[Callable[[str], object]]:
    """A function from a turn's text to what the stream takes: a text, or token ids."""
    if not chat_template:
        yield _PROMPT.format
        return
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template: leave --chat-template out")
    with ChatRenderer(tokenizer) as renderer:
        # The template has written its own special tokens.
        yield lambda text: tokenizer(renderer.render([{"role": "user", "content": text}]),
                                     add_special_tokens=False, verbose=False)["input_ids"]


main = entry_point(parse_args, run)
