"""What has to be saved of a preconditioner so that a run goes on as if not stopped.

A rank saves what it has: averages of the factors that it inverts, the traces of all,
and inverses where the next step does not make new ones. Another number of ranks, or
another distribution, takes each of these from whichever rank had it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from gradtide.kfac.costs import Costs
from gradtide.kfac.curvature import Curvature
from gradtide.kfac.invert import Eigen, Eigens, Inverses
from gradtide.kfac.layers import KINDS
from gradtide.kfac.preconditioner import Preconditioner
from gradtide.opaque import packed, unpacked


def save(kfac: Preconditioner) -> bytes:
    """This rank's state in one opaque piece: what it holds depends on the rank."""
    kfac.finish()
    due = kfac.step % kfac.config.inverse_every == 0
    state = {
        "step": kfac.step,
        "costs": asdict(kfac.costs),
        "layers": {la.name: _save(kfac.curvatures[la], due) for la in kfac.layers},
    }
    return packed(state)


def read(pieces: Iterable[bytes], kfac: Preconditioner) -> list[dict[str, Any]]:
    """The states of some ranks; raises ValueError for those of another model."""
    shapes = {
        (layer.name, kind): layer.numel(kind) for layer in kfac.layers for kind in KINDS
    }
    states: list[dict[str, Any]] = [unpacked(piece) for piece in pieces if piece]
    for state in states:
        for name, saved in state["layers"].items():
            for kind, value in saved["running"].items():
                if shapes.get((name, kind)) != value.numel():
                    raise ValueError(
                        f"the state holds K-FAC's factor {kind} of {name!r}, which "
                        "this model does not have in that size: build the model that "
                        "was saved"
                    )
    return states


def load(kfac: Preconditioner, states: list[dict[str, Any]], same: bool) -> None:
    """Go on from what `read` returned; `same`: it is this rank's own, of as many."""
    if not states:
        return
    kfac.finish()
    kfac.step = int(states[0]["step"])
    kfac.place(Costs(**states[0]["costs"]) if same else kfac.costs)
    for layer in kfac.layers:
        for state in states:
            if layer.name in state["layers"]:
                _load(kfac.curvatures[layer], state["layers"][layer.name])


def _save(curvature: Curvature, due: bool) -> dict[str, Any]:
    made = None if due else curvature.current
    inverses: dict[str, Any] = {}
    match made:
        case Inverses(a=a, g=g):
            inverses = {"A": a, "G": g}
        case Eigens(a=a, g=g):
            inverses = {"A": (a.values, a.vectors), "G": (g.values, g.vectors)}
    return {
        "traces": dict(curvature.traces),
        "running": {
            kind: running.value
            for kind, running in curvature.running.items()
            if running.value is not None
        },
        "inverses": inverses,
    }


def _load(curvature: Curvature, saved: dict[str, Any]) -> None:
    device, form = curvature.layer.weight.device, curvature.config.form
    curvature.traces.update(saved["traces"])
    for kind, value in saved["running"].items():
        if kind in curvature.running:
            curvature.running[kind].value = value.to(device)
    found = saved["inverses"]
    if found and form == "inverse" and isinstance(found["A"], torch.Tensor):
        curvature.current = Inverses(found["A"].to(device), found["G"].to(device))
    elif found and form == "eigen" and isinstance(found["A"], tuple):
        a, g = (Eigen(*(x.to(device) for x in found[kind])) for kind in KINDS)
        curvature.current = Eigens(a, g, curvature.config.damping)
