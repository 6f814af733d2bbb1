"""Firefox, with the methods of playwright's browsers and pages that the tests of the page need.

Playwright drives only a Firefox of its own. Any Firefox can be driven by WebDriver BiDi, JSON
through a WebSocket: https://w3c.github.io/webdriver-bidi/."""

import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

FIREFOX = shutil.which("firefox") or shutil.which("firefox-esr")
CONTROL = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
KEYS = {"Enter": "\ue007", "ArrowLeft": "\ue012"}


@contextmanager
def running(folder):
    """A Firefox with an empty profile in `folder`, which has a method `new_page`."""
    from websockets.sync.client import connect

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
            connection = Connection(socket)
            yield SimpleNamespace(new_page=lambda **options: Tab(connection, **options))
    finally:
        process.kill()
        process.communicate()


class Connection:
    """Sends commands; `log_error` is called with each error that a page logs."""

    def __init__(self, socket):
        self.socket = socket
        self.numbers = count()
        self.log_error = print
        self.command("session.new", capabilities={})
        self.command("session.subscribe", events=["log.entryAdded"])

    def command(self, method, **params):
        """Send a command and wait for its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == number:
                assert message["type"] == "success", message
                return message["result"]
            if message.get("method") == "log.entryAdded" and message["params"]["level"] == "error":
                self.log_error(message["params"]["text"])


class Tab:
    """A tab in a window with the focus and a storage of its own. It is its own keyboard."""

    def __init__(self, connection, viewport, **_):
        self.connection = connection
        self.keyboard = self
        user = connection.command("browser.createUserContext")
        self.id = connection.command("browsingContext.create", type="window", **user)["context"]
        self.command("browsingContext.setViewport", viewport=viewport)

    def command(self, method, **params):
        return self.connection.command(method, context=self.id, **params)

    def on(self, event, handle):
        if event == "pageerror":  # which here are those of the console, too
            self.connection.log_error = handle

    def goto(self, address):
        self.command("browsingContext.navigate", url=address, wait="complete")

    def close(self):
        self.command("browsingContext.close")

    def evaluate(self, expression, argument=None):
        """The value of a JavaScript expression, or of the function that it is, as JSON."""
        code = f"""(async () => {{
            let value = ({expression});
            if (typeof value === "function") value = value({json.dumps(argument)});
            return JSON.stringify(await value ?? null);
        }})()"""
        target = {"context": self.id}
        ended = self.connection.command(
            "script.evaluate", expression=code, target=target, awaitPromise=True
        )
        assert ended["type"] == "success", ended["exceptionDetails"]["text"]
        return json.loads(ended["result"]["value"])

    def wait_for_function(self, expression, timeout=30_000):
        """Wait until the expression is true, for so many milliseconds at most."""
        end = time.monotonic() + timeout / 1000
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def on_element(self, selector, code):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).{code}")

    def click(self, selector):
        self.on_element(selector, "click()")

    def text_content(self, selector):
        return self.on_element(selector, "textContent")

    def set_value(self, selector, text):
        """Let a field have this text, as if it had been typed or chosen."""
        self.on_element(selector, f"value = {json.dumps(text)}")
        self.on_element(selector, "dispatchEvent(new Event('input', {bubbles: true}))")

    fill = select_option = set_value

    def press(self, key):
        """Press and release a key: a character, or one of KEYS."""
        value = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self.command("input.performActions", actions=[keyboard])
