"""Wrong invocations are answered by a sentence, before anything is measured."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from typer import Exit
from typer.testing import CliRunner

from gradtide.cli import app
from gradtide.lab import launch
from gradtide.lab.checks import check_file, check_folder
from gradtide.lab.cluster import LabError
from gradtide.lab.options import told
from gradtide.planner import network as networks
from gradtide.planner import search
from gradtide.planner.network import Network
from gradtide.planner.trace import StepTrace, Unit
from gradtide.profile.selection import run as selection_run
from gradtide.profile.trace import run as trace_run
from gradtide.simulate import grid

MISSING = "/nowhere/at/all"
SUBJECTS = """
import torch

def boom():
    raise ArithmeticError("no such luck\\nat all")

def pair():
    return 1, 2

number = 5
"""
COMPARE = (
    "compare --schemes dear --workload mlp --hosts 2 --rate none --steps 3 --out out"
)
RACE = "race --schemes dear --hosts 2 --rate none --seconds 3 --out out"
PLAN = "plan --trace replay:resnet50 --rate 10gbit --ranks 4 --schemes topk"
SIMULATE = "simulate --trace replay:resnet50 --out out --ranks 4"
NETWORK = "profile network --hosts 2 --rate none"
SELECTION = "profile selection --quick"
RUN = "lab run --hosts 2 --rate none"


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What measures or starts something fails, and is no refusal."""

    def begins(*args: object, **options: object) -> NoReturn:
        raise AssertionError("it was begun")

    for module, name in (
        (launch, "networks"),
        (search, "simulate"),
        (grid, "simulate"),
        (selection_run, "measure"),
        (trace_run, "trace"),
        (dist, "init_process_group"),
    ):
        monkeypatch.setattr(module, name, begins)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    numbers = (signal.SIGTERM, signal.SIGHUP)  # which commands of the lab handle
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def refused(words: str | list[str], *said: str) -> None:
    """The command says one sentence, with a status that tells of an error."""
    asked = words.split() if isinstance(words, str) else words
    result = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code != 0
    lines = [line for line in result.output.splitlines() if line.strip()]
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")
    for word in said:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        # what is compared
        (f"{COMPARE} --schemes nonsense", "'nonsense' is no"),
        (f"{COMPARE} --schemes topk(2)", "topk(2)"),
        (f"{COMPARE} --workload imagenet", "no workload 'imagenet'"),
        (f"{COMPARE} --rate 0", "'0' is not a rate"),
        (f"{COMPARE} --rate 0mbit", "'0mbit' is not a rate"),
        (f"{COMPARE} --rate -5mbit", "'-5mbit' is not a rate"),
        (f"{COMPARE} --rate abc", "'abc' is not a rate"),
        (f"{COMPARE} --rate {'9' * 400}gbit", "is not a rate"),
        (f"{COMPARE} --rate 1bit", "choose 100kbit to 100gbit"),
        (f"{COMPARE} --hosts 0", "choose 1 to 250"),
        (f"{COMPARE} --ranks-per-host 0", "choose 1 to 250"),
        (f"{COMPARE} --ranks-per-host 1000000", "choose 1 to 250"),
        (f"{COMPARE} --steps 0", "--steps 0"),
        (f"{COMPARE} --rounds 0", "--rounds 0"),
        (f"{COMPARE} --warmup 0", "--warmup 0"),
        (f"{COMPARE} --seed -1", "--seed -1"),
        (f"{COMPARE} --seed {2**32}", "give 0 to 4294967295"),
        (f"{COMPARE} --step-ms 5", "really computes"),
        (f"{COMPARE} --workload replay:gpt2 --step-ms nan", "milliseconds"),
        (f"{COMPARE} --workload replay:gpt2 --trace {MISSING}", "cannot read"),
        (f"{COMPARE} --out /dev/null/x", "cannot be written"),
        (f"{COMPARE} --out /proc/x", "cannot be written"),
        # what races
        (f"{RACE} --schemes nonsense", "'nonsense' is no"),
        (f"{RACE} --schemes dear,dear", "names dear twice"),
        (f"{RACE} --workload imagenet", "no workload 'imagenet'"),
        (f"{RACE} --workload replay:gpt2", "a replay learns nothing"),
        (f"{RACE} --hosts 1", "nobody to average with"),
        (f"{RACE} --seconds 0", "a number above 0"),
        (f"{RACE} --seconds nan", "a number above 0"),
        (f"{RACE} --every 0", "1 or more steps"),
        (f"{RACE} --seed -1", "--seed -1"),
        (f"{RACE} --out /proc/x", "cannot be written"),
        (f"{RACE} --target wfbp", "name one of --schemes"),
        (f"{RACE} -- train.py", "there is no file train.py"),
        (f"{RACE} -- no-such-program", "there is no program no-such-program"),
        ("pilot -- train.py", "there is no file train.py"),
        # what is planned and simulated
        (f"{PLAN} --margin -1", "0 or more"),
        (f"{PLAN} --margin nan", "0 or more"),
        (f"{PLAN} --margin inf", "0 or more"),
        (f"{PLAN} --ranks 999999999", "at most 131072"),
        (f"{PLAN} --ranks 1", "nobody to average with"),
        (f"{PLAN} --ranks -4", "nobody to average with"),
        (f"{SIMULATE} --ranks 4,\uff18", "write numbers with commas between"),
        (f"{PLAN} --ranks-per-host 0", "1 or more"),
        (f"{PLAN} --ranks-per-host -2", "1 or more"),
        (f"{PLAN} --ranks-per-host 3", "choose a multiple"),
        (f"{PLAN} --rate none", "without a limit"),
        (f"{PLAN} --schemes nonsense", "nonsense"),
        (f"{PLAN} --json {MISSING}/plan.json", "cannot be written"),
        (f"{PLAN} --json /proc/plan.json", "cannot be written"),
        (f"{PLAN} --json .", "it is a folder"),
        (f"{PLAN} --trace {MISSING}", "cannot read the trace"),
        (f"{PLAN} --trace replay:abacus", "no workload 'replay:abacus'"),
        (f"{PLAN} --step-ms 0", "milliseconds"),
        (f"{PLAN} --network {MISSING}", "cannot read the network"),
        ("plan --trace replay:resnet50", "say for which network"),
        (f"{SIMULATE} --ranks 999999999", "2 to 131072"),
        (f"{SIMULATE} --ranks many", "write numbers"),
        (f"{SIMULATE} --rates none", "without a limit"),
        (f"{SIMULATE} --network {'n' * 5000}", "is not a rate"),
        (f"{SIMULATE} --ranks-per-host 0", "1 or more"),
        (f"{SIMULATE} --out /dev/null/x", "cannot be written"),
        # what is measured
        (f"{SELECTION} --sizes inf", "not finite"),
        (f"{SELECTION} --sizes nan", "not finite"),
        (f"{SELECTION.replace(' --quick', '')} --sizes 1e308", "up to 1e15"),
        (f"{SELECTION} --sizes -5", "1 or more each"),
        (f"{SELECTION} --densities .1,nan", "not finite"),
        (f"{SELECTION} --threads 1000000000", "at most 1024"),
        (f"{SELECTION} --device meta", "no such device"),
        (f"{SELECTION} --device abacus", "Use cpu"),
        (f"{SELECTION} --out /proc/x", "cannot be written"),
        (f"{NETWORK} --seconds nan", "above 0"),
        (f"{NETWORK} --seconds inf", "at most a day's"),
        (f"{NETWORK} --hosts 0", "2 or more"),
        (f"{NETWORK} --out {MISSING}/network.json", "cannot be written"),
        (f"{NETWORK} --chart chart.doc", "end it in .png"),
        (f"{NETWORK} --chart {MISSING}/chart.png", "--chart"),
        ("profile network", "start this command with torchrun"),
        ("profile trace nonsense", "no workload"),
        ("profile trace replay:abacus", "no workload"),
        ("profile trace mlp --steps 0", "time 1 or more"),
        ("profile trace mlp --ranks 0", "at least 1"),
        ("profile trace mlp --ranks 1000", "choose 1 to 250"),
        ("profile trace mlp --rows -1", "0 or more"),
        ("profile trace mlp --threads 100000000", "at most 1024"),
        ("profile trace mlp --batch-size 0", "1 or more"),
        (f"profile trace mlp --out {MISSING}/trace.json", "cannot be written"),
        # what is run
        (f"{RUN} -- no-such-command-here", "is no command"),
        ("lab run --hosts 0 --rate none -- true", "choose 1 to 250"),
        ("lab run --hosts 2 --rate abc -- true", "is not a rate"),
        (f"{RUN} --mtu 1 -- true", "choose 1280"),
        (f"{RUN} --timeout nan -- true", "above 0"),
        (f"{RUN} --timeout -1 -- true", "above 0"),
        (
            f"{RUN} --delay 40ms -- true",
            "--delay needs links with a limit: give --rate",
        ),
        (
            "lab run --hosts 2 --rate 1gbit --delay 40 -- true",
            "--delay '40' is no time",
        ),
        ("lab run --hosts 2 --rate 1gbit --loss 5 -- true", "--loss '5' is no share"),
        ("lab run --hosts 2 --rate 1gbit --jitter 1ms -- true", "at most the delay"),
        ("lab run --hosts 2 --rate 1gbit --up none -- true", "--up none: a link has"),
        ("lab run --hosts 2 --rate 1gbit --up 1bit -- true", "choose 100kbit"),
        ("lab run -- true", "say which hosts: --hosts 4 --rate 100mbit"),
        ("lab run --internet none -- true", "--internet none: no such file"),
        ("lab run --internet home --rate 1gbit -- true", "leave out --rate"),
        ("lab run --internet home --up 1mbit -- true", "leave out --up"),
        (
            "lab probe --internet home --hosts 3",
            "home has 4 hosts: leave out --hosts 3",
        ),
        (f"{RUN} --events x -- true", "--events needs links with a limit"),
        (
            "lab run --hosts 2 --rate 1gbit --events /nowhere -- true",
            "--events /nowhere: no such file",
        ),
        (f"{PLAN} --delay 40", "--delay '40' is no time"),
        (f"{PLAN} --internet home", "leave out --rate and --ranks"),
        (f"{SIMULATE} --delay soon", "--delay 'soon' is no time"),
        (f"{COMPARE} --delay 40ms", "--delay needs links with a limit"),
        (f"{RACE} --loss 1%", "--loss needs links with a limit"),
        (f"{NETWORK} --jitter 1ms", "--jitter needs links with a limit"),
        ("lab probe --hosts 1 --rate none", "nobody to talk to"),
        ("lab probe --hosts 2 --rate none --seconds nan", "choose 0.1 to 60"),
    ],
)
def test_refused(words: str, said: str) -> None:
    refused(words, said)
    assert not os.listdir()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
