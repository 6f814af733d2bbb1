"""pretrained/tokenizers.py: what goes in comes out, and a missing file is named. No network."""

import base64
import json
import threading
from unittest.mock import Mock

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers.processing_utils import ProcessorMixin

from pretrained.streams import TextStream, decode_output, has_stop
from pretrained.tokenizers import (
    BYTE_OF_LETTER,
    byte_tokenizer,
    load_chat,
    load_tokenizer,
)

TEXTS = ["", "hello hello", "  two  spaces ", "naïve café", "日本語", "👩‍👩‍👧 ok 👍🏽"]
PLAIN = st.text().filter(lambda text: "<" not in text)  # no special token spelt out
TEXTS += ["tab\tnew\nline\r\n", "1234 it's IT'S"]


def streamed(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [stream.push(i) for i in ids] + [stream.flush()]


def write_json(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def llama3_directory(path, name="tokenizer.model"):
    """As LLaMA 3 has it: byte b has rank b, he = 256, ll = 257, 34 = 258, specials from 259."""
    tokens = [bytes([b]) for b in range(256)] + [b"he", b"ll", b"34"]
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"\n".join(lines) + b"\n")
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


def byte_level_tokenizer():
    """A tokenizer as of GPT-2, LLaMA 3 and Qwen2: merges of bytes, trained on TEXTS."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    rules = dict(vocab_size=300, special_tokens=["<eos>"], show_progress=False)
    rules["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(TEXTS * 3, tokenizers.trainers.BpeTrainer(**rules))
    return inner


def byte_level_directory(path):
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


MAKERS = {"byte level": byte_level_directory, "llama 3": llama3_directory}
MAKERS["sentencepiece"] = sentencepiece_directory
every_kind = pytest.mark.parametrize("kind", ["bytes", *MAKERS])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All kinds of tokenizers, by name."""
    directories = {name: make(tmp_path_factory.mktemp("made")) for name, make in MAKERS.items()}
    loaded = {name: load_tokenizer(directory) for name, directory in directories.items()}
    return {"bytes": byte_tokenizer(), **loaded}


@every_kind
def test_text_survives_a_round_trip_and_streams_as_it_decodes(every, kind):
    tokenizer = every[kind]
    ids = list(range(700))
    if kind == "sentencepiece":  # bytes that are no text change what is before them, see TextStream
        del ids[3 : 3 + 256]

    @given(PLAIN | st.sampled_from(TEXTS), st.lists(st.sampled_from(ids)))
    def check(text, any_tokens):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded) == text
        for tokens in (encoded, any_tokens):
            assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens)

    check()


@every_kind
def test_a_stream_shows_each_character_as_soon_as_it_is_whole(every, kind):
    pieces = streamed(every[kind], every[kind].encode("a👍b"))
    assert [piece for piece in pieces if piece] == ["a", "👍", "b"] and pieces[-1] == ""


@given(st.text())
def test_byte_tokens_are_the_bytes_of_utf8_and_no_others_have_text(text):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([104, 256, 105]) == "h□i"
    assert streamed(tokenizer, [104, 256, 31_999])[:3] == ["h", "□", "□"]  # at once
    assert tokenizer.stop_token_ids == frozenset()
    assert tokenizer.encode("a\ud800") == tokenizer.encode("a?")  # half a character is no text


def test_sentencepiece_keeps_the_space_between_tokens_and_hides_specials(every):
    tokenizer = every["sentencepiece"]
    space = 3 + 256
    hello = 3 + 256 + 9
    assert tokenizer.encode("hello hello") == [1, hello, hello]
    assert streamed(tokenizer, [1, hello, 2, hello]) == ["", "hello", "", " hello", ""]
    assert streamed(tokenizer, [space, 2, hello]) == ["", "", " hello", ""]
    ids = tokenizer.encode("hello " * 100)  # neither truncated nor padded, as its file says
    assert len(ids) == 1 + 100 + 1  # <s>, the words, the last space


