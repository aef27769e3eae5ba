"""The model that the harness evaluates: an `LLM` with any policy and any cache.

With an evicting cache a context is a prompt: it is read whole and cut once at its end, or also
every `prompt_chunk` tokens on the way (evict_prompt), and then the continuation comes token by
token, each followed by an eviction. Budgets that are ratios are shares of the context.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence

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
"""The model's name in the harness."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_BLOCKS = 8  # in a group: at its end results go to the harness's cache
# What the harness's command line says where its user has not, whether there is a GPU or not.
_UNASKED = {"device": "cuda:0", "batch_size": 1}

_log = logging.getLogger(__name__)


@register_model(NAME)
class FlexGenLM(TemplateLM):
    """An `LLM` for the harness; `arguments.Arguments` says what the model arguments are.

    Its `close` is also called when nothing refers to it any more, and at the interpreter's end.

    Raises
    ------
    UserError
        An argument is unknown or refused, or the model can't be had or doesn't fit.
    """

    def __init__(self, **given):
        super().__init__()
        self.arguments = parse(given)
        from flexgen_h2o.llm import LLM  # only now: it loads torch, and bad arguments answer first

        self.llm = LLM(**self.arguments.for_llm())
        self.close = weakref.finalize(self, self.llm.close)
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
        """The names of ``--model_args`` and of the harness's own flags of batches and the
        device."""
        more = {name: value for name, value in (additional_config or {}).items()
                if value is not None and value != _UNASKED.get(name)}
        twice = sorted(more.keys() & arg_dict.keys())
        if twice:
            raise UserError(f"give --{twice[0]} or {twice[0]} in model_args, not both")
        return cls(**more, **arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict | None = None
                               ) -> FlexGenLM:
        """Make the model from ``name=value,name=value``; see `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def tokenizer(self):
        """transformers' tokenizer of the model."""
        return self.llm.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """The key of templated requests in the harness's cache."""
        return self.arguments.pretrained.replace("/", "__")

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation."""
        return self.arguments.max_length or self.llm.model_config.max_positions

    @property
    def max_gen_toks(self) -> int:
        """New tokens where a task does not say."""
        return self.arguments.max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._special("EOS", self.tokenizer.eos_token_id,
                             *self.llm.model_config.eos_token_ids[:1])

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context: BOS, or where there is none EOS."""
        config = self.llm.model_config
        return self._special("BOS or EOS", self.tokenizer.bos_token_id,
                             self.tokenizer.eos_token_id, config.bos_token_id,
                             *config.eos_token_ids[:1])

    def _special(self, what: str, *tokens: int | None) -> int:
        for token in tokens:
            if token is not None:
                return token
        raise UserError(f"{self.arguments.pretrained} has no {what} token, which the task needs")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Token ids. A text that begins with BOS, as chat templates make it, gets no other."""
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
        """A conversation as text, in the model's own template. Raises `UserError`."""
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
        """Facts about the model, which the harness writes beside its results."""
        stats = self.llm.stats
        return {
            "model_num_parameters": self.llm.model_config.num_parameters(),
            "model_dtype": None if stats is None else stats.dtype,
            "kv_cache_bytes": self.kv_cache_bytes,
        }

    def _loglikelihood_tokens(self, requests: Sequence[tuple], disable_tqdm: bool = False
                              ) -> list[tuple[float, bool]]:
        """Log-probabilities for (key for the harness's cache or None, context, continuation),
        tokens both."""
        pairs = [self._fitting(*request[1:]) for request in requests]
        if not pairs:
            return []
        self._choose_batch("loglikelihood", max(len(context) for context, _ in pairs),
                           max(len(continuation) for _, continuation in pairs), len(pairs))
        found: dict[int, tuple[float, bool]] = {}
        # The longest first: those of a batch are alike, and what does not fit shows at once.
        order = sorted(range(len(pairs)), key=lambda number: -len(pairs[number][0]))
        with ProgressBar(total=len(pairs), desc="loglikelihood",
                         disable=disable_tqdm or None) as bar:
            for group in self._groups(order):
                for number, scored in zip(
                        group, self.llm.score([pairs[number] for number in group]), strict=True):
                    found[number] = (sum(scored.log_probs), scored.greedy)
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0],
                                                    found[number])
                self._after(group, bar)
        return [found[number] for number in range(len(pairs))]

    def _fitting(self, context: list[int], continuation: list[int]
                 ) -> tuple[list[int], list[int]]:
        """A pair without what of its context would be past `max_length`.

        The continuation's last token is only predicted, and so needs no place.
        """
        over = len(context) + len(continuation) - 1 - self.max_length
        if over <= 0:
            return context, continuation
        if over >= len(context):
            raise UserError(f"a continuation of {len(continuation)} tokens does not fit into "
                            f"{self.max_length}: raise max_length")
        return self._last(context, len(context) - over), continuation

    def _last(self, context: list[int], room: int) -> list[int]:
        """The end of a context, cut to the tokens there is room for."""
        if len(context) > room:
            _log.warning("a context of %d tokens is cut on the left to %d", len(context), room)
        return context[-room:]

    def loglikelihood_rolling(self, requests: Sequence, disable_tqdm: bool = False
                              ) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` that do not overlap."""
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
        """Continuations up to a stop string, the model's end or the length; without the former."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found: dict[int, str] = {}
        with ProgressBar(total=len(requests), desc="generate_until",
                         disable=disable_tqdm or None) as bar:
            for numbers in alike.values():
                sampling = sampling_of(requests[numbers[0]].args[1], self.max_gen_toks)
                room = self.max_length - sampling["max_new_tokens"] + 1
                if room < 1:
                    raise UserError(f"{sampling['max_new_tokens']} new tokens do not fit into "
                                    f"{self.max_length}: lower max_gen_toks")
                prompts = {n: self._last(self.tok_encode(requests[n].args[0]), room)
                           for n in numbers}
                self._choose_batch("generate_until", max(map(len, prompts.values())),
                                   sampling["max_new_tokens"], len(numbers))
                order = sorted(numbers, key=lambda number: -len(prompts[number]))
                for group in self._groups(order):
                    outputs = self.llm.generate([prompts[n] for n in group], **sampling)
                    for number, output in zip(group, outputs, strict=True):
                        found[number] = postprocess_generated_text(
                            output.text, sampling["stop_strings"], None)
                        self.cache_hook.add_partial("generate_until", requests[number].args,
                                                    found[number])
                    self._after(group, bar)
        return [found[number] for number in range(len(requests))]

    def _choose_batch(self, what: str, prompt_len: int, gen_len: int, count: int) -> None:
        """With ``--batch_size auto``, as many sequences together as memory takes."""
        most = self.arguments.most
        if most is not None:
            self.llm.fit_batch(prompt_len=prompt_len, gen_len=gen_len, most=min(most, count))
        self.batch_sizes[what] = self.llm.policy.gpu_batch_size

    def _groups(self, order: Sequence[int]) -> Iterator[Sequence[int]]:
        """The requests in groups of some blocks."""
        policy = self.llm.policy
        size = _BLOCKS * policy.gpu_batch_size * policy.num_gpu_batches
        return (order[start : start + size] for start in range(0, len(order), size))

    def _after(self, group: Sequence[int], bar: ProgressBar) -> None:
        self.kv_cache_bytes = max(self.kv_cache_bytes, self.llm.stats.kv_cache_bytes)
        bar.update(len(group))


def sampling_of(options: Mapping[str, object], max_gen_toks: int) -> dict[str, object]:
    """A task's generation options in the words of `LLM.generate`, which refuses what it lacks.

    Greedy unless `do_sample` or a temperature asks for chance; temperature 0 is greedy.
    """
    options = dict(options)
    lengths = [value for name in _LENGTHS if (value := options.pop(name, None)) is not None]
    stops = options.pop("until", None) or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    temperature = options.pop("temperature", None)
    samples = options.pop("do_sample", None)
    samples = bool(temperature) if samples is None else samples and temperature != 0
    chance = {"do_sample": samples}
    if samples and temperature is not None:
        chance["temperature"] = float(temperature)
    return {"max_new_tokens": int(lengths[0]) if lengths else max_gen_toks,
            "stop_strings": [text for text in stops if text] or None, **chance, **options}
