"""The class that Ray Data's ``map_batches`` runs as replicas: it adds columns of generated text."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flexgen_h2o.config.sampling import SamplingParams, sampling_params
from flexgen_h2o.distributed.ray_cluster import Replica
from flexgen_h2o.errors import InsufficientMemory, UserError, short_repr
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.llm import LLM
from flexgen_h2o.outputs import Output

ERROR = "__inference_error__"
"""Column with the error of a row; empty text if there is none."""
Row = dict[str, Any]
"""The cells of a row by column name."""
_ALIASES = {"max_tokens": "max_new_tokens", "stop": "stop_strings"}
"""Names of sampling parameters in pipelines for other engines."""


class BatchGenerator(Replica):
    """Generates text for batches of prompts, for ``map_batches``.

    Parameters
    ----------
    llm : mapping
        Arguments of `LLM` by name, with `model`.
    threads : int, optional
        Threads that compute; default: PyTorch's. Ray gives a replica as many as its `num_cpus`.
    should_continue_on_error : bool
        Report the error of a row in the column ``__inference_error__``; False: raise it, which ends
        the pipeline.
    seed : int
        Seeds rows without their own seed, together with the prompt.
    preprocess : callable (dict) -> dict, optional
        Returns columns to add to a row or to replace, before it runs.
    postprocess : callable (dict) -> dict, optional
        Returns the result of a row after it ran. Rows with an error are not postprocessed.

    Raises
    ------
    UserError
        In the first call: the model cannot be loaded, or does not fit.
    """

    def __init__(self, llm: Mapping[str, Any], *, threads: int | None = None,
                 should_continue_on_error: bool = False, seed: int = 0,
                 preprocess: Callable[[Row], Row] | None = None,
                 postprocess: Callable[[Row], Row] | None = None):
        self._continues, self._seed = should_continue_on_error, seed
        self._preprocess, self._postprocess = preprocess, postprocess
        self._renderer: ChatRenderer | None = None

        def load() -> LLM:
            model = LLM(**llm)
            weakref.finalize(self, model.close)
            return model

        super().__init__(load, threads)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Generate text for the prompts of a batch.

        Parameters
        ----------
        batch : mapping of str to array
            Columns: `prompt` (text or token ids) or `messages` (OpenAI's), and `sampling_params`
            (a mapping: fields of `SamplingParams`; max_tokens and stop as other engines call them;
            a temperature above 0 samples). Other columns pass through.

        Returns
        -------
        dict of str to array
            The input's columns, and: generated_text, generated_tokens (lists of ids),
            num_input_tokens, num_generated_tokens, finish_reason (``stop`` or ``length``), and
            ``__inference_error__``. A row with an error has empty text and lists, and zeros.

        Raises
        ------
        UserError
            The model cannot run, or a row cannot and `should_continue_on_error` is off.
        """
        llm: LLM = self.model
        if self._preprocess is not None:
            batch = _in_columns([{**row, **self._preprocess(row)} for row in _in_rows(batch)])
        count = len(next(iter(batch.values()), ()))
        prompts: dict[int, list[int]] = {}
        params: dict[int, SamplingParams] = {}
        errors: dict[int, str] = {}
        for row in range(count):
            try:
                prompts[row], params[row] = self._prepare(
                    llm, {name: batch[name][row] for name in ("prompt", "messages",
                                                              "sampling_params")
                          if name in batch}, row)
            except UserError as error:
                self._note(errors, row, error)
        outputs: dict[int, Output] = {}
        self._generate([*prompts], prompts, params, outputs, errors)
        result = {**batch, **_result_columns(count, outputs, errors)}
        if self._postprocess is None:
            return result
        return _in_columns([row if row[ERROR] else {**self._postprocess(row), ERROR: ""}
                            for row in _in_rows(result)])

    def _note(self, errors: dict[int, str], row: int, error: UserError) -> None:
        """Keep the error of a row, or raise it."""
        if not self._continues:
            raise error
        errors[row] = str(error)

    def _prepare(self, llm: LLM, row: Mapping[str, Any], number: int
                 ) -> tuple[list[int], SamplingParams]:
        """Return the prompt of a row as token ids, and its sampling parameters."""
        row = {name: _plain(value) for name, value in row.items()}
        prompt, messages = row.get("prompt"), row.get("messages")
        if (prompt is None) == (messages is None):
            raise UserError("a row needs a prompt or messages, one of the two")
        if prompt is not None and not isinstance(prompt, (str, list)):
            raise UserError(f"prompt must be text or token ids, got {short_repr(prompt)}")
        row_params = row.get("sampling_params") or {}
        if not isinstance(row_params, dict):
            raise UserError(f"sampling_params must be a mapping, got {short_repr(row_params)}")
        if messages is not None:
            if not isinstance(messages, list):
                raise UserError(f"messages must be a list, got {short_repr(messages)}")
            if llm.tokenizer is None:
                raise UserError("the model has no tokenizer here: give token ids as prompt")
            if self._renderer is None:
                self._renderer = ChatRenderer(llm.tokenizer)
                weakref.finalize(self, self._renderer.close)
            prompt = self._renderer.render(messages)
        assert prompt is not None  # one of the two is there
        params = _sampling_params(row_params, self._seed, prompt)
        if messages is not None and params.eos_token_id is None and llm.chat_end_tokens:
            params = replace(params, eos_token_id=llm.chat_end_tokens)
        return llm.encode(prompt, name=number, new_tokens=params.max_new_tokens,
                          add_special_tokens=messages is None), params

    def _generate(self, rows: Sequence[int], prompts: Mapping[int, list[int]],
                  params: Mapping[int, SamplingParams], outputs: dict[int, Output],
                  errors: dict[int, str]) -> None:
        """Run rows, in halves if they do not fit in memory together."""
        if not rows:
            return
        try:
            results = self.model.generate([prompts[row] for row in rows],
                                          [params[row] for row in rows])
        except InsufficientMemory as error:
            if len(rows) == 1:
                self._note(errors, rows[0], error)
                return
            ordered = sorted(rows, key=lambda row: len(prompts[row]) + params[row].max_new_tokens)
            half = len(rows) // 2
            for part in (ordered[:half], ordered[half:]):
                self._generate(part, prompts, params, outputs, errors)
            return
        outputs.update(zip(rows, results, strict=True))