def test_llama3_merges_words_and_starts_with_bos(every, tmp_path):
    begin = 259
    eot = 259 + 9
    tokenizer = every["llama 3"]
    assert tokenizer.encode("hello") == [begin, 256, 257, ord("o")]
    assert tokenizer.encode("1234 34") == [begin, *b"1234 ", 258]  # digits cut in threes: 123 4
    assert tokenizer.encode("<|eot_id|>") == [begin, eot]
    assert tokenizer.decode([begin, 256, eot, 259 + 255]) == "he"
    elsewhere = load_tokenizer(llama3_directory(tmp_path, "original/tokenizer.model"))
    assert elsewhere.encode("he") == [begin, 256]


LONGEST = {"bytes": 1, "byte level": 7, "llama 3": len("<|reserved_special_token_250|>")}


@every_kind
def test_a_text_has_at_least_its_fewest_tokens(every, kind):
    tokenizer = every[kind]
    assert tokenizer.longest_token == LONGEST.get(kind)

    @given(st.text() | st.sampled_from(TEXTS).map(lambda text: text * 9))
    def check(text):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))

    check()
    for length in (0, 1, 9, 10, 11, 1000):
        fewest = tokenizer.fewest_tokens("a" * length)
        assert fewest == (-(-length // LONGEST[kind]) if kind in LONGEST else 0)


def changed(**fields):
    """A change of a tokenizer of tokenizers: these fields."""
    return lambda inner: [setattr(inner, name, value) for name, value in fields.items()]


def special(text, **flags):
    """A change of such a tokenizer: a special token."""
    return lambda inner: inner.add_special_tokens([tokenizers.AddedToken(text, **flags)])


def cut_by(*steps):
    """A change of such a tokenizer: how a text is cut."""
    return changed(pre_tokenizer=pre_tokenizers.Sequence(list(steps)))


def bpe(letters, **rules):
    """A change of such a tokenizer: these letters, and no merges."""
    return changed(model=models.BPE({letter: i for i, letter in enumerate(letters)}, [], **rules))


LETTERS = pre_tokenizers.ByteLevel(add_prefix_space=False)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ISOLATED = pre_tokenizers.Split(tokenizers.Regex(r"\d"), "isolated")
REMOVED = pre_tokenizers.Split(tokenizers.Regex(r"\s+"), "removed")
CHANGED = {  # (a change of a byte-level tokenizer, what is known of its longest token then)
    "as it is": (changed(), 7),
    "digits": (cut_by(pre_tokenizers.Digits(True), ISOLATED, LETTERS), 7),
    "long special": (special("<long special token>"), 20),
    "removed": (cut_by(REMOVED, LETTERS), None),
    "whitespace": (cut_by(pre_tokenizers.WhitespaceSplit(), LETTERS), None),
    "nothing cut": (changed(pre_tokenizer=None), None),
    "letters first": (cut_by(LETTERS, ISOLATED), None),
    "normalizer": (changed(normalizer=normalizers.NFC()), None),
    "wide on the left": (special("<wide>", lstrip=True), None),
    "wide on the right": (
        lambda inner: inner.add_tokens([tokenizers.AddedToken("<wide>", rstrip=True)]),
        None,
    ),
    "no merges": (bpe(ALPHABET), 5),
    "prefix": (bpe(ALPHABET, continuing_subword_prefix="#"), None),
    "suffix": (bpe(ALPHABET, end_of_word_suffix="#"), None),
    "a byte is missing": (bpe(ALPHABET[1:]), None),
    "words": (changed(model=models.WordLevel({"a": 0, "x": 1}, "a")), None),
    "unigram": (changed(model=models.Unigram([("a", 0.0), ("?", -1.0)], 1)), None),
}
SQUEEZED = ["x" + " " * 500, " " * 500 + "<wide>" + " " * 500, "Z" * 500, "\u0958" * 9, "a1 " * 99]


@pytest.mark.parametrize("name", CHANGED)
def test_where_tokens_may_swallow_text_nothing_is_known_of_the_longest(name, tmp_path):
    change, longest_token = CHANGED[name]
    inner = byte_level_tokenizer()
    change(inner)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.longest_token == longest_token
    for text in SQUEEZED:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))


