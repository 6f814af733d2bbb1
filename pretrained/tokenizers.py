"""Text to token ids and back, and chats: transformers' tokenizers, or bytes for random weights.

Read first: checkpoints.py. Read next: gguf_tokenizer.py, streams.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pretrained.checkpoints import find
from pretrained.gguf_file import is_gguf, read_gguf
from pretrained.gguf_tokenizer import make_tokenizer

if TYPE_CHECKING:
    from transformers import (  # a model with random weights needs none
        GenerationConfig,
        PreTrainedTokenizerFast,
    )

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and more that a template may read


class Tokenizer(Protocol):
    """What engine and server need of one."""

    stop_token_ids: frozenset[int]  # those that end a text
    special_tokens: Mapping[str, int]  # those without text, as they are written in a prompt

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. BOS comes first, if there is one."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that asks for the answer to these messages."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens. Special tokens have none."""
        ...


class ByteTokenizer:
    """One token per byte, its id the byte's value: for models with random weights.

    Such a model also yields larger ids, which are shown as boxes."""

    stop_token_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode(errors="replace"))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Each message is a line."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant:")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of bytes."""
        spelled = [bytes([i]) if i < 256 else "□".encode() for i in token_ids]
        return b"".join(spelled).decode(errors="replace")


class HubTokenizer:
    """The tokenizer of a checkpoint, with its chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stop_token_ids: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = tokenizer.backend_tokenizer
        self._inner.no_truncation()  # a prompt is never cut or filled up silently
        self._inner.no_padding()
        eos = tokenizer.eos_token_id
        self.stop_token_ids = stop_token_ids or frozenset([eos] if isinstance(eos, int) else [])
        added_tokens = tokenizer.added_tokens_decoder.items()
        special_tokens = {str(token): i for i, token in added_tokens if token.special}
        self.special_tokens: Mapping[str, int] = special_tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The tokens of a text. Other threads run meanwhile, unlike in `encode` of tokenizers."""
        text = text.encode(errors="replace").decode()  # half a surrogate pair is no text
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that the chat template makes. Raises what the template raises."""
        text = self._tokenizer.apply_chat_template(
            list(map(dict, messages)), tokenize=False, add_generation_prompt=True
        )
        assert isinstance(text, str)
        return self.encode(text, add_special_tokens=False)  # a template writes BOS itself

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens. Special tokens have none."""
        return self._inner.decode(token_ids)


def load_tokenizer(name: str | Path) -> HubTokenizer:
    """The tokenizer of a checkpoint. Raises as `AutoTokenizer.from_pretrained` of transformers."""
    from transformers import AutoTokenizer

    name = find(name)
    if is_gguf(name):
        return HubTokenizer(*make_tokenizer(read_gguf(name)))
    stops = generation_config(name).eos_token_id
    stops = () if stops is None else stops
    stop_token_ids = frozenset([stops] if isinstance(stops, int) else stops)
    file = Path(name, "tokenizer.model")
    if file.is_file() and not file.with_name("tokenizer.json").exists():
        return HubTokenizer(_load_llama3(file), stop_token_ids)
    return HubTokenizer(AutoTokenizer.from_pretrained(name), stop_token_ids)


def _load_llama3(path: Path) -> PreTrainedTokenizerFast:
    """LLaMA 3's own tokenizer.model, a list of byte-pair ranks as tiktoken reads it.

    Raises ValueError for a file of another kind: put the checkpoint's tokenizer.json beside it."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    reserved = [f"reserved_special_token_{i}" for i in range(251)]
    names = ["begin_of_text", "end_of_text", *reserved[:4], "start_header_id", "end_header_id"]
    names += [reserved[4], "eot_id", *reserved[5:]]
    specials = [f"<|{name}|>" for name in names]
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", "")  # a copy would outlive a change of the file
    return PreTrainedTokenizerFast(
        tokenizer_object=TikTokenConverter(str(path), extra_special_tokens=specials).converted(),
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        add_bos_token=True,
    )


def generation_config(name: str | Path) -> GenerationConfig:
    """What a checkpoint's publisher says of stop tokens and sampling, maybe nothing.

    As in transformers it stands in generation_config.json, or else in config.json."""
    from transformers import GenerationConfig

    for file in ("generation_config.json", "config.json"):
        with suppress(OSError, TypeError):  # there is no such file; the latter for config.json
            # do_sample: else a warning says that a temperature may be ignored
            return GenerationConfig.from_pretrained(find(name), file, do_sample=True)
    return GenerationConfig()
