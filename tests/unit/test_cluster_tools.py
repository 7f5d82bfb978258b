import json

import pytest
from testcluster import hardware
from testcluster.layout import Cluster, ClusterError, Options


def test_two_control_planes_have_addresses_of_their_own_in_the_loopback_range():
    first, second = Cluster("one").address, Cluster("two").address
    assert first != second
    assert first.startswith("127.")
    assert first != "127.0.0.1"


def test_a_name_that_is_no_file_name_is_refused():
    with pytest.raises(ClusterError, match=r"cluster name '\.\./x'"):
        Cluster("../x")


def test_images_may_change_while_a_cluster_is_up_and_nothing_else():
    up = Cluster("one", Options(nodes=2, images=("a.tar",)))
    assert up.without_images() == Cluster("one", Options(nodes=2)).without_images()
    assert up.without_images() != Cluster("one", Options(nodes=3)).without_images()


def test_a_cpu_list_reads_as_the_kernel_writes_it():
    assert hardware.cpus("0-2,5") == [0, 1, 2, 5]


def test_pretended_numa_nodes_share_the_memory_and_have_their_cpus(tmp_path):
    hardware.numa_tree(tmp_path / "numa", "0-1;2-3", 1000)
    assert (tmp_path / "numa/online").read_text() == "0-1\n"
    assert (tmp_path / "numa/cpu_online").read_text() == "0-1,2-3\n"
    assert (tmp_path / "numa/node1/cpumap").read_text() == "c\n"
    assert (tmp_path / "numa/node1/distance").read_text() == "20 10\n"
    assert "Node 1 MemTotal: 500 kB" in (tmp_path / "numa/node1/meminfo").read_text()
    assert (tmp_path / "numa/node1/cpu3/topology/physical_package_id").read_text() == "1\n"


def test_gpus_are_dealt_to_the_numa_nodes_in_order_and_a_state_that_a_test_wrote_is_kept(tmp_path):
    path = tmp_path / "gpus.json"
    hardware.gpu_state(path, Options(nodes=1, gpus=4, numa="0;1"))
    assert [(d["id"], d["numa"]) for d in json.loads(path.read_text())["devices"]] == [
        ("gpu-0", 0),
        ("gpu-1", 0),
        ("gpu-2", 1),
        ("gpu-3", 1),
    ]
    path.write_text("{}")
    hardware.gpu_state(path, Options(nodes=1, gpus=4))
    assert path.read_text() == "{}"
