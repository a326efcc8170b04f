"""Ranks with unequal numbers of batches: who is out of data serves until all are.

Every step is collective. A rank whose data end early would leave the others waiting; padding or
dropping batches would change the result. So it goes on with empty steps, which weigh nothing, and
applies the same averaged gradients, until no rank has data left. The last exchange, in which nobody
has, tells all ranks so; it is the only one that the steps themselves do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpidp.reducer.reducer import ReducedStep, Reducer
from mpidp.training.adapter import BatchResult


@contextmanager
def join(
    reducer: Reducer,
    apply: Callable[[ReducedStep], None],
    *,
    prepare: Callable[[], BatchResult | None] | None = None,
) -> Iterator[None]:
    """A loop over as many batches as this rank has; the ranks' numbers may differ. Collective.

    At the end of the block the rank serves: for each step that others still take, the averaged
    gradients are put into `reducer.gradient_views`, and `apply(step)` has to do with them what the
    loop does after `reducer.finish`. The replicas stay equal, and equal to one process that takes
    the ranks' batches of each step together.

    `prepare()` begins a step that serves, by default `reducer.zero()`. It may give the result of
    micro-batches that the loop has accumulated and not exchanged; they then count.

    An exception in the block ends it without serving.

        with join(reducer, lambda step: optimizer.step(reducer.gradient_views)):
            for batch in batches_of_this_rank:
                reducer.zero()
                reducer.begin()
                result = backward(batch)             # calls reducer.mark_ready
                reducer.finish(result)
                optimizer.step(reducer.gradient_views)
    """
    yield
    while True:
        pending = None
        if prepare is None:
            reducer.zero()
        else:
            pending = prepare()
        reducer.begin()
        step = reducer.finish(pending or BatchResult(), serving=pending is None)
        if not step.active:
            return
        if step.result.weight > 0:
            apply(step)
