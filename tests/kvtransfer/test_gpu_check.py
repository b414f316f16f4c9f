"""The items of `scripts/gpu_check`, over the stand-in for CUDA and between real processes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_items import ITEMS, Bench, ItemFailed, Outcome, run_items
from tests.kvtransfer.cuda_stand_in import StandIn

from llmrt.kvtransfer.cuda_cupy import why_not

pytestmark = pytest.mark.integration

HERE = Path(__file__).parents[2]
PEER = """
import sys
from pathlib import Path
folder, root, size = sys.argv[1:]
sys.path[:0] = [root, f"{root}/scripts"]
from gpu_items import Bench, serve_peer
from tests.kvtransfer.cuda_stand_in import StandIn
cuda = StandIn(Path(folder))
cuda.set_device(0)
serve_peer(Bench(runtime=cuda, peer_command=[], num_blocks=8, block_bytes=int(size)))
"""


def make_bench(folder: Path, cuda: StandIn) -> Bench:
    size = 1 << 16
    command = [sys.executable, "-c", PEER, str(folder), str(HERE), str(size)]
    return Bench(
        runtime=cuda, peer_command=command, num_blocks=8, block_bytes=size, floor_gb_per_s=0
    )


def outcomes_of(bench: Bench) -> dict[str, str]:
    return {outcome.item.split()[0]: outcome.outcome for outcome in run_items(bench, ITEMS)}


def test_every_item_passes_where_cuda_does_what_it_says(tmp_path: Path) -> None:
    cuda = StandIn(tmp_path)
    outcomes = run_items(make_bench(tmp_path, cuda), ITEMS)
    assert [o for o in outcomes if o.outcome != "PASS"] == [
        Outcome("C10 peer access", "SKIP", "there is one GPU")
    ]
    assert len(outcomes) == len(ITEMS) == 14
    assert cuda.num_mapped == 0


def test_memory_without_handles_fails_the_items_that_need_them(tmp_path: Path) -> None:
    outcomes = outcomes_of(make_bench(tmp_path, StandIn(tmp_path, is_vmm=True)))
    failed = {item for item, outcome in outcomes.items() if outcome == "FAIL"}
    assert failed == {"C1", "C2", "C3", "C7", "C11", "C12", "death"}


def test_a_slice_of_a_gpu_fails(tmp_path: Path) -> None:
    outcomes = outcomes_of(make_bench(tmp_path, StandIn(tmp_path, is_mig=True)))
    assert outcomes["C9"] == outcomes["C1"] == "FAIL"


def test_another_gpu_fails_the_check_of_the_uuid(tmp_path: Path) -> None:
    outcomes = outcomes_of(make_bench(tmp_path, StandIn(tmp_path, uuid="gpu1")))
    assert [item for item, outcome in outcomes.items() if outcome == "FAIL"] == ["C6"]


def test_slow_copies_fail(tmp_path: Path) -> None:
    bench = replace(make_bench(tmp_path, StandIn(tmp_path)), floor_gb_per_s=1e6)
    assert outcomes_of(bench)["C12"] == "FAIL"


def test_a_peer_that_does_not_start_fails_its_item(tmp_path: Path) -> None:
    bench = replace(
        make_bench(tmp_path, StandIn(tmp_path)), peer_command=[sys.executable, "-c", ""]
    )
    with pytest.raises(ItemFailed, match="the peer exported nothing: ''"):
        ITEMS["C8 one pid namespace"](bench)


@pytest.mark.skipif(why_not() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check"], cwd=HERE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU can be used here: ")
    assert done.stdout == ""


@pytest.mark.gpu
@pytest.mark.skipif(why_not() is not None, reason="there is no GPU")
def test_everything_passes_on_a_gpu() -> None:
    done = subprocess.run([sys.executable, "scripts/gpu_check"], cwd=HERE, check=False)
    assert done.returncode == 0
