"""What the doctor says of GPUs, from the answers of torch, MPI and Horovod on machines that have some."""

from hybridpipe.launch.gpus import Build, RankDevice, describe, who_has_which

STAGED = Build(torch_cuda="13.0", horovod_cuda=True, torch_nccl=True)
NCCL = Build(torch_cuda="13.0", horovod_cuda=True, nccl=22809, torch_nccl=True, cuda_aware=True)
NO_HOROVOD = Build(torch_cuda="13.0", torch_nccl=True)
CPU = Build(torch_cuda=None)


def test_a_torch_without_cuda_is_named():
    assert describe(CPU, [], None) == "none: torch is built without CUDA, so training is on CPUs"


def test_gpus_that_a_variable_hides_are_named():
    expected = "torch has CUDA 13.0 and sees none{}, so training is on CPUs"
    assert describe(STAGED, [], None) == expected.format("")
    assert describe(STAGED, [], "") == expected.format(" (CUDA_VISIBLE_DEVICES=)")


def test_the_ways_of_gradients_and_messages_are_named():
    staged, nccl = describe(STAGED, ["H100", "H100"], None), describe(NCCL, ["H100", "A100"], None)
    assert "2 H100, CUDA 13.0; all-reduces by host memory, of any number of ranks a GPU;" in staged
    assert staged.endswith("MPI is not CUDA-aware")
    assert "1 H100 and 1 A100, CUDA 13.0; all-reduces by Horovod's NCCL 2.28, of one rank a GPU;" in nccl
    assert nccl.endswith("CUDA-aware MPI is there, for HYBRIDPIPE_CUDA_AWARE_MPI=1")


def test_without_a_horovod_for_gpus_torch_sums_and_else_mpi():
    assert "all-reduces by torch's NCCL, of one rank a GPU" in describe(NO_HOROVOD, ["H100"], None)
    assert "all-reduces by host memory" in describe(Build(torch_cuda="13.0"), ["H100"], None)


def test_each_rank_and_its_gpu():
    places = [
        RankDevice(0, "h1", "a", "cuda:0 (H100)"),
        RankDevice(1, "h1", "b", "cuda:1 (H100)"),
        RankDevice(2, "h1", "b", "cuda:1 (H100)"),
        RankDevice(3, "h2", "a", "cuda:0 (H100)"),
        RankDevice(4, "h2", "", ""),
    ]
    assert who_has_which(places) == (
        "h1: rank 0 on cuda:0 (H100), ranks 1, 2 share cuda:1 (H100); "
        "h2: rank 3 on cuda:0 (H100), rank 4 on CPUs"
    )
