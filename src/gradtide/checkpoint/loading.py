"""What is copied of a run and what is loaded into one: model, optimizer and items.

All of it is checked before any of it is loaded, but for items, of which nobody but
their own code can say what they take: so they are loaded first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtide.checkpoint.contents import Items, Random, check_random, copied
from gradtide.checkpoint.files import About, unpacked
from gradtide.checkpoint.generations import Plan, name_of, spoken
from gradtide.runtime.guards.validation import divides, is_joinable
from gradtide.runtime.layout.parameters import shared_parameters

State = dict[str, Any]
PARTS = "model", "optimizer", "items", "sync"  # of what all ranks have in common
OWN = "model", "items", "sync", "random"  # of a rank's own file


@dataclass(frozen=True)
class Subject:
    """The user's model, its optimizer and what else he passed."""

    model: nn.Module
    optimizer: Optimizer
    items: Items

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def validate(self) -> None:
        """Raise ValueError for an optimizer whose state cannot be had."""
        for one in self._optimizers():
            whole = divides(one) and hasattr(one, "consolidate_state_dict")
            if is_joinable(one) and not whole:
                raise ValueError(
                    f"{type(one).__name__} divides its state among ranks: save it by "
                    "hand, after its consolidate_state_dict()"
                )

    def consolidate(self) -> None:
        """Have the whole state of optimizers that divide it; collective then.

        All ranks have it afterwards, as of gradtide's own.
        """
        for one in self._optimizers():
            if is_joinable(one):
                one.consolidate_state_dict()

    def _optimizers(self) -> list[Any]:
        """Those that were passed, in the same order on every rank."""
        return [self.optimizer, *self.items.of(Optimizer)]

    def copies(self, whole: bool) -> tuple[State, State]:
        """Copies of what a rank has of its own and, if `whole`, of what all have."""
        shared = {p.data_ptr() for _, p in shared_parameters(self.model) if p.numel()}
        model, items = self.model.state_dict(), self.items.copies()

        def is_own(value: Any) -> bool:
            return not (isinstance(value, Tensor) and value.data_ptr() in shared)

        own: State = {
            "model": copied({k: v for k, v in model.items() if is_own(v)}, "model"),
            "items": items,
        }
        if not whole and not self._steps_apart():
            return own, {}
        optimizer = copied(self.optimizer.state_dict(), "optimizer")
        if self._steps_apart():
            own["optimizer"] = optimizer
        common = {
            "model": copied(dict(model), "model"),
            "optimizer": optimizer,
            "items": items,
        }
        return own, common if whole else {}

    def _steps_apart(self) -> bool:
        """Whether the optimizer has parameters that are this rank's own."""
        shared = {id(p) for _, p in shared_parameters(self.model)}
        groups = self.optimizer.param_groups
        return any(id(p) not in shared for group in groups for p in group["params"])


@dataclass(frozen=True)
class Contents:
    """What this rank has to load."""

    step: int
    run: str
    sync: State
    model: State
    optimizer: State
    items: State
    random: Random | None  # None: nobody had this rank's number

    @classmethod
    def of(cls, data: Mapping[str, bytes], plan: Plan, rank: int) -> Contents:
        """Put together what was read of a generation; ValueError if it is not whole."""
        read = {name: unpacked(piece, name) for name, piece in data.items()}
        common = next(each for name, each in read.items() if name.startswith("common"))
        ranks = [each for name, each in read.items() if name.startswith("rank")]
        found = cls.joined(common, ranks, rank)
        if plan.lost:
            found.sync["lost"] = list(plan.lost)
        return found

    @classmethod
    def joined(
        cls, common: tuple[About, Any], ranks: list[tuple[About, Any]], rank: int
    ) -> Contents:
        """What rank `rank` has to load of these files; ValueError if they do not fit.

        Each is what it says of itself, and what is in it.
        """
        about, shared = common
        generation, name = spoken(about)
        _check_parts(shared, PARTS, name)
        sync, mine = dict(shared["sync"]), State()
        for said, state in ranks:
            then, name = spoken(said)
            _check_parts(state, OWN, name)
            if then != generation:
                raise ValueError(f"files are of {then} and of {generation}")
            if name == name_of("rank", rank):
                mine = state
            sync |= state["sync"]
        return cls(
            generation.step,
            generation.run,
            sync,
            {**shared["model"], **mine.get("model", {})},
            mine.get("optimizer", shared["optimizer"]),
            mine.get("items", shared["items"]),
            mine.get("random"),
        )

    @classmethod
    def of_state(cls, saved: Mapping[str, Any], rank: int) -> Contents:
        """What is in a `Checkpointer.state_dict()`; ValueError if it does not fit."""
        pieces = []
        for name in ("common", f"rank{rank}"):
            piece = saved.get(name)
            if not isinstance(piece, bytes):
                raise ValueError(
                    f"the state has no {name!r}: load what state_dict() has returned "
                    "on this rank; with another number of ranks use resume()"
                )
            pieces.append(unpacked(piece, name))
        common, (about, own) = pieces
        if not isinstance(own, dict) or not isinstance(saved.get("sync"), dict):
            raise ValueError("the state has no 'sync'")
        return cls.joined(common, [(about, {**own, "sync": saved["sync"]})], rank)


