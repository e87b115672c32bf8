"""The LightningModule of a language model: loss, optimizer step, and what is logged about both."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flash_train.ops.cross_entropy import chunked_cross_entropy
from flash_train.training.averaging import EMA, TRAINING_WEIGHTS
from flash_train.training.evaluation import Score, score_sources, total_score
from flash_train.training.groups import check_groups
from flash_train.training.loss import IGNORED, check_z_loss, cross_entropy, cross_entropy_and_z_loss, with_hidden
from flash_train.training.master_weights import AdamWWithMasters
from flash_train.training.plain import require_plain
from flash_train.training.resumed_optimizer import follow_rates, keep_options
from flash_train.training.steps import is_log_step

__all__ = ["LanguageModel"]

Batch = Mapping[str, Tensor]


class LanguageModel(LightningModule):
    """Next-token training of any module that maps tokens [B, T] (int64) to logits [B, T, V].

    A batch is {"inputs": [B, T] int64, "targets": [B, T] int64}; a target of -100 is left out. Where a batch has
    "documents" too, [B, T] integer ids, the module gets them as its second argument. The loss is the mean
    cross-entropy in nats per token, reduced in fp32 at every precision. In training a z-loss may be added to it.

    Logged, once per optimizer step and on log steps only: `train/loss` (mean of the step's micro-batches and of the
    ranks), `train/gradient_norm` (before clipping), `train/learning_rate`, `train/tokens` (since the beginning, all
    ranks), with a z-loss `train/cross_entropy` (the loss without it); after each validation `validation/loss` (mean
    over all its tokens), `validation/perplexity` and `validation/bits_per_byte`, and where it is of several sources
    `validation/<source>/loss` and so on. `scores` are those of the last validation by source.
    For observers, on the device and without a synchronisation: `step_loss` and `gradient_norm`, fp32 scalars of the
    last optimizer step (`gradient_norm` of the last log step when nothing is clipped).

    Args:
        optimizer: makes the optimizer from the module, for instance a partial of `optimizer.adamw`. When it is made,
            a parameter that is in none of its groups, or in several, is a ValueError that names it. A resumed run takes
            its state from the checkpoint, and its options from here; other groups are a ValueError.
        schedule: makes a scheduler, stepped once per optimizer step, from that optimizer.
        gradient_clip: largest gradient norm, None to leave gradients alone. Not the Trainer's argument of that name,
            which refuses a fused AdamW under mixed precision.
        loss_chunk_rows: so many rows of logits exist at a time (see `ops.cross_entropy`); for a model whose forward
            takes `head` as the GPT's does. None: all at once.
        z_loss: so many times the mean square of the logits' log-sum-exp is added to the loss in training (PaLM:
            1e-4), which holds it near 0. What is validated is the cross-entropy alone. With a loss in chunks the
            micro-batches of log steps make their logits once more, to log it.
        compile: compile `model` (and nothing of Lightning's), in torch's mode `compile_mode`.
        bytes_per_token: of the validation split; without it no bits per byte are logged. Where that is of several
            sources, of each by its name (None: unknown); a batch says its own under "source", a number in their order.
        flops_per_token: published for whoever works out utilisation.
        run_config: plain values, written into checkpoints under that name.

    Raises:
        ValueError: `gradient_clip` is not positive, `z_loss` is negative or not finite, `run_config` holds something
            else than plain values, or a model that does not take `head` is to have its loss in chunks.
    """

    step_loss: Tensor | None = None
    gradient_norm: Tensor | None = None

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Callable[[nn.Module], Optimizer],
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        gradient_clip: float | None = 1.0,
        loss_chunk_rows: int | None = None,
        z_loss: float = 0.0,
        compile: bool = False,
        compile_mode: str = "default",
        bytes_per_token: float | Mapping[str, float | None] | None = None,
        flops_per_token: int | None = None,
        run_config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if gradient_clip is not None and not gradient_clip > 0:
            raise ValueError(f"gradient_clip is a positive norm or None for no clipping, not {gradient_clip}.")
        require_plain(run_config, "run_config")
        check_z_loss(z_loss)
        if loss_chunk_rows is not None:
            _check_chunks(model, loss_chunk_rows)
        self.model = model
        self.loss_chunk_rows = loss_chunk_rows
        self.z_loss = z_loss
        self.bytes_per_token = dict(bytes_per_token) if isinstance(bytes_per_token, Mapping) else {"": bytes_per_token}
        self.scores: dict[str, Score] = {}
        self.flops_per_token = flops_per_token
        self.gradient_clip = gradient_clip
        self.run_config = run_config
        self.tokens_seen = 0
        self._make_optimizer = optimizer
        self._make_schedule = schedule
        self._losses: list[Tensor] = []  # of the micro-batches since the last optimizer step
        self._entropies: list[Tensor] = []  # the same without their z-losses, if there are any and where that is logged
        self._step_entropy: Tensor | None = None
        self._unrounded: dict[str, Tensor] = {}
        if compile:
            # In place: wrapping the module in torch.compile would put `_orig_mod.` into every name of the checkpoint.
            model.compile(mode=compile_mode)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] int64, in `documents` [B, T] that do not see each other."""
        return self.model(tokens) if documents is None else self.model(tokens, documents)

    def setup(self, stage: str) -> None:
        if stage == "fit":  # under bf16-true Lightning rounds the weights next, and makes the optimizer then
            self._unrounded = {name: p.detach() for name, p in self.model.named_parameters()}

    def on_train_start(self) -> None:
        self._losses, self._entropies = [], []
        for config in self.trainer.lr_scheduler_configs:
            follow_rates(config.scheduler)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._with_z_loss(batch) if self.z_loss else self._cross_entropy(batch, "mean")
        self._losses.append(loss.detach())
        self.tokens_seen += batch["inputs"].numel() * self.trainer.world_size
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self._make_optimizer(self.model)
        check_groups(self.model, optimizer.param_groups)
        keep_options(optimizer, self.model)
        if isinstance(optimizer, AdamWWithMasters):
            parameters = dict(self.model.named_parameters())
            optimizer.begin_from({parameters[name]: values for name, values in self._unrounded.items()})
        self._unrounded = {}
        if self._make_schedule is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._make_schedule(optimizer), "interval": "step"},
        }

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Runs once per optimizer step, between the last backward and the update: the place where a step is known."""
        if gradient_clip_val is not None:
            raise ValueError(
                f"Trainer(gradient_clip_val={gradient_clip_val}) refuses a fused AdamW under mixed precision: "
                "give LanguageModel(gradient_clip=...) instead."
            )
        log = is_log_step(self.trainer, self.trainer.global_step + 1)
        self._finish_accumulation()
        self._clip(optimizer, measure=log)
        if log:
            self._log_step(optimizer)

    def on_validation_epoch_start(self) -> None:
        # Of each source, sum and tokens; float64: a sum of millions of token losses.
        self._validation = torch.zeros(len(self.bytes_per_token), 2, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens = (batch["targets"] != IGNORED).sum()
        sums = torch.stack([self._cross_entropy(batch, "sum").double(), tokens.double()])
        source = batch.get("source")
        # To index by a tensor would wait for the device.
        first = torch.zeros(1, dtype=torch.int64, device=self.device) if source is None else source.reshape(1)
        self._validation.index_add_(0, first, sums[None])

    def on_validation_epoch_end(self) -> None:
        sums = cast(Tensor, self.trainer.strategy.reduce(self._validation, reduce_op="sum")).tolist()
        self.scores = score_sources(sums, self.bytes_per_token)
        named = {"validation": total_score(list(self.scores.values()))}
        if len(self.bytes_per_token) > 1:
            named |= {f"validation/{source}": score for source, score in self.scores.items()}
        for prefix, score in named.items():
            for name, value in score.metrics().items():  # already reduced, which Lightning cannot see
                number = torch.tensor(value, dtype=torch.float64, device=self.device)
                self.log(f"{prefix}/{name}", number, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["run_config"] = self.run_config
        checkpoint["tokens_seen"] = self.tokens_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        callbacks = self.trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        averages = any(isinstance(callback, EMA) for callback in callbacks)
        if TRAINING_WEIGHTS in checkpoint and self.trainer.state.fn == "fit" and not averages:
            raise ValueError(
                "The checkpoint is of a run that averages its weights, and what training goes on with is beside them: "
                "resume it with the callback EMA, in flash-train callbacks=[default,ema]."
            )
        self.tokens_seen = checkpoint["tokens_seen"]

    def _cross_entropy(self, batch: Batch, reduction: str) -> Tensor:
        if self.loss_chunk_rows is not None:
            head = self._chunked(batch, reduction=reduction)
            return self.model(batch["inputs"], batch.get("documents"), head=head)
        return cross_entropy(self(batch["inputs"], batch.get("documents")), batch["targets"], reduction)

    def _with_z_loss(self, batch: Batch) -> Tensor:
        log = is_log_step(self.trainer, self.trainer.global_step + 1)
        if self.loss_chunk_rows is None:
            logits = self(batch["inputs"], batch.get("documents"))
            entropy, added = cross_entropy_and_z_loss(logits, batch["targets"], self.z_loss)
            loss = entropy + added
        else:
            head = partial(with_hidden, loss=self._chunked(batch, z_loss=self.z_loss))
            loss, hidden, weight = self.model(batch["inputs"], batch.get("documents"), head=head)
            with torch.no_grad():  # outside of the model, whose graph would be compiled for log steps and for others
                entropy = self._chunked(batch)(hidden, weight) if log else loss
        if log:
            self._entropies.append(entropy.detach())
        return loss

    def _chunked(self, batch: Batch, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss in chunks, of hidden states and the head's weight."""
        return partial(
            chunked_cross_entropy,
            targets=batch["targets"],
            chunk_rows=cast(int, self.loss_chunk_rows),
            classes=getattr(self.model, "vocabulary_size", None),  # the GPT's; its weight may have more rows
            soft_cap=getattr(self.model, "logit_soft_cap", None) or 0.0,
            ignore_index=IGNORED,
            **options,
        )

    def _finish_accumulation(self) -> None:
        self.step_loss = torch.stack(self._losses).mean()
        count, expected = len(self._losses), self.trainer.accumulate_grad_batches
        # A step whose last micro-batches are told to stop is logged, but its first ones did not know.
        known = count == len(self._entropies)
        self._step_entropy = torch.stack(self._entropies).mean() if known else None
        self._losses, self._entropies = [], []
        if count != expected:
            # The last group of an epoch may be short, and Lightning divided its losses by the full count.
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(expected / count)

    def _clip(self, optimizer: Optimizer, *, measure: bool) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Lightning leaves fp16 gradients scaled for a fused optimizer, whose own step would unscale them too late.
            scaler.unscale_(optimizer)
        if self.gradient_clip is None and not measure:
            return
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.gradient_norm = _total_norm(gradients)
        if self.gradient_clip is not None and gradients:
            # Of the gradients' type: on a GPU torch multiplies all at once by a number of that type only.
            norm = self.gradient_norm.to(gradients[0].dtype)
            nn.utils.clip_grads_with_norm_(self.parameters(), self.gradient_clip, norm)

    def _log_step(self, optimizer: Optimizer) -> None:
        assert self.step_loss is not None and self.gradient_norm is not None
        self.log("train/loss", self.step_loss, sync_dist=True)
        if self._step_entropy is not None:
            self.log("train/cross_entropy", self._step_entropy, sync_dist=True)
        self.log("train/gradient_norm", self.gradient_norm)
        # fp32, which a plain number becomes, counts exactly up to 16 million only.
        self.log("train/tokens", torch.tensor(self.tokens_seen, dtype=torch.float64))
        self.log("train/learning_rate", float(optimizer.param_groups[0]["lr"]))


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """In fp32 at least, where torch's own has the type of the gradients: three digits in bf16."""
    if not any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    norms = torch._foreach_norm(gradients, 2.0, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack(norms))


def _check_chunks(model: nn.Module, rows: Any) -> None:
    if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
        raise ValueError(f"loss_chunk_rows is a number of rows from 1 on, or None for all at once, not {rows!r}.")
    if "head" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"loss_chunk_rows={rows} needs a model whose forward takes head=, and {type(model).__name__}'s does not: "
            "leave it out, or let the model's last line be head(hidden, weight)."
        )
