"""The command line: parse, load and check the recipe, and only then import what is heavy.

Exit codes: 0 done; 2 refused before anything heavy started; 1 failed while running; 130 and 143 interrupted.
stdout carries results only. With --json its last line is exactly one JSON object; everything else goes to stderr.
"""

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from plimsoll.cluster.engine_environment import engine_environment
from plimsoll.cluster.signals import Interrupted
from plimsoll.config.checks import check_eval, check_sft, check_train
from plimsoll.config.describe import describe_keys
from plimsoll.config.files import check_files
from plimsoll.config.load import load_recipe
from plimsoll.config.recipe import Recipe
from plimsoll.errors import PlimsollError, RecipeError, RefusedError, RunFolderError
from plimsoll.memory.allocator import environment
from plimsoll.observe.run_folder import RunFolder
from plimsoll.reward.resolve import check_function

INTERRUPTED = 130
"""Exit code of Ctrl-C."""


def _help_of_keys() -> str:
    paragraphs = [
        "Keys of a recipe; each can be given as an argument, section.key=value.",
        *describe_keys().split("\n\n"),
    ]
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs)  # \b: a paragraph that is not re-wrapped


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for language models: a YAML recipe in, a run folder out.",
)

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Settings that win over the recipe.", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the run's newest complete checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete what the run folder holds, then start.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line of stdout.")]


@app.command(epilog=_help_of_keys())
def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train by reinforcement learning."""
    loaded = _load_training("train", check_train, recipe, overrides or [], resume=resume, overwrite=overwrite)
    from plimsoll.train import run

    summary = run(loaded, resume=resume, overwrite=overwrite)
    _finish(summary.as_json(), as_json=as_json)


@app.command(epilog=_help_of_keys())
def sft(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train on given responses (supervised fine-tuning)."""
    loaded = _load_training("sft", check_sft, recipe, overrides or [], resume=resume, overwrite=overwrite)
    from plimsoll.sft import run

    summary = run(loaded, resume=resume, overwrite=overwrite)
    _finish(summary.as_json(), as_json=as_json)


def _load_training(
    command: Literal["train", "sft"],
    check: Callable[[Recipe], tuple[str, ...]],
    path: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    overwrite: bool,
) -> Recipe:
    """A recipe with nothing left to refuse but the contents of data and model."""
    if resume and overwrite:
        raise RunFolderError("--resume goes on with the run and --overwrite deletes it: give one of the two")
    recipe = load_recipe(path, overrides)
    for note in check(recipe):
        _say(note)
    RunFolder.check(Path(recipe.run_root), recipe.name, resume=resume, overwrite=overwrite)
    if resume:
        RunFolder.check_resumable(recipe)
    check_files(recipe, path, command=command, resume=resume)
    if command == "train" or recipe.data.eval is not None:
        check_function(recipe.reward)
    _prepare_environment(recipe.rollout.engine)
    return recipe


