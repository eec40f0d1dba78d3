"""README and docs: code runs, commands parse, links lead somewhere, names are there.

Every page is one program, run by two ranks: its ```python blocks in order, and the code
in HTML comments that begin with `run`, which readers do not see. A comment that begins
with `python no-run:` and a reason excuses the block behind it. What is there already is
in `begin`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from typer.main import get_command

import gradtide
import gradtide.integrations.ddp
import gradtide.testing
from gradtide.cli import app
from tests.ranks import run_ranks
from tests.test_layers import imports

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
NEEDS = {  # what extras install
    "fusion.md": "bayes_opt",
    "lightning.md": "lightning",
    "accelerate.md": "accelerate",
    "transformers.md": "transformers.trainer",
}
BLOCK = re.compile(
    r"^<!-- (?P<said>run\n|python no-run:)(?P<comment>.*?)-->$"
    r"|^ *```(?P<language>\S*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)
PUBLIC = (
    "gradtide",
    "gradtide.collectives",
    "gradtide.fusion",
    "gradtide.kfac",
    "gradtide.selectors",
)


class Block(NamedTuple):
    line: int  # of the page
    language: str
    code: str


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """Fenced blocks and hidden code, in order, without the blocks that are excused."""
    text, excused = page.read_text(encoding="utf-8"), False
    for found in BLOCK.finditer(text):
        if found["said"] == "python no-run:":
            assert found["comment"].strip(), f"{name(page)}: no-run without a reason"
            excused = True
            continue
        hidden = found["said"] is not None
        code = found["comment"] if hidden else found["code"]
        start = found.start("comment" if hidden else "code")
        language = "python" if hidden else found["language"]
        if hidden or language != "python" or not excused:
            yield Block(text.count("\n", 0, start), language, code)
        excused = excused and language != "python"


def python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


# - Python -----------------------------------------------------------------------------


def new() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer, the same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def begin() -> dict[str, Any]:
    """What pages may use without having defined it. The process group is there."""
    rng = torch.Generator().manual_seed(dist.get_rank())
    loader = [
        (torch.randn(16, 8, generator=rng), torch.randint(4, (16,), generator=rng))
        for _ in range(8)
    ]
    model, optimizer = new()
    return {
        "__name__": "__docs__",
        "torch": torch,
        "nn": nn,
        "F": F,
        "dist": dist,
        "gradtide": gradtide,
        "new": new,
        "Net": lambda: new()[0],
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "loss_fn": F.cross_entropy,
    }


def run(page: Path, folder: Path) -> None:
    """Run a page on this rank, in a folder of its own, in the group that is there."""
    os.chdir(folder)
    destroy = dist.destroy_process_group
    dist.init_process_group = lambda *_, **__: None
    dist.destroy_process_group = lambda group=None: group and destroy(group)
    names = begin()
    for line, _, code in python(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.product(each=12)
@pytest.mark.parametrize("page", [p for p in PAGES if python(p)], ids=name)
def test_code_runs(page: Path, tmp_path: Path) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    run_ranks(2, run, page, tmp_path)


def test_a_page_that_is_wrong_fails_in_its_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Wrong\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md\", line 5"):
        run_ranks(2, run, page, tmp_path)


# - Commands ---------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every line of the page's shell blocks."""
    for block in blocks(page):
        if block.language in ("sh", "console"):
            for line in block.code.replace("\\\n", " ").splitlines():
                if words := shlex.split(line.removeprefix("$ "), comments=True):
                    yield words


def check_command(words: list[str]) -> None:
    """AssertionError for a command, an option or a file that is not there."""
    for word in words:
        if re.fullmatch(r"(examples|benchmarks|tests)/\S+", word):
            assert (ROOT / word).exists(), f"{word} is not there"
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1] in targets, f"make has no {words[1]}"
    if words[0] == "gradtide":
        _check_options(words[1:])
    elif "gradtide" in words:
        _check_options(words[words.index("gradtide") + 1 :])


