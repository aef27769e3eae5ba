"""Generate text: ``flexgen-h2o generate``, and ``python -m flexgen_h2o.flex_opt``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from flexgen_h2o.cli.entry_point import entry_point
from flexgen_h2o.cli.launch import (
    check_counting,
    follow,
    joined,
    open_on_ranks,
    read_prompts,
    synthetic_prompts,
    warm_up,
    workload,
)
from flexgen_h2o.cli.parser import Parser, build_parser, given_flags
from flexgen_h2o.cli.results import check_results, result_files, write_results
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.metrics import report
from flexgen_h2o.metrics.trace import Trace
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    from flexgen_h2o.distributed.pipeline import Pipeline

_LINE = "-" * 70
"""Printed below each text."""


def run(config: RunConfig) -> None:
    """Generate, or only plan, as the flags say."""
    if config.plan_only:
        _run(config, None)
        return
    with joined(config, "flexgen_h2o.flex_opt") as pipeline:
        if pipeline is not None and pipeline.rank > 0:
            follow(pipeline)
        else:
            _run(config, pipeline)


def _run(config: RunConfig, pipeline: Pipeline | None) -> None:
    """Generate on the only rank, or on the first rank of a pipeline."""
    texts = list(config.prompt) if config.prompts is None else read_prompts(config.prompts)
    files = {} if config.plan_only else result_files(config)
    check_results(files)
    plan = None
    if config.percent == AUTO or config.plan_only:
        from flexgen_h2o.cli import planner  # imports scipy, which is slow

        plan = planner.plan(config, workload(config, texts), len(texts) or config.num_prompts,
                            texts)
        if config.plan_only or config.verbose >= 1:
            plan.show()
        if config.plan_only:
            return
        config = plan.config
        files = result_files(config)
        check_results(files)
    trace = Trace(enabled=config.trace is not None or config.debug_mode is not None)
    with open_on_ranks(
        config, pipeline, plan, texts=texts, workload=workload(config, texts),
        # Progress bars would break into the texts.
        progress=None if config.verbose and not config.stream else False, trace=trace,
        verbose=config.verbose >= 3,
    ) as llm:
        check_counting(config.count_experts, llm)
        prompts = texts or synthetic_prompts(config, llm.vocab_size)
        if config.warm_up:
            with trace.paused():
                warm_up(llm, prompts, config)
        printer = _Printer(texts) if config.stream else None
        options = {"cut_gen_len": config.cut_gen_len, "on_text": printer,
                   **asdict(config.sampling())}
        try:
            if config.chat:
                outputs = llm.chat([[{"role": "user", "content": text}] for text in texts],
                                   chat_template_kwargs=config.chat_arguments(), **options)
            else:
                outputs = llm.generate(prompts, **options)
        except BaseException:
            if printer is not None:
                printer.end_line()
            raise
        stats = llm.stats
        assert stats is not None  # generate has set it
        if plan is not None:
            stats = replace(stats, predicted_prefill_seconds=plan.best.prefill_seconds,
                            predicted_decode_seconds=plan.best.decode_seconds)
    summary = report.stats_table(stats)
    if config.debug_mode == "breakdown":
        summary += f"\n\n{report.breakdown_table(trace.spans())}"
    try:
        if config.verbose >= 2 and printer is None:
            _show_outputs(outputs, everything=not config.synthetic)
        if config.verbose >= 1:
            print_stdout(summary)
    finally:  # write the files even if stdout fails
        write_results(config, files, outputs, stats=stats, summary=summary, trace=trace)


def _show_outputs(outputs: Sequence[Output], *, everything: bool) -> None:
    """Print each prompt, shortened, and its completion; of synthetic ones the first and last."""
    for index, out in enumerate(outputs):
        if not everything and 0 < index < len(outputs) - 1:
            continue
        _show_prompt(index, out.prompt if out.prompt is not None else
                     str(out.prompt_token_ids[:16]))
        text = out.text if out.text is not None else str(out.token_ids)
        print_stdout(f"{text.strip()}\n{_LINE}")


def _show_prompt(index: int, prompt: str) -> None:
    begin = f"[{index}] "
    print_stdout(begin + textwrap.shorten(prompt, 79 - len(begin), placeholder=" ..."))


class _Printer:
    """Prints texts as their tokens come: `on_text` of `LLM.generate`.

    The sequences of a block come in turns. One of them is printed until it ends, then the others
    that have begun, by their index. It prints the same as `_show_outputs`.
    """

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts
        self._waiting: dict[int, str] = {}  # texts that are not printed yet
        self._ended: set[int] = set()
        self._shown: int | None = None
        self._mid_line = False

    def __call__(self, index: int, text: str, last: bool) -> None:
        self._waiting[index] = self._waiting.get(index, "") + text
        if last:
            self._ended.add(index)
        while self._shown is not None or self._waiting:
            if self._shown is None:
                self._shown = min(self._waiting)
                _show_prompt(self._shown, self._prompts[self._shown])
            self._print(self._waiting[self._shown])
            if self._shown not in self._ended:
                return
            print_stdout(f"\n{_LINE}")
            del self._waiting[self._shown]
            self._shown, self._mid_line = None, False

    def _print(self, text: str) -> None:
        """Print the text of the shown sequence, without white space at its beginning and end."""
        assert self._shown is not None
        if not self._mid_line:
            text = text.lstrip()
        body = text.rstrip()
        self._waiting[self._shown] = text[len(body):]
        if body:
            print_stdout(body, end="")
            self._mid_line = True

    def end_line(self) -> None:
        """End a line that an error has cut off."""
        if self._mid_line:
            print_stdout("")


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        usage="%(prog)s [--model NAME] [--prompts FILE] [--percent P P P P] [flags]",
        description="Generate text with a model larger than memory: weights, KV cache and "
        "activations spread over device, host memory and disk.")


def parse_args(argv: Sequence[str] | None = None) -> RunConfig:
    """Parse flags into a checked `RunConfig`. Raises `UserError`."""
    return RunConfig.from_mapping(given_flags(parser(), argv))


main = entry_point(parse_args, run)
