"""Prompt caches: what a conversation has computed, kept over turns and in files.

A ``PromptCache`` is the list of the target's caches that mlx-lm's functions take, one
per layer, with the head's cache beside it. After a run it holds prompt and output
exactly, as plain decoding leaves its cache. mlx-lm's own lists are taken as well; they
have no place for the head's history, so drafting starts afresh behind them.
"""

import copy
import json
import weakref
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache

from .models import family_of
from .safetensors_check import check_file
from .speculative.cache import RecurrentCache, RewindableKVCache
from .speculative.cache_list import RewindableCacheList
from .speculative.module_cache import ModuleCaches
from .speculative.quantized_cache import QuantizedRewindableKVCache
from .speculative.round import History

FORMAT = "1"
UNKNOWN = -1  # an id in a cache that other code has filled


class PromptCache(list):
    """The target's caches of one row, and what MTP needs besides.

    Args:
        target: a cache per layer.

    Attributes:
        head: the head's cache, or None where it has seen nothing.
        carry: [1, 1, H], the hidden state of the last token, or None.
        tokens: the ids that are in the caches.
    """

    def __init__(self, target: Iterable[Any]):
        super().__init__(target)
        self.head: RewindableKVCache | RewindableCacheList | None = None
        self.carry: mx.array | None = None
        self.tokens: list[int] = []
        self._borrower: weakref.ref[Generator] | None = None

    def lend(self, run: Generator) -> None:
        """A run uses the cache from now on; one that still did ends here."""
        self.release()
        self._borrower = weakref.ref(run)

    def release(self) -> None:
        """End a run that was left without being closed, so that the cache is whole."""
        run = self._borrower() if self._borrower else None
        self._borrower = None
        if run is not None:
            run.close()

    def copied(self) -> "PromptCache":
        """A cache of its own with the same contents; a write copies, nothing before."""
        if self._borrower and self._borrower() is not None:
            raise ValueError(
                "the prompt cache is in use by a run; close the run before copying it"
            )
        new = PromptCache(map(copy.copy, self))
        new.head, new.carry = copy.copy(self.head), self.carry
        new.tokens = list(self.tokens)
        return new

    def __copy__(self) -> "PromptCache":
        return self.copied()

    def __deepcopy__(self, memo: dict) -> "PromptCache":
        return self.copied()

    @property
    def history(self) -> History:
        return History(list(self), self.head, self.carry, len(self.tokens))


def make_prompt_cache(model: nn.Module, max_kv_size: int | None = None) -> PromptCache:
    """An empty prompt cache for a model from :func:`mlx_mtp.load`.

    Raises:
        ValueError: for a ``max_kv_size``, which these models do not support: their
            attention layers need the whole text.
    """
    if max_kv_size is not None:
        raise ValueError(
            f"max_kv_size {max_kv_size} is not supported by {model.model_type}; leave "
            "it out"
        )
    family = family_of({"model_type": model.model_type})
    return PromptCache(family.target(model).make_cache())


def adopt(cache: list[Any]) -> PromptCache:
    """A prompt cache with the contents of mlx-lm's own list.

    Raises:
        ValueError: for cache types that cannot be rewound.
    """
    if isinstance(cache, PromptCache):
        cache.release()
        adopted = cache
    else:
        adopted = PromptCache(map(_adopt_one, cache))
    sizes = {c.offset.item() for c in adopted if hasattr(c, "offset")}
    if len(sizes) > 1:
        raise ValueError(f"the prompt cache's layers disagree on its length: {sizes}")
    size = max(sizes, default=len(adopted.tokens))
    if size != len(adopted.tokens):
        # Others have written to it: ids they have not told, states no head has seen.
        adopted.tokens = [*adopted.tokens, *[UNKNOWN] * size][:size]
        adopted.head = adopted.carry = None
    return adopted


def _adopt_one(cache: Any) -> Any:
    if isinstance(cache, RecurrentCache | RewindableKVCache | RewindableCacheList):
        return cache
    if type(cache) is CacheList:
        return RewindableCacheList(*map(_adopt_one, cache.caches))
    if type(cache) is ArraysCache:
        new = RecurrentCache(len(cache.cache))
        new.cache = list(cache.cache)
        return new
    if type(cache) in (KVCache, QuantizedKVCache):
        new = RewindableKVCache()
        if type(cache) is QuantizedKVCache:
            new = QuantizedRewindableKVCache(1, cache.group_size, cache.bits)
        new.keys, new.values = cache.keys, cache.values
        new.offset = new.block_start = mx.array([cache.offset], mx.int32)
        new.limit = cache.offset
        return new
    raise ValueError(
        f"a prompt cache with {type(cache).__name__} cannot be rewound; make one with "
        "mlx_mtp.make_prompt_cache"
    )


def give_back(cache: Sequence[Any], adopted: Sequence[Any]) -> None:
    """Put the contents of an adopted cache back into mlx-lm's list."""
    for i, (theirs, ours) in enumerate(zip(cache, adopted, strict=True)):
        if theirs is ours:
            continue
        if isinstance(ours, RecurrentCache):
            theirs.cache = list(ours.cache)
            continue
        if isinstance(ours, RewindableCacheList):
            give_back(theirs.caches, ours.caches)
            continue
        if isinstance(ours, QuantizedRewindableKVCache):  # it may have become one here
            theirs = cache[i] = QuantizedKVCache(ours.group_size, ours.bits)
        theirs.keys, theirs.values = ours.keys, ours.values
        theirs.offset = ours.offset.item()