def test_a_text_that_a_tokenizer_cannot_encode_is_a_value_error(tmp_path):
    pieces = [(character, 0.0) for character in "▁abcdefghijklmnopqrstuvwxyzTé?,1\n "]
    inner = tokenizers.Tokenizer(models.Unigram(pieces))  # it has no token for what is unknown
    inner.save(str(tmp_path / "tokenizer.json"))
    encode = load_tokenizer(tmp_path).encode
    assert len(encode("tell")) == 4
    for text in ("tell 2", "\ud800"):
        with pytest.raises(ValueError, match="this tokenizer cannot encode it"):
            encode(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_other_threads_run_while_a_text_is_encoded(every, kind):
    ticks = 0
    has_ended = threading.Event()

    def tick():
        nonlocal ticks
        while not has_ended.wait(0.001):
            ticks += 1

    counts = []
    thread = threading.Thread(target=tick)
    thread.start()
    for _ in range(5):
        before = ticks
        every[kind].encode("hello naïve café 日本語 " * 40_000)
        counts.append(ticks - before)
    has_ended.set()
    thread.join()
    assert max(counts) >= 5  # a call that lets nobody run has two, as it begins and ends


@pytest.mark.parametrize(
    "make, own", [(byte_level_directory, set()), (llama3_directory, {260, 268})]
)
def test_stop_tokens_are_those_of_generation_config_then_config(tmp_path, make, own):
    def stops(**files):
        for name, content in files.items():
            write_json(tmp_path / f"{name}.json", content)
        return load_tokenizer(tmp_path).stop_token_ids

    make(tmp_path)
    assert stops() == own
    if make is byte_level_directory:
        assert stops(tokenizer_config={"eos_token": "<eos>"}) == {0}
    assert stops(config={"eos_token_id": 5}) == {5}
    for silent in ({}, {"eos_token_id": None}):
        assert stops(generation_config=silent) == {5}
    assert stops(generation_config={"eos_token_id": [6, 7]}) == {6, 7}


def test_without_a_tokenizer_the_file_to_put_there_is_named(tmp_path):
    directory = tmp_path / "a\nb\x1b"
    (directory / "tokenizer.json").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json") as error:
        load_tokenizer(directory)
    assert str(tmp_path) in str(error.value)
    assert str(error.value).isprintable()


SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x05\n\x03<s>\x15"
RANKS = [base64.b64encode(bytes([b])) + b" %d" % b for b in range(256)]
WRONG_LINES = b"bm8= -1,bm8= 255,bm8= 257,bm8= 1.5,bm8= x,AA== 0,AA== 256,n_o= 256,bm8=".split(b",")
BROKEN = {
    "tokenizer.model": [
        *(SENTENCEPIECE, b"", b"\n", RANKS[0], b"\n".join(RANKS[:255])),
        *(b"\n".join([*RANKS, line]) for line in WRONG_LINES),
    ],
    "tokenizer.json": [b"{}"],
    "config.json": [b'{"eos_token_id": %s}' % value for value in (b'"x"', b"[1.5]", b"-1")],
}


@pytest.mark.parametrize("name, content", [(n, c) for n in BROKEN for c in BROKEN[n]])
def test_a_file_that_is_broken_or_something_else_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: ") as error:
        load_tokenizer(tmp_path)
    assert str(error.value).isprintable()


def in_bytes(kind, data):
    """Tokens that spell these bytes, one for each, whether they are text or not."""
    if kind != "byte level":
        first = 3 if kind == "sentencepiece" else 0
        return [first + byte for byte in data]
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    vocabulary = byte_level_tokenizer().get_vocab()
    return [vocabulary[letters[byte]] for byte in data]


HALF = b"\xf0\x9f"  # of an emoji
PROMPTS_AND_OUTPUTS = [  # in bytes, and the text of the output
    (b"abc\xef\xbf\xbd", b"xyz", "xyz"),  # U+FFFD, a whole character
    (b"abc" + HALF, b"xyz", "xyz"),
    (b"abc" + HALF, b"", ""),
    (b"abc" + HALF, b"\x91\x8d!", "👍!"),
    (b"abc" + HALF, b"\x91!", "\ufffd!"),  # a part of the output
    (b"abc" + HALF, b"\x80", "\ufffd"),
    (b"abc\xef\xbf", b"\xbd!", "\ufffd!"),  # which is the character that the output completes
    (b"abc\xe9", b"\xff!", "\ufffd!"),  # which does not go on
    (b"abc" + b"\x80" * 40, b"xyz", "xyz"),
    (b"abc\x80\xf0", b"\x9f\x91\x8d", "👍"),
    (b"abc", b"x" + b"\x80" * 40 + "é👍".encode(), "x" + "\ufffd" * 40 + "é👍"),
    (b"abc", b"x\xef\xbf\xbdy" + HALF, "x\ufffdy\ufffd"),
]


@every_kind
@pytest.mark.parametrize("prompt, output, text", PROMPTS_AND_OUTPUTS)
def test_prompt_and_output_are_taken_apart_by_their_tokens(every, kind, prompt, output, text):
    tokenizer = every[kind]
    output_bytes = output
    prompt = in_bytes(kind, prompt)
    output = in_bytes(kind, output)
    silent = [] if kind == "bytes" else [100_000]
    for between in ([], silent * 50):
        tokens = [*between, *output]
        assert decode_output(tokenizer, [*prompt, *tokens], len(prompt)) == text
        stream = TextStream(tokenizer, prompt)
        pieces = [(stream.push(token), stream.token) for token in tokens]
        assert "".join(piece for piece, _ in pieces) + stream.flush() == text
        assert b"".join(spelled for _, spelled in pieces) == output_bytes  # half characters, too


def test_a_space_is_kept_behind_many_special_tokens_of_a_prompt(every):
    hello = 3 + 256 + 9
    inner = every["sentencepiece"]
    assert TextStream(inner, [1]).push(hello) == "hello"
    stream = TextStream(inner, [1, hello, *[2] * 100])
    assert stream.push(hello) + stream.push(2) + stream.push(hello) == " hello hello"
    emoji = in_bytes("sentencepiece", "😀漢漢".encode())
    assert TextStream(inner, [1, hello, *emoji]).push(hello) == " hello"
    assert has_stop(inner, [1, hello, hello], 2, [" hello"])  # as the text behind the prompt has it


@every_kind
@pytest.mark.parametrize("held", ["half a character", "no text"])
def test_the_cost_of_a_token_does_not_grow_with_what_is_held_back(every, kind, held):
    decode = Mock(wraps=every[kind].decode)
    [token] = in_bytes(kind, b"\x80") if held == "half a character" else [100_000]
    stream = TextStream(every[kind]._replace(decode=decode), [token] * 500)
    assert decode.call_count <= 3 * 500
    for _ in range(500):
        stream.push(token)
    assert decode.call_count <= 2 * 3 * 500
    assert max(len(call.args[0]) for call in decode.call_args_list) <= 2


MESSAGES = [{"role": "user", "content": "hi <b> <s> there"}]
TURN = "{% for m in messages %}<a>{{ m['content'] }} <b> x{% endfor %}"
FLAGS = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)


