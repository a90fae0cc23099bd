"""Stand-ins for modules: a forward that runs on them leaves word of everything that it read.

Each stands for one *path*. A module that is registered twice has two, and a parameter that is read through a path is
that path's in the graph, so that modules and parameters may be shared, tied, replaced and parted later.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.fx.proxy import TraceError

from epigemm.fusion import allowed
from epigemm.fusion.audit import Audit, Untraceable
from epigemm.fusion.state import original_class
from epigemm.fusion.values import is_constant, same

Path = tuple[str, ...]
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_GETATTR = nn.Module.__getattr__
_MISSING = object()


@dataclass
class Reads:
    """What a forward read of the module at one path.

    Attributes:
        path: from the traced module.
        kind: its class, where that mattered.
        names: of its children, where it was iterated over.
        present: children that are there.
        leaves: the classes of those of torch's children that were called.
        absent: parameters, buffers and children that are None.
        tensors: parameters and buffers.
        values: constants, and lists and dicts of them.
        methods: functions of its class, by name.
        statics: (class, name, value) of what was read from a class past the module.
        inlined: its children were called instead of itself.
    """

    path: Path
    kind: type | None = None
    names: list[str] | None = None
    present: set[str] = field(default_factory=set)
    leaves: dict[str, type] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    tensors: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    methods: dict[str, Any] = field(default_factory=dict)
    statics: list[tuple[type, str, Any]] = field(default_factory=list)
    inlined: bool = False

    def name(self, attribute: str = "") -> str:
        """For people: `self.block.bias`."""
        return ".".join(("self", *self.path, *((attribute,) if attribute else ())))


class Shadow:
    """Stands for a module; everything that is asked of it goes to its place."""

    __slots__ = ("_epigemm_place",)

    def __init__(self, place: Place) -> None:
        object.__setattr__(self, "_epigemm_place", place)

    def __getattribute__(self, name: str) -> Any:
        place = place_of(self)
        if name == "__class__":
            return place.asked_for_type()
        return place.read(name, sys._getframe(1).f_code)

    def __setattr__(self, name: str, value: Any) -> None:
        raise place_of(self).refuse(f"forward assigns {place_of(self).reads.name(name)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call."""
        place = place_of(self)
        return place.recorder.call(place, args, kwargs)

    def __bool__(self) -> bool:
        place = place_of(self)
        place.asked_for_type()
        if hasattr(place.kind, "__bool__"):
            raise place.refuse("forward asks for the truth of a module with a __bool__ of its own")
        return len(self) > 0 if hasattr(place.kind, "__len__") else True

    def __len__(self) -> int:
        return int(place_of(self).special("__len__")())

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = place_of(self).special("__iter__")()
        return found

    def __getitem__(self, key: Any) -> Any:
        return place_of(self).special("__getitem__")(key)

    def __contains__(self, key: Any) -> bool:
        return bool(place_of(self).special("__contains__")(key))

    def _text(self, *_: Any) -> str:
        raise place_of(self).refuse("forward makes text of a module")

    __str__ = __repr__ = __format__ = _text

    def __eq__(self, other: object) -> bool:
        raise place_of(self).refuse("forward compares modules")

    def __hash__(self) -> int:
        raise place_of(self).refuse("forward looks a module up")


def place_of(shadow: Shadow) -> Place:
    """Where a shadow stands."""
    place: Place = object.__getattribute__(shadow, "_epigemm_place")
    return place


def is_shadow(value: Any) -> bool:
    """Whether a value stands for a module; isinstance() would be taken for a question of the forward's."""
    return type(value) is Shadow


