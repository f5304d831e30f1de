"""What judges a replay where there is no GPU: recordings of launches, and the stand-in for CUDA graphs."""

import pytest
import torch

import pkv
from pkv._triton import GPU_VISIBLE, tl, triton
from pkv.course.graders.batches import DEVICE
from pkv.course.graders.ex05_capture import capture_arguments
from pkv.course.graphs import HostWork, NotCompiled, ReadByHost, ReadByTorch, Recording, Watch, record
from pkv.stages import STAGES

without_gpu = pytest.mark.skipif(GPU_VISIBLE, reason="on a GPU the driver records")


@triton.jit
def add_kernel(x, total, n, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.atomic_add(total, tl.sum(tl.load(x + places, mask=places < n, other=0), 0))


def summed(x):
    total = torch.zeros(1, dtype=x.dtype, device=x.device)
    add_kernel[(1,)](x, total, len(x), BLOCK=8)
    return total


@pytest.fixture
def numbers():
    return torch.tensor([1, 2, 3], device=DEVICE)


def test_a_replay_reads_what_is_there_by_then(numbers):
    total, replay = record(summed, numbers, guarded=numbers)
    numbers.copy_(torch.tensor([10, 20, 30]))
    for _ in range(2):  # zeros are made anew too, so the sum does not pile up
        replay()
        assert total.tolist() == [60]


@without_gpu
def test_what_the_host_has_read_is_old(numbers):
    total, replay = record(lambda x: torch.tensor([sum(x.tolist())]), numbers, guarded=numbers)
    numbers.zero_()
    replay()
    assert total.tolist() == [6]


@pytest.mark.parametrize(
    ("reads", "error"),
    [
        (lambda x: x.sum(), ReadByTorch),
        (lambda x: x[1:].cumsum(0), ReadByTorch),
        (lambda x: x.zero_(), ReadByTorch),
        (lambda x: x.to(torch.int32), ReadByTorch),
        (lambda x: x[0].item(), ReadByHost),
        (lambda x: [int(n) for n in x], ReadByHost),
    ],
)
def test_only_kernels_may_read_what_is_guarded(numbers, reads, error):
    with pytest.raises(error), Recording(numbers):
        reads(numbers)
    assert numbers.tolist() == [1, 2, 3]


def test_sizes_and_places_are_not_read(numbers):
    with Recording(numbers):
        assert len(numbers) == numbers.numel() == numbers.shape[0] == 3
        assert torch.empty_like(numbers).device == numbers.device
        assert numbers[1:].data_ptr() == numbers.data_ptr() + numbers.element_size()


@pytest.fixture
def batch():
    return capture_arguments({"lengths": [3, 0], "steps": [[5, 7]], "seed": 1})[:2]


@without_gpu
def test_a_capture_is_not_run_and_a_replay_is(batch):
    q, cache = batch
    out = torch.full_like(q, -7)
    with Watch().watching():
        pkv.decode(q, cache)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pkv.decode(q, cache, out=out)
        assert (out == -7).all()
        for lengths in ([3, 0], [5, 7], [0, 0]):
            cache.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            assert torch.equal(out, pkv.decode(q, cache))


@without_gpu
def test_a_first_call_cannot_be_captured(batch):
    with Watch().watching(), pytest.raises(NotCompiled), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pkv.decode(*batch)


def test_a_replay_that_launches_is_seen(batch):
    watch = Watch()
    with watch.watching():
        pkv.decode(*batch)
        watch.is_replaying = True
        with pytest.raises(HostWork):
            pkv.decode(*batch)


def test_nothing_stays_replaced():
    before = [stage.launch for stage in STAGES.values()], torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.Stream
    with pytest.raises(KeyError), Watch().watching():
        raise KeyError
    after = [stage.launch for stage in STAGES.values()], torch.cuda.CUDAGraph, torch.cuda.graph, torch.cuda.Stream
    assert before == after
