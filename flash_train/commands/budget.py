"""`budget=24GiB`: on a larger GPU a process gets no more than a GPU of so much would give it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flash_train.memory.sizes import human_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


def check_budget(config: Mapping[str, Any]) -> int | None:
    """Its bytes; None without one. Raises ValueError for what is no size, and where there is no GPU to limit."""
    if config["budget"] is None:
        return None
    size = parse_bytes(config["budget"])
    if config["trainer"].get("accelerator") == "cpu":
        raise ValueError(
            f"budget limits what a process takes of a GPU, got budget={config['budget']} with trainer=cpu; leave it "
            "out, choose trainer=cuda, or let flash-plan predict what fits"
        )
    return size


def limit_memory(budget: int | None, device: "torch.device") -> dict[str, int | None]:
    """Limit torch's allocator to `budget` less the CUDA context, which is no part of it; both as facts of the run.

    Raises ValueError if the GPU has less than `budget`, or the context alone takes it.
    """
    import torch

    from flash_train.memory.cards import card_of

    if budget is None:
        return {"budget_bytes": None, "allocator_limit_bytes": None}
    context, total = card_of(budget).context, torch.cuda.mem_get_info(device)[1]
    if not context < budget <= total:
        raise ValueError(
            f"budget must be from {human_bytes(context)} (the CUDA context) to what the GPU has, {human_bytes(total)}, "
            f"got {human_bytes(budget)}; leave it out to use all"
        )
    limit = budget - context
    torch.cuda.set_per_process_memory_fraction(limit / total, device)
    return {"budget_bytes": budget, "allocator_limit_bytes": limit}
