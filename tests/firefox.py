"""A tab of Firefox, with the methods of playwright's pages that the tests of the page need.

Playwright drives only a Firefox of its own. Any Firefox can be driven by WebDriver BiDi, JSON
through a WebSocket: https://w3c.github.io/webdriver-bidi/."""

import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import count

FIREFOX = shutil.which("firefox") or shutil.which("firefox-esr")
CONTROL = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
KEYS = {"Enter": "\ue007", "ArrowLeft": "\ue012"}


@contextmanager
def running(folder, scheme):
    """A Firefox with an empty profile in `folder`, in a color scheme: a Tab."""
    from websockets.sync.client import connect

    preference = "layout.css.prefers-color-scheme.content-override"
    number = ["dark", "light"].index(scheme)
    (folder / "user.js").write_text(f'user_pref("{preference}", {number});\n')
    words = [FIREFOX, "--headless", "--no-remote", "--remote-debugging-port", "0"]
    process = subprocess.Popen(
        [*words, "--profile", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = next(filter(None, map(CONTROL.search, process.stderr)))[1]
        with connect(f"{address}/session", max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.kill()
        process.communicate()


class Tab:
    """A tab in a window of its own, which has the focus; and what it logged as `errors`."""

    def __init__(self, socket):
        self.socket = socket
        self.numbers = count()
        self.errors = []
        self.keyboard = Keyboard(self)
        self.command("session.new", capabilities={})
        self.command("session.subscribe", events=["log.entryAdded"])
        self.id = self.command("browsingContext.create", type="window")["context"]

    def command(self, method, **params):
        """Send a command and wait for its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("method") == "log.entryAdded":
                if message["params"]["level"] == "error":
                    self.errors.append(message["params"]["text"])
            elif message.get("id") == number:
                assert message["type"] == "success", message
                return message["result"]

    def set_viewport(self, width, height):
        size = {"width": width, "height": height}
        self.command("browsingContext.setViewport", context=self.id, viewport=size)

    def goto(self, address):
        self.command("browsingContext.navigate", context=self.id, url=address, wait="complete")

    def evaluate(self, expression, argument=None):
        """The value of a JavaScript expression, or of the function that it is, as JSON."""
        code = f"""(async () => {{
            let value = ({expression});
            if (typeof value === "function") value = value({json.dumps(argument)});
            return JSON.stringify(await value ?? null);
        }})()"""
        target = {"context": self.id}
        ended = self.command("script.evaluate", expression=code, target=target, awaitPromise=True)
        assert ended["type"] == "success", ended["exceptionDetails"]["text"]
        return json.loads(ended["result"]["value"])

    def wait_for_function(self, expression, timeout=30_000):
        """Wait until the expression is true, for so many milliseconds at most."""
        end = time.monotonic() + timeout / 1000
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def click(self, selector):
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def text_content(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def is_hidden(self, selector):
        return self.evaluate(f"!document.querySelector({json.dumps(selector)}).offsetParent")

    def fill(self, selector, text):
        """Let a field have this text, as if it had been typed."""
        self.evaluate(
            """([selector, text]) => {
                const field = document.querySelector(selector);
                field.value = text;
                field.dispatchEvent(new Event("input", {bubbles: true}));
            }""",
            [selector, text],
        )


class Keyboard:
    """Presses keys in a tab."""

    def __init__(self, tab):
        self.tab = tab

    def press(self, key):
        """Press and release a key: a character, or one of KEYS."""
        value = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        self.tab.command(
            "input.performActions",
            context=self.tab.id,
            actions=[{"type": "key", "id": "keyboard", "actions": actions}],
        )
