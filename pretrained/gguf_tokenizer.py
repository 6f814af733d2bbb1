"""The tokenizer of a GGUF file, made of its metadata as llama.cpp reads it.

`tokenizer.ggml.pre` names how a text is cut into words before bytes are merged. Of llama.cpp's
names (llama-vocab.cpp) those are here whose rules are regular expressions of a few lines; another
one is refused. Read first: gguf_file.py. Read next: streams.py."""

from typing import TYPE_CHECKING

from pretrained.gguf_file import GGUFFile, check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CONTROL = 3  # types of tokens: this one has no text
USER_DEFINED = 4  # is never cut, and has its text
# These end a turn of a chat, whatever the metadata says of them.
ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
MODERN_WORDS = (  # %s has the digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = "llama-bpe"
PRE_TOKENIZERS = {  # a text is cut into words by each pattern in turn
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "qwen2": [MODERN_WORDS % r"\p{N}"],
    LLAMA3: [MODERN_WORDS % r"\p{N}{1,3}"],
}


def make_tokenizer(file: GGUFFile) -> tuple["PreTrainedTokenizerFast", frozenset[int]]:
    """The tokenizer with its chat template, and the tokens that end a text. Raises ValueError for
    other kinds than byte-level BPE, and for words that are cut in another way."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    keys = file.keys("tokenizer.ggml.")
    check_supported(file.path, "tokenizer.ggml.model", keys["model"], ["gpt2"])
    check_supported(file.path, "tokenizer.ggml.pre", keys.get("pre"), PRE_TOKENIZERS)
    is_llama3 = keys["pre"] == LLAMA3
    tokens: list[str] = keys["tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in keys["merges"]]
    inner = Tokenizer(models.BPE(ids, merges, ignore_merges=is_llama3))
    patterns = map(Regex, PRE_TOKENIZERS[keys["pre"]])
    splits = [pre_tokenizers.Split(pattern, "isolated") for pattern in patterns]
    bytes_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_step])
    inner.decoder = decoders.ByteLevel()

    ends = [ids[token] for token in ENDS_OF_TURN if token in ids]
    ends += [keys[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in keys]
    kinds = dict(enumerate(keys.get("token_type", [])))
    kinds.update(dict.fromkeys(ends, CONTROL))
    for token_id, kind in sorted(kinds.items()):
        if kind in (CONTROL, USER_DEFINED):
            token = AddedToken(tokens[token_id], normalized=False, special=kind == CONTROL)
            inner.add_tokens([token])
    named_ids = {"bos_token": keys.get("bos_token_id"), "eos_token": keys.get("eos_token_id")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        add_bos_token=keys.get("add_bos_token", is_llama3),
        **{name: tokens[i] for name, i in named_ids.items() if i is not None},
    )
    return tokenizer, frozenset(ends)
