"""What a call of a fused model runs: graphs that Dynamo compiled and `rewrite` fused, or the model as it was."""

from __future__ import annotations

import inspect
import itertools
import sys
import time
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
from torch._dynamo.types import ConvertFrameReturn
from torch.fx._lazy_graph_module import _LazyGraphModule

from epigemm import progress
from epigemm.arguments.traced import is_traced
from epigemm.explain import listening
from epigemm.explain.listening import Listener
from epigemm.fusion import explaining
from epigemm.fusion.changes import Watched, guard_more, why_not_now, why_not_with
from epigemm.fusion.generators import COROUTINE, is_coroutine, kept_inside
from epigemm.fusion.host import Launches
from epigemm.fusion.inlined import noted
from epigemm.fusion.kinds import Asked, Kinds, Ran, asked
from epigemm.fusion.marks import Marks
from epigemm.fusion.replayed import Replayed, Replays
from epigemm.fusion.report import CudaGraphs, FusionReport, Uncopied, tell, tell_skipped, watchers
from epigemm.fusion.rewrite import FusionError, failed, fuse_module, higher_order
from epigemm.fusion.trials import may_measure

RECOMPILE_LIMIT = 64
# A compilation leaves weak references to parameters, with which swap_tensors fails. Since torch 2.11 Dynamo can drop
# them. And its records for a profiler take two microseconds a call, also without a profiler.
_SETTINGS: dict[str, Any] = {
    name: value
    for name, value in (("invalidate_compile_context_weakrefs", True), ("record_runtime_overhead", False))
    if hasattr(torch._dynamo.config, name)
}
# If a graph breaks, its parts have the code of the model's class, so entries of other models would be tried, too. Since
# torch 2.13 each model can have its own entries.
_IS_ISOLATED = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_ISOLATED: dict[str, Any] = {"isolate_recompiles": True} if _IS_ISOLATED else {}
# A frame and those that it calls run without compilation, this time only.
_AS_IT_WAS = ConvertFrameReturn(_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP), apply_to_code=False)
_numbers = itertools.count()
# Errors that Dynamo has to raise, whatever its settings.
_OF_DYNAMO = tuple(
    getattr(torch._dynamo.exc, name)
    for name in ("Unsupported", "ResumePrologueTracingError")
    if hasattr(torch._dynamo.exc, name)
)


