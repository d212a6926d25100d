"""Directory or repository -> (model, tokenizer), the head attached as ``model.mtp``.

Reads the marker in ``config.json`` and never guesses: a head that is unmarked,
incomplete or of the wrong shape is refused, so a random head never runs.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import infer_quant_config, load_model, load_tokenizer

from .checkpoint import MTP_FILE, MTP_PREFIX, marked_spec, read_marker
from .cli import one_line
from .hub import LOAD_PATTERNS, resolve
from .models import family_of
from .models.assistant import MODEL_TYPE as ASSISTANT
from .models.assistant import Assistant, check_assistant
from .models.family import Family
from .safetensors_check import check_file
from .source import num_target_layers, read_config
from .stop import end_token_ids

MAX_REASON = 200
DEMO_PATH = Path(__file__).parent / "demo"
CONVERT_AGAIN = (
    "convert the original again: "
    "python convert.py --hf-path ORIGINAL_MODEL --mlx-path NEW_DIRECTORY"
)


def load(
    path_or_hf_repo: str | Path,
    *,
    lazy: bool = False,
    mtp: bool = True,
    draft_model: str | Path | None = None,
    mtp_config: dict[str, Any] | None = None,
    tokenizer_config: dict | None = None,
    revision: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a directory that ``convert`` or mlx-lm wrote, or such a repository.

    Args:
        path_or_hf_repo: a directory, or ``owner/name`` on the Hugging Face hub.
        lazy: leave the weights on disk until they are used, which must be in the
            thread that calls this. Default: ``False``.
        mtp: attach the head if there is one. Default: ``True``.
        draft_model: for Gemma 4, directory or repository of the model's assistant as
            it was published; it takes the head's place. Default: none.
        mtp_config: other values for the points on which engines disagree about the
            head, such as ``{"hidden": "pre_norm"}``; see ``models.spec``. They change
            acceptance, never the output. Default: the checkpoint's.
        tokenizer_config: keyword arguments for the tokenizer.
        revision: branch, tag or commit of a repository.

    Returns:
        mlx-lm's model, which stock functions such as ``mlx_lm.generate_step`` take as
        well, with ``model.mtp`` the head or ``None``; and mlx-lm's tokenizer wrapper.

    Raises:
        ValueError: the directory cannot be run as it is; says why and the way out.
    """
    path = resolve(path_or_hf_repo, LOAD_PATTERNS, revision)
    config = read_config(path)
    family = family_of(config)
    marker = read_marker(config)
    check_files(path, config)
    head_file = path / MTP_FILE
    if mtp_config and (marker is None or not mtp):
        raise ValueError(f"mtp_config {mtp_config} needs a checkpoint with an MTP head")
    if head_file.exists() and marker is None:
        raise ValueError(
            f"{head_file} is not marked in config.json, so its norm convention is "
            f"unknown; {CONVERT_AGAIN}"
        )
    if mtp and marker is not None and not head_file.exists():
        raise ValueError(
            f"{path / 'config.json'} promises an MTP head, but {MTP_FILE} is missing; "
            f"{CONVERT_AGAIN}"
        )
    with _explained(path, CONVERT_AGAIN):
        model, _ = load_model(path, lazy=True)
    family.make_rewindable(model)
    model.mtp = None
    if mtp and marker is not None:
        spec = marked_spec(family.spec, marker).toggled(mtp_config or {})
        model.mtp = load_head(head_file, family.head(model, config, spec))
    if mtp and draft_model is not None:
        model.mtp = load_assistant(resolve(draft_model, LOAD_PATTERNS), model, family)
    # Before the weights are read, which can take minutes.
    tokenizer = _load_tokenizer(path, tokenizer_config)
    if not lazy:
        with _explained(path, CONVERT_AGAIN):
            mx.eval(model.parameters())
    return model, tokenizer


@contextlib.contextmanager
def _explained(path: Path, way_out: str) -> Iterator[None]:
    """What a library says of a file that does not fit, as one line."""
    try:
        yield
    except Exception as error:  # mlx-lm and transformers raise many kinds
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        reason = shorten(f"{kind}{one_line(error)}", MAX_REASON, placeholder=" …")
        raise ValueError(f"{path} cannot be loaded ({reason}); {way_out}") from error