def added(**flags):
    """The tokens <a> and <b>, as tokenizer_config.json has them."""
    tokens = [{"content": name, "special": True} | FLAGS | flags for name in ("<a>", "<b>")]
    return {str(300 + i): token for i, token in enumerate(tokens)}


SETTINGS = "tokenizer_config.json"
SPECIALS = "special_tokens_map.json"
ADDED = "added_tokens.json"
PLACES = {  # files beside a tokenizer.json that does not know <a> and <b>
    "nowhere": {},
    "added_tokens_decoder": {SETTINGS: {"added_tokens_decoder": added(lstrip=True)}},
    "not special": {SETTINGS: {"added_tokens_decoder": added(special=False)}},
    "eos_token": {SETTINGS: {"eos_token": "<b>", "bos_token": "<a>", "add_bos_token": True}},
    "extra_special_tokens": {SETTINGS: {"extra_special_tokens": ["<a>", "<b>"]}},
    SPECIALS: {SPECIALS: {"eos_token": "<b>", "additional_special_tokens": ["<a>"]}},
    ADDED: {ADDED: {"<a>": 300, "<b>": 301}, SETTINGS: {"eos_token": "<b>"}},
}
NAMED = [{"name": "default", "template": TURN}, {"name": "tool_use", "template": "no"}]
TEMPLATES = {  # files with a chat template
    "a text": {SETTINGS: {"chat_template": TURN}},
    "named texts": {SETTINGS: {"chat_template": NAMED}},
    "two places": {"chat_template.jinja": TURN, SETTINGS: {"chat_template": "no"}},
    "chat_template.json": {"chat_template.json": {"chat_template": TURN}},
    "chat_template.json, not read": {
        "chat_template.json": {"chat_template": "no"},
        SETTINGS: {"chat_template": TURN},
    },
    "additional_chat_templates": {
        "chat_template.jinja": TURN,
        "additional_chat_templates/rag.jinja": "no",
    },
    "bos in the template": {
        SETTINGS: {"bos_token": "<s>", "chat_template": "{{ bos_token }}" + TURN}
    },
}


