"""The README's code is the repository's code, and runs."""

import inspect
import re
import textwrap
from pathlib import Path

import scheduler
from conftest import alone, tiny_model
from engine import Engine
from sampling import SamplingParams
from test_scheduler import simulate

TEXT = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
ALGORITHM_3, NEW_POLICY, USAGE = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_algorithm_3_is_quoted_as_it_stands():
    assert ALGORITHM_3 == textwrap.dedent(inspect.getsource(scheduler.SarathiServe.schedule))


def test_a_policy_can_be_added_as_described(monkeypatch):
    monkeypatch.setattr(scheduler, "POLICIES", dict(scheduler.POLICIES))
    exec(NEW_POLICY, dict(vars(scheduler)))
    assert simulate("eager", [(20, 3), (12, 1)], chunk=8, max_batch=1) == [{0: 20}, {0: "d"}, {0: "d"}, {1: 12}]
    assert simulate("eager", [(20, 4), (50, 1)], chunk=8) == [{0: 20, 1: 44}, {0: "d", 1: 6}, {0: "d"}, {0: "d"}]
    model, prompts = tiny_model(), [[1] * 9, [2], [3, 4, 5]]
    done = Engine(model, "eager", 4, 2, 32).generate(prompts, SamplingParams(max_new_tokens=5))
    assert [c.tokens for c in done] == [alone(model, prompt, SamplingParams(5)) for prompt in prompts]


def test_the_usage_runs(capsys):
    exec(USAGE.replace("llama-160m", "llama-tiny"), {})
    lines = capsys.readouterr().out.splitlines()
    assert "length" in lines[0] and len(lines) == 5
    assert [line.split()[0] for line in lines[1:]] == ["2"] * 4


def test_every_imported_file_is_named_in_the_reading_order():
    here = Path(__file__).parent
    imports = re.compile(r"^\s*(?:import|from) (\w+)", flags=re.MULTILINE)
    todo, seen = ["bench", "sample"], set()
    while todo:
        name = todo.pop()
        if name not in seen and (here / f"{name}.py").exists():
            seen.add(name)
            todo += imports.findall((here / f"{name}.py").read_text(encoding="utf-8"))
    assert {"kv_cache", "plot", "checkpoint"} < seen
    for name in seen:
        assert f"`{name}.py`" in TEXT
