"""Every name beyond torch's documented surface is there, in the torch that runs this.

Where another torch lacks one, this says which, before something fails far from it.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections import OrderedDict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_layers import ROOT
from torch import nn

from gradtide.core.torch_internals import OLDEST, check_version, fsdp_groups, put_first

# By the file that uses them; modules are imported as far as they are ones.
NAMES = {
    "core/autograd": """
        torch.overrides._get_current_function_mode_stack
        torch.utils._pytree.tree_leaves
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
        torch.Tensor._post_accumulate_grad_hooks""",
    "core/compilation": """
        torch._dynamo.eval_frame.skip_code
        torch._dynamo.callback.callback_handler.start_callbacks
        torch._dynamo.callback.CallbackTrigger.DYNAMO
        torch._dynamo.callback.CallbackArgs.callback_trigger
        torch.compiler._is_compiling_flag
        torch.nn.Module._compiled_call_impl""",
    "core/engine": "torch._C._profiler._RecordFunctionFast",
    "doctor/meeting": "torch._C._distributed_c10d.TCPStore",
    "integrations/ddp": "torch._C._distributed_c10d.GradBucket",
    "kfac/samples": "torch.utils._pytree.tree_leaves",
    "optim/matrices": "torch.optim._muon._zeropower_via_newtonschulz",
    "optim/muon": """
        torch.optim._muon._adjust_lr
        torch._compile._disable_dynamo""",
    "parallel": """
        torch._compile._disable_dynamo
        torch.nn.parallel.distributed._BufferCommHookLocation""",
    "planner/labour": "torch.utils._python_dispatch.TorchDispatchMode",
    "runtime/answers": "torch._foreach_mul_",
    "runtime/broadcast": "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "runtime/buckets": """
        torch._foreach_add_
        torch._foreach_copy_
        torch.autograd.graph.increment_version""",
    "runtime/deferred_grads": """
        torch.Tensor._make_wrapper_subclass
        torch._C.DisableTorchFunctionSubclass
        torch._C.TensorBase.data
        torch.utils._pytree.tree_map_only
        torch._foreach_zero_
        torch.ops.aten._foreach_norm.Scalar
        torch.ops.aten._foreach_mul_.Tensor
        torch.ops.aten._foreach_div_.Tensor
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default._schema
        torch.ops.aten.linalg_vector_norm.default
        torch.ops.aten.norm.ScalarOpt_dtype""",
    "runtime/due": """
        torch._C._storage_Use_Count
        torch.UntypedStorage._cdata
        torch.Tensor._backward_hooks""",
    "runtime/local_steps": "torch._foreach_sub_",
    "runtime/owned": "torch._foreach_norm",
    "runtime/validation": "torch.distributed._composable",
    "runtime/twin": "torch.utils._python_dispatch.TorchDispatchMode",
    "transport/shards": """
        torch.distributed.fsdp.FSDPModule._get_fsdp_state
        torch.distributed.tensor.DTensor._local_tensor
        torch.distributed.tensor.DTensor._spec""",
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
    text = (ROOT / f"{file}.py").read_text(encoding="utf-8")
    for name in NAMES[file].split():
        assert name.rpartition(".")[2] in text, f"{file} no longer uses {name}"
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
    assert "reason" in inspect.signature(torch.compiler.disable).parameters


def test_private_names_are_on_the_list() -> None:
    listed = {part for names in NAMES.values() for part in re.split(r"[.\s]+", names)}
    told = r"(?:from (torch[\w.]*) import \(?([\w, ]+)|\b(torch\.[\w.]+))"
    for path in ROOT.rglob("*.py"):
        for module, names, dotted in re.findall(told, path.read_text(encoding="utf-8")):
            for part in re.split(r"[., ]+", dotted or f"{module}, {names}"):
                if part.startswith("_") and not part.startswith("__"):
                    assert part in listed, f"{path.name} uses {part}"


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
    assert [*fsdp_groups(SimpleNamespace(_fsdp_param_groups=[one, two]))] == [one, two]
    assert [*fsdp_groups(SimpleNamespace(_fsdp_param_group=one))] == [one]
    assert [*fsdp_groups(SimpleNamespace(_fsdp_param_group=None))] == []
