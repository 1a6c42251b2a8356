"""What every test shares: the order of the suite, cheapest part first; and how many threads toys get."""

from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests, then those with the real model, then those that start Ray."""
    items.sort(key=lambda item: 2 * (item.get_closest_marker("ray") is not None) + ("slow" in item.keywords))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Steps as small as a tiny model's only lose by waiting for a second thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
