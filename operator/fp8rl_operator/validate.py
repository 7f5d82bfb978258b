"""A manifest on disk: all of its faults at once, each with its line.

`load` reads, `validate_file` is its list of faults, `validate_local_files` looks at the model's folder and the data set's
file where they lie on this machine (the caller chooses whether that makes sense), `format_fault` is one line for a terminal.
The API server sees a bare `1.0` or `5e-4` as a number where the CRD has decimals as strings: that is a warning here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fp8rl_operator.errors import Fault
from fp8rl_operator.model_files import validate_local_files
from fp8rl_operator.names import KIND
from fp8rl_operator.spec import FP8RLJob, inspect
from fp8rl_operator.spec.fields import find, inner

__all__ = ["format_fault", "load", "validate_file", "validate_local_files", "with_lines"]

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
MERGE = "tag:yaml.org,2002:merge"


def validate_file(path: Path) -> list[Fault]:
    """All faults and warnings of a manifest, by line; empty for a good one."""
    return load(path)[1]


def load(path: Path, change: Callable[[Any], None] | None = None) -> tuple[FP8RLJob | None, list[Fault]]:
    """(the job, its faults and warnings by line). The job is None when one of them is an error.

    `change` edits the body before it is judged (settings of the command line).
    """
    try:
        node = _read(path)
        body = yaml.SafeLoader("").construct_document(node)
    except Unreadable as error:
        return None, [error.fault]
    except yaml.YAMLError as error:
        return None, [_syntax_fault(error)]
    if change is not None:
        change(body)
    job, found = inspect(body)
    placed = _placed(node, [*_duplicates(node, ""), *_of_this_kind(found), *_bare_decimals(node, ())])
    return (None if any(fault.level == "error" for fault in placed) else job), placed


def _read(path: Path) -> yaml.Node:
    """The one document of a file.

    Raises:
        Unreadable: no file, too large, no text, not one document.
        yaml.YAMLError: no YAML.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Unreadable(Fault("", None, f"has {size} bytes, over {MAX_BYTES}", "name a job's manifest"))
        node = _only_document(path.read_text(encoding="utf-8"))
    except OSError as error:
        way = "name a job's manifest, such as deploy/samples/reverse-text.yaml"
        raise Unreadable(Fault("", None, f"cannot be read: {error.strerror}", way)) from error
    except UnicodeDecodeError as error:
        why = f"is no UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        raise Unreadable(Fault("", None, why, "save it as UTF-8")) from error
    _refuse_expansion(node)
    return node


def with_lines(path: Path, faults: list[Fault]) -> list[Fault]:
    """Faults of a job that was read from this file, by the lines of their fields; of a pipe, which is read once, without."""
    if not path.is_file():
        return faults
    return _placed(_only_document(path.read_text(encoding="utf-8")), faults)


def _placed(node: yaml.Node, faults: list[Fault]) -> list[Fault]:
    placed = [fault if fault.line else replace(fault, line=line_of(node, fault.path)) for fault in faults]
    return sorted(placed, key=lambda fault: fault.line or 0)


def format_fault(path: Path | str, fault: Fault) -> str:
    """`FILE:LINE: spec.x.y: value 3: reason; remedy`, with `warning: ` before the field of a warning."""
    where = f"{path}:{fault.line}" if fault.line else str(path)
    return f"{where}: {'warning: ' if fault.level == 'warning' else ''}{fault}"