@app.command(name="eval")
def evaluate(
    target: Annotated[
        Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder, a Hugging Face folder or a .gguf file.")
    ],
    overrides: Overrides = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="RECIPE", help="The recipe. Default: the run's own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure accuracy and pass@k on held-out rows."""
    if not target.is_dir() and not (target.suffix == ".gguf" and target.is_file()):
        raise RefusedError(f"{target} is not a folder: name a run folder, a Hugging Face folder or a .gguf file")
    path = _recipe_of(target) if recipe is None else recipe
    loaded = load_recipe(path, overrides or [])
    for note in check_eval(loaded):
        _say(note)
    check_files(loaded, path, command="eval")
    check_function(loaded.reward)
    _prepare_environment()
    from plimsoll.evaluate import run

    _finish(run(target, loaded).as_json(), as_json=as_json)


def _recipe_of(target: Path) -> Path:
    """The recipe.json of a run, also when one of its checkpoints/step_N is named."""
    for folder in (target, target.resolve().parent.parent):
        if (folder / "recipe.json").is_file():
            return folder / "recipe.json"
    raise RecipeError(
        f"{target} is no run folder (it holds no recipe.json), so what to evaluate on is not known: "
        "give --recipe RECIPE, a recipe with `data.eval`"
    )


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_WEIGHTS", help="A run folder, a .gguf file, or a model's folder with pytorch_model.bin."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; it must not hold anything.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint. Default: the newest complete one.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16, float16 or float64. Default: bfloat16 for a GGUF file and for a run that computed "
            "in it, float32 for other runs, and for pytorch_model.bin what is in it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint, a GGUF file or pytorch_model.bin as a Hugging Face folder."""
    if not source.is_dir() and source.suffix != ".gguf":
        raise RefusedError(f"{source} is not a folder and not a .gguf file: name a run folder or a .gguf file")
    _prepare_environment()
    from plimsoll.export import run

    _finish(run(source, step, out, dtype).as_json(), as_json=as_json)


@app.command(epilog=_help_of_keys())
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    sft: Annotated[
        bool, typer.Option("--sft", help="Plan supervised fine-tuning. Default where the file's name says sft.")
    ] = False,
    curve: Annotated[bool, typer.Option("--curve", help="KV cache against bytes moved in a step.")] = False,
    from_verl: Annotated[
        Path | None,
        typer.Option(metavar="SCRIPT", help="A launch script of verl, or a file of its overrides, in RECIPE's place."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the memory of every phase before the run: no GPU, no weights and no data are needed.

    Exit code 0: it fits; 2: it does not, and the answer names what would help.
    """
    if from_verl is not None:
        if sft or curve:
            raise RefusedError("--sft and --curve are for a recipe: save the one that --from-verl prints and plan it")
        from plimsoll.migrate.command import run as migrate

        # What looks like the recipe is the first setting there.
        settings = [str(recipe)] if recipe is not None else []
        raise typer.Exit(migrate(from_verl, [*settings, *(overrides or [])], as_json=as_json))
    if recipe is None:
        raise RefusedError("name a recipe, or a launch script of verl with --from-verl SCRIPT")
    from plimsoll.memory.plan.command import run

    raise typer.Exit(run(recipe, overrides or [], sft=sft, as_json=as_json, curve=curve))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Run folders, also of runs that go on.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write. Default: RUN/report.html; report.html here for several runs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report page of one run, or of several side by side."""
    from plimsoll.observe.report.page import default_out, write_report

    path = default_out(runs) if out is None else out
    reports = write_report(runs, path)
    for found in reports:
        for note in found.notes:
            _say(f"{found.path}: {note}")
    if as_json:
        _finish({"report": str(path), "runs": [found.brief() for found in reports]}, as_json=True)
    _finish({"report": path, "runs": len(reports)}, as_json=False)


def _prepare_environment(engine: str = "native") -> None:
    """Variables that libraries read once, when they are imported. `engine`: one that runs in this process."""
    os.environ.update(environment("trainer"))
    os.environ.update(engine_environment(engine))
    # The tokenizer's threads and the forks of the scoring pool do not go together; it warns on every fork otherwise.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _finish(values: Mapping[str, Any], *, as_json: bool) -> NoReturn:
    if as_json:
        line = json.dumps(values, allow_nan=False)
    else:
        line = "  ".join(f"{name}={_readable(value)}" for name, value in values.items())
    sys.stderr.flush()
    print(line, flush=True)
    raise typer.Exit


def _readable(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _say(message: str) -> None:
    for line in message.splitlines():
        print(f"plimsoll: {line}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. What a user can mend is said one cause a line, with no traceback."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="plimsoll")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Interrupted as interrupted:
        _say(str(interrupted))
        return interrupted.exit_code
    except RefusedError as error:
        for cause in error.causes:
            _say(cause)
        return error.exit_code
    except PlimsollError as error:
        _say(str(error))
        for note in vars(error).get("__notes__", ()):  # the table of who holds what, where memory was the cause
            _say(note)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
        else:
            _say(
                f"the disk is full: {error}. Complete checkpoints are untouched: free some space and go on with "
                "--resume, or set run_root to a larger disk"
            )
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0
