"""What differs between MTP heads and is data, not code."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MTPSpec:
    """One family's head.

    Args:
        family: the name in the checkpoint's marker.
        prefixes: where source files keep the head's tensors, longest first.
        num_modules: modules in the head; one is run again for every further draft.
        hidden: the stage of the target's hidden state the head reads, before or after
            the final norm (``"pre_norm"`` or ``"post_norm"``).
        zero_centred_norms: suffixes of the norm weights that source files store as w
            for a scale of 1 + w.
    """

    family: str
    prefixes: tuple[str, ...]
    num_modules: int
    hidden: str
    zero_centred_norms: tuple[str, ...]
