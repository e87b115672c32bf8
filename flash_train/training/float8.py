"""Linear layers that multiply in fp8, by torchao."""

import dataclasses

from torch import nn

__all__ = ["RECIPES", "convert_to_float8"]

RECIPES = ("tensorwise", "rowwise")
"""torchao's names: one scale for a tensor, or one for each row."""

_MULTIPLE = 16  # of both sizes of a matrix, for the GPU's fp8 products


def convert_to_float8(model: nn.Module, recipe: str = "tensorwise", *, emulate: bool = False) -> list[str]:
    """Let the linear layers of `model` make their three products in fp8, in place; the names of those that do.

    Operands are scaled and rounded on the way in, from step to step; weights, gradients and optimizer state stay as
    they are, and so do the names in the state dict. A layer with a size that is no multiple of 16 is left alone, and
    so is a tied head, which is no layer. To be compiled: alone, the scaling costs more than the products save.

    Args:
        recipe: one of RECIPES.
        emulate: round to fp8 but multiply as before, for machines without fp8.

    Raises:
        ValueError: torchao cannot be imported, an unknown recipe, no layer can be converted, or a feed-forward network
            has ``recompute``, which would do nothing: its operator takes plain linear layers alone.
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe is one of {', '.join(RECIPES)}, not {recipe!r}.")
    if any(getattr(part, "recompute", False) for part in model.modules()):
        raise ValueError(
            "fp8 puts layers of its own into a feed-forward network, which then keeps its activation: "
            "set checkpointing=none, or selective, in place of activation, which a recipe may have chosen "
            "(recompute=False)."
        )
    fitting = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not any(size % _MULTIPLE for size in part.weight.shape)
    ]
    if not fitting:
        raise ValueError(
            f"{type(model).__name__} has no linear layer whose sizes are multiples of {_MULTIPLE}, as fp8 needs: "
            "choose another width, or leave fp8 out (precision=bf16_mixed)."
        )
    try:
        # An extra, which need not be there.
        from torchao.float8 import (  # pyright: ignore[reportMissingImports]
            Float8LinearConfig,
            convert_to_float8_training,
        )
    except ImportError as error:
        raise ValueError(
            f"fp8 needs torchao, which cannot be imported ({error}): pip install 'flash_train[fp8]', or leave fp8 out "
            "(precision=bf16_mixed)."
        ) from error
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in fitting, config=config)
    return fitting
