"""The callable class that Ray Data's ``map_batches`` makes replicas of: columns in, columns out."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flexgen_h2o.config.sampling import SamplingParams, sampling_params
from flexgen_h2o.errors import TooLittleMemory, UserError, shown
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.llm import LLM
from flexgen_h2o.outputs import Output

ERROR = "__inference_error__"
"""The column of what is wrong with a row; empty text where nothing is."""
Row = dict[str, Any]
"""The cells of a row by the names of their columns."""
_ALSO = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
"""Names of sampling parameters that pipelines for other engines have."""


class BatchGenerator:
    """A model that continues batches of prompts, for ``map_batches``.

    Parameters
    ----------
    llm : mapping
        Arguments of `LLM` by name; `model` is there.
    threads : int, optional
        Threads that compute; default: PyTorch's. Ray gives a replica as many as its `num_cpus`.
    should_continue_on_error : bool
        A row that cannot run gets its error in the column ``__inference_error__``; if not, it ends
        the pipeline.
    seed : int
        With its prompt, the seed of a row that names none.
    preprocess, postprocess : callable (dict) -> dict, optional
        Of a row, before and after. What `preprocess` returns comes beside the row's own columns, or
        in their place; what `postprocess` returns is the row. One with an error passes it by.

    Raises
    ------
    UserError
        From the first call: the model can't be had, or does not fit.
    """

    def __init__(self, llm: Mapping[str, Any], *, threads: int | None = None,
                 should_continue_on_error: bool = False, seed: int = 0,
                 preprocess: Callable[[Row], Row] | None = None,
                 postprocess: Callable[[Row], Row] | None = None):
        if threads is not None:
            torch.set_num_threads(threads)
        self._continues, self._seed = should_continue_on_error, seed
        self._before, self._after = preprocess, postprocess
        self._renderer: ChatRenderer | None = None
        self._refused: UserError | None = None
        try:
            self._llm = LLM(**llm)
        except UserError as error:
            # Ray would start it again and again. As the error of a batch it reaches the user.
            self._refused = error
            return
        weakref.finalize(self, self._llm.close)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Continue the prompts of a batch.

        Parameters
        ----------
        batch : mapping of str to array
            Columns: `prompt` (text or token ids) or `messages` (OpenAI's), and `sampling_params`
            (a mapping: `SamplingParams`' fields; max_tokens and stop as other engines call them;
            a temperature above 0 samples). More columns pass through.

        Returns
        -------
        dict of str to array
            The columns that came, and: generated_text, generated_tokens (lists of ids),
            num_input_tokens, num_generated_tokens, finish_reason (``stop`` or ``length``), and
            ``__inference_error__``. A row with an error has empty text and lists, and zeros.

        Raises
        ------
        UserError
            The model can't run, or a row can't and errors are not to be columns.
        """
        if self._refused is not None:
            raise self._refused
        if self._before is not None:
            batch = _in_columns([{**row, **self._before(row)} for row in _in_rows(batch)])
        found = self._answered(batch)
        if self._after is None:
            return found
        return _in_columns([row if row[ERROR] else {**self._after(row), ERROR: ""}
                            for row in _in_rows(found)])

    def _answered(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The columns that came, and those of results."""
        count = len(next(iter(batch.values()), ()))
        prompts: dict[int, list[int]] = {}
        params: dict[int, SamplingParams] = {}
        errors: dict[int, str] = {}
        for row in range(count):
            try:
                prompts[row], params[row] = self._prepared(
                    {name: batch[name][row] for name in ("prompt", "messages", "sampling_params")
                     if name in batch}, row)
            except UserError as error:
                self._note(errors, row, error)
        outputs: dict[int, Output] = {}
        self._generate([*prompts], prompts, params, outputs, errors)
        return {**batch, **_columns(count, outputs, errors)}

    def _note(self, errors: dict[int, str], row: int, error: UserError) -> None:
        """Keep the error of a row, or raise it."""
        if not self._continues:
            raise error
        errors[row] = str(error)

    def _prepared(self, row: Mapping[str, Any], number: int) -> tuple[list[int], SamplingParams]:
        """The prompt of a row in tokens, and its sampling parameters. Raises `UserError`."""
        row = {name: _plain(value) for name, value in row.items()}
        prompt, messages = row.get("prompt"), row.get("messages")
        if (prompt is None) == (messages is None):
            raise UserError("a row needs a prompt or messages, one of the two")
        if prompt is not None and not isinstance(prompt, (str, list)):
            raise UserError(f"prompt must be text or token ids, got {shown(prompt)}")
        given = row.get("sampling_params") or {}
        if not isinstance(given, dict):
            raise UserError(f"sampling_params must be a mapping, got {shown(given)}")
        if messages is not None:
            if not isinstance(messages, list):
                raise UserError(f"messages must be a list, got {shown(messages)}")
            if self._llm.tokenizer is None:
                raise UserError("the model has no tokenizer here: give token ids as prompt")
            if self._renderer is None:
                self._renderer = ChatRenderer(self._llm.tokenizer)
                weakref.finalize(self, self._renderer.close)
            prompt = self._renderer.render(messages)
        assert prompt is not None  # one of the two is there
        params = _params(given, self._seed, prompt)
        if messages is not None and params.eos_token_id is None and self._llm.chat_end_tokens:
            params = replace(params, eos_token_id=self._llm.chat_end_tokens)
        return self._llm.encode(prompt, name=number, new_tokens=params.max_new_tokens,
                                special=messages is None), params

    def _generate(self, rows: Sequence[int], prompts: Mapping[int, list[int]],
                  params: Mapping[int, SamplingParams], outputs: dict[int, Output],
                  errors: dict[int, str]) -> None:
        """Run rows, in halves where they do not fit in memory together."""
        if not rows:
            return
        try:
            found = self._llm.generate([prompts[row] for row in rows],
                                       [params[row] for row in rows])
        except TooLittleMemory as error:
            if len(rows) == 1:
                self._note(errors, rows[0], error)
                return
            ordered = sorted(rows, key=lambda row: len(prompts[row]) + params[row].max_new_tokens)
            half = len(rows) // 2
            for part in (ordered[:half], ordered[half:]):
                self._generate(part, prompts, params, outputs, errors)
            return
        outputs.update(zip(rows, found, strict=True))


def _in_rows(batch: Mapping[str, Any]) -> list[Row]:
    return [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def _in_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """The columns of rows; None where a row lacks one that another has."""
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        found[name] = np.empty(len(rows), object)
        for place, row in enumerate(rows):
            found[name][place] = row.get(name)
    return found


def _plain(value: Any) -> Any:
    """A cell of Arrow's or numpy's as Python has it, without the keys that only other rows have."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _params(given: Mapping[str, Any], seed: int, prompt: str | list[int]) -> SamplingParams:
    """The sampling parameters of a row. Raises `UserError`."""
    options = {_ALSO.get(name, name): value for name, value in given.items()}
    if len(options) < len(given):
        raise UserError(f"sampling_params name a value twice: {', '.join(given)}")
    if "stop_strings" in options and not options["stop_strings"]:
        del options["stop_strings"]
    temperature = options.get("temperature")
    if isinstance(temperature, (int, float)):
        options.setdefault("do_sample", temperature > 0)
        if not temperature:
            del options["temperature"]
    if "seed" not in options:
        digest = hashlib.blake2b(f"{seed}\n{prompt}".encode("utf-8", "replace"), digest_size=8)
        options["seed"] = int.from_bytes(digest.digest(), "big") >> 1
    return sampling_params(options)


def _columns(count: int, outputs: Mapping[int, Output], errors: Mapping[int, str]
             ) -> dict[str, Any]:
    """The columns of results, of every row."""
    found = [outputs.get(row) for row in range(count)]
    tokens = np.empty(count, object)
    for row, each in enumerate(found):
        tokens[row] = np.array(each.token_ids if each else [], np.int64)
    return {
        "generated_text": np.array([each.text or "" if each else "" for each in found], object),
        "generated_tokens": tokens,
        "num_input_tokens": np.array([len(each.prompt_token_ids) if each else 0
                                      for each in found], np.int64),
        "num_generated_tokens": np.array([len(row) for row in tokens], np.int64),
        "finish_reason": np.array([each.finish_reason if each else "" for each in found], object),
        ERROR: np.array([errors.get(row, "") for row in range(count)], object),
    }
