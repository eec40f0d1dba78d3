"""Every module has tests: in the file of its name, or in the one that is named here.

The tests of `package/module.py` are in tests/package/test_module.py or, where that name
is taken, in test_package_module.py beside it or one folder up. A file that is named
here imports the module, or something that the module defines. Where tests have no use
for that, as the module is a part of what they run, a mutant of it is in
benchmarks/mutant_list.py that the file has to notice.
"""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.test_layers import ROOT, imports, module

TESTS = Path(__file__).parent
# What is tested by what uses it, or together with its neighbours.
ELSEWHERE = {
    "__main__": "test_refusals_cli",
    "admission": "test_elastic",
    "advise/notes": "advise/test_advise",
    "advise/drawings": "advise/test_page",
    "advise/program": "advise/test_advise",
    "advise/recorder": "advise/test_advise",
    "advise/report": "advise/test_advise",
    "advise/subject": "advise/test_advise",
    "checkpoint/loading": "checkpoint/test_checkpointer",
    "checkpoint/elastic": "test_elastic_checkpoints",
    "checkpoint/sending": "checkpoint/test_checkpointer",
    "checkpoint/signals": "checkpoint/test_checkpointer",
    "collectives/_entries": "collectives/test_topk",
    "collectives/_indices": "collectives/test_partitioned",
    "collectives/_lossless": "collectives/test_lossless_means",
    "collectives/_tiles": "collectives/test_tiled",
    "collectives/_winners": "collectives/test_oktopk",
    "collectives/contrib/acpsgd": "collectives/test_lowrank",
    "collectives/contrib/by_norm": "collectives/test_partitioned",
    "collectives/contrib/topkdsa": "collectives/test_topka2a",
    "collectives/dense": "test_law",
    "collectives/owners": "collectives/test_owned_means",
    "collectives/partitions": "collectives/test_partitioned",
    "core/fields": "test_scheme",
    "core/grace": "transport/test_grace",
    "core/grouped": "doctor/test_checks",
    "core/ops": "test_transport",
    "core/outer": "runtime/exchange/test_rounds",
    "core/schedule": "core/test_step",
    "core/torch_internals/autograd": "core/test_autograd",
    "core/torch_internals/compilation": "test_compiled",
    "core/torch_internals/distributed": "core/test_torch_internals",
    "core/torch_internals/muon": "optim/test_muon",
    "core/torch_internals/versions": "core/test_torch_internals",
    "core/transport": "test_transport",
    "doctor/advice": "doctor/test_model",
    "doctor/cli": "doctor/test_run",
    "doctor/facts": "doctor/test_checks",
    "doctor/report": "doctor/test_run",
    "doctor/trial": "doctor/test_run",
    "fusion/formulas": "fusion/test_fusion_mgwfbp",
    "integrations/metrics": "integrations/test_states",
    "integrations/wrapping": "integrations/test_states",
    "kfac/buckets": "kfac/test_equality",
    "kfac/config": "test_scheme",
    "kfac/costs": "kfac/test_timing",
    "kfac/curvature": "kfac/test_preconditioner",
    "kfac/parts": "kfac/test_preconditioner",
    "kfac/sharing": "kfac/test_equality",
    "lab/checks": "test_refusals_cli",
    "lab/cli": "test_refusals_cli",
    "lab/cluster": "lab/test_wiring",
    "lab/events": "lab/test_timetable",
    "lab/namespaces": "lab/test_endings",
    "lab/options": "test_refusals_cli",
    "lab/tables": "lab/test_report",
    "lab/talker": "lab/test_probe",
    "lab/trial": "lab/test_summary",
    "lab/worker": "lab/test_compare",
    "lab/workloads/digits": "lab/test_workloads",
    "lab/workloads/gpt": "lab/test_workloads",
    "lab/workloads/replay": "lab/test_replay",
    "lab/workloads/shapes": "lab/test_replay",
    "lab/workloads/synthetic": "lab/test_workloads",
    "lab/workloads/timing": "lab/test_replay",
    "lab/workloads/workload": "lab/test_workloads",
    "optim/matrices": "optim/test_muon",
    "optim/several": "optim/test_muon_deferred",
    "planning": "advise/test_advise",
    "planner/steps/actions": "planner/test_order",
    "planner/auto/decision": "test_auto",
    "planner/auto/inspector": "test_auto",
    "planner/auto/selector": "test_auto",
    "planner/data/device": "planner/test_virtual",
    "planner/data/presets": "planner/test_presets",
    "planner/data/document": "planner/test_network",
    "planner/rehearsal/flows": "planner/rehearsal/test_rehearsal",
    "planner/steps/parts": "planner/steps/test_curvature",
    "planner/report": "planner/test_plan_report",
    "planner/steps/stages": "planner/test_plan_stages",
    "planner/steps/training": "planner/test_virtual",
    "planner/clock/transport": "planner/test_plan_transport",
    "planner/tuning/online": "planner/tuning/test_tune_online",
    "planner/measuring/device_timing": "planner/measuring/test_bench",
    "profile/device": "test_refusals_cli",
    "profile/network/overhead": "profile/test_overhead",
    "profile/network/report": "profile/test_network_run",
    "profile/selection/run": "profile/test_selection_report",
    "profile/trace/subject": "profile/test_trace_run",
    "runtime/deferred/gradient_info": "runtime/deferred/test_grads",
    "runtime/layout/owned_bucket": "optim/test_muon_deferred",
    "runtime/optimizer/finder": "test_parallel",
    "runtime/hooks": "test_replica",
    "runtime/guards/nonfinite": "test_sparse",
    "runtime/deferred/partial_norms": "runtime/deferred/test_grads",
    "runtime/layout/parameters": "test_parallel",
    "runtime/layout/placement": "test_replica",
    "runtime/exchange/preconditioned": "kfac/test_product",
    "runtime/deferred/tally": "runtime/deferred/test_grads",
    "runtime/training": "test_metrics",
    "runtime/optimizer/optimizer_copy": "runtime/optimizer/test_probing",
    "runtime/deferred/updates": "test_replica",
    "runtime/guards/validation": "test_refusals",
    "runtime/exchange/consensus": "test_frozen",
    "runtime/exchange/gradients": "runtime/test_join",
    "runtime/exchange/round_state": "runtime/exchange/test_rounds",
    "runtime/exchange/unpreconditioned": "test_replica",
    "runtime/members": "runtime/test_join",
    "runtime/saving": "runtime/test_checkpoint",
    "scheme/auto": "test_auto",
    "runtime/actions": "test_replica",
    "installing": "test_run",
    "refreshing": "runtime/test_refresh",
    "runtime/metrics": "test_metrics",
    "runtime/regroup": "test_regrouping",
    "session": "test_parallel",
    "uneven": "runtime/test_join",
    "scheme/config": "test_scheme",
    "scheme/parser": "test_scheme",
    "scheme/recipes": "test_scheme",
    "scheme/spelling": "test_scheme",
    "scheme/table": "test_scheme",
    "selectors/fast": "selectors/test_kernels",
    "selectors/follow": "selectors/test_selectors",
    "selectors/indices": "selectors/test_kernels",
    "selectors/triton_kernels": "selectors/test_triton",
    "simulate/cli": "simulate/test_grid",
    "simulate/report": "simulate/test_grid",
    "startup/sitecustomize": "test_run",
    "testing": "test_law",
    "core/levels": "core/test_host_by_host",
    "transport/comm_queue": "test_transport",
    "transport/connect": "test_transport",
    "transport/descriptors": "transport/test_roll_call",
    "transport/gloo": "test_transport",
    "transport/hosts": "test_two_levels",
    "transport/inquiry": "test_inquiry",
    "transport/opening": "transport/test_links",
    "transport/pieces": "transport/test_staged",
    "transport/ring": "transport/test_links",
    "transport/rotation": "transport/test_links",
    "transport/several": "transport/test_distance",
    "transport/shards": "test_sharded",
    "transport/stream": "transport/test_link",
    "wire/fast_lossless": "wire/test_lossless",
    "wire/fast": "wire/test_blocks",
    "wire/fast_indices": "wire/test_indices",
    "wire/formats": "wire/test_blocks",
    "wire/tools": "wire/test_blocks",
}
MUTANTS = runpy.run_path(str(TESTS.parent / "benchmarks" / "mutant_list.py"))["MUTANTS"]
MODULES = {
    str(path.relative_to(ROOT).with_suffix("")): path
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
}