class Unreadable(Exception):  # noqa: N818 - carried within this module only
    """Raised when a file is not one document of a reasonable size."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))


def _only_document(text: str) -> yaml.Node:
    nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None and not _is_null(node)]
    if not nodes:
        raise Unreadable(Fault("", None, "is empty", f"write apiVersion, kind: {KIND}, metadata and spec"))
    if len(nodes) > 1:
        line = nodes[1].start_mark.line + 1
        raise Unreadable(Fault("", None, f"holds {len(nodes)} documents", f"keep one {KIND} in a file", line=line))
    return nodes[0]


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _syntax_fault(error: yaml.YAMLError) -> Fault:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        context = f"{error.context}, " if error.context else ""
        line = error.problem_mark.line + 1
        return Fault("", None, f"is no YAML: {context}{error.problem}", "correct this line or the one above", line=line)
    return Fault("", None, f"is no YAML: {' '.join(str(error).split())}", "save it as plain text")


def _refuse_expansion(node: yaml.Node) -> None:
    """Refuse aliases that contain themselves and aliases that multiply.

    Raises:
        Unreadable: the document has either.
    """
    stack: list[tuple[yaml.Node, frozenset[int]]] = [(node, frozenset())]
    for count in range(MAX_VALUES):
        if not stack:
            return
        current, above = stack.pop()
        if id(current) in above:
            raise Unreadable(_expansion("contains itself by its alias", current))
        inside = above | {id(current)}
        if isinstance(current, yaml.MappingNode):
            stack += [(value, inside) for _, value in current.value]
        elif isinstance(current, yaml.SequenceNode):
            stack += [(value, inside) for value in current.value]
        if count == MAX_VALUES - 1:
            raise Unreadable(_expansion(f"expands to more than {MAX_VALUES} values by its aliases", current))


def _expansion(reason: str, node: yaml.Node) -> Fault:
    return Fault("", None, reason, "write the values out", line=node.start_mark.line + 1)


def _duplicates(node: yaml.Node, path: str) -> Iterator[Fault]:
    """Keys that a mapping has twice: YAML takes the last in silence."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _duplicates(value, f"{path}[{index}]")
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if key.tag == MERGE:
            continue
        if name in seen:
            yield Fault(
                _below(path, key), None, f"is given twice, first on line {seen[name]}", "keep one of them", line=line
            )
        seen.setdefault(name, line)
        yield from _duplicates(value, _below(path, key))


def _below(path: str, key: yaml.Node) -> str:
    return f"{path}.{key.value}" if path else str(key.value)


def _of_this_kind(faults: list[Fault]) -> list[Fault]:
    """Of a file of another kind only that is said: its fields mean something else."""
    foreign = [f for f in faults if f.path == "kind" and f.value is not None and str(f.value).lower() != KIND.lower()]
    return [fault for fault in faults if fault.path in ("kind", "apiVersion")] if foreign else faults


def _bare_decimals(node: yaml.Node, location: tuple[str | int, ...]) -> Iterator[Fault]:
    """Decimals without quotes, which kubectl sends as numbers and the API server refuses."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag != MERGE:
                yield from _bare_decimals(value, (*location, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _bare_decimals(value, (*location, index))
    elif isinstance(node, yaml.ScalarNode) and node.style is None and NUMBER.fullmatch(node.value):
        _, info = find(FP8RLJob, location)
        if info is not None and inner(info.annotation) is float:
            yield Fault(
                "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip("."),
                node.value,
                "is a bare number, and the API server takes decimals as strings",
                f'write "{node.value}" where the job goes to a cluster',
                level="warning",
            )


def line_of(node: yaml.Node, path: str) -> int:
    """Line of the field that a path names, or of the nearest field above that is written down."""
    line = node.start_mark.line + 1
    rest = path
    while rest:
        found = _child(node, rest)
        if found is None:
            break
        node, rest, line = found
    return line


def _child(node: yaml.Node, path: str) -> tuple[yaml.Node, str, int] | None:
    """(child, the rest of the path, line of its key) on the way along a path; keys may hold dots, so the longest counts."""
    if isinstance(node, yaml.SequenceNode):
        match = re.match(r"\[(\d+)\]\.?", path)
        if match is None or int(match[1]) >= len(node.value):
            return None
        item = node.value[int(match[1])]
        return item, path[match.end() :], item.start_mark.line + 1
    pairs = list(_pairs(node)) if isinstance(node, yaml.MappingNode) else []
    fitting = [(key, value) for key, value in pairs if re.match(re.escape(str(key.value)) + r"($|[.\[])", path)]
    if not fitting:
        return None
    key, value = max(fitting, key=lambda pair: len(pair[0].value))
    return value, path[len(key.value) :].removeprefix("."), key.start_mark.line + 1


def _pairs(node: yaml.MappingNode) -> Iterator[tuple[Any, yaml.Node]]:
    """Keys and values of a mapping, those merged by `<<` last."""
    for key, value in node.value:
        if key.tag != MERGE:
            yield key, value
    for key, value in node.value:
        if key.tag == MERGE:
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                if isinstance(merged, yaml.MappingNode):
                    yield from _pairs(merged)
