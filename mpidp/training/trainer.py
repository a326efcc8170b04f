"""The trainer: the step loop around an adapter and a strategy.

    trainer = mpidp.Trainer(adapter, comm, strategy=mpidp.strategies.Synchronous(clip_norm=1.0))
    report = trainer.fit(dataset, batch_size=1600, epochs=3, test=held_out)

P ranks give what one process gives on the whole global batches: each batch of `batch_size` samples
is split over the ranks, and gradients, losses and metrics are weighted by the samples behind them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidp import _core
from mpidp.errors import InvalidArgumentError
from mpidp.training import checkpoint, state
from mpidp.training.adapter import Adapter, BatchResult, broadcast_state
from mpidp.training.callbacks import Callback, EpochFunction, Step, as_callback
from mpidp.training.logs import JsonLog
from mpidp.training.lr import Schedule
from mpidp.training.metrics import reduce_result
from mpidp.training.progress import Progress
from mpidp.training.reports import EpochReport, Running, TrainingReport, means
from mpidp.training.sampler import Dataset, GlobalBatchSampler
from mpidp.training.stopping import DEFAULT_SIGNALS, REASONS, Patience, warned_by
from mpidp.training.timing import ExchangeTimer

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.strategies.base import Strategy

__all__ = ["EpochReport", "Trainer", "TrainingReport"]


@dataclass(frozen=True)
class _Plan:
    """The arguments of a `fit` that its parts need."""

    dataset: Dataset
    test: Dataset | None
    epochs: int | None
    steps: int | None
    accumulate: int
    schedule: Schedule | None
    callbacks: Sequence[Callback]
    checkpoint_dir: str | Path | None
    checkpoint_every: int | None
    keep: int


class Trainer:
    """Trains the adapter's model over the communicator's ranks.

    `strategy` says how gradients are exchanged (default: `Synchronous()`). Rank 0's weights,
    buffers and optimizer state are given to all ranks at the start. Collective, like every method.
    """

    def __init__(
        self, adapter: Adapter, comm: Communicator, strategy: Strategy | None = None
    ) -> None:
        if strategy is None:
            from mpidp.strategies import Synchronous

            strategy = Synchronous()
        self.adapter = adapter
        self.comm = comm
        self.strategy = strategy
        self.report = TrainingReport()
        self._wish = 0  # to stop; a number into REASONS, from 1
        self._sampler: GlobalBatchSampler | None = None
        self._running = Running()
        self._timer = ExchangeTimer(comm)
        broadcast_state(adapter, comm)
        strategy.attach(adapter, cast("Communicator", self._timer))

    def stop(self) -> None:
        """Ends the training after the running step, on all ranks, once any rank has asked."""
        self._wish_for("asked")

    def fit(
        self,
        dataset: Dataset,
        batch_size: int,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        test: Dataset | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        schedule: Schedule | None = None,
        patience: int | None = None,
        callbacks: Sequence[Callback | EpochFunction] = (),
        checkpoint_dir: str | Path | None = None,
        checkpoint_every: int | None = None,
        keep: int = 2,
        resume: bool | str = False,
        stop_signals: Sequence[int] = DEFAULT_SIGNALS,
        log: str | Path | None = None,
        progress: bool | None = None,
    ) -> TrainingReport:
        """Trains until `epochs` epochs or `steps` steps are done, whichever is first. Collective.

        Both count from the start of the training, with what was done before a resume.

        `batch_size` is global: samples a step over all ranks. `accumulate` splits each rank's part
        into as many backward passes. `schedule(step)` gives the learning rate of a step (see
        `mpidp.training.lr`). With `patience` training stops after as many epochs without a better
        test loss. `callbacks` are `Callback` objects, or functions that are called after each
        epoch.

        Checkpoints are written to `checkpoint_dir` after each epoch, every `checkpoint_every`
        steps, and when the training stops early; the newest `keep` stay. `resume=True` goes on from
        the newest whole one, bit for bit on the same number of ranks; `resume="auto"` does so where
        the folder has one, and else starts anew. On any rank's receiving one of `stop_signals`, all
        ranks finish the running step, write a checkpoint, and return a report whose `stop_reason`
        is "signal".

        `log` is a JSON-lines file, written by rank 0. `progress` None shows a bar where rank 0 has
        a terminal.

        Raises `InvalidArgumentError` for bad arguments, and `CheckpointError` on every rank where
        a checkpoint cannot be written (the older ones stay) or none can be read.

            report = trainer.fit(
                dataset, 128, steps=1000, schedule=lr.cosine(0.1, total_steps=1000),
                checkpoint_dir="run", checkpoint_every=100, resume="auto",
            )
        """
        sampler = GlobalBatchSampler(
            len(dataset),
            batch_size,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        _check(len(sampler), epochs, steps, accumulate, checkpoint_every, keep)
        if patience is not None and test is None:
            raise InvalidArgumentError("patience= needs test=")
        if resume and checkpoint_dir is None:
            raise InvalidArgumentError("resume= needs checkpoint_dir=")
        if resume not in (True, False, "auto"):
            raise InvalidArgumentError(f'resume={resume!r}: expected True, False or "auto"')
        logs = [JsonLog(log)] if log is not None else []
        plan = _Plan(
            dataset,
            test,
            epochs,
            steps,
            accumulate,
            schedule,
            [*(as_callback(one) for one in callbacks), *logs],
            checkpoint_dir,
            checkpoint_every,
            keep,
        )
        self._sampler = sampler
        self._wish = 0
        self.report, self._running = TrainingReport(), Running()
        if checkpoint_dir is not None and (
            resume is True or (resume and checkpoint.exists(self.comm, checkpoint_dir))
        ):
            self.report, self._running = state.resume(
                self.comm, checkpoint_dir, self.adapter, self.strategy, sampler
            )
        waiting = Patience(patience)
        for epoch in self.report.epochs:
            waiting.add(epoch)
        bar = Progress(
            enabled=progress,
            speaks=self.comm.rank == 0,
            total_epochs=_epochs_in_all(len(sampler), epochs, steps),
        )
        try:
            with bar, warned_by(stop_signals, lambda: self._wish_for("signal")):
                self._run(plan, sampler, waiting, bar)
        finally:
            self._timer.close()
        return self.report

    def evaluate(self, dataset: Dataset, batch_size: int = 1024) -> tuple[float, dict[str, float]]:
        """(mean loss, mean metrics) over the whole dataset, split over the ranks. Collective.

        Means are over samples (or tokens), from sums in float64.
        """
        offset, count = _core.chunk_of(len(dataset), self.comm.world_size, self.comm.rank)
        total = BatchResult()
        for first in range(offset, offset + count, batch_size):
            last = min(first + batch_size, offset + count)
            total = total + self.adapter.evaluate(dataset[np.arange(first, last)])
        return means(reduce_result(self.comm, total))

    def save(self, directory: str | Path, *, keep: int = 2) -> Path:
        """Writes a checkpoint of the running or last `fit`, and gives its path. Collective.

        Raises `CheckpointError` on every rank where that fails.
        """
        if self._sampler is None:
            raise InvalidArgumentError("there is nothing to save before fit()")
        return state.save(
            self.comm,
            directory,
            self.adapter,
            self.strategy,
            self._sampler,
            self.report,
            self._running,
            keep,
        )

    def _run(
        self, plan: _Plan, sampler: GlobalBatchSampler, waiting: Patience, bar: Progress
    ) -> None:
        for callback in plan.callbacks:
            callback.on_start(self)
        if waiting.is_out:  # it ended so before it was resumed
            self.report.stopped, self.report.stop_reason = True, "patience"
        while not self.report.stopped and self._has_more(plan, sampler):
            bar.begin_epoch(sampler.epoch, sampler.batches_left)
            report = self._train_epoch(plan, sampler, bar)
            if not self.report.stopped:
                if plan.test is not None:
                    report.test_loss, report.test_metrics = self.evaluate(plan.test)
                self.report.epochs.append(report)
                waiting.add(report)
                for callback in plan.callbacks:
                    if callback.on_epoch(self, report):
                        self._wish_for("asked")
                if waiting.is_out:
                    self._wish_for("patience")
                # Ends together, even where only some ranks know that there is a reason.
                reason = self._agree_on_reason()
                if reason is not None and self._has_more(plan, sampler):
                    self.report.stopped, self.report.stop_reason = True, reason
            bar.end_epoch(report)
            if plan.checkpoint_dir is not None:
                self._save_for(plan)
        for callback in plan.callbacks:
            callback.on_end(self, self.report)

    def _has_more(self, plan: _Plan, sampler: GlobalBatchSampler) -> bool:
        return (plan.epochs is None or sampler.epoch < plan.epochs) and (
            plan.steps is None or self.report.steps < plan.steps
        )

    def _train_epoch(self, plan: _Plan, sampler: GlobalBatchSampler, bar: Progress) -> EpochReport:
        report = EpochReport(sampler.epoch)
        earlier = self._running.total.weight  # before a resume
        waited = 0.0
        start = time.perf_counter()
        for indices in sampler:
            waited += self._step(plan, report, indices, bar)
            ends = plan.steps is not None and self.report.steps >= plan.steps
            if self.report.stopped or (ends and sampler.batches_left):
                break
            every = plan.checkpoint_every
            if every and self.report.steps % every == 0 and sampler.batches_left:
                self._save_for(plan)
        report.seconds = time.perf_counter() - start
        running = self._running
        report.complete = sampler.epoch > report.epoch
        if report.complete:
            self._running = Running()
        report.steps, report.skipped_steps = running.steps, running.skipped_steps
        report.samples, report.wire_bytes = running.total.weight, running.wire_bytes
        report.loss, report.metrics = means(running.total)
        if report.seconds:
            report.samples_per_second = (running.total.weight - earlier) / report.seconds
            report.communication_share = waited / report.seconds
        report.overlap_ratio = self._timer.take_overlap_ratio()
        return report

    def _step(self, plan: _Plan, report: EpochReport, indices: Any, bar: Progress) -> float:
        number = self.report.steps
        split = plan.accumulate > 1
        parts = np.array_split(indices, plan.accumulate) if split else [indices]
        rate = None if plan.schedule is None else plan.schedule(number)
        self._timer.begin_step(self._running.steps)
        done = self.strategy.step(
            [plan.dataset[part] for part in parts], learning_rate=rate, stop=self._wish > 0
        )
        self._timer.end_step()
        self.report.steps += 1
        report.learning_rate = rate
        self._running.add(done.result, applied=done.applied, wire_bytes=done.wire_bytes)
        bar.advance(done.result)
        if done.stop:
            self.report.stopped, self.report.stop_reason = True, self._agree_on_reason()
        step = Step(number, report.epoch, rate, done)
        for callback in plan.callbacks:
            if callback.on_step(self, step):
                self.stop()
        return done.wait_seconds

    def _save_for(self, plan: _Plan) -> None:
        assert plan.checkpoint_dir is not None
        path = self.save(plan.checkpoint_dir, keep=plan.keep)
        for callback in plan.callbacks:
            callback.on_checkpoint(self, path)

    def _wish_for(self, reason: str) -> None:
        self._wish = max(self._wish, REASONS.index(reason) + 1)

    def _agree_on_reason(self) -> str | None:
        wishes = np.array([self._wish], dtype=np.int32)
        agreed = int(self.comm.all_reduce(wishes, op="max")[0])
        return REASONS[agreed - 1] if agreed else None


def _check(
    batches: int,
    epochs: int | None,
    steps: int | None,
    accumulate: int,
    checkpoint_every: int | None,
    keep: int,
) -> None:
    if epochs is None and steps is None:
        raise InvalidArgumentError("epochs or steps must be given")
    if epochs is None and batches == 0:
        raise InvalidArgumentError("the dataset has no batch: steps would never be reached")
    least = {"epochs": (epochs, 0), "steps": (steps, 0), "accumulate": (accumulate, 1)}
    least.update({"checkpoint_every": (checkpoint_every, 1), "keep": (keep, 1)})
    for name, (value, lowest) in least.items():
        if value is not None and value < lowest:
            raise InvalidArgumentError(f"{name}={value}: expected a number >= {lowest}")


def _epochs_in_all(batches: int, epochs: int | None, steps: int | None) -> int:
    by_steps = -(-steps // batches) if steps is not None and batches else None
    return min(number for number in (epochs, by_steps) if number is not None)
