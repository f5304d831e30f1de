"""What a graph of launches replays, with a GPU or without.

On a GPU a CUDA graph records launches with the addresses of their arguments, and replays them without the host. Without
one, a Recording does as much as judges need: it writes down PyTorch's operations and the launches in between, and does
them again, into the same tensors. So what the host has read, and only the host, is old when it is replayed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pkv._triton import GPU_VISIBLE, tl
from pkv.course.watching import replaced
from pkv.decoding import plan as plan_for
from pkv.stages import STAGES

# what PyTorch does with a tensor without reading it
UNREAD = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")


class ReadByTorch(RuntimeError):
    """A tensor that only a kernel may read was read by an operation of PyTorch."""


class ReadByHost(RuntimeError):
    """A tensor that only a kernel may read was read by the host."""


class NotCompiled(RuntimeError):
    """A kernel was launched for the first time during a capture."""


class HostWork(RuntimeError):
    """The host launched where it should only replay."""


class Recording(TorchDispatchMode):
    """Writes down what is done while it is entered; replay() does it again. guarded: a tensor for kernels only."""

    def __init__(self, guarded: torch.Tensor | None = None) -> None:
        super().__init__()
        self.guarded, self.is_quiet = guarded, False
        self.steps: list[Callable[[], Any]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_quiet:
            return func(*args, **kwargs)
        self.check(func, args, kwargs)
        result = func(*args, **kwargs)
        self.steps.append(functools.partial(do_again, func, args, kwargs, result))
        return result

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operation that reads the guarded tensor."""
        name = func.overloadpacket.__name__
        if self.guarded is None or func.is_view or name in UNREAD:
            return
        mine = self.guarded.untyped_storage().data_ptr()
        if all(tensor.untyped_storage().data_ptr() != mine for tensor in tensors_of((args, kwargs))):
            return
        is_moved = torch.device(kwargs.get("device") or self.guarded.device).type != self.guarded.device.type
        if name == "_local_scalar_dense" or is_moved:
            raise ReadByHost(f"the host reads the lengths ({func})")
        raise ReadByTorch(f"{func} uses the lengths outside of your kernel")

    def launched(self, step: Callable[[], Any]) -> None:
        """Do a launch, and write it down as one step."""
        self.is_quiet = True
        try:
            step()
        finally:
            self.is_quiet = False
        self.steps.append(step)

    def replay(self) -> None:
        """Do every step again."""
        for step in self.steps:
            step()


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def do_again(func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """An operation once more, its result where the first one lies."""
    for old, new in zip(tensors_of(result), tensors_of(func(*args, **kwargs)), strict=True):
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)


def record(function: Callable[..., Any], *arguments: Any, guarded: torch.Tensor) -> tuple[Any, Callable[[], None]]:
    """What a function gives, and a replay of what it launched. Raises ReadBy... if not only kernels read `guarded`."""
    recording = Recording(guarded)
    if GPU_VISIBLE:
        function(*arguments)  # compiles its kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), recording:
            value = function(*arguments)
        return value, graph.replay
    kind = type(tl.sum)  # of every interpreted kernel
    run = kind.run

    def run_and_note(kernel: Any, *args: Any, **options: Any) -> None:
        recording.launched(functools.partial(run, kernel, *args, **options))

    with replaced(kind, run=run_and_note), recording:
        value = function(*arguments)
    return value, recording.replay


class Watch:
    """Sees every launch of a stage, and says what is wrong on a GPU; without one, it stands in for CUDA graphs."""

    def __init__(self) -> None:
        self.n_launches = 0
        self.is_replaying = False
        self.capture: Recording | None = None  # the stand-in's

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Stages launch through here, and torch.cuda's graphs are stood in for where there is no GPU."""
        with contextlib.ExitStack() as stack:
            for stage in STAGES.values():
                stack.enter_context(replaced(stage, launch=functools.partial(self.launch, stage.launch)))
            if not GPU_VISIBLE:
                stack.enter_context(replaced(torch.cuda, **self.stand_ins()))
            yield

    def launch(self, launch: Callable[..., None], q: Any, cache: Any, plan: Any, *rest: Any, **named: Any) -> None:
        """A stage's launch: now, or written down."""
        if self.is_replaying:
            raise HostWork("replay() launches from the host")
        if torch.cuda.is_current_stream_capturing() and not self.n_launches:
            raise NotCompiled("operation not permitted when stream is capturing: a first call compiles")
        if self.capture is not None:
            self.capture.steps.append(functools.partial(launch_anew, launch, q, cache, plan, *rest, **named))
            return
        self.n_launches += 1
        launch(q, cache, plan, *rest, **named)

    def stand_ins(self) -> dict[str, Any]:
        """What torch.cuda has for captures. Streams are one."""

        class Stream:
            def __init__(self, *args: Any, **named: Any) -> None:
                pass

            def wait_stream(self, stream: Any) -> None:
                pass

            def synchronize(self) -> None:
                pass

        @contextlib.contextmanager
        def graph(of: Recording, *args: Any, **named: Any) -> Iterator[None]:
            self.capture = of
            try:
                with of:
                    yield
            finally:
                self.capture = None

        return {
            "CUDAGraph": Recording,
            "graph": graph,
            "Stream": Stream,
            "stream": contextlib.nullcontext,
            "current_stream": Stream,
            "synchronize": lambda *args: None,
            "is_current_stream_capturing": lambda: self.capture is not None,
        }


def launch_anew(
    launch: Callable[..., None], q: Any, cache: Any, plan: Any, scale: Any, out: Any, lse: Any, **named: Any
) -> None:
    """What a recorded launch of a stage does now.

    A stage that is planned on the GPU finds today's work, whatever plan it is launched with. Here it gets one of today,
    because the interpreter launches as many programs as the plan has.
    """
    if STAGES[plan.stage].PLANNED_ON == "gpu":
        plan = plan_for(cache.lengths, plan.shape, stage=plan.stage, tile=plan.tile, gpu=plan.gpu)
        if not plan.has_tokens:
            out.zero_(), lse.fill_(-torch.inf)
            return
    launch(q, cache, plan, scale, out, lse, **named)