class Place:
    """One path, the module that is there, and what was read of it."""

    def __init__(self, recorder: Recorder, path: Path, module: nn.Module) -> None:
        self.recorder, self.path, self.module = recorder, path, module
        self.kind: type = original_class(type(module))
        self.reads = Reads(path)
        self.shadow = Shadow(self)

    def refuse(self, reason: str) -> TraceError:
        """The error to raise; the trace fails even if the forward goes on."""
        return self.recorder.refuse(reason)

    def asked_for_type(self) -> type:
        """The module's class, which is watched from now on."""
        self.reads.kind = self.kind
        return self.kind

    def special(self, name: str) -> Callable[..., Any]:
        """A special method, which Python looks up in the class alone."""
        self.asked_for_type()
        _, function = _find(self.kind, name)
        if not isinstance(function, types.FunctionType):
            raise TypeError(f"{self.kind.__name__} has no {name}")
        self._require_callable(function, name)
        self.reads.statics.append((self.kind, name, function))
        return types.MethodType(function, self.shadow)

    def read(self, name: str, code: types.CodeType) -> Any:
        """An attribute."""
        if name in _INTERNALS:
            return self._internal(name, code)
        if allowed.is_dunder(name):
            raise AttributeError(name)
        if self._finds_attributes_itself():
            raise self.refuse(f"{self.kind.__name__} finds its attributes in a way of its own")
        _, static = _find(self.kind, name)
        if hasattr(type(static), "__set__") and static is not _MISSING:
            return self._property(name, static)
        own = vars(self.module)
        if name in own:
            return self._value(name, own[name])
        if static is not _MISSING:
            return self._static(name, static)
        return self._registered(name)

    def _finds_attributes_itself(self) -> bool:
        kind: Any = self.kind
        return kind.__getattribute__ is not object.__getattribute__ or kind.__getattr__ is not _GETATTR

    def _internal(self, name: str, code: types.CodeType) -> Any:
        if name != "_modules" or not allowed.may_call(code):
            if allowed.is_of_torch(code) and name in ("_parameters", "_buffers"):
                raise AttributeError(name)
            raise self.refuse(f"forward reads {self.reads.name(name)}")
        self.reads.names = list(self.module._modules)
        # Containers write it in `insert` and `clear`, which must fail here.
        return types.MappingProxyType({child: self._child(child) for child in self.module._modules})

    def _property(self, name: str, static: Any) -> Any:
        getter = static.fget if type(static) is property else None
        if not isinstance(getter, types.FunctionType):
            raise self.refuse(f"forward reads {self.reads.name(name)}, a {type(static).__name__}")
        self._require_callable(getter, name)
        self.asked_for_type()
        self.reads.statics.append((self.kind, name, static))
        return getter(self.shadow)

    def _require_callable(self, function: types.FunctionType, name: str) -> None:
        code = function.__code__
        if allowed.is_of_torch(code) and not allowed.may_call(code):
            raise self.refuse(f"forward reads {self.reads.name(name)}, which is torch's")
        self.recorder.audit.admit(function)

    def _static(self, name: str, static: Any) -> Any:
        if isinstance(static, types.FunctionType):
            self.recorder.audit.admit(static)
            self.reads.methods[name] = static
            return types.MethodType(static, self.shadow)
        if type(static) is staticmethod:
            return self._value(name, static.__func__)
        if isinstance(static, classmethod):
            raise self.refuse(f"forward reads {self.reads.name(name)}, a class method")
        return self._value(name, static)

    def _value(self, name: str, value: Any) -> Any:
        if name != "training" or self.path:  # a child may well assign its own mode
            self.recorder.require_quiet(self.reads.name(name))
        if name == "training":
            value = self.recorder.training if self.recorder.training is not None else value
        if is_constant(value):
            self.reads.values[name] = value
            return value
        given = self.recorder.given.get((self.path, name))
        if given is None:
            given = self.recorder.convert(value, self.reads.name(name), 0)
            self.recorder.given[self.path, name] = given
            self.recorder.pristine[self.path, name] = self.recorder.convert(value, self.reads.name(name), 0)
            self.reads.values[name] = frozen(value)
        return given

    def _registered(self, name: str) -> Any:
        module = self.module
        for tensors in (module._parameters, module._buffers):
            if name in tensors:
                if tensors[name] is None:
                    self.recorder.require_quiet(self.reads.name(name))
                    self.reads.absent.add(name)
                    return None
                self.reads.tensors.add(name)
                return self.recorder.tensor((*self.path, name))
        if name in module._modules:
            return self._child(name)
        raise AttributeError(f"'{self.kind.__name__}' object has no attribute '{name}'")

    def _child(self, name: str) -> Shadow | None:
        child = self.module._modules[name]
        if child is None:
            self.reads.absent.add(name)
            return None
        self.reads.present.add(name)
        return self.recorder.place((*self.path, name), child).shadow

    def kind_of_attribute(self, name: str) -> str:
        """What reading an attribute would give, without reading it: `child`, `plain` or `other`."""
        if _find(self.kind, name)[1] is not _MISSING:
            return "other"
        return "child" if self.module._modules.get(name) is not None else "plain"


def _find(kind: type, name: str) -> tuple[type, Any]:
    """A class's attribute as it is written there, and the class."""
    for ancestor in kind.__mro__:
        if name in vars(ancestor):
            return ancestor, vars(ancestor)[name]
    return kind, _MISSING


