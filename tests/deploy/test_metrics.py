"""The task that publishes: again and again, whatever one reading was like."""

import asyncio

from serving.deploy import metric_table as m
from serving.deploy.metrics import publish_for_ever
from serving.deploy.readings import Publisher
from tests.decode.scripted import ScriptedModel, arithmetic, make_scheduler, oracle
from tests.deploy.metered import Meters, reading_of


async def test_a_reading_that_fails_does_not_end_the_metrics(caplog):
    scheduler = make_scheduler(ScriptedModel(arithmetic), oracle(arithmetic))
    meters, num_reads, is_read = Meters(), 0, asyncio.Event()

    def read():
        nonlocal num_reads
        num_reads += 1
        if num_reads == 2:
            raise RuntimeError("no engine")
        if num_reads == 4:
            is_read.set()
        scheduler.stats.rounds += 1
        return reading_of(scheduler, time_s=float(num_reads))

    task = asyncio.create_task(publish_for_ever(Publisher(meters), read, period_s=0.001))
    await asyncio.wait_for(is_read.wait(), 5)
    task.cancel()
    await asyncio.wait([task])
    assert meters.counts[m.ROUNDS.name, None] == scheduler.stats.rounds == num_reads - 1
