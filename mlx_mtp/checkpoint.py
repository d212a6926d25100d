"""The marker of a converted checkpoint: the ``mtp`` block of its ``config.json``.

The head's tensors lie in ``MTP_FILE`` under the head module's own parameter names,
their norms in final form. mlx-lm reads ``model*.safetensors`` and unknown config keys
not at all, so the same directory also runs there, without the head.
"""

from typing import Any

from .models import family_of
from .models.spec import MTPSpec

MTP_FORMAT = 1
MTP_FILE = "mtp.safetensors"
# The original name: readers of every *.safetensors file know it and pass the head over.
MTP_PREFIX = "mtp."
MARKER = "mtp"


def make_marker(spec: MTPSpec, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """The marker of a head.

    Args:
        spec: the family's head.
        quantization: ``group_size``, ``bits`` and ``mode`` of the head's quantised
            layers; None if there are none.
    """
    return {
        "format": MTP_FORMAT,
        "family": spec.family,
        "num_modules": spec.num_modules,
        "hidden": spec.hidden,
        "quantization": quantization,
    }


def read_marker(config: dict[str, Any]) -> dict[str, Any] | None:
    """A checkpoint's marker, checked.

    Args:
        config: the checkpoint's ``config.json``.

    Returns:
        The marker, or None for a checkpoint without one.

    Raises:
        ValueError: for a marker of another format or family, or a damaged one.
    """
    marker = config.get(MARKER)
    if marker is None:
        return None
    if not isinstance(marker, dict):
        raise ValueError(_damaged(f"{MARKER!r} is {marker!r}"))
    version = marker.get("format")
    if version != MTP_FORMAT:
        raise ValueError(
            f"the MTP head has format {version!r}, this mlx_mtp reads format "
            f"{MTP_FORMAT}; update mlx_mtp or convert the original again"
        )
    expected = make_marker(family_of(config).SPEC, marker.get("quantization"))
    for key, value in expected.items():
        if marker.get(key) != value:
            raise ValueError(
                _damaged(f"{MARKER}.{key} is {marker.get(key)!r}, expected {value!r}")
            )
    _check_quantization(marker.get("quantization"))
    return marker


def _check_quantization(quantization: Any) -> None:
    if quantization is None:
        return
    types = {"group_size": int, "bits": int, "mode": str}
    if not isinstance(quantization, dict) or any(
        type(quantization.get(key)) is not kind for key, kind in types.items()
    ):
        raise ValueError(_damaged(f"{MARKER}.quantization is {quantization!r}"))


def _damaged(what: str) -> str:
    return f"config.json does not fit its model: {what}; convert the original again"
