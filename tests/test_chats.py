"""pretrained/chat.py: messages become a prompt, or an error names the place of what is wrong."""

import pytest

from pretrained.chat import ChatTemplate
from pretrained.tokenizers import load_chat
from tests.test_tokenizers import sentencepiece_directory

PARTS = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHATS = [  # messages, and the prompt of a model without a template
    ([{"role": "user", "content": PARTS}], "user: hello world\n"),
    ([{"role": "assistant", "content": None, "tool_calls": [CALL]}], "assistant: \n"),
    ([{"role": "assistant", "tool_calls": [CALL]}], "assistant: \n"),
    ([{"role": "tool", "content": "4", "tool_call_id": "1"}], "tool: 4\n"),
    ([{"role": "developer", "content": "x"}], "developer: x\n"),
    ([{"role": "user", "content": "x", "name": "ann", "tool_calls": None}], "user: x\n"),
    ([{"role": "user", "content": ""}], "user: \n"),
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
WRONG_CONTENTS = [
    *(None, 5, {"type": "text", "text": "x"}, [], ["x"], [*PARTS, IMAGE]),
    *([{"type": "text"}], [{"type": "text", "text": 5}], [{"text": "x"}]),
]
CALLS = (5, [5], [{"function": {"name": 5}}])
WRONG_MESSAGES = [  # fields of a message, of which the error names the first
    *({"content": content} for content in WRONG_CONTENTS),
    {"content": None, "tool_calls": []},
    *({"role": role} for role in ("wizard", None, ["user"])),
    {"name": 5},
    {"tool_call_id": 5},
    *({"tool_calls": calls} for calls in CALLS),
]
PRINTED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


@pytest.fixture(params=["no checkpoint", "a template"])
def chat(request, tmp_path):
    """A function from messages to a prompt."""
    if request.param == "no checkpoint":
        return load_chat(None)
    sentencepiece_directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(PRINTED)
    return load_chat(tmp_path)


@pytest.mark.parametrize("messages, prompt", CHATS)
def test_what_a_message_may_hold_becomes_text(chat, messages, prompt):
    made = chat(messages)
    role, _, text = prompt.rstrip("\n").partition(": ")
    assert made in (f"{prompt}assistant:", f"[{role.replace('developer', 'system')}]{text}")


@pytest.mark.parametrize("fields", WRONG_MESSAGES)
def test_a_message_that_makes_no_sense_is_refused_by_its_place(chat, fields):
    message = {"role": "user", "content": "x"}
    place = rf"^messages\[1\]\.{next(iter(fields))}=.*: must be "
    with pytest.raises(ValueError, match=place) as refused:
        chat([message, message | fields])
    assert str(refused.value).isprintable()


DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}[default]{% endif %}"


def test_a_developer_replaces_the_default_system_message_of_a_template(tmp_path):
    sentencepiece_directory(tmp_path)
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    knows = "{# 'developer' #}"
    for comment, prompt in (("", "[system]x[user]y"), (knows, "[default][developer]x[user]y")):
        (tmp_path / "chat_template.jinja").write_text(comment + DEFAULT_SYSTEM + PRINTED)
        assert load_chat(tmp_path)(messages) == prompt
    assert messages[0]["role"] == "developer"  # the client's own is not changed
    (tmp_path / "chat_template.jinja").write_text(PRINTED + "{# 'wizard' #}")
    assert load_chat(tmp_path)([{"role": "wizard", "content": "x"}]) == "[wizard]x"


def test_a_template_is_asked_to_begin_an_answer_and_may_refuse(tmp_path):
    sentencepiece_directory(tmp_path)
    messages = [{"role": "user", "content": "y"}]
    with pytest.raises(ValueError, match="chat_template is not set"):
        load_chat(tmp_path)(messages)
    template = "{% if messages | length > 1 %}{{ raise_exception('too long') }}{% endif %}"
    template += "{% if add_generation_prompt %}go{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = load_chat(tmp_path)
    assert chat(messages) == "go"
    with pytest.raises(ValueError, match="chat template: TemplateError: too long"):
        chat(messages * 2)


def test_a_template_does_not_grow_with_those_before_it():
    """All would wrap the functions of one environment, deeper and deeper."""
    for _ in range(300):
        template = ChatTemplate("{{ messages[0]['content'].strip() | upper }}", {})
    assert template.render([{"role": "user", "content": " hi "}]) == "HI"
    environment = template.template.environment
    assert not hasattr(environment.filters["center"].__wrapped__, "__wrapped__")
