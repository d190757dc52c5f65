"""Ways to spread training over devices."""

from rapidformer.strategies.ddp import DdpStrategy
from rapidformer.strategies.single import SingleStrategy
from rapidformer.strategies.strategy import Strategy

__all__ = ["DdpStrategy", "SingleStrategy", "Strategy"]
