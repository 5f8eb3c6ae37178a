"""The rules of the house that a machine can check, read from the source without importing it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from plimsoll.config.schema import leaves, sections

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "plimsoll"

VOCABULARY = {"types", "errors", "config", "jsonl", "__version__"}
"""What everybody may import."""

MAY_IMPORT: dict[str, set[str]] = {
    # Stages, in the order of the data. They do not know one another; `update` is made of the parts below it.
    "data": set(),
    "rollout": {"plane", "memory.resident", "memory.names"},  # an engine says what it holds
    "reward": set(),
    "advantage": set(),
    "batch": set(),
    "loss": set(),
    "update": {"loss", "advantage", "model", "parallel", "plane", "weights", "memory.resident", "memory.names"},
    "sync": {"model", "parallel", "weights", "memory.resident", "memory.names"},
    "memory": {"model.sizes", "weights.limits"},  # the plan is made of sizes alone
    "checkpoint": {"weights"},
    "observe": set(),
    # What stages stand on.
    "config": set(),
    "model": {"loss", "weights"},  # building on the meta device asks the checkpoint whether its embeddings are tied
    "parallel": {"model"},
    "weights": set(),
    "cluster": {"memory.allocator"},
    "plane": set(),
    "migrate": {"memory.plan", "model.sizes"},  # compares another framework's way with our plan
    # The command line sees what it needs before anything heavy is imported; the loops are imported inside commands.
    "cli": {
        "cluster.engine_environment",
        "cluster.signals",
        "migrate",
        "memory.allocator",
        "memory.plan.command",
        "observe.run_folder",
        "observe.report",
        "reward.resolve",
        "train",
        "sft",
        "evaluate",
        "export",
    },
}
"""Folder → what it may import of the package besides itself and the vocabulary; a dot narrows to one file."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("cluster/", "plane/ray.py"),
    "vllm": ("rollout/vllm.py",),
    "sglang": ("rollout/sglang.py",),
    "transfer_queue": ("plane/",),
    "typer": ("cli.py",),
    "pebble": ("reward/",),
    "wandb": ("observe/sinks/wandb.py",),
    "tensorboard": ("observe/sinks/tensorboard.py",),
    "torch.utils.tensorboard": ("observe/sinks/tensorboard.py",),
}
"""Library → files and folders of the package that may import it."""

NO_TORCH = (
    "config/",
    "reward/",
    "batch/",
    "observe/run_folder.py",
    "observe/report/",
    "data/order.py",
    "memory/allocator.py",
    "memory/names.py",
    "memory/phases.py",
    "memory/schedule.py",
    "memory/plan/",
    "model/size",
    "weights/limits.py",
    "migrate/",
    "cli.py",
)
"""Imported before torch, or in processes that must start fast."""

MEMORY_NAMES = {
    "empty_cache",
    "pin_memory",
    "is_pinned",
    "memory_snapshot",
    "cudaHostRegister",
    "_set_allocator_settings",
    "_record_memory_history",
    "_dump_snapshot",
}
"""Names that move bytes or set the allocator."""

MEMORY_TEXT = re.compile(r"PYTORCH_(CUDA_)?ALLOC_CONF|expandable_segments")

FILE_LINES, FUNCTION_LINES, TEST_FUNCTION_LINES = 400, 60, 100


@cache
def sources() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def here(path: Path) -> str:
    """Path inside the package, with slashes."""
    return path.relative_to(PACKAGE).as_posix()


def imports(path: Path, *, only_at_import: bool = False) -> Iterator[str]:
    """Dotted names of what a file imports, inside functions too unless told otherwise."""
    if only_at_import:
        nodes: Iterator[ast.AST] = iter(tree(path).body)
    else:
        nodes = ast.walk(tree(path))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{here(path)} line {node.lineno}: relative import"
            assert node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, allowed: str) -> bool:
    """`memory.resident.Resident` is within `memory.resident` and `memory`."""
    return name == allowed or name.startswith(f"{allowed}.")


def forbidden_imports(owner: str, names: Iterator[str]) -> list[str]:
    """Imports of the package that MAY_IMPORT does not list for `owner`."""
    allowed = MAY_IMPORT[owner] | VOCABULARY | {owner}
    ours = [name.removeprefix("plimsoll.") for name in names if name.startswith("plimsoll.")]
    return [name for name in ours if not any(is_within(name, entry) for entry in allowed)]


@pytest.mark.parametrize("owner", list(MAY_IMPORT))
def test_stages_do_not_import_one_another(owner: str) -> None:
    files = [path for path in sources() if here(path).split("/")[0].removesuffix(".py") == owner]
    assert files or owner == "weights"
    found = {here(path): forbidden_imports(owner, imports(path)) for path in files}
    assert {path: names for path, names in found.items() if names} == {}


def test_every_folder_has_a_row_in_the_table_of_imports() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(MAY_IMPORT)


def test_the_table_of_imports_catches_a_stage_that_reaches_into_another() -> None:
    assert forbidden_imports("loss", iter(["plimsoll.rollout.native.NativeEngine"])) == ["rollout.native.NativeEngine"]
    assert forbidden_imports("update", iter(["plimsoll.memory.ledger.Ledger"])) == ["memory.ledger.Ledger"]
    assert forbidden_imports("update", iter(["plimsoll.memory.resident.Resident", "torch.nn"])) == []


