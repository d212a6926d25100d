"""A path or a Hugging Face repository -> a local directory with the files needed.

The hub's client resumes broken downloads and keeps its cache. Knows names of files and
of tensors, not what is in them.
"""

import re
from fnmatch import fnmatch
from pathlib import Path
from textwrap import shorten

from huggingface_hub import HfApi, snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from .models.spec import MTPSpec
from .source import SIDECARS, num_target_layers, read_config, read_weight_map

LOAD_PATTERNS = [*DEFAULT_ALLOW_PATTERNS, "mtp.safetensors"]
WEIGHTS = "*.safetensors"
# The same weights again in another layout, and what is no part of a model.
NO_WEIGHTS = ("consolidated*", "adapter_*", "optimizer*")
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(
    path_or_hf_repo: str | Path,
    patterns: list[str],
    revision: str | None = None,
    *,
    partial: bool = False,
) -> Path:
    """The directory itself, or the repository's files after a download.

    Args:
        path_or_hf_repo: a directory, or ``owner/name``.
        patterns: the files to download.
        revision: branch, tag or commit of a repository.
        partial: whether files may be missing if the hub cannot be reached: what the
            cache has is used, and the caller sees what it lacks.

    Raises:
        ValueError: neither a directory nor a repository that can be reached.
    """
    path, name = Path(path_or_hf_repo), str(path_or_hf_repo)
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{name} is a file; give the directory that holds it")
    if isinstance(path_or_hf_repo, Path) or not REPOSITORY.fullmatch(name):
        raise ValueError(
            f"{name} is no directory, nor a Hugging Face repository (owner/name)"
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client lets its HTTP library's errors through
        cached = getattr(error, "snapshot_path", None)
        if partial and cached is not None:
            return Path(cached)
        reason = shorten(str(error), 160, placeholder=" …")
        raise ValueError(
            f"{name} is no directory here and could not be downloaded ({reason}); "
            "check the name and the network, or give a local directory"
        ) from error


def fetch_source(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """A whole checkpoint: configs, tokenizer and every weight file of the model.

    Args:
        path_or_hf_repo: a directory, or ``owner/name``.
        revision: branch, tag or commit of a repository.

    Raises:
        ValueError: as :func:`resolve`.
    """
    names = _list(path_or_hf_repo, revision)
    patterns = [*DEFAULT_ALLOW_PATTERNS, WEIGHTS]
    if names is not None:
        patterns = [n for n in names if _beside_weights(n)] + _weight_files(names)
    return resolve(path_or_hf_repo, patterns, revision, partial=names is None)


def fetch_head(
    path_or_hf_repo: str | Path, spec: MTPSpec, revision: str | None = None
) -> Path:
    """A checkpoint's config and index, and of its weights the files with the head.

    Args:
        path_or_hf_repo: a directory, or ``owner/name``.
        spec: the head's, which knows the names of its tensors.
        revision: branch, tag or commit of a repository.

    Raises:
        ValueError: as :func:`resolve`.
    """
    names = _list(path_or_hf_repo, revision)
    if names is None:
        return resolve(path_or_hf_repo, ["*.json", WEIGHTS], revision, partial=True)
    small = [n for n in names if "/" not in n and n.endswith(".json")]
    path = resolve(path_or_hf_repo, small, revision)
    layers = num_target_layers(read_config(path))
    weight_map, weights = read_weight_map(path), _weight_files(names)
    listed = {n for key, n in weight_map.items() if spec.locate(key, layers)}
    chosen = (
        listed
        or {n for n in weights if n in SIDECARS}
        # A shard may be missing from the index.
        or set(weights) - set(weight_map.values())
    )
    return resolve(path_or_hf_repo, small + sorted(chosen), revision)


def _list(path_or_hf_repo: str | Path, revision: str | None) -> list[str] | None:
    """A repository's files; None for a directory, or if the hub cannot be asked."""
    name = str(path_or_hf_repo)
    if Path(path_or_hf_repo).exists() or not REPOSITORY.fullmatch(name):
        return None
    try:
        siblings = HfApi().model_info(name, revision=revision).siblings
    except Exception:  # resolve tries the cache, and says what is wrong
        return None
    return [file.rfilename for file in siblings or []]


def _beside_weights(name: str) -> bool:
    if "/" in name or name.endswith(".safetensors"):
        return False
    return any(fnmatch(name, pattern) for pattern in DEFAULT_ALLOW_PATTERNS)


def _weight_files(names: list[str]) -> list[str]:
    """The model's, as :func:`source.find_files` looks for them."""
    return [
        name
        for name in names
        if fnmatch(name, WEIGHTS)
        and ("/" not in name or name in SIDECARS)
        and not any(fnmatch(name, pattern) for pattern in NO_WEIGHTS)
    ]
