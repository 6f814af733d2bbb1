"""Whatever the files of a checkpoint hold: it loads and computes, or one line names the file.

NANOSARATHI_WRONG_VALUES=2000 breaks 1,000 checkpoints at random, 100 by default."""

import json
import math
import os
import random
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from kv_cache import KVCache
from model import GPT
from pretrained import checkpoints
from pretrained.tokenizers import load_chat, load_tokenizer
from request import lone_chunk
from tests.helpers import run
from tests.test_checkpoints import LLAMA_3, edit, llama_like
from tests.test_tokenizers import sentencepiece_directory

CASES = int(os.environ.get("NANOSARATHI_WRONG_VALUES", "200")) // 2
LIMIT_KB = 2**20  # by which the memory of the process may grow
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{{ eos_token }}"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
FILES = [*JSON_FILES, WEIGHTS, "chat_template.jinja"]
DEEP = "[" * 90_000
CONTENTS = [
    *("", "null", "[]", "{}", "5", '"x"', "{", "\xff", "\x00", "NaN", DEEP, '{"a": ' + DEEP),
    *("9" * 5000, '{"chat_template": "{% if %}"}', "{{ 1 / 0 }}", "{% for %}"),
]
VALUES = [
    *(None, True, 0, -1, 2, 7, 10**9, 10**18, 10**400, 0.5, 1e-320, math.nan, math.inf),
    *("", "x", "é\n", "{% if %}", "{{ [] + 1 }}", "gpt2", "a" * 999),
    *([], [[]], [None], {}, {"x": 1}, {"content": 5}, {"rope_type": "yarn"}),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a small checkpoint with all files that are read."""
    directory = tmp_path_factory.mktemp("whole")
    config = llama_like(**LLAMA_3)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    sentencepiece_directory(directory)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = {
        "generation_config.json": {"eos_token_id": [2, 3]},
        "tokenizer_config.json": {"chat_template": TEMPLATE, "model_max_length": 64, **tokens},
        INDEX: {"weight_map": dict.fromkeys(model.state_dict(), "/etc/passwd")},  # never read
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def load_all(directory):
    """Load all of a checkpoint, and use it: its logits are numbers, its text is text."""
    model = GPT.from_pretrained(directory)
    cache = KVCache(model.config, pages=1, page_size=1)
    assert run(model, cache, [lone_chunk([0], 0, [0])]).isfinite().all()
    tokenizer = load_tokenizer(directory)
    assert isinstance(tokenizer.decode(tokenizer.encode("hello")), str)
    assert isinstance(load_chat(directory)(MESSAGES), str)


def check(directory):
    """Assert that a checkpoint loads, or that one line says which file is wrong. Returns it."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = ""
    try:
        load_all(directory)
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
        assert message.startswith(str(directory)), message
        assert message.isprintable() and len(message) < 1000, message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < LIMIT_KB
    return message


def places(content):
    """All (container, key) in a JSON value."""
    keys = list(content) if isinstance(content, dict) else []
    if isinstance(content, list):
        keys = range(len(content))
    for key in keys:
        yield content, key
        yield from places(content[key])


def change_json(path, rng):
    """Give one place in a JSON file another value, or none."""
    content = json.loads(path.read_text())
    container, key = rng.choice(list(places(content))[:400])
    if rng.random() < 0.2:
        del container[key]
    else:
        container[key] = rng.choice(VALUES)
    path.write_text(json.dumps(content))


def change_bytes(path, rng):
    """Cut a file short, or change a byte of its first 2,000."""
    data = bytearray(path.read_bytes())
    if rng.random() < 0.5:
        data = data[: rng.randrange(len(data))]
    else:
        data[rng.randrange(min(len(data), 2000))] = rng.randrange(256)
    path.write_bytes(data)


def change_content(path, rng):
    """Replace all of a file."""
    path.write_text(rng.choice(CONTENTS), "latin-1")


def break_at_random(directory, rng):
    """Change one of the files. Returns how."""
    path = directory / rng.choice(FILES)
    if not path.exists():
        path.write_text(TEMPLATE)
    changes = [change_bytes, change_content]
    if path.name in JSON_FILES:
        changes += [change_json] * 3
    change = rng.choice(changes)
    change(path, rng)
    return f"{change.__name__} of {path.name}"


@pytest.fixture
def copy(whole, tmp_path):
    """A function that makes a copy of the checkpoint, which may be broken."""

    def copy(number=0):
        directory = tmp_path / f"{number}"
        shutil.copytree(whole, directory)
        return directory

    return copy


def test_the_whole_checkpoint_loads(whole):
    assert check(whole) == ""


@pytest.mark.parametrize("seed", range(10))
def test_a_checkpoint_that_is_broken_at_random_ends_in_one_line(copy, seed):
    refused = 0
    for number in range(-(-CASES // 10)):
        rng = random.Random(f"{seed}/{number}")
        directory = copy(number)
        change = break_at_random(directory, rng)
        try:
            refused += check(directory) != ""
        except BaseException as error:
            error.add_note(f"after {change}, seed {seed}/{number}")
            raise
        shutil.rmtree(directory)
    assert refused > 0


def put(**changes):
    """A change of a JSON object: these values."""
    return lambda content: content.update(changes)


NO_DEFAULT = [{"name": "tool_use", "template": "x"}]
EDITS = [
    ("config.json", put(max_position_embeddings=2**24, head_dim=2**14), "do not fit"),
    *(
        ("tokenizer_config.json", put(**{name: value}), message)
        for name, value, message in [
            ("bos_token", 5, "bos_token"),
            ("eos_token", ["</s>"], "eos_token"),
            ("chat_template", 5, "chat_template=5: must be text"),
            ("chat_template", NO_DEFAULT, "chat template: ValueError: .*default"),
            ("chat_template", "{% if %}", "chat template: TemplateSyntaxError"),
            ("chat_template", "{{ [] + 1 }}", "chat template: TypeError"),
        ]
    ),
]


@pytest.mark.parametrize("name, change, message", EDITS)
def test_a_value_that_makes_no_sense_is_named_with_its_file(copy, name, change, message):
    directory = copy()
    edit(directory / name, change)
    assert re.search(message, check(directory))


@pytest.mark.parametrize("content", ["null", "[]", DEEP, "", "\xff"])
@pytest.mark.parametrize("name", JSON_FILES)
def test_json_that_is_something_else_is_named(copy, name, content):
    directory = copy()
    (directory / name).write_text(content, "latin-1")
    assert check(directory).startswith(f"{directory / name}: ")


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_json_file_that_is_not_there_is_named_if_it_is_needed(copy, name):
    directory = copy()
    (directory / name).unlink()
    assert (name in check(directory)) == (name in ("config.json", "tokenizer.json"))


def test_a_json_file_that_is_too_long_is_refused_before_it_is_read(copy, monkeypatch):
    monkeypatch.setattr("pretrained.schema.MAX_JSON_BYTES", 100)
    directory = copy()
    path = directory / "config.json"
    assert check(directory) == f"{path}: has {path.stat().st_size} bytes, must have at most 100"


ENDLESS = dict(direction="Right", pad_id=0, pad_type_id=0, pad_token="<unk>")
ENDLESS |= dict(strategy={"Fixed": 10**9}, pad_to_multiple_of=None)
CUT = dict(direction="Right", max_length=1, strategy="LongestFirst", stride=0)
LONG_PREFIX = {"type": "Prepend", "prepend": "a" * 100_000}


@pytest.mark.parametrize(
    "change, message",
    [
        (put(padding=ENDLESS), ""),
        (put(truncation=CUT), ""),
        (put(normalizer=LONG_PREFIX), "tokenizer.json: not a tokenizer: .*10,000 characters"),
    ],
)
def test_a_tokenizer_fills_up_and_cuts_nothing(copy, change, message):
    directory = copy()
    edit(directory / "tokenizer.json", change)
    assert re.search(message, check(directory))
    if not message:
        assert len(load_tokenizer(directory).encode("hello hello hello")) == 4


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}"
BOMBS = {  # templates that would take gigabytes, or hours
    "{{ 'a' * 10**9 }}": "OverflowError",
    "{{ 1000000000 * 'a' }}": "OverflowError",
    "{% set x = 'a' * 1000 %}{{ x * 1000000 }}": "OverflowError",
    "{{ messages * 1000000 | int }}": "OverflowError",
    "{{ 10 ** (10 ** 8) }}": "OverflowError",
    "{{ 'a' | center(1000000000) }}": "OverflowError",
    "{{ 'a' | indent(width=1000000000) }}": "OverflowError",
    "{{ 'a'.ljust(1000000000) }}": "OverflowError",
    "{% for i in range(20_000) %}" + 1000 * "a" + "{% endfor %}": "OverflowError: its text",
    LOOPS + "aaaaaaaaaa{% endfor %}{% endfor %}": "OverflowError|TimeoutError",
    LOOPS + "{% endfor %}{% endfor %}": "TimeoutError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
}


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_that_takes_too_long_is_refused(copy, template, monkeypatch):
    error = BOMBS[template]
    if "TimeoutError" in error:
        monkeypatch.setattr("pretrained.chat.RENDER_S", 0.5)
    directory = copy()
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"^{directory}: chat template: ({error})"):
        load_chat(directory)


def test_the_limits_of_a_template_are_for_no_one_else(copy):
    directory = copy()
    text = "{{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 'a' | center(3) }}"
    text += "{{ '%d' | format(10**9) }} {{ 'a'.ljust(3) }}{{ (10**9) | tojson }}"
    (directory / "chat_template.jinja").write_text(text)
    assert load_chat(directory)(MESSAGES) == "ababab 1024 3  a 1000000000 a  1000000000"
    inner = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert inner.apply_chat_template(MESSAGES, tokenize=False) == load_chat(directory)(MESSAGES)
    assert sys.getprofile() is None


@pytest.mark.parametrize("put_there", [Path.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_what_is_no_file_is_not_there(copy, name, put_there):
    """To open a pipe would wait for ever."""
    path = copy() / name
    path.unlink()
    put_there(path)
    assert name in check(path.parent)


@pytest.mark.parametrize("name", [None, b"x", ["x"], "", "\0", "no/such/model", "a" * 5000])
def test_a_model_name_of_no_sense_is_refused_in_one_line(name, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        GPT.from_pretrained(name)
    assert re.match(r"name=|'.*no directory here", str(error.value))
    assert str(error.value).isprintable() and len(str(error.value)) < 400
    if not isinstance(name, str):
        for read in (checkpoints.read_config, load_tokenizer):
            with pytest.raises(ValueError, match="^directory=.*: must be that of a checkpoint"):
                read(name)
