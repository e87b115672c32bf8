"""The view of our runs in wandb: which metrics stand in one panel, and over what."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

STEP = "trainer/global_step"
"""What Lightning's logger logs every metric of a run with."""
TOKENS = "train/tokens"
"""In the same record as the other metrics of `train/`, and in no other."""
COMPARED, PLANNED = "comparison/sequence_length", "plan/sequence_length"
_PHASES = ("forward", "backward", "optimizer", "validation", "step")
_PARTS = (
    "parameters", "gradients", "optimizer_state", "activations", "inputs", "workspaces", "temporaries", "untracked",
)  # fmt: skip


def build_workspace(entity: str, project: str, name: str) -> "Workspace":
    """The view, which nothing has sent yet: `save()` of it does.

    Raises:
        ValueError: wandb-workspaces cannot be imported, or takes no view of that name.
    """
    try:
        from wandb_workspaces.workspaces import Workspace
    except ImportError as error:
        raise ValueError(
            f"a view needs wandb-workspaces, which cannot be imported ({error}); pip install 'flash_train[workspaces]'"
        ) from error
    from pydantic import ValidationError

    sections = [_by_length(), _by_step(), _speed(), _training()]
    try:
        return Workspace(entity=entity, project=project, name=name, sections=sections)
    except ValidationError as error:
        raise ValueError(f"name must be one that wandb takes, got {name!r} ({error.errors()[0]['msg']})") from error


def _by_length() -> "Section":
    return _section(
        "Memory by sequence length",
        _line("Compared: peak allocated, measured and predicted (GiB)", COMPARED,
              "comparison/*/peak_allocated_gib", "comparison/*/predicted_peak_gib", log_x=True),
        _line("Compared: peak reserved (GiB)", COMPARED, "comparison/*/peak_reserved_gib", log_x=True),
        _line("Compared: predicted above measured (%)", COMPARED, "comparison/*/prediction_error_percent", log_x=True),
        _line("Compared: out of memory (1: yes)", COMPARED, "comparison/*/out_of_memory", log_x=True),
        _line("Planned: needed, with allowance and context (GiB)", PLANNED, "plan/*/needed_gib", log_x=True),
        _line("Planned: peak, predicted and measured (GiB)", PLANNED,
              "plan/*/predicted_peak_gib", "plan/*/measured_peak_gib", log_x=True),
    )  # fmt: skip


def _by_step() -> "Section":
    from wandb_workspaces.reports.v2 import BarPlot

    return _section(
        "Memory by step",
        _line("Peak, allocated, reserved and predicted (GiB)", STEP,
              "memory/peak_allocated_gib", "memory/peak_reserved_gib", "memory/predicted_gib"),
        _line("Peak allocated of each phase (GiB)", STEP, *(f"memory/{phase}/peak_allocated_gib" for phase in _PHASES)),
        # One step of a run is probed: lines over steps would be points.
        BarPlot(title="At the peak of the probed step (GiB)", metrics=[f"memory/probe/{part}_gib" for part in _PARTS]),
        BarPlot(title="Score matrices, and what flash would save of the peak (GiB)",
                metrics=["memory/probe/score_matrices_gib", "memory/probe/flash_would_save_gib"]),
        _line("Growth between steps (MiB a step)", STEP, "memory/growth_mib_per_step"),
        _line("Allocator retries", STEP, "memory/alloc_retries"),
        _line("Rank of the highest peak", STEP, "memory/peak_allocated_rank"),
    )  # fmt: skip


def _speed() -> "Section":
    return _section(
        "Speed",
        _line("Tokens per second", STEP, "speed/tokens_per_second"),
        _line("Model FLOPs utilisation (%)", STEP, "speed/mfu_percent"),
        _line("Step (ms)", STEP, "speed/step_ms"),
        _line("Waiting for data (%)", STEP, "speed/data_wait_percent"),
        _line("Tokens per second of a device", STEP, "speed/tokens_per_second_per_device"),
        _line("Compared: tokens per second", COMPARED, "comparison/*/tokens_per_second", log_x=True),
    )


def _training() -> "Section":
    return _section(
        "Training",
        _line("Loss", TOKENS, "train/loss"),
        _line("Gradient norm", TOKENS, "train/gradient_norm"),
        _line("Learning rate", TOKENS, "train/learning_rate"),
        # With sources, of each as well.
        _line("Validation loss", STEP, "validation/loss", "validation/*/loss"),
        _line("Validation, bits per byte", STEP, "validation/bits_per_byte", "validation/*/bits_per_byte"),
    )


def _section(name: str, *panels: Any) -> "Section":
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    rows = -(-len(panels) // 3)
    return Section(
        name=name, panels=list(panels), is_open=True, layout_settings=SectionLayoutSettings(columns=3, rows=rows)
    )


def _line(title: str, x: str, *metrics: str, log_x: bool = False) -> Any:
    """A panel of `metrics` over `x`. A * in a name stands for what only the runs know: an arm, a source."""
    from wandb_workspaces.reports.v2 import LinePlot

    if any("*" in name for name in metrics):
        choices = "|".join(name.replace("*", ".+") for name in metrics)
        return LinePlot(title=title, x=x, metric_regex=f"^({choices})$", log_x=log_x or None)
    return LinePlot(title=title, x=x, y=list(metrics), log_x=log_x or None)