@pytest.mark.parametrize("words", [SELECTION, NETWORK, COMPARE, RACE])
def test_an_accelerator_that_is_not_there(words: str) -> None:
    refused(f"{words} --device cuda", "--device cuda")


@pytest.mark.product
@pytest.mark.parametrize("ranks", ["", " --ranks 2"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("missing_module:build", "there is no module missing_module"),
        ("subjects:missing", "no function 'missing'"),
        ("subjects:number", "no function 'number'"),
        ("broken:build", "SyntaxError"),
        ("leaves:build", "SystemExit: 3"),
        ("needs:build", "ModuleNotFoundError: No module named 'missing_module'"),
        (":build", "ValueError: Empty module name"),
    ],
)
def test_a_model_that_cannot_be_had(words: str, said: str, ranks: str) -> None:
    Path("subjects.py").write_text(SUBJECTS)
    Path("broken.py").write_text("def build(:")
    Path("leaves.py").write_text("raise SystemExit(3)")
    Path("needs.py").write_text("import missing_module")
    refused(f"profile trace {words}{ranks}", said)
    for name in ("subjects", "broken", "leaves", "needs"):
        sys.modules.pop(name, None)


def test_a_factory_that_raises() -> None:
    Path("subjects.py").write_text(SUBJECTS)
    refused("profile trace subjects:boom", "raised ArithmeticError: no such luck:")
    refused("profile trace subjects:pair", "returned a tuple")
    sys.modules.pop("subjects", None)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "0"}, "RANK is set, but not WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "do not fit together"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"},
            "do not fit together",
        ),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        "compare --schemes dear --workload mlp --out out",
        "profile network",
        "profile trace mlp",
    ],
)
def test_half_of_torchrun(
    words: str,
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if len(environment) > 1:
        environment = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused(words, said)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("psutil", COMPARE),
        ("matplotlib", COMPARE),
        ("sklearn", COMPARE.replace("mlp", "digits")),
        ("psutil", SELECTION),
        ("matplotlib", f"{SELECTION} --out out"),
        ("matplotlib", f"{NETWORK} --chart chart.png"),
        ("matplotlib", SIMULATE),
        ("sklearn", "profile trace digits"),
        ("sklearn", "profile trace digits --ranks 2"),
    ],
)
def test_a_package_of_an_extra_is_missing(
    package: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    refused(words, f"this needs {package}: pip install 'gradtide[lab]'")


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_line_itself_is_an_extra(package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from gradtide.__main__ import main
main()"""
    words = [sys.executable, "-c", program, "schemes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    said = f"error: this needs {package}: pip install 'gradtide[cli]'\n"
    assert (done.stdout, done.stderr) == ("", said)


# - Files ------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def trace(change: Change = lambda found: None) -> Path:
    """A trace of two units with something changed."""
    path = Path("trace.json")
    unit = Unit("a", 6, 4, 0.1, 0.1, 0.1, (2, 3))
    StepTrace("two", (unit, Unit("b", 6, 4, 0.1, 0.1, 0.1)), 0.2).save(path)
    return changed(path, change)


def network(change: Change = lambda found: None) -> Path:
    """A network's profile with something changed."""
    path = Path("network.json")
    Network.ideal(4, 1, 1e9).save(path)
    return changed(path, change)


def changed(path: Path, change: Change) -> Path:
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def put(value: Any, *keys: str | int) -> Change:
    """A change: another value at a place."""

    def change(found: Any) -> None:
        for key in keys[:-1]:
            found = found[key]
        found[keys[-1]] = value

    return change


def timeless(found: dict[str, Any]) -> None:
    for unit in found["units"]:
        unit["forward"] = unit["backward"] = 0


HUGE = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put([[]], "units"), "expected an object"),
        (put({}, "units"), "units is no list"),
        (put([], "units"), "without units"),
        (put(HUGE, "units", 0, "numel"), "numel is"),
        (put(1 << 62, "units", 0, "numel"), "expected a count"),
        (put(3, "units", 0, "itemsize"), "itemsize is 3"),
        (put([-2, -3], "units", 0, "shape"), "shape is"),
        (put(HUGE, "units", 0, "forward"), "forward is"),
        (put(math.nan, "units", 0, "backward"), "backward is nan"),
        (put(math.inf, "optimizer"), "optimizer is inf"),
        (put([0, 0], "forward_order"), "every index"),
        (put([0, HUGE], "forward_order"), "every index"),
        (put("no", "forward_order"), "no list of indices"),
        (put([5], "layers"), "expected an object"),
        (timeless, "takes no time"),
    ],
)
def test_absurd_traces(change: Change, said: str) -> None:
    refused(f"{PLAN} --trace {trace(change)}", said)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(HUGE, "hosts"), "hosts is"),
        (put(10**9, "hosts"), "at most 131072"),
        (put(2.5, "hosts"), "expected a whole number"),
        (put("four", "hosts"), "expected a whole number"),
        (put(-1, "hosts"), "1 or more"),
        (put(HUGE, "inter", "ring", "alpha"), "alpha is"),
        (put(-1, "inter", "ring", "alpha"), "expected seconds"),
        (put(1e300, "inter", "ring", "beta"), "beta is"),
        (put([], "inter"), "damaged"),
        (put(None, "inter", "ring"), "damaged"),
        (put({"Dense": "slow"}, "device", "overhead"), "expected a number"),
        (put({"Dense": -1}, "device", "overhead"), "a factor"),
        (put(5, "device", "select"), "damaged"),
        (put("fast", "rate"), "expected a number"),
        (put(-1, "rate"), "above 0"),
        (put("few", "one_hop_ranks"), "expected a whole number"),
        (put(None, "interference"), "expected a number"),
    ],
)
def test_absurd_networks(change: Change, said: str) -> None:
    path = network(change)
    refused(f"plan --trace replay:resnet50 --network {path}", said)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 50 + "]" * 50])
