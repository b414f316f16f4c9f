import pytest

from llmrt.kvtransfer.transport import choose_transport, is_same_host
from llmrt.wire.errors import ConfigError
from llmrt.wire.messages import ProcessName


def process(boot_id: str = "boot", pid_namespace: str = "ns", pid: int = 1) -> ProcessName:
    return ProcessName(boot_id=boot_id, pid_namespace=pid_namespace, pid=pid, start_ticks=1)


def test_auto_takes_the_shortest_way_that_the_pair_has() -> None:
    assert choose_transport("auto", True) == "shm"
    assert choose_transport("auto", False) == "tcp"


def test_tcp_works_on_one_host_too() -> None:
    assert choose_transport("tcp", True) == "tcp"
    assert choose_transport("tcp", False) == "tcp"


def test_shm_is_never_replaced_in_silence() -> None:
    assert choose_transport("shm", True) == "shm"
    with pytest.raises(ConfigError, match="another host"):
        choose_transport("shm", False)


def test_unknown_modes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'rdma': auto, shm or tcp"):
        choose_transport("rdma", True)


def test_processes_share_memory_under_one_kernel_and_pid_namespace() -> None:
    assert is_same_host(process(pid=1), process(pid=2))
    assert not is_same_host(process(), process(boot_id="other"))
    assert not is_same_host(process(), process(pid_namespace="other"))
