"""Discovery and selection, on isolated registries whose entry points point at modules made here."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backends.numpy
import kvcache.stores
import ml
import ml.probing
from kvcache.stores import StoreSpec, StoreUnavailableError
from kvcache.stores.plugins import StoreRegistry
from ml import Availability, BackendSpec, DeviceInfo, Features
from ml.backend_spec import REQUIRED_DTYPES
from ml.base import BaseBackend, BaseContext
from ml.plugins import ENTRY_POINT_GROUP, ENVIRONMENT_VARIABLE, Registry, registry


class Opened(BaseBackend):
    """A backend that only knows its name and options."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, (DeviceInfo("cpu", "cpu"),))
        self.options = options

    def _new_context(self, max_graph_nodes: int) -> BaseContext:
        raise NotImplementedError


def spec(name: str, priority: int = 0, **changes: Any) -> BackendSpec:
    defaults: dict[str, Any] = {
        "requires": (name,),
        "install_hint": f"pip install {name}",
        "probe": lambda: Availability(True, version="1.0", devices=("cpu",)),
        "open": lambda **options: Opened(name, **options),
    }
    return BackendSpec(name, priority, **{**defaults, **changes})


def no(*args: Any, **options: Any) -> Any:
    raise RuntimeError("the driver is too old")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """install(name, record) makes a plugin module whose hook returns, or raises, ``record``."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)

    def install(name: str, record: Any, entry: str | None = None) -> EntryPoint:
        module = ModuleType(f"plugin_{name}")

        @ml.hookimpl
        def ml_backend() -> Any:
            if isinstance(record, Exception):
                raise record
            return record

        module.ml_backend = ml_backend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return EntryPoint(entry or name, module.__name__, ENTRY_POINT_GROUP)

    return install


# Selection.


def test_a_backend_opens_by_name_with_its_options(install: Any) -> None:
    found = Registry([install("a", spec("a")), install("b", spec("b"))])
    backend = found.open("b", {"device": "cuda", "dtype": ml.DType.F16})
    assert (backend.name, backend.options) == ("b", {"device": "cuda", "dtype": ml.DType.F16})


def named(install: Any, priorities: dict[str, int | None]) -> Registry:
    """Backends of these priorities; None is one that cannot run here."""
    off = {"probe": lambda: Availability(False, "no GPU")}
    records = [
        spec(name, 9, **off) if priority is None else spec(name, priority)
        for name, priority in priorities.items()
    ]
    return Registry([install(record.name, record) for record in records])


@pytest.mark.parametrize(
    ("priorities", "variable", "name", "opened"),
    [
        ({"a": 9, "b": 1}, "b", None, "b"),
        ({"a": 1, "b": 9}, "b", "a", "a"),
        ({"a": 9, "b": 1}, "", None, "a"),
        ({"a": 1, "b": 5, "c": None}, "", None, "b"),
        ({"z": 5, "m": 5}, "", None, "m"),
    ],
    ids=["the variable", "a name before it", "an empty one", "the highest that can run", "equals by name"],
)
def test_a_name_goes_before_the_environment_and_that_before_priority(
    install: Any, monkeypatch: pytest.MonkeyPatch, priorities: Any, variable: str, name: Any, opened: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, variable)
    assert named(install, priorities).open(name, {}).name == opened


UNAVAILABLE, UNKNOWN = ml.BackendUnavailableError, ml.BackendNotFoundError


@pytest.mark.parametrize(
    ("variable", "name", "error", "message"),
    [
        ("b", None, UNAVAILABLE, r"'b'.*no GPU.*pip install b.*ML_BACKEND"),
        ("b", "b", UNAVAILABLE, r"'b'.*no GPU.*pip install b$"),
        ("", "x", UNKNOWN, r"'x'.*a \(pip install a\).*b \(pip install b\)$"),
        ("x", None, UNKNOWN, r"'x'.*ML_BACKEND"),
        ("x", "y", UNKNOWN, r"'y'(?!.*ML_BACKEND)"),
    ],
)
def test_who_asks_for_what_cannot_be_opened_is_told_why_and_by_what_name(
    install: Any, monkeypatch: pytest.MonkeyPatch, variable: str, name: Any, error: type, message: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, variable)
    with pytest.raises(error, match=message):
        named(install, {"a": 1, "b": None}).open(name, {})


def test_an_option_that_the_backend_refuses_is_its_own_error(install: Any) -> None:
    def refuse(**options: Any) -> Any:
        raise ml.DeviceError(f"open_backend: no device {options['device']!r}")

    found = Registry([install("a", spec("a", open=refuse))])
    with pytest.raises(ml.DeviceError, match="no device 'x'"):
        found.open("a", {"device": "x"})


def test_no_backend_at_all_says_why(install: Any) -> None:
    off = spec("a", probe=lambda: Availability(False, "no GPU"))
    found = Registry([install("a", off), EntryPoint("b", "no_such_module_of_ours", ENTRY_POINT_GROUP)])
    with pytest.raises(ml.BackendUnavailableError, match=r"a \(no GPU\).*no_such_module_of_ours"):
        found.open(None, {})
    with pytest.raises(ml.BackendUnavailableError):
        Registry([]).open(None, {})


# Broken plugins.


class Unspeakable:
    """Whatever is asked of it raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no comment")


