"""Text as it comes: `on_text` of `LLM.generate`, and ``generate --stream``."""

import errno
import itertools
from collections import defaultdict

import pytest
from helpers.error_cases import refused
from helpers.generation import token_ids
from helpers.selection import examples
from helpers.tiny_tokenizers import with_bytes, with_words
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.cache.token_attention import TokenAttention
from flexgen_h2o.commands import generate
from flexgen_h2o.errors import UserError

PROMPTS = [[3, 4, 5, 6, 7], [9], [50, 60, 70], [8, 8], [3, 4, 5, 6, 7], [11, 12, 13, 14], [21]]
LINE = "-" * 70


class Texts:
    """Collects the calls of `on_text`."""

    def __init__(self):
        self.pieces: dict[int, list[str]] = defaultdict(list)
        self.ended: list[int] = []

    def __call__(self, index: int, text: str, last: bool) -> None:
        assert index not in self.ended
        self.pieces[index].append(text)
        self.ended += [index] if last else []

    def check(self, outputs) -> None:
        """The pieces are the texts of the outputs, a piece for each token."""
        assert sorted(self.ended) == [*range(len(outputs))]
        for index, out in enumerate(outputs):
            assert "".join(self.pieces[index]) == out.text
            assert len(self.pieces[index]) == len(out.token_ids)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory) -> str:
    """A model whose tokens are bytes, most of which are parts of characters."""
    return with_bytes(tiny_model("llama").folder, tmp_path_factory.mktemp("bytes") / "model")


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=2, num_gpu_batches=2)) as llm:
        yield llm


@settings(max_examples=examples(24))
@given(st.lists(st.fixed_dictionaries({
    "max_new_tokens": st.integers(1, 8), "seed": st.integers(0, 99), "do_sample": st.just(True),
    "temperature": st.just(3.0), "stop_strings": st.sampled_from([None, ["a", "é"], ["¥"]]),
    "eos_token_id": st.sampled_from([None, -1, [*range(20, 60)]]),
    "skip_special_tokens": st.booleans()}), min_size=7, max_size=7),
    st.sampled_from([None, 3]))
def test_pieces_add_up_to_the_text(llm, params, cut):
    texts = Texts()
    params = [SamplingParams(**param) for param in params]
    outputs = llm.generate(PROMPTS, params, on_text=texts, cut_gen_len=cut)
    texts.check(outputs)
    plain = llm.generate(PROMPTS, params, cut_gen_len=cut)
    assert token_ids(plain) == token_ids(outputs)


def test_a_restarted_block_repeats_no_text(folder, monkeypatch):
    real, calls, texts = TokenAttention.attend, itertools.count(), Texts()

    def fails(self, layer, batch, q, *rest, **options):
        if next(calls) >= 9 and len(q) > 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(self, layer, batch, q, *rest, **options)

    monkeypatch.setattr(TokenAttention, "attend", fails)
    with LLM(folder, dtype="float32", policy=Policy(gpu_batch_size=4)) as llm:
        texts.check(llm.generate(PROMPTS, max_new_tokens=8, eos_token_id=-1, on_text=texts))
    assert next(calls) > 9


def test_errors(tiny_model, llm):
    refused(lambda: llm.generate(PROMPTS, on_text="print"), match="on_text must be a function")
    with LLM(str(tiny_model("llama").folder)) as words, pytest.raises(UserError, match="tokenizer"):
        words.generate([[1]], on_text=print)

    def stop(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, on_text=stop)
    with pytest.raises(UserError, match="another call"):
        llm.generate(PROMPTS, on_text=lambda *_: llm.generate(PROMPTS))
    assert len(llm.generate(PROMPTS, max_new_tokens=2)) == len(PROMPTS)


# The command


@given(st.lists(st.lists(st.text(st.sampled_from("ab \n"), max_size=4), min_size=1, max_size=5),
                min_size=1, max_size=4), st.randoms())
def test_prompts_are_printed_one_after_the_other(pieces, draw):
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "print_stdout", lambda text, end="\n": printed.append(text + end))
        printer = generate._Printer([f"prompt {number}" for number in range(len(pieces))])
        turns = [number for number, texts in enumerate(pieces) for _ in texts]
        draw.shuffle(turns)
        left = [*map(list, pieces)]
        for turn in turns:
            text = left[turn].pop(0)
            printer(turn, text, not left[turn])
            if len(pieces) == 1:  # nothing but white space waits
                assert "".join(printed).split() == ["[0]", "prompt", "0", *"".join(
                    pieces[0][: len(pieces[0]) - len(left[turn])]).split(),
                    *([] if left[turn] else [LINE])]
    blocks = "".join(printed).split(f"\n{LINE}\n")
    assert blocks.pop() == ""
    assert sorted(blocks) == sorted(f"[{number}] prompt {number}\n{''.join(texts).strip()}"
                                    for number, texts in enumerate(pieces))


def test_stream_prints_the_same_texts(tiny_model, tmp_path, capsys):
    folder = with_words(tiny_model("llama").folder, tmp_path / "words")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w3 w4 w5\nw7\nw9 w8 w7 w6 w5\n")
    flags = ["--model", folder, "--prompts", str(prompts), "--gen-len", "6", "--no-log",
             "--gpu-batch-size", "2", "--dtype", "float32", "--offload-dir", str(tmp_path)]
    texts = []
    for extra in ([], ["--stream"]):
        assert generate.main([*flags, *extra]) == 0
        *blocks, _ = capsys.readouterr().out.split(f"\n{LINE}\n")
        texts.append(sorted(blocks))
    assert texts[0] == texts[1] and len(texts[0]) == 3


@pytest.mark.parametrize("flags", [[], ["--prompt", "a", "--verbose", "1"],
                                   ["--prompt", "a", "--plan-only"]])
def test_stream_is_refused_where_no_text_is_printed(flags, capsys):
    assert generate.main(["--stream", *flags]) == 2
    assert "--stream has no effect" in capsys.readouterr().err
