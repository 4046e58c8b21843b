"""Does a test fail when the library is broken? Break it in many small ways and see.

    python tests/mutations.py --seed 1 --count 40 --jobs 2

draws `count` mutations from the syntax trees of the library (`src/murmura` without its tools), applies each in its own
copy of the repository, and runs there, with `-x`, the fast tests that import the file: namesakes first, then the
nearest and cheapest. A mutation is caught when a test fails on it twice and passes on the untouched copy, or when the
run crashes or hangs. What survives is printed with its diff: it needs a test, or a reason why the two programs are the
same. `--junit` names the report of an earlier run, `pytest --junitxml`, from which the costs of the tests are known.

Only Python, torch and pytest are needed. The draw depends on the seed and the source alone.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nearest import Imports, seconds_by_file

ROOT = Path(__file__).resolve().parent.parent
KERNELS = tuple(f"compressors/{name}_triton.py" for name in ("cast", "minmax_parts", "minmax"))  # which need a GPU
LEFT_OUT = ("tools/", "lab.py", "__main__.py", *KERNELS)  # programs, and kernels
BATCHES = (4, 12)  # so many test files are run first, then so many more, then the rest: most mutations end in the first
SECONDS_OF_A_TEST = 60
TRIES = 4  # so many failing tests are looked at before a run that fails for other reasons is given up

SWAPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
NEGATED_BY_SWAP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
NO_CODE = {"warn", "debug", "info", "warning", "TypeVar", "ParamSpec", "cast", "sleep"}  # calls that no test looks at


@dataclass(frozen=True)
class Mutation:
    path: str  # below src/murmura
    kind: str
    start: int  # offsets into the bytes of the file
    end: int
    text: str

    def apply(self, source: str) -> str:
        whole = source.encode()
        return (whole[: self.start] + self.text.encode() + whole[self.end :]).decode()

    def diff(self, source: str) -> str:
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), n=1)
        return "\n".join(f"    {line.rstrip()}" for line in list(lines)[2:])


# What can be mutated


def mutations(path: str, source: str) -> list[Mutation]:
    """Every mutation of one file, in the order of its text. No text, annotation, assertion or error message is one."""
    starts = [0]  # of each line, in bytes, as columns are
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, kind, text in sites(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[(node.end_lineno or 0) - 1]
        found.append(Mutation(path, kind, begin, end + (node.end_col_offset or 0), text))
    return sorted(found, key=lambda each: (each.start, each.end, each.kind, each.text))


def sites(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Each node that can be replaced, what is done to it, and the text that takes its place."""
    for node in code_below(tree):
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                text = f"{ast.unparse(left)} {SWAPPED[type(operator)]} {ast.unparse(right)}"
                yield node, "comparison swapped", text
            case ast.BinOp(op=ast.Add() | ast.Sub()) if not concatenates(node):
                sign = "-" if isinstance(node.op, ast.Add) else "+"
                yield node, "+ and - swapped", f"({ast.unparse(node.left)} {sign} ({ast.unparse(node.right)}))"
            case ast.BinOp(op=ast.Mult() | ast.FloorDiv()):
                sign = "//" if isinstance(node.op, ast.Mult) else "*"
                yield node, "* and // swapped", f"(({ast.unparse(node.left)}) {sign} ({ast.unparse(node.right)}))"
            case ast.BoolOp(op=operator, values=values):
                word = " or " if isinstance(operator, ast.And) else " and "
                yield node, "and and or swapped", f"({word.join(f'({ast.unparse(value)})' for value in values)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield node, "not removed", f"({ast.unparse(operand)})"
            case ast.Constant(value=bool(value)):
                yield node, "constant changed", repr(not value)
            case ast.Constant(value=int(value)):
                yield node, "constant changed", repr(value + 1)
            case ast.Constant(value=float(value)):
                yield node, "constant changed", repr(value * 2 if value else 1.0)
            case ast.Return(value=ast.expr() as value) if not is_constant_none(value):
                yield node, "return value dropped", "return None"
            case ast.Expr(value=ast.Call()):
                yield node, "call deleted", "pass"
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not negated_already(test):
                yield test, "condition negated", f"not ({ast.unparse(test)})"


def code_below(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are code: what stands in annotations, assertions, error messages and f-strings is left out."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params") or (name == "msg" and isinstance(node, ast.Assert)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_text(child):
                yield from code_below(child)


def is_text(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in NO_CODE or name.endswith("Error"):
            return True
        case ast.Expr(value=ast.Call() as call):
            return is_text(call)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.FunctionDef(decorator_list=decorators):
            return any(isinstance(each, ast.Name) and each.id == "overload" for each in decorators)
        case ast.keyword(arg=name):
            return name in ("strict", "stacklevel")  # of zip, which asserts; of warn
    return False


def concatenates(node: ast.BinOp) -> bool:
    """Whether a + of two texts or lists is meant, of which there is no difference."""
    sides = (node.left, node.right)
    return any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)
        or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        or (isinstance(side, ast.BinOp) and concatenates(side))
        for side in sides
    )


