"""Generated text in Ray Data: a processor as in ``ray.data.llm``, and the class of its replicas."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.cli.launch import PROCESS_BYTES, ReplicaResources, planned_bytes
from flexgen_h2o.config.sampling import SamplingParams, sampling_params
from flexgen_h2o.config.validation import Count, NonNegative, Text, check_fields, check_int
from flexgen_h2o.distributed.ray_cluster import Replica, map_replicas, ray_module
from flexgen_h2o.errors import InsufficientMemory, UserError, short_repr
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.llm import LLM
from flexgen_h2o.outputs import Output

if TYPE_CHECKING:
    import ray.data


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
        super().__init__(partial(LLM, **llm), threads)

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


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Configuration of a processor, with the names of ``ray.data.llm`` where they mean the same.

    Parameters
    ----------
    model_source : str
        The model, as `LLM` takes it. Each machine loads it, from a shared folder or its own.
    engine_kwargs : mapping
        Other arguments of `LLM`: policy, h2o, dtype, ... Its `workload` is the longest prompts and
        answers to expect, for the memory plan.
    batch_size : int
        Rows of a replica's batch: best a few blocks of the policy.
    concurrency : int or (int, int)
        Number of replicas, or its lower and upper limit.
    should_continue_on_error : bool
        Report the error of a row in ``__inference_error__``, without `postprocess`.
    accelerator_type : str, optional
        A kind of GPU, as Ray names it; a replica computes on one.
    num_cpus : int
        CPU threads of a replica.
    num_gpus : int, optional
        0 or 1. Default: 1 with `accelerator_type`, or with ``device="cuda"`` in `engine_kwargs`.
    memory : int, optional
        Bytes of host memory of a replica. Default: the sum of the memory plan for `workload`, or
        `memory_limit` of `engine_kwargs`, plus the process itself.
    runtime_env : mapping, optional
        Ray's runtime environment of the replicas.
    seed : int
        Seeds rows without their own seed, together with the prompt.

    Raises
    ------
    UserError
        A value is of a wrong type or out of range, or the memory of a replica is unknown.
    """

    model_source: Text
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    batch_size: Count = 256
    concurrency: int | tuple[int, int] = 1
    should_continue_on_error: bool = False
    accelerator_type: Text | None = None
    num_cpus: Count = 1
    num_gpus: int | None = None
    memory: Count | None = None
    runtime_env: Mapping[str, Any] | None = None
    seed: NonNegative = 0

    def __post_init__(self) -> None:
        for name in ("engine_kwargs", "runtime_env"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) and (value, name) != (None, "runtime_env"):
                raise UserError(f"{name} must be a mapping, got {short_repr(value)}")
        if self.num_gpus not in (None, 0, 1):
            raise UserError(f"num_gpus must be 0 or 1, got {short_repr(self.num_gpus)}")
        check_fields(self)
        if self.engine_kwargs.get("memory_limit") is not None:
            check_int("memory_limit of engine_kwargs", self.engine_kwargs["memory_limit"], ge=1)
        low, high = self._range
        if not 1 <= low <= high:
            raise UserError(f"concurrency must be from 1 up, got {low} to {high}")
        for name in ("model", "progress"):
            if name in self.engine_kwargs:
                raise UserError(f"engine_kwargs must not have {name}"
                                + (": it is model_source" if name == "model" else ""))
        if (self.memory is None and self.engine_kwargs.get("workload") is None
                and self.engine_kwargs.get("memory_limit") is None):
            raise UserError("give the memory or the workload of a replica in engine_kwargs: "
                            "Workload(512, 64, gpu_batch_size=8, num_gpu_batches=2), from which "
                            "the memory plan is made, or memory in bytes")

    @property
    def _range(self) -> tuple[int, int]:
        concurrency = self.concurrency
        ends = (tuple(concurrency) if isinstance(concurrency, (tuple, list))
                else (concurrency, concurrency))
        if len(ends) != 2:
            raise UserError(f"concurrency must be a number, or two, got {short_repr(concurrency)}")
        for end in ends:
            check_int("concurrency", end, ge=1)
        return ends[0], ends[1]

    def resources(self) -> ReplicaResources:
        """Return the resources of a replica. Raises `UserError` for an unknown model."""
        gpus = self.num_gpus
        if gpus is None:
            gpus = int(self.accelerator_type is not None
                       or str(self.engine_kwargs.get("device", "")).startswith("cuda"))
        memory, limit = self.memory, self.engine_kwargs.get("memory_limit")
        if memory is None and limit is None:
            limit = planned_bytes({"model": self.model_source, **self.engine_kwargs},
                                  self.engine_kwargs["workload"], has_gpu=gpus > 0)
        if memory is None:
            assert limit is not None
            memory = limit + PROCESS_BYTES
        return ReplicaResources(memory, self.num_cpus, gpus, self.accelerator_type)

    def llm_arguments(self, resources: ReplicaResources) -> dict[str, Any]:
        """Return the arguments of a replica's `LLM`, which keep it within its memory."""
        return {"memory_limit": resources.memory_limit, **self.engine_kwargs,
                "model": self.model_source, "progress": False}


class Processor:
    """A step of a pipeline, called with a dataset, as in ``ray.data.llm``.

    Parameters
    ----------
    config : ProcessorConfig
    preprocess, postprocess : callable (dict) -> dict, optional
        See `BatchGenerator`.
    """

    def __init__(self, config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                 postprocess: Callable[[Row], Row] | None = None):
        self.config = config
        self._preprocess, self._postprocess = preprocess, postprocess

    def __call__(self, dataset: ray.data.Dataset) -> ray.data.Dataset:
        """Return the dataset with generated text, which runs when it is consumed."""
        config, ray = self.config, ray_module()
        resources = config.resources()
        options = {} if config.runtime_env is None else {"runtime_env": dict(config.runtime_env)}
        # Preprocessing runs in the replica: its own step would need a CPU, and never run if
        # the replicas have all of them.
        return map_replicas(
            ray, dataset, BatchGenerator, config._range, batch_size=config.batch_size,
            batch_format="numpy", fn_constructor_kwargs={
                "llm": config.llm_arguments(resources), "threads": config.num_cpus,
                "seed": config.seed,
                "should_continue_on_error": config.should_continue_on_error,
                "preprocess": self._preprocess, "postprocess": self._postprocess},
            **resources.arguments(), **options)


def build_processor(config: ProcessorConfig, preprocess: Callable[[Row], Row] | None = None,
                    postprocess: Callable[[Row], Row] | None = None) -> Processor:
    """Return a `Processor`, as ``ray.data.llm.build_processor``.

    Ray's checkpoints work with it: if ``DataContext.checkpoint_config`` names an `id_column` of the
    dataset and the pipeline ends in a write, rows that are written are not run again.

    Examples
    --------
    >>> processor = build_processor(                                        # doctest: +SKIP
    ...     ProcessorConfig(model_source="smollm2-135m", concurrency=2, engine_kwargs={
    ...         "workload": Workload(256, 64, gpu_batch_size=8, num_gpu_batches=1)}),
    ...     preprocess=lambda row: {"prompt": row["question"]},
    ...     postprocess=lambda row: {"answer": row["generated_text"]})
    >>> processor(ray.data.read_json("questions.jsonl")).write_json("answers")  # doctest: +SKIP
    """
    return Processor(config, preprocess, postprocess)
