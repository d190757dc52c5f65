"""Which samples each rank trains on."""

from __future__ import annotations

import time

import pytest

from rapidformer import BatchPlan
from rapidformer.data import DistributedSeekableSampler, InOrderSampler


def samplers(num_samples, micro, accumulation, ranks, **options):
    plan = BatchPlan(micro=micro, accumulation=accumulation, data_parallel_size=ranks)
    return [
        DistributedSeekableSampler(num_samples, plan, rank=rank, seed=7, **options)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 2, 5, 12, 13, 17, 24, 25])
def test_an_epoch_has_every_sample_once(num_samples, ranks):
    group = samplers(num_samples, 2, 2, ranks)
    for epoch in range(2):
        seen = []
        for step in range(epoch * group[0].steps_per_epoch, (epoch + 1) * group[0].steps_per_epoch):
            plans = [sampler.step(step) for sampler in group]
            assert len({len(plan) for plan in plans}) == 1, "ranks must take equally many passes"
            real = [i for plan in plans for micro in plan for i in micro.indices[: micro.num_real]]
            assert {micro.num_global for plan in plans for micro in plan} == {len(real)}
            assert all(micro.indices for plan in plans for micro in plan)
            assert [micro.is_last for micro in plans[0]][-1]
            seen += real
        assert sorted(seen) == list(range(num_samples))


def test_epochs_have_different_orders():
    sampler = samplers(50, 5, 1, 1)[0]
    assert sampler.step(0) != sampler.step(sampler.steps_per_epoch)


def test_a_step_is_the_same_whether_walked_to_or_looked_up():
    walked, sought = samplers(23, 2, 2, 2)[1], samplers(23, 2, 2, 2)[1]
    all_steps = [walked.step(step) for step in range(15)]
    assert sought.step(14) == all_steps[14]
    assert sought.step(3) == all_steps[3]
    assert list(sought.steps(9, 12)) == [micro for plan in all_steps[9:12] for micro in plan]


def test_a_far_step_is_found_without_walking():
    sampler = samplers(1000, 1, 1, 1)[0]
    started = time.perf_counter()
    sampler.step(10**12)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 4, 7, 12, 13])
def test_evaluation_keeps_order_and_counts_each_sample_once(num_samples, ranks):
    order = list(range(num_samples))
    group = [
        InOrderSampler(num_samples, 2, rank=rank, world_size=ranks, order=order)
        for rank in range(ranks)
    ]
    seen = []
    for number in range(group[0].num_batches):
        counts = group[0].real_counts(number)
        for rank, sampler in enumerate(group):
            indices = sampler.indices(number)
            assert len(indices) == max(1, counts[rank])
            seen += indices[: counts[rank]]
    assert seen == order
