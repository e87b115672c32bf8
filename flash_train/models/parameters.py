"""How many parameters a model has, and where."""

from collections.abc import Mapping

from torch import nn

# The first of these that occurs in a parameter's name says which part it belongs to; the others are norms.
PARTS = {
    "token_embedding": "token embedding",
    "position_embedding": "position embedding",
    "attention": "attention",
    "feed_forward": "feed-forward",
    "head": "output head",
}


def parameter_count(model: nn.Module) -> dict[str, int]:
    """The number of parameters by part, in the order of the model; a shared one counts once, an empty part is left out.

    The gains of QK-norm belong to the attention, all other norms are one part.
    """
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        components = name.split(".")
        part = next((label for key, label in PARTS.items() if key in components), "norms")
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def parameter_table(counts: Mapping[str, int]) -> str:
    """``counts`` as lines of text, with each part's share and a last line for the total."""
    total = sum(counts.values())
    rows = [*counts.items(), ("total", total)]
    label_width = max(len(label) for label, _ in rows)
    count_width = len(f"{total:,}")
    return "\n".join(
        f"{label:<{label_width}}  {count:>{count_width},}  {100 * count / max(total, 1):5.1f} %"
        for label, count in rows
    )