def write_files(path, files):
    (path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        if isinstance(content, str):
            (path / name).write_text(content, "utf-8")
        else:
            kind = {"tokenizer_class": "PreTrainedTokenizerFast"} if name == SETTINGS else {}
            write_json(path / name, kind | content)


@pytest.mark.parametrize("make", [byte_level_directory, sentencepiece_directory])
@pytest.mark.parametrize("place", PLACES)
def test_added_tokens_are_those_of_transformers_wherever_they_stand(tmp_path, make, place):
    make(tmp_path)
    write_files(tmp_path, PLACES[place])
    ours = load_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    for text in ("x <a> y<b> z", "<a><b>", "a<a>b <s>", "<b>\n"):
        ids = theirs.backend_tokenizer.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.encode_chat(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    specials = theirs.added_tokens_decoder.items()
    assert ours.special_tokens == {str(token): i for i, token in specials if token.special}


@pytest.mark.parametrize("place", TEMPLATES)
def test_chats_are_those_of_transformers_wherever_the_template_stands(tmp_path, place):
    """The tokenizer puts something before and behind each other text by itself."""
    inner = byte_level_tokenizer()
    inner.add_special_tokens(["<s>", "<a>", "<b>"])
    ends = [(name, inner.token_to_id(name)) for name in ("<s>", "<b>")]
    inner.post_processor = processors.TemplateProcessing("<s> $A <b>", special_tokens=ends)
    inner.save(str(tmp_path / "tokenizer.json"))
    write_files(tmp_path, TEMPLATES[place])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if theirs.chat_template is None:  # it stands where only their processors look
        theirs.chat_template = ProcessorMixin.get_processor_dict(tmp_path)[0]["chat_template"]
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ours = load_tokenizer(tmp_path)
    assert ours.encode_chat(load_chat(tmp_path)(MESSAGES)) == expected
    assert len(ours.encode("")) == 2
