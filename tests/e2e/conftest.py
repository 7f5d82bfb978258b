"""The cluster of real nodes that a session of e2e tests shares, with the operator in it."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from e2e_cluster import bring_up, take_down
from kube_world import World
from operator_world import deploy
from toy_jobs import ToyJob

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Two nodes and the CRD. FP8RL_E2E_CLUSTER names a cluster that stays up afterwards, for the next session."""
    kept = os.environ.get("FP8RL_E2E_CLUSTER")
    name = kept or f"pytest-{os.getpid()}-e2e"
    try:
        yield bring_up(name)
    finally:
        if kept is None:
            take_down(name)


@pytest.fixture(scope="session")
def operated(world: World) -> World:
    """The cluster with the operator's Deployment, from its built image, Ready."""
    deploy(world)
    return world


_count = itertools.count()


@pytest.fixture
def namespace(world: World) -> Iterator[str]:
    """A fresh namespace; its deletion is asked for and not waited for."""
    name = f"t{next(_count)}-{os.getpid()}"
    world.kubectl("create", "namespace", name)
    yield name
    world.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def toy(operated: World, namespace: str) -> Callable[..., ToyJob]:
    """Makes jobs of stand-ins in the test's namespace."""

    def make(spec: dict | None = None, name: str = "toy") -> ToyJob:
        return ToyJob(operated, namespace, operated.toys / namespace / name, spec, name)

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs nodes."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)
