"""An action on a module that is not imported yet runs once, right after its import, and not before."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ddtree.after_import import after_import


def test_an_imported_module_is_acted_on_now() -> None:
    seen: list[str] = []
    after_import("json", lambda module: seen.append(module.__name__))
    assert seen == ["json"]


def test_a_later_import_is_acted_on_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[int] = []
    finders = list(sys.meta_path)
    after_import("imported_later", lambda module: seen.append(module.value))
    assert not seen
    module = importlib.import_module("imported_later")
    assert seen == [1]
    assert sys.meta_path == finders
    importlib.reload(module)
    assert seen == [1]
    del sys.modules["imported_later"]


def test_pipelines_take_drafters_whatever_is_imported_first() -> None:
    code = "from transformers.pipelines import base; assert base.load_assistant_model.__wrapped__"
    for first, second in (("import hf_ddtree", code), (code.split(";")[0], f"import hf_ddtree; {code}")):
        subprocess.run([sys.executable, "-c", f"{first}\n{second}"], check=True, timeout=300)
