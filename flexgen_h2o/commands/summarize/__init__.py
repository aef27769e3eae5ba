"""Summarisation: ``flexgen-h2o summarize --input-path FILE.jsonl ...``.

Each article's prompt is continued greedily, so that figures repeat, and what comes is scored by
ROUGE against the reference. ``--sweep`` does so for one cache after the other: the table of H2O
(arXiv 2306.14048), ROUGE-2 by KV budget. All that can be refused is refused before torch is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexgen_h2o.cli import measurements
from flexgen_h2o.cli.command import entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.commands.summarize import summaries as summary_plot
from flexgen_h2o.commands.summarize import summaries as summary_rows
from flexgen_h2o.commands.summarize.flags import SummarizeOptions, parse_args, parser
from flexgen_h2o.commands.summarize.summaries import Rouge, Score, check_rows, summarize
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.articles import Article, read_summary_tasks
from flexgen_h2o.files.rows import ResumableJsonl
from flexgen_h2o.files.terminal import ProgressBar, print_stdout
from flexgen_h2o.files.writing import catch_write_errors, check_writable

__all__ = ["main", "parse_args", "parser", "run"]

# What the text of a summary depends on. Batches, placements and the device may change in between.
_DECIDING = ("model", "path", "dtype", "gen_len", "chat_template", "policy", "heavy_tokens",
             "recent_tokens", "sink_tokens", "prompt_chunk", "positions", "cache_bits")


def run(options: SummarizeOptions) -> None:
    """Summarise and score, or read what was measured; write the files and print the table."""
    measurements.report(
        options, read=summary_rows.read_rows,
        measure=lambda: measurements.collected(options.csv, summary_rows.COLUMNS, measure(options)),
        print_stdout=lambda rows: print_stdout(summary_rows.table(rows)), draw=summary_plot.draw)


def measure(options: SummarizeOptions) -> list[dict[str, object]]:
    """A row for each cache, whose summaries are gone on with where an earlier run stopped."""
    articles = read_summary_tasks(options.input_path, most=options.sample_num,
                             max_tokens=options.gen_len)
    caches, files, made = options.caches(), {}, {}
    for name, path in options.outputs().items():
        check_writable("--output-path", path)
        files[name] = ResumableJsonl("--output-path", path, _resolved(options, caches[name]),
                                     _DECIDING)
        made[name] = files[name].read()
        check_rows(path, made[name], articles)
    score = Rouge()
    done = sum(min(len(rows), len(articles)) for rows in made.values())
    with ProgressBar(total=len(files) * len(articles), initial=done, unit="article",
              disable=None) as bar:
        for name, config in options.configs().items():
            bar.set_description(name)
            if len(made[name]) < len(articles):
                made[name] += _rest(options, config, articles, files[name], score=score, bar=bar)
    return summary_rows.all_rows({caches[name]: rows for name, rows in made.items()}, articles,
                                 model=options.run.model, chat=options.chat_template, score=score)


def _rest(options: SummarizeOptions, config: RunConfig, articles: Sequence[Article],
          file: ResumableJsonl,
          *,
          score: Score, bar: ProgressBar) -> list[dict[str, object]]:
    """Rows of the articles that the file lacks; they are in it, too."""
    found: list[dict[str, object]] = []
    with (_telling(file, len(articles)),
          open_llm(config, progress=False) as llm):
        for rows in summarize(llm, articles, begin=file.count, chat=options.chat_template,
                              score=score):
            with catch_write_errors("--output-path", file.path):
                file.add(rows)
            found += rows
            bar.update(len(rows))
    return found


@contextmanager
def _telling(file: ResumableJsonl, total: int) -> Iterator[None]:
    """Tell of a run that stops early what it has left."""
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        if not file.count:
            raise
        where = f"({file.count} of {total} lines are in {file.path}; the same command goes on)"
        raise type(error)(f"{error} {where}".lstrip()) from None


def _resolved(options: SummarizeOptions, cache: summary_rows.SummaryCache) -> dict[str, object]:
    """Settings kept beside the lines of one cache, as plain YAML values."""
    run = options.run
    return {
        "model": run.model, "path": run.path, "dtype": run.dtype, "gen_len": options.gen_len,
        "chat_template": options.chat_template, **cache.sizes(),
        "input_path": options.input_path, "device": run.device,
        "batch_size": run.resolved_gpu_batch_size, "num_gpu_batches": run.resolved_num_gpu_batches,
        "percent": list(run.percent), "offload_dir": run.offload_dir,
        "prefill_chunk": run.prefill_chunk,
    }


main = entry_point(parse_args, run)
