"""Kernels of this folder's tests run in one child process."""

from collections.abc import Iterator

import pytest

from tests.engine.kernels.interpreter import Kernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[Kernels]:
    found = Kernels()
    yield found
    found.close()
