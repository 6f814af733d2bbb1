"""What all tests share: one thread, and the models. The helpers are in tests/helpers.py."""

import gc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.helpers import tiny_model

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other, and others
settings.load_profile("ci")  # the same examples for everybody, no deadline, and no database
set_hypothesis_home_dir(Path(__file__).with_name(".pytest_cache") / "hypothesis")

KINDS = {
    "gpt2": dict(family="gpt2"),
    "llama": dict(n_kv_head=4),
    "qwen3": dict(n_kv_head=2, qk_norm=True, norm_eps=0.1),  # an eps that shows
    "multi-query": dict(n_kv_head=1),
}


@pytest.fixture(scope="session", params=KINDS)
def model(request):
    """Both families, with plain, grouped and shared KV heads, in float64."""
    return tiny_model(**KINDS[request.param])


@pytest.fixture(autouse=True)
def no_collection_before_a_run(monkeypatch):
    """run.serve looks for garbage first: half a second each time, in all that tests have made."""
    collector = SimpleNamespace(collect=lambda: 0, freeze=gc.freeze, unfreeze=gc.unfreeze)
    monkeypatch.setattr("lab.measure.load_run.gc", collector)


def pytest_collection_modifyitems(config, items):
    """What takes long comes first. What needs CUDA is no test elsewhere, see tests/README.md."""
    items.sort(key=lambda item: item.path.name != "test_ranks.py")
    unavailable = set()
    if torch.version.cuda is None:
        unavailable.add("cuda_build")
    if not torch.cuda.is_available():
        unavailable.add("cuda_device")
    elsewhere = [
        item for item in items if unavailable & {mark.name for mark in item.iter_markers()}
    ]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in elsewhere]


def pytest_terminal_summary(terminalreporter):
    """Say what was skipped: only what needs a browser is."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")
