"""The model that the harness evaluates: an `LLM` with any policy and any cache.

With eviction a context is a prompt: it is cut at its end, or every `prompt_chunk` tokens
(`evict_prompt`). Then the continuation is computed token by token, with an eviction after each.
Budgets that are ratios are shares of the context.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)

from flexgen_h2o.errors import UserError, check_text
from flexgen_h2o.files.chat_template import ChatRenderer
from flexgen_h2o.files.terminal import ProgressBar
from flexgen_h2o.integrations.lm_eval.arguments import parse

NAME = "flexgen_h2o"
"""Name of the model in the harness."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_BLOCKS = 8  # blocks in a group; after each group results go to the harness's cache
# Values that the harness's command line passes if the user gave none.
_HARNESS_DEFAULTS = {"device": "cuda:0", "batch_size": 1}

_log = logging.getLogger(__name__)


@register_model(NAME)
class FlexGenLM(TemplateLM):
    """An `LLM` for the harness; for model arguments see `arguments.Arguments`.

    The LLM is also closed when the object is deleted.

    Raises `UserError` if an argument is unknown or invalid, or the model cannot be loaded or does
    not fit.
    """

    def __init__(self, **arguments):
        super().__init__()
        self.arguments = parse(arguments)
        from flexgen_h2o.llm import LLM  # loads torch: arguments are checked before

        self.llm = LLM(**self.arguments.for_llm())
        self.close = self.llm.close
        self.batch_sizes: dict[str, int] = {}
        self.kv_cache_bytes = 0
        self._renderer: ChatRenderer | None = None
        try:
            if self.llm.tokenizer is None:
                raise UserError(f"{self.arguments.pretrained} has no tokenizer here, and tasks "
                                "are text")
        except BaseException:
            self.close()
            raise

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, object],
                            additional_config: Mapping[str, object] | None = None) -> FlexGenLM:
        """Make the model from ``--model_args`` and the harness's flags of batches and device."""
        config = {name: value for name, value in (additional_config or {}).items()
                  if value is not None and value != _HARNESS_DEFAULTS.get(name)}
        twice = sorted(config.keys() & arg_dict.keys())
        if twice:
            raise UserError(f"give --{twice[0]} or {twice[0]} in model_args, not both")
        return cls(**config, **arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None
                               ) -> FlexGenLM:
        """Make the model from ``name=value,name=value``; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def tokenizer(self):
        """The model's transformers tokenizer."""
        return self.llm.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Key of templated requests in the harness's cache."""
        return self.arguments.pretrained.replace("/", "__")

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation."""
        return self.arguments.max_length or self.llm.model_config.max_positions

    @property
    def max_gen_toks(self) -> int:
        """New tokens if a task does not limit them."""
        return self.arguments.max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special("EOS", self.tokenizer.eos_token_id,
                             *self.llm.model_config.eos_token_ids[:1])

    @property
    def prefix_token_id(self) -> int:
        """The token of an empty context: BOS, or EOS if there is no BOS."""
        config = self.llm.model_config
        return self._special("BOS or EOS", self.tokenizer.bos_token_id,
                             self.tokenizer.eos_token_id, config.bos_token_id,
                             *config.eos_token_ids[:1])

    def _special(self, name: str, *tokens: int | None) -> int:
        for token in tokens:
            if token is not None:
                return token
        raise UserError(f"{self.arguments.pretrained} has no {name} token, which the task needs")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Return token ids. A text that begins with BOS (chat templates) gets no second one."""
        if add_special_tokens is None:
            add_special_tokens = self.arguments.add_bos_token
            start = self.tokenizer.bos_token
            if start and string.startswith(start):
                add_special_tokens = False
        check_text("a text of the task", string)
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, verbose=False, **special)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]],
                            add_generation_prompt: bool = True) -> str:
        """Return a conversation as text in the model's template. Raise `UserError` without one."""
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.arguments.pretrained} has no chat template: leave "
                            "--apply_chat_template out")
        if self._renderer is None:
            self._renderer = ChatRenderer(self.tokenizer)
            weakref.finalize(self, self._renderer.close)
        return self._renderer.render(chat_history, {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt})

    def get_model_info(self) -> dict[str, object]:
        """Return facts about the model that the harness writes with its results."""
        stats = self.llm.stats
        return {
            "model_num_parameters": self.llm.model_config.num_parameters(),
            "model_dtype": None if stats is None else stats.dtype,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def _loglikelihood_tokens(self, requests: Sequence[tuple], disable_tqdm: bool = False
                              ) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of each request.

        A request is (key in the harness's cache or None, context tokens, continuation tokens).
        """
        pairs = [self._fitting(*request[1:]) for request in requests]
        if not pairs:
            return []
        self._choose_batch("loglikelihood", max(len(context) for context, _ in pairs),
                           max(len(continuation) for _, continuation in pairs), len(pairs))
        results: dict[int, tuple[float, bool]] = {}
        # The longest first: lengths in a batch are similar, and running out of memory shows early.
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]))
        with ProgressBar(total=len(pairs), desc="loglikelihood",
                         disable=disable_tqdm or None) as bar:
            for group in self._groups(order):
                for number, scored in zip(
                        group, self.llm.score([pairs[number] for number in group]), strict=True):
                    results[number] = (sum(scored.log_probs), scored.greedy)
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0],
                                                    results[number])
                self._after(group, bar)
        return [results[number] for number in range(len(pairs))]

    def _fitting(self, context: list[int], continuation: list[int]
                 ) -> tuple[list[int], list[int]]:
        """Return a pair with its context cut on the left to fit `max_length`.

        The continuation's last token is predicted but not computed, so it does not count.
        """
        over = len(context) + len(continuation) - 1 - self.max_length
        if over <= 0:
            return context, continuation
        if over >= len(context):
            raise UserError(f"a continuation of {len(continuation)} tokens does not fit into "
                            f"{self.max_length}: raise max_length")
        return self._last(context, len(context) - over), continuation

    def _last(self, context: list[int], max_tokens: int) -> list[int]:
        """Return the last tokens of a context."""
        if len(context) > max_tokens:
            _log.warning("a context of %d tokens is cut on the left to %d", len(context),
                         max_tokens)
        return context[-max_tokens:]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False
                              ) -> list[float]:
        """Return log-likelihoods of whole texts, in disjoint windows of `max_length`."""
        h2o = self.llm.h2o
        if h2o is not None and (not h2o.is_full or h2o.recall) and (
                h2o.heavy_ratio is not None or h2o.recent_ratio is not None):
            raise UserError("a rolling log-likelihood has no context of which hh_ratio or "
                            "recent_ratio could be a share: give num_window_length")
        owners, windows = [], []
        for number, request in enumerate(requests):
            (text,) = request.args
            for window in get_rolling_token_windows(
                    self.tok_encode(text), prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length, context_len=1):
                owners.append(number)
                windows.append((None, *make_disjoint_window(window)))
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(
                owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence, disable_tqdm: bool = False) -> list[str]:
        """Return continuations up to a stop string, the end token or the length limit."""
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        with ProgressBar(total=len(requests), desc="generate_until",
                         disable=disable_tqdm or None) as bar:
            for numbers in by_options.values():
                sampling = sampling_of(requests[numbers[0]].args[1], self.max_gen_toks)
                max_prompt = self.max_length - sampling["max_new_tokens"] + 1
                if max_prompt < 1:
                    raise UserError(f"{sampling['max_new_tokens']} new tokens do not fit into "
                                    f"{self.max_length}: lower max_gen_toks")
                prompts = {n: self._last(self.tok_encode(requests[n].args[0]), max_prompt)
                           for n in numbers}
                self._choose_batch("generate_until", max(map(len, prompts.values())),
                                   sampling["max_new_tokens"], len(numbers))
                order = sorted(numbers, key=lambda number: -len(prompts[number]))
                for group in self._groups(order):
                    outputs = self.llm.generate([prompts[n] for n in group], **sampling)
                    for number, output in zip(group, outputs, strict=True):
                        texts[number] = postprocess_generated_text(
                            output.text, sampling["stop_strings"], None)
                        self.cache_hook.add_partial("generate_until", requests[number].args,
                                                    texts[number])
                    self._after(group, bar)
        return [texts[number] for number in range(len(requests))]

    def _choose_batch(self, kind: str, prompt_len: int, gen_len: int, count: int) -> None:
        """With ``--batch_size auto``, choose the largest batch that fits in memory."""
        max_batch_size = self.arguments.max_sequences
        if max_batch_size is not None:
            self.llm.fit_batch(prompt_len=prompt_len, gen_len=gen_len,
                               max_batch_size=min(max_batch_size, count))
        self.batch_sizes[kind] = self.llm.policy.gpu_batch_size

    def _groups(self, order: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield the requests in groups of `_BLOCKS` blocks."""
        policy = self.llm.policy
        size = _BLOCKS * policy.gpu_batch_size * policy.num_gpu_batches
        return (order[start : start + size] for start in range(0, len(order), size))

    def _after(self, group: Sequence[int], bar: ProgressBar) -> None:
        self.kv_cache_bytes = max(self.kv_cache_bytes, self.llm.stats.kv_cache_bytes)
        bar.update(len(group))


def sampling_of(options: Mapping[str, Any], max_gen_toks: int) -> dict[str, Any]:
    """Return a task's generation options as arguments of `LLM.generate`, which checks them.

    Decoding is greedy unless `do_sample` or a temperature is given; temperature 0 is greedy.
    """
    options = dict(options)
    lengths = [value for name in _LENGTHS if (value := options.pop(name, None)) is not None]
    stops = options.pop("until", None) or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    temperature = options.pop("temperature", None)
    samples = options.pop("do_sample", None)
    samples = bool(temperature) if samples is None else samples and temperature != 0
    sampling = {"do_sample": samples}
    if samples and temperature is not None:
        sampling["temperature"] = float(temperature)
    return {"max_new_tokens": int(lengths[0]) if lengths else max_gen_toks,
            "stop_strings": [text for text in stops if text] or None, **sampling, **options}
