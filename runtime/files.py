"""A file that is written is whole, or it stays as it was. Plain Python."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(file: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside the file, with the same suffix. What is written there becomes the file at the
    end. If anything raises, the file stays as it was. A pipe or a device is its own path."""
    path = Path(file)
    if path.exists() and not path.is_file() or str(file).startswith("/dev/"):
        yield path
        return
    path = path.resolve()  # a link stays one
    part = path.with_name(f"{path.stem[:200]}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
