"""Names and their options: parsed everywhere alike, added by a decorator, announced by installed packages."""

from __future__ import annotations

import json
import re
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from murmura import (
    DDP,
    ByteGradAlgorithm,
    Cast,
    ConfigError,
    DecentralizedAlgorithm,
    DiLoCoAlgorithm,
    DistributedConfig,
    ErrorFeedback,
    InProcessTransport,
    LocalSGDAlgorithm,
    MinMaxUInt8,
    Phased,
    TracedTransport,
    connect,
)
from murmura.algorithms import algorithm_named, algorithm_names, topology
from murmura.algorithms.names import _REGISTRY, as_algorithm
from murmura.compressors import compressor_named, compressor_names
from murmura.compressors import names as compressors
from murmura.registry import Registry, parse
from murmura.tools.cli.main import app
from murmura.tools.cli.output import digits
from murmura.tools.experiments import parse_algorithms


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("plain", "plain", {}),
        ("a:x=1:y=0.5:z=word", "a", {"x": 1, "y": 0.5, "z": "word"}),
        ("a:x=true:y=None:z=False", "a", {"x": True, "y": None, "z": False}),
        ("a:inner=b(x=1:y=2):z=3", "a", {"inner": "b(x=1:y=2)", "z": 3}),
        ("b(x=1:y=c(z=2))", "b", {"x": 1, "y": "c(z=2)"}),
        ("b()", "b", {}),
        ("a:x=-1e-3", "a", {"x": -1e-3}),
        ("a:x=-2:y=0x10:z=1_000", "a", {"x": -2, "y": 16, "z": 1000}),
        ("a:x=nan:y=inf:z=[1]", "a", {"x": "nan", "y": "inf", "z": "[1]"}),
    ],
)
def test_options_follow_a_name(text: str, name: str, options: dict[str, Any]) -> None:
    assert parse(text) == (name, options)


@pytest.mark.parametrize("name", [5, None, ["diloco"], b"diloco"], ids=repr)
@pytest.mark.parametrize("named", [algorithm_named, compressor_named, topology.topology_named])
def test_what_is_no_string_is_no_name(named: Any, name: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name!r} is no name")):
        named(name)


@pytest.mark.parametrize("text", ["a:", "a:x", "a:=1", "a:x=1:x=2", "a:x=b(1", "a:x=b)1(", "a:x y=1", "a::x=1"])
def test_what_is_no_option_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"no option|parentheses"):
        parse(text)


@dataclass(frozen=True)
class Shape:
    sides: int
    colour: str = "red"


def test_a_name_stands_for_choices_that_options_change() -> None:
    shapes = Registry(Shape, "shape", "tests.shapes")
    assert shapes.register("square", sides=4)(Shape) is Shape
    assert shapes.make("square") == Shape(4)
    assert shapes.make("square:colour=blue") == Shape(4, "blue")
    assert shapes.names() == ["square"]
    with pytest.raises(ConfigError, match=r"no option 'size'\. It has: colour, sides"):
        shapes.make("square:size=3")
    shapes.register("polygon")(Shape)
    assert shapes.make("polygon:sides=5") == Shape(5)
    with pytest.raises(ConfigError, match=r"needs the option 'sides': write 'polygon:sides=\.\.\.'.*makes the shape"):
        shapes.make("polygon:colour=blue")
    with pytest.raises(ConfigError, match=r"shape='cube' is unknown\. Known: 'polygon', 'square'"):
        shapes.make("cube")


def test_a_name_is_taken_once_and_must_be_one() -> None:
    shapes = Registry(Shape, "shape", "tests.shapes")
    shapes.register("square", sides=4)(Shape)
    shapes.register("square", sides=4)(Shape)  # its module was reloaded
    with pytest.raises(ConfigError, match="Rename yours"):
        shapes.register("square")(lambda: Shape(5))
    for name in ("", "a:b", "a b", "a,b", "a(b)"):
        with pytest.raises(ConfigError, match="is no shape name"):
            shapes.register(name)
    shapes.register("five")(lambda: 5)
    with pytest.raises(ConfigError, match="made 5, which is no shape"):
        shapes.make("five")


