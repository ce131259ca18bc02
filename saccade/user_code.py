"""Imports Python files of the user: reward functions, environments, rows, algorithms, encoders.

user_symbol("my_loss.py:clipped", "algorithm.policy_loss")
"""

import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from saccade.errors import ConfigError, SaccadeError


def user_module(path: str | Path) -> ModuleType:
    """Import a file; its exceptions propagate. It can import other files of its folder."""
    path = Path(path).resolve()
    # A unique module name: it must not clash with another file of that name or with a library.
    spec = spec_from_file_location(f"saccade_own_{path.stem}_{abs(hash(str(path)))}", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look up their module there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def user_symbol(name: str, option: str) -> Any:
    """Import the function or class that the user names as file.py:symbol; error messages begin with `option`."""
    path, _, symbol = name.rpartition(":")
    if not (path.endswith(".py") and Path(path).is_file()):
        helps = f"write file.py:name (looked in {Path.cwd()})"
        raise ConfigError(f"{option}: {path or name} does not exist or is no .py file; {helps}")
    try:
        module = user_module(path)
    except SaccadeError:
        raise
    except Exception as error:
        raise ConfigError(f"{option}: {path} raised {raised_at(error, path)}") from error
    found = getattr(module, symbol, None)
    if not callable(found):
        there = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
        raise ConfigError(f"{option}: no function {symbol!r} in {path}; there is {', '.join(there) or 'none'}")
    return found


def raised_at(error: BaseException, path: str | Path | None = None) -> str:
    """Returns the exception in one line, with the last line of the user's file in its traceback (without `path`, the
    last line of any file).
    """
    file = None if path is None else str(Path(path).resolve())
    message, frames = str(error), traceback.extract_tb(error.__traceback__)
    places = [(f.filename, f.lineno) for f in frames if file in (None, f.filename)]
    if isinstance(error, SyntaxError) and error.filename:
        message, places = error.msg, [(error.filename, error.lineno)]
    where = "".join(f" ({Path(name).name}:{line})" for name, line in places[-1:])
    return " ".join(f"{type(error).__name__}: {message}".split()).removesuffix(":") + where
