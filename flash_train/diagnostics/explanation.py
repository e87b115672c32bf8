"""Why memory ran out: what was asked for, what was there, what to change. Worked out after the frames have unwound."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer

from flash_train.diagnostics.incident import Incident
from flash_train.diagnostics.monitor import step_of
from flash_train.memory.advice import Advisory, memory_advice, modelled_advice
from flash_train.memory.attribution import Breakdown
from flash_train.memory.cards import MIB, Card
from flash_train.memory.changes import COUNTERS, Advice
from flash_train.memory.levers import optimizer_like
from flash_train.memory.trace import Moment

FRAGMENTED = 0.1
"""Of what is reserved: when so much is not allocated, it is said."""
CONTEXT = 1536 * MIB
"""Outside of the allocator, more than a process's own context and libraries take."""


@dataclass(frozen=True)
class Circumstances:
    """Where a run was when memory ran out, and how it trains. All that an explanation may look at."""

    phase: str
    """forward, backward, optimizer, step (manual optimization), validation, or in words what else went on."""
    step: int
    rank: int
    module: nn.Module
    batch: Any
    optimizers: tuple[Optimizer, ...]
    precision: str
    accumulate: int
    gradient_clip: float | None
    device: torch.device
    device_name: str
    outside_before: int | None = None
    """Bytes of the device that were outside of the allocator when the run began."""
    probed: Breakdown | None = None
    """The last probed step."""


@dataclass(frozen=True)
class Explanation:
    """All sizes in bytes."""

    message: str
    phase: str
    step: int
    rank: int
    device: str
    incident: Incident
    moment: Moment | None
    """The block that was asked for, and what was alive then, by the predicted or the probed step; None if it has no
    block of that size."""
    parameters: tuple[str, ...]
    """Where there is no such moment: the parameters of that size. In a first optimizer step their state is made."""
    basis: str
    """Which of the two steps: "prediction", or who measured the probed step; "" if there is neither."""
    advisory: Advisory | None
    advice: tuple[Advice, ...]
    """The advisory's, and what the allocator's counters say."""
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything, the tensors of the moment to the fiftieth."""
        moment = None
        if self.moment is not None:
            memory = replace(self.moment.memory, tensors=self.moment.memory.tensors[:50])
            moment = asdict(replace(self.moment, memory=memory))
        advisory = self.advisory
        return {
            "message": self.message,
            "phase": self.phase,
            "step": self.step,
            "rank": self.rank,
            "device": self.device,
            "incident": asdict(self.incident),
            "moment": moment,
            "parameters": list(self.parameters),
            "basis": self.basis,
            "predicted_peak_bytes": None if advisory is None else advisory.breakdown.peak.measured,
            "limit_bytes": None if advisory is None else advisory.limit,
            "advice": [asdict(advice) for advice in self.advice],
            "left_out": list(self.left_out),
            "step_breakdown": None if advisory is None else advisory.breakdown.to_json(),
        }


def explain(incident: Incident, message: str, where: Circumstances, *, seconds: float) -> Explanation:
    """Takes fake steps for some `seconds`. What cannot be predicted is said, with the reason; never an exception of the
    prediction's."""
    limit = None if incident.counters is None else incident.counters.available
    advisory, left_out = advised(where, limit=limit, seconds=seconds)
    moment = None if advisory is None else _moment(incident, where, advisory.breakdown)
    measured = counters_advice(incident, where.outside_before)
    return Explanation(
        message=message,
        phase=where.phase,
        step=where.step,
        rank=where.rank,
        device=where.device_name,
        incident=incident,
        moment=moment,
        parameters=() if moment is not None else _alike(incident, where.module),
        basis="" if advisory is None else advisory.breakdown.source,
        advisory=advisory,
        advice=(*measured, *(() if advisory is None else advisory.advice)),
        left_out=left_out,
    )


def circumstances(trainer: Trainer, module: LightningModule, batch: Any, phase: str, **more: Any) -> Circumstances:
    """Of `trainer`, now."""
    device = trainer.strategy.root_device
    return Circumstances(
        phase=phase,
        step=step_of(trainer),
        rank=trainer.global_rank,
        module=module,
        batch=batch,
        optimizers=tuple(trainer.optimizers),
        precision=str(trainer.precision),
        accumulate=trainer.accumulate_grad_batches,
        gradient_clip=trainer.gradient_clip_val or None,
        device=device,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **more,
    )


