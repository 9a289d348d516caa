"""The ranks that the contract tests share, and the order that starts each job once."""

from __future__ import annotations

import pytest

from tests.contracts.specs import MEMBERS, SERVING, forgetting
from tests.harness.rank_pool import Job, PoolKeeper, RankPool

_POSITION = {m.text: i for i, m in enumerate((*MEMBERS, *map(forgetting, MEMBERS), *SERVING))}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one job stand together, those that end it last; all others stay where they are."""
    places = [i for i, item in enumerate(items) if _job_of(item) is not None]
    ordered = sorted((items[i] for i in places), key=_key)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _job_of(item: pytest.Item) -> Job | None:
    callspec = getattr(item, "callspec", None)
    job = None if callspec is None else callspec.params.get("job")
    return job if isinstance(job, Job) else None


def _key(item: pytest.Item) -> tuple[int, int, int]:
    job = _job_of(item)
    assert job is not None
    marker = item.get_closest_marker("ends_job")
    return (_POSITION[job.backend], job.num_ranks, 0 if marker is None else marker.args[0])


@pytest.fixture
def pool(job: Job, pools: PoolKeeper) -> RankPool:
    """The ranks of the test's job."""
    return pools.get(job)
