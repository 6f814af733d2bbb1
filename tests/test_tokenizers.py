"""pretrained/tokenizers.py and streams.py: what goes in comes out, as with transformers.

Streams are held against tokenizers' own. No network."""

import base64
import json

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors
from tokenizers.decoders import DecodeStream
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pretrained.streams import TextStream
from pretrained.tokenizers import ByteTokenizer, load_tokenizer
from tests.test_checkpoints import small

TEXTS = [
    "",
    "hello hello",
    "  two  spaces ",
    "naïve café",
    "日本語",
    "👩‍👩‍👧 ok 👍🏽",
    "tab\tnew\nline\r\n",
    "1234 it's IT'S",
]
PLAIN = st.text().filter(lambda text: "<" not in text)  # no special token spelt out


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def llama3_directory(path):
    """As LLaMA 3 has it: byte b has rank b, he = 256, ll = 257, 34 = 258, specials from 259."""
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"34"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")


def sentencepiece_directory(path):
    """LLaMA 2's rules: spaces are ▁, one is put before a text, rare letters are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"helo"]
    tokens += ["he", "ll", "hell", "hello", "▁hello"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    model = models.BPE(
        vocab,
        merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = tokenizers.Tokenizer(model)
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(spaces)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(path / "tokenizer.json"))


def byte_level_directory(path):
    """A tokenizer as of GPT-2: merges of bytes, one of them a space and half a character."""
    merges = [("h", "e"), ("l", "l"), ("Ġ", "Ã")]
    tokens = ["<eos>", "<b>", *bytes_to_unicode().values(), *map("".join, merges)]
    tokenizer = transformers.GPT2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        unk_token=None,
        bos_token="<b>",
        eos_token="<eos>",
        add_bos_token=True,
        chat_template="<b>{% for m in messages %}<eos>{{ m.content }}{% endfor %}",
    )
    tokenizer.save_pretrained(path)


MAKERS = {
    "byte level": byte_level_directory,
    "llama 3": llama3_directory,
    "sentencepiece": sentencepiece_directory,
}
every_kind = pytest.mark.parametrize("kind", ["bytes", *MAKERS])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All kinds of tokenizers, by name."""
    loaded = {"bytes": ByteTokenizer()}
    for name, make in MAKERS.items():
        directory = tmp_path_factory.mktemp("made")
        make(directory)
        loaded[name] = load_tokenizer(directory)
    return loaded


def streamed(tokenizer, prompt, output):
    """The pieces of the output as they come, behind a prompt; the last when there is no more."""
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, output), stream.flush()]


@every_kind
def test_text_survives_a_round_trip_and_streams_as_tokenizers_streams_it(every, kind):
    tokenizer = every[kind]

    @given(PLAIN | st.sampled_from(TEXTS), st.integers(0, 9))
    def check(text, cut):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, [], ids)) == text
        prompt = ids[:cut]
        if "\ufffd" in tokenizer.decode(prompt):
            return  # tokenizers would write the prompt again
        *pieces, rest = streamed(tokenizer, prompt, ids[cut:])
        assert tokenizer.decode(prompt) + "".join(pieces) + rest == text
        if kind != "bytes":
            stream = DecodeStream(prompt, skip_special_tokens=True)
            assert pieces == [stream.step(tokenizer._inner, i) or "" for i in ids[cut:]]

    check()


@every_kind
def test_a_prompt_that_ends_within_a_character_is_not_written_again(every, kind):
    prompt = every[kind].encode("ab ü")[:-1]
    output = every[kind].encode("ab ü c")[len(prompt) :]
    assert "".join(streamed(every[kind], prompt, output)) == "\ufffd c"


@every_kind
def test_half_a_character_is_no_text(every, kind):
    assert every[kind].encode("a\ud800") == every[kind].encode("a?")


def test_ids_larger_than_bytes_are_boxes():
    assert ByteTokenizer().decode([104, 256, 105]) == "h□i"


def test_sentencepiece_keeps_the_space_between_tokens_and_hides_specials(every):
    tokenizer = every["sentencepiece"]
    hello = 3 + 256 + 9
    assert tokenizer.encode("hello hello") == [1, hello, hello]
    pieces = streamed(tokenizer, [1, hello], [2, hello])
    assert pieces == ["", " hello", ""]
    ids = tokenizer.encode("hello " * 100)  # neither truncated nor padded, as its file says
    assert len(ids) == 1 + 100 + 1  # <s>, the words, the last space


def test_llama3_merges_words_and_starts_with_bos(every):
    begin = 259
    eot = 259 + 9
    last = 259 + 255
    tokenizer = every["llama 3"]
    assert tokenizer.encode("hello") == [begin, 256, 257, ord("o")]
    assert tokenizer.encode("1234 34") == [begin, *b"1234 ", 258]  # digits cut in threes: 123 4
    assert tokenizer.encode("<|eot_id|>") == [begin, eot]
    assert tokenizer.decode([begin, 256, eot, last]) == "he"
    assert tokenizer.special_tokens["<|reserved_special_token_250|>"] == last
    assert tokenizer.stop_token_ids == {eot}


STOPS = [  # a file, its eos_token_id, what ends a text
    ("generation_config.json", None, {0}),  # the tokenizer's
    ("generation_config.json", 6, {6}),
    ("generation_config.json", [6, 7], {6, 7}),
    ("config.json", [0, 5], {0, 5}),
]


@pytest.mark.parametrize("file, ids, expected", STOPS)
def test_stop_tokens_are_those_of_generation_config_or_config(tmp_path, file, ids, expected):
    byte_level_directory(tmp_path)
    write_json(tmp_path / file, {"model_type": "llama", "eos_token_id": ids})
    assert load_tokenizer(tmp_path).stop_token_ids == expected


def test_texts_and_chats_are_those_of_transformers(tmp_path):
    small().save_pretrained(tmp_path)  # which has tokenizers of another kind, too
    byte_level_directory(tmp_path)
    messages = [{"role": "user", "content": "hi <b> there"}]
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == chat
    assert chat[:2] == [1, 0]  # <b> once
    assert ours.encode("x <b> y") == theirs.encode("x <b> y")
