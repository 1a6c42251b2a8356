"""What every test shares: the order of the suite, cheapest part first."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests, then those with the real model, then those that start Ray."""
    items.sort(key=lambda item: 2 * (item.get_closest_marker("ray") is not None) + ("slow" in item.keywords))
