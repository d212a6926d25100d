"""A path or a Hugging Face repository -> a local directory."""

import re
from pathlib import Path
from textwrap import shorten

from huggingface_hub import snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

LOAD_PATTERNS = [*DEFAULT_ALLOW_PATTERNS, "mtp.safetensors"]
CONVERT_PATTERNS = [*DEFAULT_ALLOW_PATTERNS, "*.safetensors"]
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(
    path_or_hf_repo: str | Path, patterns: list[str], revision: str | None = None
) -> Path:
    """The directory itself, or the repository's files after a download.

    Args:
        path_or_hf_repo: a directory, or ``owner/name``.
        patterns: the files to download.
        revision: branch, tag or commit of a repository.

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
        reason = shorten(str(error), 160, placeholder=" …")
        raise ValueError(
            f"{name} is no directory here and could not be downloaded ({reason}); "
            "check the name and the network, or give a local directory"
        ) from error
