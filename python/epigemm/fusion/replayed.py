"""One of Dynamo's graphs, replayed as CUDA graphs: one for each kind of call, which depends on the sizes of its inputs.

The first call of a kind runs kernel by kernel, because kernels are linked and packs made then. The second one is
captured, and then it and later ones are replayed. Parameters and buffers are read at their own addresses. Other inputs
are copied to the graph's inputs, and results from the graph's results, so that those of one call stay valid after the
next.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from epigemm.arguments import invariance, precision
from epigemm.fusion.launcher import Graph, Launcher, launcher_of
from epigemm.fusion.replayable import RECORDED, device_of
from epigemm.fusion.report import CudaGraphs
from epigemm.fusion.values import value_of
from epigemm.packs.captured_packs import CapturedPacks

MOST_GRAPHS = 32
"""The most graphs of one model: each of them holds its results, and an executable graph."""
FULL = f"a model has at most {MOST_GRAPHS} CUDA graphs: calls of further sizes run kernel by kernel"
MOVING = "its parameters lie elsewhere at every call"
OVERLAPS = "elements of an input share memory"
_MOST_KINDS = 1024  # that were called once
_MOST_MOVES, _REPLAYS_A_MOVE = (
    8,
    100,
)  # after the first moves of a parameter, one new capture is allowed for so many replays
_data_ptr = Tensor.data_ptr
# Settings that decide which kernels are launched, and which Dynamo does not guard.
_precision: Any = torch._C._get_fp32_precision_getter
_FLAGS: list[Any] = [
    *(
        getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
    *(getattr(torch._C, f"_get_cudnn_{name}") for name in ("enabled", "benchmark", "deterministic")),
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    torch._C._get_cublas_allow_fp16_accumulation,
]

_Maker = Callable[[tuple[Any, ...], dict[int, Tensor]], Tensor]


class Replays:
    """The state that the graphs of one model share.

    Attributes:
        report: the report on them.
    """

    def __init__(self, model: nn.Module, report: CudaGraphs) -> None:
        self.report = report
        self._model = weakref.ref(model)  # weak, because Dynamo never frees the graphs
        self._entries: weakref.WeakSet[_Entry] = weakref.WeakSet()
        self._served: weakref.WeakSet[Replayed] = weakref.WeakSet()
        self._serves = False

    @property
    def serves(self) -> bool:
        """Whether some graph of the model may be replayed."""
        return self._serves

    def launcher(self, graph: fx.Graph) -> Launcher | None:
        """The launcher for one of Dynamo's graphs as a CUDA graph; or None, with a reason in the report."""
        found = device_of(graph)
        if isinstance(found, str):
            self.note(found)
            return None
        made = launcher_of(found)
        if made is None:
            self.note(f"it runs on {found}")
        self._serves |= made is not None
        return made

    def own_ids(self) -> set[int]:
        """The ids of the tensors that are read at their own addresses."""
        model = self._model()
        return set() if model is None else set(map(id, (*model.parameters(), *model.buffers())))

    def is_full(self) -> bool:
        """Whether the model has as many graphs as it may have."""
        return len(self._entries) >= MOST_GRAPHS

    def add(self, entry: _Entry) -> None:
        """Count a graph, as long as it exists."""
        self._entries.add(entry)
        self.report.captured += 1

    def serve(self, replayed: Replayed) -> None:
        """Register one of Dynamo's graphs, as long as it exists."""
        self._served.add(replayed)

    def drop(self) -> None:
        """Free the memory of all graphs: the model has been deleted, or is not fused any more."""
        for each in self._served:
            each.forget_all()

    def note(self, reason: str) -> None:
        """Note in the report why something runs kernel by kernel."""
        if reason not in self.report.reasons:
            self.report.reasons.append(reason)