def test_nested_files(text: str) -> None:
    path = Path("nested.json")
    path.write_text(text)
    said = "nested deeper" if text.endswith("]") else "nested.json is"
    refused(f"{PLAN} --trace {path}", said)
    refused(f"{PLAN} --network {path}", said)
    refused(f"{SIMULATE} --network {path}", said)
    refused(f"{COMPARE} --workload replay:gpt2 --trace {path}", said)


@pytest.mark.parametrize("text", ["3", '"x"', "null", "[]", "{}"])
def test_files_without_a_format(text: str) -> None:
    Path("other.json").write_text(text)
    refused(f"{PLAN} --trace other.json", "is no gradtide step trace")
    refused(f"{PLAN} --network other.json", "is no gradtide network profile")
    refused(f"{COMPARE} --workload replay:gpt2 --trace other.json", "other.json")


def test_a_file_of_another_kind() -> None:
    refused(f"{PLAN} --trace {network()}", "is no gradtide step trace")
    refused(f"{PLAN} --network {trace()}", "is no gradtide network profile")
    refused(f"{SIMULATE} --trace {network()}", "is no gradtide step trace")
    refused(f"{SIMULATE} --network {trace()}", "is no gradtide network profile")
    refused(f"{COMPARE} --workload replay:gpt2 --trace {trace()}", "holds a dict")
    Path("binary.json").write_bytes(bytes(range(256)))
    refused(f"{PLAN} --trace binary.json", "is not JSON")


