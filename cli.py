"""What bench.py and sample.py share: options that show their defaults, and errors that are one line long."""

import argparse
import errno
import os
import sys

import torch


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose help ends with the default, in words where the value itself says nothing."""

    def add(self, option, help, default=None, shown=None, **more):
        """Add an option; `shown` stands for `default` in the help."""
        self.add_argument(option, default=default, help=f"{help} (default: {shown or default})", **more)


def find_device(name):
    """The torch.device of that name, a CPU or a CUDA device. Raises ValueError if it makes no sense or is not there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: must be cpu, cuda, cuda:1, ...")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    return device


def run(main):
    """Call main(). What a user can cause ends with a line and an exit status, not with a traceback."""
    sys.stdout.reconfigure(line_buffering=True)  # a pipe sees each line when it is printed
    try:
        try:
            main()
        finally:
            sys.stdout.flush()
    except (ValueError, ImportError, torch.OutOfMemoryError) as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.errno == errno.ENOSPC:  # do not fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141 if isinstance(error, BrokenPipeError) else f"error: {error}") from error
