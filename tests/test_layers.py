"""Imports go downwards only; process groups and devices stay in their room."""

from __future__ import annotations

import ast
from pathlib import Path

import gradtide

ROOT = Path(gradtide.__file__).parent
LAYERS = (
    {"ops"},
    {"autograd", "bucket", "fields", "momentum", "opaque", "promise", "schedule"},
    {"deferred", "select", "step", "telemetry"},
    {"collectives", "fusion", "probing"},
    {"testing", "transport"},
    {"engine", "agree", "admit"},
    {"gradients", "kfac"},
    {"layout", "scheme"},
    {"broadcast", "owners", "placement"},
    {"alarm", "preconditioning", "state"},
    {"local", "updates"},
    {"training"},
    {"hooks", "plan", "tune"},
    {"auto"},
    {"replicate"},
    {"lab", "integrations"},
    {"profile", "simulate"},
    {"cli", "__init__", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FREE = LEVEL["lab"]  # from here up, torch.distributed may be imported


def imports(path: Path) -> set[str]:
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


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


def test_process_groups_and_devices_stay_in_their_room() -> None:
    for path in ROOT.rglob("*.py"):
        if LEVEL[room(path)] >= FREE or room(path) == "transport":
            continue
        for name in imports(path):
            assert not name.startswith(("torch.distributed", "torch.cuda")), (
                f"{path.name} imports {name}: ask the transport instead"
            )
