"""The marker of a converted checkpoint: the ``mtp`` block of its ``config.json``.

The head's tensors lie in ``MTP_FILE`` under the head module's own parameter names,
their norms in final form. mlx-lm reads ``model*.safetensors`` and unknown config keys
not at all, so the same directory also runs there, without the head.
"""

from dataclasses import replace
from typing import Any

from .models import family_of
from .models.spec import MTPSpec

MTP_FORMAT = 1
MTP_FILE = "mtp.safetensors"
# The original name: readers of every *.safetensors file know it and pass the head over.
MTP_PREFIX = "mtp."
MARKER = "mtp"
# Whether the head has layers of its own; decided by the converter, from the tensors.
LAYERS = ("embedding", "output")


def make_marker(spec: MTPSpec, quantization: dict[str, Any] | None) -> dict[str, Any]:
    """The marker of a head.

    Args:
        spec: the head's data.
        quantization: ``group_size``, ``bits`` and ``mode`` of the head's quantised
            layers; None if there are none.
    """
    return {
        "format": MTP_FORMAT,
        "family": spec.family,
        "num_modules": spec.num_modules,
        **{name: getattr(spec, name) for name in spec.toggles},
        **{name: getattr(spec, name) for name in LAYERS},
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
    marked_spec(family_of(config).spec, marker)
    _check_quantization(marker.get("quantization"))
    return marker


def marked_spec(spec: MTPSpec, marker: dict[str, Any]) -> MTPSpec:
    """A family's spec with the values of a marker.

    Points that the marker does not name have the family's values: markers of earlier
    versions have fewer.

    Raises:
        ValueError: for a marker of another family or with an impossible value.
    """
    if marker.get("family") != spec.family:
        found = marker.get("family")
        raise ValueError(
            _damaged(f"{MARKER}.family is {found!r}, expected {spec.family!r}")
        )
    modules = marker.get("num_modules")
    counts = spec.num_modules is None and type(modules) is int and modules > 0
    if not counts and modules != spec.num_modules:
        raise ValueError(
            _damaged(
                f"{MARKER}.num_modules is {modules!r}, expected {spec.num_modules!r}"
            )
        )
    allowed = spec.toggles | dict.fromkeys(LAYERS, ("shared", "own"))
    values = {name: marker[name] for name in allowed if name in marker}
    for name, value in values.items():
        if not any(value == a and type(value) is type(a) for a in allowed[name]):
            raise ValueError(_damaged(f"{MARKER}.{name} is {value!r}"))
    return replace(spec, num_modules=modules, **values)


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
