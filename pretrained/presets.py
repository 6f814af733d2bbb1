"""Geometries by name, from presets.toml: `GPTConfig.preset("llama-7b")`."""

import tomllib
from pathlib import Path

from model import GPTConfig

_FILE = Path(__file__).with_name("presets.toml")
PRESETS = {name: GPTConfig(**its) for name, its in tomllib.loads(_FILE.read_text("utf-8")).items()}
