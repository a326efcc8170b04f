"""Gradients to buckets: what is exchanged together, when, and in which encoding."""

from mpidp.reducer.join import join
from mpidp.reducer.plan import Plan, plan_buckets
from mpidp.reducer.reducer import ReducedStep, Reducer

__all__ = ["Plan", "ReducedStep", "Reducer", "join", "plan_buckets"]