def test_the_files_that_were_changed_are_good() -> None:
    assert networks.load(network()) == Network.ideal(4, 1, 1e9)
    with pytest.raises(AssertionError, match="it was begun"):
        refused(f"{PLAN} --trace {trace()} --network {network()}")


# - What is left -----------------------------------------------------------------------

NAPPING = """
import os, sys, time
from pathlib import Path
from gradtide.lab.checks import check_file, check_folder
from gradtide.lab.cluster import LabError
from gradtide.lab.options import told
from gradtide.lab.cluster import Cluster
from gradtide.lab.job import on_every_rank

if __name__ == "__main__":
    on_every_rank(Cluster(1), time.sleep, 6000)
"""


def test_looking_whether_something_can_be_written_leaves_nothing(
    tmp_path: Path,
) -> None:
    check_file("--out", tmp_path / "x.json")
    check_folder("--out", tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.json").write_text("mine")
    check_file("--out", tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == "mine"


@pytest.mark.alone
def test_a_killed_launcher_leaves_no_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", NAPPING], env=environment) as launcher:
        wait_until(lambda: bool(list(tmp_path.glob("gradtide-*/asked"))))
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(20)
    wait_until(lambda: not list(tmp_path.glob("gradtide-*")))


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("no such rate"), 2), (LabError("it ended"), 1)]
)
def test_what_the_user_can_put_right_has_a_code_of_its_own(
    error: Exception, code: int
) -> None:
    with pytest.raises(Exit) as ended, told():
        raise error
    assert ended.value.exit_code == code
