"""Programming prompts: the head of a Python function with its docstring, as people ask a model to complete it.

Two sources: functions of the standard library and of installed packages under permissive licences, and functions put
together here from small steps, whose examples are computed. No test set is read.
"""

import ast
import importlib.util
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from recipe import WORDS

# PSF (standard library); BSD: numpy, scipy, sympy, networkx, torch; MIT: rich; Apache: transformers.
PACKAGES = ["numpy", "scipy", "sympy", "networkx", "torch", "transformers", "rich"]
HEADER = "Complete this Python function:\n\n"
LONGEST_DOCSTRING = 400


def source_files() -> Iterator[Path]:
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    for package in PACKAGES:
        found = importlib.util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            roots.append(Path(found.submodule_search_locations[0]))
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if "site-packages" not in path.relative_to(root).parts:
                yield path


def head_of(function: ast.FunctionDef) -> str | None:
    """Signature and docstring of a function, or nothing where they are not worth a prompt."""
    docstring = ast.get_docstring(function)
    if docstring is None or len(docstring) < 40 or function.name.startswith(("_", "test")):
        return None
    if len(function.args.args) > 4 or function.args.kwonlyargs:
        return None
    text = docstring[:LONGEST_DOCSTRING]
    if len(docstring) > LONGEST_DOCSTRING:
        text = text[: max(text.rfind("\n\n"), text.rfind(". ") + 1)]
    if len(text) < 40 or '"""' in text:
        return None
    arguments = function.args
    arguments.args = [a for a in arguments.args if a.arg not in ("self", "cls")]
    if len(arguments.defaults) > len(arguments.args) + len(arguments.posonlyargs):
        return None
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"def {function.name}({ast.unparse(arguments)}){returns}:\n" + textwrap.indent(f'"""{text}\n"""', "    ")


def library_prompts() -> list[str]:
    """One prompt for each documented function with code of its own."""
    prompts = set()
    for path in source_files():
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) >= 2 and "test" not in path.parts:
                head = head_of(node)
                if head is not None and len(head) < 600:
                    prompts.add(f"{HEADER}{head}\n")
    return sorted(prompts)


def sampled_openings(source: random.Random) -> str:
    """The beginning of a prompt that the target is to finish writing itself."""
    verb = source.choice(WORDS["verbs"])
    noun = source.choice(WORDS["nouns"])
    imports = source.choice(["", "", "from typing import List\n\n\n", "from typing import List, Tuple\n\n\n", "\n\n"])
    return f"{HEADER}{imports}def {verb}_{noun}("
