"""Step 2: train the draft on what the target wrote, with the target's own distributions as the goal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsbd_cli.distill import batches
from dsbd_cli.distill.draft import layer_list, load_own_state, own_state, shared_names
from dsbd_cli.distill.head import hidden_states, linear_head
from dsbd_cli.distill.log import RunLog, Step
from dsbd_cli.distill.loss import DistillLoss, LossWeights
from dsbd_cli.distill.metrics import Warp, token_figures
from dsbd_cli.distill.shards import Sequences
from dsbd_cli.distill.world import World
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.paths import replacing

EVALUATIONS = 20
FIGURE_CHUNK = 1024


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        minutes, steps: the budget; whichever is spent first ends it (None: no bound, not both).
        batch_tokens: padded tokens a step and process.
        rate, warmup: peak learning rate; steps to reach it; it then falls to 0 linearly.
        optimizer: `adamw`, or `muon` (matrices by Muon, vectors by AdamW).
        finish: share of the budget, at the end, with `finish_weights` instead of `weights`.
        hold_out, hold_out_limit: share and number of sequences kept to choose the best checkpoint.
        warp: the decoding the draft is meant for; `best` is by its overlap under it.
    """

    minutes: float | None = None
    steps: int | None = None
    batch_tokens: int = 32768
    rate: float = 2e-3
    warmup: int = 100
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    clip: float = 1.0
    finish: float = 0.5
    weights: LossWeights = field(default_factory=LossWeights)
    finish_weights: LossWeights = field(default_factory=lambda: LossWeights(kl=0.3, warped=1.0))
    hold_out: float = 0.02
    hold_out_limit: int = 768
    warp: Warp = field(default_factory=Warp)
    seed: int = 0
    compile: bool = False