@pytest.mark.parametrize("answer", [None, True, "yes", Unspeakable()])
def test_a_probe_that_gives_something_else_is_unavailable(install: Any, answer: Any) -> None:
    found = Registry([install("a", spec("a", probe=lambda: answer))])
    with pytest.raises(ml.BackendUnavailableError, match="Availability"):
        found.open("a", {})


def test_an_open_that_fails_is_named_and_the_next_is_tried(install: Any) -> None:
    found = Registry([install("a", spec("a", 1)), install("b", spec("b", 2, open=no))])
    with pytest.raises(ml.BackendUnavailableError, match=r"'b'.*driver is too old") as caught:
        found.open("b", {})
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.warns(RuntimeWarning, match="driver is too old.*next"):
        assert found.open(None, {}).name == "a"


def test_a_name_that_two_plugins_claim_is_refused_with_both_and_no_other_is(install: Any) -> None:
    points = [install("a", spec("same", 9), "first"), install("b", spec("same"), "second")]
    found = Registry([*points, install("c", spec("c"))])
    with pytest.raises(ml.PluginError, match=r"'same' is provided twice, by first and by second"):
        found.open("same", {})
    assert found.open("c", {}).name == found.open(None, {}).name == "c"
    assert set(found.specs()) == {"c"}
    rows = {info.name: info for info in found.infos()}
    assert "by first and by second; uninstall one" in rows["same"].reason
    assert [row.available for row in found.infos()] == [True, False]


def test_a_broken_plugin_takes_no_name_from_a_sound_one_nor_from_another_broken_one(install: Any) -> None:
    names = ("no_such_module_1", "no_such_module_2", "no_such_module_3")
    broken = [EntryPoint("a", name, ENTRY_POINT_GROUP) for name in names]
    found = Registry([*broken, install("b", spec("a"))])
    assert found.open("a", {}).name == "a"
    assert len(found.infos()) == 4
    assert [info.name for info in found.infos() if info.available] == ["a"]
    for name in names:
        assert [info.name for info in found.infos() if name in info.reason] == [f"a ({name})"]


@pytest.mark.parametrize("made", [None, "a backend", Opened, Unspeakable()])
def test_an_open_that_gives_no_backend_is_named_and_the_next_is_tried(install: Any, made: Any) -> None:
    found = Registry([install("a", spec("a", 1)), install("b", spec("b", 2, open=lambda: made))])
    refused = r"'b' failed to open: its open\(\) returned .*, which does not implement ml.Backend: it "
    "lacks new_context"
    with pytest.raises(ml.BackendUnavailableError, match=refused):
        found.open("b", {})
    with pytest.warns(RuntimeWarning, match=f"{refused}.*; trying the next"):
        assert found.open(None, {}).name == "a"


@pytest.mark.parametrize("error", [TypeError("of its own"), ml.DeviceError("no memory")], ids=repr)
def test_only_who_gives_options_is_told_of_them_by_an_error(install: Any, error: Exception) -> None:
    def refuse(**options: Any) -> Any:
        raise error

    found = Registry([install("a", spec("a", 1)), install("b", spec("b", 2, open=refuse))])
    with pytest.raises(type(error), match=str(error)):
        found.open(None, {"device": "x"})
    with pytest.warns(RuntimeWarning, match=str(error)):
        assert found.open(None, {}).name == "a"


def test_an_option_that_open_does_not_have_is_refused_with_those_that_it_has(install: Any) -> None:
    def opens(device: str | None = None, pace: int = 1) -> Any:
        return Opened("a")

    found = Registry([install("a", spec("a", open=opens))])
    refused = "^open_backend: 'a': no option 'x'; there are: device, pace$"
    for name in ("a", None):
        with pytest.raises(ml.OptionError, match=refused):
            found.open(name, {"device": "cpu", "x": 1})
    assert found.open("a", {"pace": 2}).name == "a"


def test_an_option_that_a_decorator_adds_is_one_that_open_has(install: Any) -> None:
    def opens(device: str | None = None) -> Any:
        return Opened("a")

    @functools.wraps(opens)
    def told(*arguments: Any, verbose: bool = False, **options: Any) -> Any:
        return opens(*arguments, **options)

    found = Registry([install("a", spec("a", open=told))])
    assert found.open("a", {"verbose": True}).name == "a"


