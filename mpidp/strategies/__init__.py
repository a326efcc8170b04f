"""Strategies: when and what the ranks exchange."""

from mpidp.strategies.base import StepReport, Strategy
from mpidp.strategies.scaling import LossScale
from mpidp.strategies.synchronous import Synchronous

__all__ = ["LossScale", "StepReport", "Strategy", "Synchronous"]
