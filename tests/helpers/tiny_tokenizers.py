"""Tiny models with a tokenizer of words, for what needs text."""

import json
import shutil
from pathlib import Path

WORDS = [f"w{number}" for number in range(119)] + ["###"]
"""The word of each token id, as many as the vocabulary of the tiny models of LLaMA's family."""


def with_words(folder: Path, target: Path, *, chat_template: str | None = None) -> str:
    """Copy a tiny model and give it a tokenizer; returns the new folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(folder, target, dirs_exist_ok=True)
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(target)
    return str(target)


def with_bytes(folder: Path, target: Path) -> str:
    """Copy a tiny model and give it a byte-level tokenizer; returns the new folder.

    A small vocabulary has the first tokens alone, which are ASCII.
    """
    shutil.copytree(folder, target)
    tiny_tokenizer("byte-level").save_pretrained(target)
    return str(target)


def tiny_tokenizer(kind: str):
    """A small tokenizer of a kind: byte-level, llama, gemma, unigram, wordpiece or words."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>"]
    corpus = 3 * ["so time and time again", "so so said it, and said: time is 日本 time!",
                  "  a\n  b"]
    options = {"vocab_size": 300, "special_tokens": special, "show_progress": False}
    data = [f"<0x{value:02X}>" for value in range(256)]
    if kind == "byte-level":
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        inner.train_from_iterator(corpus, trainers.BpeTrainer(
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options))
    elif kind in ("llama", "gemma"):
        inner = Tokenizer(models.BPE(unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
        inner.train_from_iterator(corpus, trainers.BpeTrainer(**options))
        learned = json.loads(inner.to_str())["model"]
        vocab = {name: token for token, name in enumerate([*special, *data, *(
            name for name in learned["vocab"] if name not in special)])}
        inner = Tokenizer(models.BPE(vocab, [tuple(pair) for pair in learned["merges"]],
                                     unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        spaces, first = [normalizers.Replace(" ", "▁")], []
        if kind == "llama":
            spaces, first = [normalizers.Prepend("▁"), *spaces], [decoders.Strip(" ", 1, 0)]
        inner.normalizer = normalizers.Sequence(spaces)
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), *first])
    elif kind == "unigram":
        inner = Tokenizer(models.Unigram())
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        inner.decoder = decoders.Metaspace()
        inner.train_from_iterator(corpus, trainers.UnigramTrainer(unk_token="<unk>", **options))
    elif kind == "wordpiece":
        inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
        inner.train_from_iterator(corpus, trainers.WordPieceTrainer(**options))
    else:
        inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(
            dict.fromkeys([*special, *" ".join(corpus).split()]))}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(special)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>",
                                   eos_token="</s>")
