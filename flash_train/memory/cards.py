"""GPUs by name: how much memory a process can have, and what CUDA takes of it."""

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
ROUNDING = 512
"""torch's CUDA allocator rounds each block up to a multiple of so many bytes."""
_CUBLAS, _CUBLAS_HOPPER = 2 * (2 * 4096 * 1024 + 8 * 16 * 1024), 2 * 32 * MIB


@dataclass(frozen=True)
class Card:
    """An NVIDIA GPU. All sizes in bytes."""

    name: str
    memory: int
    """What `torch.cuda.mem_get_info` calls total."""
    capability: tuple[int, int]
    context: int = 618 * MIB
    """Outside of torch's allocator: the driver's share, code and stacks. Measured on an H200 (torch 2.11.0+cu130)."""

    @property
    def cublas(self) -> int:
        """What torch gives cuBLAS to work in, at the first product of matrices, and leaves allocated.

        Its default for one handle (the 32 MiB were measured on an H200, torch 2.11.0+cu130), and there are two: one of
        the thread that runs the forward, one of autograd's for the backward.
        """
        return _CUBLAS_HOPPER if self.capability == (9, 0) else _CUBLAS

    @property
    def cublas_sizes(self) -> tuple[int, ...]:
        """All that it may be: of a card without a name, what any takes."""
        return (self.cublas,) if self.name else (_CUBLAS, _CUBLAS_HOPPER)


# Gibibytes of "total capacity" in torch's messages on such cards; where these differ (by display or ECC), the least.
CARDS = {
    name: Card(name, int(gib * GIB), capability)
    for name, gib, capability in (
        ("b200", 178.3, (10, 0)),
        ("h200", 139.8, (9, 0)),
        ("h100", 79.1, (9, 0)),
        ("a100_80gb", 79.1, (8, 0)),
        ("a100_40gb", 39.3, (8, 0)),
        ("l40s", 44.3, (8, 9)),
        ("l4", 22.0, (8, 9)),
        ("rtx_5090", 31.3, (12, 0)),
        ("rtx_4090", 23.6, (8, 9)),
        ("rtx_3090", 23.5, (8, 6)),
    )
}


def card_of(budget: int) -> Card:
    """A card of `budget` bytes without a name: what the least that bf16 training needs has, compute capability 8.0."""
    return Card("", budget, (8, 0))