def save_prompt_cache(
    file_name: str | Path, cache: PromptCache, metadata: dict[str, str] | None = None
) -> None:
    """Save a prompt cache, head's history and token ids included.

    Args:
        file_name: a ``.safetensors`` file.
        metadata: of your own, strings.

    Raises:
        ValueError: for an empty cache, or one that is not a :class:`PromptCache`.
    """
    if not isinstance(cache, PromptCache):
        raise ValueError("only caches from mlx_mtp.make_prompt_cache can be saved here")
    cache.release()
    if not cache.tokens:
        raise ValueError("the prompt cache is empty; there is nothing to save")
    arrays = {"tokens": mx.array(cache.tokens, mx.int32)}
    kinds, forms = [], {}
    entries = [*enumerate(cache), *([("head", cache.head)] if cache.head else [])]
    for name, entry in entries:
        entry.commit()
        arrays |= _arrays_of(str(name), entry)
        if isinstance(entry, QuantizedRewindableKVCache):
            forms[name] = [entry.group_size, entry.bits]
        kinds.append(type(entry).__name__)
    if cache.carry is not None:
        arrays["carry"] = cache.carry
    described = {
        "kinds": json.dumps(kinds[: len(cache)]),
        "quantized": json.dumps(forms),
        "metadata": json.dumps(metadata or {}),
    }
    mx.save_safetensors(str(file_name), arrays, {"format": FORMAT, **described})


def _arrays_of(name: str, entry: Any) -> dict[str, mx.array]:
    """What a file holds of a layer's cache."""
    if isinstance(entry, RewindableCacheList):
        parts = (_arrays_of(f"{name}.{i}", c) for i, c in enumerate(entry.caches))
        arrays = {key: array for part in parts for key, array in part.items()}
        tails = getattr(entry, "tails", None) or ()
        return arrays | {f"{name}.tail.{m}": x for m, x in enumerate(tails, 1)}
    if isinstance(entry, RewindableKVCache):
        size = entry.offset.item()
        both = {"keys": entry.keys, "values": entry.values}
        both = tree_map(lambda x: x[..., :size, :], both)
        return tree_flatten(both, prefix=f".{name}", destination={})
    return {f"{name}.{i}": array for i, array in enumerate(entry.cache)}


def load_prompt_cache(
    file_name: str | Path, return_metadata: bool = False
) -> PromptCache | tuple[PromptCache, dict[str, str]]:
    """Load a prompt cache that :func:`save_prompt_cache` wrote.

    Raises:
        ValueError: for a damaged file, or one of another kind.
        OSError: if there is no such file.
    """
    header = check_file(file_name)
    if header.metadata.get("format") != FORMAT or "kinds" not in header.metadata:
        raise ValueError(
            f"{file_name} is no prompt cache of this version of mlx_mtp; make it again"
        )
    arrays = mx.load(str(file_name))
    mx.eval(arrays)  # so that another thread can use the cache
    kinds = json.loads(header.metadata["kinds"])
    forms = json.loads(header.metadata.get("quantized", "{}"))
    cache = PromptCache(
        _load_one(arrays, str(i), kind, forms.get(str(i)))
        for i, kind in enumerate(kinds)
    )
    for key, kind in (
        ("head.keys", RewindableKVCache),
        ("head.0.keys", RewindableCacheList),
        ("head.tail.1", ModuleCaches),
    ):
        if key in arrays:
            cache.head = _load_one(arrays, "head", kind.__name__)
    cache.carry = arrays.get("carry")
    cache.tokens = arrays["tokens"].tolist()
    if return_metadata:
        return cache, json.loads(header.metadata["metadata"])
    return cache


def _filled(cache: RewindableKVCache, keys: Any, values: Any) -> RewindableKVCache:
    """The cache of a single row with these contents."""
    cache.keys, cache.values = keys, values
    cache.limit = (keys[0] if isinstance(keys, tuple) else keys).shape[2]
    cache.offset = cache.block_start = mx.array([cache.limit], mx.int32)
    return cache


def _load_one(
    arrays: dict[str, mx.array], name: str, kind: str, form: list[int] | None = None
) -> Any:
    if kind == RewindableKVCache.__name__ or form:
        new = QuantizedRewindableKVCache(1, *form) if form else RewindableKVCache()
        return _filled(
            new,
            *(
                tuple(arrays[f"{name}.{part}.{i}"] for i in range(3))
                if form
                else arrays[f"{name}.{part}"]
                for part in ("keys", "values")
            ),
        )
    if kind == ModuleCaches.__name__:
        new = ModuleCaches.empty_of(1 + sum(".tail." in key for key in arrays))
        for m, one in enumerate(new.caches):
            parts = (arrays[f"{name}.{m}.{part}"] for part in ("keys", "values"))
            _filled(one, *parts)
        new.tails = tuple(arrays[f"{name}.tail.{m}"] for m in range(1, len(new.caches)))
        return new
    if kind == RewindableCacheList.__name__:
        count = sum(
            key.endswith(".keys") for key in arrays if key.startswith(f"{name}.")
        )
        single = RewindableKVCache.__name__
        return RewindableCacheList(
            *(_load_one(arrays, f"{name}.{i}", single) for i in range(count))
        )
    states = sorted(key for key in arrays if key.startswith(f"{name}."))
    new = RecurrentCache(len(states))
    new.cache = [arrays[key] for key in states]
    return new
