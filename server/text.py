"""From messages to a prompt, and from tokens to text that is certain: whole characters, and no
beginning of a stop string. Read first: pretrained/tokenizers.py."""

from functools import partial


def load_chat(directory):
    """A function from messages, [{"role", "content", ...}], to the prompt that a checkpoint's chat
    template makes of them; it raises what the template raises. Of None: a line for each."""
    if directory is None:
        line = "{role}: {content}\n".format_map
        return lambda messages: "".join(map(line, messages)) + "assistant:"
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast.from_pretrained(directory)
    return partial(inner.apply_chat_template, tokenize=False, add_generation_prompt=True)


class Writer:
    """Writes the text of a request from a TextStream, up to the first of the strings `stops`."""

    def __init__(self, stream, stops):
        self.stream, self.stops = stream, stops
        self.held, self.length = "", 0  # text that is not certain; characters, with that

    def push(self, event):
        """(text, finish_reason) of an engine.Event: what is certain with it, and "stop" also for a
        stop string. A stop token is no part of the text."""
        reason = event.finish_reason
        text = "" if reason == "stop" else self.stream.push(event.token)
        text += self.stream.flush() if reason else ""
        self.held, self.length = self.held + text, self.length + len(text)
        if found := [i for stop in self.stops if (i := self.held.find(stop)) >= 0]:
            return self.held[: min(found)], "stop"
        certain = len(self.held)
        if not reason:  # what may be the beginning of a stop string waits
            begins = lambda i: any(stop.startswith(self.held[i:]) for stop in self.stops)
            certain = next(filter(begins, range(certain)), certain)
        text, self.held = self.held[:certain], self.held[certain:]
        return text, reason