class ModelCall(Uncopied):
    """The call of a fused model.

    Attributes:
        report: what was fused in the graphs so far.
    """

    def __init__(
        self,
        model: nn.Module,
        own: list[str],
        *,
        keep_packs: bool,
        strict: bool,
        cuda_graphs: bool,
        measures: bool,
    ) -> None:
        self.report = FusionReport(cuda_graphs=CudaGraphs() if cuda_graphs else None)
        self._name = type(model).__name__
        self._model = model
        self._keep_packs, self._strict, self._measures = keep_packs, strict, measures
        self._replays = Replays(model, self.report.cuda_graphs) if self.report.cuda_graphs else None
        if self._replays is not None:
            weakref.finalize(self, self._replays.drop).atexit = False
        self._graphs = 0
        self._of_frame: FusionReport | None = (
            None  # the report of the graph that is being compiled, if there is one
        )
        self._left = ""
        self._watched: Watched | None = None
        self._marks = Marks()
        self._kinds = Kinds(model, self.report.notes, own, measures=measures)
        self._ran = Ran()
        self._compiled = self._compile()

    def _compile(self) -> Callable[..., Any]:
        model = self._model

        def call(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        # Dynamo keeps its graphs by code object, up to a limit, so each model has a code object of its own. It is
        # outside of torch, because Dynamo does not trace into torch's own code (`nn.Sequential`). Each model's code
        # also has a name of its own, because Dynamo makes variables of numbers that differ between calls of code with
        # one name.
        code = call.__code__.replace(co_name=f"call_{self._name}_{next(_numbers)}")
        own = FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        here = weakref.ref(self)  # Dynamo never frees backends

        def backend(graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            found = here()
            assert found is not None  # the compiling call holds a reference
            return found._backend(graph_module, example_inputs)

        context: Any = torch._dynamo.optimize(backend=backend, **_ISOLATED)
        compile_frame = context.callback

        def compile_with_guards(frame: Any, *state: Any) -> Any:
            # Dynamo's settings are switched here, so a call whose graph exists has no cost for it.
            if frame.f_code is code:
                self._marks.mark(frame.f_locals.values())
            start = time.perf_counter()
            self._of_frame = None
            own = torch._dynamo.config.patch(
                skip_nnmodule_hook_guards=False,
                suppress_errors=False,
                recompile_limit=RECOMPILE_LIMIT,
                **_SETTINGS,
            )
            try:
                with (
                    own,
                    kept_inside(self._leave),
                    noted(self._watch().inlined),
                    progress.doing(f"fusing {self._name}"),
                ):
                    found = compile_frame(frame, *state)
                self.report.add(self._of_frame or FusionReport())
            except _OF_DYNAMO:  # errors that Dynamo has to raise
                raise
            except Exception as error:
                self._note(error)
                found = ConvertFrameReturn()  # the frame runs as it was
            self.report.seconds += time.perf_counter() - start
            if not self._left and is_coroutine([frame.f_code]):
                self._note_left(COROUTINE)
            return _AS_IT_WAS if self._left else found

        # Dynamo identifies a compiler by this attribute.
        vars(compile_with_guards)["_torchdynamo_orig_backend"] = compile_frame._torchdynamo_orig_backend
        context.callback = compile_with_guards
        compiled: Callable[..., Any] = context(own)
        return compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's call, in as few Python functions as possible, to save the host's time."""
        kind = asked(self._kinds.about, False, args, kwargs)
        if kind is True:
            return self._model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._look(kind, args, kwargs)

    def _look(self, kind: Asked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that may run a graph."""
        model = self._model
        if is_traced():
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if kind is False:
            caller = sys._getframe(2).f_locals.get("self")
            if caller is not model and isinstance(caller, nn.Module):
                # The caller has the model's attributes but its own tensors: a replica of DataParallel, or a shallow
                # copy.
                return caller._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            kind = self._kinds.of(args, kwargs)
            if kind is True:
                return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if watchers and (listener := listening.current()) is not None:
            return self._explained(listener, args, kwargs)
        trial = None
        if kind:
            trial = self._kinds.trial(kind)
            if trial is not None and trial.is_plains_turn:
                return trial.run(model._call_impl, args, kwargs, is_plain=True)
        if reason := self._why_not_now(args, kwargs):
            if watchers:
                tell(self._name, reason)
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        ran = self._ran
        gains, unsure = ran.gains, ran.unsure
        try:
            if trial:
                result = trial.run(self._compiled, args, kwargs, is_plain=False)
            else:
                result = self._compiled(*args, **kwargs)
        finally:
            self._marks.unmark()
        if kind and trial is None:
            if ran.gains == gains or ran.unsure != unsure:
                self._kinds.note(kind, gains=ran.gains != gains)
            else:
                self._kinds.note_sure(kind)
        return result

    def _explained(self, listener: Listener, args: Any, kwargs: Any) -> Any:
        """A call for `explain`: it runs as a call would now, and a listener notes what its graphs run."""
        with listener.paused(self._model):
            kind = self._kinds.told(args, kwargs)
            reason = self._kinds.why_plain(kind) or self._why_not_now(args, kwargs)
            if not reason:
                try:
                    result = self._compiled(*args, **kwargs)
                finally:
                    self._marks.unmark()
                if not self._left:
                    listener.notes += self.report.cuda_graphs.lines() if self.report.cuda_graphs else ()
                    return result
                reason = self._left  # the reason was found while it was compiled, when nothing was noted
        listener.notes.append(f"{self._name} runs as it was: {reason}")
        return self._model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _why_not_now(self, args: Any, kwargs: Any) -> str:
        watched = self._watched or self._watch()
        return self._left or watched.why_not() or why_not_now() or why_not_with(args, kwargs)

    def part(self) -> None:
        """Detach from the model. Copies of the model's `__dict__` may still call this object."""
        self._kinds.part()

    def _watch(self) -> Watched:
        """The state that calls compare with, from the first call."""
        if self._watched is None:
            self._watched = Watched(self._model)
        return self._watched

    def _note(self, error: Exception) -> None:
        """Note in the report why a frame could not be compiled."""
        if isinstance(error, torch._dynamo.exc.BackendCompilerFailed):
            if isinstance(error.inner_exception, FusionError):
                raise error.inner_exception
            self.report.add(FusionReport(skipped=[failed(error.inner_exception, strict=self._strict)]))
        else:  # often an error of the model, which it also raises without a compiler
            text = str(error).strip().split("\n")[0]
            note = f"Dynamo could not compile a part of it: {type(error).__name__}: {text}"
            self.report.add(FusionReport(notes=[note]))

    def _leave(self, reason: str) -> NoReturn:
        """Called by the compiler: from now on all calls run the original model."""
        self._note_left(reason)
        raise torch._dynamo.exc.SkipFrame(reason)

    def _note_left(self, reason: str) -> None:
        self._left = reason
        if watchers:
            tell(self._name, reason)
        self.report.notes.append(f"left alone: {reason}")

    def _backend(self, graph_module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        """The backend: Dynamo's graph, rewritten, which runs operator by operator."""
        self._of_frame = FusionReport()
        self._graphs += 1
        if self._graphs == RECOMPILE_LIMIT:
            self.report.notes.append(f"{RECOMPILE_LIMIT} graphs: further kinds of calls run as they were")
        if found := higher_order(graph_module.graph):
            # Graphs with such operators have other gradients when they run operator by operator, also in PyTorch.
            self._leave(f"its graph calls {found}, an operator of higher order")
        context = torch._guards.TracingContext.get()
        if is_coroutine(context.traced_code or ()):
            self._leave(COROUTINE)
        watched = self._watch()
        if reason := watched.why_not() or watched.note(context, graph_module.graph):
            self._leave(reason)
        guard_more(context.guards_context.dynamo_guards, watched)
        launcher = None if self._replays is None else self._replays.launcher(graph_module.graph)
        report = self._of_frame = fuse_module(
            graph_module,
            strict=self._strict,
            keep_packs=self._keep_packs,
            launches=Launches.EAGER if launcher is None else Launches.CUDA_GRAPH,
            guards_sizes=not self._marks.is_bounded,
            measures=self._measures and may_measure(),
        )
        # Use the graph's code alone: Dynamo's graphs begin with calls of modules.
        _LazyGraphModule.force_recompile(graph_module)
        forward: Callable[..., Any] = graph_module.forward
        replays, replayed = self._replays, None
        if launcher is not None and replays is not None:
            forward = replayed = Replayed(graph_module, launcher, replays)
        is_fused, ran, measures = bool(report.sites), self._ran, self._measures

        # Dynamo never frees this function, so it must not hold a reference to the model.
        def run(*args: Any) -> Any:
            is_left = replayed is not None and replayed.is_left
            ran.gains += is_fused or (replays is not None and replays.serves and not is_left)
            # It was decided as for a CUDA graph, but the host launches its kernels now.
            ran.unsure += report.is_unsure or (is_left and measures)
            if watchers:
                tell_skipped(report)
                if (listener := listening.current()) is not None:
                    return explaining.run(graph_module, report, listener, args)
            return forward(*args)

        return run