def _in_rows(batch: Mapping[str, Any]) -> list[Row]:
    return [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]


def _in_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as columns; None for a column that a row lacks."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = np.empty(len(rows), object)
        for place, row in enumerate(rows):
            columns[name][place] = row.get(name)
    return columns


def _plain(value: Any) -> Any:
    """Return a cell of Arrow or numpy as Python objects, without the keys of other rows only."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _sampling_params(params: Mapping[str, Any], seed: int, prompt: str | list[int]
                     ) -> SamplingParams:
    """Return the sampling parameters of a row. Raises `UserError`."""
    options = {_ALIASES.get(name, name): value for name, value in params.items()}
    if len(options) < len(params):
        raise UserError(f"sampling_params name a value twice: {', '.join(params)}")
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


def _result_columns(count: int, outputs: Mapping[int, Output], errors: Mapping[int, str]
                    ) -> dict[str, Any]:
    """Return the columns of results, with empty cells for rows with errors."""
    results = [outputs.get(row) for row in range(count)]
    tokens = np.empty(count, object)
    for row, output in enumerate(results):
        tokens[row] = np.array(output.token_ids if output else [], np.int64)
    return {
        "generated_text": np.array([output.text or "" if output else "" for output in results],
                                   object),
        "generated_tokens": tokens,
        "num_input_tokens": np.array([len(output.prompt_token_ids) if output else 0
                                      for output in results], np.int64),
        "num_generated_tokens": np.array([len(row) for row in tokens], np.int64),
        "finish_reason": np.array([output.finish_reason if output else "" for output in results],
                                  object),
        ERROR: np.array([errors.get(row, "") for row in range(count)], object),
    }