def _check_options(words: list[str]) -> None:
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    own = list(takewhile(lambda word: word != "--", words))
    used = {word.split("=")[0] for word in own if word.startswith("--")}
    assert used <= known, f"{command.name} has no {used - known}"
    needed = {p.opts[0] for p in command.params if p.required}
    missing = {option for option in needed if option.startswith("--")} - used
    assert not missing or "..." in words, f"{command.name} needs {missing}"


@pytest.mark.parametrize("page", [p for p in PAGES if any(commands(p))], ids=name)
def test_commands_are_known(page: Path) -> None:
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize(
    "line",
    [
        "gradtide plann --trace x",
        "gradtide plan --trace x --rnks 3",
        "gradtide compare --schemes ddp",
        "torchrun -m gradtide lab prove --hosts 4",
        "make demos",
        "python examples/train.py",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises(AssertionError):
        check_command(line.split())


# - Texts ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    """Or it would be neither run nor parsed."""
    known = {"python", "sh", "console", "diff", "text"}
    assert {block.language for block in blocks(page)} <= known
    assert not re.search(r"^    (gradtide|torchrun|make) ", page.read_text(), re.M)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text())
    for link in links:
        assert (page.parent / link).exists(), f"{name(page)} links to {link}"


def test_readme_is_short_and_says_first_what_is_not_proven() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 135  # two screens, and where to go from there
    unproven, offered = (
        text.index("## What is not proven yet"),
        text.index("## One import"),
    )
    assert unproven < offered
    table = text[text.index("| recipe |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 5
    for row in table:
        gradtide.scheme.parse(re.findall(r"`([^`]+)`", row)[0])


def test_the_page_on_schemes_has_at_most_twelve_recipes() -> None:
    text = (ROOT / "docs/schemes.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(\w+)[`(]", text)) & set(gradtide.scheme.RECIPES)
    assert {"dear", "oktopk", "pad_kfac"} <= named
    assert len(named) <= 12
    apart = (ROOT / "docs/reference/yardsticks.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in apart for name in set(gradtide.scheme.RECIPES) - named)


def schemes(page: Path) -> set[str]:
    """Calls of recipes that a page writes in code, in text and in blocks."""
    text = re.sub(
        r"^```(python|diff)\n.*?^```$", "", page.read_text(), flags=re.M | re.S
    )
    names = "|".join(gradtide.scheme.RECIPES)
    return set(re.findall(rf"(?<![\w.\"'])((?:{names})\([^()`]*\))", text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_schemes_are_spelled_as_the_code_has_them(page: Path) -> None:
    for text in sorted(schemes(page)):
        if "..." not in text:
            gradtide.scheme.parse(text)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=name)
def test_examples_can_be_copied(path: Path) -> None:
    """They need what a user has: the library, and no tools of ours."""
    found = {each.split(".")[1] for each in imports(path) if "gradtide." in each}
    assert found <= {"integrations"}, f"{name(path)} imports from {found}"


# - Reference --------------------------------------------------------------------------


def resolve(path: str) -> object:
    """What a dotted path stands for."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("gradtide"):
                return None  # it needs an optional package, which is missing
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"nothing is called {path}")


def documented() -> list[object]:
    paths = [
        path
        for page in REFERENCE
        for path in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]
    return [resolve(path) for path in paths]


def public(package: str) -> Iterator[tuple[str, object]]:
    """What a package offers; of those below gradtide, classes and functions alone."""
    module = importlib.import_module(package)
    for each in getattr(module, "__all__", vars(module)):
        value = getattr(module, each)
        made = inspect.isclass(value) or inspect.isroutine(value)
        data = package == "gradtide" and not inspect.ismodule(value)
        if not each.startswith("_") and (made or data):
            yield each, value


@pytest.mark.parametrize("package", PUBLIC)
def test_reference_and_changelog_have_every_public_name(package: str) -> None:
    there, changes = documented(), (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for each, value in public(package):
        known = any(value is one for one in there)
        assert known, f"{package}.{each} is not in docs/reference"
        assert re.search(rf"\b{each}\b", changes), f"{each} is not in CHANGELOG.md"


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f": {page.relative_to(ROOT / 'docs')}\n" in nav, f"{name(page)}"
