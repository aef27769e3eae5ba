"""The harness's command line with this model: ``python -m flexgen_h2o.integrations.lm_eval``.

Arguments are as for ``lm_eval``; ``--model flexgen_h2o`` is the default.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flexgen_h2o.cli.entry_point import command
from flexgen_h2o.errors import UserError

_MODEL = ("--model", "-M")
_FLAGS_WITH_MODELS = ("--config", "-C")


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the harness.

    Errors are the harness's own, except for data that cannot be downloaded.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("this needs the evaluation harness: pip install 'flexgen_h2o[eval]'")
    from lm_eval.__main__ import cli_evaluate

    from flexgen_h2o.integrations.lm_eval.model import NAME

    before = sys.argv
    sys.argv = [before[0], *_with_model(arguments, NAME)]  # the harness reads and modifies it
    try:
        with _download_errors(), _quiet_git():
            cli_evaluate()
    finally:
        sys.argv = before


@contextmanager
def _download_errors() -> Iterator[None]:
    """Report in one line that data or metrics of a task cannot be downloaded."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not _is_download_error(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise UserError(
            f"the data or metrics of a task cannot be downloaded ({reason}): run it once with a "
            "network and without HF_HUB_OFFLINE, which keeps them for later, or give a task over "
            "local files with --include_path") from error


def _is_download_error(error: BaseException) -> bool:
    """Return whether a download failed."""
    from flexgen_h2o.models.sources import hub_failures

    if isinstance(error, OSError):
        # Errors of download libraries have no errno; a full disk has one.
        return error.errno is None or isinstance(error, (ConnectionError, TimeoutError))
    return isinstance(error, hub_failures())


@contextmanager
def _quiet_git() -> Iterator[None]:
    """Suppress git's message if the harness looks for a commit outside of a repository."""
    from lm_eval import evaluator
    from lm_eval.loggers.utils import get_commit_from_path

    def commit() -> str | None:
        try:
            result = subprocess.run(["git", "describe", "--always"], capture_output=True,
                                    text=True, check=True)
        except (subprocess.CalledProcessError, OSError):
            return get_commit_from_path(os.getcwd())
        return result.stdout.strip()

    before = evaluator.get_git_commit_hash
    evaluator.get_git_commit_hash = commit
    try:
        yield
    finally:
        evaluator.get_git_commit_hash = before


def _with_model(arguments: list[str], name: str) -> list[str]:
    """Return the arguments of the harness, with this model unless another is given."""
    runs = bool(arguments) and (arguments[0] == "run" or arguments[0].startswith("-"))
    names = {argument.split("=")[0] for argument in arguments}
    if not runs or names & {*_MODEL, *_FLAGS_WITH_MODELS, "-h", "--help"}:
        return arguments
    return [*arguments, "--model", name]


if __name__ == "__main__":
    sys.exit(main())
