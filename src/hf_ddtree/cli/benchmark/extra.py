"""The packages of the `bench` extra, imported where they are used."""

import importlib
from typing import Any


def needs(module: str) -> Any:
    """Imports a module of the `bench` extra.

    Raises:
        ImportError: with the way to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        # Something that the package itself lacks keeps its own message.
        if error.name not in (module, package):
            raise
        raise ImportError(f'This needs {package}, which is not installed: pip install "hf_ddtree[bench]"') from error
