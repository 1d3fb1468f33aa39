"""Collects the sources of a model, model.py's own, for folders that are used without deskgpt.

Imports of ours are rewritten: names that deskgpt_ops.py has come from there, other files of the checkout come along.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

from deskgpt.export import deskgpt_ops
from model import GPT

ROOT = Path(inspect.getfile(GPT)).parent
START = f"{__package__}.modeling_deskgpt"
OPS = deskgpt_ops.__name__


def sources() -> dict[str, str]:
    """Return the texts of START and of all that it needs, by their names in the folder. Raises ValueError, OSError."""
    found: dict[str, str] = {}
    modules = [START]
    while modules:
        module = modules.pop()
        if file_name(module) not in found:
            found[file_name(module)], needed = carried(module)
            modules += needed
    return found


def file_name(module: str) -> str:
    """Return the name in the folder, such as model.py or deskgpt_kernels_kv_cache.py."""
    return module.removeprefix(f"{__package__}.").replace(".", "_") + ".py"


def carried(module: str) -> tuple[str, list[str]]:
    """Return a module's text with its imports rewritten, and the local modules that they name."""
    lines = path_of(module).read_bytes().splitlines(keepends=True)
    nodes = [node for node in ast.walk(ast.parse(b"".join(lines))) if isinstance(node, ast.Import | ast.ImportFrom)]
    needed = []
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        local = local_names(node, module)
        if not local:
            continue
        needed += local
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[(node.end_lineno or 0) - 1][node.end_col_offset :]
        imports = [
            ast.unparse(ast.ImportFrom(file_name(source).removesuffix(".py"), names, level=1))
            for source, names in local.items()
        ]
        # Each on a line of its own: transformers looks for lines, and copies the files that they name.
        lines[node.lineno - 1 : node.end_lineno] = [before + ("\n" + " " * len(before)).join(imports).encode() + after]
    return b"".join(lines).decode(), needed


def local_names(node: ast.Import | ast.ImportFrom, module: str) -> dict[str, list[ast.alias]]:
    """Return the names that a module imports from files of the checkout, by the module that has them in the folder.

    Raises ValueError if they cannot leave the checkout.
    """
    found: dict[str, list[ast.alias]] = {}
    of_deskgpt = module.startswith("deskgpt.") and module != START
    for alias in node.names:
        source = alias.name if isinstance(node, ast.Import) else "." * node.level + (node.module or "")
        if not source.startswith(".") and not path_of(source).is_file() and not is_package(source):
            continue  # of Python or another project
        if source.startswith("deskgpt.") and hasattr(deskgpt_ops, alias.name):
            source = OPS
        elif isinstance(node, ast.Import) or not path_of(source).is_file() or of_deskgpt:
            raise ValueError(
                f"{path_of(module)}, line {node.lineno}: `{ast.unparse(node)}` cannot leave the checkout, because only "
                "names of single files can that need nothing else of deskgpt; write what model.py needs of it into "
                "model.py; nothing was exported"
            )
        found.setdefault(source, []).append(alias)
    return found


def path_of(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def is_package(module: str) -> bool:
    return path_of(f"{module}.__init__").is_file()
