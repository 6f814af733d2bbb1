"""pretrained/tokenizers.py and streams.py: what goes in comes out, as with transformers.

Streams are held against tokenizers' own. No network."""

import base64
import json

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import DecodeStream

from pretrained.streams import TextStream, decode_after
from pretrained.tokenizers import ByteTokenizer, load_tokenizer
from tests.test_checkpoints import llama_like

TEXTS = ["", "hello hello", "  two  spaces ", "naïve café", "日本語", "👩‍👩‍👧 ok 👍🏽"]
PLAIN = st.text().filter(lambda text: "<" not in text)  # no special token spelt out
TEXTS += ["tab\tnew\nline\r\n", "1234 it's IT'S"]


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def llama3_directory(path):
    """As LLaMA 3 has it: byte b has rank b, he = 256, ll = 257, 34 = 258, specials from 259."""
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"34"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (path / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")
    return path


def sentencepiece_directory(path):
    """LLaMA 2's rules: spaces are ▁, one is put before a text, rare letters are bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"helo"]
    tokens += ["he", "ll", "hell", "hello", "▁hello"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    rules = dict(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, **rules))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(path / "tokenizer.json"))
    return path


def byte_level_directory(path):
    """A tokenizer as of GPT-2, LLaMA 3 and Qwen2: merges of bytes, trained on TEXTS."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    rules = dict(vocab_size=300, special_tokens=["<eos>"], show_progress=False)
    rules["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(TEXTS * 3, tokenizers.trainers.BpeTrainer(**rules))
    inner.save(str(path / "tokenizer.json"))
    return path


MAKERS = {"byte level": byte_level_directory, "llama 3": llama3_directory}
MAKERS["sentencepiece"] = sentencepiece_directory
every_kind = pytest.mark.parametrize("kind", ["bytes", *MAKERS])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All kinds of tokenizers, by name."""
    directories = {name: make(tmp_path_factory.mktemp("made")) for name, make in MAKERS.items()}
    loaded = {name: load_tokenizer(directory) for name, directory in directories.items()}
    return {"bytes": ByteTokenizer(), **loaded}


@every_kind
def test_text_survives_a_round_trip_and_streams_as_it_decodes(every, kind):
    tokenizer = every[kind]

    @given(PLAIN | st.sampled_from(TEXTS), st.integers(0, 9))
    def check(text, cut):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = TextStream(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == text
        prompt, output = ids[:cut], ids[cut:]
        stream = TextStream(tokenizer, prompt)
        text = "".join(map(stream.push, output)) + stream.flush()
        assert text == decode_after(tokenizer, prompt[-8:], output)
        if kind != "bytes" and "\ufffd" not in tokenizer.decode(prompt):
            theirs = DecodeStream(prompt, skip_special_tokens=True)
            stream = TextStream(tokenizer, prompt)
            for token in output:
                assert stream.push(token) == (theirs.step(tokenizer._inner, token) or "")

    check()


@every_kind
def test_a_stream_shows_each_character_as_soon_as_it_is_whole(every, kind):
    stream = TextStream(every[kind])
    pieces = [stream.push(token) for token in every[kind].encode("a👍b")]
    assert [piece for piece in pieces if piece] == ["a", "👍", "b"] and stream.flush() == ""


@every_kind
def test_a_prompt_that_ends_within_a_character_is_not_written_again(every, kind):
    tokenizer = every[kind]
    prompt = tokenizer.encode("ab ü")[:-1]
    output = tokenizer.encode("ab ü c")[len(prompt) :]
    stream = TextStream(tokenizer, prompt)
    text = "".join(map(stream.push, output)) + stream.flush()
    assert text == "\ufffd c"


@every_kind
def test_half_a_character_is_no_text(every, kind):
    assert every[kind].encode("a\ud800") == every[kind].encode("a?")


def test_ids_larger_than_bytes_are_boxes():
    assert ByteTokenizer().decode([104, 256, 105]) == "h□i"


def test_sentencepiece_keeps_the_space_between_tokens_and_hides_specials(every):
    tokenizer = every["sentencepiece"]
    hello = 3 + 256 + 9
    assert tokenizer.encode("hello hello") == [1, hello, hello]
    stream = TextStream(tokenizer)
    assert list(map(stream.push, [1, hello, 2, hello])) == ["", "hello", "", " hello"]
    assert TextStream(tokenizer, [1, hello]).push(hello) == " hello"
    ids = tokenizer.encode("hello " * 100)  # neither truncated nor padded, as its file says
    assert len(ids) == 1 + 100 + 1  # <s>, the words, the last space


def test_llama3_merges_words_and_starts_with_bos(every):
    begin = 259
    eot = 259 + 9
    tokenizer = every["llama 3"]
    assert tokenizer.encode("hello") == [begin, 256, 257, ord("o")]
    assert tokenizer.encode("1234 34") == [begin, *b"1234 ", 258]  # digits cut in threes: 123 4
    assert tokenizer.encode("<|eot_id|>") == [begin, eot]
    assert tokenizer.decode([begin, 256, eot, 259 + 255]) == "he"
    assert tokenizer.special_tokens["<|reserved_special_token_250|>"] == 259 + 255
    assert tokenizer.stop_token_ids == {eot}


def test_stop_tokens_are_those_of_generation_config_or_config_or_the_tokenizer(tmp_path):
    byte_level_directory(tmp_path)
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(tmp_path / "tokenizer_config.json", settings)
    assert load_tokenizer(tmp_path).stop_token_ids == {0}
    for ids, expected in ((None, {0}), (6, {6}), ([6, 7], {6, 7})):
        write_json(tmp_path / "generation_config.json", {"eos_token_id": ids})
        assert load_tokenizer(tmp_path).stop_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    write_json(tmp_path / "config.json", {"model_type": "llama", "eos_token_id": [0, 5]})
    assert load_tokenizer(tmp_path).stop_token_ids == {0, 5}


MESSAGES = [{"role": "user", "content": "hi <b> <s> there"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<b>{{ m['content'] }}{% endfor %}"


def test_texts_and_chats_are_those_of_transformers(tmp_path):
    llama_like().save_pretrained(tmp_path)  # which has tokenizers of another kind, too
    byte_level_directory(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<s>", "<b>"])
    ends = [(name, inner.token_to_id(name)) for name in ("<s>", "<b>")]
    inner.post_processor = processors.TemplateProcessing("<s> $A <b>", special_tokens=ends)
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(tmp_path / "tokenizer_config.json", settings | {"chat_template": TEMPLATE})
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(MESSAGES) == chat and chat.count(ends[0][1]) == 2
    assert ours.encode("x <b> y") == theirs.encode("x <b> y")