class Replayed:
    """The function that Dynamo calls in place of a graph."""

    def __init__(self, graph_module: fx.GraphModule, launcher: Launcher, replays: Replays) -> None:
        self._run, self._launcher, self._replays = graph_module.forward, launcher, replays
        values = [value_of(node) for node in graph_module.graph.nodes if node.op == "get_attr"]
        self._constants = tuple(value for value in values if isinstance(value, Tensor))
        self._why_not = ""
        self._entries: dict[Any, _Entry | None] = {}  # None: it could not be captured
        self._met: set[Any] = set()
        self._own: list[int] | None = None  # the positions of parameters and buffers among the inputs
        self._moves = self._replayed = 0
        replays.serve(self)

    def __call__(self, *args: Any) -> Any:
        """The graph's call."""
        launcher = self._launcher
        if self._why_not or launcher.is_capturing():
            return self._run(*args)
        with launcher.lock:
            entry = self._entry(args)
            if entry is not None:
                self._replayed += 1
                return launcher.replay(entry, args)
        results = self._run(*args)
        # Not every fake tensor of the graph tells that autograd records it. The first call of a kind does.
        if any(isinstance(each, Tensor) and each.grad_fn is not None for each in results):
            self._leave(RECORDED)
        return results

    @property
    def is_left(self) -> bool:
        """Whether all later calls run kernel by kernel."""
        return bool(self._why_not)

    def _entry(self, args: tuple[Any, ...]) -> _Entry | None:
        """The CUDA graph for a call; None if it runs kernel by kernel."""
        if self._own is None:
            self._sort(args)
        key, own = self._key(args), self._owned(args)
        met = (key, threading.get_ident())  # a thread's first call creates its library handles
        if key in self._entries:
            entry = self._entries[key]
            if entry is None:
                return None
            addresses = [*map(_data_ptr, own)]
            if entry.addresses == addresses and entry.packs.are_current(own):
                return entry
            self._forget(key, args)
            return None
        if met not in self._met:
            if len(self._met) >= _MOST_KINDS:
                self._met.clear()
            self._met.add(met)
            return None
        return self._captured(key, args, own)

    def _sort(self, args: tuple[Any, ...]) -> None:
        """Find out which inputs are parameters and buffers of the model."""
        ids = self._replays.own_ids()
        tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        self._own = [place for place in tensors if id(args[place]) in ids]
        self._given = [place for place in range(len(args)) if place not in {*self._own}]
        self._take: Any = itemgetter(*self._own) if len(self._own) > 1 else None

    def _owned(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if self._take is not None:
            return (*self._take(args), *self._constants)
        return (*(args[place] for place in self._own or ()), *self._constants)

    def _key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        parts: list[Any] = [_settings()]
        for place in self._given:
            value = args[place]
            parts.append((value.shape, value.stride()) if isinstance(value, Tensor) else value)
        return tuple(parts)

    def _forget(self, key: Any, args: tuple[Any, ...]) -> None:
        """Drop a graph whose parameters have moved or been replaced: it would read other memory."""
        del self._entries[key]
        own = self._own
        self._sort(args)
        if own != self._own:
            self.forget_all()
        self._moves += 1
        if self._moves > _MOST_MOVES + self._replayed // _REPLAYS_A_MOVE:
            self._leave(MOVING)

    def _captured(self, key: Any, args: tuple[Any, ...], own: tuple[Tensor, ...]) -> _Entry | None:
        if self._replays.is_full():
            self._replays.note(FULL)
            return None
        given = {place: args[place] for place in self._given if isinstance(args[place], Tensor)}
        if reason := _why_not_copied(given.values()):
            self._replays.note(reason)
            self._entries[key] = None
            return None
        try:
            packs = CapturedPacks(own)
            with torch.inference_mode(False), torch.no_grad():
                inputs = {place: like(value).copy_(value) for place, value in given.items()}
            inside = [inputs.get(place, value) for place, value in enumerate(args)]
            graph, found = self._launcher.capture(lambda: self._run(*inside))
            entry = _Entry(graph, inputs, inside, found, own, packs)
        except torch.OutOfMemoryError:
            self._replays.note("there is no memory for another CUDA graph")
            self._entries[key] = None
            return None
        except Exception as error:  # any error of an operator that cannot be captured
            text = str(error).strip().split("\n")[0]
            self._leave(f"it cannot be captured: {type(error).__name__}: {text}")
            return None
        self._entries[key] = entry
        self._replays.add(entry)
        return entry

    def _leave(self, reason: str) -> None:
        self._why_not = reason
        self.forget_all()
        self._replays.note(reason)

    def forget_all(self) -> None:
        """Drop all graphs."""
        self._entries.clear()
        self._met.clear()


class _Entry:
    """A captured graph, with its inputs and results."""

    def __init__(
        self,
        graph: Graph,
        inputs: dict[int, Tensor],
        inside: Sequence[Any],
        found: Sequence[Any],
        own: Sequence[Tensor],
        packs: CapturedPacks,
    ) -> None:
        self.graph, self.packs = graph, packs
        self.inputs = [*inputs.values()]
        self.streams: set[int] = set()
        self.addresses = [*map(_data_ptr, own)]
        self._places = [*inputs.items()]
        self._results = _Results(found, inside)

    def feed(self, args: tuple[Any, ...]) -> None:
        """Copy the arguments of a call to the graph's inputs."""
        for place, tensor in self._places:
            tensor.copy_(args[place])

    def results(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of a call, copied from the graph's results."""
        return self._results.of(args)


class _Results:
    """Makes results that later calls do not write, with the strides and the shared memory of a call's own results."""

    def __init__(self, found: Sequence[Any], inside: Sequence[Any]) -> None:
        memories: dict[int, list[Tensor]] = {}
        inputs: dict[int, int] = {}
        for place, value in enumerate(inside):
            if isinstance(value, Tensor) and value.numel():
                inputs.setdefault(_memory(value), place)
        distinct = {id(value): value for value in found if isinstance(value, Tensor)}
        for value in distinct.values():
            if value.is_conj() or value.is_neg():
                raise TypeError("a result is a conjugate, whose memory holds other numbers")
            memories.setdefault(_memory(value), []).append(value)
        makers: dict[int, _Maker] = {}
        for memory, values in memories.items():
            alone = len(values) == 1 and not overlaps(values[0])
            for value in values:
                if value.numel() and memory in inputs:
                    place = inputs[memory]
                    makers[id(value)] = _of_input(value, inside[place], place)
                else:
                    makers[id(value)] = _copied(value) if alone or not value.numel() else _within(value)
        self._found, self._makers = found, makers
        is_simple = len(distinct) == len(found)  # the usual case: each result has memory of its own
        self._in_order = [makers[id(value)] for value in found] if is_simple else None

    def of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results, for the arguments of a call."""
        made: dict[int, Tensor] = {}  # copies of storages that several results share, by the storage
        if self._in_order is not None:
            return tuple(maker(args, made) for maker in self._in_order)
        values = {key: maker(args, made) for key, maker in self._makers.items()}
        return tuple(values.get(id(value), value) for value in self._found)


def _copied(value: Tensor) -> _Maker:
    def make(args: tuple[Any, ...], made: dict[int, Tensor]) -> Tensor:
        return like(value).copy_(value)

    return make


def _within(value: Tensor) -> _Maker:
    """A result in memory that several results share."""
    memory = _memory(value)
    bytes_of = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage())
    offset, shape, stride = value.storage_offset(), value.shape, value.stride()

    def make(args: tuple[Any, ...], made: dict[int, Tensor]) -> Tensor:
        if memory not in made:
            made[memory] = bytes_of.clone()
        storage = made[memory].untyped_storage()
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, offset, shape, stride)

    return make


def _of_input(value: Tensor, given: Tensor, place: int) -> _Maker:
    """A result that is a view of an input: a view of the caller's tensor."""
    if value.dtype != given.dtype:
        raise TypeError("a result is a view of an input as another type")
    shape, stride, offset = value.shape, value.stride(), value.storage_offset() - given.storage_offset()

    def view(whole: Tensor) -> Tensor:
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def make(args: tuple[Any, ...], made: dict[int, Tensor]) -> Tensor:
        whole = args[place]
        if not whole.requires_grad:
            return view(whole)
        with torch.no_grad():  # as when it was made, independent of the caller's mode
            return view(whole)

    return make


def _settings() -> tuple[Any, ...]:
    return (
        invariance.enabled(),
        precision.torch_setting("cuda"),
        _precision("cuda", "conv"),
        *[flag() for flag in _FLAGS],
    )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _why_not_copied(given: Collection[Tensor]) -> str:
    """Why arguments cannot be copied to a graph's inputs; empty if they can."""
    if any(map(overlaps, given)):
        return OVERLAPS
    # Autograd would record the copies of parameters that are not the model's own.
    return RECORDED if torch.is_grad_enabled() and any(value.requires_grad for value in given) else ""


def like(tensor: Tensor) -> Tensor:
    """New memory with the strides of a tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def overlaps(tensor: Tensor) -> bool:
    """Whether two elements may share memory."""
    reach = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda axis: axis[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
