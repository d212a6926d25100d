"""What differs between MTP heads and is data, not code.

Where engines disagree about a head (FastDeploy, vLLM, SGLang and transformers do), the
point is a *toggle*: the converter writes the family's value into the checkpoint's
marker, and ``load(path, mtp_config={...})`` overrides it. A wrong value never changes
the output, it only costs acceptance.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Stage = Literal["post_norm", "pre_norm"]
STAGES = ("post_norm", "pre_norm")


@dataclass(frozen=True)
class MTPSpec:
    """One family's head.

    Args:
        family: the name in the checkpoint's marker.
        model_types: the ``model_type``s of ``config.json``.
        prefixes: where source files keep the head's tensors, longest first. ``{layer}``
            is a layer past ``num_hidden_layers``, ``{module}`` a number from 0.
        names: (beginning of a name behind the prefix, what replaces it); the first that
            fits counts. The result is a parameter name of :class:`head.MTPHead`.
        count_keys: the config's keys for the number of modules.
        num_modules: modules of the head; None to count them in the tensors.
        modules: what feeds a module: ``"reused"``, one module runs again for every
            further draft; ``"chained"``, each reads the output of the one before;
            ``"target_fed"``, each reads the target's hidden state.
        concat: the order of the two halves that the projection reads.
        hidden: the stage of the target's hidden state that the head reads, before or
            after the final norm.
        chain: the stage of the head's own output that the next draft step reads.
        final_norm: the norm before the output layer: the head's ``"own"``, the target's
            (``"main"``) or ``"none"``.
        mask_first: whether the embedding that is paired with position 0 counts as zero.
        embedding: ``"own"`` if the head has an embedding of its own, or ``"shared"``.
        output: ``"own"`` if the head has an output layer of its own, or ``"shared"``.
        zero_centred_norms: suffixes of the norm weights that source files store as w
            for a scale of 1 + w.
    """

    family: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]
    names: tuple[tuple[str, str], ...] = ()
    count_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    num_modules: int | None = 1
    modules: Literal["reused", "chained", "target_fed"] = "reused"
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    hidden: Stage = "post_norm"
    chain: Stage = "post_norm"
    final_norm: Literal["own", "main", "none"] = "own"
    mask_first: bool = False
    embedding: Literal["shared", "own"] = "shared"
    output: Literal["shared", "own"] = "shared"
    zero_centred_norms: tuple[str, ...] = ()

    @property
    def toggles(self) -> dict[str, tuple[Any, ...]]:
        """The disputed points and their possible values."""
        if self.final_norm == "own":
            return {"hidden": STAGES, "chain": STAGES, "mask_first": (False, True)}
        # Without a norm of its own a head has one stage only.
        return {
            "hidden": STAGES,
            "final_norm": ("main", "none"),
            "mask_first": (False, True),
        }

    def toggled(self, values: Mapping[str, Any]) -> "MTPSpec":
        """With other values for the disputed points.

        Raises:
            ValueError: for a name or a value that the family does not have.
        """
        for name, value in values.items():
            allowed = self.toggles.get(name)
            if allowed is None:
                raise ValueError(
                    f"mtp_config has no {name!r} for {self.family}; "
                    f"possible: {', '.join(self.toggles)}"
                )
            # By identity of kind too: 1 is no truth value here.
            if not any(value == a and type(value) is type(a) for a in allowed):
                raise ValueError(
                    f"mtp_config {name} {value!r} is not possible; "
                    f"possible: {', '.join(map(repr, allowed))}"
                )
        return replace(self, **values)

    def locate(self, key: str, num_layers: int | None) -> tuple[int, str] | None:
        """Module and parameter name of a source's tensor; None for the target's.

        Args:
            key: the tensor's name in the source.
            num_layers: the target's, so that later ones are the head's.
        """
        for match in self._matches(key):
            found = match.groupdict()
            module = int(found.get("module") or 0)
            if "layer" in found:
                if num_layers is None or int(found["layer"]) < num_layers:
                    continue
                module = int(found["layer"]) - num_layers
            return module, self._renamed(key[match.end() :])
        return None

    def _matches(self, key: str) -> Iterator[re.Match[str]]:
        for prefix in self.prefixes:
            pattern = re.escape(prefix)
            for number in ("layer", "module"):
                pattern = pattern.replace(rf"\{{{number}\}}", rf"(?P<{number}>\d+)")
            if match := re.match(pattern, key):
                yield match

    def _renamed(self, name: str) -> str:
        for old, new in self.names:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name
