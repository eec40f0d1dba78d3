"""Imports go downwards only; process groups and devices stay in their room."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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
    {"replica"},
    {"parallel"},
    {"lab", "integrations", "startup"},
    {"profile", "simulate"},
    {"doctor", "run"},
    {"cli", "__init__"},
    {"__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE = LEVEL["parallel"]  # from here up, torch.distributed may be imported


@cache
def imports(path: Path, loaded: bool = False) -> set[str]:
    """What a file imports; only what is `loaded` with it, or in its functions too."""
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body if loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(loaded: bool = True) -> Iterator[tuple[str, set[str]]]:
    """Every module, and those that are loaded with it; or all that it ever imports."""
    paths = {module(path): path for path in ROOT.rglob("*.py")}
    for name, path in paths.items():
        found = set()
        for there in imports(path, loaded):
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


def test_outside_of_runtime_no_module_needs_itself_later() -> None:
    """Neither in a function, nor for its types alone."""
    found = modules(loaded=False)
    others = {name: its for name, its in found if "gradtide.runtime" not in name}
    tuple(TopologicalSorter(others).static_order())


def test_process_groups_and_devices_stay_in_their_room() -> None:
    for path in ROOT.rglob("*.py"):
        door = "torch_internals" in path.parts
        if LEVEL[room(path)] >= FREE or room(path) == "transport" or door:
            continue
        for name in imports(path):
            assert not name.startswith(("torch.distributed", "torch.cuda")), (
                f"{path.name} imports {name}: ask the transport instead"
            )
