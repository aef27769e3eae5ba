"""Checks of requests and options against a model: positions, cache, experts. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from flexgen_h2o.config.cache_layout import CacheOptions
from flexgen_h2o.config.h2o import H2OConfig, add_windows
from flexgen_h2o.config.policy import Policy
from flexgen_h2o.errors import UserError
from flexgen_h2o.h2o.budget import budget, num_cached
from flexgen_h2o.models.model_config import ModelConfig


def check_cache(config: ModelConfig, cache: CacheOptions) -> None:
    """Raise `UserError` if cache options do not fit the model's attention, layers or positions."""
    h2o, (key_bits, value_bits) = cache.h2o, cache.kind_bits
    if config.latent is not None and (cache.attn_sparsity < 1 or key_bits != value_bits):
        raise UserError(f"{config.name} caches latents, of which each is key and value in one: "
                        "leave attn_sparsity out, and give keys and values the same bits")
    if h2o is None:
        return
    h2o.check_layers(config.num_layers)
    if config.rope is None and h2o.positions == "rolling":
        raise UserError(f"{config.name} adds learned positions to the embeddings: they can't roll "
                        "with the cache; leave position rolling off")
    if config.other_rope is not None and h2o.positions == "rolling":
        raise UserError(f"{config.name} rotates some layers in another way than others: positions "
                        "can't roll with the cache; leave position rolling off")
    if config.rope is not None and h2o.drop_positions:
        raise UserError(f"{config.name} has rotary positions, whose table has no end that could be "
                        "dropped: leave --hh-long-seq off, or use position rolling")


def check_stream(config: ModelConfig, h2o: H2OConfig | None, *, chunk: int,
                 max_tokens: int | None, past_context: bool) -> tuple[int | None, str]:
    """Return the maximum length of a stream, whose cache is kept from turn to turn.

    Parameters
    ----------
    chunk : int
        Tokens that are prefilled together.
    max_tokens : int or None
        The user's limit.
    past_context : bool
        Whether rotary positions may exceed the trained ones.

    Returns
    -------
    limit : int or None
        Tokens; None: no limit.
    reason : str
        Reason of the limit, as text.

    Raises
    ------
    UserError
        If the options do not allow a stream.
    """
    h2o = None if h2o is None else h2o.without_windows()
    evicts = h2o is not None and not h2o.is_full
    sized = evicts or h2o is not None and h2o.recall and h2o.budget_of == "prompt"
    if sized and (h2o.heavy_ratio is not None or h2o.recent_ratio is not None):
        raise UserError("a stream has no prompt, so ratios have no base: give heavy_tokens and "
                        "recent_tokens (--num-window-length)")
    if evicts and not h2o.evict_generated:
        raise UserError("a stream has no end, so generated tokens must be evicted too: leave "
                        "evict_generated (--hh-all) on")
    if max_tokens is None and (not evicts or h2o.simulate):
        raise UserError("a full cache grows with the text: give max_tokens, or an evicting cache")
    if past_context and config.rope is None:
        raise UserError(f"{config.name} has learned positions, of which there is none past the "
                        f"{config.max_positions} trained: leave past_context off")
    limits = [(max_tokens, f"max_tokens, {max_tokens}")]
    trained = config.plain_positions  # the length of a stream is unknown
    if evicts and h2o.positions == "rolling":
        cached = budget(h2o, 0, 1).total
        if cached + chunk > trained:
            raise UserError(f"a cache of {cached} tokens and a chunk of {chunk} take more "
                            f"places than the model's {trained} positions: lower one of them")
    elif not past_context and not (h2o is not None and h2o.drop_positions):
        limits.append((trained, f"the model's {trained} positions: an evicting cache with rolling "
                       "positions has no such end (--enable-position-rolling)"))
    return min((limit for limit in limits if limit[0] is not None), default=(None, ""))


def check_halves(config: ModelConfig, policy: Policy) -> None:
    """Raise `UserError` if --sep-layer does not fit the model."""
    if policy.sep_layer and config.parallel_residual:
        raise UserError(f"{config.name} feeds attention and MLP the same input: they can't be two "
                        "layers; leave --sep-layer off")


def check_speculation(config: ModelConfig, policy: Policy) -> None:
    """Raise `UserError` if the model cannot take back rejected drafts, or draft by itself."""
    if policy.speculate is not None and config.recurrent is not None:
        raise UserError(f"{config.name} has recurrent layers, whose states cannot take back "
                        "drafts: leave --speculate and --draft-model out")
    if policy.speculate == "mtp" and config.mtp_model is None:
        raise UserError(f"{config.name} has no layers for multi-token prediction that can draft: "
                        "use --speculate ngram or --draft-model")


