"""Samples, shared among ranks."""

from rapidformer.data.gather import gather_real
from rapidformer.data.loader import BatchShare, DataParallelLoader, TrainLoader, to_device
from rapidformer.data.sampler import DistributedSeekableSampler, InOrderSampler, MicroBatch

__all__ = [
    "BatchShare",
    "DataParallelLoader",
    "DistributedSeekableSampler",
    "InOrderSampler",
    "MicroBatch",
    "TrainLoader",
    "gather_real",
    "to_device",
]