def own(name: str) -> Iterator[Path]:
    """Where the tests of a module are by its name."""
    folder, word = TESTS / Path(name).parent, Path(name).name.lstrip("_")
    package = Path(name).parent.name
    yield folder / f"test_{word}.py"
    if package:
        yield folder / f"test_{package}_{word}.py"
        yield folder.parent / f"test_{package}_{word}.py"


@cache
def used(file: Path) -> set[str]:
    """The modules of gradtide that a file imports, or imports something of."""
    found = set()
    for name in imports(file):
        if name.startswith("gradtide"):
            found |= {name, name.rpartition(".")[0], home(name)}
    return found


def home(name: str) -> str:
    """The module that defines what is imported by a name, perhaps from a package."""
    parent, _, own = name.rpartition(".")
    with suppress(ImportError):  # of another extra
        found = getattr(importlib.import_module(parent or name), own, None)
        return str(getattr(found, "__module__", name))
    return name


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_has_tests(name: str) -> None:
    named = any(path.exists() for path in own(name))
    assert named or name in ELSEWHERE, (
        f"{name} has no tests: write {next(own(name)).relative_to(TESTS.parent)}, or "
        "name in tests/test_every_module.py the file that tests it"
    )
    assert not (named and name in ELSEWHERE), f"{name} has a file of its name"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_what_is_named_tests_the_module(name: str) -> None:
    path = TESTS / f"{ELSEWHERE[name]}.py"
    assert path.exists(), f"there is no {path.name}"
    noticed = {(m.file, test) for m in MUTANTS for test in m.tests}
    mutated = (f"{name}.py", f"{ELSEWHERE[name]}.py") in noticed
    assert mutated or module(MODULES[name]) in used(path), (
        f"{path.name} does not import {name}: name a file that does, or add a mutant "
        "that it notices to benchmarks/mutant_list.py"
    )