@pytest.mark.parametrize("library", list(ONLY_IN))
def test_libraries_stay_behind_their_fence(library: str) -> None:
    outside = [
        here(path)
        for path in sources()
        if not here(path).startswith(ONLY_IN[library]) and any(is_within(name, library) for name in imports(path))
    ]
    assert outside == []


def test_what_runs_before_torch_does_not_import_it() -> None:
    heavy = ("torch", "transformers", "safetensors.torch", "tokenizers", "datasets")
    found = [
        (here(path), name)
        for path in sources()
        if here(path).startswith(NO_TORCH)
        for name in imports(path, only_at_import=True)
        if any(is_within(name, library) for library in heavy)
    ]
    assert found == []


def test_only_memory_and_weights_touch_the_allocator_and_pinned_memory() -> None:
    found: list[str] = []
    for path in sources():
        if here(path).startswith(("memory/", "weights/")):
            continue
        for node in ast.walk(tree(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else None
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if name in MEMORY_NAMES or MEMORY_TEXT.search(text):
                found.append(f"{here(path)}:{getattr(node, 'lineno', '?')}")
    assert found == []


def test_the_environment_is_read_in_few_places() -> None:
    """A variable of the environment is no argument of a function."""
    may = ("cli.py", "memory/allocator.py", "cluster/", "parallel/mesh.py", "reward/", "observe/")
    found = {
        f"{here(path)}:{node.lineno}"
        for path in sources()
        if not here(path).startswith(may)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert found == set()


def test_no_hidden_attributes_and_no_bare_except() -> None:
    found: list[str] = []
    for path in sources():
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                found.append(f"{here(path)}:{node.lineno} {node.func.id}")
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{here(path)}:{node.lineno} bare except")
    assert found == []


def test_dataclasses_of_the_vocabulary_are_frozen_with_slots_and_keywords() -> None:
    loose: list[str] = []
    for node in ast.walk(tree(PACKAGE / "types.py")):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                options = {key.arg for key in decorator.keywords} if isinstance(decorator, ast.Call) else set()
                if not {"slots", "kw_only", "frozen"} <= options:
                    loose.append(node.name)
    assert loose == []


def python_files() -> list[Path]:
    """Every Python file of the project that we write."""
    folders = ("src", "tests", "benchmarks", "tools")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()
    }
    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES} == {}


def test_functions_are_short() -> None:
    long: list[str] = []
    for path in python_files():
        limit = FUNCTION_LINES if PACKAGE in path.parents else TEST_FUNCTION_LINES
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def last_name(node: ast.AST) -> str:
    """`recipe.train` and `train` are both called "train"; "" for what has no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def names_of_section(root: ast.AST, section: str) -> set[str]:
    """What a section is called in a piece of code: its own name, names annotated with its class or assigned from it."""
    kind = sections()[section].__name__
    names = {section.rpartition(".")[2] or "recipe"}
    for node in ast.walk(root):
        if isinstance(node, ast.arg) and node.annotation is not None and last_name(node.annotation) == kind:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and last_name(node.annotation) == kind:
            names.add(last_name(node.target))
    for node in ast.walk(root):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            names |= {last_name(to) for to, source in pairs if last_name(source) in names}
    return names - {""}


def leaves_read(root: ast.AST) -> set[str]:
    """Keys of the schema that a piece of code reads as `section.leaf`."""
    reads = {(last_name(node.value), node.attr) for node in ast.walk(root) if isinstance(node, ast.Attribute)}
    wanted = {name for _, name in reads}
    read: set[str] = set()
    for section in sections():
        inside = [leaf for leaf in leaves().values() if leaf.section == section and leaf.name in wanted]
        if inside:
            names = names_of_section(root, section)
            read |= {leaf.key for leaf in inside if any((name, leaf.name) in reads for name in names)}
    return read


def test_every_leaf_of_the_schema_is_read_outside_of_the_schema() -> None:
    """A key that nothing reads would be accepted in silence. What `checks.py` refuses as not built counts as read; a
    rule that only compares keys does not."""
    code: list[ast.AST] = [tree(path) for path in sources() if not here(path).startswith("config/")]
    checks = tree(PACKAGE / "config" / "checks.py")
    code += [node for node in checks.body if isinstance(node, ast.FunctionDef) and node.name == "_not_built"]
    read = {key for root in code for key in leaves_read(root)} | {"algorithm.name"}  # read where presets are merged
    assert [key for key in leaves() if key not in read] == []


def reading_order() -> list[str]:
    """The numbered files of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Reading order")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, flags=re.MULTILINE)


def test_the_reading_order_names_files_that_exist_and_passes_through_every_folder() -> None:
    listed = reading_order()
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    assert len(set(listed)) == len(listed)
    folders = {path.parent for path in sources() if path.name != "__init__.py"} - {PACKAGE}
    top = {folder.relative_to(PACKAGE).parts[0] for folder in folders}
    assert [name for name in sorted(top) if not any(item.startswith(f"src/plimsoll/{name}/") for item in listed)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_benchmarks_offer_their_result_as_json(path: Path) -> None:
    words = {node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)}
    assert "--json" in words
    assert any(name in ("json", "json.dumps") for name in imports(path))
