"""The model and the engine that a command line names: an option is a field, its docstring the help.

Imports no torch, so that a help comes at once. Read next: loading.py, which loads the model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

from policies import ALL_POLICIES
from pretrained.presets import PRESETS

SMALL_PRESET = "wide-160m"  # the geometry where none is named, and no large GPU is there


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model computes, and how. None is what `loading.resolve_model` fills in.

    Raises ValueError for a preset and a model."""

    preset: Annotated[str | None, Parameter(help=f"Random weights of: {', '.join(PRESETS)}.")] = (
        None
    )
    model: str | None = None
    """A checkpoint: a directory or a name on the Hub."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... [default: a GPU, if there is one]"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """[default: the fastest; of sample.py: float32]"""
    attention: str = "auto"
    """The backend, of those in fast/."""
    seed: NonNegativeInt = 0
    """Of all that is random."""
    compile: bool = False
    """torch.compile the layers around attention."""
    tp: PositiveInt = 1
    """Processes that share each layer, by torchrun."""
    pp: PositiveInt = 1
    """Stages of a pipeline of processes, by torchrun."""
    layers: PositiveInt | None = None
    """So many, with random weights. [default: all]"""

    def __post_init__(self) -> None:
        if self.preset and self.model:
            raise ValueError("--preset and --model: a geometry and a checkpoint, give one of them")

    @property
    def name(self) -> str:
        """What the model is called: its checkpoint or its geometry."""
        return self.model or self.preset or SMALL_PRESET

    @property
    def title(self) -> str:
        """The name as headings of tables have it: a model of fewer or more layers says so."""
        return f"{self.name}, cut to --layers {self.layers}" if self.layers else self.name


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """An engine that writes text: of sample.py and of the server."""

    policy: Annotated[
        str, Parameter(help=f"One of {', '.join(ALL_POLICIES)}, or FILE.py:Class.")
    ] = "sarathi-serve"
    chunk: PositiveInt = 256
    """The chunk size and token budget, in tokens."""
    max_batch: PositiveInt = 16
    """The most requests that run at once."""
    prefix_caching: bool = False
    """Share the pages of prompts that begin alike."""


def split_names(text: str) -> list[str]:
    """The names in a text with commas, each once, in order."""
    names = [name.strip() for name in text.split(",")]
    return list(dict.fromkeys(filter(None, names)))