def test_algorithms_take_options_and_compressors_by_name() -> None:
    made = algorithm_named("diloco:interval=50:compressor=uint8(block_size=64)")
    assert made == DiLoCoAlgorithm(50, compressor=MinMaxUInt8(64))
    assert algorithm_named("gradient_allreduce:compressor=bf16").compressor == Cast(torch.bfloat16)  # type: ignore[attr-defined]
    assert compressor_named("uint8:feedback=true") == ErrorFeedback(MinMaxUInt8())
    for name in compressor_names():
        assert compressor_named(name).payload_bytes(1000, torch.float32) < 4000
    with pytest.raises(ConfigError, match="compressor='uint9' is unknown"):
        algorithm_named("bytegrad:compressor=uint9")
    with pytest.raises(ConfigError, match=r"give an object, such as MinMaxUInt8\(\.\.\.\)"):
        DiLoCoAlgorithm(50, compressor=MinMaxUInt8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="interval=0 must be"):
        algorithm_named("local_sgd:interval=0")
    with pytest.raises(ConfigError, match="feedback=1 must be"):
        compressor_named("bf16:feedback=1")


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ("topk", "algorithm='topk': 'topk' is a compressor: write 'gradient_allreduce:compressor=topk'."),
        ("topk:ratio=0.1", "write 'gradient_allreduce:compressor=topk(ratio=0.1)'."),
        ("topk(ratio=0.1)", "write 'gradient_allreduce:compressor=topk(ratio=0.1)'."),
        ("adasum", "algorithm='adasum' is unknown. Known: "),
        (MinMaxUInt8(), "is a compressor: give GradientAllReduceAlgorithm(compressor=MinMaxUInt8(...))."),
        (MinMaxUInt8, "is a compressor: give GradientAllReduceAlgorithm(compressor=MinMaxUInt8(...))."),
        (DiLoCoAlgorithm, "is no Algorithm: give an object, such as DiLoCoAlgorithm(...)."),
        (-1, "algorithm=-1 is no Algorithm. Give an object, such as LocalSGDAlgorithm(8), or a name"),
        (["bytegrad"], "algorithm=['bytegrad'] is no Algorithm. Give an object"),
        (int, "is no Algorithm. Give an object, such as LocalSGDAlgorithm(8), or a name"),
    ],
)
def test_what_is_no_algorithm_is_answered_with_what_to_write(wrong: object, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        as_algorithm(wrong)


@pytest.mark.parametrize("ranks", ["world", "channel", "decorated"])
def test_the_wrapper_takes_the_name_in_the_config_that_it_was_connected_by(
    ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMURA_ALGORITHM", "shift_one")
    config = DistributedConfig(world_size=1, rank=0, algorithm="diloco:interval=7:compressor=sign")
    with connect(config) as world:
        transport = {"world": world, "channel": world.channel("mine"), "decorated": TracedTransport(world)}[ranks]
        with closing(DDP(torch.nn.Linear(2, 1), transport)) as ddp:
            assert (ddp.algorithm.interval, ddp.algorithm.compressor) == (7, compressor_named("sign"))  # type: ignore[attr-defined]
        with closing(DDP(torch.nn.Linear(2, 1), transport, algorithm="local_sgd")) as ddp:
            assert isinstance(ddp.algorithm, LocalSGDAlgorithm.impl)  # what is said here counts before
    with connect(replace(config, algorithm=None)) as world, closing(DDP(torch.nn.Linear(2, 1), world)) as ddp:
        assert isinstance(ddp.algorithm, DecentralizedAlgorithm.impl)


def test_a_phase_may_be_given_by_name() -> None:
    made = Phased("local_sgd:interval=3", 4, then="diloco:interval=5:compressor=uint8")
    assert made == Phased(LocalSGDAlgorithm(3), 4, then=DiLoCoAlgorithm(5, compressor=MinMaxUInt8()))
    with pytest.raises(ConfigError, match="'local' is unknown"):
        Phased("local", 4, then=made)


def test_the_wrapper_and_the_commands_take_the_same_names() -> None:
    (alone,) = InProcessTransport.create_group(1)
    with alone:
        ddp = DDP(torch.nn.Linear(2, 1), alone, algorithm="local_sgd:interval=7")
        assert ddp.algorithm.interval == 7  # type: ignore[attr-defined]
        ddp.close()
    assert parse_algorithms("local_sgd:interval=5,bytegrad") == ("local_sgd:interval=5", "bytegrad")
    refused = CliRunner().invoke(app, ["compare", "--algorithms", "diloco:interval=7,local_sgd:interval=11,bytegrad"])
    assert refused.exit_code == 2
    assert "for intervals of 7, 11 steps the shortest that is a multiple of 20 has 1540 steps" in refused.stderr


MODULE = """
from dataclasses import dataclass
from typing import ClassVar
import murmura

class NothingImpl(murmura.AlgorithmImpl):
    works_alone = False

@dataclass(frozen=True)
class Nothing(murmura.Algorithm):
    impl: ClassVar = NothingImpl
    patience: int = 3

@dataclass(frozen=True)
class Rare(murmura.LocalSGDAlgorithm):
    interval: int = 10

@dataclass(frozen=True)
class Short(murmura.MinMaxUInt8):
    pass

def neighbour(rank, size, number):
    return murmura.Neighbours([(rank + 1) % size], [(rank - 1) % size], [0.5, 0.5])

def neighbours():
    return neighbour

three = 3

@dataclass(frozen=True)
class Refusing(Rare):
    def __post_init__(self):
        raise RuntimeError("no licence")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that announces algorithms, one of which cannot be loaded, and other things."""
    (tmp_path / "outside_murmura.py").write_text(MODULE)
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit('no GPU')")
    (tmp_path / "has_a_slip.py").write_text("def f(:")
    info = tmp_path / "outside_murmura-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-murmura\nVersion: 1.0\n")
    lines = ["[murmura.algorithms]", "nothing = outside_murmura:Nothing", "broken = outside_murmura:Missing"]
    lines += ["rare = outside_murmura:Rare", "bytegrad = outside_murmura:Rare", "refusing = outside_murmura:Refusing"]
    lines += ["exits = exits_at_import:Any", "slip = has_a_slip:Any", "three = outside_murmura:three"]
    lines += ["[murmura.compressors]", "short = outside_murmura:Short"]
    lines += ["[murmura.topologies]", "neighbours = outside_murmura:neighbours"]
    (info / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    for registry in (_REGISTRY, compressors._REGISTRY, topology._REGISTRY):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_compared", set())


@pytest.mark.parametrize(
    ("options", "decay"),
    [
        ("", 0.95),
        (":interval=50", 0.95),
        (":compressor=topk2bit", 0.95),
        (":compressor=topk2bit(count=32)", 0.95),
        (":compressor=topk", 0.95),
        (":compressor=uint8(feedback=true)", 0.95),
        (":compressor=topk(decay=1.0)", 1.0),
        (":compressor=topk(ratio=0.1:decay=0.5)", 0.5),
        (":compressor=uint8", None),
        (":compressor=topk(feedback=false)", None),
        (":compressor=none", None),
    ],
)
def test_what_sparse_loco_holds_back_fades_whatever_the_compressor(options: str, decay: float | None) -> None:
    made = algorithm_named(f"sparse_loco{options}")
    assert isinstance(made, DiLoCoAlgorithm)
    assert (made.outer_lr, made.outer_momentum) == (1.0, 0.0)
    assert getattr(made.compressor, "decay", None) == decay


def test_sparse_loco_refuses_as_other_names_do() -> None:
    for text, words in (
        ("sparse_loco:compressor=uint9", "compressor='uint9' is unknown"),
        ("sparse_loco:compressor=5", "compressor=5"),
        ("sparse_loco:rank=2", "'sparse_loco' has no option 'rank'"),
        ("sparse_loco:interval=0", "interval=0 must be"),
        ("sparse_loco:compressor=uint8(decay=0.5)", "decay=0.5 is of error feedback"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            algorithm_named(text)


@pytest.mark.usefixtures("package")
def test_an_installed_package_announces_algorithms() -> None:
    assert {"nothing", "broken", "rare"} < set(algorithm_names())
    assert algorithm_names()[0] == "gradient_allreduce"
    assert "Nothing(patience=5)" in repr(algorithm_named("nothing:patience=5"))
    with pytest.raises(ConfigError, match="'broken' is announced as 'outside_murmura:Missing', which cannot be loaded"):
        algorithm_named("broken")
    assert parse_algorithms("nothing") == ("nothing",)
    assert "rare" in parse_algorithms("all")
    assert {"nothing", "broken"}.isdisjoint(parse_algorithms("all"))  # nobody asked for them
    refused = CliRunner().invoke(app, ["compare", "--algorithms", "nothing"])
    assert "Define `bytes_per_round` in Nothing" in refused.stderr


@pytest.mark.usefixtures("package")
def test_a_package_that_cannot_be_loaded_does_not_hide_the_others() -> None:
    listed = CliRunner().invoke(app, ["algorithms"])
    assert listed.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in listed.stdout.splitlines())
    assert list(lines) == algorithm_names()
    assert lines["nothing"] == "Nothing(patience=3)"
    assert lines["rare"] == "Rare(interval=10, average_moments=False)"
    assert lines["broken"].startswith("cannot be used: algorithm='broken' is announced as 'outside_murmura:Missing'")
    assert "Repair or remove the package outside-murmura" in lines["broken"]
    assert "cannot be loaded: SystemExit: no GPU. Repair" in lines["exits"]
    assert "cannot be loaded: SyntaxError: " in lines["slip"]
    assert "cannot be loaded: TypeError: 3 is not a callable" in lines["three"]
    assert lines["refusing"].endswith("outside_murmura.Refusing raised RuntimeError: no licence")


@pytest.mark.usefixtures("package")
def test_a_package_that_announces_a_name_of_murmuras_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert type(algorithm_named("bytegrad")) is ByteGradAlgorithm
        assert type(algorithm_named("rare")).__name__ == "Rare"
    (told,) = caplog.messages
    assert "bytegrad.ByteGradAlgorithm. What the package outside-murmura announces" in told


@pytest.mark.usefixtures("package")
def test_a_name_that_two_packages_announce_differently_is_refused(tmp_path: Path) -> None:
    for dist, kind in (("another_murmura", "Rare"), ("a_copy_of_murmura", "Nothing")):
        info = tmp_path / f"{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[murmura.algorithms]\n{kind.lower()} = outside_murmura:Nothing\n")
    assert "Nothing(" in repr(algorithm_named("nothing"))  # announced twice, as the same class
    with pytest.raises(ConfigError, match=r"'rare' is announced .* 'outside_murmura:Rare' \(outside-murmura\)"):
        algorithm_named("rare")
    assert "rare" in algorithm_names()


@pytest.mark.usefixtures("package")
def test_an_announced_compressor_takes_the_options_of_error_feedback() -> None:
    made = compressor_named("short:feedback=true:decay=0.5")
    assert isinstance(made, ErrorFeedback)
    assert (type(made.inner).__name__, made.decay) == ("Short", 0.5)
    assert type(compressor_named("short")).__name__ == "Short"


@pytest.mark.parametrize("name", ["uint8:decay=0.5", "topk:decay=0.5:feedback=false", "bf16:decay=1.0"])
def test_an_option_of_error_feedback_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"decay=.* feedback=true"):
        compressor_named(name)


def compared(folder: Path, names: list[str], *options: str) -> tuple[dict[str, Any], str, str]:
    """The rows by contestant, the report, and what was told while it ran, of `murmura compare` on two ranks."""
    given = ["--ranks", "2", "--bandwidth", "local", "--out", str(folder / "runs"), *options]
    given += ["--algorithms", ",".join(names), "--json", str(folder / "result.json")]
    done = CliRunner().invoke(app, ["compare", *given])
    assert done.exit_code == 0, done.output
    rows = {row["contestant"]: row for row in json.loads((folder / "result.json").read_text())["rows"]}
    page = (folder / "runs" / "report.html").read_text()
    assert list(rows)[1:] == names
    assert all(row["final_loss"] > 0 for row in rows.values())
    for name in names:
        assert rows[name]["step_bytes"] == pytest.approx(rows[name]["formula_bytes"], rel=0.05), name
        assert re.search(rf"<td>{re.escape(name)}</td>(<td>.*?</td>)*?<td>{digits(rows[name]['step_ms'])}</td>", page)
    return rows, page, done.stderr


@pytest.mark.usefixtures("package")
def test_what_a_package_announces_is_compared(tmp_path: Path) -> None:
    """An algorithm, a topology and a compressor from outside, on ranks that are processes."""
    names = ["rare:interval=5", "push_sum:topology=neighbours", "gradient_allreduce:compressor=short"]
    _, _, told = compared(tmp_path, names, "--task", "mlp", "--steps", "20")
    assert "rounded up" not in told


@pytest.mark.usefixtures("package")
def test_what_a_package_announces_is_compared_in_turns_of_whole_intervals(tmp_path: Path) -> None:
    names = ["rare", "rare:interval=8"]
    _, page, told = compared(tmp_path, names, "--task", "markov", "--steps", "30")
    assert "--steps=30 is rounded up to 40: turns of 40 steps" in told
    assert "Step: the median over turns of 40 steps." in page
    assert "Medians over turns of 40 steps." in page
