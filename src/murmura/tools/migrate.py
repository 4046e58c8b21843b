"""Rewrite a script for torch's DistributedDataParallel so that it uses murmura.DDP.

Only the import and the constructor change, at the places that the syntax tree names; all other text, comments and
layout stay. What a person should look at is returned as notes. Nothing is run and nothing is written here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from murmura.errors import ConfigError

CLASS = "DistributedDataParallel"
MODULES = ("torch.nn.parallel", "torch.nn.parallel.distributed")
CLASSES = {f"{module}.{CLASS}" for module in MODULES}
POSITIONAL = (  # torch's parameters in their order; murmura takes all but the first by name
    "module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group",
    "bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view", "static_graph",
    "delay_all_reduce_named_params", "param_to_hook_all_reduce", "mixed_precision", "device_mesh",
)  # fmt: skip
KEYWORD_NOTES = {
    "mixed_precision": "mixed_precision= is refused: use torch.autocast, and Cast(torch.bfloat16) to send fewer bytes.",
    "delay_all_reduce_named_params": "delay_all_reduce_named_params= has no counterpart: remove it.",
    "param_to_hook_all_reduce": "param_to_hook_all_reduce= has no counterpart: remove it.",
}
CALL_NOTES = {
    "register_comm_hook": "torch's hooks run unchanged under gradient_allreduce where torch.distributed is "
    "initialised; algorithm= offers more, such as 'bytegrad'.",
    "Join": "it works for algorithms that average gradients; `for batch in model.join(loader):` works for all.",
    "init_process_group": "may stay: the group says who the ranks are. Without it DDP(model) reads a launcher's "
    "variables by itself.",
    **dict.fromkeys(
        ("get_optimizer_state_dict", "set_optimizer_state_dict", "get_state_dict", "set_state_dict"),
        "pass model.module: for the wrapper the names of the optimizer's state would begin with 'module.'.",
    ),
    "PeriodicModelAverager": "it may stay; algorithm=LocalSGDAlgorithm(interval) does this by itself.",
    "PostLocalSGDOptimizer": "it may stay; algorithm=Phased(GradientAllReduceAlgorithm(), until_round=n, "
    "then=LocalSGDAlgorithm(interval)) does this by itself.",
}
ATTRIBUTE_NOTES = {
    "_rebuild_buckets": "an internal of torch's class, which murmura.DDP does not have.",
    "_get_ddp_logging_data": "an internal of torch's class: use murmura.observe.Observer.",
    "_set_static_graph": "not needed: leave it out.",
}
FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed")


@dataclass(frozen=True, order=True)
class Note:
    """What a person should look at, and where."""

    line: int
    text: str


@dataclass(frozen=True)
class Migration:
    """The rewritten source, which is the old one where nothing was found, and the notes in the order of lines."""

    source: str
    notes: list[Note]


@dataclass(frozen=True, order=True)
class _Edit:
    """Replace the text from `start` to `end`, both offsets in the source."""

    start: int
    end: int
    text: str


def migrate(source: str, name: str = "the script") -> Migration:
    """Rewrite `source`, the text of a Python file that errors call `name`; a `ConfigError` if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"{name}{where} is no Python that can be read: {error}. Nothing was changed.") from None
    script = _Script(source, tree)
    script.look()
    changed = source
    for edit in sorted(script.edits, reverse=True):
        changed = changed[: edit.start] + edit.text + changed[edit.end :]
    try:
        ast.parse(changed)
    except SyntaxError as error:
        note = f"the rewritten script would not parse ({error.msg}), so it was left as it is: change it by hand."
        return Migration(source, sorted({*script.notes, Note(error.lineno or 1, note)}))
    return Migration(changed, sorted(set(script.notes)))