def _check_parts(state: Any, names: tuple[str, ...], file: str) -> None:
    """Raise ValueError unless a file has all its parts."""
    for name in names:
        if not isinstance(state, dict) or not isinstance(state.get(name), dict):
            raise ValueError(f"{file} has no {name!r}")


@dataclass(frozen=True)
class Loading:
    """What is checked and loaded together with a replica's state."""

    subject: Subject
    contents: Contents

    def check(self) -> None:
        """Raise ValueError for what does not fit; changes nothing."""
        _check_model(self.subject.model, self.contents.model)
        _check_optimizer(self.subject.optimizer, self.contents.optimizer)
        self.subject.items.check(self.contents.items)
        if self.contents.random is not None:
            check_random(self.contents.random)

    def load(self) -> None:
        """Load all of it, items first; ValueError where one takes no state."""
        subject, contents = self.subject, self.contents
        subject.items.load(contents.items)
        named: State = {"model": subject.model, "optimizer": subject.optimizer}
        for name, one in named.items():
            try:
                one.load_state_dict(getattr(contents, name))
            except Exception as error:  # of a module's or an optimizer's own code
                raise ValueError(
                    f"the {name} does not take its state "
                    f"({type(error).__name__}: {error})"
                ) from error


def _check_model(model: nn.Module, saved: State) -> None:
    """Raise ValueError for parameters of another model; buffers may have grown."""
    for name, p in model.named_parameters():
        found = saved.get(name)
        if not isinstance(found, Tensor) or found.shape != p.shape:
            shape = tuple(found.shape) if isinstance(found, Tensor) else "not there"
            raise ValueError(
                f"the saved {name} is {shape}, and the model's {tuple(p.shape)}: build "
                "the model that was saved"
            )


def _check_optimizer(optimizer: Optimizer, saved: State) -> None:
    """Raise ValueError for the state of another optimizer."""
    groups, state = saved.get("param_groups"), saved.get("state")
    now = optimizer.state_dict()["param_groups"]
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise ValueError("the optimizer's state has no groups, or no state")
    if len(groups) != len(now):
        raise ValueError(f"the optimizer had {len(groups)} groups, and has {len(now)}")
    for number, (then, group) in enumerate(zip(groups, now, strict=True)):
        for key, value in group.items():
            found = then.get(key) if isinstance(then, dict) else None
            if not _alike(found, value):
                raise ValueError(
                    f"{key} of the optimizer's group {number} was {found!r}, and is "
                    f"{value!r}: build the optimizer that was saved"
                )
    known = {p for group in groups for p in group["params"]}
    for key, one in state.items():
        if key not in known or not isinstance(one, dict):
            raise ValueError(f"the optimizer's state of {key!r} belongs to nothing")


def _alike(saved: Any, present: Any) -> bool:
    """Whether a hyper-parameter is of the kind that it is now."""
    if isinstance(present, list):
        lists = isinstance(saved, list) and len(saved) == len(present)
        return lists and all(type(each) is int for each in saved)
    if present is None or saved is None:
        return True  # such as `foreach`, which an optimizer decides on itself
    numbers = int | float | Tensor
    if isinstance(present, numbers) and isinstance(saved, numbers):
        return True
    if isinstance(present, tuple):
        return isinstance(saved, tuple) and len(saved) == len(present)
    return type(saved) is type(present)