def advised(
    where: Circumstances, *, limit: int | None = None, seconds: float
) -> tuple[Advisory | None, tuple[str, ...]]:
    """`predicted_advice`, or else what can be said of the last probed step, if there is one; and what was left out."""
    try:
        advisory = predicted_advice(where, limit=limit, seconds=seconds)
        return advisory, advisory.left_out
    except Exception as error:  # whatever a foreign step does
        reason = f"the step could not be taken on fake tensors: {next(iter(str(error).splitlines()), repr(error))}"
    return None if where.probed is None else modelled_advice(where.probed, limit=limit), (reason,)


def predicted_advice(where: Circumstances, *, limit: int | None = None, seconds: float) -> Advisory:
    """`memory_advice` of what trains there; ValueError where there is no batch, or that cannot be predicted."""
    if where.batch is None:
        raise ValueError("no batch was there yet")
    card = None
    if where.device.type == "cuda":
        properties = torch.cuda.get_device_properties(where.device)
        card = Card(where.device_name, properties.total_memory, (properties.major, properties.minor))
    settings: dict[str, Any] = {
        "precision": where.precision,
        "accumulate": where.accumulate,
        "gradient_clip": where.gradient_clip,
        "device": "cpu" if card is None else "cuda",
        "card": card,
        "limit": limit,
        "phase": phase_of(where),
        "seconds": seconds,
    }
    if len(where.optimizers) == 1:
        try:
            # As it is now: configure_optimizers may ask the trainer what only a running one knows.
            maker = optimizer_like(where.optimizers[0], where.module)
            return memory_advice(where.module, where.batch, optimizer=maker, **settings)
        except (KeyError, TypeError, AttributeError):
            pass  # an optimizer whose groups do not make another
    return memory_advice(where.module, where.batch, **settings)


def phase_of(where: Circumstances) -> str | None:
    """The predicted step's phase in which it was."""
    known = {"the sanity check": "validation"} | {
        name: name for name in ("forward", "backward", "optimizer", "validation")
    }
    return known.get(where.phase)


def _moment(incident: Incident, where: Circumstances, breakdown: Breakdown) -> Moment | None:
    trace = breakdown.trace
    if trace is None or incident.requested is None:
        return None
    phase = phase_of(where)
    if phase is None:
        return None
    allocated = None if incident.counters is None else incident.counters.allocated
    return trace.moment(phase, incident.asked_for, module=incident.module, allocated=allocated)


def counters_advice(incident: Incident, outside_before: int | None) -> tuple[Advice, ...]:
    """What the allocator's counters say of fragmentation and of other processes; only if it would have been enough, or
    is much."""
    counters = incident.counters
    if counters is None or incident.requested is None:
        return ()
    found: list[Advice] = []
    needed = counters.allocated + incident.requested
    others = counters.outside - (CONTEXT if outside_before is None else outside_before)
    if others >= incident.requested:
        found.append(
            Advice(
                "other processes off this GPU" if outside_before is None else "what came onto this GPU since this run",
                "nvidia-smi lists them" + ("" if outside_before is None else ": outside of this process's allocator "
                "memory has grown since training began"),
                others, needed, True, COUNTERS,
            )
        )  # fmt: skip
    if counters.unused >= max(incident.requested, FRAGMENTED * counters.reserved) and needed <= counters.available:
        found.append(
            Advice(
                "expandable segments",
                "PYTORCH_ALLOC_CONF=expandable_segments:True: what is reserved and in pieces too small becomes "
                "usable",
                counters.unused, needed, True, COUNTERS,
            )
        )  # fmt: skip
    return tuple(found)


def _alike(incident: Incident, module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, parameter in module.named_parameters() if incident.asked_for(parameter.nbytes))


def module_names(module: nn.Module) -> Mapping[int, str]:
    """Dotted names by the modules' ids, without torch.compile's wrapper."""
    names = ((id(part), name.replace("_orig_mod.", "")) for name, part in module.named_modules())
    return {key: name for key, name in names if name not in ("", "_orig_mod")}
