"""What bench.py and sample.py share: options that show their defaults, and errors that are one line long."""

import argparse
import os
import sys

import torch


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default, in words where the value itself says nothing."""

    def add(self, option, help, default=None, shown=None, **more):
        """Add an option; `shown` stands for `default` in the help."""
        self.add_argument(option, default=default, help=f"{help} (default: {shown or default})", **more)


def find_device(name):
    """The torch.device of that name. Raises ValueError if it makes no sense or is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch {torch.__version__} sees no CUDA device, use --device cpu")
    return device


def run(main):
    """Call main(). What a user can cause ends with a line and an exit status, not with a traceback."""
    try:
        main()
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader, `head` say, has gone; do not fail again when Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        raise SystemExit(f"error: {error}") from error
