"""Collects the sources of a model, model.py's own, for folders that are used without deskgpt.

Imports of ours are rewritten: names that deskgpt_ops.py has come from there, other files of the
checkout come along.
"""

import ast
from pathlib import Path

from deskgpt import deskgpt_ops
from deskgpt.errors import ROOT

WRAPPER = f"{__package__}.modeling_deskgpt"


def sources() -> dict[str, str]:
    """Return the texts of WRAPPER and of all that it needs, by files' names in the folder.

    Raises ValueError.
    """
    modules = [WRAPPER]
    texts = {}
    for module in modules:
        texts[name_of(module)] = carried(module, modules)
    # transformers 4 copies only files that the first one names.
    texts[name_of(WRAPPER)] += "".join(f"from .{name} import __name__ as _\n" for name in texts)
    return {f"{name}.py": text for name, text in texts.items()}


def name_of(module: str) -> str:
    """Return the module's name in the folder, such as model or deskgpt_kernels_loss."""
    return module.removeprefix(f"{__package__}.").replace(".", "_")


def carried(module: str, modules: list[str]) -> str:
    """Return a module's text with its imports rewritten, and add the modules of the checkout that
    they name.

    Raises ValueError for one that cannot leave the checkout.
    """
    text = file_of(module).read_text(encoding="utf-8")
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    statements = {ast.get_source_segment(text, node) or "": node for node in nodes}
    # One may be the beginning of another.
    for statement in sorted(statements, key=len, reverse=True):
        node = statements[statement]
        lines = []
        for alias in node.names:
            source = node.module if isinstance(node, ast.ImportFrom) else alias.name
            if not source or not (
                file_of(source).exists() or file_of(f"{source}.__init__").exists()
            ):
                continue  # of Python or another project
            if source.startswith("deskgpt.") and hasattr(deskgpt_ops, alias.name):
                source = deskgpt_ops.__name__
            elif isinstance(node, ast.Import) or not file_of(source).exists():
                raise ValueError(
                    f"{file_of(module)}, line {node.lineno}: `{statement}` cannot go into "
                    "an exported folder: only `from FILE import NAMES` can; nothing was "
                    "exported. Write what model.py needs of it there"
                )
            if source not in modules:
                modules.append(source)
            lines.append(ast.unparse(ast.ImportFrom(name_of(source), [alias], level=1)))
        if lines:  # each import on a line of its own, for which transformers looks
            text = text.replace(statement, ("\n" + " " * node.col_offset).join(lines))
    return text


def file_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"