# Fields of other types.

WRONG: list[tuple[type, dict[str, Any]]] = [
    *((BackendSpec, {name: value}) for name, value in {
        "name": None, "priority": "high", "requires": "torch", "install_hint": None, "probe": True,
        "open": None, "features": {"gelu"},
    }.items()),
    (BackendSpec, {"name": " "}),
    (BackendSpec, {"priority": float("nan")}),
    *((StoreSpec, {name: 3}) for name in ("name", "install_hint", "probe", "open")),
    *((Availability, {name: value}) for name, value in {
        "ok": "yes", "reason": None, "version": 3, "devices": "cpu",
    }.items()),
    (Features, {"dtypes": {"F32"}}),
    (Features, {"absent": "gelu"}),
    (DeviceInfo, {"name": None}),
    (ml.DeviceMemory, {"free": "much"}),
    (ml.BackendMemory, {"devices": (1,)}),
]  # fmt: skip
SOUND: dict[type, dict[str, Any]] = {
    BackendSpec: {"name": "a", "priority": 1, "requires": (), "install_hint": "", "probe": no, "open": no},
    StoreSpec: {"name": "a", "install_hint": "", "probe": no, "open": no},
    Availability: {"ok": True},
    Features: {},
    DeviceInfo: {"name": "cpu", "kind": "cpu"},
    ml.DeviceMemory: {"device": "cpu", "allocated": 0},
    ml.BackendMemory: {},
}


@pytest.mark.parametrize(("record", "wrong"), WRONG, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_field_of_another_type_is_refused_by_its_name(record: Any, wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ml.PluginError, match=re.escape(f"{record.__name__}: {name}={value!r}; it must be ")):
        record(**{**SOUND[record], **wrong})


def test_lists_and_sets_become_what_a_record_keeps() -> None:
    assert Availability(True, devices=["cpu"]).devices == ("cpu",)  # type: ignore[arg-type]
    assert Features(absent={"gelu"}).absent == frozenset({"gelu"})  # type: ignore[arg-type]
    assert Features(dtypes=list(REQUIRED_DTYPES)).dtypes == REQUIRED_DTYPES  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtypes", "told"),
    [
        (REQUIRED_DTYPES - {ml.DType.I64, ml.DType.BOOL}, "F32, I32; I64, BOOL must be among them"),
        (REQUIRED_DTYPES | {ml.DType.Q8_0}, "F32, I32, I64, BOOL, Q8_0; no tensor has Q8_0"),
    ],
)
def test_features_without_what_every_backend_has_are_refused(dtypes: Any, told: str) -> None:
    with pytest.raises(ml.PluginError, match=f"^Features: dtypes={told}$"):
        Features(dtypes)


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.builds(Unspeakable),
    st.sets(st.text()), st.lists(st.one_of(st.text(), st.none())), st.tuples(st.text()), st.just(Opened),
    st.dictionaries(st.text(), st.integers()), st.just(lambda *args, **options: None),
    st.sampled_from([no, ml.DType.F32, float("nan"), Features(), SystemExit("no licence")]),
)  # fmt: skip


HOOKS: dict[type, tuple[str, Any, Any, str]] = {
    BackendSpec: ("ml_backend", ml.hookimpl, Registry, "numpy"),
    StoreSpec: ("kvcache_store", kvcache.stores.hookimpl, StoreRegistry, "memory"),
}


def fields_of(record: type) -> st.SearchStrategy[dict[str, Any]]:
    names = [one.name for one in dataclasses.fields(record)]
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, ANYTHING))