def is_constant_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def negated_already(test: ast.expr) -> bool:
    """Whether another operator negates it: a `not` that is removed, a comparison that becomes its opposite."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[operator]):
            return isinstance(operator, NEGATED_BY_SWAP)
    return False


def draw(package: Path, seed: int, count: int) -> list[Mutation]:
    found: list[Mutation] = []
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package).as_posix()
        if not path.startswith(LEFT_OUT):
            found += mutations(path, file.read_text(encoding="utf-8"))
    return random.Random(seed).sample(found, min(count, len(found)))


# Running them


@dataclass(frozen=True)
class Outcome:
    caught: bool
    why: str
    seconds: float


def copy_of(root: Path, target: Path) -> Path:
    """A copy of what the tests need: the source, the tests, and the pages and scripts that they read."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "site", "runs", "build", "dist")
    shutil.copytree(root, target, ignore=ignored, symlinks=True)
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]", f"addopts = {settings['addopts']}"]
    if importlib.util.find_spec("pytest_timeout"):
        lines += [f"timeout = {SECONDS_OF_A_TEST}", "timeout_method = thread"]
    for name in ("filterwarnings", "markers"):
        lines += [f"{name} =", *(f"    {line}" for line in settings[name])]
    (target / "pytest.ini").write_text("\n".join(lines) + "\n")
    return target


def pytest(folder: Path, tests: Sequence[str], deselected: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """The exit code of `pytest -x` in `folder`, None when its time is over, and what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [*tests, *(f"--deselect={each}" for each in deselected)]
    environment = os.environ | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "500"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    with (folder / "output").open("w+b") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with_group_killed(process)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def with_group_killed(process: subprocess.Popen[bytes]) -> None:
    """End whatever the run has started and left behind in its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def try_out(mutation: Mutation, tests: Sequence[str], root: Path, seconds: float) -> Outcome:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        whole = copy_of(root, Path(temporary, "whole"))
        broken = copy_of(root, Path(temporary, "broken"))
        file = broken / "src" / "murmura" / mutation.path
        file.write_text(mutation.apply(file.read_text(encoding="utf-8")), encoding="utf-8")
        caught, why = judge(broken, whole, tests, began + seconds)
    return Outcome(caught, why, time.monotonic() - began)


def collected(root: Path) -> set[str]:
    """The test files that can be imported here: some need what only the development environment has."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as temporary:
        whole = copy_of(root, Path(temporary, "whole"))
        _, text = pytest(whole, ["tests", "--collect-only", "--maxfail=1000"], [], 600)
    return set(re.findall(r"^(tests/.+?\.py)::", text, re.MULTILINE))


def judge(broken: Path, whole: Path, tests: Sequence[str], deadline: float) -> tuple[bool, str]:
    deselected: list[str] = []
    begin = 0
    for size in (*BATCHES, len(tests)):
        batch, begin = tests[begin : begin + size], begin + size
        for _ in range(TRIES if batch else 0):
            code, text = pytest(broken, batch, deselected, deadline - time.monotonic())
            if code is None:
                return False, f"no test failed in the time given; {len(batch)} of {len(tests)} files were being run"
            if code in (0, 5):
                break
            failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
            if not failed:  # it hung, or it brought the process down
                said = re.findall(r"\+* *Timeout.*|^\w*Error\b.*", text, re.MULTILINE)
                return True, said[0].strip() if said else "the process of pytest crashed"
            if is_real(broken, whole, failed[0]):
                return True, failed[0]
            deselected.append(failed[0])
    note = f"; {', '.join(deselected)} failed without the mutation or not again" if deselected else ""
    return False, f"all {len(tests)} test files passed{note}"


def is_real(broken: Path, whole: Path, test: str) -> bool:
    """Whether the test fails again on the broken copy, and passes on the other: a flaky test proves nothing."""
    again, _ = pytest(broken, [test], [], 3 * SECONDS_OF_A_TEST)
    untouched, _ = pytest(whole, [test], [], 3 * SECONDS_OF_A_TEST)
    return again != 0 and untouched == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a mutation has to be caught")
    parser.add_argument("--list", action="store_true", help="show the draw and the nearest tests, run nothing")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file, too")
    parser.add_argument("--junit", type=Path, help="pytest's report of an earlier run, from which costs are known")
    options = parser.parse_args()
    drawn = draw(ROOT / "src" / "murmura", options.seed, options.count)
    imports = Imports(ROOT)
    seconds = seconds_by_file(options.junit) if options.junit else None
    usable = set(imports.tests.values()) if options.list else collected(ROOT)
    nearest = {
        each.path: [test for test in imports.nearest_tests(each.path, seconds) if test in usable] for each in drawn
    }
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {}
        for number, mutation in enumerate(drawn):
            if options.list:
                print(describe(number, mutation), "  " + " ".join(nearest[mutation.path][: BATCHES[0]]), sep="\n")
            else:
                futures[pool.submit(try_out, mutation, nearest[mutation.path], ROOT, options.timeout)] = number
        for future in as_completed(futures):
            number = futures[future]
            outcome = outcomes[number] = future.result()
            print(f"{'caught' if outcome.caught else 'SURVIVED'} after {outcome.seconds:.0f} s: {outcome.why}")
            print(describe(number, drawn[number]), flush=True)
            if options.json:
                rows = [{"number": n, **vars(drawn[n]), **vars(outcomes[n])} for n in sorted(outcomes)]
                options.json.write_text(json.dumps(rows, indent=1))
    if outcomes:
        caught = sum(outcome.caught for outcome in outcomes.values())
        print(f"seed {options.seed}: {caught} of {len(outcomes)} caught ({caught / len(outcomes):.0%})")
    return 0


def describe(number: int, mutation: Mutation) -> str:
    source = (ROOT / "src" / "murmura" / mutation.path).read_text(encoding="utf-8")
    return f"  {number}: {mutation.path}: {mutation.kind}\n{mutation.diff(source)}"


if __name__ == "__main__":
    sys.exit(main())
