"""Imports go downwards only; process groups and devices stay in their room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gradtide

ROOT = Path(gradtide.__file__).parent
LAYERS = (
    {"core"},
    {"fusion", "selectors", "wire"},
    {"collectives", "testing", "transport"},
    {"kfac"},
    {"scheme"},
    {"runtime"},
    {"optim", "planner"},
    {"admission", "elastic", "regrouping"},
    {"session"},
    {"loop", "refreshing", "uneven"},
    {"replica"},
    {"checkpoint", "ddp_arguments"},
    {"parallel"},
    {"advise", "installing"},
    {"lab", "integrations", "startup"},
    {"profile", "simulate"},
    {"doctor", "planning", "run"},
    {"cli", "__init__"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LATE = 70  # imports of ours that wait for a call
FILE, CLASS = 560, 430  # lines at most, docstrings among them
FREE = LEVEL["ddp_arguments"]  # from here up, torch.distributed may be imported


@cache
def imports(path: Path) -> set[str]:
    """What a file imports, wherever: also in its functions, and for annotations."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def late(path: Path) -> int:
    """How many of its imports of ours are in functions."""
    tree = ast.parse(path.read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    inner = {node for each in functions for node in ast.walk(each)}
    own = (node for node in inner if isinstance(node, ast.ImportFrom))
    return sum((node.module or "").startswith("gradtide") for node in own)


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> Iterator[tuple[str, set[str]]]:
    """Every module, and those that it imports, now or later."""
    paths = {module(path): path for path in ROOT.rglob("*.py")}
    for name, path in paths.items():
        found = set()
        for there in imports(path):
            while there not in paths and "." in there:
                there = there.rpartition(".")[0]
            if there in paths and there != name:
                found.add(there)
        yield name, found


def test_every_module_has_a_layer_and_imports_only_lower_ones() -> None:
    for path in ROOT.rglob("*.py"):
        here = room(path)
        assert here in LEVEL, (
            f"{path.name}: give {here} a layer in tests/test_layers.py"
        )
        for name in imports(path):
            parts = name.split(".")
            if parts[0] != "gradtide" or parts[1:2] in ([here], []):
                continue
            there = parts[1] if parts[1] in LEVEL else "__init__"
            assert LEVEL[there] < LEVEL[here], f"{path.name} imports {name}"


def test_no_module_needs_itself() -> None:
    tuple(TopologicalSorter(dict(modules())).static_order())  # raises for a cycle


@pytest.mark.parametrize("package", ["runtime", "planner"])
def test_no_room_inside_needs_itself(package: str) -> None:
    """Rooms are folders, and each file beside them is one."""

    def inner(name: str) -> str:
        return ".".join(name.split(".")[:3])

    prefix, rooms = f"gradtide.{package}.", dict[str, set[str]]()
    for name, found in modules():
        if name.startswith(prefix):
            there = {inner(other) for other in found if other.startswith(prefix)}
            rooms.setdefault(inner(name), set()).update(there - {inner(name)})
    tuple(TopologicalSorter(rooms).static_order())


def test_late_imports_are_few() -> None:
    """Each is of what plain training does not load, or of another extra's."""
    assert sum(map(late, ROOT.rglob("*.py"))) <= LATE


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=module)
def test_files_and_classes_can_be_read_at_once(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE, f"{path.name} has more than one subject"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            assert lines <= CLASS, f"{node.name}: {lines} lines; find what is beside it"


def test_process_groups_and_devices_stay_in_their_room() -> None:
    for path in ROOT.rglob("*.py"):
        door = "torch_internals" in path.parts
        if LEVEL[room(path)] >= FREE or room(path) == "transport" or door:
            continue
        for name in imports(path):
            assert not name.startswith(("torch.distributed", "torch.cuda")), (
                f"{path.name} imports {name}: ask the transport instead"
            )