class Trainer:
    """One training run; `run` returns the best own state and a summary, and can be killed at any time."""

    def __init__(
        self, target: Any, draft: Any, sequences: Sequences, options: TrainOptions, folder: Path,
        world: World, log: RunLog, watch: dict[str, Sequences] | None = None,
    ) -> None:  # fmt: skip
        if options.minutes is None and options.steps is None:
            raise UserError("training needs a bound: --minutes or --steps")
        self.target, self.draft, self.options, self.world, self.log = target, draft, options, world, log
        self.checkpoint = folder / "train.pt"
        self.device = world.device
        self.head, self.bias = linear_head(target)
        lent = shared_names(draft)
        for name, parameter in draft.named_parameters():
            parameter.requires_grad_(name not in lent)
        self.own = [p for n, p in draft.named_parameters() if n not in lent]
        train, held = batches.split(len(sequences), options.hold_out, options.hold_out_limit, options.seed)
        self.store = batches.Store(sequences, self.device)
        self.train_ids, self.held_ids = train[world.rank :: world.size], held[world.rank :: world.size]
        if len(train) < world.size:
            raise UserError("too few sequences to train on; sample more")
        self.watch = {name: batches.Store(part, self.device) for name, part in (watch or {}).items()}
        self.optimizers = self._optimizers()
        self.step = self.epoch = self.place = self.tokens_seen = 0
        self.elapsed = 0.0
        self.best: dict[str, Any] = {"overlap": -1.0}
        self.curve: list[dict[str, float]] = []
        self.next_evaluation = 0
        if options.compile:
            # One layer's code serves all layers, with and without gradients, for every shape of batch.
            torch._dynamo.config.recompile_limit = 64
            for layer in [*layer_list(target)[1], *layer_list(draft)[1]]:
                layer.compile(dynamic=True)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        options = self.options
        matrices = [p for p in self.own if p.ndim == 2] if options.optimizer == "muon" else []
        rest = [p for p in self.own if not any(p is m for m in matrices)]
        made: list[torch.optim.Optimizer] = []
        if matrices:
            made.append(
                torch.optim.Muon(
                    matrices,
                    lr=options.rate,
                    weight_decay=options.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            made.append(
                torch.optim.AdamW(
                    rest, lr=options.rate, betas=(0.9, 0.95), weight_decay=options.weight_decay,
                    fused=self.device.type == "cuda",
                )
            )  # fmt: skip
        return made

    # -- checkpoints -------------------------------------------------------------------------------
    def _save(self) -> None:
        if not self.world.first:
            return
        state = {
            "draft": own_state(self.draft), "optimizers": [o.state_dict() for o in self.optimizers],
            "best": self.best, "curve": self.curve, "options": repr(self.options), "size": self.world.size,
            "numbers": (self.step, self.epoch, self.place, self.tokens_seen, self.elapsed, self.next_evaluation),
        }  # fmt: skip
        try:
            with replacing(self.checkpoint) as temporary:
                torch.save(state, temporary)
        except OSError as error:
            raise RunError(f"{self.checkpoint}: cannot write the checkpoint: {error}") from error

    def resume(self) -> bool:
        """Go on from the checkpoint in the folder; False when there is none.

        Raises:
            UserError: it was made with other options.
        """
        if not self.checkpoint.exists():
            return False
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        if state["options"] != repr(self.options) or state["size"] != self.world.size:
            raise UserError(
                f"{self.checkpoint}: made with other training options; use another --out or delete it"
            )
        load_own_state(self.draft, state["draft"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.best, self.curve = state["best"], state["curve"]
        self.step, self.epoch, self.place, self.tokens_seen, self.elapsed, self.next_evaluation = state[
            "numbers"
        ]
        return True

    # -- evaluation --------------------------------------------------------------------------------
    @torch.no_grad()
    def figures(self, store: batches.Store, chosen: np.ndarray) -> dict[str, float]:
        """Mean per-token figures of the draft over sequences `chosen` of every process."""
        sums: dict[str, torch.Tensor] = {}
        count = torch.zeros((), device=self.device)
        rng = np.random.default_rng(0)
        for part in batches.order(store.length[chosen], self.options.batch_tokens, rng):
            batch = store.batch(chosen[part])
            own, other = self._hidden(batch)
            for begin in range(0, batch.tokens, FIGURE_CHUNK):
                piece = slice(begin, begin + FIGURE_CHUNK)
                draft_logits = torch.nn.functional.linear(
                    own[piece].to(self.head.dtype), self.head, self.bias
                )
                target_logits = torch.nn.functional.linear(other[piece], self.head, self.bias)
                for name, values in token_figures(target_logits, draft_logits, self.options.warp).items():
                    sums[name] = sums.get(name, torch.zeros((), device=self.device)) + values.sum()
            count += batch.tokens
        keys = sorted(token_figures(torch.zeros(1, 64), torch.zeros(1, 64), self.options.warp))
        zero = torch.zeros((), device=self.device)
        packed = self.world.sum(torch.stack([*(sums.get(k, zero) for k in keys), count]))
        return {k: round((packed[i] / packed[-1]).item(), 5) for i, k in enumerate(keys)}

    def _evaluate(self, progress: float) -> None:
        held = self.figures(self.store, self.held_ids)
        line: dict[str, Any] = {"step": self.step, "tokens_seen": self.tokens_seen, "held_out": held}
        for name, store in self.watch.items():
            line[name] = self.figures(store, np.arange(len(store.length))[self.world.rank :: self.world.size])
        self.curve.append(line)
        if self.world.first:
            self.log.write("evaluate", progress=round(progress, 4), seconds=round(self.elapsed, 1), **line)
        if held["warped"] > self.best["overlap"]:
            self.best = {"overlap": held["warped"], "step": self.step, "state": own_state(self.draft)}

    # -- the loop ----------------------------------------------------------------------------------
    def _hidden(self, batch: batches.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of draft and target where the loss is taken, each `[n, H]`."""
        with torch.no_grad():
            other = hidden_states(self.target, batch.ids).flatten(0, 1)[batch.positions]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            own = hidden_states(self.draft, batch.ids).flatten(0, 1)[batch.positions]
        return own, other

    def _progress(self) -> float:
        parts = [0.0]
        if self.options.steps is not None:
            parts.append(self.step / self.options.steps)
        if self.options.minutes is not None:
            parts.append(self.elapsed / (60 * self.options.minutes))
        return max(parts)

    def _train_step(self, chosen: np.ndarray, progress: float) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.options
        scale = min(1.0, (self.step + 1) / max(1, options.warmup)) * max(0.0, 1.0 - progress)
        weights = options.finish_weights if progress >= 1 - options.finish else options.weights
        batch = self.store.batch(chosen)
        own, other = self._hidden(batch)
        kind = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        losses = DistillLoss.apply(
            own.to(kind), other.to(kind), self.head, self.bias, weights, options.compile
        )
        losses[0].backward()
        totals = torch.cat([losses.detach().float(), torch.tensor([float(batch.tokens)], device=self.device)])
        self.world.sum(totals)
        for parameter in self.own:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.world.sum(parameter.grad)
            parameter.grad /= totals[3]
        norm = torch.nn.utils.clip_grad_norm_(self.own, options.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = options.rate * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return totals, norm

    def run(self, step_view: Step) -> dict[str, Any]:
        """Train to the end of the budget; returns the summary, with the best own state under `state`."""
        options = self.options
        began = time.monotonic() - self.elapsed
        progress = self._progress()
        while True:
            if progress >= self.next_evaluation / EVALUATIONS:
                self.next_evaluation = int(progress * EVALUATIONS) + 1
                self._evaluate(progress)
                self._save()
            if progress >= 1.0:
                break
            rng = np.random.default_rng([options.seed, self.epoch, self.world.rank])
            plan = batches.order(self.store.length[self.train_ids], options.batch_tokens, rng)
            while self.place < len(plan):
                totals, norm = self._train_step(self.train_ids[plan[self.place]], progress)
                self.place += 1
                self.step += 1
                clock = torch.tensor(
                    [time.monotonic() - began if self.world.first else 0.0], device=self.device
                )
                numbers = torch.cat([totals, norm.reshape(1), self.world.sum(clock.float())]).tolist()
                if not np.isfinite(numbers).all():
                    raise RunError(f"step {self.step}: the loss is not finite; lower --rate")
                _, kl, overlap, tokens, size, self.elapsed = numbers
                self.tokens_seen += int(tokens)
                progress = self._progress()
                if self.world.first:
                    rate = self.tokens_seen / max(self.elapsed, 1e-9)
                    step_view.update(
                        progress, 1.0,
                        f"step {self.step}, KL {kl / tokens:.3f}, held-out overlap {self.best['overlap']:.3f}, "
                        f"{rate:,.0f} tokens/s",
                    )  # fmt: skip
                    if self.step % 20 == 0:
                        self.log.write(
                            "train", step=self.step, kl=round(kl / tokens, 4), overlap=round(overlap / tokens, 4),
                            norm=round(size, 3), tokens_seen=self.tokens_seen, epoch=self.epoch,
                            seconds=round(self.elapsed, 2),
                        )  # fmt: skip
                if progress >= self.next_evaluation / EVALUATIONS:
                    break
            else:
                self.epoch, self.place = self.epoch + 1, 0
        return {
            "state": self.best["state"], "best_step": self.best["step"], "steps": self.step,
            "tokens_seen": self.tokens_seen, "seconds": round(self.elapsed, 1), "epochs": self.epoch,
            "curve": self.curve,
        }  # fmt: skip
