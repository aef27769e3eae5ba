"""One endless conversation: ``flexgen-h2o stream --input-path FILE.jsonl ...``.

All conversations of a file go one after the other through one cache of fixed size, which survives
the turns, and text is printed as it comes. All that can be refused is refused before torch is
loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from flexgen_h2o.cli import task_flags
from flexgen_h2o.cli.command import command
from flexgen_h2o.cli.llm_arguments import open_llm
from flexgen_h2o.cli.parser import Parser
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag, flag_name
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.checks import check_writable, writing
from flexgen_h2o.files.conversations import read_conversations
from flexgen_h2o.files.rows import LinesFile, RowsFile, keeping
from flexgen_h2o.files.terminal import show
from flexgen_h2o.tasks.streams import answers as stream_figures
from flexgen_h2o.tasks.streams.answers import Answer
from flexgen_h2o.tasks.streams.printer import Printer

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
    return task_flags.build_parser(
        StreamOptions, _SHARED, name="stream", defaults=_SHOWN,
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
            answers = stream_figures.answer(stream, turns, encode, streamer=streamer,
                                            sampling=options.sampling(llm.chat_end_tokens))
            _keep(answers, options)


def _room(llm, options: StreamOptions) -> int | None:
    """Tokens that the cache has room for, where it keeps all."""
    if options.enable_h2o_generation:
        return None
    return options.max_tokens or llm.model_config.plain_positions


def _keep(answers: Iterable[Answer], options: StreamOptions) -> None:
    """Write each answer into the files that were asked for; tell the totals, however it ends."""
    lines = LinesFile(options.output_path) if options.output_path is not None else None
    rows = RowsFile(options.csv, stream_figures.COLUMNS) if options.csv is not None else None
    files = {"output_path": lines, "csv": rows}
    done: list[Answer] = []
    try:
        with keeping(lines, "turns answered"), keeping(rows, "rows of turns"):
            for each in answers:
                done.append(each)
                if lines is not None:
                    with writing("--output-path", options.output_path):
                        lines.write(each.record())
                if rows is not None:
                    with writing("--csv", options.csv):
                        rows.write(each.row())
            for name, file in files.items():
                if file is not None:
                    with writing(flag_name(name), getattr(options, name)):
                        file.finish()
    finally:
        if done and options.verbose:
            show(stream_figures.totals(done))


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


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run(parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
