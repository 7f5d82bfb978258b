"""A control plane for a session, and others for tests that hurt it."""

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_plane_kit import ControlPlane
from testcluster import binaries, lifecycle
from testcluster.layout import ClusterError


def _require() -> None:
    """Skips without Go; in CI that is a failure, or it would test nothing and say nothing."""
    if reason := binaries.why_not():
        leave = pytest.fail if os.environ.get("CI") else pytest.skip
        leave(f"no control plane: {reason}")


@contextlib.contextmanager
def _running(name: str, *, audit: bool) -> Iterator[ControlPlane]:
    plane = ControlPlane(name, audit=audit)
    try:
        plane.up()
        yield plane
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        plane.down()


@pytest.fixture(scope="session")
def control_plane_session() -> Iterator[ControlPlane]:
    """FP8RL_TEST_CLUSTER names one that is up already and stays up; else one for this session."""
    _require()
    lifecycle.sweep()
    if name := os.environ.get("FP8RL_TEST_CLUSTER"):
        plane = ControlPlane(name)
        plane.up()
        yield plane
        return
    with _running(f"pytest-{os.getpid()}", audit=False) as plane:
        yield plane


@pytest.fixture
def plane(control_plane_session: ControlPlane) -> ControlPlane:
    """The session's control plane, with the CRD."""
    return control_plane_session


@pytest.fixture
def kubeconfig(plane: ControlPlane) -> Path:
    """The administrator's kubeconfig of the session's control plane."""
    return plane.kubeconfig


_count = itertools.count()


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace; its deletion is asked for and not waited for."""
    name = f"t{next(_count)}-{os.getpid()}"
    plane.kubectl("create", "namespace", name)
    plane.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}, namespace=name)
    yield name
    plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def own_plane() -> Iterator[Callable[..., ControlPlane]]:
    """Makes control planes of the test's own, to be stopped, compacted or audited: `own_plane(audit=True)`."""
    _require()
    with contextlib.ExitStack() as stack:
        yield lambda *, audit=False: stack.enter_context(_running(f"pytest-{os.getpid()}-{next(_count)}", audit=audit))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a control plane."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.api)