@pytest.mark.parametrize("record", HOOKS, ids=lambda one: one.__name__)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_whatever_a_plugin_says_hides_no_other(record: Any, data: st.DataObject) -> None:
    """Each field of its record and of its probe's answer may be anything, and so may the record itself."""
    hook, marker, registry_of, sound = HOOKS[record]
    fields, answer, other = (
        data.draw(fields_of(record)),
        data.draw(fields_of(Availability)),
        data.draw(ANYTHING),
    )

    def said() -> Any:
        asked = {"probe": lambda: Availability(**{**SOUND[Availability], **answer})}
        return record(**{**SOUND[record], "name": "bad", **asked, **fields}) if other is HOOKS else other

    found = registry_of([])
    found.register(SimpleNamespace(**{hook: marker(said)}), "bad")
    if record is BackendSpec:
        found.register(backends.numpy, "numpy")
        assert {info.name for info in found.infos()} >= {"numpy"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what is passed over
            assert found.open(None, {}).name == "numpy"
    assert found.usable(sound).name == sound
    for name in found.specs().keys() & {"bad"}:
        with pytest.raises((ml.MLError, StoreUnavailableError)):
            found.opened(found.usable(name))


# Probing.


def test_a_probe_runs_once_whoever_asks_and_how_often(install: Any) -> None:
    asked, gate = [], threading.Barrier(2)

    def probe() -> Availability:
        asked.append(threading.current_thread())
        return Availability(True)

    found = Registry([install("a", spec("a", probe=probe))])

    def ask() -> None:
        gate.wait()
        found.infos()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.infos()
    found.open("a", {})
    found.open(None, {})
    assert len(asked) == 1


def test_a_probe_that_takes_too_long_is_named_and_waited_for_once(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ml.probing.LIMIT_VARIABLE, "0.05")
    go_on = threading.Event()

    def probe() -> Availability:
        go_on.wait()
        return Availability(True)

    found = Registry([install("a", spec("a", 1)), install("slow", spec("slow", 2, probe=probe))])
    late = r"its probe did not finish within 0.05 s; ML_PROBE_TIMEOUT=SECONDS allows more time$"
    with pytest.warns(RuntimeWarning, match="'slow'.*did not finish within 0.05 s.*trying the next"):
        assert found.open(None, {}).name == "a"
    rows = {info.name: info for info in found.infos()}
    assert re.search(late, rows["slow"].reason)
    assert rows["a"].available
    with pytest.raises(ml.BackendUnavailableError, match=f"'slow' cannot run here: {late}"):
        found.open("slow", {})
    go_on.set()
    found._probe(found.specs()["slow"])._thread.join()  # type: ignore[union-attr]
    assert found.open(None, {}).name == "slow", "an answer that comes late is still one"


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(install: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(ml.probing.LIMIT_VARIABLE, text)
    with pytest.raises(
        ml.ShapeError, match=f"ML_PROBE_TIMEOUT='{text}'; it must be a number of seconds above 0"
    ):
        Registry([install("a", spec("a"))]).infos()


def test_an_interrupt_in_a_probe_reaches_who_asked(install: Any) -> None:
    def probe() -> Availability:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Registry([install("a", spec("a", probe=probe))]).infos()


# Labels.


def test_two_entry_points_of_one_label_are_two_plugins(install: Any) -> None:
    found = Registry([install("a", spec("a"), "label"), install("b", spec("b"), "label")])
    assert set(found.specs()) == {"a", "b"}


# Laziness and hand-made plugins.


def test_nothing_is_loaded_before_the_first_question_and_listing_opens_nothing(install: Any) -> None:
    loaded = []

    class Watched(EntryPoint):
        def load(self) -> Any:
            loaded.append(self.name)
            return super().load()

    point = install("a", spec("a", open=no))
    found = Registry([Watched(point.name, point.value, point.group)])
    assert loaded == []
    found.specs()
    assert [info.name for info in found.infos()] == loaded == ["a"]


def test_infos_put_what_runs_first_then_by_priority(install: Any) -> None:
    off = {"probe": lambda: Availability(False, "off")}
    specs = [spec("low", 1), spec("high", 9), spec("off", 99, **off)]
    found = Registry([install(each.name, each) for each in specs])
    assert [info.name for info in found.infos()] == ["high", "low", "off"]
    assert found.infos()[0].version == "1.0"
    assert found.infos()[0].devices == ("cpu",)
    assert found.infos()[0].install_hint == "pip install high"


def test_a_plugin_may_be_registered_and_taken_out_by_hand(install: Any) -> None:
    class Plugin:
        @ml.hookimpl
        def ml_backend(self) -> BackendSpec:
            return spec("mine", 5)

    found, plugin = Registry([install("a", spec("a", 1))]), Plugin()
    found.register(plugin)
    assert found.open(None, {}).name == "mine"
    found.unregister(plugin)
    assert found.open(None, {}).name == "a"
    with pytest.raises(ml.BackendNotFoundError):
        found.open("mine", {})
    with pytest.raises(ml.PluginError, match="not registered"):
        found.unregister(plugin)


def test_registries_are_isolated_from_each_other_and_from_the_process(install: Any) -> None:
    first, second = Registry([install("a", spec("a"))]), Registry([install("b", spec("b"))])
    assert set(first.specs()) == {"a"}
    assert set(second.specs()) == {"b"}
    assert not {"a", "b"} & set(registry().specs())
    assert registry() is registry()


# The installed ones.


def test_open_backend_warns_at_the_line_that_called_it(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ml.plugins._registry", Registry([install("a", spec("a", 1)), install("b", spec("b", 2, open=no))])
    )
    with pytest.warns(RuntimeWarning, match="next") as caught:
        assert ml.open_backend().name == "a"
    assert caught[0].filename == __file__


def test_our_plugins_are_sound() -> None:
    assert registry().broken() == {}
    for name, record in registry().specs().items():
        assert record.name == name
        assert record.requires
        assert record.install_hint.startswith("pip install")
