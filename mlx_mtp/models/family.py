"""A model family: its data and the few functions in which families differ.

A family is a subclass in a file of its own. What it must have is ``spec``, ``base`` and
``head_layer``; the rest is for families that need more. Knows no files.
"""

from types import ModuleType
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from .head import MTPHead
from .heads import PREFIX as MODULE
from .heads import MTPHeads
from .spec import MTPSpec
from .target import Target

Config = dict[str, Any]
Weights = dict[str, mx.array]


class Family:
    """What the loader and the converter ask of a family.

    Attributes:
        spec: the head's data.
        base: mlx-lm's module of the target.
        swaps: mlx-lm's layer classes and ours that take their place; they share the
            weights (``from_base``).
        core, embedding, norm: names in mlx-lm's model, see :class:`Target`.
        vision_prefixes: tensors that the text model does not have.
        separate: what drafts for the family, where that is no head of its checkpoints.
        unused: parts of names of tensors that mlx-lm's model does not have.
        raw_names: parts of names that only sources in the original layout have, where
            norms are shifted; default: convolutions tell.
    """

    spec: ClassVar[MTPSpec]
    base: ClassVar[ModuleType]
    swaps: ClassVar[dict[type, type]] = {}
    core: ClassVar[str] = "model"
    embedding: ClassVar[str] = "embed_tokens"
    norm: ClassVar[str] = "norm"
    vision_prefixes: ClassVar[tuple[str, ...]] = ()
    separate: ClassVar[str | None] = None
    unused: ClassVar[tuple[str, ...]] = ()
    raw_names: ClassVar[tuple[str, ...]] = ()

    def head_layer(self, args: Any, config: Config) -> nn.Module:
        """mlx-lm's layer for the head.

        Args:
            args: mlx-lm's, of the text model.
            config: the text model's in ``config.json``, which has more.
        """
        raise NotImplementedError

    def build_model(self, config: Config) -> nn.Module:
        """mlx-lm's model for a config, with random weights."""
        return self.base.Model(self.base.ModelArgs.from_dict(config))

    def text_model(self, model: nn.Module) -> nn.Module:
        """The part with ``model``, ``args`` and the output layer."""
        return model

    def target(self, model: nn.Module) -> Target:
        """The model in the parts the engine uses."""
        head = getattr(model, "mtp", None)
        spec = self.spec if head is None else head.spec
        text = self.text_model(model)
        return Target(text, spec.hidden, self.core, self.embedding, self.norm)

    def head(
        self, model: nn.Module, config: Config, spec: MTPSpec
    ) -> MTPHead | MTPHeads:
        """A head for a model, with random weights, its layers ready to be rewound."""
        args = self.text_model(model).args
        config = config.get("text_config", config)
        modules = []
        for number in range(spec.num_modules):
            layer, options = self.module_parts(args, config, number)
            modules.append(
                MTPHead(
                    layer,
                    spec,
                    args.hidden_size,
                    self.norm_eps(args),
                    vocab_size=args.vocab_size,
                    **options,
                )
            )
        head = modules[0] if len(modules) == 1 else MTPHeads(modules)
        self.make_rewindable(head)
        return head

    def norm_eps(self, args: Any) -> float:
        return args.rms_norm_eps

    def module_parts(
        self, args: Any, config: Config, module: int
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Layer and options of a module; default: the same for each."""
        return self.head_layer(args, config), self.head_options(args, config)

    def head_options(self, args: Any, config: Config) -> dict[str, Any]:
        """Keyword arguments of :class:`MTPHead` that the config decides."""
        return {}

    def make_rewindable(self, module: nn.Module) -> None:
        """Swap layers in place, weights shared."""
        swaps = [
            (name, self.swaps[type(child)].from_base(child))
            for name, child in module.named_modules()
            if type(child) in self.swaps
        ]
        module.update_modules(tree_unflatten(swaps))

    def target_weights(self, weights: Weights) -> Weights:
        """A source's tensors of the target in a form that mlx-lm's ``sanitize`` takes.

        It must not depend on which of them are given.
        """
        return weights

    def weights_by_module(self, weights: Weights, model: nn.Module) -> Weights:
        """``head_weights`` of every module of a head of several."""
        if not any(name.startswith(MODULE.format(0)) for name in weights):
            return self.head_weights(weights, model)
        modules: dict[str, Weights] = {}
        for name, value in weights.items():
            _, number, inner = name.split(".", 2)
            modules.setdefault(MODULE.format(number), {})[inner] = value
        return {
            prefix + name: value
            for prefix, inside in modules.items()
            for name, value in self.head_weights(inside, model).items()
        }

    def head_weights(self, weights: Weights, model: nn.Module) -> Weights:
        """A source's tensors of the head, under their parameter names, in final layout.

        Norms are shifted later. What mlx-lm does to a layer of the target is done to
        the head's by the same code.
        """
        return self.sanitized(weights, model, "layers.0.", "model.layers.0.")

    def sanitized(
        self, weights: Weights, model: nn.Module, inside: str, outside: str
    ) -> Weights:
        """The head's tensors ``inside``, sanitised as if they lay ``outside``."""
        layer = {
            outside + name.removeprefix(inside): value
            for name, value in weights.items()
            if name.startswith(inside)
        }
        rest = {k: v for k, v in weights.items() if not k.startswith(inside)}
        if hasattr(model, "sanitize"):
            layer = model.sanitize(layer)
        return rest | {
            inside + name.removeprefix(outside): value for name, value in layer.items()
        }

    def alike(self, path: str, model: nn.Module) -> str:
        """The path in the target of a layer that is quantised as the head's ``path``.

        mlx-lm's rules, which are made for the target's, go by the path.
        """
        return path