class Recorder:
    """The shadows of one trace.

    Attributes:
        audit: the functions that it runs.
        training: the mode that every module is to be in; None: the one it is in.
        places: by path.
        given: lists and dicts that the forward was given, by path and name.
        pristine: the same as they were then.
    """

    def __init__(
        self,
        root: nn.Module,
        training: bool | None,
        call: Callable[[Place, tuple[Any, ...], dict[str, Any]], Any],
        tensor: Callable[[Path], Any],
        require_quiet: Callable[[str], None],
    ) -> None:
        self.audit = Audit()
        self.training = training
        self.places: dict[Path, Place] = {}
        self.given: dict[tuple[Path, str], Any] = {}
        self.pristine: dict[tuple[Path, str], Any] = {}
        self.call, self.tensor, self.require_quiet = call, tensor, require_quiet
        self.refusal = ""
        self._registered = {id(module): (path, module) for path, module in root.named_modules()}
        self.root = self.place((), root)

    def place(self, path: Path, module: nn.Module) -> Place:
        """The place of a path."""
        found = self.places.get(path)
        if found is None:
            found = self.places[path] = Place(self, path, module)
        return found

    def refuse(self, reason: str) -> TraceError:
        """The error to raise; the trace fails even if the forward goes on."""
        self.refusal = self.refusal or reason
        return TraceError(reason)

    def convert(self, value: Any, name: str, depth: int) -> Any:
        """A value of an attribute as a forward may have it: modules as shadows, lists as copies."""
        kind = type(value)
        if is_constant(value):
            return value
        if kind in (list, tuple) and depth < 8:
            return kind(self.convert(part, name, depth + 1) for part in value)
        if kind is dict and depth < 8 and all(is_constant(key) for key in value):
            return {key: self.convert(part, name, depth + 1) for key, part in value.items()}
        if isinstance(value, nn.Module):
            path, module = self._registered.get(id(value), ("", None))
            if module is None or not path:
                raise self.refuse(f"forward reads {name}, a module that is not registered")
            return self._along(tuple(path.split(".")))
        if isinstance(value, Tensor):
            raise self.refuse(f"forward reads {name}, a tensor that is no parameter and no buffer")
        if allowed.is_pure_function(value) or (
            isinstance(value, types.FunctionType) and not allowed.is_of_torch(value.__code__)
        ):
            self.audit.admit(value)
            return value
        raise self.refuse(f"forward reads {name}, a {kind.__name__}, whose changes could not be noticed")

    def _along(self, path: Path) -> Shadow:
        place = self.root
        for name in path:
            found = place._child(name)
            assert found is not None
            place = place_of(found)
        place.reads.values[""] = place.module  # this very module
        return place.shadow

    def changed(self) -> str:
        """The name of a list or dict that the forward changed."""
        for (path, name), given in self.given.items():
            if not same(given, self.pristine[path, name]):
                return self.places[path].reads.name(name)
        return ""

    def note_inherited(self, code: types.CodeType, first: Any) -> None:
        """The forward is about to read attributes through `super()`."""
        names = self.audit.inherited(code)
        if not names:
            return
        if not is_shadow(first):
            raise self.refuse("forward uses super() outside of a module")
        place = place_of(first)
        place.asked_for_type()
        place.reads.statics.append((place.kind, "__mro__", place.kind.__mro__))
        for name in names:
            for ancestor in place.kind.__mro__:
                if hasattr(ancestor, name):  # one that inherits it may get one of its own
                    self._note_static(place, ancestor, name)

    def _note_static(self, place: Place, kind: type, name: str) -> None:
        value = inspect.getattr_static(kind, name)
        if not isinstance(value, types.FunctionType):
            raise self.refuse(f"forward reads super().{name}, a {type(value).__name__}")
        self.audit.admit(value)
        place.reads.statics.append((kind, name, value))


def containers(value: Any) -> Iterator[int]:
    """The ids of the lists and dicts in a value."""
    if type(value) in (list, dict):
        yield id(value)
    if type(value) in (list, tuple, dict):
        for part in value.values() if type(value) is dict else value:
            yield from containers(part)


def frozen(value: Any) -> Any:
    """A value whose lists and dicts are copies."""
    if type(value) in (list, tuple):
        return type(value)(frozen(part) for part in value)
    return {key: frozen(part) for key, part in value.items()} if type(value) is dict else value


__all__ = [
    "Path",
    "Place",
    "Reads",
    "Recorder",
    "Shadow",
    "Untraceable",
    "containers",
    "is_shadow",
    "place_of",
]
