"""The trainer: the step loop around an adapter and a strategy.

    trainer = mpidp.Trainer(adapter, comm, strategy=mpidp.strategies.Synchronous(clip_norm=1.0))
    report = trainer.fit(dataset, batch_size=1600, epochs=3, test=held_out)

P ranks give what one process gives on the whole global batches: each batch of `batch_size` samples
is split over the ranks, and gradients, losses and metrics are weighted by the samples behind them.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidp import _core
from mpidp.errors import InvalidArgumentError
from mpidp.training import checkpoint
from mpidp.training.adapter import Adapter, BatchResult, broadcast_state
from mpidp.training.metrics import reduce_result
from mpidp.training.progress import Progress
from mpidp.training.sampler import GlobalBatchSampler

if TYPE_CHECKING:
    from mpidp.communicator import Communicator
    from mpidp.examples import Dataset
    from mpidp.strategies.base import StepReport, Strategy


@dataclass
class EpochReport:
    """One epoch, the same on every rank but for the times, which are this rank's.

    Losses and metrics are means over samples. `communication_share` is the part of the epoch that
    this rank spent waiting for exchanges that computing did not hide.
    """

    epoch: int
    steps: int = 0
    skipped_steps: int = 0
    samples: float = 0.0
    loss: float = float("nan")
    metrics: dict[str, float] = field(default_factory=dict)
    test_loss: float | None = None
    test_metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    samples_per_second: float = 0.0
    communication_share: float = 0.0
    wire_bytes: int = 0


@dataclass
class TrainingReport:
    """What `fit` did: one entry for each epoch, and whether it stopped early."""

    epochs: list[EpochReport] = field(default_factory=list)
    stopped: bool = False


# Called on every rank after each epoch; a true return value on any rank stops the training.
Callback = Callable[["Trainer", EpochReport], "bool | None"]


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
        self._stop = False
        self._sampler: GlobalBatchSampler | None = None
        self.report = TrainingReport()
        broadcast_state(adapter, comm)
        strategy.attach(adapter, comm)

    def stop(self) -> None:
        """Ends the training after the running step, on all ranks, once any rank has asked."""
        self._stop = True

    def fit(
        self,
        dataset: Dataset,
        batch_size: int,
        epochs: int,
        *,
        test: Dataset | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        schedule: Callable[[int], float] | None = None,
        patience: int | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
        log: str | Path | None = None,
        progress: bool | None = None,
    ) -> TrainingReport:
        """Trains until `epochs` epochs are done. Collective.

        `batch_size` is global: samples a step over all ranks. `accumulate` splits each rank's part
        into as many backward passes. `schedule(step)` gives the learning rate of a step. With
        `patience` training stops after as many epochs without a better test loss. Checkpoints are
        written to `checkpoint_dir` after each epoch, and on SIGUSR1, which also stops; `resume`
        goes on from the newest one. `log` is a JSON-lines file, written by rank 0. `progress` None
        shows a bar where rank 0 has a terminal.
        """
        if batch_size < 1 or epochs < 0 or accumulate < 1:
            raise InvalidArgumentError("batch_size and accumulate must be >= 1, and epochs >= 0")
        sampler = GlobalBatchSampler(
            len(dataset),
            batch_size,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self._sampler = sampler
        step = 0
        if resume:
            if checkpoint_dir is None:
                raise InvalidArgumentError("resume=True needs checkpoint_dir=")
            step = self._resume(Path(checkpoint_dir))
        bar = Progress(enabled=progress, speaks=self.comm.rank == 0, total_epochs=epochs)
        best, since_best = _best_test_loss(self.report)
        with bar, self._stop_on_signal():
            while sampler.epoch < epochs and not self.report.stopped:
                bar.begin_epoch(sampler.epoch, sampler.batches_left)
                report, step = self._train_epoch(dataset, sampler, accumulate, schedule, step, bar)
                if not self.report.stopped:
                    self._evaluate_epoch(report, test)
                    self.report.epochs.append(report)
                    if report.test_loss is not None and report.test_loss < best:
                        best, since_best = report.test_loss, 0
                    else:
                        since_best += 1
                    wants_stop = [callback(self, report) for callback in callbacks]
                    out_of_patience = patience is not None and since_best >= patience
                    if self._any_rank(any(wants_stop) or out_of_patience):
                        self.report.stopped = True
                bar.end_epoch(report)
                if log is not None and self.comm.rank == 0:
                    _append_line(Path(log), asdict(report))
                if checkpoint_dir is not None:
                    self.save(checkpoint_dir, step)
        return self.report

    def evaluate(self, dataset: Dataset, batch_size: int = 1024) -> tuple[float, dict[str, float]]:
        """(mean loss, mean metrics) over the whole dataset, split over the ranks. Collective."""
        offset, count = _core.chunk_of(len(dataset), self.comm.world_size, self.comm.rank)
        total = BatchResult()
        for first in range(offset, offset + count, batch_size):
            last = min(first + batch_size, offset + count)
            total = total + self.adapter.evaluate(dataset[np.arange(first, last)])
        return _means(reduce_result(self.comm, total))

    def save(self, directory: str | Path, step: int) -> None:
        """Writes a checkpoint: weights, optimizer, strategy, sampler and history. Collective."""
        state = self.adapter.state_dict()
        arrays = {f"adapter.{k}": v for k, v in state.items() if isinstance(v, np.ndarray)}
        scalars = {k: v for k, v in state.items() if not isinstance(v, np.ndarray)}
        assert self._sampler is not None
        meta = {
            "step": step,
            "scalars": scalars,
            "sampler": self._sampler.state_dict(),
            "epochs": [asdict(report) for report in self.report.epochs],
        }
        checkpoint.save(
            self.comm, directory, arrays, meta, per_rank=self.strategy.state_dict(), step=step
        )

    def _resume(self, directory: Path) -> int:
        loaded = checkpoint.load(self.comm, directory)
        prefix = "adapter."
        state: dict[str, Any] = {
            k[len(prefix) :]: v for k, v in loaded.arrays.items() if k.startswith(prefix)
        }
        state.update(loaded.meta["scalars"])
        self.adapter.load_state_dict(state)
        self.strategy.load_state_dict(loaded.per_rank)
        assert self._sampler is not None
        self._sampler.load_state_dict(loaded.meta["sampler"])
        self.report = TrainingReport([EpochReport(**epoch) for epoch in loaded.meta["epochs"]])
        return int(loaded.meta["step"])

    def _train_epoch(
        self,
        dataset: Dataset,
        sampler: GlobalBatchSampler,
        accumulate: int,
        schedule: Callable[[int], float] | None,
        step: int,
        bar: Progress,
    ) -> tuple[EpochReport, int]:
        report = EpochReport(sampler.epoch)
        total = BatchResult()
        waited = 0.0
        start = time.perf_counter()
        for indices in sampler:
            parts = np.array_split(indices, accumulate) if accumulate > 1 else [indices]
            done: StepReport = self.strategy.step(
                [dataset[part] for part in parts],
                learning_rate=None if schedule is None else schedule(step),
                stop=self._stop,
            )
            step += 1
            report.steps += 1
            report.skipped_steps += not done.applied
            report.wire_bytes += done.wire_bytes
            waited += done.wait_seconds
            total = total + done.result
            bar.advance(done.result)
            if done.stop:
                self.report.stopped = True
                break
        report.seconds = time.perf_counter() - start
        report.samples = total.weight
        report.loss, report.metrics = _means(total)
        report.samples_per_second = total.weight / report.seconds if report.seconds else 0.0
        report.communication_share = waited / report.seconds if report.seconds else 0.0
        return report, step

    def _evaluate_epoch(self, report: EpochReport, test: Dataset | None) -> None:
        if test is not None:
            report.test_loss, report.test_metrics = self.evaluate(test)

    def _any_rank(self, mine: bool) -> bool:
        flag = np.array([1 if mine else 0], dtype=np.int32)
        return bool(self.comm.all_reduce(flag, op="max")[0])

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        # Batch systems warn before they kill (Slurm: --signal=USR1@60); one rank hearing it is
        # enough, since the flag rides on the next step's exchange.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGUSR1, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, previous)


def _best_test_loss(report: TrainingReport) -> tuple[float, int]:
    """The best test loss so far, and how many epochs ago it was."""
    losses = [epoch.test_loss for epoch in report.epochs if epoch.test_loss is not None]
    if not losses:
        return float("inf"), 0
    best = min(losses)
    return best, len(losses) - 1 - losses.index(best)


def _means(total: BatchResult) -> tuple[float, dict[str, float]]:
    if total.weight == 0:
        return float("nan"), {}
    return total.loss / total.weight, {k: v / total.weight for k, v in total.metrics.items()}


def _append_line(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