@dataclass
class _Script:
    source: str
    tree: ast.Module
    edits: list[_Edit] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)  # what a name of the script stands for, in full
    classes: set[str] = field(default_factory=set)  # names under which the script has imported torch's class

    def __post_init__(self) -> None:
        # As the parser counts lines; its columns are bytes of UTF-8.
        lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", self.source)
        self._lines = lines
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def look(self) -> None:
        self._look_at_names()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._note_framework(node, alias.name)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                self._look_at_import_from(node)
        uses_murmura = False
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and self._is_class(node):
                uses_murmura = True
                self.edits.append(_Edit(*self._span(node), "murmura.DDP"))
            self._look_at(node)
        imported = [alias.name for node in self.tree.body if isinstance(node, ast.Import) for alias in node.names]
        if uses_murmura and "murmura" not in imported:
            self._import_murmura()

    def _look_at_names(self) -> None:
        """Find out what names stand for, and leave out those that stand for several things."""
        meanings: dict[str, set[str]] = {}
        lines: dict[str, int] = {}
        bindings = sorted(_bindings(self.tree), key=lambda each: each[1] is not None)  # imports come first
        for name, value, meaning, line in bindings:
            if value is not None:
                meaning = self._resolve(value)
            meanings.setdefault(name, set()).add(meaning or f"line {line}")
            lines[name] = line
            if meaning:
                self.modules[name] = meaning
        for name in [name for name in self.modules if len(meanings[name]) > 1]:
            del self.modules[name]
            if meanings[name] & CLASSES:
                text = f"{name} stands for several things in this script, so it was left as it is: change it by hand."
                self.notes.append(Note(lines[name], text))
        self.classes = {name for name, meaning in self.modules.items() if meaning in CLASSES}

    def _look_at_import_from(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self._note_framework(node, module)
        if module not in MODULES:
            return
        if node.names[0].name == "*":
            self.notes.append(Note(node.lineno, f"a star import may bring {CLASS}: import it by name, and run again."))
        ours = [alias for alias in node.names if alias.name == CLASS and (alias.asname or CLASS) in self.classes]
        if not ours:
            return
        names = [alias.asname or alias.name for alias in ours]
        new = "from murmura import " + ", ".join("DDP" if name == "DDP" else f"DDP as {name}" for name in names)
        start, end = self._span(node)
        if len(ours) == len(node.names):
            self.edits.append(_Edit(start, end, new))
            return
        before = self.source[self._starts[node.lineno - 1] : start]
        separator = "; " if before.strip() else self._newline() + before
        self.edits.append(_Edit(start, start, new + separator))
        for place, alias in enumerate(node.names):
            if alias.name == CLASS:
                self.edits.append(self._without(node.names, place))

    def _without(self, aliases: list[ast.alias], place: int) -> _Edit:
        """Remove one name of a list, with the comma that no longer separates it from another, or with its line."""
        start, end = self._span(aliases[place])
        line_start, line_end = self._starts[aliases[place].lineno - 1], self._starts[aliases[place].lineno]
        before, after = self.source[line_start:start], self.source[end:line_end]
        in_parentheses = "(" in self.source[: self._span(aliases[0])[0]].rpartition("import")[2]
        if in_parentheses and not before.strip() and re.fullmatch(r"\s*,?\s*(#.*)?\s*", after):
            return _Edit(line_start, line_end, "")
        later = [each for each in aliases[place + 1 :] if each.name != CLASS]
        if later:
            return _Edit(start, self._span(aliases[place + 1])[0], "")
        return _Edit(self._span(aliases[place - 1])[1], end, "")

    def _look_at(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                name = _last_name(node.func)
                if name in CALL_NOTES:
                    self.notes.append(Note(node.lineno, f"{name}: {CALL_NOTES[name]}"))
                if self._is_class(node.func):
                    self._look_at_constructor(node)
            case ast.ClassDef() if any(self._is_class(base) for base in node.bases):
                self.notes.append(Note(node.lineno, f"class {node.name} inherits it: does it use torch's internals?"))
            case ast.Attribute(attr=name) if name == CLASS and not self._is_class(node):
                self.notes.append(Note(node.lineno, f"{ast.unparse(node)} was left as it is: is it torch's class?"))
            case ast.Attribute() if node.attr in ATTRIBUTE_NOTES:
                self.notes.append(Note(node.lineno, f"{node.attr}: {ATTRIBUTE_NOTES[node.attr]}"))
            case ast.Constant(value=str(text)) if CLASS in text and "\n" not in text:
                self.notes.append(Note(node.lineno, f"a string names {CLASS}; it was left as it is."))

    def _look_at_constructor(self, call: ast.Call) -> None:
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            self.notes.append(
                Note(call.lineno, "the arguments are unpacked here: check that all but the model go by name.")
            )
        for name, argument in zip(POSITIONAL[1:], call.args[1:], strict=False):
            if any(isinstance(each, ast.Starred) for each in call.args[: call.args.index(argument) + 1]):
                break
            start = self._before_parentheses(self._span(argument)[0])
            self.edits.append(_Edit(start, start, f"{name}="))
            self._note_keyword(argument, name)
        for keyword in call.keywords:
            self._note_keyword(keyword, keyword.arg or "")

    def _note_keyword(self, node: ast.expr | ast.keyword, name: str) -> None:
        if name in KEYWORD_NOTES:
            self.notes.append(Note(node.lineno, KEYWORD_NOTES[name]))

    def _note_framework(self, node: ast.stmt, module: str) -> None:
        framework = module.partition(".")[0]
        if framework in FRAMEWORKS:
            self.notes.append(
                Note(node.lineno, f"{framework} may wrap the model by itself: give it the bare model, or not at all.")
            )

    def _import_murmura(self) -> None:
        """Add `import murmura` before the first statement that is neither a docstring nor a __future__ import."""
        first = next(node for place, node in enumerate(self.tree.body) if not _comes_first(node, place))
        decorators = getattr(first, "decorator_list", [])
        line = min([first.lineno, *(each.lineno for each in decorators)])
        start = self._starts[line - 1] if decorators else self._span(first)[0]
        self.edits.append(_Edit(start, start, f"import murmura{self._newline()}"))

    # Names and places

    def _is_class(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id in self.classes
        return self._resolve(node) in CLASSES

    def _resolve(self, node: ast.expr) -> str:
        """The full name that a chain of attributes stands for; empty for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.modules:
            return ""
        return ".".join([self.modules[node.id], *reversed(parts)])

    def _span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def _before_parentheses(self, start: int) -> int:
        """The place before the parentheses around what begins at `start`, which the tree does not show."""
        for parenthesis in _backwards(self.source, start):
            start = parenthesis
        return start

    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.source else "\n"


def _bindings(tree: ast.Module) -> Iterator[tuple[str, ast.expr | None, str, int]]:
    """Every place that binds a name: the name, the value assigned if there is one, what is imported, and the line."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    yield alias.asname or top, None, alias.name if alias.asname else top, node.lineno
            case ast.ImportFrom():
                for alias in node.names:
                    full = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                    yield alias.asname or alias.name, None, full, node.lineno
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value, "", node.lineno
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, None, "", node.lineno
            case ast.arg(arg=name):
                yield name, None, "", node.lineno


def _backwards(source: str, start: int) -> Iterator[int]:
    place = start
    while place > 0 and (source[place - 1].isspace() or source[place - 1] == "("):
        place -= 1
        if source[place] == "(":
            yield place


def _comes_first(node: ast.stmt, place: int) -> bool:
    """Whether a statement must stay before all imports: a docstring, or one from __future__."""
    is_docstring = place == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
