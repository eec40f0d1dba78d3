"""Every name beyond torch's documented surface is there, in the torch that runs this.

Where another torch lacks one, this says which, before something fails far from it.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_layers import ROOT
from torch import nn

from gradtide.core.torch_internals import tables
from gradtide.core.torch_internals.distributed import groups_of
from gradtide.core.torch_internals.versions import OLDEST, check_version, put_first

# By the file of core/torch_internals; modules are imported as far as they are ones.
NAMES = {
    "__init__": """
        torch._C._profiler._RecordFunctionFast
        torch._compile._disable_dynamo
        torch.utils._python_dispatch.TorchDispatchMode
        torch.utils._python_dispatch.is_traceable_wrapper_subclass
        torch.utils._pytree.tree_leaves
        torch.utils._pytree.tree_map_only
        torch._foreach_add_
        torch._foreach_copy_
        torch._foreach_div_
        torch._foreach_mul_
        torch._foreach_norm
        torch._foreach_sub_
        torch._foreach_zero_
        torch._amp_foreach_non_finite_check_and_unscale_
        torch.ops.aten._foreach_zero_.default
        torch.ops.aten._foreach_mul_.Scalar
        torch.ops.aten._foreach_mul_.Tensor
        torch.ops.aten._foreach_div_.Scalar
        torch.ops.aten._foreach_div_.Tensor
        torch.ops.aten._foreach_norm.Scalar
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default._schema
        torch._C.TensorBase.data
        torch._C.DisableTorchFunctionSubclass
        torch._C._storage_Use_Count
        torch.UntypedStorage._cdata
        torch.Tensor._backward_hooks
        torch.Tensor._base
        torch.Tensor._make_wrapper_subclass
        torch.Tensor._post_accumulate_grad_hooks""",
    "autograd": """
        torch.overrides._get_current_function_mode_stack
        torch.autograd.Variable._execution_engine.queue_callback
        torch._C._current_graph_task_id
        torch._C._get_dispatch_mode
        torch._C._TorchDispatchModeKey.FAKE
        torch._C._TorchDispatchModeKey.PROXY
        torch._C._functorch.peek_interpreter_stack
        torch._C._is_tracing
        torch._C._len_torch_dispatch_stack
        torch._C._len_torch_function_stack
        torch.compiler._is_exporting_flag
        torch.compiler.is_dynamo_compiling
        torch.Tensor._cdata
        torch.Tensor._version
        torch.Tensor._post_accumulate_grad_hooks
        torch.nn.Module._register_load_state_dict_pre_hook""",
    "compilation": """
        torch._dynamo.eval_frame.skip_code
        torch._dynamo.callback.callback_handler.start_callbacks
        torch._dynamo.callback.CallbackTrigger.DYNAMO
        torch._dynamo.callback.CallbackArgs.callback_trigger
        torch.compiler._is_compiling_flag
        torch.nn.Module._compiled_call_impl""",
    "distributed": """
        torch._C._distributed_c10d.GradBucket
        torch._C._distributed_c10d.Store
        torch._C._distributed_c10d.TCPStore
        torch.distributed.distributed_c10d._get_default_store
        torch.distributed.distributed_c10d._world.group_count
        torch.distributed.ProcessGroup._get_backend
        torch.nn.parallel.DistributedDataParallel._active_ddp_module
        torch.nn.parallel.DistributedDataParallel._check_default_group
        torch.nn.parallel.DistributedDataParallel._log_and_throw
        torch.nn.parallel.distributed._BufferCommHookLocation
        torch.distributed.fsdp.FSDPModule._get_fsdp_state
        torch.distributed.tensor.DTensor._local_tensor
        torch.distributed.tensor.DTensor._spec""",
    "muon": """
        torch.optim._muon._adjust_lr
        torch.optim._muon._zeropower_via_newtonschulz""",
}
DOOR = ROOT / "core" / "torch_internals"
# Private names of others, and documented ones of Python's: of named tuples, sys, os.
OTHERS = {
    *("_asdict", "_make", "_replace", "_current_frames", "_exit", "_getframe"),
    *("_ddp_kwargs", "_optimizers"),  # Lightning's, Accelerate's
}


def find(path: str) -> Any:
    """What a dotted name stands for; AttributeError if nothing."""
    parts, found = path.split("."), None
    for i, part in enumerate(parts):
        holder = found
        if holder is not None and hasattr(holder, part):
            found = getattr(holder, part)
            continue
        if part in getattr(holder, "__annotations__", {}):
            return None
        try:
            found = import_module(".".join(parts[: i + 1]))
        except ImportError:
            raise AttributeError(part) from None
    return found


@pytest.mark.parametrize("file", NAMES)
def test_torch_has_what_is_used(file: str) -> None:
    text = (DOOR / f"{file}.py").read_text(encoding="utf-8")
    for name in NAMES[file].split():
        assert name.rpartition(".")[2] in text, (
            f"torch_internals/{file} no longer uses {name}"
        )
        try:
            find(name)
        except AttributeError:
            pytest.fail(f"torch {torch.__version__} has no {name}, for {file}")


def test_objects_have_what_is_used() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        assert getattr(optimizer, name) == {}, name
    assert type(optimizer).step.hooked
    assert type(optimizer).step.__wrapped__
    module = nn.Linear(1, 1)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_pre_hooks"):
        assert isinstance(getattr(module, name), OrderedDict), name
    assert tables(module)[1]["weight"] is module.weight
    assert "reason" in inspect.signature(torch.compiler.disable).parameters


def own_names(trees: Sequence[ast.AST]) -> set[str]:
    """Names that begin with an underscore and are defined here."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    named = [n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    named += [n.id for n in nodes if isinstance(n, ast.Name)]
    named += [
        n.attr
        for n in nodes
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and isinstance(n.value, ast.Name)
    ]
    return {name for name in named if private(name)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def foreign(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names in a file that nobody here has defined."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if private(name) and name not in own:
                yield name
            case ast.ImportFrom(module=str(module), names=names):
                parts = [*module.split("."), *(alias.name for alias in names)]
                if parts[0] == "torch":
                    yield from filter(private, parts)
            case ast.Import(names=names):
                for alias in names:
                    parts = alias.name.split(".")
                    if parts[0] == "torch":
                        yield from filter(private, parts)


def test_there_is_one_door_to_what_torch_does_not_document() -> None:
    parsed = {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")
    }
    own = own_names([*parsed.values()]) | OTHERS
    listed = {part for names in NAMES.values() for part in re.split(r"[.\s]+", names)}
    # Asked for by what a version has, or of objects: other tests do that.
    listed |= {"_fsdp_param_group", "_fsdp_param_groups", "_functorch", "_modules"}
    listed |= {"_forward_pre_hooks", "_parameters", "_state_dict_pre_hooks", "_dynamo"}
    listed |= {"_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"}
    for path, tree in parsed.items():
        found = set(foreign(tree, own))
        if path.is_relative_to(DOOR):
            assert found <= listed, f"{path.name}: {found - listed} are not listed"
        else:
            assert not found, f"{path.relative_to(ROOT)} uses torch's {found}"


@pytest.mark.parametrize(
    "text", ["import torch._dynamo", "from torch._C import x", "f(p._base)"]
)
def test_what_goes_around_the_door_is_seen(text: str) -> None:
    assert [*foreign(ast.parse(text), {"_own"})]
    assert not [*foreign(ast.parse("f(p._own, p.__dict__)"), {"_own"})]


@pytest.mark.parametrize("text", ["2.10.2+cpu", "1.13.1", "2.9.0a0+git1"])
def test_an_old_torch_is_refused(text: str) -> None:
    with pytest.raises(ImportError, match="gradtide needs torch") as raised:
        check_version(text)
    assert f"this is torch {text}:" in str(raised.value)


@pytest.mark.parametrize("text", ["2.11.0+cu130", "2.14.1", "3.0.0", torch.__version__])
def test_a_newer_one_is_not(text: str) -> None:
    check_version(text)


def test_it_is_refused_by_import_gradtide() -> None:
    program = "import torch; torch.__version__ = '2.10.0'; import gradtide"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert "ImportError: gradtide needs torch 2.11 or newer" in done.stderr


def test_the_oldest_is_what_the_package_asks_for() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    oldest = ".".join(map(str, OLDEST))
    assert f'"torch>={oldest}"' in project.read_text(encoding="utf-8")


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
@pytest.mark.parametrize("known", [False, True])
def test_a_hook_is_put_first(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    hooks: OrderedDict[int, Any] = OrderedDict({1: "a", 2: "b"})
    if known:
        hooks[7] = "old"
    put_first(hooks, 7, "ours")
    assert [*hooks.items()] == [(7, "ours"), (1, "a"), (2, "b")]
    if version == "2.11.0":  # whose Dynamo numbers them so
        assert [*dict.keys(hooks)] == [7, 1, 2]


def test_groups_of_fsdp() -> None:
    one, two = object(), object()
    assert [*groups_of(SimpleNamespace(_fsdp_param_groups=[one, two]))] == [one, two]
    assert [*groups_of(SimpleNamespace(_fsdp_param_group=one))] == [one]
    assert [*groups_of(SimpleNamespace(_fsdp_param_group=None))] == []


ENDS = """
import os, sys, threading
from gradtide.core.torch_internals.distributed import end_after_gloo

def wait():
    lock.acquire()
    os.write(1, b"had the lock of the interpreter")

end_after_gloo()
lock = threading.Lock()
lock.acquire()
threading.Thread(target=wait, daemon=True).start()
sys.setswitchinterval(10)  # of the interpreter's lock: nobody gets it on demand
lock.release()
"""


def test_a_process_ends_after_threads_that_wait_for_the_interpreter() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert done.stdout == "had the lock of the interpreter", done.stderr