def _load_tokenizer(path: Path, tokenizer_config: dict | None) -> TokenizerWrapper:
    """mlx-lm's tokenizer, stopping at the end tokens of every file that names some."""
    way_out = "download the original's tokenizer files"
    with _explained(path, way_out):
        tokenizer = load_tokenizer(path, tokenizer_config)
        tokenizer.eos_token_ids = tokenizer.eos_token_ids | end_token_ids(path)
    # Without its files transformers builds a tokenizer that knows no text.
    if not tokenizer.encode("a", add_special_tokens=False):
        raise ValueError(f"{path} has no usable tokenizer; {way_out}")
    return tokenizer


def check_files(path: Path, config: dict[str, Any]) -> None:
    """Refuse weight files that are missing, damaged or in Hugging Face's raw layout.

    That shows in a convolution, or in a head that is still among the target's tensors.
    """
    spec, num_layers = family_of(config).spec, num_target_layers(config)
    files = sorted(path.glob("model*.safetensors"))
    if not files:
        raise ValueError(f"{path} holds no model*.safetensors")
    for file in (*files, *path.glob(MTP_FILE)):
        header = check_file(file)
        ours = file.name == MTP_FILE or header.metadata.get("format") == "mlx"
        for name, info in header.tensors.items():
            raw = name.endswith("conv1d.weight") and info.shape[-1:] != (1,)
            head = not ours and spec.locate(name, num_layers)
            if raw or head:
                raise ValueError(
                    f"{path} is in Hugging Face's raw layout; convert it first: "
                    f"python convert.py --hf-path {path} --mlx-path NEW_DIRECTORY"
                )


def load_assistant(path: Path, model: nn.Module, family: Family) -> Assistant:
    """A drafter that is a checkpoint of its own.

    Raises:
        ValueError: for a model that has no such drafter, a drafter of another model, or
            tensors that are missing, unknown or of the wrong shape.
    """
    if family.separate is None:
        raise ValueError(
            f"draft_model {path} is for Gemma 4; a {model.model_type} model drafts "
            "with its MTP head"
        )
    config = read_config(path)
    if config.get("model_type") != ASSISTANT:
        raise ValueError(
            f"draft_model {path} is a {config.get('model_type')} model; give "
            f"{family.separate}"
        )
    weights: dict[str, mx.array] = {}
    with _explained(path, "download the assistant again"):
        check_assistant(config, family.target(model))
        assistant = Assistant(config)
        for file in sorted(path.glob("*.safetensors")):
            check_file(file)
            weights |= mx.load(str(file))
        assistant.load_weights(list(weights.items()), strict=True)
    return assistant.eval()


def load_head(file: Path, head: nn.Module) -> nn.Module:
    """Fill a freshly built head from its file; every tensor must fit.

    Raises:
        ValueError: names the tensors that are missing, unknown or of the wrong shape.
    """
    with _explained(file, CONVERT_AGAIN):
        tensors = mx.load(str(file))
    weights = {name.removeprefix(MTP_PREFIX): value for name, value in tensors.items()}
    check_head_names(file, weights, head)

    def quantization(path: str, module: nn.Module) -> bool | dict:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        return infer_quant_config(path, module, weights)

    with _explained(file, CONVERT_AGAIN):
        nn.quantize(head, class_predicate=quantization)
    expected = dict(tree_flatten(head.parameters()))
    wrong = [
        f"{name} is {weights[name].shape if name in weights else 'missing'}, "
        f"not {value.shape}"
        for name, value in expected.items()
        if name not in weights or weights[name].shape != value.shape
    ]
    if wrong:
        raise ValueError(
            f"{file} does not fit the model: {'; '.join(wrong[:3])}; {CONVERT_AGAIN}"
        )
    with _explained(file, CONVERT_AGAIN):
        head.load_weights(list(weights.items()))
    return head.eval()


def check_head_names(file: Path, weights: dict[str, mx.array], head: nn.Module) -> None:
    """Every parameter has a tensor and every tensor a parameter."""
    parameters = {name for name, _ in tree_flatten(head.parameters())}
    packed = {n.rsplit(".", 1)[0] for n in weights if n.endswith(".scales")}
    extras = {f"{p}.{kind}" for p in packed for kind in ("scales", "biases")}
    missing = sorted(parameters - set(weights))
    unknown = sorted(set(weights) - parameters - extras)
    for what, names in (("lacks", missing), ("holds unknown", unknown)):
        if names:
            raise ValueError(
                f"{file} {what} {len(names)} tensor(s): {', '.join(names[:3])}; "
                f"{CONVERT_AGAIN}"
            )
