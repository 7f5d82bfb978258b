"""Over which transport trainer and engines meet."""

import pytest

from fp8rl_workers.errors import InvalidInputError
from fp8rl_workers.places import choose_transport, this_place

GPU, HOST, OTHER = "cuda:GPU-1/boot/net", "cpu/boot/net", "cuda:GPU-2/boot/net"


@pytest.mark.parametrize(
    ("asked", "trainer", "engines", "chosen"),
    [
        ("auto", GPU, [GPU, GPU], "ipc"),
        ("auto", GPU, [GPU, OTHER], "gloo"),
        ("auto", HOST, [HOST], "gloo"),
        ("auto", GPU, [HOST], "gloo"),
        ("auto", "", [""], "gloo"),
        ("ipc", HOST, [HOST], "ipc"),
        ("gloo", GPU, [GPU], "gloo"),
    ],
)
def test_memory_is_shared_where_all_ranks_see_it(asked, trainer, engines, chosen):
    assert choose_transport(asked, trainer, {f"e{i}": place for i, place in enumerate(engines)}) == chosen


def test_ipc_asked_for_where_an_engine_cannot_see_the_trainers_memory_is_refused_with_its_name():
    with pytest.raises(InvalidInputError, match=r"weightSync.transport: ipc needs .*; e1 differ from the trainer"):
        choose_transport("ipc", GPU, {"e0": GPU, "e1": OTHER})


def test_processes_of_one_machine_have_one_place():
    assert this_place("cpu") == this_place("cpu") != this_place("cuda:GPU-1")
    assert this_place("cpu").count("/") == 2
