"""The file of ``--prompt-cache-file``: it belongs to one model, and is always whole."""

import argparse
import os
from pathlib import Path

from .cli import one_line
from .prompt_cache import PromptCache, load_prompt_cache, save_prompt_cache

CACHE_SUFFIX = ".safetensors"


def cache_file(text: str) -> Path:
    """A file for a prompt cache; refused before a model is loaded for it."""
    file = Path(text)
    if file.suffix != CACHE_SUFFIX:
        raise argparse.ArgumentTypeError(f"must end in {CACHE_SUFFIX}, not {text}")
    if not file.parent.is_dir() or file.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a directory, not {text}")
    return file


def model_name(model: str) -> str:
    """How a prompt cache names its model: a directory by its absolute path."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def load_cache(file: Path, model: str) -> PromptCache:
    """The prompt cache of a file, which must have been made for the model."""
    cache, metadata = load_prompt_cache(file, return_metadata=True)
    theirs = metadata.get("model", "an unnamed model")
    if theirs != model_name(model):
        raise ValueError(
            f"{file} was made for {theirs}, not for {model_name(model)}; use that "
            "model, or another --prompt-cache-file"
        )
    return cache


def save_cache(file: Path, cache: PromptCache, model: str) -> None:
    """Write beside the file, then replace it: whatever happens, one is whole."""
    part = file.with_name(f".{file.stem}.{os.getpid()}{CACHE_SUFFIX}")
    try:
        save_prompt_cache(part, cache, {"model": model_name(model)})
        os.replace(part, file)
    except RuntimeError as error:  # mlx's, where a file cannot be written
        raise OSError(f"{file} cannot be written ({one_line(error)})") from error
    finally:
        part.unlink(missing_ok=True)