def check_experts(config: ModelConfig, policy: Policy) -> None:
    """Raise `UserError` if expert options do not fit the model."""
    for name, flag in (("experts", "--expert-percent"), ("expert_slots", "--expert-slots"),
                       ("cpu_expert_compute", "--cpu-expert-compute"),
                       ("expert_choices", "--expert-counts")):
        if config.experts is None and getattr(policy, name) not in (None, False):
            raise UserError(f"{config.name} has no experts: leave {flag} out")
    if config.experts is None or policy.expert_choices is None:
        return
    counts = [config.experts.count if config.has_experts(layer) else 0
              for layer in range(config.num_layers)]
    choices = policy.expert_choices
    counted = [len(layer) for layer in choices.counts]
    if (counted, choices.per_token) != (counts, config.experts.per_token):
        raise UserError(f"--expert-counts {choices.source} is of another model: "
                        f"{_experts_text(counted, choices.per_token)}, and {config.name} has "
                        f"{_experts_text(counts, config.experts.per_token)}")


def _experts_text(counts: Sequence[int], per_token: int) -> str:
    """Return a description of layers and their experts."""
    num_experts = max(counts, default=0)
    layers = sum(count > 0 for count in counts)
    return f"{per_token} of {num_experts} experts a token in {layers} of {len(counts)} layers"


def longest_prompt(config: ModelConfig, h2o: H2OConfig | None) -> int | None:
    """Return the maximum length of a prompt; None if there is no bound."""
    if h2o is not None and h2o.drop_positions:
        return None
    if h2o is not None and h2o.prompt_chunk and h2o.positions == "rolling":
        return None
    return context(config, h2o)


def context(config: ModelConfig, h2o: H2OConfig | None) -> int:
    """Return the number of positions of a text.

    If keys are rotated in each step (rolling positions, simulation), these are the positions whose
    rotations do not depend on the length of the text.
    """
    rotates_each_step = h2o is not None and (h2o.positions == "rolling" or h2o.simulate)
    return config.plain_positions if rotates_each_step else config.max_positions


def check_length(config: ModelConfig, h2o: H2OConfig | None, *, prompt: str, length: int,
                 new_tokens: int) -> None:
    """Raise `UserError` if a request exceeds the model's positions.

    Parameters
    ----------
    prompt : str
        Name of the prompt in error messages.
    length, new_tokens : int
        Tokens of the prompt, and tokens to generate.
    """
    if h2o is not None and h2o.drop_positions:
        return
    limit = context(config, h2o)
    rolls = h2o is not None and not h2o.is_full and h2o.positions == "rolling"
    longest = longest_prompt(config, h2o)
    if longest is not None and length > longest:
        raise UserError(f"{prompt} has {length} tokens, more than the model's {limit} positions: "
                        "shorten it")
    # The last new token is not computed and needs no position.
    num_positions, advice = length + new_tokens - 1, ""
    if h2o is not None and not h2o.is_full and config.rope is not None:
        advice = ", or let positions roll with the cache (--enable-position-rolling)"
        if rolls:
            # Positions are ranks in the cache; new tokens have positions after the slots.
            chunk = min(length, h2o.prompt_chunk) if h2o.prompt_chunk else 1
            with_windows = add_windows(h2o, config.attention)
            cached = max(num_cached(with_windows, layer, length, new_tokens - 1)
                         for layer in config.attention_layers)
            num_positions = min(num_positions, chunk + cached)
            advice = ", or lower the budget"
    if num_positions > limit:
        raise UserError(f"{prompt} of {length} tokens and {new_tokens} new ones exceed the model's "
                        f"{limit} positions: generate at most {limit - length + 1}{advice}")


def clamped_new_tokens(config: ModelConfig, h2o: H2OConfig | None, *, length: int,
                       max_new_tokens: int) -> int:
    """Return `max_new_tokens`, or the number that fits after a prompt of `length` tokens if less.

    It is 1 if the prompt itself is too long, which `check_length` refuses.
    """
    def too_many(new_tokens: int) -> bool:
        try:
            check_length(config, h2o, prompt="", length=length, new_tokens=new_tokens)
        except UserError:
            return True
        return False

    return 1 + bisect_left(range(2, max_new_tokens + 1), True, key=too_many)
